/* filter.c - allreduces of buckets with their tails; see filter.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/filter.h"
#include "dist/sum.h"

_Static_assert(LT_MAX_TAIL * sizeof(double) <= LT_GRAD_SPARE_BYTES, "a tail fits after an arena");

static lt_status reserve(char **memory, size_t *capacity, size_t bytes)
{
    return LT_RESERVE(*memory, bytes, capacity, "for the copy of a bucket");
}

static lt_status allreduce(lt_filter *f, lt_group *group, const lt_sum *sum)
{
    return f->has_server ? lt__server_sum(&f->server, group, sum) : lt_group_allreduce(group, sum);
}

/* Sums a bucket and its tail in one allreduce. The tail is first divided by the factor that the sum
 * applies. Its numbers are whole, so rounding the sums makes them exact again. */
static lt_status sum_with_tail(lt_filter *f, lt_group *group, const lt_sum *bucket, int exponent,
                               float *numbers)
{
    int tail = f->callbacks.tail;
    double behind[LT_MAX_TAIL];
    float scaled[LT_MAX_TAIL];
    size_t each = lt_dtype_bytes(bucket->dtype);
    char *end = (char *)bucket->data + (size_t)bucket->count * each;
    lt_sum whole = *bucket;
    whole.count += tail;
    whole.scale = ldexp(bucket->scale, exponent);
    for (int i = 0; i < tail; i++)
        scaled[i] = (float)(numbers[i] / whole.scale);
    memcpy(behind, end, (size_t)tail * each);
    lt_convert(end, bucket->dtype, scaled, LT_F32, (size_t)tail);
    lt_status status = allreduce(f, group, &whole);
    lt_convert(numbers, LT_F32, end, bucket->dtype, (size_t)tail);
    memcpy(end, behind, (size_t)tail * each);
    for (int i = 0; i < tail; i++)
        numbers[i] = rintf(numbers[i]);
    if (status == LT_OK && exponent != 0)
        lt__sum_arrays(&(lt_summand){bucket->data, ldexp(1, -exponent)}, 1, bucket->dtype,
                       bucket->dtype, 0, bucket->count);
    return status;
}

/* Like sum_with_tail(), but sums a copy, because the memory after the bucket may be in use. */
static lt_status sum_in_copy(lt_filter *f, lt_group *group, const lt_sum *bucket, int exponent,
                             float *numbers)
{
    size_t each = lt_dtype_bytes(bucket->dtype), bytes = (size_t)bucket->count * each;
    lt_sum side_sum = *bucket;
    LT_TRY(reserve(&f->side, &f->side_capacity, bytes + (size_t)f->callbacks.tail * each));
    memcpy(side_sum.data = f->side, bucket->data, bytes);
    LT_TRY(sum_with_tail(f, group, &side_sum, exponent, numbers));
    memcpy(bucket->data, f->side, bytes);
    return LT_OK;
}

lt_status lt__filter_send(const lt_bucket_filter *filter, lt_packet *p, lt_send_fn send, void *ud)
{
    for (p->sent = 0;; p->sent++) {
        p->exponent = 0;
        memset(p->tail, 0, sizeof p->tail);
        filter->pack(filter->ud, p);
        LT_TRY(send(ud, p, p->in_f16 ? p->exponent : 0));
        if (!filter->unpack(filter->ud, p) || !p->in_f16 || p->sent >= LT_MAX_RESENDS)
            return LT_OK;
    }
}

typedef struct host_bucket { /* a bucket on the CPU */
    lt_filter *filter;
    lt_group *group;
    const lt_sum *bucket;
    size_t bytes;
    bool owns;
} host_bucket;

static lt_status send_on_host(void *ud, lt_packet *p, int exponent)
{
    const host_bucket *h = ud;
    lt_filter *f = h->filter;
    if (p->sent > 0)
        memcpy(h->bucket->data, f->copy, h->bytes);
    return h->owns ? sum_with_tail(f, h->group, h->bucket, exponent, p->tail)
                   : sum_in_copy(f, h->group, h->bucket, exponent, p->tail);
}

lt_status lt__filter_allreduce(lt_filter *f, lt_group *group, const lt_sum *bucket, bool owns,
                               lt_packet *p)
{
    size_t bytes = (size_t)bucket->count * lt_dtype_bytes(bucket->dtype);
    if (!f->callbacks.pack)
        return allreduce(f, group, bucket);
    if (p->in_f16) {
        LT_TRY(reserve(&f->copy, &f->capacity, bytes));
        memcpy(f->copy, bucket->data, bytes);
    }
    return lt__filter_send(&f->callbacks, p, send_on_host,
                           &(host_bucket){f, group, bucket, bytes, owns});
}

lt_grad_stats lt__filter_measure(const lt_bucket_filter *filter, const lt_bucket_item *item,
                                 void *data)
{
    lt_ctx *ctx = item->x->ctx;
    lt_storage storage = {
        .ctx = ctx, .device = ctx->devices[0], .data = data, .bytes = lt__bucket_item_bytes(item)};
    lt_tensor grad = {.dtype = (uint8_t)item->place.dtype,
                      .ndim = item->x->ndim,
                      .kept = true,
                      .count = item->x->count,
                      .data = data,
                      .storage = &storage,
                      .ctx = ctx};
    for (int i = 0; i < grad.ndim; i++)
        grad.dims[i] = item->x->dims[i];
    return item->measured         ? item->stats
           : filter->measure_late ? filter->measure_late(filter->ud, &grad)
                                  : (lt_grad_stats){0};
}

void lt__grad_stats_add(lt_grad_stats *to, lt_grad_stats from)
{
    to->largest = fmax(to->largest, from.largest);
    to->not_finite += from.not_finite;
}

void lt__filter_free(lt_filter *f)
{
    free(f->copy);
    free(f->side);
    lt__server_sum_free(&f->server);
}
