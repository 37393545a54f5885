/* bn_layers.h - the statistics of batch norms over all ranks, as numbers that can be summed.
 * Private to this room.
 *
 * A norm gives, in double: its count of values, that times its momentum, where its buffer lies, for
 * a check, and over each channel the sums of its values and of their squares, from the mean and
 * variance of its shard.
 */
#ifndef LT_DIST_BN_LAYERS_H
#define LT_DIST_BN_LAYERS_H

#include "autograd/autograd.h"

typedef struct lt_bn_layer {
    lt_tensor *running_mean, *running_var; /* kept */
    int64_t channels;
    size_t at;            /* of an accelerator's: where its numbers are in lt_bn_layers.staging */
    int64_t pending_count;       /* to there: mean and variance of so many values; 0: nothing is */
    lt_dtype dtype;       /* of what comes */
} lt_bn_layer;

typedef struct lt_bn_layers { /* those that were seen, on all ranks in one order; zero: none */
    lt_bn_layer *list;
    int n;
    lt_device *device;    /* an accelerator that has some of them, or NULL; then: */
    void *staging;            /* memory of the CPU that it copies to and from, */
    size_t staging_bytes;          /* so much; */
    uint64_t mark;        /* behind what comes */
} lt_bn_layers;

/* Adds those of the statistics that wait in ctx. LT_ENOMEM. */
LT_MUST lt_status lt__bn_layers_register(lt_bn_layers *layers, lt_ctx *ctx);
/* How many numbers they are. */
size_t lt__bn_layers_numbers(const lt_bn_layers *layers);
/* Adds those of the statistics that wait in ctx to `at`, unless this rank's do not count. Those on
 * an accelerator are sent for; lt__bn_layers_collect(), on any thread, waits for them and adds
 * their sums. */
LT_MUST lt_status lt__bn_layers_write(lt_bn_layers *layers, lt_ctx *ctx, bool counts, double *at);
LT_MUST lt_status lt__bn_layers_collect(lt_bn_layers *layers, double *at);
/* The statistics that wait in ctx become those of the sums. LT_ENOMEM, or LT_EDESYNC when the ranks
 * have them in different orders. */
LT_MUST lt_status lt__bn_layers_read(const lt_bn_layers *layers, lt_ctx *ctx, const double *at);
void lt__bn_layers_free(lt_bn_layers *layers);

#endif
