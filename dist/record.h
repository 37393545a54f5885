/* record.h - the record of a step: what each rank tells the others in front of its gradients, as
 * numbers that are summed over the ranks. Private to this room.
 *
 * It has the loss; some numbers of each rank by itself; for each parameter how many ranks use it,
 * and whether any adds to it; and the statistics of batch norms.
 */
#ifndef LT_DIST_RECORD_H
#define LT_DIST_RECORD_H

#include "dist/bn_layers.h"

typedef struct lt_record { /* zero: nothing was written */
    double *data;
    size_t count;
    int ranks, parameters;
    lt_bn_layers bn_layers;
    double loss;          /* of this rank, so far in the step; and those that are still to come */
    lt_deferred **losses;
    int n_losses, room;
    char where[LT_WHERE_BYTES]; /* the first of those was made */
    double share;         /* of this rank's loss in that of all, */
    int64_t step;         /* in this step */
} lt_record;

typedef struct lt_rank_record {   /* what a rank tells of itself */
    int rank;
    double share;         /* of the batch */
    int backwards, stop_reason;
    uint32_t steps;       /* lt_steps_digest() */
    int tail;             /* numbers that go with each bucket */
    uint32_t agree;       /* a digest of what must be the same on all ranks */
    uint32_t writes;      /* to parameters since the last record, other than by optimizers */
} lt_rank_record;

/* What a backward of this step begins with; of more elements than one it is none. */
LT_MUST lt_status lt__record_add_loss(lt_record *record, lt_tensor *loss);
/* The next part of a batch begins. */
void lt__record_forget_losses(lt_record *record);
/* That of a rank which uses no parameter so far. LT_ENOMEM. */
LT_MUST lt_status lt__record_write(lt_record *record, lt_ctx *ctx, int ranks, int parameters,
                                   const lt_rank_record *own);
/* added: in this step; else it is what earlier ones have left. */
void lt__record_use(lt_record *record, int parameter, bool added);
/* On any thread, before the record is summed: waits for what comes from an accelerator. LT_ENUMERIC
 * for a loss that is not finite. */
LT_MUST lt_status lt__record_collect(lt_record *record);

/* Once it is the sum over the ranks: */
bool lt__record_uses(const lt_record *record, int parameter);
bool lt__record_adds(const lt_record *record, int parameter);
double lt__record_loss(const lt_record *record);
/* Of the rank that has most. */
int lt__record_backwards(const lt_record *record);
/* Of the first rank that has one; or 0. */
int lt__record_stop_reason(const lt_record *record);
/* LT_EDESYNC unless all ranks have taken the same steps, and send as much with buckets. */
LT_MUST lt_status lt__record_check(const lt_record *record);
/* Whether all ranks have the same own.agree, and the same own.writes. */
bool lt__record_agrees(const lt_record *record);
bool lt__record_writes_agree(const lt_record *record);
/* The statistics that wait in ctx become those of all ranks. LT_ENOMEM or LT_EDESYNC. */
LT_MUST lt_status lt__record_read_bn_stats(const lt_record *record, lt_ctx *ctx);

void lt__record_free(lt_record *record);

#endif
