/* host_calls.c - what rank 0 calls while the server thread runs; see host.h. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/async/host_internal.h"

lt_inbox *lt__host_inbox(lt_host *h) { return &h->to_root; }

lt_status lt__host_begin(lt_host *h, const lt_layout *from)
{
    if (h->begun)
        return LT_OK;
    LT_TRY(lt__mirror_copy(&h->mirror.layout, from));
    h->begun = true;
    return lt__layout_digest(from, &h->digest);
}

lt_status lt__host_set_limit(lt_host *h, int64_t tickets, const lt_layout *from)
{
    pthread_mutex_lock(&h->lock);
    lt_status status = lt__order_set_limit(h->server.order, tickets);
    if (status == LT_OK)
        status = lt__host_begin(h, from);
    if (status == LT_OK)
        h->paused = false;
    pthread_cond_broadcast(&h->resumed);
    pthread_mutex_unlock(&h->lock);
    return status;
}

int64_t lt__host_done_below(lt_host *h)
{
    pthread_mutex_lock(&h->lock);
    int64_t done = lt__order_done_below(h->server.order);
    pthread_mutex_unlock(&h->lock);
    return done;
}

int64_t lt__host_steps(lt_host *h)
{
    pthread_mutex_lock(&h->lock);
    int64_t steps = lt__server_steps(&h->server);
    pthread_mutex_unlock(&h->lock);
    return steps;
}

void lt__host_pause(lt_host *h, bool on)
{
    pthread_mutex_lock(&h->lock);
    h->paused = on || !h->begun;
    pthread_cond_broadcast(&h->resumed);
    pthread_mutex_unlock(&h->lock);
}

void lt__host_stop_at(lt_host *h, int64_t version, int code)
{
    pthread_mutex_lock(&h->lock);
    h->last = version;
    h->code = code;
    pthread_mutex_unlock(&h->lock);
}

void lt__host_stop(lt_host *h, int code)
{
    pthread_mutex_lock(&h->lock);
    h->stopped = true;
    h->code = code;
    pthread_mutex_unlock(&h->lock);
}

lt_status lt__host_read(lt_host *h, const lt_layout *to)
{
    pthread_mutex_lock(&h->lock);
    lt_status status = lt__mirror_copy(to, &h->mirror.layout);
    pthread_mutex_unlock(&h->lock);
    return status;
}

lt_status lt__host_take_snapshots(lt_host *h)
{
    int64_t done = lt__order_done_below(h->server.order);
    return lt__snapshots_take(&h->snapshots, &h->mirror.layout, done);
}

lt_status lt__host_keep_at(lt_host *h, int64_t ticket)
{
    pthread_mutex_lock(&h->lock);
    lt_status status = lt__snapshots_plan(&h->snapshots, ticket);
    if (status == LT_OK)
        status = lt__host_take_snapshots(h);
    pthread_mutex_unlock(&h->lock);
    return status;
}

lt_status lt__host_read_kept(lt_host *h, int64_t ticket, const lt_layout *to)
{
    pthread_mutex_lock(&h->lock);
    lt_status status = lt__snapshots_read(&h->snapshots, ticket, to);
    pthread_mutex_unlock(&h->lock);
    return status;
}

void lt__host_forget(lt_host *h, int64_t ticket)
{
    pthread_mutex_lock(&h->lock);
    lt__snapshots_forget(&h->snapshots, ticket);
    pthread_mutex_unlock(&h->lock);
}

lt_status lt__host_status(lt_host *h)
{
    pthread_mutex_lock(&h->lock);
    lt_status status = h->status == LT_OK ? LT_OK : lt_fail(h->status, "%s", h->text);
    pthread_mutex_unlock(&h->lock);
    return status;
}

lt_status lt__host_read_stats(lt_host *h, int group, lt_async_stats *stats)
{
    pthread_mutex_lock(&h->lock);
    lt_status status = lt__server_stats(&h->server, group, stats);
    stats->wire_bytes = h->wire_bytes;
    pthread_mutex_unlock(&h->lock);
    return status;
}

static lt_tensor *copy_to(lt_ctx *ctx, lt_tensor *x)
{
    lt_tensor *copy = lt_tensor_new(ctx, (lt_dtype)x->dtype, x->ndim, x->dims);
    if (copy && lt_copy(copy, x) == LT_OK)
        return copy;
    lt_release(copy);
    return NULL;
}

static const char KEPT[] = "kept/"; /* followed by the ticket: a snapshot's name */

lt_tensor *lt__host_state(lt_host *h, lt_ctx *ctx, int i, char name[LT_ASYNC_NAME])
{
    const double time = 0;
    int64_t ticket = 0;
    pthread_mutex_lock(&h->lock);
    int n = lt__server_state_count(&h->server);
    lt_tensor *x =
        i < n ? lt__server_state(&h->server, i, &time, 1, name)
              : lt__snapshots_state(&h->snapshots, h->ctx, h->mirror.layout.bytes, i - n, &ticket);
    if (ticket > 0)
        snprintf(name, LT_ASYNC_NAME, "%s%" PRId64, KEPT, ticket);
    lt_tensor *copy = x ? copy_to(ctx, x) : NULL;
    lt_release(x);
    pthread_mutex_unlock(&h->lock);
    return copy;
}

/* Restores the snapshots among the tensors of a state. */
static lt_status restore_snapshots(lt_host *h, const char *const *names, lt_tensor *const *tensors,
                                   int n)
{
    for (int i = 0; i < n; i++) {
        if (strncmp(names[i], KEPT, strlen(KEPT)) != 0)
            continue;
        char *end;
        int64_t ticket = strtoll(names[i] + strlen(KEPT), &end, 10);
        if (*end || ticket <= 0 || ticket > lt__order_done_below(h->server.order) ||
            tensors[i]->dtype != LT_U8 || (size_t)tensors[i]->count != h->mirror.layout.bytes)
            return lt__server_damaged(names[i]);
        LT_TRY(lt__snapshots_restore(&h->snapshots, ticket, tensors[i]));
    }
    return LT_OK;
}

lt_status lt__host_restore(lt_host *h, const char *const *names, lt_tensor *const *tensors, int n,
                           int *fresh)
{
    double time;
    pthread_mutex_lock(&h->lock);
    lt_status status = lt__server_restore(&h->server, names, tensors, n, &time, 1, fresh);
    if (status == LT_OK)
        status = restore_snapshots(h, names, tensors, n);
    for (int i = 0; i < h->n; i++)
        if (h->members[i].lost)
            lt__order_lose(h->server.order, i); /* it was replaced by a new worker */
    pthread_mutex_unlock(&h->lock);
    return status;
}
