/* device_exchange.h - sums gradients on accelerators, through a device communicator such as NCCL's.
 * The calls of a communicator do not block; this part of the reducer polls it and handles timeouts
 * and failures. Private to dist.
 *
 * Each rank needs its own accelerator. Only gradients are summed this way; everything else, such as
 * the step record, uses the group.
 */
#ifndef LT_DIST_DEVICE_EXCHANGE_H
#define LT_DIST_DEVICE_EXCHANGE_H

#include "core/tensor.h"
#include "dist/bucket_plan.h"

_Static_assert((int)LT_MAX_TAIL <= (int)LT_COMM_TAIL, "a tail fits in a device sum");

typedef struct lt_device_exchange { /* all zeros before lt__device_exchange_choose() */
    bool chosen;
    lt_device_comm *comm;   /* NULL: buckets are summed on the CPU */
    void *on_wire;          /* a bucket in the wire dtype, on the device */
    size_t capacity;        /* size of on_wire in bytes */
    lt_bucket_range *zeros; /* (items) scratch: the ranges of a bucket to set to zero */
} lt_device_exchange;

/* Decides whether buckets are summed on accelerators, and if so opens the communicator. Does
 * nothing once chosen. A collective of the group, on the rank's thread. `sums` must be the same on
 * all ranks. LT_EENV if it is LT_SUM_BACKEND_NCCL and that is not possible; LT_ENOMEM; or the
 * failure of a collective. */
LT_NODISCARD lt_status lt__device_exchange_choose(lt_device_exchange *exchange, lt_ctx *ctx,
                                                  lt_group *group, lt_sum_backend sums);
/* Allocates memory for the largest bucket of a plan. On the rank's thread, while no exchange runs.
 * LT_ENOMEM. */
LT_NODISCARD lt_status lt__device_exchange_reserve(lt_device_exchange *exchange, lt_ctx *ctx,
                                                   const lt_bucket_plan *plan, lt_dtype wire);
/* Waits until the communicator has completed the operation that a call has started. `begun` is the
 * status of that call. others: the operation needs the other ranks, so the timeout of the group
 * applies. `what` names the bucket in messages. LT_EPEER, or the failure of the device; it then
 * also fails the group and closes the communicator. On the group's thread. */
LT_NODISCARD lt_status lt__device_exchange_wait(lt_device_exchange *exchange, lt_group *group,
                                                const char *what, lt_status begun, bool others);
/* Finalizes the communicator together with the other ranks, unless the group has failed, and frees
 * everything. Waits for the other ranks for at most 10 seconds. exchange->comm may be NULL. */
void lt__device_exchange_free(lt_device_exchange *exchange, lt_ctx *ctx, lt_group *group);

#endif
