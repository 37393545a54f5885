/* norms.c - statistics of batch norms as sums; see norms.h. */
#include <stdlib.h>

#include "core/tensor.h"
#include "dist/norms.h"
#include "dist/staging.h"

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
        more[norms->n++] = (lt_norm){.running_mean = lt_retain(s.running_mean),
                                     .running_var = lt_retain(s.running_var),
                                     .channels = s.mean->count};
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

/* Sums over a shard of `count` values from its mean and variance. */
static void write_sums(const lt_norm *n, const void *mean, const void *var, lt_dtype dtype,
                       double count, double *at)
{
    double *sum = at + SUMS, *squares = sum + n->channels;
    lt_convert(sum, LT_F64, mean, dtype, (size_t)n->channels);
    lt_convert(squares, LT_F64, var, dtype, (size_t)n->channels);
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

static lt_device *device_of(const lt_norm *n) { return n->running_mean->storage->device; }

/* Of one of its two rows, mean and variance, in any dtype. */
static size_t row_bytes(const lt_norm *n) { return (size_t)n->channels * sizeof(double); }

static void *row_of(const lt_norms *norms, const lt_norm *n, int row)
{
    return (char *)norms->way + n->at + (size_t)row * row_bytes(n);
}

/* For all that an accelerator has. */
static lt_status make_way(lt_norms *norms)
{
    size_t bytes = 0;
    for (int k = 0; k < norms->n; k++) {
        lt_norm *n = &norms->list[k];
        n->coming = 0;
        if (device_of(n)->is_host)
            continue;
        norms->device = device_of(n);
        n->at = bytes;
        bytes += 2 * row_bytes(n);
    }
    return norms->device ? lt__staging_grow(norms->device, &norms->way, &norms->room, bytes)
                         : LT_OK;
}

static lt_status send_for(lt_norms *norms, lt_norm *n, const lt_stats *s)
{
    lt_device *device = norms->device;
    n->coming = s->count;
    n->dtype = (lt_dtype)s->mean->dtype;
    size_t bytes = (size_t)n->channels * lt_dtype_bytes(n->dtype);
    uint64_t here = norms->mark;
    LT_TRY(device->download(device, row_of(norms, n, 0), s->mean->data, bytes, here, NULL));
    return device->download(device, row_of(norms, n, 1), s->var->data, bytes, here, NULL);
}

static lt_status write_norm(lt_norms *norms, lt_norm *n, const lt_stats *s, double *at)
{
    double count = (double)s->count;
    at[COUNT] = count;
    at[MOMENTUM] = count * s->momentum;
    if (!device_of(n)->is_host)
        return send_for(norms, n, s);
    write_sums(n, s->mean->data, s->var->data, (lt_dtype)s->mean->dtype, count, at);
    return LT_OK;
}

/* norms->mark = one behind all that was sent for: downloads come in order, nothing is the last. */
static lt_status mark_the_end(lt_norms *norms)
{
    int k = 0;
    while (device_of(&norms->list[k])->is_host)
        k++;
    return norms->device->download(norms->device, norms->way, norms->list[k].running_mean->data, 0,
                                   norms->mark, &norms->mark);
}

lt_status lt__norms_write(lt_norms *norms, lt_ctx *ctx, bool counts, double *at)
{
    LT_TRY(make_way(norms));
    if (norms->device)
        norms->mark = norms->device->mark(norms->device);
    for (int k = 0; k < norms->n; at += count_of(&norms->list[k++])) {
        lt_stats s;
        at[SHARDS] = 1;
        at[PLACES] = place_of(&norms->list[k]);
        for (int i = 0; counts && lt_stats_at(ctx, i, &s); i++)
            if (s.running_mean == norms->list[k].running_mean)
                LT_TRY(write_norm(norms, &norms->list[k], &s, at));
    }
    return norms->device ? mark_the_end(norms) : LT_OK;
}

lt_status lt__norms_come(lt_norms *norms, double *at)
{
    if (!norms->device)
        return LT_OK;
    LT_TRY(norms->device->wait(norms->device, norms->mark));
    for (int k = 0; k < norms->n; at += count_of(&norms->list[k++])) {
        lt_norm *n = &norms->list[k];
        if (n->coming > 0)
            write_sums(n, row_of(norms, n, 0), row_of(norms, n, 1), n->dtype, (double)n->coming,
                       at);
        n->coming = 0;
    }
    return LT_OK;
}

static lt_status read_norm(const lt_norms *norms, lt_ctx *ctx, const lt_norm *n, const double *at)
{
    lt_device *device = device_of(n);
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
        for (int i = 0; i < 2; i++) {
            void *row = device->is_host ? stat[i]->data : row_of(norms, n, i);
            lt_convert((char *)row + (size_t)c * lt_dtype_bytes((lt_dtype)like[i]->dtype),
                       (lt_dtype)like[i]->dtype, i == 0 ? &mean : &var, LT_F64, 1);
        }
    }
    for (int i = 0; i < 2 && status == LT_OK && !device->is_host; i++)
        status = device->copy(device, stat[i]->data, row_of(norms, n, i),
                              (size_t)n->channels * lt_dtype_bytes((lt_dtype)like[i]->dtype));
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
            LT_TRY(read_norm(norms, ctx, &norms->list[k], at));
    }
    return LT_OK;
}

void lt__norms_free(lt_norms *norms)
{
    for (int k = 0; k < norms->n; k++) {
        lt_release(norms->list[k].running_mean);
        lt_release(norms->list[k].running_var);
    }
    if (norms->way) {
        lt_status status = norms->device->wait(norms->device, norms->mark);
        (void)status; /* a device that has failed fails again */
        norms->device->free_host(norms->device, norms->way);
    }
    free(norms->list);
}
