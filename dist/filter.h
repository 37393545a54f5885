/* filter.h - a bucket's allreduce by way of the reducer's filter; see dist.h. Private to this room.
 */
#ifndef LT_DIST_FILTER_H
#define LT_DIST_FILTER_H

#include "dist/dist.h"

typedef struct lt_filter { /* zero: there is none */
    lt_bucket_filter is;
    void *copy;            /* of a bucket that may have to be sent again */
    size_t room;           /* bytes of it */
} lt_filter;

/* Sums a bucket, and behind it, in the same allreduce, the numbers of its packet: that memory is
 * the arena's, of which LT_GRAD_ROOM bytes are free behind the last bucket; what else lies there is
 * put back. */
LT_MUST lt_status lt__filter_allreduce(lt_filter *filter, lt_group *group, const lt_sum *bucket,
                                       lt_packet *packet);
void lt__measure_add(lt_measure *to, lt_measure from);
void lt__filter_free(lt_filter *filter);

#endif
