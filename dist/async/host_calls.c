/* host_calls.c - what rank 0 calls while the server thread runs; see host.h. */
#include <string.h>

#include "core/tensor.h"
#include "dist/async/host_internal.h"

lt_inbox *lt__host_inbox(lt_host *h) { return &h->to_root; }

lt_status lt__host_set_limit(lt_host *h, int64_t tickets)
{
    pthread_mutex_lock(&h->lock);
    lt_status status = lt__order_set_limit(h->server.order, tickets);
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

int64_t lt__host_version(lt_host *h)
{
    pthread_mutex_lock(&h->lock);
    int64_t version = lt__order_version(h->server.order);
    pthread_mutex_unlock(&h->lock);
    return version;
}

void lt__host_pause(lt_host *h, bool on)
{
    pthread_mutex_lock(&h->lock);
    h->paused = on;
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

lt_tensor *lt__host_state(lt_host *h, lt_ctx *ctx, int i, char name[LT_ASYNC_NAME])
{
    const double time = 0;
    pthread_mutex_lock(&h->lock);
    lt_tensor *x = lt__server_state(&h->server, i, &time, 1, name), *copy = NULL;
    if (x)
        copy = copy_to(ctx, x);
    lt_release(x);
    pthread_mutex_unlock(&h->lock);
    return copy;
}

lt_status lt__host_restore(lt_host *h, const char *const *names, lt_tensor *const *tensors, int n,
                           int *fresh)
{
    double time;
    pthread_mutex_lock(&h->lock);
    lt_status status = lt__server_restore(&h->server, names, tensors, n, &time, 1, fresh);
    for (int i = 0; i < h->n; i++)
        if (h->members[i].lost)
            lt__order_lose(h->server.order, i); /* it was replaced by a new worker */
    pthread_mutex_unlock(&h->lock);
    return status;
}
