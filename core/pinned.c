/* pinned.c - slots of 8 bytes in one block of pinned memory, for single elements; see device.h. */
#include <stdlib.h>

#include "core/tensor.h"

enum { SLOTS = 256, SLOT_BYTES = 8 };

struct lt_pinned_slots {
    char *block;
    int n_free;
    uint8_t free[SLOTS];
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

int lt__pinned_slot_take(lt_ctx *ctx, lt_device *device)
{
    struct lt_pinned_slots *s = slots_of(ctx, device);
    if (!s)
        return -1;
    pthread_mutex_lock(&ctx->lock);
    int slot = s->n_free > 0 ? s->free[--s->n_free] : -1;
    pthread_mutex_unlock(&ctx->lock);
    return slot;
}

void *lt__pinned_slot(const lt_ctx *ctx, int slot)
{
    return ctx->pinned_slots->block + slot * SLOT_BYTES;
}

void lt__pinned_slot_give(lt_ctx *ctx, int slot)
{
    struct lt_pinned_slots *s = ctx->pinned_slots;
    pthread_mutex_lock(&ctx->lock);
    s->free[s->n_free++] = (uint8_t)slot;
    pthread_mutex_unlock(&ctx->lock);
}

void lt__pinned_slots_close(lt_ctx *ctx)
{
    if (!ctx->pinned_slots)
        return;
    ctx->devices[1]->free_host(ctx->devices[1], ctx->pinned_slots->block);
    free(ctx->pinned_slots);
    ctx->pinned_slots = NULL;
}
