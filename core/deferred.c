/* deferred.c - deferred scalars: single elements that are copied from an accelerator to the host in
 * the background.
 *
 * They use slots of pinned memory. If no slot is free, or there is no pinned memory, the read is
 * synchronous. The context's thread makes the requests; one other thread may read the values.
 */
#include <math.h>

#include "core/tensor.h"

struct lt_deferred {
    lt_ctx *ctx;
    lt_device *device;
    int slot;       /* slot number; -1 once value is valid */
    lt_dtype dtype; /* dtype of the element in the slot */
    uint64_t mark;  /* mark after the copy */
    double value;
};

static char *slot_of(const lt_deferred *deferred)
{
    return lt__pinned_slot(deferred->ctx, deferred->slot);
}

static void give_slot(lt_deferred *deferred)
{
    if (deferred->slot >= 0)
        lt__pinned_slot_give(deferred->ctx, deferred->slot);
    deferred->slot = -1;
}

static lt_status send(lt_deferred *deferred, lt_tensor *x)
{
    lt_device *device = deferred->device;
    if (!device->is_host)
        deferred->slot = lt__pinned_slot_take(deferred->ctx, device);
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
