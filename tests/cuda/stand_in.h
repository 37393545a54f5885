/* stand_in.h - how tests control and observe the stand-ins for cuDNN and cuBLASLt. Each library
 * exports one stand_in by the name stand_in_state. */
#ifndef TESTS_CUDA_STAND_IN_H
#define TESTS_CUDA_STAND_IN_H

#include <stdbool.h>
#include <stdint.h>

enum { STAND_IN_MODES = 3, STAND_IN_ENGINES = 4 };

typedef struct stand_in_engine { /* all engines compute the same */
    int64_t number;              /* from 1; 0: no engine */
    int note;                    /* a cudnnBackendNumericalNote_t, or -1 */
    int64_t workspace;           /* bytes; the engine writes all of them */
    bool fails;                  /* no plan can be built with it */
} stand_in_engine;

typedef struct stand_in {
    /* The engines that the heuristics propose, by mode: A, B, fallback. Set before plans are
     * built. */
    stand_in_engine engines[STAND_IN_MODES][STAND_IN_ENGINES];
    int live;                    /* objects created and not destroyed */
    int queries[STAND_IN_MODES]; /* queries of the heuristics, by mode */
    int built, run;              /* plans built, plans run */
    int version;                 /* of the library; 0: that of its headers */
    int versions;                /* calls that have returned it */
    int fail_run;                /* status that the next run returns, once; 0: it runs */
    int fail_query;              /* status that the next query of the heuristics returns, once */
    int cuda; /* major version of CUDA that cuDNN is for; 0: the version of its headers */
    /* Refusals: calls number refuse_at, from 1, and the following ones, `refusals` in total, return
     * the status refuse_with. runs_only: only runs of plans and products count as calls, otherwise
     * all functions that return a status. refuse_at 0: none is refused */
    int calls, refuse_at, refusals, refuse_with;
    bool runs_only;
    /* No engine supports a graph whose first operation has this descriptor type, or a product with
     * this epilogue. 0: all are supported. */
    int unsupported;
    char error[160]; /* message of the last call that failed */
} stand_in;

/* Counts a call. Returns the status with which it is refused, or 0. */
static inline int stand_in_call(stand_in *s, bool runs)
{
    s->calls += runs || !s->runs_only;
    return s->refuse_at > 0 && s->calls >= s->refuse_at && s->calls - s->refuse_at < s->refusals &&
                   (runs || !s->runs_only)
               ? s->refuse_with
               : 0;
}

/* What a cudnnHandle_t points to. */
struct cudnnContext {
    void *stream;
};

#endif
