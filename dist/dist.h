/* dist.h - the door of dist: ranks that train one net together, each with its share of every batch.
 *
 * A rank is a thread or a process with a context of its own. What ties it to the others is its
 * group: the collectives, a thread that communicates while the rank computes, and the news of a
 * rank that fails. On a group stands the reducer, which makes the gradients of all ranks one, while
 * backward goes on; the optimizers of the ranks then all do the same, so that their weights stay
 * the same bits without being sent.
 */
#ifndef LUATRAIN_DIST_H
#define LUATRAIN_DIST_H

#include "autograd/autograd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ==== Groups ================================================================================== */

typedef struct lt_group lt_group;

typedef struct lt_group_config { /* zero means default */
    double timeout; /* seconds that the others are waited for; 120 */
    bool spin;      /* there is a core for each thread: waits may burn it for some microseconds */
} lt_group_config;

/* Groups for n ranks that are threads of this process: group[r] is for the thread of rank r, and
 * for no other. config may be NULL. New, n of them. */
LT_MUST lt_status lt_local_open(int n, const lt_group_config *config, lt_group **group);
/* Leaves. Others that still want something of this rank fail with LT_EPEER. NULL is fine. */
LT_API void lt_group_close(lt_group *group);

LT_API int lt_group_rank(const lt_group *group);
LT_API int lt_group_size(const lt_group *group);

/* ==== Collectives ============================================================================= */

/* All ranks call the same ones in the same order, with equal counts and types: if not, LT_EDESYNC
 * tells which rank wanted what. Each waits until the others have come, for LT_EPEER when one does
 * not come in time, has failed or has left. After a failure all further ones fail alike. */

typedef struct lt_sum {  /* data = the sum over all ranks of scale * data, the same bits on all */
    const char *what;    /* "bucket 3": for messages. Borrowed */
    void *data;
    int64_t count;       /* elements */
    lt_dtype dtype;      /* a float dtype, or i64, whose scale is 1 */
    lt_dtype wire;       /* what f32 is rounded to before it travels: f32, f16 or bf16. Sums are in
                          * f32; what is beyond f16 becomes inf and stays so */
    double scale;        /* of this rank; applied before the rounding */
} lt_sum;

LT_MUST lt_status lt_group_allreduce(lt_group *group, const lt_sum *sum);
/* data of rank `root` to all. */
LT_MUST lt_status lt_group_broadcast(lt_group *group, const char *what, void *data, size_t bytes,
                                     int root);
LT_MUST lt_status lt_group_barrier(lt_group *group, const char *what);
/* From one rank to another, in order of sending; equal bytes. Others take no part. send() returns
 * once data may be changed. */
LT_MUST lt_status lt_group_send(lt_group *group, int to, const void *data, size_t bytes);
LT_MUST lt_status lt_group_receive(lt_group *group, int from, void *data, size_t bytes);

/* Bytes that this rank has sent to others, or that they have read from it, so far. */
LT_API uint64_t lt_group_bytes(const lt_group *group);

/* ==== In the background ======================================================================= */

/* Runs fn(ud) on the group's own thread, after what was started before; it may call collectives.
 * Those that the rank's thread calls wait until all that was started is done. */
LT_MUST lt_status lt_group_start(lt_group *group, lt_status (*fn)(void *ud), void *ud);
/* Until all is done. The first failure, with its message. */
LT_MUST lt_status lt_group_wait(lt_group *group);

/* ==== Failure ================================================================================= */

/* This rank ends with this thread's message and code: the others fail with LT_EPEER, soon. */
LT_API void lt_group_fail(lt_group *group);
/* The first failure of the job: its rank, code and message; false when there is none. Every rank
 * has the same answer. text holds `bytes`. */
LT_API bool lt_group_failure(const lt_group *group, int *rank, lt_status *code, char *text,
                             size_t bytes);
/* Where the rank is, for messages of others that miss it: "train.lua:31", and the step. Cheap. */
LT_API void lt_group_at(lt_group *group, const char *where, int64_t step);

#ifdef __cplusplus
}
#endif
#endif
