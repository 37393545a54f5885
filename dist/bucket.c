/* bucket.c - sums one bucket over all ranks, on the group's thread; see reducer.h.
 *
 * There are three cases. A bucket on the CPU is summed in place. A bucket on an accelerator is
 * summed there by a device communicator, if there is one. Otherwise it is copied to the CPU, summed
 * there and copied back.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "dist/group.h"
#include "dist/reducer.h"

static lt_status wait_until_ready(lt_reducer *r, const lt_planned_bucket *b)
{
    lt_status status = LT_OK;
    pthread_mutex_lock(&r->lock);
    while (b->pending > 0 && status == LT_OK) {
        struct timespec soon;
        clock_gettime(CLOCK_MONOTONIC, &soon);
        soon.tv_sec++;
        if (pthread_cond_clockwait(&r->ready, &r->lock, CLOCK_MONOTONIC, &soon) != 0)
            status = lt__group_check(r->group);
    }
    bool broken = r->broken;
    pthread_mutex_unlock(&r->lock);
    if (broken)
        return lt_fail(LT_EPEER, "backward failed on rank %d",
                       lt__group_rank_in_job(r->group, r->rank));
    return status;
}

/* Whether the gradients of this rank count. If not, non-finite values in them are ignored, too. The
 * share is the one of the record: with a delay, r->share may belong to the next step. */
static bool counts(const lt_reducer *r) { return r->shards > 0 || r->record.share > 0; }

static bool has(const lt_reducer *r, const lt_bucket_item *item)
{
    return item->state != LT_GRAD_NONE && counts(r);
}

static double scale_of(const lt_reducer *r)
{
    return r->shards > 0 || !counts(r) ? 1 : r->record.share;
}

/* Whether the gradient decides if the step is applied. If not, it is a leftover gradient or has no
 * optimizer. */
static bool decides(const lt_bucket_item *item) { return item->has_optim && item->accumulated; }
static bool is_unowned(const lt_reducer *r, const lt_bucket_item *item)
{
    return has(r, item) && !decides(item);
}

static lt_dtype wire_of(const lt_reducer *r, lt_dtype dtype)
{
    return dtype == LT_F32 ? r->config.wire : dtype;
}

/* Items [first, end) of the plan: the part of a bucket that some rank uses. */
typedef struct part {
    int index, first, end;
    lt_planned_bucket *plan;
    char what[32]; /* "bucket 3" */
    void *place;   /* address in the arena */
    double began;  /* time when the sum began */
} part;

static const lt_bucket_item *item_of(const lt_reducer *r, const part *b, int i)
{
    return &r->plan.items[b->first + i];
}

static lt_packet packet_of(const lt_reducer *r, const part *b, void *data)
{
    lt_dtype dtype = item_of(r, b, 0)->place.dtype;
    return (lt_packet){.ctx = r->ctx,
                       .bucket = b->index,
                       .x = r->sent,
                       .data = data,
                       .dtype = dtype,
                       .count = lt__bucket_plan_span(&r->plan, b->first, b->end),
                       .in_f16 = dtype == LT_F32 && r->config.wire == LT_F16};
}

/* ==== On the CPU ============================================================================== */

/* Prepares the bucket at data: writes zeros where this rank has no gradient, and measures the
 * others. Returns its packet. */
static lt_packet gather(lt_reducer *r, const part *b, void *data)
{
    lt_packet packet = packet_of(r, b, data);
    for (int i = 0; i < b->end - b->first; i++) {
        const lt_bucket_item *it = item_of(r, b, i);
        char *at = (char *)data + ((char *)lt__bucket_item_data(it) - (char *)b->place);
        lt_grad_stats stats = {0};
        if (has(r, it)) {
            r->sent[packet.n++] = it->x;
            if (decides(it) || packet.in_f16)
                stats = lt__filter_measure(&r->filter.callbacks, it, at);
            packet.largest = fmax(packet.largest, stats.largest);
            if (decides(it)) {
                lt__grad_stats_add(&packet.stats, it->stats_before);
                lt__grad_stats_add(&packet.stats, stats);
            }
        } else
            memset(at, 0, lt__bucket_item_bytes(it));
    }
    return packet;
}

static lt_status sum_on_host(lt_reducer *r, part *b)
{
    bool is_here = r->ctx->device->is_host;
    void *data = b->place;
    lt_dtype dtype = item_of(r, b, 0)->place.dtype;
    size_t bytes = (size_t)lt__bucket_plan_span(&r->plan, b->first, b->end) * lt_dtype_bytes(dtype);
    if (!is_here)
        LT_TRY(lt__staging_fetch(&r->staging, b->place, bytes, b->plan->mark, &data));
    b->began = lt__seconds();
    lt_packet packet = gather(r, b, data);
    lt_sum sum = {.what = b->what,
                  .data = data,
                  .count = packet.count,
                  .dtype = dtype,
                  .wire = wire_of(r, dtype),
                  .scale = scale_of(r)};
    bool owns = !is_here || lt__bucket_plan_owns_after(&r->plan, b->end, r->filter.callbacks.tail);
    LT_TRY(lt__filter_allreduce(&r->filter, r->group, &sum, owns, &packet));
    return is_here ? LT_OK : lt__staging_send(&r->staging, b->place, bytes, b->plan->mark);
}

/* ==== On accelerators ========================================================================= */

typedef struct device_bucket { /* a bucket that is summed on the accelerator */
    lt_reducer *r;
    const char *what;
    lt_device_sum sum;
} device_bucket;

/* One allreduce of the bucket and its tail. With on_wire, the bucket itself does not change. */
static lt_status send_on_device(void *ud, lt_packet *p, int exponent)
{
    const device_bucket *t = ud;
    lt_device_comm *comm = t->r->device_exchange.comm;
    lt_device_sum sum = t->sum;
    sum.scale = ldexp(sum.scale, exponent);
    memcpy(comm->tail, p->tail, sizeof p->tail);
    lt_status begun = comm->calls->allreduce(comm, &sum);
    LT_TRY(lt__device_exchange_wait(&t->r->device_exchange, t->r->group, t->what, begun, true));
    memcpy(p->tail, comm->tail, sizeof p->tail);
    return LT_OK;
}

/* Sets the first `zeros` ranges of exchange->zeros in the bucket to zero and adds the statistics of
 * `count` elements at data to *stats. Waits until the accelerator has completed the bucket. */
static lt_status measure_on_device(lt_reducer *r, const part *b, void *data, int64_t count,
                                   int zeros, lt_grad_stats *stats)
{
    lt_device_exchange *exchange = &r->device_exchange;
    lt_device_comm *comm = exchange->comm;
    bool finds = r->filter.callbacks.measure_late != NULL;
    lt_status begun = comm->calls->prepare(comm, data, count, item_of(r, b, 0)->place.dtype,
                                           exchange->zeros, zeros, finds, b->plan->mark);
    LT_TRY(lt__device_exchange_wait(exchange, r->group, b->what, begun, false));
    if (finds)
        lt__grad_stats_add(stats, (lt_grad_stats){comm->largest, comm->not_finite});
    return LT_OK;
}

/* Measures only the items that decide whether the step is applied. This is needed in the rare
 * bucket that also has items that do not decide. */
static lt_status measure_deciding(lt_reducer *r, const part *b, lt_grad_stats *stats)
{
    int n = b->end - b->first;
    for (int end, i = 0; i < n; i = end + 1) {
        for (end = i; end < n && !is_unowned(r, item_of(r, b, end)); end++)
            ;
        if (end > i)
            LT_TRY(measure_on_device(r, b, lt__bucket_item_data(item_of(r, b, i)),
                                     lt__bucket_plan_span(&r->plan, b->first + i, b->first + end),
                                     0, stats));
    }
    return LT_OK;
}

/* Writes zeros where this rank has no gradient. Measures the others if the filter needs it. */
static lt_status prepare(lt_reducer *r, const part *b, lt_packet *packet)
{
    int64_t first = item_of(r, b, 0)->place.offset;
    lt_grad_stats all = {0};
    bool all_decide = true;
    int n = 0;
    for (int i = 0; i < b->end - b->first; i++) {
        const lt_bucket_item *it = item_of(r, b, i);
        if (has(r, it))
            r->sent[packet->n++] = it->x;
        else
            r->device_exchange.zeros[n++] =
                (lt_bucket_range){it->place.offset - first, it->x->count};
        all_decide &= !is_unowned(r, it);
    }
    LT_TRY(measure_on_device(r, b, b->place, packet->count, n, &all));
    packet->largest = all.largest;
    packet->stats = all;
    if (all_decide || !r->filter.callbacks.measure_late)
        return LT_OK;
    packet->stats = (lt_grad_stats){0};
    return measure_deciding(r, b, &packet->stats);
}

static lt_status sum_on_device(lt_reducer *r, part *b)
{
    const lt_bucket_filter *filter = &r->filter.callbacks;
    lt_packet packet = packet_of(r, b, NULL);
    lt_dtype wire = wire_of(r, packet.dtype);
    LT_TRY(prepare(r, b, &packet));
    b->began = lt__seconds();
    device_bucket t = {r,
                       b->what,
                       {.data = b->place,
                        .count = packet.count,
                        .dtype = packet.dtype,
                        .wire = wire,
                        .scale = scale_of(r),
                        .on_wire = wire == packet.dtype ? NULL : r->device_exchange.on_wire,
                        .n_tail = filter->pack ? filter->tail : 0}};
    LT_TRY(filter->pack ? lt__filter_send(filter, &packet, send_on_device, &t)
                        : send_on_device(&t, &packet, 0));
    if (!t.sum.on_wire)
        return LT_OK;
    lt_device_comm *comm = r->device_exchange.comm;
    int exponent = packet.in_f16 ? packet.exponent : 0;
    lt_status begun = comm->calls->unpack(comm, &t.sum, ldexp(1, -exponent));
    return lt__device_exchange_wait(&r->device_exchange, r->group, b->what, begun, false);
}

/* ==== Both ==================================================================================== */

lt_status lt__bucket_reduce(lt_reducer *r, int index)
{
    lt_planned_bucket *plan = &r->plan.buckets[index];
    part b = {.index = index, .first = plan->first, .end = plan->end, .plan = plan};
    plan->times.bytes = 0;
    while (b.first < b.end && !r->plan.items[b.first].used)
        b.first++;
    while (b.end > b.first && !r->plan.items[b.end - 1].used)
        b.end--;
    if (b.first == b.end)
        return LT_OK;
    double asked = lt__seconds();
    LT_TRY(wait_until_ready(r, plan));
    snprintf(b.what, sizeof b.what, "bucket %d", index);
    b.place = lt__bucket_item_data(item_of(r, &b, 0));
    LT_TRY(r->device_exchange.comm ? sum_on_device(r, &b) : sum_on_host(r, &b));
    plan->times.bytes = (size_t)lt__bucket_plan_span(&r->plan, b.first, b.end) *
                        lt_dtype_bytes(item_of(r, &b, 0)->place.dtype);
    plan->times.began = b.began;
    plan->times.ended = lt__seconds();
    lt_trace(r->ctx, LT_TRACK_COMM, "wait for backward", asked, b.began - asked);
    lt_trace(r->ctx, LT_TRACK_COMM, b.what, b.began, plan->times.ended - b.began);
    r->n_sent++;
    return LT_OK;
}
