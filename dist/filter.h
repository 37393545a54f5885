/* filter.h - the allreduce of a bucket with the reducer's bucket filter; see dist.h. Private to
 * dist.
 */
#ifndef LT_DIST_FILTER_H
#define LT_DIST_FILTER_H

#include "dist/bucket_plan.h"
#include "dist/server_sum.h"

typedef struct lt_filter { /* all zeros: no filter */
    lt_bucket_filter callbacks;
    /* copy: a copy of a bucket that travels in f16, in case it must be sent again. side: memory in
     * which a bucket and its tail are summed if the memory after the bucket is in use */
    char *copy, *side;
    size_t capacity, side_capacity; /* sizes of copy and of side in bytes */
    bool has_server;                /* rank 0 sums, see lt_reducer_config.server */
    lt_server_sum server;
} lt_filter;

/* Sums a bucket and the tail of its packet over all ranks. The bucket is multiplied by 2^exponent
 * while it travels. If packet->sent > 0, the function first restores the bucket as it was before
 * the first sum. */
typedef lt_status (*lt_send_fn)(void *ud, lt_packet *packet, int exponent);
/* Calls pack(), send and unpack() until unpack() accepts the sum, at most 1 + LT_MAX_RESENDS
 * times. filter->pack must not be NULL. */
LT_NODISCARD lt_status lt__filter_send(const lt_bucket_filter *filter, lt_packet *packet,
                                       lt_send_fn send, void *ud);

/* Sums a bucket on the CPU, and the tail of its packet in the same allreduce. owns: the memory
 * after the bucket may be used. The tail is then placed there, and that memory is restored
 * afterwards; every arena has LT_GRAD_SPARE_BYTES after its end for this. Otherwise a copy is
 * summed. LT_ENOMEM, or the error of the allreduce. */
LT_NODISCARD lt_status lt__filter_allreduce(lt_filter *filter, lt_group *group,
                                            const lt_sum *bucket, bool owns, lt_packet *packet);
/* The statistics of an item whose gradient is at `data` on the CPU: those measured when backward
 * completed it, otherwise the result of filter->measure_late(), or zeros without that callback. */
lt_grad_stats lt__filter_measure(const lt_bucket_filter *filter, const lt_bucket_item *item,
                                 void *data);
/* Merges `from` into *to. */
void lt__grad_stats_add(lt_grad_stats *to, lt_grad_stats from);
void lt__filter_free(lt_filter *filter);

#endif
