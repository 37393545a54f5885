/* record.c - the step record; see reducer.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dist/group.h"
#include "dist/reducer.h"

/* Layout of the record: HEAD numbers, OF_RANK for each rank, one for each parameter, and the
 * numbers of the batch-norm layers. */
enum { LOSS, HEAD };
enum { BACKWARDS, STOP, STEPS, TAIL, AGREE, WRITES, OF_RANK };

static double *of_rank(const lt_reducer *r, int rank)
{
    return r->record.data + HEAD + OF_RANK * rank;
}

static double *of_parameters(const lt_reducer *r) { return of_rank(r, r->size); }
static double *of_bn_layers(const lt_reducer *r) { return of_parameters(r) + r->record.parameters; }

lt_status lt__record_add_loss(lt_record *r, lt_tensor *loss)
{
    double value;
    if (!loss || loss->count != 1)
        return LT_OK;
    if (loss->storage->device->is_host) {
        LT_TRY(lt_item(loss, 0, &value));
        r->loss += value;
        return LT_OK;
    }
    if (r->n_losses == 0)
        lt_where(loss->ctx, r->where);
    LT_TRY(LT_RESERVE(r->losses, r->n_losses + 1, &r->capacity, "for a reducer"));
    if (!(r->losses[r->n_losses] = lt_item_deferred(loss)))
        return lt_errcode();
    r->n_losses++;
    return LT_OK;
}

void lt__record_discard_losses(lt_record *r)
{
    while (r->n_losses > 0)
        lt_deferred_free(r->losses[--r->n_losses]);
    r->loss = 0;
}

/* The number of a parameter: 1 for a leftover gradient, ADDED for one that the step has added to.
 * The sum over the ranks shows both, because there are fewer than ADDED ranks and shards. */
static const double ADDED = 1 << 20;

/* The records of the shards are summed, so the last shard writes most of the separate numbers. */
lt_status lt__record_write(lt_reducer *r)
{
    lt_record *record = &r->record;
    bool is_last = r->shard + 1 >= r->shards;
    uint32_t agree = 0, writes = 0;
    if (is_last)
        lt__agree_write(r, &agree, &writes);
    LT_TRY(lt__bn_layers_register(&record->bn_layers, r->ctx));
    record->parameters = r->plan.n_items;
    record->count = HEAD + OF_RANK * (size_t)r->size + (size_t)record->parameters +
                    lt__bn_layers_numbers(&record->bn_layers);
    LT_TRY(LT_RESIZE(record->data, record->count, "for a reducer"));
    memset(record->data, 0, record->count * sizeof *record->data);
    record->share = r->share;
    record->step = r->ctx->step + 1;
    record->data[LOSS] = r->share > 0 ? record->loss * r->share : 0;
    double *own = of_rank(r, r->rank);
    own[BACKWARDS] = r->backwards;
    own[STOP] = is_last ? lt_stop_reason(r->ctx) : 0;
    own[STEPS] = is_last ? lt_steps_digest(r->ctx) : 0;
    own[TAIL] = is_last ? r->filter.callbacks.tail : 0;
    own[AGREE] = agree;
    own[WRITES] = writes;
    for (int i = 0; i < r->plan.n_items; i++) {
        const lt_bucket_item *it = &r->plan.items[i];
        if (it->state != LT_GRAD_NONE)
            of_parameters(r)[i] = it->added || it->state == LT_GRAD_PENDING ? ADDED : 1;
    }
    return lt__bn_layers_write(&record->bn_layers, r->ctx, r->share > 0, of_bn_layers(r));
}

/* Waits for the numbers that come from an accelerator. LT_ENUMERIC if a deferred loss is not
 * finite, or a failure of the accelerator. */
static lt_status collect(lt_reducer *reducer)
{
    lt_record *r = &reducer->record;
    double loss = r->loss, value;
    for (int i = 0; i < r->n_losses; i++) {
        LT_TRY(lt_deferred_item(r->losses[i], &value));
        if (!isfinite(value))
            return lt_fail(LT_ENUMERIC,
                           "%sthe loss is %s at step %lld; check the learning rate "
                           "and the data",
                           r->where,
                           isnan(value) ? "nan"
                           : value > 0  ? "inf"
                                        : "-inf",
                           (long long)r->step);
        loss += value;
    }
    if (r->n_losses > 0)
        r->data[LOSS] = r->share > 0 ? loss * r->share : 0;
    return lt__bn_layers_collect(&r->bn_layers, of_bn_layers(reducer));
}

/* LT_EDESYNC unless all ranks have taken the same steps and have tails of the same length. */
static lt_status check(const lt_reducer *r)
{
    int zero = lt__group_rank_in_job(r->group, 0);
    const double *first = of_rank(r, 0);
    for (int i = 1; i < r->size; i++) {
        const double *other = of_rank(r, i);
        int rank = lt__group_rank_in_job(r->group, i);
        if (other[TAIL] != first[TAIL])
            return lt_fail(
                LT_EDESYNC,
                "the ranks disagree: rank %d sends %g numbers with each bucket, but rank %d sends "
                "%g; a loss scale must be in use on all ranks, or on none",
                rank, other[TAIL], zero, first[TAIL]);
        if (other[STEPS] == first[STEPS])
            continue;
        if (other[BACKWARDS] != first[BACKWARDS])
            return lt_fail(
                LT_EDESYNC,
                "the ranks disagree: rank %d ran %g backward passes before a step, but rank %d ran "
                "%g; all ranks must run the same number in a step that has more than any step "
                "before, and take the same optimizer steps",
                rank, other[BACKWARDS], zero, first[BACKWARDS]);
        return lt_fail(
            LT_EDESYNC,
            "the ranks disagree: rank %d took other optimizer steps than rank %d, or only one of "
            "them clipped gradients; the conditions for a step must be the same on all ranks",
            rank, zero);
    }
    return LT_OK;
}

/* Whether a separate number, such as AGREE, is equal on all ranks. */
static bool is_same(const lt_reducer *r, int number)
{
    int rank = 1;
    while (rank < r->size && of_rank(r, rank)[number] == of_rank(r, 0)[number])
        rank++;
    return rank >= r->size;
}

lt_status lt__record_sum(lt_reducer *r)
{
    lt_sum sum = {.what = "the step record",
                  .data = r->record.data,
                  .dtype = LT_F64,
                  .count = (int64_t)r->record.count,
                  .wire = LT_F64,
                  .scale = 1};
    if (collect(r) != LT_OK) {
        lt_group_fail(r->group); /* so that no other rank takes the step */
        return lt_errcode();
    }
    LT_TRY(lt_group_allreduce(r->group, &sum));
    LT_TRY(check(r));
    r->disagrees = !is_same(r, AGREE);
    for (int i = 0; i < r->plan.n_items && !r->disagrees; i++) {
        r->plan.items[i].used = of_parameters(r)[i] > 0;
        r->plan.items[i].accumulated = of_parameters(r)[i] >= ADDED;
    }
    return LT_OK;
}

lt_status lt__record_read(lt_reducer *r)
{
    if (!is_same(r, WRITES))
        LT_TRY(lt__agree_compare_weights(r));
    r->last.loss = r->record.data[LOSS];
    r->last.stop_reason = 0;
    for (int rank = r->size - 1; rank >= 0; rank--) {
        int stop = (int)of_rank(r, rank)[STOP], backwards = (int)of_rank(r, rank)[BACKWARDS];
        r->last.stop_reason = stop != 0 ? stop : r->last.stop_reason;
        r->most_backwards = LT_MAX(backwards, r->most_backwards);
    }
    return lt__bn_layers_read(&r->record.bn_layers, r->ctx, of_bn_layers(r));
}

void lt__record_free(lt_record *r)
{
    lt__record_discard_losses(r);
    free(r->losses);
    lt__bn_layers_free(&r->bn_layers);
    free(r->data);
}
