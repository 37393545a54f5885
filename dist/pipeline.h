/* pipeline.h - training in a pipeline: each rank has a stage of the net. Included by dist.h.
 *
 * A job of stages * replicas ranks trains one net. Rank r is replica r % replicas of stage
 * r / replicas: it stores, updates and saves only the parameters of its stage. All ranks run the
 * whole program. An op runs on the stage that has its parameters; autograd/stages.h describes this.
 * The batch of a step is divided among the replicas, and each replica's part into micro-batches,
 * whose forward passes are called one after the other.
 *
 * lt_backward() ends the forward pass of a micro-batch, and runs the backward passes that the
 * schedule orders before the next forward pass. The others run before an optimizer step. While an
 * op waits for values of an earlier stage, only second halves of split backward passes run. Values
 * and gradients travel as messages, which do not block the sender. Results have the bits of one
 * process that accumulates the gradients of the same micro-batches.
 */
#ifndef LUATRAIN_DIST_PIPELINE_H
#define LUATRAIN_DIST_PIPELINE_H

#include "autograd/autograd.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lt_schedule_kind {
    LT_GPIPE,       /* all forward passes, then all backward passes (arXiv:1811.06965) */
    LT_1F1B,        /* forward and backward passes alternate (PipeDream-Flush, arXiv:2006.09503) */
    LT_ZERO_BUBBLE, /* as 1F1B, with split backward passes (arXiv:2401.10241) */
    LT_SCHEDULE_KINDS
} lt_schedule_kind;
/* "gpipe", "1f1b" or "zb". */
LT_API const char *lt_schedule_name(lt_schedule_kind kind);

typedef struct lt_pipeline lt_pipeline;
struct lt_group;

typedef struct lt_pipeline_config {
    int stages; /* divides the number of ranks */
    lt_schedule_kind kind;
    int lag; /* how many more micro-batches are in flight than in 1F1B, at least 0 */
    /* The stage of a parameter or buffer, from 0; see lt_stages. ud is borrowed. */
    int (*stage_of)(void *ud, const char *name, const lt_tensor *x);
    void *ud;
} lt_pipeline_config;

typedef struct lt_pipeline_times { /* of this rank, since the last call; in seconds */
    double backward, weights;      /* backward passes, and those for gradients of weights */
    double waited;                 /* for messages, while no pass could run */
    double drained;                /* in lt_pipeline_drain(), including passes and waits */
} lt_pipeline_times;

/* Starts a pipeline. A collective, before parameters are placed. ctx is kept. group is borrowed and
 * must be closed after the pipeline is freed. New. NULL with LT_EUSAGE if the ranks cannot be
 * divided into these stages, LT_EINVAL for an invalid schedule, in backward or in a dry run,
 * LT_ENOMEM, or the errors of the group. */
LT_API lt_pipeline *lt_pipeline_new(lt_ctx *ctx, struct lt_group *group,
                                    const lt_pipeline_config *config);
/* Discards passes that are not done. The parameters keep their stages. NULL is allowed. */
LT_API void lt_pipeline_free(lt_pipeline *pipeline);
LT_API int lt_pipeline_stage(const lt_pipeline *pipeline);    /* of this rank, from 0 */
LT_API int lt_pipeline_stages(const lt_pipeline *pipeline);   /* their number */
LT_API int lt_pipeline_replica(const lt_pipeline *pipeline);  /* of this rank, from 0 */
LT_API int lt_pipeline_replicas(const lt_pipeline *pipeline); /* of each stage */
/* The group of the replicas of this stage, for a reducer, which must be blocking; NULL if there is
 * only one. Borrowed until the pipeline is freed. */
LT_API struct lt_group *lt_pipeline_group(const lt_pipeline *pipeline);
/* Whether this rank counts x in a sum over the stages of its replica, so that x counts once: it has
 * x, and no earlier stage does. */
LT_API bool lt_pipeline_counts(const lt_pipeline *pipeline, const lt_tensor *x);

/* Passes from now on belong to micro-batch i, from 0, of n, which has `share` of the rows of this
 * replica: their losses are multiplied by it. Optimizer steps are LT_ACCUMULATING except for the
 * last micro-batch. Before the first call, i = 0, n = 1 and share = 1. LT_EINVAL if a number is out
 * of range; LT_EUSAGE if i = 0 and the batch before has not had all its micro-batches. */
LT_MUST lt_status lt_pipeline_set_micro_batch(lt_pipeline *pipeline, int i, int n, double share);
/* Ends the micro-batch. After the last one, i, n and share are again 0, 1 and 1, for passes that
 * belong to no batch. Between two of them, backward passes fail with LT_EUSAGE. Need not be called
 * if only passes of batches follow. */
LT_API void lt_pipeline_end_micro_batch(lt_pipeline *pipeline);
/* Ends the innermost scope of the context, as lt_scope_pop() does. But while backward passes are
 * left, its tensors live until the newest of these passes is done. */
LT_API void lt_pipeline_pop_scope(lt_pipeline *pipeline);
/* Runs all passes that are left, so that gradients are complete. The errors of kernels and hooks;
 * LT_EPEER if another rank is lost or silent; LT_EDESYNC if ranks run different programs. */
LT_MUST lt_status lt_pipeline_drain(lt_pipeline *pipeline);
/* Number of forward passes since the last drain. */
LT_API int lt_pipeline_forwards(const lt_pipeline *pipeline);
LT_API lt_pipeline_times lt_pipeline_take_times(lt_pipeline *pipeline);
/* Total bytes that this rank has sent to other stages and exchanged with the replicas of its stage.
 * See lt_group_bytes(). */
LT_API uint64_t lt_pipeline_bytes(const lt_pipeline *pipeline);

/* lt_params_sha256() over all stages. A collective of the stages. */
LT_MUST lt_status lt_pipeline_sha256(lt_pipeline *pipeline, lt_params *params, char hex[65]);
/* lt_file_save() over all stages: rank 0 writes the file, and the other ranks of its replica send
 * it their tensors, one after the other. A collective of the job, with the same names and tensors
 * on all ranks. All return when the file is complete, or has failed. Rank 0 returns the errors of
 * the file and no others, so LT_OK from rank 0 means that the file is complete. The other ranks do
 * not return errors of the file. */
LT_MUST lt_status lt_pipeline_save(lt_pipeline *pipeline, const char *path, int n,
                                   const char *const *names, lt_tensor *const *tensors, int n_meta,
                                   const char *const *meta);

#ifdef __cplusplus
}
#endif
#endif
