/* step.c - the parts of a training step: each function calls the parts that take part in an event,
 * in the order of lt_part_kind. step.h describes the events. */
#include "autograd/tape.h"

#define EACH_PART(ag, p)                                                                           \
    for (const lt_step_part *p = (ag)->parts; p < (ag)->parts + LT_PART_KINDS; p++)

/* The parts of the training, also in a dry run. */
static lt_step_part *training_parts(struct lt_autograd *ag)
{
    return ag->dry_run.on ? ag->dry_run.parts : ag->parts;
}

/* ==== Setting ================================================================================= */

lt_status lt__weights_check_none(const struct lt_autograd *ag, const char *who, const char *what)
{
    return ag->weights ? lt_fail(LT_EINVAL,
                                 "%s %s while gradients of parameters are pending; call "
                                 "lt_backward_weights() first",
                                 who, what)
                       : LT_OK;
}

static lt_status check_kind(lt_part_kind kind)
{
    return (unsigned)kind < LT_PART_KINDS
               ? LT_OK
               : lt_fail(LT_EINVAL, "the kind of a part is %d, which is not one of lt_part_kind",
                         (int)kind);
}

lt_status lt_set_part(lt_ctx *ctx, lt_part_kind kind, const lt_step_part *part)
{
    static const char *const names[] = {"the stages of a pipeline", "the loss scale"};
    LT_NEED_CTX(ctx, LT_EINVAL);
    LT_TRY(check_kind(kind));
    struct lt_autograd *ag = ctx->slots.autograd;
    if (kind != LT_PART_EXCHANGE && (ag->in_backward || ag->dry_run.on))
        return lt_fail(LT_EINVAL, "%s cannot change %s", names[kind],
                       ag->in_backward ? "within backward" : "in a dry run");
    if (kind == LT_PART_SCALE)
        LT_TRY(lt__weights_check_none(ag, "the loss scale", "cannot change"));
    training_parts(ag)[kind] = part ? *part : (lt_step_part){0};
    ag->has_part[kind] = part != NULL;
    return LT_OK;
}

lt_status lt_check_no_part(const lt_ctx *ctx, lt_part_kind kind, const char *who)
{
    static const char *const names[] = {"a pipeline or a profile", "a loss scale",
                                        "a reducer or asynchronous training"};
    LT_NEED_CTX(ctx, LT_EINVAL);
    LT_TRY(check_kind(kind));
    if (!ctx->slots.autograd->has_part[kind])
        return LT_OK;
    return lt_fail(LT_EINVAL, "%s%sthis context already has %s; free it first", who ? who : "",
                   who ? ": " : "", names[kind]);
}

/* ==== Backward ================================================================================ */

lt_status lt__step_begin(struct lt_autograd *ag, lt_ctx *ctx, lt_tensor *loss, lt_tensor *grad,
                         int *begun)
{
    *begun = 0;
    EACH_PART(ag, p) {
        ++*begun;
        if (p->begin)
            LT_TRY(p->begin(p->ud, ctx, loss, grad));
    }
    return LT_OK;
}

lt_status lt__step_grad_begin(struct lt_autograd *ag, lt_tensor *x, lt_tensor *grad)
{
    EACH_PART(ag, p)
        if (p->grad_begin)
            LT_TRY(p->grad_begin(p->ud, x, grad));
    return LT_OK;
}

lt_status lt__step_grad_ready(struct lt_autograd *ag, lt_tensor *x, lt_tensor *grad)
{
    EACH_PART(ag, p)
        if (p->grad_ready)
            LT_TRY(p->grad_ready(p->ud, x, grad));
    return LT_OK;
}

lt_status lt__step_end(struct lt_autograd *ag, lt_ctx *ctx, int begun, lt_status status)
{
    const lt_step_part *parts = training_parts(ag);
    for (const lt_step_part *p = parts; p < parts + begun; p++)
        if (p->end)
            status = p->end(p->ud, ctx, status);
    return status;
}

bool lt__step_is_exclusive(const struct lt_autograd *ag)
{
    bool is_exclusive = false;
    EACH_PART(ag, p) {
        if (p->is_last) /* an exchange begins with the last pass, after which no other begins */
            return false;
        is_exclusive |= p->is_exclusive;
    }
    return is_exclusive;
}

bool lt_pass_is_last(const lt_ctx *ctx, bool guess)
{
    LT_NEED_CTX(ctx, false);
    EACH_PART(ctx->slots.autograd, p)
        if (p->is_last)
            return p->is_last(p->ud);
    return guess;
}

/* ==== Between backward and the optimizer step ================================================= */

void lt__step_synchronize(struct lt_autograd *ag)
{
    if (ag->in_backward)
        return;
    EACH_PART(ag, p)
        if (p->synchronize && (!ag->weights || p->backward))
            p->synchronize(p->ud);
}

/* ==== The optimizer step ====================================================================== */

lt_status lt__step_prepare(struct lt_autograd *ag)
{
    ag->is_accumulating = false;
    lt_step_status step_status = LT_APPLIED;
    EACH_PART(ag, p)
        if (p->prepare)
            LT_TRY(p->prepare(p->ud, &step_status));
    ag->is_accumulating = step_status == LT_ACCUMULATING;
    if (ag->is_accumulating)
        ag->step_status = LT_ACCUMULATING;
    return LT_OK;
}

lt_status lt__step_decide(struct lt_autograd *ag, lt_ctx *ctx)
{
    ag->step_status = LT_APPLIED;
    EACH_PART(ag, p)
        if (p->reduce)
            LT_TRY(p->reduce(p->ud, ctx, &ag->step_status));
    EACH_PART(ag, p)
        if (p->decide && ag->step_status != LT_ACCUMULATING)
            LT_TRY(p->decide(p->ud, &ag->step_status));
    return LT_OK;
}

const lt_step_part *lt__step_applier(const struct lt_autograd *ag)
{
    EACH_PART(ag, p)
        if (p->apply)
            return p;
    return NULL;
}

/* ==== A net on several ranks ================================================================== */

bool lt__step_has_ranks(const struct lt_autograd *ag)
{
    EACH_PART(ag, p)
        if (p->reduce || p->sum)
            return true;
    return false;
}

bool lt_net_is_divided(const lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, false);
    EACH_PART(ctx->slots.autograd, p)
        if (p->sum)
            return true;
    return false;
}

lt_status lt_sum_over_net(lt_ctx *ctx, double *numbers, int64_t n)
{
    LT_NEED_CTX(ctx, LT_EINVAL);
    EACH_PART(ctx->slots.autograd, p)
        if (p->sum)
            LT_TRY(p->sum(p->ud, numbers, n));
    return LT_OK;
}
