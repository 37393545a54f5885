/* backward.c - the reverse walk.
 *
 * Two passes over the tape, from the node of the loss back. The first marks the nodes that the loss
 * was computed from, and counts for each leaf how many of them use it, so that its hooks can run as
 * soon as its last contribution is added, whatever the graph looks like. The second pass runs the
 * kernels. The first contribution to a gradient overwrites it and the others add to it, so nothing
 * is zeroed beforehand. Where the gradient of an input equals the incoming one (add, reshape), the
 * tensor is passed on, and copied only if something must be added to it while it is shared. Where
 * backward works element by element (relu), the new gradient overwrites the incoming one unless
 * that is shared.
 */
#include <math.h>
#include <string.h>

#include "autograd/tape.h"

#define FREED                                                                                      \
    "this graph was freed by an earlier backward or at the end of its step; add the losses and "   \
    "call backward once"

/* ==== First pass ============================================================================== */

/* A marked node is retained: the handles of its outputs may be gone, and the nodes that used it may
 * be freed before the walk gets to it. */
static void mark_one(lt_node *node)
{
    if (node->marked)
        return;
    node->marked = true;
    atomic_fetch_add_explicit(&node->refs, 1, memory_order_relaxed);
}

lt_status lt__mark(lt_node *from)
{
    mark_one(from);
    for (lt_node *node = from; node; node = node->prev) {
        if (!node->marked)
            continue;
        for (int i = 0; i < node->n_in; i++) {
            lt_edge *e = &node->edge[i];
            if (e->node && e->node->freed)
                return lt_fail(LT_EINVAL, "backward: " FREED);
            if (e->node)
                mark_one(e->node);
            else if (e->leaf)
                e->leaf->uses++;
        }
    }
    return LT_OK;
}

static void drop_dry_grads(lt_leaf *leaf)
{
    lt_release(leaf->dry_grad);
    leaf->dry_grad = NULL;
}

void lt__unmark(lt_node *from)
{
    for (lt_node *node = from, *before; node; node = before) {
        before = node->prev;
        if (!node->marked)
            continue;
        node->marked = false;
        for (int i = 0; i < node->n_out; i++) {
            lt_release(node->d_out[i]);
            node->d_out[i] = NULL;
        }
        for (int i = 0; i < node->n_in; i++)
            if (node->edge[i].leaf) {
                lt_leaf *leaf = node->edge[i].leaf;
                const struct lt_autograd *ag = leaf->ctx->slots.autograd;
                if (leaf->touched && ag->scaling.complete && !ag->dry_run.on)
                    lt__leaf_forget_grad(leaf); /* it is still scaled */
                drop_dry_grads(leaf);
                leaf->uses = 0;
                leaf->touched = false;
            }
        lt__node_release(node); /* frees no other node: those in its edges are retained */
    }
}

/* ==== Where a gradient goes =================================================================== */

/* dst += src. A gradient that came through a half copy is f16 or bf16, but the
 * parameter's gradient is f32. */
static lt_status add_to(lt_tensor *dst, lt_tensor *src)
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
    const lt_scaling *scaling = &leaf->ctx->slots.autograd->scaling;
    LT_TRY(lt__leaf_need_grad(leaf));
    *target = leaf->grad;
    *add = leaf->has_grad;
    if (scaling->rescale && leaf->has_grad && !leaf->touched) {
        leaf->touched = true;
        return scaling->rescale(scaling->ud, leaf->x, leaf->grad);
    }
    return LT_OK;
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
        e->leaf->has_grad = true;
}

/* Passes grad itself on to the edge, as a view with the edge's dims, or adds it there. */
static lt_status propagate(lt_edge *e, lt_tensor *grad)
{
    lt_tensor *target = NULL;
    bool add;
    if (e->node && !e->node->d_out[e->out_index]) {
        lt_tensor *same = lt__tensor_view(grad, e->spec.ndim, e->spec.dims, 0, true);
        e->node->d_out[e->out_index] = same;
        return same ? LT_OK : LT_ENOMEM;
    }
    LT_TRY(target_of(e, &target, &add));
    LT_TRY(add ? add_to(target, grad) : lt_copy(target, grad));
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
    return e->node || (e->leaf && e->leaf->collects && e->leaf->x);
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

/* Runs the kernel for the inputs in `left`. If two inputs are the same tensor, they share one
 * gradient: the later one is first written to a tensor of its own, so that a kernel never gets the
 * same memory twice. */
static lt_status run_backward(lt_node *node, uint64_t left)
{
    const struct lt_autograd *ag = node->ctx->slots.autograd;
    const lt_op *op = node->def->op;
    lt_tensor *in[LT_MAX_LIST], *d_in[LT_MAX_LIST], *extra[LT_MAX_LIST];
    lt_call call = {.ctx = node->ctx,
                    .device = node->device,
                    .op = op,
                    .schema = &node->def->schema,
                    .opt = node->opt,
                    .n_in = node->n_in,
                    .in = in,
                    .out = node->saved_out,
                    .d_out = node->d_out,
                    .d_in = d_in,
                    .stream = node->stream,
                    .first_row = node->first_row};
    const lt_kernels *own = node->device->is_host ? NULL : lt__kernels_of(ag, node->def);
    bool converts = own ? own->f32_grads : !op->any_dtype;
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
        bool apart = is_half_copy(e) && !converts;
        for (int j = 0; j < i; j++)
            apart |= d_in[j] && node->edge[j].leaf == e->leaf && node->edge[j].node == e->node &&
                     node->edge[j].out_index == e->out_index;
        if (apart) {
            extra[i] = d_in[i] = new_grad(node->ctx, node->device, e->spec.dtype, &e->spec);
            status = extra[i] ? LT_OK : LT_ENOMEM;
            continue;
        }
        if (takes_over(node, i)) {
            status = propagate(e, node->d_out[0]);
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
            status = propagate(&node->edge[i], extra[i]);
        lt_release(extra[i]);
    }
    return status;
}

static lt_status step_back(lt_node *node)
{
    bool came = false;
    for (int i = 0; i < node->n_out; i++)
        came |= node->d_out[i] != NULL;
    if (!came)
        return LT_OK;
    uint64_t left = 0;
    for (int i = 0; i < node->n_in; i++) {
        lt_edge *e = &node->edge[i];
        if (!wanted(e))
            continue;
        lt_tensor *grad = node->d_out[0];
        int64_t count;
        LT_TRY(lt__count_dims(e->spec.ndim, e->spec.dims, &count));
        bool same = i < 32 && (node->same_grad >> i & 1) && grad && grad->count == count &&
                    (lt_dtype)grad->dtype == e->spec.dtype;
        if (same)
            LT_TRY(propagate(e, grad));
        else
            left |= 1ull << i;
    }
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
    lt_status status = LT_OK;
    leaf->touched = false;
    if (ag->scaling.complete)
        status = ag->scaling.complete(ag->scaling.ud, leaf->x, leaf->dry_grad);
    drop_dry_grads(leaf);
    return status;
}

static lt_status call_hooks(struct lt_autograd *ag, lt_leaf *leaf)
{
    if (ag->dry_run.on)
        return finish_dry_grad(ag, leaf);
    if (leaf->injects_inf && leaf->ctx->inf.step == leaf->ctx->step + 1 && leaf->x->count > 0)
        LT_TRY(put_inf(leaf));
    leaf->touched = false;
    if (ag->scaling.complete) {
        if (ag->scaling.complete(ag->scaling.ud, leaf->x, leaf->grad) != LT_OK) {
            lt__leaf_forget_grad(leaf);
            return lt_errcode();
        }
        leaf->scaled_by = ag->scaling.ud;
    }
    int n = leaf->n_hooks; /* excludes hooks that a hook registers */
    for (lt_hook *h = leaf->hooks; n > 0; h = h->next, n--)
        LT_TRY(h->fn(h->ud, leaf->x, leaf->grad));
    if (leaf->hooks && ag->scaling.changed)
        LT_TRY(ag->scaling.changed(ag->scaling.ud, leaf->x, leaf->grad));
    return LT_OK;
}

static lt_status failed(const lt_node *node)
{
    return lt_fail_prefix("%sbackward of %s", node->where, node->def->schema.name);
}

static lt_status notify_ready(struct lt_autograd *ag, lt_leaf *leaf, const lt_node *node)
{
    if (!ag->callbacks.ready || ag->dry_run.on)
        return LT_OK;
    lt_status status = ag->callbacks.ready(ag->callbacks.ud, leaf->x, leaf->grad);
    return status != LT_OK && node ? failed(node) : status;
}

/* Runs the hooks of a leaf whose gradient is complete. node used the leaf last; NULL if the leaf is
 * the loss. A hook may release the tensor. */
static lt_status complete(struct lt_autograd *ag, lt_leaf *leaf, const lt_node *node)
{
    lt_tensor *x = lt_retain(leaf->x);
    lt_status status = call_hooks(ag, leaf);
    if (status == LT_OK)
        status = notify_ready(ag, leaf, node);
    lt_release(x);
    return status;
}

/* Counts one use of each leaf of node as done, and completes the leaves without further uses. */
static lt_status count_down(struct lt_autograd *ag, lt_node *node)
{
    for (int i = 0; i < node->n_in; i++) {
        lt_leaf *leaf = node->edge[i].leaf;
        if (!leaf || leaf->uses == 0 || --leaf->uses > 0 || !leaf->touched || !leaf->x)
            continue;
        LT_TRY(complete(ag, leaf, node));
    }
    return LT_OK;
}

/* ==== The walk ================================================================================ */

static lt_status walk(struct lt_autograd *ag, lt_node *from)
{
    lt_node *before;
    for (lt_node *node = from; node; node = before) {
        before = node->prev;
        if (!node->marked)
            continue;
        if (step_back(node) != LT_OK)
            return failed(node);
        LT_TRY(count_down(ag, node));
        before =
            node->prev; /* a hook may have freed other nodes; the lines below free only this one */
        node->marked = false;
        lt__node_free_saved(node);
        lt__node_release(node);
    }
    return LT_OK;
}

/* The gradient that the walk starts with. New. NULL on failure. */
static lt_tensor *seed_grad(lt_tensor *loss, lt_tensor *grad)
{
    char a[96], b[96];
    if (!grad && loss->count != 1) {
        lt_fail(
            LT_EINVAL,
            "backward: the loss must have one element, but is %s; take its mean or sum, or pass a "
            "gradient",
            lt_describe(loss, a, sizeof a));
        return NULL;
    }
    if (grad && lt__check_alive(grad) != LT_OK) {
        lt_fail_prefix("backward: the gradient");
        return NULL;
    }
    if (grad && grad->ctx != loss->ctx) {
        lt_fail(LT_EINVAL, "backward: the gradient and the loss belong to different contexts");
        return NULL;
    }
    if (grad && (!lt__same_dims(grad, loss) || grad->dtype != loss->dtype)) {
        lt_fail(LT_EINVAL, "backward: the gradient must be %s, but is %s",
                lt_describe(loss, a, sizeof a), lt_describe(grad, b, sizeof b));
        return NULL;
    }
    if (grad && grad->storage->device != loss->storage->device) {
        lt_fail(
            LT_EINVAL,
            "backward: the gradient is on %s, but the loss is on %s; copy it, e.g. grad:to('%s')",
            lt_device_of(grad), lt_device_of(loss), lt_device_of(loss));
        return NULL;
    }
    if (grad)
        return lt__tensor_copy(grad, (lt_dtype)loss->dtype);
    lt_tensor *one = lt__tensor_new(loss->ctx, loss->storage->device, (lt_dtype)loss->dtype,
                                    loss->ndim, loss->dims, true);
    if (one && lt_fill(one, 1) != LT_OK) {
        lt_release(one);
        return NULL;
    }
    return one;
}

/* Checks the loss synchronously. */
static lt_status check_finite(lt_tensor *loss)
{
    const lt_scaling *scaling = &loss->ctx->slots.autograd->scaling;
    double value;
    LT_TRY(lt_item(loss, 0, &value));
    if (isfinite(value))
        return LT_OK;
    lt__deferred_check_set_reported(loss->ctx);
    const char *why = scaling->explain ? scaling->explain(scaling->ud, loss) : "";
    return lt__fail_loss(loss->ctx->step + 1, value, why);
}

/* Whether each kernel is synchronous anyway, or all results are inspected. Then the loss is checked
 * at once, while the tensors that can explain it exist. */
static bool waits_for_loss(const lt_ctx *ctx)
{
    const struct lt_autograd *ag = ctx->slots.autograd;
    return ag->timer || ag->op_hook || ctx->trace;
}

static lt_status check_loss(lt_tensor *loss)
{
    LT_TRY(lt__check_alive(loss));
    if (!lt_requires_grad(loss))
        return lt_fail(LT_EINVAL, "backward: the loss was not computed from anything that requires "
                                  "a gradient");
    if (loss->node && loss->node->freed)
        return lt_fail(LT_EINVAL, "backward: " FREED);
    const lt_dry_run *r = &loss->ctx->slots.autograd->dry_run;
    if (r->on && loss->node && loss->node->tape != &r->tape)
        return lt_fail(LT_EINVAL, "backward: the loss was computed before the dry run");
    if (r->on)
        return LT_OK;
    bool is_here = loss->storage->device->is_host;
    if (!is_here)
        LT_TRY(lt__deferred_check_begin(loss));
    return loss->count == 1 && (is_here || waits_for_loss(loss->ctx)) ? check_finite(loss) : LT_OK;
}

/* The begin and end callbacks of lt_grad_callbacks, which a dry run skips. */
static lt_status begin(struct lt_autograd *ag, lt_tensor *loss)
{
    bool is_there = ag->callbacks.begin && !ag->dry_run.on;
    return is_there ? ag->callbacks.begin(ag->callbacks.ud, loss->ctx, loss) : LT_OK;
}

static lt_status end(struct lt_autograd *ag, lt_ctx *ctx, lt_status status)
{
    bool is_there = ag->callbacks.end && !ag->dry_run.on;
    return is_there ? ag->callbacks.end(ag->callbacks.ud, ctx, status) : status;
}

/* Backward of a loss that is itself a leaf. */
static lt_status backward_to_leaf(struct lt_autograd *ag, lt_tensor *loss, lt_tensor *seed)
{
    lt_edge e = {.leaf = loss->leaf, .spec = {.ndim = loss->ndim}};
    memcpy(e.spec.dims, loss->dims, sizeof e.spec.dims);
    lt_retain(loss);
    ag->in_backward = true;
    ag->no_grad_depth++;
    loss->leaf->uses = 1;
    lt_status status = begin(ag, loss);
    loss->leaf->uses = 0;
    if (status == LT_OK)
        status = propagate(&e, seed);
    if (status == LT_OK)
        status = complete(ag, loss->leaf, NULL);
    status = end(ag, loss->ctx, status);
    ag->no_grad_depth--;
    ag->in_backward = false;
    ag->backwards += status == LT_OK && !ag->dry_run.on;
    drop_dry_grads(loss->leaf);
    lt_release(loss);
    return status;
}

lt_status lt_backward(lt_tensor *loss, lt_tensor *grad)
{
    lt_ctx *ctx = loss->ctx;
    struct lt_autograd *ag = lt__autograd(ctx);
    if (!ag)
        return LT_ENOMEM;
    LT_TRY(lt__check_open(ctx, "backward"));
    if (ag->in_backward)
        return lt_fail(LT_EINVAL, "backward: called from a hook of a running backward");
    ag->grads_complete &= ag->dry_run.on;
    if (check_loss(loss) != LT_OK) {
        if (lt_errcode() == LT_ENUMERIC) /* keep this batch out of the running statistics */
            lt_bn_stats_clear(ctx);
        return lt_errcode();
    }
    lt_tensor *seed = seed_grad(loss, grad);
    if (!seed)
        return lt_errcode();
    if (ag->scaling.seed && ag->scaling.seed(ag->scaling.ud, seed) != LT_OK) {
        lt_release(seed);
        return lt_errcode();
    }
    if (!loss->node) { /* the loss is a leaf */
        lt_status status = backward_to_leaf(ag, loss, seed);
        lt_release(seed);
        return status;
    }
    lt_node *from = loss->node;
    lt_tape *tape = from->tape;
    atomic_fetch_add_explicit(&from->refs, 1, memory_order_relaxed);
    from->d_out[loss->out_index] = seed;
    ag->in_backward = true;
    ag->no_grad_depth++;
    lt_status status = lt__mark(from);
    bool begun = status == LT_OK;
    if (begun)
        status = begin(ag, loss);
    if (status == LT_OK)
        status = walk(ag, from);
    if (begun)
        status = end(ag, ctx, status);
    ag->no_grad_depth--;
    ag->in_backward = false;
    ag->backwards += status == LT_OK && !ag->dry_run.on;
    if (status != LT_OK)
        lt__unmark(tape->last);
    for (lt_bn_entry *s = ag->bn_stats; s && !ag->dry_run.on; s = s->next)
        s->backward_period = ag->period + 1;
    lt__node_release(from);
    return status;
}
