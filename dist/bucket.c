/* bucket.c - the work on one bucket of a sweep, on the group's thread; see reducer.h. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "dist/reducer.h"

static lt_status wait_until_there(lt_reducer *r, const lt_bucket_plan *b)
{
    lt_status code = LT_OK;
    char text[512];
    int rank;
    pthread_mutex_lock(&r->lock);
    while (b->coming > 0 && code == LT_OK) {
        struct timespec soon;
        clock_gettime(CLOCK_REALTIME, &soon);
        soon.tv_sec++;
        if (pthread_cond_timedwait(&r->ready, &r->lock, &soon) != 0 &&
            lt_group_failure(r->group, &rank, &code, text, sizeof text))
            lt_fail(LT_EPEER, "rank %d failed: %s", rank, text);
    }
    bool broken = r->broken;
    pthread_mutex_unlock(&r->lock);
    if (broken)
        return lt_fail(LT_EPEER, "backward failed on rank %d", r->rank);
    return code == LT_OK ? LT_OK : LT_EPEER;
}

/* Whether the gradients of this rank count; if not, even what is not finite in them does not. */
static bool counts(const lt_reducer *r) { return r->shards > 0 || r->share > 0; }

/* What the items [first, end) of a bucket have on this rank, which is at data; zeros where it has
 * nothing. */
static lt_packet packet_of(lt_reducer *r, int index, int first, int end, void *data)
{
    const lt_member *items = r->plan.items;
    const char *place = lt__member_data(&items[first]);
    bool measures = data != place && r->filter.is.measure;
    lt_packet packet = {.bucket = index, .x = r->sent, .data = data,
                        .count = lt__plan_span(&r->plan, first, end),
                        .dtype = items[first].place.dtype};
    for (int i = first; i < end; i++) {
        char *at = (char *)data + ((const char *)lt__member_data(&items[i]) - place);
        if (items[i].came != LT_NOTHING && counts(r)) {
            r->sent[packet.n++] = items[i].x;
            lt__measure_add(&packet.measure, items[i].before);
            lt__measure_add(&packet.measure, measures
                            ? lt__staging_measure(&r->filter.is, &items[i], at) : items[i].measure);
        } else
            memset(at, 0, lt__member_bytes(&items[i]));
    }
    return packet;
}

lt_status lt__bucket_reduce(lt_reducer *r, int index)
{
    char what[32];
    lt_bucket_plan *b = &r->plan.buckets[index];
    int first = b->first, end = b->end;
    b->times.bytes = 0;
    while (first < end && !r->plan.items[first].wanted)
        first++;
    while (end > first && !r->plan.items[end - 1].wanted)
        end--;
    if (first == end)
        return LT_OK;
    double asked = lt__seconds();
    LT_TRY(wait_until_there(r, b));
    bool is_here = r->ctx->device->is_host;
    void *place = lt__member_data(&r->plan.items[first]), *data = place;
    size_t bytes = (size_t)lt__plan_span(&r->plan, first, end) *
                   lt_dtype_bytes(r->plan.items[first].place.dtype);
    if (!is_here)
        LT_TRY(lt__staging_fetch(&r->staging, place, bytes, b->mark, &data));
    double began = lt__seconds();
    lt_packet packet = packet_of(r, index, first, end, data);
    snprintf(what, sizeof what, "bucket %d", index);
    lt_sum sum = {.what = what, .data = data, .count = packet.count, .dtype = packet.dtype,
                  .wire = packet.dtype == LT_F32 ? r->config.wire : packet.dtype,
                  .scale = r->shards > 0 || !counts(r) ? 1 : r->share};
    bool owns = !is_here || lt__plan_owns_behind(&r->plan, end, r->filter.is.tail);
    LT_TRY(lt__filter_allreduce(&r->filter, r->group, &sum, owns, &packet));
    if (!is_here)
        LT_TRY(lt__staging_send(&r->staging, place, bytes, b->mark));
    b->times.bytes = (size_t)sum.count * lt_dtype_bytes(sum.dtype);
    b->times.began = began;
    b->times.ended = lt__seconds();
    lt_trace(r->ctx, LT_TRACK_COMM, "wait for backward", asked, began - asked);
    lt_trace(r->ctx, LT_TRACK_COMM, what, began, b->times.ended - began);
    r->last.buckets++;
    return LT_OK;
}
