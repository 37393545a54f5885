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
    int fail_run;                /* status that the next run returns, once; 0: it runs */
    int fail_query;              /* status that the next query of the heuristics returns, once */
    /* No engine supports a graph whose first operation has this descriptor type, or a product with
     * this epilogue. 0: all are supported. */
    int unsupported;
    char error[160]; /* message of the last call that failed */
} stand_in;

/* What a cudnnHandle_t points to. */
struct cudnnContext {
    void *stream;
};

#endif
