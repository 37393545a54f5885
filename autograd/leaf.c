/* leaf.c - leaves: the gradients and hooks of tensors that no op made. */
#include "autograd/tape.h"

lt_leaf *lt__leaf_of(lt_tensor *x)
{
    if (x->leaf)
        return x->leaf;
    if (!lt__autograd(x->ctx))
        return NULL;
    lt_leaf *leaf = lt__alloc_zero(x->ctx, sizeof *leaf);
    if (!leaf)
        return NULL;
    atomic_init(&leaf->refs, 1);
    leaf->ctx = x->ctx;
    leaf->x = x;
    x->leaf = leaf;
    return leaf;
}

void lt__leaf_forget_grad(lt_leaf *leaf)
{
    leaf->has_grad = false;
    leaf->scaled_by = NULL;
    leaf->is_mixed = false;
}

bool lt__backward_is_used(const struct lt_autograd *ag, uint64_t k)
{
    return ag->backwards - k < 64 && (ag->used >> k % 64 & 1);
}

void lt__count_backward(struct lt_autograd *ag)
{
    ag->backwards++;
    ag->used &= ~(UINT64_C(1) << ag->backwards % 64);
}

void lt__leaf_added(lt_leaf *leaf)
{
    const struct lt_autograd *ag = leaf->ctx->slots.autograd;
    uint64_t now = ag->in_backward || ag->backwards == 0 ? ag->backwards : ag->backwards - 1;
    leaf->is_mixed |= leaf->has_grad && leaf->last != now && lt__backward_is_used(ag, leaf->last);
    leaf->has_grad = true;
    leaf->last = now;
}

void lt__leaf_drop_dry_grad(lt_leaf *leaf)
{
    lt_release(leaf->dry_grad);
    leaf->dry_grad = NULL;
}

void lt__leaf_abandon(lt_leaf *leaf)
{
    const struct lt_autograd *ag = leaf->ctx->slots.autograd;
    if (leaf->touched && lt__step_scale(ag)->grad_complete && !ag->dry_run.on)
        lt__leaf_forget_grad(leaf); /* the gradient is still scaled */
    lt_release(leaf->unconverted);
    leaf->unconverted = NULL;
    lt__leaf_drop_dry_grad(leaf);
    leaf->uses = 0;
    leaf->touched = false;
}

lt_status lt__leaf_need_grad(lt_leaf *leaf)
{
    lt_tensor *x = leaf->x;
    if (leaf->grad)
        return LT_OK;
    if (leaf->segment) {
        LT_TRY(lt__segment_need_grads(leaf->segment));
        leaf->grad = lt__tensor_over(leaf->segment->grads, (lt_dtype)x->dtype, x->ndim, x->dims,
                                     leaf->offset, true);
    } else {
        leaf->grad = lt__tensor_like(x, x->storage->device, (lt_dtype)x->dtype);
    }
    return leaf->grad ? LT_OK : LT_ENOMEM;
}

lt_status lt_set_requires_grad(lt_tensor *x, bool on)
{
    if (x->dead)
        return lt__check_alive(x);
    if (x->node)
        return lt_fail(
            LT_EINVAL,
            "requires_grad cannot be set on the result of an op; detach() this one first");
    if (on && !lt__is_float((lt_dtype)x->dtype))
        return lt_fail(LT_EINVAL, "only float tensors can have gradients, but this one is %s",
                       lt_dtype_name((lt_dtype)x->dtype));
    if (!on && !x->leaf)
        return LT_OK;
    lt_leaf *leaf = lt__leaf_of(x);
    if (!leaf)
        return LT_ENOMEM;
    if (on && leaf->role == LT_BUFFER)
        return lt_fail(LT_EINVAL, "a buffer cannot have a gradient");
    leaf->requires_grad = on;
    return LT_OK;
}

bool lt_requires_grad(const lt_tensor *x)
{
    return x->node || (x->leaf && x->leaf->requires_grad) || lt__requires_grad_elsewhere(x);
}

bool lt__is_recorded(const struct lt_autograd *ag, const lt_op *op, lt_tensor *const *in, int n_in,
                     lt_dtype dtype)
{
    bool any = false;
    if (ag->no_grad_depth > 0 || !(op->bwd || op->fast_bwd || op->same_grad) ||
        !lt__is_float(dtype))
        return false;
    for (int i = 0; i < n_in; i++)
        any |= in[i] && lt_requires_grad(in[i]);
    return any;
}

lt_tensor *lt_grad(lt_tensor *x)
{
    if (!x->leaf)
        return NULL;
    lt__step_synchronize(x->ctx->slots.autograd);
    return x->leaf->has_grad ? x->leaf->grad : NULL;
}

void lt_zero_grad(lt_tensor *x)
{
    struct lt_autograd *ag = x->ctx->slots.autograd;
    if (!x->leaf || ag->dry_run.on || ag->is_accumulating)
        return;
    lt__step_synchronize(ag);
    ag->weights_discarded |= x->leaf->deferred > 0 && x->leaf != ag->completing;
    lt__leaf_forget_grad(x->leaf);
    ag->period++;
}

bool lt_grad_scaled_by(const lt_tensor *x, const void *ud)
{
    return x->leaf && x->leaf->has_grad && x->leaf->scaled_by == ud;
}

bool lt_has_hooks(const lt_tensor *x) { return x->leaf && x->leaf->hooks; }

bool lt_has_optim(const lt_tensor *x) { return x->leaf && x->leaf->optims > 0; }

int lt_grad_uses(const lt_tensor *x) { return x->leaf ? x->leaf->uses + x->leaf->deferred : 0; }

lt_status lt_grad_set(lt_tensor *x, bool added)
{
    const lt_step_part *scale = lt__step_scale(x->ctx->slots.autograd);
    lt_leaf *leaf = x->leaf;
    if (!leaf->has_grad)
        lt__leaf_added(leaf);
    if (!added || !scale->grad_set)
        return LT_OK;
    leaf->scaled_by = scale->ud;
    return scale->grad_set(scale->ud, x, leaf->grad);
}

lt_tensor *lt_detach(lt_tensor *x) { return lt_view(x, x->ndim, x->dims); }

static lt_status add_hook(lt_tensor *x, const lt_hook *hook)
{
    if (x->node)
        return lt_fail(LT_EINVAL, "on_grad accepts parameters and leaves, not the result of an op");
    lt_leaf *leaf = lt__leaf_of(x);
    if (leaf && leaf->n_hooks == LT_MAX_HOOKS)
        return lt_fail(
            LT_EINVAL,
            "on_grad: this tensor already has the maximum of %d hooks; a hook that registers "
            "itself doubles their number in every backward",
            LT_MAX_HOOKS);
    lt_hook *own = leaf ? lt__alloc(x->ctx, sizeof *own) : NULL;
    if (!own)
        return LT_ENOMEM;
    *own = *hook;
    lt_hook **end = &leaf->hooks;
    while (*end)
        end = &(*end)->next;
    *end = own;
    leaf->n_hooks++;
    return LT_OK;
}

lt_status lt_on_grad(lt_tensor *x, lt_grad_hook fn, void *ud, void (*free)(void *ud))
{
    lt_status status = add_hook(x, &(lt_hook){.fn = fn, .ud = ud, .free = free});
    if (status != LT_OK && free)
        free(ud);
    return status;
}

void lt_grad_fault(lt_tensor *param, int rank)
{
    lt_ctx *ctx = param->ctx;
    ctx->inf.armed = true;
    param->leaf->injects_inf = ctx->inf.rank == rank;
}
