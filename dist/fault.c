/* fault.c - injected faults of ranks; see fault.h. */
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "core/tensor.h"
#include "dist/fault.h"

lt_status lt__fault_check(const lt_ctx *ctx, int size)
{
    if (ctx->fault.kind != LT_FAULT_NONE && ctx->fault.rank >= size)
        return lt_fail(LT_EUSAGE, "the fault's rank %d is out of range 0 to %d", ctx->fault.rank,
                       size - 1);
    return LT_OK;
}

lt_status lt__fault_trigger(const lt_ctx *ctx, int rank, int64_t step)
{
    const lt_fault *f = &ctx->fault;
    if (f->kind == LT_FAULT_NONE || f->rank != rank ||
        (f->kind != LT_FAULT_DELAY && f->number != step) || f->kind == LT_FAULT_LATENCY)
        return LT_OK;
    switch (f->kind) {
    case LT_FAULT_KILL: kill(getpid(), SIGKILL); break;
    case LT_FAULT_HANG:
        for (;;)
            pause();
    case LT_FAULT_LEAVE:
        return lt_fail(LT_EDONE, "rank %d leaves in step %lld (fault leave)", rank,
                       (long long)f->number);
    default: nanosleep(&(struct timespec){f->number / 1000, f->number % 1000 * 1000000}, NULL);
    }
    return LT_OK;
}

void lt__fault_add_latency(const lt_ctx *ctx, lt_mail *mail)
{
    if (ctx->fault.kind == LT_FAULT_LATENCY)
        lt__mail_add_latency(mail, ctx->fault.rank, (double)ctx->fault.number * 1e-6);
}

lt_status lt__fault_refuse_latency(const lt_ctx *ctx)
{
    if (ctx->fault.kind != LT_FAULT_LATENCY)
        return LT_OK;
    return lt_fail(LT_EUSAGE, "the fault latency delays the messages of asynchronous training and "
                              "of pipelines, but the ranks train synchronously");
}
