/* simulate.h - simulates an optimizer step of a pipeline, with the code that orders real ones.
 * Private to dist.
 */
#ifndef LT_DIST_PIPELINE_SIMULATE_H
#define LT_DIST_PIPELINE_SIMULATE_H

#include "dist/pipeline/schedule.h"
#include "dist/plan.h"

typedef struct lt_pipe_stage {       /* seconds; the passes are for one micro-batch */
    double forward, inputs, weights; /* forward pass; gradients of the inputs, and of the weights */
    double reduce; /* all-reduce of the gradients after the last pass; see lt_pipe.reduce */
    double update; /* optimizer step */
} lt_pipe_stage;

typedef struct lt_pipe {
    lt_schedule_kind kind;
    int stages, micro, lag;
    const lt_pipe_stage *stage; /* (stages) */
    /* Bytes that a micro-batch sends from stage i to stage j > i in the forward pass:
     * bytes[i * stages + j]. grads: bytes sent back in the backward pass; NULL: the same numbers.
     * (stages, stages) */
    const double *bytes;
    lt_pipe_link link;
    const double *grads;
    double limit; /* seconds; 0: no limit. The simulation may end early if the step takes longer */
    /* The seconds from the end of a stage's last pass to the end of the all-reduce of its gradients
     * over its replicas, if `together` passes for weights follow the last backward pass: the
     * all-reduce overlaps with these, or with the last backward pass if it is not split. At least
     * lt_pipe_stage.reduce, which is used if this is NULL. */
    double (*reduce)(const void *ud, int stage, int together);
    const void *ud;
} lt_pipe;

typedef struct lt_pipe_result {
    double seconds;               /* time of the step; INFINITY if the simulation has ended early */
    double busy[LT_MAX_STAGES];   /* seconds that each stage computes */
    double reduce[LT_MAX_STAGES]; /* seconds of the all-reduce after its last pass */
    int in_memory[LT_MAX_STAGES]; /* largest number of micro-batches in memory */
} lt_pipe_result;

/* One event of a simulated step: stage begins the pass of a micro-batch, from 0, at `time`. */
typedef void lt_pipe_log(void *ud, int stage, lt_action action, int micro, double time);

/* Simulates a step. Each stage sends its messages one after the other, and also receives them one
 * after the other. A message does not delay computing. log may be NULL. LT_EINVAL if a number is
 * out of range; LT_ENOMEM. */
LT_NODISCARD lt_status lt__pipe_simulate(const lt_pipe *pipe, lt_pipe_log *log, void *ud,
                                         lt_pipe_result *result);

#endif
