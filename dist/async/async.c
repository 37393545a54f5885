/* async.c - the public functions of asynchronous training, which call those of a simulation, a
 * replay or a live run; see async.h. */
#include "core/tensor.h"
#include "dist/async/worker.h"

lt_async *lt_async_new(lt_ctx *ctx, lt_optim *optim, const lt_async_config *config)
{
    LT_NEED_CTX(ctx, NULL);
    lt_rule rule;
    lt_async *a = NULL;
    if (lt__rule_find(config->rule ? config->rule : "", &rule) != LT_OK)
        lt_ctx_free(config->server);
    else
        a = config->group   ? lt__live_new(ctx, optim, config)
            : config->trace ? lt__replay_new(ctx, optim, config)
                            : lt__simulation_new(ctx, optim, config);
    if (!a)
        return NULL;
    a->ctx = lt__ctx_retain(ctx);
    a->optim = optim;
    a->rule = rule;
    lt__async_set_callbacks(a);
    return a;
}

void lt_async_free(lt_async *a)
{
    if (!a)
        return;
    lt_ctx *ctx = a->ctx;
    lt_set_grad_callbacks(ctx, NULL);
    a->of->free(a);
    lt__ctx_release(ctx);
}

lt_status lt_async_next(lt_async *a, lt_async_event *event)
{
    if (a->status != LT_OK)
        return lt_fail(a->status, "asynchronous training has failed before");
    a->status = a->of->next(a, event);
    return a->status;
}

lt_status lt_async_push(lt_async *a)
{
    if (a->status != LT_OK)
        return lt_fail(a->status, "asynchronous training has failed before");
    a->status = a->of->push(a);
    return a->status;
}

lt_status lt_async_release(lt_async *a) { return a->of->release ? a->of->release(a) : LT_OK; }
lt_status lt_async_finish(lt_async *a) { return a->of->finish ? a->of->finish(a) : LT_OK; }
lt_status lt_async_set_limit(lt_async *a, int64_t tickets) { return a->of->set_limit(a, tickets); }
int64_t lt_async_done_below(const lt_async *a) { return a->of->done_below(a); }
int64_t lt_async_steps(const lt_async *a) { return a->of->steps(a); }

lt_status lt_async_keep_at(lt_async *a, int64_t ticket)
{
    return a->of->keep_at ? a->of->keep_at(a, ticket) : LT_OK;
}

lt_status lt_async_read_kept(lt_async *a, int64_t ticket)
{
    return a->of->read_kept ? a->of->read_kept(a, ticket) : LT_OK;
}

lt_status lt_async_read(lt_async *a) { return a->of->read ? a->of->read(a) : LT_OK; }

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
    return a->of->read_stats(a, group, stats);
}

lt_tensor *lt_async_state(const lt_async *a, int i, char name[LT_ASYNC_NAME])
{
    name[0] = '\0';
    return a->of->state(a, i, name);
}

lt_status lt_async_restore(lt_async *a, const char *const *names, lt_tensor *const *tensors, int n,
                           int *fresh)
{
    return a->of->restore(a, names, tensors, n, fresh);
}
