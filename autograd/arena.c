/* arena.c - segments: the flat arenas of values, gradients and half copies of one dtype. */
#include "autograd/tape.h"

lt_segment *lt__segment_new(lt_ctx *ctx, lt_dtype dtype, int64_t count)
{
    lt_segment *s = lt__alloc_zero(ctx, sizeof *s);
    if (!s)
        return NULL;
    atomic_init(&s->refs, 1);
    s->ctx = lt__ctx_retain(ctx);
    s->dtype = dtype;
    s->count = count;
    s->values = lt__storage_new(ctx, ctx->device, (size_t)count * lt_dtype_bytes(dtype));
    if (!s->values || s->values->device->fill(s->values->device, s->values->data, dtype,
                                              (size_t)count, 0) != LT_OK) {
        lt__segment_release(s);
        return NULL;
    }
    return s;
}

lt_segment *lt__segment_retain(lt_segment *s)
{
    atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
    return s;
}

void lt__segment_release(lt_segment *s)
{
    if (!s || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1)
        return;
    lt_ctx *ctx = s->ctx;
    lt__storage_release(s->values);
    lt__storage_release(s->grads);
    lt__storage_release(s->half);
    lt__free(ctx, s, sizeof *s);
    lt__ctx_release(ctx);
}

/* Memory from the exchange, or NULL if it provides none. */
static lt_storage *borrow(lt_ctx *ctx, size_t bytes)
{
    const lt_step_part *exchange = &ctx->slots.autograd->parts[LT_PART_EXCHANGE];
    lt_external_memory memory;
    if (!exchange->alloc_arena || !exchange->alloc_arena(exchange->ud, bytes, &memory))
        return NULL;
    lt_storage *storage = lt__storage_over(ctx, memory.data, bytes, memory.deleter, memory.ud);
    if (!storage)
        memory.deleter(memory.ud, memory.data);
    return storage;
}

lt_status lt__segment_need_grads(lt_segment *s)
{
    size_t bytes = (size_t)s->count * lt_dtype_bytes(s->dtype) + LT_GRAD_SPARE_BYTES;
    if (s->grads || (s->grads = borrow(s->ctx, bytes)))
        return LT_OK;
    s->grads = lt__storage_new(s->ctx, s->values->device, bytes);
    if (!s->grads)
        return LT_ENOMEM;
    return s->grads->device->fill(s->grads->device, s->grads->data, s->dtype, (size_t)s->count, 0);
}
