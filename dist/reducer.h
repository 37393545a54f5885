/* reducer.h - the state of a reducer, shared by the files that implement it. Private to dist. */
#ifndef LT_DIST_REDUCER_H
#define LT_DIST_REDUCER_H

#include <pthread.h>

#include "core/tensor.h"
#include "dist/filter.h"
#include "dist/tree_sum.h"
#include "dist/device_exchange.h"
#include "dist/bucket_plan.h"
#include "dist/record.h"
#include "dist/staging.h"

struct lt_reducer {
    lt_ctx *ctx;     /* kept */
    lt_group *group; /* borrowed */
    lt_reducer_config config;
    int rank, size;
    lt_bucket_plan plan;
    lt_record record; /* the step record; its parameters are in the order of plan.items */
    lt_filter filter;
    lt_device_exchange device_exchange; /* for sums on accelerators */
    lt_staging staging;     /* for gradients on an accelerator that are summed on the CPU */
    lt_tensor **sent;       /* (plan.n_items) scratch; becomes lt_packet.x */
    double share;           /* rows of this rank (or its current shard) / rows of the batch */
    double began;           /* time when the last backward began */
    int backwards;          /* backward passes in this step so far */
    int most_backwards;     /* maximum in any step so far; 0 before the first step */
    int expected_backwards; /* backward passes in each step, or 0 if not set */
    bool exchanged;         /* an exchange was started since the last optimizer step */
    bool synchronized;      /* the exchange is over and the summed gradients are in place */
    bool more;              /* gradients or parameters were added since the exchange */
    bool broken;            /* backward failed during an exchange */
    int64_t begun_step;     /* the last step whose first backward has begun */
    int64_t rows;           /* rows of the global batch; 0 if not set */
    uint32_t data;          /* see lt_reducer_set_data() */
    uint32_t *written;      /* (plan.n_arenas) version counter of each arena at the last record */
    uint32_t bn_written;    /* sum of the version counters of running statistics */
    bool frozen_recorded;   /* lt__agree_record_frozen() was called in this step */
    bool disagrees;         /* the last record shows that the ranks disagree */
    int shards, shard;      /* shards of this rank, and the current one; 0 without vranks */
    bool has_share;         /* the share of the current shard is set */
    bool summed;            /* the current shard is in the tree sums */
    lt_tree_sum *tree_sums; /* one for each arena */
    lt_tree_sum record_sum; /* tree sum of the records of the shards */
    lt_step_status step_status; /* status of the last optimizer step */
    lt_reduced_step last;
    int n_sent;           /* buckets sent in the current exchange */
    lt_storage **held;    /* (plan.n_arenas) with a delay: the memory of lt_bucket_item.held */
    pthread_mutex_t lock; /* guards fields of the plan that two threads use: see bucket_plan.h */
    pthread_cond_t ready; /* a bucket is complete, or backward has ended */
};

/* record.c: the step record. */
/* Adds the loss of a backward to the step. Ignores a loss that does not have exactly one element.
 * LT_ENOMEM, or a failure of the accelerator. */
LT_NODISCARD lt_status lt__record_add_loss(lt_record *record, lt_tensor *loss);
/* Discards the losses, before the next shard or step. */
void lt__record_discard_losses(lt_record *record);
/* Writes the record of this rank, or of its current shard. LT_ENOMEM, or a failure of the
 * accelerator. */
LT_NODISCARD lt_status lt__record_write(lt_reducer *r);
/* Sums the record over the ranks. Sets r->disagrees, or else which parameters some rank uses and
 * has added to. On the group's thread. LT_EDESYNC if the ranks have taken different steps or have
 * tails of different lengths; LT_ENUMERIC if a deferred loss is not finite; a failure of the
 * accelerator, or of the group. */
LT_NODISCARD lt_status lt__record_sum(lt_reducer *r);
/* Reads the sum into r->last and r->most_backwards. Replaces the pending batch-norm statistics of
 * the context by those over all ranks. LT_EDESYNC, also if the ranks have other weights; LT_ENOMEM;
 * or a failure of the accelerator. */
LT_NODISCARD lt_status lt__record_read(lt_reducer *r);
void lt__record_free(lt_record *record);

/* agree.c: checks of what must be the same on all ranks. */
/* Records which parameters are frozen. Called at the first backward of a step, or before its record
 * if the step has no backward. */
void lt__agree_record_frozen(lt_reducer *r);
/* *agree = a digest of what must be the same on all ranks. *writes = the number of writes to
 * parameters and running statistics since the last record, other than by optimizers. */
void lt__agree_write(lt_reducer *r, uint32_t *agree, uint32_t *writes);
/* Called after a record in which `agree` differs, to find the difference. Always fails: LT_EDESYNC
 * with the first difference, or LT_ENOMEM. A collective on the rank's thread, like
 * lt__agree_compare_weights(). */
LT_NODISCARD lt_status lt__agree_find_difference(lt_reducer *r);
/* Called after a record in which `writes` differs. LT_EDESYNC if parameter values differ as well,
 * or LT_ENOMEM. */
LT_NODISCARD lt_status lt__agree_compare_weights(lt_reducer *r);

/* delay.c: steps that apply the sums of the step before. */
/* LT_EUSAGE if a reducer of `ranks` ranks cannot have a delay. */
LT_NODISCARD lt_status lt__delay_check(const lt_ctx *ctx, const lt_reducer_config *config,
                                       int ranks);
/* Allocates memory for the sums of all items that have none yet. Frees it if there is no delay.
 * LT_ENOMEM. */
LT_NODISCARD lt_status lt__delay_prepare(lt_reducer *r);
/* Discards the sums, and frees their memory. Not while an exchange runs. */
void lt__delay_close(lt_reducer *r);
/* Waits for the sums of the step before. LT_EUSAGE if there are several optimizers; or a failure of
 * the exchange. */
LT_NODISCARD lt_status lt__delay_wait(lt_reducer *r);
/* Sums the record of this step. Then moves the gradients of this step to where they will be summed,
 * and the sums of the step before to the arenas. A failure of the exchange. */
LT_NODISCARD lt_status lt__delay_take(lt_reducer *r);

/* bucket.c: waits until bucket `index` is complete and sums the part of it that some rank uses. On
 * the group's thread. */
LT_NODISCARD lt_status lt__bucket_reduce(lt_reducer *r, int index);

#endif
