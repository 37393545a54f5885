/* filter.h - the allreduce of a bucket with the reducer's bucket filter; see dist.h. Private to
 * this room.
 */
#ifndef LT_DIST_FILTER_H
#define LT_DIST_FILTER_H

#include "dist/bucket_plan.h"

typedef struct lt_filter { /* all zeros: no filter */
    lt_bucket_filter is;
    /* a copy of an f16 bucket, in case it must be sent again; and where a bucket is summed if the
     * memory after it is not free */
    void *copy, *side;
    size_t room, side_room; /* bytes of copy and of side */
} lt_filter;

/* Sums a bucket and the tail of its packet over all ranks. The bucket is multiplied by 2^exponent
 * while it travels. If packet->sent > 0, the function first restores the bucket from before the
 * first sum. */
typedef lt_status (*lt_send_fn)(void *ud, lt_packet *packet, int exponent);
/* Calls pack(), send and unpack() until unpack() accepts the sum, at most 1 + LT_MAX_RESENDS
 * times. filter->pack must not be NULL. */
LT_MUST lt_status lt__filter_send(const lt_bucket_filter *filter, lt_packet *packet,
                                  lt_send_fn send, void *ud);

/* Sums a bucket on the CPU, and the tail of its packet in the same allreduce. If owns, the tail is
 * placed after the bucket, and the memory there is restored afterwards; every arena has
 * LT_GRAD_ROOM bytes after its end for this. If not owns, the sum is done in a copy. LT_ENOMEM, or
 * the error of the allreduce. */
LT_MUST lt_status lt__filter_allreduce(lt_filter *filter, lt_group *group, const lt_sum *bucket,
                                       bool owns, lt_packet *packet);
/* The statistics of an item whose gradient is at `data` on the CPU. Returns those measured when the
 * gradient was complete, or else calls filter->look(). */
lt_grad_stats lt__filter_measure(const lt_bucket_filter *filter, const lt_bucket_item *item,
                                 void *data);
/* to = the statistics of both. */
void lt__grad_stats_add(lt_grad_stats *to, lt_grad_stats from);
void lt__filter_free(lt_filter *filter);

#endif
