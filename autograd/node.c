/* node.c - backward of one node: where the gradients of its inputs go, the call of its kernel, and
 * the hooks of leaves whose gradient is complete.
 *
 * The first contribution to a gradient overwrites it and the others add to it, so nothing is zeroed
 * beforehand. Where the gradient of an input equals the incoming one (add, reshape), the tensor is
 * passed on, and copied only if something must be added to it while it is shared. Where backward
 * works element by element (relu), the new gradient overwrites the incoming one unless that is
 * shared.
 */
#include <math.h>

#include "autograd/tape.h"

/* ==== Where a gradient goes =================================================================== */

lt_status lt__grad_add(lt_tensor *dst, lt_tensor *src)
{
    lt_tensor *same = src->dtype == dst->dtype ? lt_retain(src)
                                               : lt__tensor_copy(src, (lt_dtype)dst->dtype);
    if (!same)
        return lt_errcode();
    lt__bump_version(dst);
    lt_device *device = dst->storage->device;
    lt_status status =
        device->add(device, dst->data, same->data, (lt_dtype)dst->dtype, (size_t)dst->count);
    lt_release(same);
    return status;
}

static bool shared(const lt_tensor *x)
{
    return atomic_load_explicit(&x->refs, memory_order_relaxed) > 1 ||
           atomic_load_explicit(&x->storage->refs, memory_order_relaxed) > 1;
}

/* *target = the tensor of a leaf's gradient. *add: it has contributions already. */
static lt_status leaf_target(lt_leaf *leaf, lt_tensor **target, bool *add)
{
    LT_TRY(lt__leaf_need_grad(leaf));
    *target = leaf->grad;
    *add = leaf->has_grad;
    if (!leaf->has_grad || leaf->touched)
        return LT_OK;
    leaf->touched = true;
    return lt__step_grad_begin(leaf->ctx->slots.autograd, leaf->x, leaf->grad);
}

static bool is_dry_run(const lt_leaf *leaf) { return leaf->ctx->slots.autograd->dry_run.on; }

/* A tensor in the memory of device, with the dims of spec. New. */
static lt_tensor *new_grad(lt_ctx *ctx, lt_device *device, lt_dtype dtype, const lt_spec *spec)
{
    return lt__tensor_new(ctx, device, dtype, spec->ndim, spec->dims, true);
}

/* *target = the tensor for the gradient of edge e; *add: add to it, otherwise overwrite it.
 * Borrowed from the node or leaf that it belongs to. */
static lt_status target_of(lt_edge *e, lt_tensor **target, bool *add)
{
    lt_leaf *leaf = e->leaf;
    if (leaf && !is_dry_run(leaf))
        return leaf_target(leaf, target, add);
    lt_tensor **slot = leaf ? &leaf->dry_grad : &e->node->d_out[e->out_index];
    lt_dtype dtype = leaf ? (lt_dtype)leaf->x->dtype : e->spec.dtype;
    *add = *slot != NULL;
    if (!*slot || shared(*slot)) {
        lt_tensor *own = *slot  ? lt__tensor_copy(*slot, dtype)
                         : leaf ? new_grad(leaf->ctx, leaf->x->storage->device, dtype, &e->spec)
                                : new_grad(e->node->ctx, e->node->device, dtype, &e->spec);
        if (!own)
            return lt_errcode();
        lt_release(*slot);
        *slot = own;
    }
    *target = *slot;
    return LT_OK;
}

static void arrived(lt_edge *e)
{
    if (e->leaf)
        e->leaf->touched = true;
    if (e->leaf && !is_dry_run(e->leaf))
        lt__leaf_added(e->leaf);
}

lt_status lt__edge_add(lt_edge *e, lt_tensor *grad)
{
    lt_tensor *target = NULL;
    bool add;
    if (e->node && !e->node->d_out[e->out_index]) {
        lt_tensor *same = lt__tensor_view(grad, e->spec.ndim, e->spec.dims, 0, true);
        e->node->d_out[e->out_index] = same;
        return same ? LT_OK : LT_ENOMEM;
    }
    LT_TRY(target_of(e, &target, &add));
    LT_TRY(add ? lt__grad_add(target, grad) : lt_copy(target, grad));
    arrived(e);
    return LT_OK;
}

/* ==== One node ================================================================================ */

static lt_status check_saved(const lt_node *node)
{
    for (int i = 0; i < node->n_all; i++)
        if (node->saved_out[i] && node->out_version[i] != lt__version_of(node->saved_out[i]))
            return lt_fail(LT_EINVAL, "its result was changed in place after it was computed");
    for (int i = 0; i < node->n_in; i++) {
        const lt_edge *e = &node->edge[i];
        if (!e->saved)
            continue;
        LT_TRY(lt__check_alive(e->saved));
        if (e->version != lt__version_of(e->saved))
            return lt_fail(LT_EINVAL, "its input %d was changed in place after it was used", i + 1);
    }
    return LT_OK;
}

/* Whether the input was the half copy of a parameter, whose gradient has another dtype. */
static bool is_half_copy(const lt_edge *e)
{
    return e->leaf && (lt_dtype)e->leaf->x->dtype != e->spec.dtype;
}

/* Whether e needs a gradient. A leaf may have been frozen or freed since it was used. */
static bool wanted(const lt_edge *e)
{
    return e->node || (e->leaf && e->leaf->requires_grad && e->leaf->x);
}

/* Whether the gradient of input i may overwrite the gradient of the output. */
static bool takes_over(const lt_node *node, int i)
{
    const lt_edge *e = &node->edge[i];
    const lt_tensor *grad = node->d_out[0];
    int64_t count;
    return i < 8 && (node->def->op->grad_in_place >> i & 1) && grad && !shared(grad) && e->node &&
           !e->node->d_out[e->out_index] && !node->ctx->slots.autograd->op_hook &&
           (lt_dtype)grad->dtype == e->spec.dtype &&
           lt__count_dims(e->spec.ndim, e->spec.dims, &count) == LT_OK && count == grad->count;
}

lt_call lt__node_call(const lt_node *node, lt_tensor **in)
{
    return (lt_call){.ctx = node->ctx,
                     .device = node->device,
                     .op = node->def->op,
                     .schema = &node->def->schema,
                     .opt = node->opt,
                     .n_in = node->n_in,
                     .in = in,
                     .out = (lt_tensor **)node->saved_out,
                     .d_out = (lt_tensor **)node->d_out,
                     .threads = node->ctx->threads,
                     .seed = node->seed,
                     .rng_stream = node->rng_stream,
                     .number = node->number,
                     .first_row = node->first_row};
}

/* Whether lt_step_part.grad_complete() can convert the gradient of input i, which the kernel has
 * computed in half precision: no other node adds to it, and no hook of another leaf runs before. */
static bool is_converted_later(const struct lt_autograd *ag, const lt_node *node, int i)
{
    const lt_leaf *leaf = node->edge[i].leaf;
    for (int j = 0; j < i; j++)
        if (node->edge[j].leaf)
            return false;
    return lt__step_scale(ag)->grad_complete && !ag->dry_run.on && is_half_copy(&node->edge[i]) &&
           leaf->uses <= 1 && !leaf->has_grad && !leaf->injects_inf;
}

/* Passes the gradient that the kernel has computed for input i on to the edge. */
static lt_status add_extra(const struct lt_autograd *ag, lt_node *node, int i, lt_tensor *grad)
{
    lt_edge *e = &node->edge[i];
    if (!is_converted_later(ag, node, i))
        return lt__edge_add(e, grad);
    LT_TRY(lt__leaf_need_grad(e->leaf));
    e->leaf->unconverted = lt_retain(grad);
    arrived(e);
    return LT_OK;
}

/* Runs the kernel for the inputs in `left`. If two inputs are the same tensor, they share one
 * gradient: the later one is first written to a tensor of its own, so that a kernel never gets the
 * same memory twice. */
static lt_status run_backward(lt_node *node, uint64_t left)
{
    const struct lt_autograd *ag = node->ctx->slots.autograd;
    const lt_op *op = node->def->op;
    lt_tensor *in[LT_MAX_LIST], *d_in[LT_MAX_LIST], *extra[LT_MAX_LIST];
    lt_call call = lt__node_call(node, in);
    call.d_in = d_in;
    const lt_kernels *own = node->device->is_host ? NULL : lt__kernels_of(ag, node->def);
    lt_status status = LT_OK;
    for (int i = 0; i < node->n_in; i++) {
        in[i] = node->edge[i].saved;
        d_in[i] = extra[i] = NULL;
    }
    for (int i = 0; i < node->n_in && status == LT_OK; i++) {
        lt_edge *e = &node->edge[i];
        bool add;
        if (!(left >> i & 1))
            continue;
        call.leaves |= (uint64_t)(e->leaf != NULL) << i;
        bool apart = is_half_copy(e) &&
                     (own ? !(own->f32_grad && own->f32_grad(&call, i)) : op->any_dtype);
        for (int j = 0; j < i; j++)
            apart |= d_in[j] && node->edge[j].leaf == e->leaf && node->edge[j].node == e->node &&
                     node->edge[j].out_index == e->out_index;
        if (apart) {
            extra[i] = d_in[i] = new_grad(node->ctx, node->device, e->spec.dtype, &e->spec);
            status = extra[i] ? LT_OK : LT_ENOMEM;
            continue;
        }
        if (takes_over(node, i)) {
            status = lt__edge_add(e, node->d_out[0]);
            d_in[i] = e->node->d_out[e->out_index];
            continue;
        }
        status = target_of(e, &d_in[i], &add);
        if (status == LT_OK && add)
            call.add |= 1ull << i;
    }
    if (status == LT_OK && !lt__is_idle(op, d_in, node->n_in))
        status = lt__run_kernel(&call, node->def, true);
    if (status == LT_OK && ag->op_hook)
        ag->op_hook(ag->op_hook_ud, &call, true, node->where);
    for (int i = 0; i < node->n_in; i++) {
        if (status == LT_OK && d_in[i] && !extra[i]) {
            lt__bump_version(d_in[i]);
            arrived(&node->edge[i]);
        }
        if (status == LT_OK && extra[i])
            status = add_extra(ag, node, i, extra[i]);
        lt_release(extra[i]);
    }
    return status;
}

/* The inputs in `left` whose gradients lt_backward_weights() will compute. Either all parameters in
 * `left` are deferred or none is, so that can_split() decides about the calls that are made. */
static uint64_t deferrable(const lt_node *node, uint64_t left)
{
    const lt_op *op = node->def->op;
    uint64_t later = left & op->weights;
    lt_tensor *in[LT_MAX_LIST], *d_in[LT_MAX_LIST];
    for (int i = 0; i < node->n_in; i++) {
        const lt_edge *e = &node->edge[i];
        in[i] = e->saved;
        d_in[i] = !(left >> i & 1) ? NULL : e->leaf ? e->leaf->x : e->saved;
        if (!(later >> i & 1))
            continue;
        if (e->node)
            later &= ~(1ull << i);
        else if (e->leaf->role != LT_PARAM || e->leaf->uses != 1 || e->leaf->touched)
            return 0;
    }
    if (later == 0 || !op->can_split || !node->device->is_host)
        return later;
    lt_call call = lt__node_call(node, in);
    call.d_in = d_in;
    return op->can_split(&call) ? later : 0;
}

lt_status lt__leaf_check_order(const lt_leaf *leaf)
{
    return leaf->deferred == 0 || is_dry_run(leaf)
               ? LT_OK
               : lt_fail(LT_EINVAL, "an earlier backward has not added to this gradient yet; call "
                                    "lt_backward_weights() for it first");
}

lt_status lt__node_back(lt_node *node, bool split)
{
    bool came = false;
    for (int i = 0; i < node->n_out; i++)
        came |= node->d_out[i] != NULL;
    if (!came)
        return LT_OK;
    uint64_t left = 0, same = 0;
    for (int i = 0; i < node->n_in; i++) {
        lt_edge *e = &node->edge[i];
        if (!wanted(e))
            continue;
        lt_tensor *grad = node->d_out[0];
        int64_t count;
        LT_TRY(lt__count_dims(e->spec.ndim, e->spec.dims, &count));
        bool is_same = i < 32 && (node->same_grad >> i & 1) && grad && grad->count == count &&
                       (lt_dtype)grad->dtype == e->spec.dtype;
        *(is_same ? &same : &left) |= 1ull << i;
    }
    uint64_t later = split ? deferrable(node, left) : 0;
    for (int i = 0; i < node->n_in; i++) {
        lt_edge *e = &node->edge[i];
        if (e->leaf && ((same | left) & ~later) >> i & 1)
            LT_TRY(lt__leaf_check_order(e->leaf));
        if (same >> i & 1)
            LT_TRY(lt__edge_add(e, node->d_out[0]));
    }
    node->later = later;
    if ((left &= ~later) == 0)
        return LT_OK;
    LT_TRY(check_saved(node));
    return run_backward(node, left);
}

lt_status lt__node_back_later(lt_node *node)
{
    uint64_t left = 0;
    for (int i = 0; i < node->n_in; i++)
        if ((node->later >> i & 1) && wanted(&node->edge[i]))
            left |= 1ull << i;
    if (left == 0)
        return LT_OK;
    LT_TRY(check_saved(node));
    return run_backward(node, left);
}

/* ==== Hooks =================================================================================== */

/* For tests: sets the first element to inf; see lt_grad_fault(). */
static lt_status put_inf(lt_leaf *leaf)
{
    lt_tensor *one = lt__tensor_view(leaf->grad, 0, NULL, 0, true);
    lt_status status = one ? lt_fill(one, INFINITY) : LT_ENOMEM;
    lt_release(one);
    leaf->ctx->inf.injected = true;
    return status;
}

/* Completes a leaf's gradient in a dry run, and discards it. */
static lt_status finish_dry_grad(struct lt_autograd *ag, lt_leaf *leaf)
{
    const lt_step_part *scale = lt__step_scale(ag);
    lt_status status = LT_OK;
    leaf->touched = false;
    if (scale->grad_complete)
        status = scale->grad_complete(scale->ud, leaf->x, leaf->dry_grad, leaf->dry_grad);
    lt__leaf_drop_dry_grad(leaf);
    return status;
}

static lt_status call_hooks(struct lt_autograd *ag, lt_leaf *leaf)
{
    const lt_step_part *scale = lt__step_scale(ag);
    if (ag->dry_run.on)
        return finish_dry_grad(ag, leaf);
    if (leaf->injects_inf && leaf->ctx->inf.step == leaf->ctx->step + 1 && leaf->x->count > 0)
        LT_TRY(put_inf(leaf));
    leaf->touched = false;
    if (scale->grad_complete) {
        lt_tensor *from = leaf->unconverted ? leaf->unconverted : lt_retain(leaf->grad);
        leaf->unconverted = NULL;
        lt_status status = scale->grad_complete(scale->ud, leaf->x, leaf->grad, from);
        lt_release(from);
        if (status != LT_OK) {
            lt__leaf_forget_grad(leaf);
            return status;
        }
        leaf->scaled_by = scale->ud;
    }
    int n = leaf->n_hooks; /* excludes hooks that a hook registers */
    for (lt_hook *h = leaf->hooks; n > 0; h = h->next, n--)
        LT_TRY(h->fn(h->ud, leaf->x, leaf->grad));
    return LT_OK;
}

lt_status lt__node_failed(const lt_node *node)
{
    return lt_fail_prefix("%sbackward of %s", node->where, node->def->schema.name);
}

static lt_status notify_ready(struct lt_autograd *ag, lt_leaf *leaf, const lt_node *node)
{
    if (ag->dry_run.on)
        return LT_OK;
    lt_status status = lt__step_grad_ready(ag, leaf->x, leaf->grad);
    return status != LT_OK && node ? lt__node_failed(node) : status;
}

lt_status lt__leaf_complete(struct lt_autograd *ag, lt_leaf *leaf, const lt_node *node)
{
    if (leaf->role == LT_RECEIVED && !ag->dry_run.on) {
        leaf->touched = false;
        return ag->stages.return_grad(ag->stages.ud, leaf->x, leaf->grad);
    }
    lt_tensor *x = lt_retain(leaf->x);
    ag->completing = leaf;
    lt_status status = call_hooks(ag, leaf);
    if (status == LT_OK)
        status = notify_ready(ag, leaf, node);
    ag->completing = NULL;
    lt_release(x);
    return status;
}

lt_status lt__backward_end(lt_ctx *ctx, int begun, lt_status status, bool is_dry)
{
    struct lt_autograd *ag = ctx->slots.autograd;
    if (!is_dry)
        status = lt__step_end(ag, ctx, begun, status);
    if (status == LT_OK && !is_dry)
        lt__count_backward(ag);
    return status;
}

lt_tensor *lt_saved(const lt_tensor *x, int i)
{
    const lt_node *node = x->node;
    for (int k = 0; node && k < node->n_in; k++)
        if (node->edge[k].saved && i-- == 0)
            return node->edge[k].saved;
    for (int k = 0; node && k < node->n_all; k++)
        if (node->saved_out[k] && i-- == 0)
            return node->saved_out[k];
    return NULL;
}

int lt_tape_nodes(const lt_tape *tape) { return tape->nodes; }
