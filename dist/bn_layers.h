/* bn_layers.h - the statistics of batch norms over all ranks, as numbers that can be summed.
 * Private to this room.
 *
 * A batch norm contributes these numbers, in double: the number of values per channel; that times
 * the momentum; the number of shards; the offset of its buffer in its arena, which all ranks must
 * share; and for each channel the sum of the values and the sum of their squares, computed from the
 * mean and variance of the shard.
 */
#ifndef LT_DIST_BN_LAYERS_H
#define LT_DIST_BN_LAYERS_H

#include "autograd/autograd.h"

typedef struct lt_bn_layer {
    lt_tensor *running_mean, *running_var; /* kept */
    int64_t channels;
    size_t at; /* on an accelerator: offset of its rows in lt_bn_layers.staging, bytes */
    int64_t pending_count; /* values behind the statistics being downloaded; 0 if none are */
    lt_dtype dtype;        /* of the statistics being downloaded */
} lt_bn_layer;

typedef struct lt_bn_layers { /* all layers seen, in the same order on all ranks; zeros: none */
    lt_bn_layer *list;
    int n;
    lt_device *device; /* the accelerator that has some of them, or NULL */
    void *staging;     /* CPU memory for copies from and to device */
    size_t staging_bytes;
    uint64_t mark; /* in the stream of device, after the downloads */
} lt_bn_layers;

/* Adds the layers that have pending statistics in ctx and are not in the list. LT_ENOMEM. */
LT_MUST lt_status lt__bn_layers_register(lt_bn_layers *layers, lt_ctx *ctx);
/* The length of the arrays `at` below. */
size_t lt__bn_layers_numbers(const lt_bn_layers *layers);
/* Writes the pending statistics of ctx to `at`, which is zero. counts: whether this rank's
 * statistics count. Statistics on an accelerator are only downloaded; lt__bn_layers_collect() waits
 * for them and writes their sums, on any thread. */
LT_MUST lt_status lt__bn_layers_write(lt_bn_layers *layers, lt_ctx *ctx, bool counts, double *at);
LT_MUST lt_status lt__bn_layers_collect(lt_bn_layers *layers, double *at);
/* Replaces the pending statistics of ctx by statistics over all ranks, from the sums in `at`.
 * LT_ENOMEM, or LT_EDESYNC if the ranks have the layers in different orders. */
LT_MUST lt_status lt__bn_layers_read(const lt_bn_layers *layers, lt_ctx *ctx, const double *at);
void lt__bn_layers_free(lt_bn_layers *layers);

#endif
