/* deferred.c - deferred scalars: single elements that are copied from an accelerator to the host in
 * the background.
 *
 * They use slots in one block of pinned memory, allocated at the first request. If no slot is free,
 * or there is no pinned memory, the read is synchronous. The context's thread makes the requests;
 * one other thread may read the values.
 */
#include <math.h>
#include <stdlib.h>

#include "core/tensor.h"

enum { SLOTS = 256, SLOT_BYTES = 8 };

typedef struct lt_deferred_pool {
    char *block;
    int n_free;
    uint8_t free[SLOTS];
} lt_deferred_pool;

struct lt_deferred {
    lt_ctx *ctx;
    lt_device *device;
    int slot;       /* or -1: value is valid */
    lt_dtype dtype; /* of the element in the slot */
    uint64_t mark;  /* behind the copy */
    double value;
};

static lt_deferred_pool *pool_of(lt_ctx *ctx, lt_device *device)
{
    if (ctx->deferred_pool)
        return ctx->deferred_pool;
    lt_deferred_pool *l = malloc(sizeof *l);
    char *block = l ? device->alloc_host(device, SLOTS * SLOT_BYTES) : NULL;
    if (!block) {
        free(l);
        return NULL;
    }
    *l = (lt_deferred_pool){.block = block, .n_free = SLOTS};
    for (int i = 0; i < SLOTS; i++)
        l->free[i] = (uint8_t)i;
    return ctx->deferred_pool = l;
}

void lt__deferred_pool_close(lt_ctx *ctx)
{
    if (!ctx->deferred_pool)
        return;
    ctx->devices[1]->free_host(ctx->devices[1], ctx->deferred_pool->block);
    free(ctx->deferred_pool);
    ctx->deferred_pool = NULL;
}

static char *slot_of(const lt_deferred *deferred)
{
    return deferred->ctx->deferred_pool->block + deferred->slot * SLOT_BYTES;
}

static void give_slot(lt_deferred *deferred)
{
    lt_deferred_pool *l = deferred->ctx->deferred_pool;
    if (deferred->slot < 0)
        return;
    pthread_mutex_lock(&deferred->ctx->lock);
    l->free[l->n_free++] = (uint8_t)deferred->slot;
    pthread_mutex_unlock(&deferred->ctx->lock);
    deferred->slot = -1;
}

/* Returns a free slot, or -1. */
static int take_slot(lt_ctx *ctx)
{
    lt_deferred_pool *l = ctx->deferred_pool;
    pthread_mutex_lock(&ctx->lock);
    int slot = l->n_free > 0 ? l->free[--l->n_free] : -1;
    pthread_mutex_unlock(&ctx->lock);
    return slot;
}

static lt_status send(lt_deferred *deferred, lt_tensor *x)
{
    lt_device *device = deferred->device;
    if (!device->is_host && pool_of(deferred->ctx, device))
        deferred->slot = take_slot(deferred->ctx);
    if (deferred->slot < 0)
        return lt_item(x, 0, &deferred->value);
    LT_TRY(device->copy(device, slot_of(deferred), x->data, lt_dtype_bytes(deferred->dtype)));
    deferred->mark = device->mark(device);
    return LT_OK;
}

lt_deferred *lt_item_deferred(lt_tensor *x)
{
    if (lt__check_alive(x) != LT_OK)
        return NULL;
    if (x->count != 1) {
        char text[96];
        lt_fail(LT_EINVAL, "a deferred scalar must be one element, but this is %s",
                lt_describe(x, text, sizeof text));
        return NULL;
    }
    lt_deferred *deferred = lt__alloc_zero(x->ctx, sizeof *deferred);
    if (!deferred)
        return NULL;
    *deferred = (lt_deferred){.ctx = lt__ctx_retain(x->ctx),
                              .device = x->storage->device,
                              .slot = -1,
                              .dtype = (lt_dtype)x->dtype,
                              .value = NAN};
    if (send(deferred, x) == LT_OK)
        return deferred;
    lt_deferred_free(deferred);
    return NULL;
}

lt_status lt_deferred_item(lt_deferred *deferred, double *value)
{
    if (deferred->slot >= 0) {
        LT_TRY(deferred->device->wait(deferred->device, deferred->mark));
        lt_convert(&deferred->value, LT_F64, slot_of(deferred), deferred->dtype, 1);
        give_slot(deferred);
    }
    *value = deferred->value;
    return LT_OK;
}

void lt_deferred_free(lt_deferred *deferred)
{
    if (!deferred)
        return;
    lt_ctx *ctx = deferred->ctx;
    give_slot(deferred);
    lt__free(ctx, deferred, sizeof *deferred);
    lt__ctx_release(ctx);
}
