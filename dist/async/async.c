/* async.c - the public functions of asynchronous training; see async.h. What a simulation, a replay
 * and a live run do in different ways is in the functions of their mode; see worker.h. */
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/async/worker.h"
#include "dist/dist.h"

lt_status lt_async_check_rule(const char *rule)
{
    lt_rule found;
    return lt__rule_find(rule ? rule : "", &found);
}

static const int64_t MOST = INT64_MAX / 2; /* so that sums with other numbers do not overflow */

static lt_status check_list(const char *name, const void *list, int64_t n)
{
    if (n < 0 || n > MOST || (n > 0 && !list))
        return lt_fail(LT_EINVAL, "lt_async_new: n_%s is %lld, but %s is %s", name, (long long)n,
                       name, list ? "a list" : "NULL");
    return LT_OK;
}

/* Only rank 0 of a live run has a server. */
static lt_status check_server(const lt_async_config *c)
{
    if (c->server && !c->group)
        return lt_fail(LT_EINVAL, "lt_async_new: server must be NULL, because there is no group");
    if (!c->server && c->group && lt_group_rank(c->group) == 0)
        return lt_fail(LT_EINVAL,
                       "lt_async_new: server is NULL on rank 0; check the result of lt_open()");
    return LT_OK;
}

/* Checks the part of the configuration that does not depend on the rule. */
static lt_status check_config(const lt_ctx *ctx, const lt_async_config *c)
{
    LT_TRY(check_server(c));
    LT_TRY(check_list("buffers", c->buffers, c->n_buffers));
    for (int i = 0; i < c->n_buffers; i++)
        if (!c->buffers[i])
            return lt_fail(LT_EINVAL, "lt_async_new: buffer %d is NULL", i);
    LT_TRY(check_list("times", c->times, c->n_times));
    LT_TRY(check_list("rates", c->rates, c->n_rates));
    LT_TRY(check_list("latencies", c->latencies, c->n_latencies));
    LT_TRY(check_list("trace", c->trace, c->n_trace));
    if (c->steps < 0 || c->steps > MOST)
        return lt_fail(LT_EINVAL, "lt_async_new: steps must be from 0 to %lld, but is %lld",
                       (long long)MOST, (long long)c->steps);
    return lt_check_no_part(ctx, LT_PART_EXCHANGE, "lt_async_new");
}

static void close_async(lt_async *a)
{
    a->mode->close(a);
    lt__image_close(&a->net);
    lt__ctx_release(a->ctx);
    free(a);
}

static lt_async *open_async(const lt_async_mode *mode, lt_ctx *ctx, lt_optim *optim,
                            const lt_async_config *config)
{
    lt_async *a = lt__calloc(1, mode->bytes, "for asynchronous training");
    if (!a)
        return NULL;
    a->mode = mode;
    a->ctx = lt__ctx_retain(ctx);
    a->rank = -1; /* without faults */
    a->steps = config->steps;
    lt_status status = lt__rule_find(config->rule ? config->rule : "", &a->rule);
    if (status == LT_OK)
        status = lt__image_open(&a->net, ctx, optim, config->buffers, config->n_buffers);
    if (status == LT_OK)
        status = mode->open(a, config);
    if (status == LT_OK)
        return a;
    close_async(a);
    return NULL;
}

lt_async *lt_async_new(lt_ctx *ctx, lt_optim *optim, const lt_async_config *config)
{
    lt_async *a = NULL;
    if (!ctx || !optim || !config) {
        lt_ctx_free(config ? config->server : NULL);
        LT_NEED_CTX(ctx, NULL);
        lt_fail(LT_EINVAL, "lt_async_new: %s is NULL", !optim ? "optim" : "config");
        return NULL;
    }
    const lt_async_mode *mode = config->group   ? &lt__live
                                : config->trace ? &lt__replay
                                                : &lt__simulation;
    if (check_config(ctx, config) == LT_OK)
        a = open_async(mode, ctx, optim, config);
    if (!a || !a->loop)
        lt_ctx_free(config->server);
    if (!a || lt__async_set_part(a) == LT_OK)
        return a;
    lt_async_free(a);
    return NULL;
}

void lt_async_free(lt_async *a)
{
    if (!a)
        return;
    lt_status status = lt_set_part(a->ctx, LT_PART_EXCHANGE, NULL);
    (void)status; /* it fails only without a context */
    close_async(a);
}

/* ==== Writes to the net ======================================================================= */

/* The number of writes to the parameters and buffers, modulo 2^32. A storage counts once for each
 * of them in it. */
static uint32_t count_writes(const lt_async *a)
{
    uint32_t count = 0;
    for (int i = 0; i < a->net.n + a->net.n_buffers; i++)
        count += atomic_load_explicit(&a->net.tensor[i]->storage->version, memory_order_relaxed);
    return count;
}

bool lt_async_is_written(const lt_async *a)
{
    return a->has_begun && count_writes(a) != a->written;
}

void lt_async_accept_writes(lt_async *a) { a->written = count_writes(a); }

static lt_status refuse_write(void)
{
    return lt_fail(LT_EINVAL, "the weights or buffers of the net were written during asynchronous "
                              "training, in which only the server changes them; write to them "
                              "before the first batch or after the training, or restore them "
                              "after the evaluation at the end of an epoch");
}

static lt_status check_writes(const lt_async *a)
{
    return lt_async_is_written(a) ? refuse_write() : LT_OK;
}

/* Called before a function that uses or writes to the net. */
static lt_status check(const lt_async *a)
{
    if (a->status != LT_OK)
        return lt_fail(a->status, "asynchronous training has failed before");
    return check_writes(a);
}

/* Called after such a function, with its status. begins: training of this rank has begun. */
static lt_status accept(lt_async *a, lt_status status, bool begins)
{
    a->has_begun |= status == LT_OK && begins;
    if (status == LT_OK && a->has_begun)
        lt_async_accept_writes(a);
    return status;
}

/* ==== A batch ================================================================================= */

/* Ends the batch that the caller computes, if there is one. */
static lt_status end_batch(lt_async *a)
{
    lt_gradient *gradient = a->gradient;
    if (!gradient)
        return LT_OK;
    if (!a->stepped)
        return lt_fail(LT_EINVAL, "ticket %lld had no optimizer step; each batch requires one",
                       (long long)a->ticket);
    a->gradient = NULL;
    return a->mode->push ? a->mode->push(a, gradient) : LT_OK;
}

lt_status lt_async_next(lt_async *a, lt_async_event *event)
{
    LT_TRY(check(a));
    a->status = end_batch(a);
    if (a->status == LT_OK)
        a->status = a->mode->next(a, event);
    return accept(a, a->status, a->status == LT_OK && event->kind == LT_ASYNC_EVENT_COMPUTE);
}

void lt_async_set_lr(lt_async *a, double lr)
{
    if (a->gradient)
        a->gradient->lr = lr;
}

lt_status lt_async_push(lt_async *a)
{
    LT_TRY(check(a));
    a->status = end_batch(a);
    return a->status;
}

lt_status lt_async_release(lt_async *a) { return a->mode->release ? a->mode->release(a) : LT_OK; }

/* Other ranks wait for this one, so training ends before a write is refused. */
lt_status lt_async_finish(lt_async *a)
{
    bool written = lt_async_is_written(a);
    lt_status status = a->mode->finish ? a->mode->finish(a) : LT_OK;
    a->has_begun &= status != LT_OK;
    return status == LT_OK && written ? refuse_write() : status;
}

lt_status lt_async_set_limit(lt_async *a, int64_t tickets)
{
    LT_TRY(check_writes(a));
    return accept(a, a->mode->set_limit(a, tickets), true);
}

void lt_async_stop(lt_async *a, int code)
{
    if (a->mode->stop)
        a->mode->stop(a, code);
}

bool lt_async_poll(lt_async *a, lt_async_event *event)
{
    return a->mode->poll && a->mode->poll(a, event);
}

/* ==== The server ============================================================================== */

/* The server, locked until unlock() if another thread uses it. NULL on ranks that have none. */
static lt_server *lock(const lt_async *a)
{
    if (a->loop)
        pthread_mutex_lock(&a->loop->lock);
    return a->server;
}

static void unlock(const lt_async *a)
{
    if (a->loop)
        pthread_mutex_unlock(&a->loop->lock);
}

int64_t lt_async_done_below(const lt_async *a)
{
    const lt_server *s = lock(a);
    int64_t done = s ? s->done_below : 0;
    unlock(a);
    return done;
}

int64_t lt_async_steps(const lt_async *a)
{
    const lt_server *s = lock(a);
    int64_t steps = s ? lt__server_steps(s) : a->steps;
    unlock(a);
    return steps;
}

lt_status lt_async_snapshot_at(lt_async *a, int64_t ticket)
{
    if (!a->loop)
        return LT_OK;
    lt_server *s = lock(a);
    lt_status status = lt__snapshots_plan(&s->snapshots, ticket);
    if (status == LT_OK)
        status = lt__snapshots_take(&s->snapshots, s->net, s->done_below);
    unlock(a);
    return status;
}

lt_status lt_async_load_snapshot(lt_async *a, int64_t ticket)
{
    LT_TRY(check_writes(a));
    if (!a->loop)
        return LT_OK;
    const lt_server *s = lock(a);
    lt_status status = lt__snapshots_read(&s->snapshots, ticket, &a->net);
    unlock(a);
    return accept(a, status, false);
}

void lt_async_free_snapshot(lt_async *a, int64_t ticket)
{
    if (!a->loop)
        return;
    lt_server *s = lock(a);
    lt__snapshots_forget(&s->snapshots, ticket);
    unlock(a);
}

lt_status lt_async_read(lt_async *a)
{
    LT_TRY(check_writes(a));
    if (!a->loop || !a->has_begun)
        return LT_OK;
    const lt_server *s = lock(a);
    lt_status status = lt__image_copy(&a->net, s->net);
    unlock(a);
    return accept(a, status, false);
}

void lt_async_stop_at(lt_async *a, int64_t version, int code)
{
    if (!a->loop)
        return;
    lock(a);
    a->loop->last = version;
    a->loop->code = code;
    unlock(a);
}

void lt_async_pause(lt_async *a, bool on)
{
    if (a->loop)
        lt__server_loop_pause(a->loop, on);
}

lt_status lt_async_read_stats(lt_async *a, int group, lt_async_stats *stats)
{
    *stats = (lt_async_stats){0};
    if (group < 0)
        return lt_fail(LT_EINVAL, "lt_async_read_stats: group must be at least 0, but is %d",
                       group);
    lt_server *s = lock(a);
    lt_status status = s ? lt__server_stats(s, group, stats) : LT_OK;
    stats->wire_bytes = a->loop ? a->loop->wire_bytes : 0;
    if (a->mode->add_stats)
        a->mode->add_stats(a, stats);
    unlock(a);
    return status;
}

/* ==== Checkpoints ============================================================================= */

/* A copy of x in ctx; x is taken. New. */
static lt_tensor *move_to(lt_ctx *ctx, lt_tensor *x)
{
    lt_tensor *copy = lt_tensor_new(ctx, (lt_dtype)x->dtype, x->ndim, x->dims);
    if (copy && lt_copy(copy, x) != LT_OK) {
        lt_release(copy);
        copy = NULL;
    }
    lt_release(x);
    return copy;
}

lt_tensor *lt_async_state(const lt_async *a, int i, char name[LT_ASYNC_NAME])
{
    name[0] = '\0';
    if (check_writes(a) != LT_OK) {
        strcpy(name, "state");
        return NULL;
    }
    const lt_server *s = lock(a);
    lt_tensor *x = s && !a->mode->has_no_state ? lt__server_state(s, i, name) : NULL;
    if (x && a->loop)
        x = move_to(a->ctx, x);
    unlock(a);
    return x;
}

/* A live run has no virtual time, and workers that were lost stay lost. */
static void adapt_to_live(const lt_server_loop *l, lt_server *s)
{
    s->time = 0;
    for (int i = 0; i < l->n; i++)
        if (l->members[i].lost)
            lt__order_lose(s->order, i); /* it was replaced by a new worker */
}

lt_status lt_async_restore(lt_async *a, const char *const *names, lt_tensor *const *tensors, int n,
                           int *fresh)
{
    *fresh = 0;
    if (a->mode->has_no_state)
        return lt_fail(LT_EUSAGE, "the replay of a trace cannot be resumed");
    lt_server *s = lock(a);
    bool is_live = a->loop != NULL;
    lt_status status = s ? lt__server_restore(s, names, tensors, n, is_live, fresh) : LT_OK;
    if (is_live)
        adapt_to_live(a->loop, s);
    unlock(a);
    return status;
}
