/* bn_layers.c - batch-norm statistics as sums over the ranks; see bn_layers.h. */
#include <stdlib.h>

#include "core/tensor.h"
#include "dist/bn_layers.h"
#include "dist/staging.h"

/* Indices of a layer's numbers. From SUMS: (channels) sums, then (channels) sums of squares. */
enum { COUNT, MOMENTUM, SHARDS, PLACES, SUMS };

static size_t count_of(const lt_bn_layer *n) { return SUMS + 2 * (size_t)n->channels; }

lt_status lt__bn_layers_register(lt_bn_layers *layers, lt_ctx *ctx)
{
    lt_bn_stats s;
    for (int i = 0; lt_bn_stats_at(ctx, i, &s); i++) {
        int k = 0;
        while (k < layers->n && layers->list[k].running_mean != s.running_mean)
            k++;
        if (k < layers->n)
            continue;
        LT_TRY(LT_RESIZE(layers->list, layers->n + 1, "for a reducer"));
        layers->list[layers->n++] = (lt_bn_layer){.running_mean = lt_retain(s.running_mean),
                                                  .running_var = lt_retain(s.running_var),
                                                  .channels = s.mean->count};
    }
    return LT_OK;
}

size_t lt__bn_layers_numbers(const lt_bn_layers *layers)
{
    size_t count = 0;
    for (int k = 0; k < layers->n; k++)
        count += count_of(&layers->list[k]);
    return count;
}

/* Writes the sums over a shard of `count` values per channel, from its mean and variance:
 * sum = count * mean, squares = count * (var + mean^2). */
static void write_sums(const lt_bn_layer *n, const void *mean, const void *var, lt_dtype dtype,
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

/* The offset of the layer's running mean in its arena. It is the same on all ranks, and different
 * for each layer. */
static double position_of(const lt_bn_layer *n)
{
    const lt_tensor *x = n->running_mean;
    return (double)((const char *)x->data - (const char *)x->storage->data);
}

static lt_device *device_of(const lt_bn_layer *n) { return n->running_mean->storage->device; }

/* Bytes reserved for one row, the mean or the variance, in any dtype. */
static size_t row_bytes(const lt_bn_layer *n) { return (size_t)n->channels * sizeof(double); }

static void *row_of(const lt_bn_layers *layers, const lt_bn_layer *n, int row)
{
    return (char *)layers->staging + n->at + (size_t)row * row_bytes(n);
}

/* Allocates staging memory for all layers on an accelerator. */
static lt_status make_staging(lt_bn_layers *layers)
{
    size_t bytes = 0;
    for (int k = 0; k < layers->n; k++) {
        lt_bn_layer *n = &layers->list[k];
        n->pending_count = 0;
        if (device_of(n)->is_host)
            continue;
        layers->device = device_of(n);
        n->at = bytes;
        bytes += 2 * row_bytes(n);
    }
    return layers->device
               ? lt__staging_grow(layers->device, &layers->staging, &layers->staging_bytes, bytes)
               : LT_OK;
}

static lt_status fetch(lt_bn_layers *layers, lt_bn_layer *n, const lt_bn_stats *s)
{
    lt_device *device = layers->device;
    n->pending_count = s->count;
    n->dtype = (lt_dtype)s->mean->dtype;
    size_t bytes = (size_t)n->channels * lt_dtype_bytes(n->dtype);
    uint64_t here = layers->mark;
    LT_TRY(device->download(device, row_of(layers, n, 0), s->mean->data, bytes, here, NULL));
    return device->download(device, row_of(layers, n, 1), s->var->data, bytes, here, NULL);
}

static lt_status write_layer(lt_bn_layers *layers, lt_bn_layer *n, const lt_bn_stats *s, double *at)
{
    double count = (double)s->count;
    at[COUNT] = count;
    at[MOMENTUM] = count * s->momentum;
    if (!device_of(n)->is_host)
        return fetch(layers, n, s);
    write_sums(n, s->mean->data, s->var->data, (lt_dtype)s->mean->dtype, count, at);
    return LT_OK;
}

/* Sets layers->mark to a mark after all downloads so far. Downloads run in order, so an empty one
 * gives that mark. */
static lt_status mark_last(lt_bn_layers *layers)
{
    int k = 0;
    while (device_of(&layers->list[k])->is_host)
        k++;
    return layers->device->download(layers->device, layers->staging,
                                    layers->list[k].running_mean->data, 0, layers->mark,
                                    &layers->mark);
}

lt_status lt__bn_layers_write(lt_bn_layers *layers, lt_ctx *ctx, bool counts, double *at)
{
    LT_TRY(make_staging(layers));
    if (layers->device)
        layers->mark = layers->device->mark(layers->device);
    for (int k = 0; k < layers->n; at += count_of(&layers->list[k++])) {
        lt_bn_stats s;
        at[SHARDS] = 1;
        at[PLACES] = position_of(&layers->list[k]);
        for (int i = 0; counts && lt_bn_stats_at(ctx, i, &s); i++)
            if (s.running_mean == layers->list[k].running_mean)
                LT_TRY(write_layer(layers, &layers->list[k], &s, at));
    }
    return layers->device ? mark_last(layers) : LT_OK;
}

lt_status lt__bn_layers_collect(lt_bn_layers *layers, double *at)
{
    if (!layers->device)
        return LT_OK;
    LT_TRY(layers->device->wait(layers->device, layers->mark));
    for (int k = 0; k < layers->n; at += count_of(&layers->list[k++])) {
        lt_bn_layer *n = &layers->list[k];
        if (n->pending_count > 0)
            write_sums(n, row_of(layers, n, 0), row_of(layers, n, 1), n->dtype,
                       (double)n->pending_count, at);
        n->pending_count = 0;
    }
    return LT_OK;
}

/* Replaces the sums by the mean and the variance. */
static lt_status read_layer(const lt_bn_layers *layers, lt_ctx *ctx, const lt_bn_layer *n,
                            double *at)
{
    lt_device *device = device_of(n);
    double count = at[COUNT], *rows[2] = {at + SUMS, at + SUMS + n->channels};
    lt_tensor *like[2] = {n->running_mean, n->running_var}, *stat[2];
    lt_status status = LT_OK;
    for (int64_t c = 0; c < n->channels; c++) {
        rows[0][c] /= count;
        rows[1][c] = LT_MAX(rows[1][c] / count - rows[0][c] * rows[0][c], 0);
    }
    for (int i = 0; i < 2; i++) {
        lt_dtype dtype = (lt_dtype)like[i]->dtype;
        stat[i] = lt__tensor_new(ctx, device, dtype, like[i]->ndim, like[i]->dims, true);
        status = stat[i] ? status : LT_ENOMEM;
        if (status != LT_OK)
            continue;
        void *row = device->is_host ? stat[i]->data : row_of(layers, n, i);
        lt_convert(row, dtype, rows[i], LT_F64, (size_t)n->channels);
        if (!device->is_host)
            status = device->copy(device, stat[i]->data, row,
                                  (size_t)n->channels * lt_dtype_bytes(dtype));
    }
    if (status == LT_OK)
        status = lt_bn_stats_add(ctx, n->running_mean, n->running_var, stat[0], stat[1],
                                 (int64_t)count, at[MOMENTUM] / count);
    lt_release(stat[0]);
    lt_release(stat[1]);
    return status;
}

lt_status lt__bn_layers_read(const lt_bn_layers *layers, lt_ctx *ctx, double *at)
{
    lt_bn_stats_clear(ctx);
    for (int k = 0; k < layers->n; at += count_of(&layers->list[k++])) {
        if (at[PLACES] != at[SHARDS] * position_of(&layers->list[k]))
            return lt_fail(
                LT_EDESYNC,
                "the ranks disagree: they first ran their batch norms in different orders");
        if (at[COUNT] > 0)
            LT_TRY(read_layer(layers, ctx, &layers->list[k], at));
    }
    return LT_OK;
}

void lt__bn_layers_free(lt_bn_layers *layers)
{
    for (int k = 0; k < layers->n; k++) {
        lt_release(layers->list[k].running_mean);
        lt_release(layers->list[k].running_var);
    }
    if (layers->staging) {
        lt_status status = layers->device->wait(layers->device, layers->mark);
        (void)status; /* a failed device has already reported its failure */
        layers->device->free_host(layers->device, layers->staging);
    }
    free(layers->list);
}
