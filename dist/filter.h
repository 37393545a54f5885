/* filter.h - a bucket's allreduce by way of the reducer's filter; see dist.h. Private to this room.
 */
#ifndef LT_DIST_FILTER_H
#define LT_DIST_FILTER_H

#include "dist/dist.h"

typedef struct lt_filter { /* zero: there is none */
    lt_bucket_filter is;
    void *copy, *aside;    /* of a bucket that may have to be sent again; of one that is sent from
                            * elsewhere */
    size_t room, aside_room; /* bytes of them */
} lt_filter;

/* Sums a bucket, and behind it, in the same allreduce, the numbers of its packet. owns: nobody else
 * uses the memory there, of which an arena has LT_GRAD_ROOM bytes behind its end; what is in it is
 * put back. If not, the bucket is summed elsewhere. */
LT_MUST lt_status lt__filter_allreduce(lt_filter *filter, lt_group *group, const lt_sum *bucket,
                                       bool owns, lt_packet *packet);
void lt__measure_add(lt_measure *to, lt_measure from);
void lt__filter_free(lt_filter *filter);

#endif
