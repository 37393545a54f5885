/* device_exchange.h - gradients that are summed where they are, by accelerators that reach each
 * other: the part of the reducer that asks for it and has the patience. Private to this room.
 *
 * Each rank needs an accelerator of its own. What is no gradient, as the record of a step, takes
 * the way of the group all the same.
 */
#ifndef LT_DIST_DEVICE_EXCHANGE_H
#define LT_DIST_DEVICE_EXCHANGE_H

#include "core/tensor.h"
#include "dist/bucket_plan.h"

_Static_assert((int)LT_MAX_TAIL <= (int)LT_COMM_TAIL, "a filter's numbers may go with a sum");

typedef struct lt_device_exchange {     /* zero: nothing was found out yet */
    bool chosen;
    lt_device_comm *comm;          /* NULL: buckets are summed on the CPU */
    void *on_wire;            /* of the device: a bucket as it travels */
    size_t room;              /* bytes of it */
    lt_bucket_range *zeros;          /* room for as many as items */
    int n_zeros;
} lt_device_exchange;

/* Finds out where buckets are summed, and if by a communicator, comes together with them. A
 * collective of the group, in the rank's thread. LT_EENV when that is not what sums wants,
 * LT_EDESYNC when others want something else. */
LT_MUST lt_status lt__device_exchange_choose(lt_device_exchange *exchange, lt_ctx *ctx,
                                             lt_group *group, lt_sum_backend sums);
/* In the rank's thread, while nothing is summed: room for all buckets of a plan. LT_ENOMEM. */
LT_MUST lt_status lt__device_exchange_make_room(lt_device_exchange *exchange, lt_ctx *ctx,
                                                const lt_bucket_plan *plan, lt_dtype wire);
/* On the group's thread, behind a call for the communicator, which has given `begun`: until all is
 * done that was begun. others: for it they are needed, who are waited for as long as the group
 * waits. LT_EPEER, with the bucket, or what the device fails with: then the group has failed, and
 * there are no communicator any more. */
LT_MUST lt_status lt__device_exchange_wait(lt_device_exchange *exchange, lt_group *group,
                                           const char *what, lt_status begun, bool others);
/* Parts from the others, unless the group has failed. A NULL communicator is fine. */
void lt__device_exchange_free(lt_device_exchange *exchange, lt_ctx *ctx, lt_group *group);

#endif
