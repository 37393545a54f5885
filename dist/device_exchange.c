/* device_exchange.c - sums of gradients on accelerators; see device_exchange.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "dist/deadline.h"
#include "dist/group.h"
#include "dist/device_exchange.h"

/* Timeouts in seconds. FINALIZE: for finalizing the communicator together with the other ranks.
 * BLAME: after a failed sum, for the group to find out which rank has failed. LAG: after a rank has
 * failed, for a sum to complete, since that rank may have contributed before. */
static const double FINALIZE_SECONDS = 10, BLAME_SECONDS = 1, LAG_SECONDS = 0.2;

/* ==== Waiting ================================================================================= */

/* Spins at first: most sums take less time than a sleep and a wake-up. */
static void back_off(int times)
{
    if (times > 200)
        nanosleep(&(struct timespec){.tv_nsec = times < 2000 ? 20 * 1000 : 200 * 1000}, NULL);
}

/* Waits until the communicator has completed all operations. After `seconds`, sets *timed_out and
 * returns LT_EPEER without a message; 0 means no timeout. Also returns LT_EPEER if a rank has
 * failed. */
static lt_status wait_for(lt_device_comm *comm, const lt_group *group, double seconds,
                          bool *timed_out)
{
    double now = lt__seconds(), noticed = 0;
    lt_deadline deadline = {now + seconds, now};
    bool done = false;
    *timed_out = false;
    for (int i = 0;; i++) {
        LT_TRY(comm->calls->poll(comm, &done));
        if (done)
            return LT_OK;
        if (i % 16 == 15 && lt__group_check(group) != LT_OK) {
            noticed = noticed > 0 ? noticed : lt__seconds();
            if (lt__seconds() > noticed + LAG_SECONDS)
                return LT_EPEER;
        }
        if (seconds > 0 && (*timed_out = lt__deadline_is_over(&deadline)))
            return LT_EPEER;
        back_off(i);
    }
}

static void fail_timed_out(double seconds)
{
    lt_fail(LT_EPEER, "the accelerators of the other ranks did not connect within %g s", seconds);
}

/* If a connection breaks, the communicator's error message does not say which rank is gone, but the
 * group may soon find out. Replaces the message with the group's, or else prefixes it with
 * `what`. */
static lt_status explain(const lt_group *group, const char *what, lt_status status)
{
    char why[600];
    double until = lt__seconds() + BLAME_SECONDS;
    snprintf(why, sizeof why, "%s", lt_errmsg());
    while (status == LT_EPEER && lt_group_size(group) > 1 && lt__seconds() < until) {
        LT_TRY(lt__group_check(group));
        nanosleep(&(struct timespec){.tv_nsec = 10 * 1000 * 1000}, NULL);
    }
    return lt_fail(status, "%s: %s", what, why);
}

static void close_comm(lt_device_exchange *exchange)
{
    if (exchange->comm)
        exchange->comm->calls->close(exchange->comm);
    exchange->comm = NULL;
}

lt_status lt__device_exchange_wait(lt_device_exchange *exchange, lt_group *group, const char *what,
                                   lt_status begun, bool others)
{
    double seconds = others ? lt__group_timeout(group) : 0;
    bool timed_out = false;
    lt_status status = begun == LT_OK ? wait_for(exchange->comm, group, seconds, &timed_out)
                                      : begun;
    if (status == LT_OK)
        return LT_OK;
    if (timed_out)
        fail_timed_out(seconds);
    status = explain(group, what, status);
    lt_group_fail(group);
    close_comm(exchange);
    return status;
}

/* ==== The choice ============================================================================== */

typedef struct capability {           /* what a rank reports about its accelerator */
    bool can, timed_out;              /* timed_out: it cannot because other ranks did not arrive */
    char device[16];                  /* "cuda:0" */
    char name[LT_COMM_NAME_BYTES];    /* unique name of the device */
    char library[LT_COMM_NAME_BYTES]; /* "NCCL 2.28.9" */
    char host[64];
    char why[400]; /* the reason if it cannot */
} capability;

static lt_status exchange_capabilities(lt_group *group, const capability *mine, capability *all)
{
    all[lt_group_rank(group)] = *mine;
    for (int rank = 0; rank < lt_group_size(group); rank++)
        LT_TRY(lt_group_broadcast(group, "the capabilities of accelerators", &all[rank],
                                  sizeof *all, rank));
    return LT_OK;
}

/* Why accelerators cannot be used, or NULL if all can, each rank has its own, and all use the same
 * version of the communication library, as NCCL requires. Prefers the reason of a rank that did not
 * time out. */
static const char *find_obstacle(const lt_group *group, const capability *all, char text[600])
{
    int size = lt_group_size(group);
    for (int timed_out = 0; timed_out < 2; timed_out++)
        for (int rank = 0; rank < size; rank++)
            if (!all[rank].can && all[rank].timed_out == timed_out) {
                snprintf(text, 600, "rank %d: %s", lt__group_rank_in_job(group, rank),
                         all[rank].why);
                return text;
            }
    for (int rank = 1; rank < size; rank++)
        for (int k = 0; k < rank; k++)
            if (strcmp(all[rank].name, all[k].name) == 0) {
                snprintf(text, 600, "ranks %d and %d share %s", lt__group_rank_in_job(group, k),
                         lt__group_rank_in_job(group, rank), all[rank].device);
                return text;
            }
    for (int rank = 1; rank < size; rank++)
        if (strcmp(all[rank].library, all[0].library) != 0) {
            snprintf(text, 600, "rank %d on %s has %s, but rank %d on %s has %s",
                     lt__group_rank_in_job(group, 0), all[0].host, all[0].library,
                     lt__group_rank_in_job(group, rank), all[rank].host, all[rank].library);
            return text;
        }
    return NULL;
}

typedef struct comm_id {
    lt_status status;
    char id[LT_COMM_ID_BYTES];
    char text[400];
} comm_id;

/* Rank 0 makes the id of the communicator. Broadcasts it, or the reason why that failed. */
static lt_status share_id(lt_device *device, lt_group *group, comm_id *all)
{
    memset(all, 0, sizeof *all);
    if (lt_group_rank(group) == 0 && (all->status = device->comm_calls->make_id(device, all->id)))
        snprintf(all->text, sizeof all->text, "%s", lt_errmsg());
    return lt_group_broadcast(group, "the communicator id", all, sizeof *all, 0);
}

/* Opens the communicator and sets mine->can to whether that worked. Waits for half the timeout of
 * the group, so that there is time left to notify the other ranks. */
static lt_status open_comm(lt_device_exchange *exchange, lt_device *device, lt_group *group,
                           capability *mine)
{
    comm_id all;
    double seconds = lt__group_timeout(group) / 2;
    LT_TRY(share_id(device, group, &all));
    lt_status status = all.status;
    if (status == LT_OK)
        status = device->comm_calls->open(device, all.id, lt_group_rank(group),
                                          lt_group_size(group), &exchange->comm);
    if (status == LT_OK)
        status = wait_for(exchange->comm, group, seconds, &mine->timed_out);
    if (mine->timed_out)
        fail_timed_out(seconds);
    mine->can = status == LT_OK;
    snprintf(mine->why, sizeof mine->why, "%s", all.status ? all.text : lt_errmsg());
    return lt__group_check(group);
}

/* *may = whether all ranks are on accelerators and may sum there. `sums` is equal on all ranks. */
static lt_status compare_choices(lt_ctx *ctx, lt_group *group, lt_sum_backend sums, bool *may)
{
    bool there = !ctx->device->is_host;
    int size = lt_group_size(group);
    double on_device = there;
    lt_sum sum = {.what = "the choice of where to sum gradients",
                  .data = &on_device,
                  .count = 1,
                  .dtype = LT_F64,
                  .wire = LT_F64,
                  .scale = 1};
    LT_TRY(lt_group_allreduce(group, &sum));
    int missing = size - (int)on_device;
    *may = missing == 0 && sums != LT_SUM_BACKEND_HOST;
    if (!*may && sums == LT_SUM_BACKEND_NCCL)
        return lt_fail(
            LT_EENV,
            "--sums nccl requires every rank on an accelerator, but %d of %d %s; use --device cuda",
            missing, size, missing == 1 ? "is not" : "are not");
    return LT_OK;
}

/* Why the ranks, which are threads, should not sum on accelerators, or NULL. If all kernels are
 * loaded at the start, the user may accept the rest of the hazard. */
static const char *find_hazard(const lt_device *device, const lt_group *group, lt_sum_backend sums,
                               char text[600])
{
    const char *loading = getenv("CUDA_MODULE_LOADING"),
               *hazard = device->comm_calls->thread_hazard;
    bool accepted = sums == LT_SUM_BACKEND_NCCL && loading && strcmp(loading, "EAGER") == 0;
    if (!hazard || accepted || lt_group_size(group) == 1 || lt__group_has_processes(group))
        return NULL;
    snprintf(text, 600, "%s (luatrain launch -n %d starts processes)", hazard,
             lt__group_size_of_job(group));
    return text;
}

static lt_status choose(lt_device_exchange *exchange, lt_ctx *ctx, lt_group *group,
                        lt_sum_backend sums, capability *all)
{
    lt_device *device = ctx->device;
    char text[600];
    capability mine = {.can = false};
    snprintf(mine.device, sizeof mine.device, "%s", device->name);
    snprintf(mine.why, sizeof mine.why, "%s cannot communicate with other devices", device->name);
    gethostname(mine.host, sizeof mine.host - 1);
    if (device->comm_calls) {
        mine.can = device->comm_calls->identify(device, mine.name, mine.library) == LT_OK;
        snprintf(mine.why, sizeof mine.why, "%s", mine.can ? "" : lt_errmsg());
    }
    LT_TRY(exchange_capabilities(group, &mine, all));
    const char *why = find_obstacle(group, all, text), *hazard = NULL;
    if (!why)
        why = hazard = find_hazard(device, group, sums, text);
    if (!why) {
        LT_TRY(open_comm(exchange, device, group, &mine));
        LT_TRY(exchange_capabilities(group, &mine, all));
        why = find_obstacle(group, all, text);
    }
    if (!why)
        return LT_OK;
    close_comm(exchange);
    if (sums == LT_SUM_BACKEND_NCCL)
        return lt_fail(LT_EENV, "--sums nccl: %s", why);
    if (lt_group_rank(group) == 0)
        lt_log(ctx, hazard ? LT_LOG_WARN : LT_LOG_INFO, "%s: buckets are summed on the CPU", why);
    return LT_OK;
}

lt_status lt__device_exchange_choose(lt_device_exchange *exchange, lt_ctx *ctx, lt_group *group,
                                     lt_sum_backend sums)
{
    bool may = false;
    int size = lt_group_size(group);
    if (exchange->chosen)
        return LT_OK;
    LT_TRY(compare_choices(ctx, group, sums, &may));
    exchange->chosen = !may || (size == 1 && sums != LT_SUM_BACKEND_NCCL);
    if (exchange->chosen)
        return LT_OK;
    capability *all;
    LT_TRY(LT_CALLOC(all, size, "for %d ranks", size));
    lt_status status = choose(exchange, ctx, group, sums, all);
    exchange->chosen = status == LT_OK; /* after a failure, the next call fails again */
    free(all);
    return status;
}

/* ==== Memory ================================================================================== */

lt_status lt__device_exchange_reserve(lt_device_exchange *exchange, lt_ctx *ctx,
                                      const lt_bucket_plan *plan, lt_dtype wire)
{
    size_t max = 0;
    for (int k = 0; k < plan->n_buckets && wire != LT_F32; k++) {
        const lt_planned_bucket *b = &plan->buckets[k];
        size_t bytes = (size_t)lt__bucket_plan_span(plan, b->first, b->end) * lt_dtype_bytes(wire);
        if (plan->items[b->first].place.dtype == LT_F32 && bytes > max)
            max = bytes;
    }
    if (max > exchange->capacity) {
        lt__device_free(ctx, ctx->device, exchange->on_wire, exchange->capacity);
        exchange->on_wire = lt__device_alloc(ctx, ctx->device, max);
        exchange->capacity = exchange->on_wire ? max : 0;
    }
    if (max > 0 && !exchange->on_wire)
        return lt_fail(LT_ENOMEM, "out of memory for the copy of a bucket");
    return LT_RESIZE(exchange->zeros, plan->n_items, "for a bucket");
}

void lt__device_exchange_free(lt_device_exchange *exchange, lt_ctx *ctx, lt_group *group)
{
    double timeout = lt__group_timeout(group);
    bool failed = lt__group_has_failed(group), timed_out;
    if (exchange->comm && !failed && exchange->comm->calls->finalize(exchange->comm) == LT_OK) {
        lt_status status = wait_for(exchange->comm, group,
                                    timeout < FINALIZE_SECONDS ? timeout : FINALIZE_SECONDS,
                                    &timed_out);
        (void)status; /* close() aborts what has not finished by now */
    }
    close_comm(exchange);
    lt__device_free(ctx, ctx->device, exchange->on_wire, exchange->capacity);
    free(exchange->zeros);
}
