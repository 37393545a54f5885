/* late.c - what the host hears late of a step on an accelerator: see lt_settle().
 *
 * There is one verdict, in memory of the accelerator. It is cleared when the first backward after a
 * step begins; losses and judgements go into it, and kernels of updates look at it, all in the
 * stream. It is sent to the host when a backward begins, with the loss in it, when the gradients
 * are judged, and when they are clipped. A backward waits for what was sent last, so there is never
 * more than one step to be heard of.
 */
#include <math.h>

#include "autograd/tape.h"

static lt_device *device_of(lt_ctx *ctx) { return ctx->devices[1]; }

lt_verdict *lt_verdict_of(lt_ctx *ctx) { return ctx->slots.autograd->late.there; }

lt_status lt__late_open(lt_ctx *ctx)
{
    lt_late *late = &ctx->slots.autograd->late;
    lt_device *device = device_of(ctx);
    if (late->there && late->here)
        return LT_OK;
    if (!late->there)
        late->there = lt__device_alloc(ctx, device, sizeof *late->there);
    if (late->there)
        late->here = lt__host_alloc(device, sizeof *late->here);
    return late->here ? device->fill(device, late->there, LT_U8, sizeof *late->there, 0)
                      : lt_errcode();
}

void lt__late_free(lt_ctx *ctx)
{
    lt_late *late = &ctx->slots.autograd->late;
    lt__device_free(ctx, device_of(ctx), late->there, sizeof *late->there);
    if (late->here)
        device_of(ctx)->free_host(device_of(ctx), late->here);
    late->there = late->here = NULL;
    late->sent = false;
}

lt_status lt__late_send(lt_ctx *ctx)
{
    lt_late *late = &ctx->slots.autograd->late;
    lt_device *device = device_of(ctx);
    LT_TRY(device->copy(device, late->here, late->there, sizeof *late->here));
    late->mark = device->mark(device);
    late->sent = true;
    return LT_OK;
}

/* What was sent is here. */
static void hear(lt_ctx *ctx, lt_late *late)
{
    lt_verdict v = *late->here;
    lt_scaling judge = late->judge;
    bool is_lost = v.loss != 0 || v.norm != 0, applied = !is_lost;
    late->judge = (lt_scaling){0};
    if (is_lost && !late->failed) {
        late->loss = v.loss;
        late->norm = v.norm;
    }
    if (is_lost) /* such a batch must not reach the running statistics */
        lt_stats_clear(ctx);
    if (judge.settle)
        applied &= judge.settle(judge.ud, is_lost ? NULL : &v.found);
    if (ctx->slots.autograd->outcome == LT_PENDING)
        ctx->slots.autograd->outcome = applied ? LT_APPLY : LT_SKIP;
    lt__optims_settle(late, applied ? LT_APPLY : LT_SKIP);
}

/* What wait() gives; if that is a failure, nothing more is to be heard. */
static lt_status listen(lt_ctx *ctx)
{
    struct lt_autograd *ag = ctx->slots.autograd;
    if (!ag || !ag->late.sent)
        return LT_OK;
    lt_status status = device_of(ctx)->wait(device_of(ctx), ag->late.mark);
    ag->late.sent = false;
    if (status == LT_OK)
        hear(ctx, &ag->late);
    else
        ag->late.judge = (lt_scaling){0};
    return status;
}

lt_status lt_settle(lt_ctx *ctx)
{
    LT_TRY(listen(ctx));
    lt_late *late = ctx->slots.autograd ? &ctx->slots.autograd->late : NULL;
    if (!late || !lt__late_is_lost(late))
        return LT_OK;
    double loss = late->loss, norm = late->norm;
    late->loss = late->norm = 0;
    late->failed = true;
    return loss != 0 ? lt__refuse_loss(late->step, loss, "")
                     : lt__refuse_norm(late->norm_step, norm);
}

bool lt__late_is_lost(const lt_late *late) { return late->loss != 0 || late->norm != 0; }

void lt__late_told(lt_ctx *ctx)
{
    lt_late *late = &ctx->slots.autograd->late;
    lt_learn(ctx);
    late->loss = late->norm = 0;
    late->failed = late->there != NULL;
}

/* A device that has failed fails again. */
void lt_learn(lt_ctx *ctx)
{
    lt_status status = listen(ctx);
    (void)status;
}

lt_status lt__late_begin(lt_tensor *loss)
{
    lt_ctx *ctx = loss->ctx;
    struct lt_autograd *ag = ctx->slots.autograd;
    lt_late *late = &ag->late;
    lt_device *device = device_of(ctx);
    LT_TRY(lt_settle(ctx));
    LT_TRY(lt__late_open(ctx));
    if (late->cleared != ag->period + 1) {
        LT_TRY(device->fill(device, late->there, LT_U8, sizeof *late->there, 0));
        late->cleared = ag->period + 1;
        late->failed = false;
    }
    if (loss->count != 1)
        return LT_OK;
    late->step = ctx->step + 1;
    LT_TRY(late->check_loss(loss, late->there));
    return lt__late_send(ctx);
}
