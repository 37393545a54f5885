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
        (f->kind != LT_FAULT_DELAY && f->number != step))
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
