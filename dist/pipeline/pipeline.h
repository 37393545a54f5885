/* pipeline.h - runs the stage of a pipeline that this rank has. Private to dist.
 *
 * Every rank runs the whole program; autograd/stages.h says which ops run where. lt_backward() only
 * notes that the forward pass of a micro-batch is complete. The pipeline runs backward passes when
 * the schedule says so: within lt_backward(), while an op waits for values of an earlier stage, and
 * in lt__pipeline_drain().
 *
 * Values and gradients travel as messages, which never block the sender. The k-th value that a rank
 * sends to another one has the number k; its gradient returns with the same number.
 */
#ifndef LT_DIST_PIPELINE_PIPELINE_H
#define LT_DIST_PIPELINE_PIPELINE_H

#include "dist/dist.h"
#include "dist/pipeline/schedule.h"

typedef struct lt_pipeline lt_pipeline;

typedef struct lt_pipeline_config {
    lt_group *group; /* rank i is stage i; borrowed until the pipeline is freed */
    lt_schedule_kind kind;
    int lag; /* as in lt_schedule */
    /* The stage of a parameter; see lt_stages. ud is borrowed. */
    int (*stage_of)(void *ud, const char *name, const lt_tensor *x);
    void *ud;
} lt_pipeline_config;

typedef struct lt_pipeline_times { /* of this rank, in seconds since the last call */
    double backward, weights;      /* passes; the rest is the program's forward pass */
    double waited;                 /* for messages, while no pass could run */
    int64_t bytes;                 /* sent */
} lt_pipeline_times;

/* Starts a pipeline: sets the stages of ctx. All ranks must call it, before parameters are placed.
 * ctx is kept. New. NULL with LT_EUSAGE for more than LT_MAX_STAGES ranks; LT_EINVAL as for
 * lt_set_stages(); LT_ENOMEM. */
lt_pipeline *lt__pipeline_new(lt_ctx *ctx, const lt_pipeline_config *config);
/* Discards passes that are not done. NULL is allowed. */
void lt__pipeline_free(lt_pipeline *pipeline);
/* Ends the innermost scope of the context, as lt_scope_pop() does. Tensors of micro-batches whose
 * backward pass is not done live until it is. */
void lt__pipeline_pop_scope(lt_pipeline *pipeline);
/* Runs all passes that are left, so that gradients are complete. The errors of kernels and hooks;
 * LT_EPEER if another rank is lost or silent; LT_EDESYNC if ranks run different programs. */
LT_MUST lt_status lt__pipeline_drain(lt_pipeline *pipeline);
/* Number of forward passes since the last lt__pipeline_drain(). */
int lt__pipeline_forwards(const lt_pipeline *pipeline);
lt_pipeline_times lt__pipeline_times(lt_pipeline *pipeline);

#endif
