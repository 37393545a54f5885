/* context.c - opens contexts from their configuration, and closes them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/pool.h"

/* Parses the fault to inject, for tests; see lt_config. */
static lt_status parse_fault(lt_ctx *ctx, const char *text)
{
    static const char *const of_rank[] = {
        [LT_FAULT_KILL] = "kill:rank=%9[0-9]:step=%18[0-9]%n",
        [LT_FAULT_LEAVE] = "leave:rank=%9[0-9]:step=%18[0-9]%n",
        [LT_FAULT_HANG] = "hang:rank=%9[0-9]:step=%18[0-9]%n",
        [LT_FAULT_DELAY] = "delay:rank=%9[0-9]:ms=%18[0-9]%n",
        [LT_FAULT_LATENCY] = "latency:rank=%9[0-9]:us=%18[0-9]%n"};
    char rank[10] = "0", number[19] = "0", param[sizeof ctx->inf.param];
    int used = 0; /* characters parsed; 0 if no form matches */
    if (!text || !*text)
        return LT_OK;
    lt_fault_kind kind = LT_FAULT_NONE;
    sscanf(text, "alloc:n=%18[0-9]%n", number, &used);
    sscanf(text, "inf:rank=%9[0-9]:step=%18[0-9]:param=%95s%n", rank, number, param, &used);
    bool is_inf = used > 0 && text[0] == 'i';
    while (used == 0 && kind < LT_FAULT_LATENCY)
        sscanf(text, of_rank[++kind], rank, number, &used);
    int64_t n = strtoll(number, NULL, 10);
    if (used == 0 || text[used] || n == 0)
        return lt_fail(LT_EUSAGE,
                       "unknown fault '%s'; the faults are alloc:n=5, kill:rank=1:step=3, "
                       "leave:rank=1:step=3, hang:rank=1:step=3, delay:rank=1:ms=100, "
                       "latency:rank=1:us=500 and inf:rank=0:step=7:param=conv1.w",
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
    lt_ctx *ctx = lt__calloc(1, sizeof *ctx, "for a context");
    if (!ctx)
        return NULL;
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
    ctx->threads = ctx->config.threads > 0 ? ctx->config.threads : lt_omp_threads();
    if (ctx->threads == 0)
        ctx->threads = lt_cpu_count();
    if (ctx->threads > lt_thread_limit())
        ctx->threads = lt_thread_limit();
    if (lt__start_threads(ctx->threads) != LT_OK)
        goto fail;
    ctx->devices[0] = ctx->device = lt__cpu_device_new(ctx->threads);
    if (ctx->device)
        return ctx;
    lt_fail(LT_ENOMEM, "out of memory for a context");
fail:
    lt_ctx_free(ctx);
    return NULL;
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
