/* later.c - numbers that are read later: on their way from an accelerator while the host goes on.
 *
 * They come in one block of memory that the accelerator can copy to, made when the first is asked
 * for. Who finds it full gets a number that was waited for. The thread of the context asks for
 * them; one more may read them.
 */
#include <math.h>
#include <stdlib.h>

#include "core/tensor.h"

enum { SLOTS = 256, SLOT_BYTES = 8 };

typedef struct lt_laters {
    char *block;
    int n_free;
    uint8_t free[SLOTS];
} lt_laters;

struct lt_later {
    lt_ctx *ctx;
    lt_device *device;
    int slot;                 /* or -1: value is known */
    lt_dtype dtype;           /* of what comes */
    uint64_t mark;            /* behind it */
    double value;
};

static lt_laters *laters_of(lt_ctx *ctx, lt_device *device)
{
    if (ctx->laters)
        return ctx->laters;
    lt_laters *l = malloc(sizeof *l);
    char *block = l ? device->alloc_host(device, SLOTS * SLOT_BYTES) : NULL;
    if (!block) {
        free(l);
        return NULL;
    }
    *l = (lt_laters){.block = block, .n_free = SLOTS};
    for (int i = 0; i < SLOTS; i++)
        l->free[i] = (uint8_t)i;
    return ctx->laters = l;
}

void lt__laters_close(lt_ctx *ctx)
{
    if (!ctx->laters)
        return;
    ctx->devices[1]->free_host(ctx->devices[1], ctx->laters->block);
    free(ctx->laters);
    ctx->laters = NULL;
}

static char *slot_of(const lt_later *later)
{
    return later->ctx->laters->block + later->slot * SLOT_BYTES;
}

static void give_slot(lt_later *later)
{
    lt_laters *l = later->ctx->laters;
    if (later->slot < 0)
        return;
    pthread_mutex_lock(&later->ctx->lock);
    l->free[l->n_free++] = (uint8_t)later->slot;
    pthread_mutex_unlock(&later->ctx->lock);
    later->slot = -1;
}

/* -1: there is none. */
static int take_slot(lt_ctx *ctx)
{
    lt_laters *l = ctx->laters;
    pthread_mutex_lock(&ctx->lock);
    int slot = l->n_free > 0 ? l->free[--l->n_free] : -1;
    pthread_mutex_unlock(&ctx->lock);
    return slot;
}

static lt_status send(lt_later *later, lt_tensor *x)
{
    lt_device *device = later->device;
    if (!device->is_host && laters_of(later->ctx, device))
        later->slot = take_slot(later->ctx);
    if (later->slot < 0)
        return lt_item(x, 0, &later->value);
    LT_TRY(device->copy(device, slot_of(later), x->data, lt_dtype_bytes(later->dtype)));
    later->mark = device->mark(device);
    return LT_OK;
}

lt_later *lt_item_later(lt_tensor *x)
{
    if (lt__check_alive(x) != LT_OK)
        return NULL;
    if (x->count != 1) {
        char text[96];
        lt_fail(LT_EINVAL, "one element is read later, this is %s",
                lt_describe(x, text, sizeof text));
        return NULL;
    }
    lt_later *later = lt__alloc_zero(x->ctx, sizeof *later);
    if (!later)
        return NULL;
    *later = (lt_later){.ctx = lt__ctx_retain(x->ctx), .device = x->storage->device, .slot = -1,
                        .dtype = (lt_dtype)x->dtype, .value = NAN};
    if (send(later, x) == LT_OK)
        return later;
    lt_later_free(later);
    return NULL;
}

lt_status lt_later_item(lt_later *later, double *value)
{
    if (later->slot >= 0) {
        LT_TRY(later->device->wait(later->device, later->mark));
        lt_convert(&later->value, LT_F64, slot_of(later), later->dtype, 1);
        give_slot(later);
    }
    *value = later->value;
    return LT_OK;
}

void lt_later_free(lt_later *later)
{
    if (!later)
        return;
    lt_ctx *ctx = later->ctx;
    give_slot(later);
    lt__free(ctx, later, sizeof *later);
    lt__ctx_release(ctx);
}
