/* async.c - the public functions of asynchronous training, which call those of a simulation, a
 * replay or a live run; see async.h. */
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
    LT_TRY(check_list("trace", c->trace, c->n_trace));
    if (c->steps < 0 || c->steps > MOST)
        return lt_fail(LT_EINVAL, "lt_async_new: steps must be from 0 to %lld, but is %lld",
                       (long long)MOST, (long long)c->steps);
    return lt_check_no_part(ctx, LT_PART_EXCHANGE, "lt_async_new");
}

/* Keeps the buffers, to detect writes to them. */
static lt_status keep_buffers(lt_async *a, const lt_async_config *c)
{
    a->buffers = calloc((size_t)c->n_buffers + 1, sizeof(lt_tensor *));
    if (!a->buffers)
        return lt_fail(LT_ENOMEM, "out of memory for asynchronous training");
    while (a->n_buffers < c->n_buffers) {
        a->buffers[a->n_buffers] = lt_retain(c->buffers[a->n_buffers]);
        a->n_buffers++;
    }
    return LT_OK;
}

static void free_async(lt_async *a)
{
    for (int i = 0; i < a->n_buffers; i++)
        lt_release(a->buffers[i]);
    free(a->buffers);
    a->of->free(a);
}

lt_async *lt_async_new(lt_ctx *ctx, lt_optim *optim, const lt_async_config *config)
{
    lt_rule rule;
    lt_async *a = NULL;
    if (!ctx || !optim || !config) {
        lt_ctx_free(config ? config->server : NULL);
        LT_NEED_CTX(ctx, NULL);
        lt_fail(LT_EINVAL, "lt_async_new: %s is NULL", !optim ? "optim" : "config");
        return NULL;
    }
    if (check_config(ctx, config) != LT_OK ||
        lt__rule_find(config->rule ? config->rule : "", &rule) != LT_OK)
        lt_ctx_free(config->server);
    else
        a = config->group   ? lt__live_new(ctx, optim, config)
            : config->trace ? lt__replay_new(ctx, optim, config)
                            : lt__simulation_new(ctx, optim, config);
    if (a && keep_buffers(a, config) != LT_OK) {
        free_async(a);
        a = NULL;
    }
    if (!a)
        return NULL;
    a->ctx = lt__ctx_retain(ctx);
    a->optim = optim;
    a->rule = rule;
    if (lt__async_set_part(a) == LT_OK)
        return a;
    lt_async_free(a);
    return NULL;
}

void lt_async_free(lt_async *a)
{
    if (!a)
        return;
    lt_ctx *ctx = a->ctx;
    lt_status status = lt_set_part(ctx, LT_PART_EXCHANGE, NULL);
    (void)status; /* it fails only without a context */
    free_async(a);
    lt__ctx_release(ctx);
}

/* ==== Writes to the net ======================================================================= */

/* The number of writes to the parameters and buffers, modulo 2^32. A storage counts once for each
 * of them in it. */
static uint32_t count_writes(const lt_async *a)
{
    uint32_t count = 0;
    int n = lt_optim_count(a->optim);
    for (int i = 0; i < n + a->n_buffers; i++) {
        const lt_tensor *x = i < n ? lt_optim_param(a->optim, i) : a->buffers[i - n];
        count += atomic_load_explicit(&x->storage->version, memory_order_relaxed);
    }
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

/* ==== The public functions ==================================================================== */

lt_status lt_async_next(lt_async *a, lt_async_event *event)
{
    LT_TRY(check(a));
    a->status = a->of->next(a, event);
    return accept(a, a->status, event->kind == LT_ASYNC_COMPUTE);
}

void lt_async_set_lr(lt_async *a, double lr) { a->lr = lr; }

lt_status lt_async_push(lt_async *a)
{
    LT_TRY(check(a));
    a->status = a->of->push(a);
    return a->status;
}

lt_status lt_async_release(lt_async *a) { return a->of->release ? a->of->release(a) : LT_OK; }

/* Other ranks wait for this one, so training ends before a write is refused. */
lt_status lt_async_finish(lt_async *a)
{
    bool written = lt_async_is_written(a);
    lt_status status = a->of->finish ? a->of->finish(a) : LT_OK;
    a->has_begun &= status != LT_OK;
    return status == LT_OK && written ? refuse_write() : status;
}

lt_status lt_async_set_limit(lt_async *a, int64_t tickets)
{
    LT_TRY(check_writes(a));
    return accept(a, a->of->set_limit(a, tickets), true);
}

int64_t lt_async_done_below(const lt_async *a) { return a->of->done_below(a); }
int64_t lt_async_steps(const lt_async *a) { return a->of->steps(a); }

lt_status lt_async_keep_at(lt_async *a, int64_t ticket)
{
    return a->of->keep_at ? a->of->keep_at(a, ticket) : LT_OK;
}

lt_status lt_async_read_kept(lt_async *a, int64_t ticket)
{
    LT_TRY(check_writes(a));
    return accept(a, a->of->read_kept ? a->of->read_kept(a, ticket) : LT_OK, false);
}

void lt_async_forget(lt_async *a, int64_t ticket)
{
    if (a->of->forget)
        a->of->forget(a, ticket);
}

lt_status lt_async_read(lt_async *a)
{
    LT_TRY(check_writes(a));
    return accept(a, a->of->read && a->has_begun ? a->of->read(a) : LT_OK, false);
}

void lt_async_stop(lt_async *a, int code)
{
    if (a->of->stop)
        a->of->stop(a, code);
}

void lt_async_stop_at(lt_async *a, int64_t version, int code)
{
    if (a->of->stop_at)
        a->of->stop_at(a, version, code);
}

void lt_async_pause(lt_async *a, bool on)
{
    if (a->of->pause)
        a->of->pause(a, on);
}

bool lt_async_poll(lt_async *a, lt_async_event *event)
{
    return a->of->poll && a->of->poll(a, event);
}

lt_status lt_async_read_stats(lt_async *a, int group, lt_async_stats *stats)
{
    *stats = (lt_async_stats){0};
    if (group < 0)
        return lt_fail(LT_EINVAL, "lt_async_read_stats: group must be at least 0, but is %d",
                       group);
    return a->of->read_stats(a, group, stats);
}

lt_tensor *lt_async_state(const lt_async *a, int i, char name[LT_ASYNC_NAME])
{
    name[0] = '\0';
    if (check_writes(a) == LT_OK)
        return a->of->state(a, i, name);
    strcpy(name, "state");
    return NULL;
}

lt_status lt_async_restore(lt_async *a, const char *const *names, lt_tensor *const *tensors, int n,
                           int *fresh)
{
    return a->of->restore(a, names, tensors, n, fresh);
}
