/* pipeline.h - training in a pipeline: each rank has a stage of the net. Included by dist.h.
 *
 * A job of stages * replicas ranks trains one net. Rank r is replica r % replicas of stage
 * r / replicas: it stores, updates and saves only the parameters of its stage. All ranks run the
 * whole program. An op runs on the stage that has its parameters; autograd/stages.h describes this.
 * The batch of a step is divided among the replicas, and the part of each replica is divided into
 * micro-batches. The program runs their forward passes one after the other.
 *
 * lt_backward() ends the forward pass of a micro-batch, and runs the backward passes that the
 * schedule puts before the next forward pass. The remaining backward passes run before an optimizer
 * step. While an op waits for values of an earlier stage, only second halves of split backward
 * passes run. Values and gradients travel as messages, which do not block the sender. The results
 * are bit-identical to the results of one process that accumulates the gradients of the same
 * micro-batches.
 *
 * With several replicas, a stage has a reducer for their gradients. Its exchange begins with the
 * last backward pass of the stage in a step, and the optimizer step waits for its end. Only the
 * optimizer step knows which pass is the last one, so it runs this pass.
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
    LT_ZERO_BUBBLE, /* like 1F1B, with split backward passes (arXiv:2401.10241) */
    LT_SCHEDULE_KINDS
} lt_schedule_kind;
/* "gpipe", "1f1b" or "zb". */
LT_API const char *lt_schedule_name(lt_schedule_kind kind);

typedef struct lt_pipeline lt_pipeline;
struct lt_group;

typedef struct lt_pipeline_config {
    int stages; /* number of stages; the number of ranks must be a multiple of it */
    lt_schedule_kind kind;
    int lag; /* additional micro-batches in flight, compared with 1F1B; at least 0 */
    /* The stage of a parameter or buffer, from 0; see lt_stage_hooks. ud is borrowed. */
    int (*stage_of)(void *ud, const char *name, const lt_tensor *x);
    void *ud;
} lt_pipeline_config;

typedef struct lt_pipeline_times { /* seconds of this rank */
    double backward, weights;      /* backward passes; second halves of split backward passes */
    double waited;                 /* waits for messages while no pass could run */
    double drained;                /* time in lt_pipeline_drain(), including passes and waits */
} lt_pipeline_times;

/* Starts a pipeline. A collective; call it before parameters are placed. ctx is kept. group is
 * borrowed and must be closed after the pipeline is freed. New. NULL with LT_EUSAGE if the ranks
 * cannot be divided into these stages, LT_EINVAL for an invalid schedule, in backward or in a dry
 * run, LT_ENOMEM, or the errors of the group. */
LT_API lt_pipeline *lt_pipeline_new(lt_ctx *ctx, struct lt_group *group,
                                    const lt_pipeline_config *config);
/* Frees the pipeline, and discards the passes that have not run. The parameters keep their stages.
 * NULL is allowed. */
LT_API void lt_pipeline_free(lt_pipeline *pipeline);
LT_API int lt_pipeline_stage(const lt_pipeline *pipeline);    /* this rank's stage, from 0 */
LT_API int lt_pipeline_stages(const lt_pipeline *pipeline);   /* number of stages */
LT_API int lt_pipeline_replica(const lt_pipeline *pipeline);  /* this rank's replica, from 0 */
LT_API int lt_pipeline_replicas(const lt_pipeline *pipeline); /* number of replicas of each stage */
/* The group of the replicas of this stage, for a reducer. NULL if there is only one replica.
 * Borrowed until the pipeline is freed. */
LT_API struct lt_group *lt_pipeline_group(const lt_pipeline *pipeline);
/* Whether this rank includes x in a sum over the stages, in which each tensor must count once. True
 * on the stage to which x belongs; if all stages have x, true on stage 0. */
LT_API bool lt_pipeline_owns(const lt_pipeline *pipeline, const lt_tensor *x);

/* Begins micro-batch i of n, counted from 0: the next passes belong to it. share is the fraction of
 * this replica's rows that are in the micro-batch; losses are multiplied by share. Before the last
 * micro-batch, optimizer steps are LT_ACCUMULATING. Before the first call, i, n and share are 0, 1
 * and 1. LT_EINVAL if a number is out of range; LT_EUSAGE if i = 0 and the previous batch is
 * incomplete. */
LT_MUST lt_status lt_pipeline_set_micro_batch(lt_pipeline *pipeline, int i, int n, double share);
/* Ends the micro-batch. Between two micro-batches of a batch, backward passes fail with LT_EUSAGE.
 * After the last micro-batch, i, n and share are 0, 1 and 1 again, for passes that belong to no
 * batch. The call is optional before the next lt_pipeline_set_micro_batch(). */
LT_API void lt_pipeline_end_micro_batch(lt_pipeline *pipeline);
/* Ends the innermost scope of the context, like lt_scope_pop(). If backward passes have yet to run,
 * the tensors of the scope live until the newest of these passes is done. */
LT_API void lt_pipeline_pop_scope(lt_pipeline *pipeline);
/* Runs all remaining passes, which completes the gradients. The errors of kernels and hooks;
 * LT_EPEER if another rank is lost or silent; LT_EDESYNC if ranks run different programs. */
LT_MUST lt_status lt_pipeline_drain(lt_pipeline *pipeline);
/* Number of forward passes since the last drain. */
LT_API int lt_pipeline_forwards(const lt_pipeline *pipeline);
/* Returns the times since the last call. */
LT_API lt_pipeline_times lt_pipeline_take_times(lt_pipeline *pipeline);
/* Total bytes that this rank has sent to other stages and exchanged with the replicas of its stage.
 * See lt_group_bytes(). */
LT_API uint64_t lt_pipeline_bytes(const lt_pipeline *pipeline);

/* lt_params_sha256() over all stages. A collective of the stages. */
LT_MUST lt_status lt_pipeline_sha256(lt_pipeline *pipeline, lt_params *params, char hex[65]);
/* lt_file_save() over all stages: rank 0 writes the file, and the other ranks of its replica send
 * it their tensors, one after the other. A collective of the job, with the same names and tensors
 * on all ranks. All ranks return when the file is complete, or when writing it has failed. Rank 0
 * returns only errors of the file, so LT_OK from it means that the file is complete. The other
 * ranks do not return these errors. */
LT_MUST lt_status lt_pipeline_save(lt_pipeline *pipeline, const char *path, int n,
                                   const char *const *names, lt_tensor *const *tensors, int n_meta,
                                   const char *const *meta);

#ifdef __cplusplus
}
#endif
#endif
