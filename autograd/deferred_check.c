/* deferred_check.c - decisions about a step that an accelerator makes: see lt_synchronize().
 *
 * There is one lt_step_check, in the accelerator's memory. The first backward after a step clears
 * it. Kernels in the stream write losses and gradient statistics to it, and update kernels read it.
 * It is copied to the host when a backward starts (with the loss in it), when an optimizer step
 * decides on the gradients, and when they are clipped. A backward first waits for the last copy, so
 * at most one step is undecided.
 */
#include <math.h>

#include "autograd/tape.h"

static lt_device *device_of(lt_ctx *ctx) { return ctx->devices[1]; }

lt_step_check *lt_step_check_of(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, NULL);
    return ctx->slots.autograd->deferred.on_device;
}

lt_status lt__deferred_check_open(lt_ctx *ctx)
{
    lt_deferred_check *check = &ctx->slots.autograd->deferred;
    lt_device *device = device_of(ctx);
    if (check->on_device && check->on_host)
        return LT_OK;
    if (!check->on_device)
        check->on_device = lt__device_alloc(ctx, device, sizeof *check->on_device);
    if (check->on_device)
        check->on_host = lt__host_alloc(device, sizeof *check->on_host);
    return check->on_host
               ? device->fill(device, check->on_device, LT_U8, sizeof *check->on_device, 0)
               : lt_errcode();
}

lt_status lt__deferred_check_send(lt_ctx *ctx)
{
    lt_deferred_check *check = &ctx->slots.autograd->deferred;
    lt_device *device = device_of(ctx);
    LT_TRY(device->copy(device, check->on_host, check->on_device, sizeof *check->on_host));
    check->mark = device->mark(device);
    check->sent = true;
    return LT_OK;
}

lt_status lt__fail_loss(int64_t step, double value, const char *why)
{
    const char *word = isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
    return *why ? lt_fail(LT_ENUMERIC, "%s (the loss is %s at step %lld)", why, word,
                          (long long)step)
                : lt_fail(LT_ENUMERIC,
                          "the loss is %s at step %lld; check the learning rate and "
                          "the data",
                          word, (long long)step);
}

lt_status lt__fail_norm(int64_t step, double norm)
{
    return lt_fail(LT_ENUMERIC,
                   "the norm of the gradients is %s at step %lld; check the "
                   "learning rate and the data",
                   isnan(norm) ? "nan" : "inf", (long long)step);
}

/* Acts on the step check, which has arrived on the host. */
static void resolve(lt_ctx *ctx, lt_deferred_check *check)
{
    lt_step_check v = *check->on_host;
    lt_resolve_fn resolve_step = check->resolve;
    bool is_lost = v.loss != 0 || v.norm != 0, applied = !is_lost;
    check->resolve = NULL;
    if (is_lost && !check->reported) {
        check->loss = v.loss;
        check->norm = v.norm;
    }
    if (is_lost) /* keep this batch out of the running statistics */
        lt_bn_stats_clear(ctx);
    if (resolve_step)
        applied &= resolve_step(check->resolve_ud, is_lost ? NULL : &v.grads);
    if (ctx->slots.autograd->step_status == LT_PENDING)
        ctx->slots.autograd->step_status = applied ? LT_APPLIED : LT_SKIPPED;
    for (; check->steps; check->steps = check->steps->next)
        check->steps->status = applied ? LT_APPLIED : LT_SKIPPED;
}

/* Waits for the copy of the step check, if one was sent. After a failure nothing is pending. */
static lt_status wait_for_check(lt_ctx *ctx)
{
    struct lt_autograd *ag = ctx->slots.autograd;
    if (!ag || !ag->deferred.sent)
        return LT_OK;
    lt_status status = device_of(ctx)->wait(device_of(ctx), ag->deferred.mark);
    ag->deferred.sent = false;
    if (status == LT_OK)
        resolve(ctx, &ag->deferred);
    else
        ag->deferred.resolve = NULL;
    return status;
}

lt_status lt_synchronize(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, LT_EINVAL);
    LT_TRY(wait_for_check(ctx));
    lt_deferred_check *check = ctx->slots.autograd ? &ctx->slots.autograd->deferred : NULL;
    if (!check || !lt__deferred_check_is_unreported(check))
        return LT_OK;
    double loss = check->loss, norm = check->norm;
    check->loss = check->norm = 0;
    check->reported = true;
    return loss != 0 ? lt__fail_loss(check->step, loss, "") : lt__fail_norm(check->norm_step, norm);
}

bool lt__deferred_check_is_unreported(const lt_deferred_check *check)
{
    return check->loss != 0 || check->norm != 0;
}

void lt__deferred_check_set_reported(lt_ctx *ctx)
{
    lt_deferred_check *check = &ctx->slots.autograd->deferred;
    lt_synchronize_quiet(ctx);
    check->loss = check->norm = 0;
    check->reported = check->on_device != NULL;
}

/* May ignore the error: a device that has failed fails again. */
void lt_synchronize_quiet(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, );
    lt_status status = wait_for_check(ctx);
    (void)status;
}

lt_status lt__deferred_check_begin(lt_ctx *ctx, lt_tensor *loss)
{
    struct lt_autograd *ag = ctx->slots.autograd;
    lt_deferred_check *check = &ag->deferred;
    lt_device *device = device_of(ctx);
    LT_TRY(lt_synchronize(ctx));
    LT_TRY(lt__deferred_check_open(ctx));
    if (check->cleared != ag->period + 1) {
        LT_TRY(device->fill(device, check->on_device, LT_U8, sizeof *check->on_device, 0));
        check->cleared = ag->period + 1;
        check->reported = false;
    }
    if (!loss || loss->count != 1)
        return LT_OK;
    check->step = ctx->step + 1;
    LT_TRY(check->check_loss(loss, check->on_device));
    return lt__deferred_check_send(ctx);
}
