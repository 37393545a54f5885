/* staging.c - buckets between an accelerator and the CPU; see staging.h. */
#include "dist/staging.h"

lt_status lt__staging_grow(lt_device *device, void **at, size_t *capacity, size_t bytes)
{
    if (bytes <= *capacity)
        return LT_OK;
    if (*at)
        device->free_host(device, *at);
    *at = lt__host_alloc(device, bytes);
    *capacity = *at ? bytes : 0;
    return *at ? LT_OK : lt_errcode();
}

lt_status lt__staging_reserve(lt_staging *s, const lt_bucket_plan *plan)
{
    size_t max = 0;
    for (int k = 0; k < plan->n_buckets; k++) {
        const lt_planned_bucket *b = &plan->buckets[k];
        size_t each = lt_dtype_bytes(plan->items[b->first].place.dtype);
        size_t bytes = (size_t)(lt__bucket_plan_span(plan, b->first, b->end) + LT_MAX_TAIL) * each;
        max = LT_MAX(bytes, max);
    }
    for (int i = 0; i < 2; i++)
        LT_TRY(lt__staging_grow(s->device, &s->stage[i].at, &s->stage[i].capacity, max));
    return LT_OK;
}

lt_status lt__staging_fetch(lt_staging *s, const void *from, size_t bytes, uint64_t after,
                            void **at)
{
    struct lt_stage *stage = &s->stage[s->turn = !s->turn];
    lt_device *device = s->device;
    uint64_t mark;
    if (stage->mark > 0)
        LT_TRY(device->wait(device, stage->mark));
    stage->mark = 0;
    LT_TRY(device->download(device, *at = stage->at, from, bytes, after, &mark));
    return device->wait(device, mark);
}

lt_status lt__staging_send(lt_staging *s, void *to, size_t bytes, uint64_t after)
{
    struct lt_stage *stage = &s->stage[s->turn];
    LT_TRY(s->device->upload(s->device, to, stage->at, bytes, after, &stage->mark));
    s->last = stage->mark;
    return LT_OK;
}

lt_status lt__staging_stream_wait(lt_staging *s)
{
    uint64_t last = s->last;
    s->last = 0;
    return last > 0 ? s->device->stream_wait(s->device, last) : LT_OK;
}

void lt__staging_free(lt_staging *s)
{
    lt_status status = lt__staging_stream_wait(
        s);       /* the next user of the gradients' memory must come after the uploads */
    (void)status; /* a failed device has already reported its failure */
    for (int i = 0; i < 2; i++)
        if (s->stage[i].at)
            s->device->free_host(s->device, s->stage[i].at);
}
