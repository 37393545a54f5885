/* schedule.h - the order of the passes of a pipeline stage. Private to dist.
 *
 * A stage runs a forward pass for each micro-batch, and a backward pass, which computes the
 * gradients of the stage's inputs and weights. It may be split ("zero bubble", arXiv:2401.10241):
 * the stage first computes the gradients of its inputs and sends them to the stage before. It
 * computes the gradients of its weights while it would otherwise wait for a message.
 *
 * lt__schedule_next() is a pure function, so the same code orders training and its simulation. The
 * passes of one kind run in the order of the micro-batches, and forward and backward passes
 * alternate independently of when messages arrive. Messages only decide when the passes for weights
 * run between them. So gradients are summed in the same order in every run.
 */
#ifndef LT_DIST_PIPELINE_SCHEDULE_H
#define LT_DIST_PIPELINE_SCHEDULE_H

#include "autograd/stages.h"
#include "dist/pipeline.h"

typedef struct lt_schedule { /* schedule of a stage in one optimizer step */
    lt_schedule_kind kind;
    int stages, stage; /* number of stages; this stage, from 0 */
    int lag;           /* additional micro-batches in flight, compared with 1F1B; at least 0 */
} lt_schedule;

typedef struct lt_stage_state {     /* numbers of micro-batches */
    int micro;                      /* all micro-batches; INT_MAX while unknown */
    int forward, backward, weights; /* passes done; weights: only if passes are split */
    int inputs, grads;              /* arrived inputs; arrived gradients of the outputs */
} lt_stage_state;

typedef enum lt_action {
    LT_FORWARD,
    LT_BACKWARD, /* includes the gradients of the weights, unless passes are split */
    LT_WEIGHTS,
    LT_WAIT, /* wait for the inputs of a forward pass, or the gradients of a backward pass */
    LT_DONE  /* all passes of the step are done */
} lt_action;

lt_action lt__schedule_next(const lt_schedule *schedule, const lt_stage_state *state);

/* The largest number of micro-batches, out of `micro`, whose forward pass is done and whose
 * backward pass is not. */
int lt__schedule_in_flight(const lt_schedule *schedule, int micro);
/* The largest number of micro-batches in memory: from the forward pass of a micro-batch until all
 * its gradients are computed. */
int lt__schedule_in_memory(const lt_schedule *schedule, int micro);

#endif
