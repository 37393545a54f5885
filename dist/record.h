/* record.h - the step record: numbers that are summed over the ranks before the buckets of a step.
 * Private to dist.
 *
 * It contains the loss, a few separate numbers for each rank, the batch-norm statistics, and for
 * each parameter one number that shows whether some rank uses it and whether some rank has added to
 * its gradient.
 */
#ifndef LT_DIST_RECORD_H
#define LT_DIST_RECORD_H

#include "dist/bn_layers.h"

typedef struct lt_record { /* all zeros: nothing written yet */
    double *data;          /* (count) */
    size_t count;
    int ranks, parameters;
    lt_bn_layers bn_layers;
    double loss;          /* loss of this rank in this step, without deferred losses */
    lt_deferred **losses; /* (n_losses) deferred losses of this step, from an accelerator */
    int n_losses, capacity;
    char where[LT_WHERE_BYTES]; /* location of the first deferred loss, for messages */
    double share;               /* weight of this rank's loss in the loss of the global batch */
    int64_t step;               /* step of this record, for messages */
} lt_record;

typedef struct lt_rank_record { /* the separate numbers of one rank */
    int rank;
    double share; /* this rank's share of the batch */
    int backwards, stop_reason;
    uint32_t steps;  /* lt_steps_digest() */
    int tail;        /* numbers in the tail of each bucket */
    uint32_t agree;  /* a digest of what must be the same on all ranks */
    uint32_t writes; /* number of writes to parameters and running statistics since the last record,
                      * other than by optimizers */
} lt_rank_record;

/* Adds the loss of a backward to the step. Ignores a loss that does not have exactly one element.
 * LT_ENOMEM, or a failure of the accelerator. */
LT_MUST lt_status lt__record_add_loss(lt_record *record, lt_tensor *loss);
/* Discards the losses, before the next shard or step. */
void lt__record_discard_losses(lt_record *record);
/* Writes the record of this rank, with no parameter in use yet. LT_ENOMEM, or a failure of the
 * accelerator. */
LT_MUST lt_status lt__record_write(lt_record *record, lt_ctx *ctx, int ranks, int parameters,
                                   const lt_rank_record *own);
/* Records that this rank has a gradient for a parameter. added: this step has added to it;
 * otherwise it is a leftover gradient. */
void lt__record_use(lt_record *record, int parameter, bool added);
/* Before the record is summed: waits for the numbers that come from an accelerator. On any thread.
 * LT_ENUMERIC if a deferred loss is not finite, or a failure of the accelerator. */
LT_MUST lt_status lt__record_collect(lt_record *record);

/* The functions below, except lt__record_free(), read the sum over the ranks. */
/* Whether some rank uses the parameter, and whether some rank has added to its gradient. */
bool lt__record_uses(const lt_record *record, int parameter);
bool lt__record_adds(const lt_record *record, int parameter);
double lt__record_loss(const lt_record *record);
/* The largest number of backwards of any rank. */
int lt__record_backwards(const lt_record *record);
/* The stop reason of the first rank that has one, or 0. */
int lt__record_stop_reason(const lt_record *record);
/* LT_EDESYNC unless all ranks of the group have taken the same steps and have tails of the same
 * length. */
LT_MUST lt_status lt__record_check(const lt_record *record, const lt_group *group);
/* Whether lt_rank_record.agree is equal on all ranks, and whether .writes is. */
bool lt__record_agrees(const lt_record *record);
bool lt__record_writes_agree(const lt_record *record);
/* Replaces the pending batch-norm statistics of ctx by those over all ranks. LT_ENOMEM, LT_EDESYNC,
 * or a failure of the accelerator. */
LT_MUST lt_status lt__record_read_bn_stats(const lt_record *record, lt_ctx *ctx);

void lt__record_free(lt_record *record);

#endif
