/* bn_layers.h - the statistics of batch norms over all ranks, as numbers that can be summed.
 * Private to dist.
 *
 * A batch norm contributes these numbers, in double: the number of values per channel; that number
 * times the momentum; the number of shards; the offset in bytes of its running mean in the arena,
 * which must be equal on all ranks; and for each channel the sum of the values and the sum of their
 * squares, computed from the mean and variance of the shard.
 */
#ifndef LT_DIST_BN_LAYERS_H
#define LT_DIST_BN_LAYERS_H

#include "autograd/autograd.h"

typedef struct lt_bn_layer {
    lt_tensor *running_mean, *running_var; /* kept */
    int64_t channels;
    size_t at; /* on an accelerator: offset in bytes of its mean and variance in staging */
    int64_t pending_count; /* values per channel of the statistics being downloaded, or 0 */
    lt_dtype dtype;        /* dtype of the statistics being downloaded */
} lt_bn_layer;

/* All layers seen, in the same order on all ranks. All zeros: no layers. */
typedef struct lt_bn_layers {
    lt_bn_layer *list;
    int n;
    lt_device *device; /* the accelerator that has some of them, or NULL */
    void *staging;     /* CPU memory for copies from and to device */
    size_t staging_bytes;
    uint64_t mark; /* mark in the stream of device, after the downloads */
} lt_bn_layers;

/* Adds the layers that have pending statistics in ctx and are not in the list. LT_ENOMEM. */
LT_NODISCARD lt_status lt__bn_layers_register(lt_bn_layers *layers, lt_ctx *ctx);
/* The length of the arrays `at` below. */
size_t lt__bn_layers_numbers(const lt_bn_layers *layers);
/* Writes the pending statistics of ctx to `at`, which must be all zeros. counts: false if this rank
 * has no rows of the batch; its statistics are then left out. For statistics on an accelerator it
 * only starts the downloads; lt__bn_layers_collect() waits for them and writes their sums.
 * LT_ENOMEM, or a failure of the accelerator. */
LT_NODISCARD lt_status lt__bn_layers_write(lt_bn_layers *layers, lt_ctx *ctx, bool counts,
                                           double *at);
/* On any thread. Fails only if the accelerator does. */
LT_NODISCARD lt_status lt__bn_layers_collect(lt_bn_layers *layers, double *at);
/* Replaces the pending statistics of ctx by statistics over all ranks, from the sums in `at`, which
 * it overwrites.
 * LT_ENOMEM, LT_EDESYNC if the ranks have the layers in different orders, or a failure of the
 * accelerator. */
LT_NODISCARD lt_status lt__bn_layers_read(const lt_bn_layers *layers, lt_ctx *ctx, double *at);
void lt__bn_layers_free(lt_bn_layers *layers);

#endif
