/* deferred.c - deferred scalars: single elements that are copied from an accelerator to the host in
 * the background.
 *
 * They use slots of 8 bytes in one block of pinned memory, which the first request allocates. If no
 * slot is free, or there is no pinned memory, the read is synchronous. The context's thread makes
 * the requests; one other thread may read the values.
 */
#include <math.h>
#include <stdlib.h>

#include "core/tensor.h"

enum { SLOTS = 256, SLOT_BYTES = 8 };

struct lt_pinned_slots {
    char *block;
    int n_free;
    uint8_t free[SLOTS];
};

struct lt_deferred {
    lt_ctx *ctx;
    lt_device *device;
    int slot;       /* slot number; -1 once value is valid */
    lt_dtype dtype; /* dtype of the element in the slot */
    uint64_t mark;  /* mark after the copy */
    double value;
};

static struct lt_pinned_slots *slots_of(lt_ctx *ctx, lt_device *device)
{
    if (ctx->pinned_slots)
        return ctx->pinned_slots;
    struct lt_pinned_slots *s = malloc(sizeof *s);
    char *block = s ? device->alloc_host(device, SLOTS * SLOT_BYTES) : NULL;
    if (!block) {
        free(s);
        return NULL;
    }
    *s = (struct lt_pinned_slots){.block = block, .n_free = SLOTS};
    for (int i = 0; i < SLOTS; i++)
        s->free[i] = (uint8_t)i;
    return ctx->pinned_slots = s;
}

/* The number of a free slot; -1 if there is none or no pinned memory. */
static int take_slot(lt_ctx *ctx, lt_device *device)
{
    struct lt_pinned_slots *s = slots_of(ctx, device);
    if (!s)
        return -1;
    pthread_mutex_lock(&ctx->lock);
    int slot = s->n_free > 0 ? s->free[--s->n_free] : -1;
    pthread_mutex_unlock(&ctx->lock);
    return slot;
}

static char *slot_of(const lt_deferred *deferred)
{
    return deferred->ctx->pinned_slots->block + deferred->slot * SLOT_BYTES;
}

static void give_slot(lt_deferred *deferred)
{
    lt_ctx *ctx = deferred->ctx;
    if (deferred->slot < 0)
        return;
    pthread_mutex_lock(&ctx->lock);
    ctx->pinned_slots->free[ctx->pinned_slots->n_free++] = (uint8_t)deferred->slot;
    pthread_mutex_unlock(&ctx->lock);
    deferred->slot = -1;
}

static lt_status send(lt_deferred *deferred, lt_tensor *x)
{
    lt_device *device = deferred->device;
    if (!device->is_host)
        deferred->slot = take_slot(deferred->ctx, device);
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

void lt__pinned_slots_close(lt_ctx *ctx)
{
    if (!ctx->pinned_slots)
        return;
    ctx->devices[1]->free_host(ctx->devices[1], ctx->pinned_slots->block);
    free(ctx->pinned_slots);
    ctx->pinned_slots = NULL;
}
