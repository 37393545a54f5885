/* record.c - the step record; see record.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/group.h"
#include "dist/record.h"

/* Layout of the record: HEAD numbers, OF_RANK for each rank, one for each parameter, and the
 * numbers of the batch-norm layers. */
enum { LOSS, HEAD };
enum { BACKWARDS, STOP, STEPS, TAIL, AGREE, WRITES, OF_RANK };

static double *of_rank(const lt_record *r, int rank) { return r->data + HEAD + OF_RANK * rank; }
static double *of_parameters(const lt_record *r) { return of_rank(r, r->ranks); }
static double *of_bn_layers(const lt_record *r) { return of_parameters(r) + r->parameters; }

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
    if (r->n_losses == r->capacity) {
        int capacity = r->capacity ? 2 * r->capacity : 8;
        lt_deferred **more = realloc(r->losses, (size_t)capacity * sizeof *more);
        if (!more)
            return lt_fail(LT_ENOMEM, "out of memory for a reducer");
        r->losses = more;
        r->capacity = capacity;
    }
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

lt_status lt__record_write(lt_record *r, lt_ctx *ctx, int ranks, int parameters,
                           const lt_rank_record *own)
{
    LT_TRY(lt__bn_layers_register(&r->bn_layers, ctx));
    size_t count = HEAD + OF_RANK * (size_t)ranks + (size_t)parameters +
                   lt__bn_layers_numbers(&r->bn_layers);
    double *data = realloc(r->data, count * sizeof *data);
    if (!data)
        return lt_fail(LT_ENOMEM, "out of memory for a reducer");
    memset(data, 0, count * sizeof *data);
    r->data = data;
    r->count = count;
    r->ranks = ranks;
    r->parameters = parameters;
    r->share = own->share;
    r->step = ctx->step + 1;
    data[LOSS] = own->share > 0 ? r->loss * own->share : 0;
    of_rank(r, own->rank)[BACKWARDS] = own->backwards;
    of_rank(r, own->rank)[STOP] = own->stop_reason;
    of_rank(r, own->rank)[STEPS] = own->steps;
    of_rank(r, own->rank)[TAIL] = own->tail;
    of_rank(r, own->rank)[AGREE] = own->agree;
    of_rank(r, own->rank)[WRITES] = own->writes;
    return lt__bn_layers_write(&r->bn_layers, ctx, own->share > 0, of_bn_layers(r));
}

lt_status lt__record_collect(lt_record *r)
{
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
    return lt__bn_layers_collect(&r->bn_layers, of_bn_layers(r));
}

/* The number of a parameter: 1 for a leftover gradient, ADDED for one that the step has added to.
 * The sum over the ranks shows both, because there are fewer than ADDED ranks and shards. */
static const double ADDED = 1 << 20;

void lt__record_use(lt_record *r, int parameter, bool added)
{
    of_parameters(r)[parameter] = added ? ADDED : 1;
}

lt_status lt__record_check(const lt_record *r, const lt_group *group)
{
    int zero = lt__group_rank_in_job(group, 0);
    const double *first = of_rank(r, 0);
    for (int i = 1; i < r->ranks; i++) {
        const double *other = of_rank(r, i);
        int rank = lt__group_rank_in_job(group, i);
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
static bool is_same(const lt_record *r, int number)
{
    int rank = 1;
    while (rank < r->ranks && of_rank(r, rank)[number] == of_rank(r, 0)[number])
        rank++;
    return rank >= r->ranks;
}

bool lt__record_agrees(const lt_record *r) { return is_same(r, AGREE); }
bool lt__record_writes_agree(const lt_record *r) { return is_same(r, WRITES); }

bool lt__record_uses(const lt_record *r, int parameter) { return of_parameters(r)[parameter] > 0; }

bool lt__record_adds(const lt_record *r, int parameter)
{
    return of_parameters(r)[parameter] >= ADDED;
}

double lt__record_loss(const lt_record *r) { return r->data[LOSS]; }

int lt__record_backwards(const lt_record *r)
{
    double most = 0;
    for (int rank = 0; rank < r->ranks; rank++)
        if (of_rank(r, rank)[BACKWARDS] > most)
            most = of_rank(r, rank)[BACKWARDS];
    return (int)most;
}

int lt__record_stop_reason(const lt_record *r)
{
    int rank = 0;
    while (rank < r->ranks - 1 && of_rank(r, rank)[STOP] == 0)
        rank++;
    return (int)of_rank(r, rank)[STOP];
}

lt_status lt__record_read_bn_stats(const lt_record *r, lt_ctx *ctx)
{
    return lt__bn_layers_read(&r->bn_layers, ctx, of_bn_layers(r));
}

void lt__record_free(lt_record *r)
{
    lt__record_discard_losses(r);
    free(r->losses);
    lt__bn_layers_free(&r->bn_layers);
    free(r->data);
}
