/* filter.h - a bucket's allreduce by way of the reducer's filter; see dist.h. Private to this room.
 */
#ifndef LT_DIST_FILTER_H
#define LT_DIST_FILTER_H

#include "dist/bucket_plan.h"

typedef struct lt_filter { /* zero: there is none */
    lt_bucket_filter is;
    void *copy, *side;    /* of a bucket that may have to be sent again; of one that is sent from
                            * elsewhere */
    size_t room, side_room; /* bytes of them */
} lt_filter;

/* Carries a bucket and the first numbers of its packet over to the other ranks, and their sums
 * back; the bucket times 2^exponent on its way. packet->sent > 0: it has been there, and is to go
 * as it was before. */
typedef lt_status (*lt_send_fn)(void *ud, lt_packet *packet, int exponent);
/* The filter, which has a pack(), and the way: until the filter is content. */
LT_MUST lt_status lt__filter_send(const lt_bucket_filter *filter, lt_packet *packet,
                                   lt_send_fn send, void *ud);

/* Sums a bucket, and behind it, in the same allreduce, the numbers of its packet. owns: nobody else
 * uses the memory there, of which an arena has LT_GRAD_ROOM bytes behind its end; what is in it is
 * put back. If not, the bucket is summed elsewhere. */
LT_MUST lt_status lt__filter_allreduce(lt_filter *filter, lt_group *group, const lt_sum *bucket,
                                       bool owns, lt_packet *packet);
/* What is found in an item, whose gradient is at `data` on the CPU: what was measured when it was
 * complete, or what the filter sees when it looks. */
lt_grad_stats lt__filter_measure(const lt_bucket_filter *filter, const lt_bucket_item *item,
                                 void *data);
void lt__grad_stats_add(lt_grad_stats *to, lt_grad_stats from);
void lt__filter_free(lt_filter *filter);

#endif
