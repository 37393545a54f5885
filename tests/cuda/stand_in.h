/* stand_in.h - what the tests tell the stand-ins for NVIDIA's libraries, and hear from them. Each
 * library exports one such struct by the name stand_in_state. */
#ifndef TESTS_CUDA_STAND_IN_H
#define TESTS_CUDA_STAND_IN_H

#include <stdbool.h>
#include <stdint.h>

enum { STAND_IN_MODES = 3, STAND_IN_ENGINES = 4 };

typedef struct stand_in_engine { /* all of them compute the same */
    int64_t number;              /* from 1; 0: no engine */
    int note;                    /* a cudnnBackendNumericalNote_t, or -1 */
    int64_t workspace;           /* bytes, all of which it writes */
    bool fails;                  /* no plan of it can be made */
} stand_in_engine;

typedef struct stand_in {
    /* What heuristics propose, by mode: A, B, fallback. Set before plans are made. */
    stand_in_engine engines[STAND_IN_MODES][STAND_IN_ENGINES];
    int live;                  /* objects that were made and not ended */
    int asked[STAND_IN_MODES]; /* heuristics of each mode */
    int built, run;            /* plans made, jobs run */
    int version;               /* of the library; 0: its headers' */
    int fail_run;              /* the status of the next run, once; 0: it is run */
    int fail_ask;              /* likewise of the next question to heuristics */
    /* the first operation of graphs, by its descriptor's type, or an epilogue, that there is no
     * engine for; 0: none */
    int refused;
    char error[160]; /* what was wrong with the last call that failed */
} stand_in;

/* What a cudnnHandle_t points to. */
struct cudnnContext {
    void *stream;
};

#endif
