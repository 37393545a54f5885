/* ctx_state.c - the state of a context: its reference count, counters, stop requests and log. */
#include <stdlib.h>

#include "core/locale.h"
#include "core/pool.h"

lt_ctx *lt__ctx_retain(lt_ctx *ctx)
{
    atomic_fetch_add_explicit(&ctx->refs, 1, memory_order_relaxed);
    return ctx;
}

void lt__ctx_release(lt_ctx *ctx)
{
    if (atomic_fetch_sub_explicit(&ctx->refs, 1, memory_order_acq_rel) != 1)
        return;
    lt__trace_close(ctx);
    lt__pinned_slots_close(ctx);
    if (ctx->slots.ops_freed)
        ctx->slots.ops_freed(ctx);
    if (ctx->slots.ctx_freed)
        ctx->slots.ctx_freed(ctx);
    for (int i = LT_MAX_DEVICES - 1; i >= 0; i--) { /* queued work may still use the CPU's device */
        if (!ctx->devices[i])
            continue;
        lt__pool_close(ctx, ctx->devices[i]);
        ctx->devices[i]->close(ctx->devices[i]);
    }
    pthread_mutex_destroy(&ctx->lock);
    free(ctx);
}

lt_status lt__check_open(const lt_ctx *ctx, const char *who)
{
    return ctx->closed ? lt_fail(LT_EINVAL, "%s: the context was closed by lt_ctx_free()", who)
                       : LT_OK;
}

/* Defines a function that returns a number of a context. */
#define GETTER(type, name, number)                                                                 \
    type name(const lt_ctx *ctx)                                                                   \
    {                                                                                              \
        LT_NEED_CTX(ctx, 0);                                                                       \
        return number;                                                                             \
    }

GETTER(uint64_t, lt_seed, ctx->config.seed)
GETTER(int, lt_threads, ctx->threads)
GETTER(int64_t, lt_step, ctx->step)
/* any step may be set */
GETTER(int64_t, lt_random_step, (int64_t)((uint64_t)ctx->step - (uint64_t)ctx->seeded_at))
GETTER(int, lt_stop_reason, atomic_load(&ctx->stop_reason))

void lt_set_seed(lt_ctx *ctx, uint64_t seed)
{
    LT_NEED_CTX(ctx, );
    ctx->config.seed = seed;
    ctx->draws = 0;
    ctx->trees = 0;
    ctx->seeded_at = ctx->step;
    if (ctx->slots.seeded)
        ctx->slots.seeded(ctx);
}

void lt_set_step(lt_ctx *ctx, int64_t step)
{
    LT_NEED_CTX(ctx, );
    ctx->step = step;
}
void lt_set_random_step(lt_ctx *ctx, int64_t step)
{
    LT_NEED_CTX(ctx, );
    ctx->seeded_at = (int64_t)((uint64_t)ctx->step - (uint64_t)step);
}
uint64_t lt_next_draw(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, 0);
    return ctx->draws++;
}
void lt_set_next_draw(lt_ctx *ctx, uint64_t draw)
{
    LT_NEED_CTX(ctx, );
    ctx->draws = draw;
}

_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "lt_stop() is called by signal handlers");

bool lt_stop(lt_ctx *ctx, int reason)
{
    if (!ctx || (reason != 0 && atomic_load(&ctx->listeners) == 0))
        return false;
    atomic_store(&ctx->stop_reason, reason);
    return reason != 0;
}

void lt_stop_listen(lt_ctx *ctx, bool on)
{
    LT_NEED_CTX(ctx, );
    atomic_fetch_add(&ctx->listeners, on ? 1 : -1);
}

void lt_set_log(lt_ctx *ctx, lt_log_fn fn, void *ud)
{
    LT_NEED_CTX(ctx, );
    ctx->log = fn;
    ctx->log_ud = ud;
    if (fn && *ctx->note)
        fn(ud, ctx->note_level, ctx->note);
    if (fn)
        *ctx->note = '\0';
}

void lt_log(lt_ctx *ctx, lt_log_level level, const char *fmt, ...)
{
    LT_NEED_CTX(ctx, );
    if (!ctx->log)
        return;
    char line[1024];
    va_list args;
    va_start(args, fmt);
    lt__vformat(line, sizeof line, fmt, args);
    va_end(args);
    ctx->log(ctx->log_ud, level, line);
}
