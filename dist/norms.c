/* norms.c - statistics of batch norms as sums; see norms.h. */
#include <stdlib.h>

#include "core/tensor.h"
#include "dist/norms.h"

enum { COUNT, MOMENTUM, SHARDS, PLACES, SUMS }; /* then the sums, and as many squares */

static size_t count_of(const lt_norm *n) { return SUMS + 2 * (size_t)n->channels; }

lt_status lt__norms_learn(lt_norms *norms, lt_ctx *ctx)
{
    lt_stats s;
    for (int i = 0; lt_stats_at(ctx, i, &s); i++) {
        int k = 0;
        while (k < norms->n && norms->list[k].running_mean != s.running_mean)
            k++;
        if (k < norms->n)
            continue;
        lt_norm *more = realloc(norms->list, (size_t)(norms->n + 1) * sizeof *more);
        if (!more)
            return lt_fail(LT_ENOMEM, "out of memory for a reducer");
        norms->list = more;
        more[norms->n++] = (lt_norm){lt_retain(s.running_mean), lt_retain(s.running_var),
                                     s.mean->count};
    }
    return LT_OK;
}

size_t lt__norms_count(const lt_norms *norms)
{
    size_t count = 0;
    for (int k = 0; k < norms->n; k++)
        count += count_of(&norms->list[k]);
    return count;
}

/* Sums over a shard from its mean and variance. */
static void write_norm(const lt_norm *n, const lt_stats *s, double *at)
{
    double count = (double)s->count, *sum = at + SUMS, *squares = sum + n->channels;
    at[COUNT] = count;
    at[MOMENTUM] = count * s->momentum;
    lt_convert(sum, LT_F64, s->mean->data, (lt_dtype)s->mean->dtype, (size_t)n->channels);
    lt_convert(squares, LT_F64, s->var->data, (lt_dtype)s->var->dtype, (size_t)n->channels);
    for (int64_t c = 0; c < n->channels; c++) {
        squares[c] = count * (squares[c] + sum[c] * sum[c]);
        sum[c] *= count;
    }
}

/* Where the norm's buffer lies in its arena: the same number on all ranks, another for each norm of
 * a net. */
static double place_of(const lt_norm *n)
{
    const lt_tensor *x = n->running_mean;
    return (double)((const char *)x->data - (const char *)x->storage->data);
}

void lt__norms_write(const lt_norms *norms, lt_ctx *ctx, bool counts, double *at)
{
    for (int k = 0; k < norms->n; at += count_of(&norms->list[k++])) {
        lt_stats s;
        at[SHARDS] = 1;
        at[PLACES] = place_of(&norms->list[k]);
        for (int i = 0; counts && lt_stats_at(ctx, i, &s); i++)
            if (s.running_mean == norms->list[k].running_mean)
                write_norm(&norms->list[k], &s, at);
    }
}

static lt_status read_norm(lt_ctx *ctx, const lt_norm *n, const double *at)
{
    double count = at[COUNT];
    const double *sum = at + SUMS, *squares = sum + n->channels;
    lt_tensor *like[2] = {n->running_mean, n->running_var}, *stat[2];
    lt_status status = LT_OK;
    for (int i = 0; i < 2; i++) {
        stat[i] = lt__tensor_new(ctx, like[i]->storage->device, (lt_dtype)like[i]->dtype,
                                 like[i]->ndim, like[i]->dims, true);
        status = stat[i] ? status : LT_ENOMEM;
    }
    for (int64_t c = 0; c < n->channels && status == LT_OK; c++) {
        double mean = sum[c] / count, var = squares[c] / count - mean * mean;
        var = var > 0 ? var : 0;
        for (int i = 0; i < 2; i++)
            lt_convert((char *)stat[i]->data + (size_t)c * lt_dtype_bytes((lt_dtype)like[i]->dtype),
                       (lt_dtype)like[i]->dtype, i == 0 ? &mean : &var, LT_F64, 1);
    }
    if (status == LT_OK)
        status = lt_stats_add(ctx, n->running_mean, n->running_var, stat[0], stat[1],
                              (int64_t)count, at[MOMENTUM] / count);
    lt_release(stat[0]);
    lt_release(stat[1]);
    return status;
}

lt_status lt__norms_read(const lt_norms *norms, lt_ctx *ctx, const double *at)
{
    lt_stats_clear(ctx);
    for (int k = 0; k < norms->n; at += count_of(&norms->list[k++])) {
        if (at[PLACES] != at[SHARDS] * place_of(&norms->list[k]))
            return lt_fail(LT_EDESYNC, "the ranks disagree: they went through batch norms for the "
                           "first time in different orders");
        if (at[COUNT] > 0)
            LT_TRY(read_norm(ctx, &norms->list[k], at));
    }
    return LT_OK;
}

void lt__norms_free(lt_norms *norms)
{
    for (int k = 0; k < norms->n; k++) {
        lt_release(norms->list[k].running_mean);
        lt_release(norms->list[k].running_var);
    }
    free(norms->list);
}
