/* context.c - contexts: configuration, reference counts, stop requests and the log. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/locale.h"
#include "core/pool.h"

/* Parses the fault to inject, for tests; see lt_config. */
static lt_status parse_fault(lt_ctx *ctx, const char *text)
{
    static const char *const of_rank[] = {[LT_FAULT_KILL] = "kill:rank=%9[0-9]:step=%18[0-9]%n",
                                          [LT_FAULT_LEAVE] = "leave:rank=%9[0-9]:step=%18[0-9]%n",
                                          [LT_FAULT_HANG] = "hang:rank=%9[0-9]:step=%18[0-9]%n",
                                          [LT_FAULT_DELAY] = "delay:rank=%9[0-9]:ms=%18[0-9]%n"};
    char rank[10] = "0", number[19] = "0", param[sizeof ctx->inf.param];
    int used = 0; /* characters parsed; 0 if no form matches */
    if (!text || !*text)
        return LT_OK;
    lt_fault_kind kind = LT_FAULT_NONE;
    sscanf(text, "alloc:n=%18[0-9]%n", number, &used);
    sscanf(text, "inf:rank=%9[0-9]:step=%18[0-9]:param=%95s%n", rank, number, param, &used);
    bool is_inf = used > 0 && text[0] == 'i';
    while (used == 0 && kind < LT_FAULT_DELAY)
        sscanf(text, of_rank[++kind], rank, number, &used);
    int64_t n = strtoll(number, NULL, 10);
    if (used == 0 || text[used] || n == 0)
        return lt_fail(LT_EUSAGE,
                       "unknown fault '%s'; the faults are alloc:n=5, kill:rank=1:step=3, "
                       "leave:rank=1:step=3, hang:rank=1:step=3, delay:rank=1:ms=100 and "
                       "inf:rank=0:step=7:param=conv1.w",
                       text);
    if (is_inf) {
        ctx->inf = (lt_inf_fault){.rank = atoi(rank), .step = n};
        strcpy(ctx->inf.param, param);
        return LT_OK;
    }
    ctx->fault = (lt_fault){kind, atoi(rank), n};
    ctx->fail_at = kind == LT_FAULT_NONE ? (uint64_t)n : 0;
    return LT_OK;
}

lt_ctx *lt_ctx_new(const lt_config *config)
{
    lt_ctx *ctx = calloc(1, sizeof *ctx);
    if (!ctx) {
        lt_fail(LT_ENOMEM, "out of memory for a context");
        return NULL;
    }
    if (config)
        ctx->config = *config;
    atomic_init(&ctx->refs, 1);
    pthread_mutex_init(&ctx->lock, NULL);
    const char *fault = ctx->config.fault ? ctx->config.fault : getenv("LUATRAIN_FAULT");
    const char *device = ctx->config.device;
    ctx->config.fault = ctx->config.device = NULL; /* the caller may free its strings now */
    if (parse_fault(ctx, fault) != LT_OK)
        goto fail;
    if (device && strcmp(device, "cpu") != 0 && strcmp(device, "auto") != 0) {
        if (lt__cuda_index(device) >= 0)
            lt_fail(LT_EENV,
                    "device %s: lt_ctx_new() supports only the CPU; use lt_open() for others",
                    device);
        else
            lt_fail(LT_EUSAGE, "unknown device '%s'; it must be auto, cpu or cuda[:i]", device);
        goto fail;
    }
    if (ctx->config.threads < 0 || ctx->config.threads > 1024) {
        lt_fail(LT_EUSAGE, "threads must be 0 to 1024, but is %d", ctx->config.threads);
        goto fail;
    }
    ctx->threads = ctx->config.threads > 0 ? ctx->config.threads : lt_cpu_count();
    if (ctx->threads > lt_thread_limit())
        ctx->threads = lt_thread_limit();
    if (lt__start_threads(ctx->threads) != LT_OK)
        goto fail;
    ctx->devices[0] = ctx->device = lt__cpu_device_new(ctx->threads);
    if (!ctx->device) {
        lt_fail(LT_ENOMEM, "out of memory for a context");
        goto fail;
    }
    return ctx;
fail:
    lt_ctx_free(ctx);
    return NULL;
}

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
    lt__deferred_pool_close(ctx);
    if (ctx->slots.ops_freed)
        ctx->slots.ops_freed(ctx);
    if (ctx->slots.ctx_freed)
        ctx->slots.ctx_freed(ctx);
    for (int i = 0; i < LT_MAX_DEVICES; i++) {
        if (!ctx->devices[i])
            continue;
        lt__pool_close(ctx, ctx->devices[i]);
        ctx->devices[i]->close(ctx->devices[i]);
    }
    pthread_mutex_destroy(&ctx->lock);
    free(ctx);
}

void lt_ctx_free(lt_ctx *ctx)
{
    if (!ctx)
        return;
    while (ctx->scope)
        lt_scope_pop(ctx);
    ctx->closed = true;
    if (ctx->slots.closed)
        ctx->slots.closed(ctx);
    lt__ctx_release(ctx);
}

lt_status lt__check_open(const lt_ctx *ctx, const char *who)
{
    return ctx->closed ? lt_fail(LT_EINVAL, "%s: the context was closed by lt_ctx_free()", who)
                       : LT_OK;
}

uint64_t lt_seed(const lt_ctx *ctx) { return ctx->config.seed; }

void lt_set_seed(lt_ctx *ctx, uint64_t seed)
{
    ctx->config.seed = seed;
    ctx->draws = 0;
}

int lt_threads(const lt_ctx *ctx) { return ctx->threads; }
int64_t lt_step(const lt_ctx *ctx) { return ctx->step; }
void lt_set_step(lt_ctx *ctx, int64_t step) { ctx->step = step; }
uint64_t lt_next_draw(lt_ctx *ctx) { return ctx->draws++; }
void lt_set_next_draw(lt_ctx *ctx, uint64_t draw) { ctx->draws = draw; }

_Static_assert(ATOMIC_INT_LOCK_FREE == 2, "lt_stop() is called by signal handlers");

bool lt_stop(lt_ctx *ctx, int reason)
{
    if (reason != 0 && atomic_load(&ctx->listeners) == 0)
        return false;
    atomic_store(&ctx->stop_reason, reason);
    return reason != 0;
}

void lt_listen(lt_ctx *ctx, bool on) { atomic_fetch_add(&ctx->listeners, on ? 1 : -1); }

int lt_stop_reason(const lt_ctx *ctx) { return atomic_load(&ctx->stop_reason); }

double lt__seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void lt_log_to(lt_ctx *ctx, lt_log_fn fn, void *ud)
{
    ctx->log = fn;
    ctx->log_ud = ud;
    if (fn && *ctx->note)
        fn(ud, ctx->note_level, ctx->note);
    if (fn)
        *ctx->note = '\0';
}

void lt_log(lt_ctx *ctx, lt_log_level level, const char *fmt, ...)
{
    if (!ctx->log)
        return;
    char line[1024];
    va_list args;
    va_start(args, fmt);
    lt__vformat(line, sizeof line, fmt, args);
    va_end(args);
    ctx->log(ctx->log_ud, level, line);
}
