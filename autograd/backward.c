/* backward.c - the reverse walk.
 *
 * Two passes over the tape, from its end back. The first marks the nodes that the roots were
 * computed from, and counts for each leaf how many of them use it, so that its hooks can run as
 * soon as its last contribution is added, whatever the graph looks like. The second pass runs the
 * kernels (node.c). A split backward leaves the gradients of some parameters to
 * lt_backward_weights() (split.c).
 */
#include <math.h>
#include <stdio.h>
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

lt_tape *lt__tape_of(lt_tensor *const *roots, int n)
{
    for (int i = 0; i < n; i++)
        if (roots[i]->node)
            return roots[i]->node->tape;
    return NULL;
}

lt_status lt__mark(lt_tensor *const *roots, int n)
{
    lt_tape *tape = lt__tape_of(roots, n);
    for (int i = 0; i < n; i++)
        if (roots[i]->node)
            mark_one(roots[i]->node);
        else
            roots[i]->leaf->uses++;
    for (lt_node *node = tape ? tape->last : NULL; node; node = node->prev) {
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

void lt__unmark(lt_tape *tape)
{
    for (lt_node *node = tape ? tape->last : NULL, *before; node; node = before) {
        before = node->prev;
        if (!node->marked)
            continue;
        node->marked = false;
        node->later = 0;
        for (int i = 0; i < node->n_out; i++) {
            lt_release(node->d_out[i]);
            node->d_out[i] = NULL;
        }
        for (int i = 0; i < node->n_in; i++)
            if (node->edge[i].leaf)
                lt__leaf_abandon(node->edge[i].leaf);
        lt__node_release(node); /* frees no other node: those in its edges are retained */
    }
}

/* ==== Roots =================================================================================== */

typedef struct backward { /* the arguments of a backward */
    lt_ctx *ctx;
    lt_tensor *const *roots, *const *grads;
    int n;
    int loss; /* index of the loss, or -1 */
} backward;

/* How messages name root i. */
static const char *name_of(const backward *b, int i, char name[24])
{
    snprintf(name, 24, i == b->loss ? "the loss" : "root %d", i + 1);
    return name;
}

static lt_status check_grad(const backward *b, int i)
{
    lt_tensor *root = b->roots[i], *grad = b->grads[i];
    char is[96], must[96], name[24];
    name_of(b, i, name);
    if (!grad)
        return root->count == 1
                   ? LT_OK
                   : lt_fail(LT_EINVAL,
                             "backward: the loss must have one element, but is %s; take its mean "
                             "or sum, or pass a gradient",
                             lt_describe(root, is, sizeof is));
    if (lt__check_alive(grad) != LT_OK)
        return lt_fail_prefix("backward: the gradient");
    if (grad->ctx != root->ctx)
        return lt_fail(LT_EINVAL, "backward: the gradient and %s belong to different contexts",
                       name);
    if (!lt__same_dims(grad, root) || grad->dtype != root->dtype)
        return lt_fail(LT_EINVAL, "backward: the gradient must be %s, but is %s",
                       lt_describe(root, must, sizeof must), lt_describe(grad, is, sizeof is));
    if (grad->storage->device != root->storage->device)
        return lt_fail(
            LT_EINVAL,
            "backward: the gradient is on %s, but %s is on %s; copy it, e.g. grad:to('%s')",
            lt_device_of(grad), name, lt_device_of(root), lt_device_of(root));
    return LT_OK;
}

/* The gradient of root i, before loss scaling. New. NULL on failure. */
static lt_tensor *seed_of(const backward *b, int i)
{
    lt_tensor *root = b->roots[i];
    if (b->grads[i])
        return lt__tensor_copy(b->grads[i], (lt_dtype)root->dtype);
    lt_tensor *one = lt__tensor_like(root, root->storage->device, (lt_dtype)root->dtype);
    return one ? lt__tensor_if(lt_fill(one, 1), one) : NULL;
}

/* Checks the loss synchronously. */
static lt_status check_finite(lt_tensor *loss)
{
    const lt_step_part *scale = lt__step_scale(loss->ctx->slots.autograd);
    double value;
    LT_TRY(lt_item(loss, 0, &value));
    if (isfinite(value))
        return LT_OK;
    lt__deferred_check_set_reported(loss->ctx);
    const char *why = scale->explain ? scale->explain(scale->ud, loss) : "";
    return lt__fail_loss(loss->ctx->step + 1, value, why);
}

/* Whether each kernel is synchronous anyway, or all results are inspected. Then the loss is checked
 * at once, while the tensors that can explain it exist. */
static bool waits_for_loss(const lt_ctx *ctx)
{
    const struct lt_autograd *ag = ctx->slots.autograd;
    return ag->timer || ag->op_hook || ctx->trace;
}

static lt_status check_root(const backward *b, int i)
{
    lt_tensor *root = b->roots[i];
    const lt_dry_run *r = &b->ctx->slots.autograd->dry_run;
    char name[24];
    name_of(b, i, name);
    if (root->ctx != b->ctx)
        return lt_fail(LT_EINVAL, "backward: %s belongs to another context", name);
    LT_TRY(lt__check_alive(root));
    if (!lt_requires_grad(root))
        return lt_fail(LT_EINVAL,
                       "backward: %s was not computed from anything that requires a gradient",
                       name);
    if (root->node && root->node->freed)
        return lt_fail(LT_EINVAL, "backward: " FREED);
    if (r->on && root->node && root->node->tape != &r->tape)
        return lt_fail(LT_EINVAL, "backward: %s was computed before the dry run", name);
    if (root->node && root->node->tape != lt__tape_of(b->roots, b->n))
        return lt_fail(LT_EINVAL,
                       "backward: %s was recorded on another tape than the roots before "
                       "it",
                       name);
    return LT_OK;
}

/* Checks the arguments and the value of the loss. */
static lt_status check(const backward *b)
{
    lt_tensor *loss = b->loss < 0 ? NULL : b->roots[b->loss];
    bool is_here = b->n > 0 || b->ctx->device->is_host;
    for (int i = 0; i < b->n; i++) {
        LT_TRY(check_root(b, i));
        is_here &= b->roots[i]->storage->device->is_host;
    }
    for (int i = 0; i < b->n; i++)
        if (!b->grads[i] && i != b->loss)
            return lt_fail(LT_EINVAL,
                           "backward: roots %d and %d have no gradient, but only one root can be "
                           "the loss; add the losses",
                           b->loss + 1, i + 1);
    if (!b->ctx->slots.autograd->dry_run.on) {
        if (!is_here)
            LT_TRY(lt__deferred_check_begin(b->ctx, loss));
        if (loss && loss->count == 1 && (loss->storage->device->is_host || waits_for_loss(b->ctx)))
            LT_TRY(check_finite(loss));
    }
    for (int i = 0; i < b->n; i++)
        LT_TRY(check_grad(b, i));
    return LT_OK;
}

/* Stores the gradient of root i. If the root is a leaf that no node uses, completes it. */
static lt_status start_root(struct lt_autograd *ag, const backward *b, int i, lt_tensor *seed)
{
    lt_tensor *root = b->roots[i], **slot = root->node ? &root->node->d_out[root->out_index] : NULL;
    if (slot && *slot)
        return lt__grad_add(*slot, seed);
    if (slot) {
        *slot = lt_retain(seed);
        return LT_OK;
    }
    lt_leaf *leaf = root->leaf;
    lt_edge e = {.leaf = leaf, .spec = {.ndim = root->ndim}};
    memcpy(e.spec.dims, root->dims, sizeof e.spec.dims);
    if (lt__leaf_check_order(leaf) != LT_OK)
        return lt_fail_prefix("backward");
    LT_TRY(lt__edge_add(&e, seed));
    return --leaf->uses > 0 ? LT_OK : lt__leaf_complete(ag, leaf, NULL);
}

/* Starts the walk. *loss: the gradient of the loss, or NULL. It is taken, so that it is not shared,
 * and set to NULL. */
static lt_status start(struct lt_autograd *ag, const backward *b, lt_tensor **loss)
{
    lt_status status = LT_OK;
    for (int i = 0; i < b->n && status == LT_OK; i++) {
        lt_tensor *seed = i == b->loss ? *loss : seed_of(b, i);
        if (i == b->loss)
            *loss = NULL;
        status = seed ? start_root(ag, b, i, seed) : lt_errcode();
        lt_release(seed);
    }
    return status;
}

/* ==== The walk ================================================================================ */

/* Counts one use of each leaf of node as done, and completes the leaves without further uses. */
static lt_status count_down(struct lt_autograd *ag, lt_node *node)
{
    for (int i = 0; i < node->n_in; i++) {
        lt_leaf *leaf = node->edge[i].leaf;
        if (!leaf || (node->later >> i & 1) || leaf->uses == 0 || --leaf->uses > 0 ||
            !leaf->touched || !leaf->x)
            continue;
        LT_TRY(lt__leaf_complete(ag, leaf, node));
    }
    return LT_OK;
}

static lt_status walk(struct lt_autograd *ag, lt_tape *tape, lt_deferred_wgrad *weights)
{
    lt_node *before;
    for (lt_node *node = tape ? tape->last : NULL; node; node = before) {
        before = node->prev;
        if (!node->marked)
            continue;
        if (lt__node_back(node, weights && !ag->dry_run.on) != LT_OK)
            return lt__node_failed(node);
        LT_TRY(count_down(ag, node));
        before =
            node->prev; /* a hook may have freed other nodes; the lines below free only this one */
        node->marked = false;
        if (node->later) {
            lt__wgrad_add(weights, node);
            continue;
        }
        lt__node_free_saved(node);
        lt__node_release(node);
    }
    return LT_OK;
}

/* After a failure: discards the partial gradients. */
static void abandon(const backward *b, lt_tape *tape)
{
    for (int i = 0; i < b->n; i++)
        if (!b->roots[i]->node && b->roots[i]->leaf)
            lt__leaf_abandon(b->roots[i]->leaf);
    lt__unmark(tape);
}

/* Both passes. *loss: the gradient of the loss, or NULL; it is taken. weights: where to defer
 * gradients, or NULL. */
static lt_status run(struct lt_autograd *ag, const backward *b, lt_tensor **loss,
                     lt_deferred_wgrad *weights)
{
    lt_tape *tape = lt__tape_of(b->roots, b->n);
    for (int i = 0; i < b->n; i++) /* a hook may release it */
        lt_retain(b->roots[i]);
    int begun = 0;
    lt_status status = lt__mark(b->roots, b->n);
    if (status == LT_OK)
        status = lt__step_begin(ag, b->ctx, b->loss < 0 ? NULL : b->roots[b->loss], *loss, &begun);
    if (status == LT_OK)
        status = start(ag, b, loss);
    if (status == LT_OK)
        status = walk(ag, tape, weights);
    if (begun > 0 && (status != LT_OK || !weights))
        status = lt__backward_end(b->ctx, begun, status, ag->dry_run.on);
    if (status != LT_OK)
        abandon(b, tape);
    for (int i = 0; i < b->n; i++)
        lt_release(b->roots[i]);
    return status;
}

/* Makes the gradient of the loss and runs both passes. */
static lt_status seed_and_run(struct lt_autograd *ag, const backward *b, lt_deferred_wgrad *weights)
{
    lt_tensor *loss = b->loss < 0 ? NULL : seed_of(b, b->loss);
    lt_status status = b->loss < 0 || loss ? LT_OK : lt_errcode();
    if (status == LT_OK) {
        ag->in_backward = true;
        ag->no_grad_depth++;
        status = run(ag, b, &loss, weights);
        ag->no_grad_depth--;
        ag->in_backward = false;
        if (!ag->dry_run.on)
            lt__bn_stats_keep(ag);
    }
    lt_release(loss);
    return status;
}

static lt_status go_back(const backward *b, lt_deferred_wgrad **weights)
{
    struct lt_autograd *ag = lt__autograd(b->ctx);
    if (weights)
        *weights = NULL;
    if (!ag)
        return LT_ENOMEM;
    LT_TRY(lt__check_open(b->ctx, "backward"));
    if (ag->in_backward)
        return lt_fail(LT_EINVAL, "backward: called from a hook of a running backward");
    if (b->n < 0)
        return lt_fail(LT_EINVAL, "backward: the number of roots must be at least 0, but is %d",
                       b->n);
    LT_TRY(lt__weights_check_overlap(ag));
    ag->grads_complete &= ag->dry_run.on;
    if (check(b) != LT_OK) {
        if (lt_errcode() == LT_ENUMERIC) /* keep this batch out of the running statistics */
            lt_bn_stats_clear(b->ctx);
        return lt_errcode();
    }
    lt_deferred_wgrad *list = weights ? lt__wgrad_new(b->ctx) : NULL;
    if (weights && !list)
        return LT_ENOMEM;
    lt_status status = seed_and_run(ag, b, list);
    if (status == LT_OK && list)
        lt__wgrad_list(*weights = list);
    else
        lt__wgrad_drop(list);
    return status;
}

lt_status lt_backward(lt_tensor *loss, lt_tensor *grad)
{
    struct lt_autograd *ag = loss->ctx->slots.autograd;
    const lt_step_part *schedule = ag ? &ag->parts[LT_PART_SCHEDULE] : NULL;
    if (!schedule || !schedule->backward)
        return go_back(&(backward){.ctx = loss->ctx, .roots = &loss, .grads = &grad, .n = 1}, NULL);
    LT_TRY(schedule->backward(schedule->ud, loss, grad));
    lt__bn_stats_keep(ag);  /* its backward pass may run later */
    lt__count_backward(ag); /* the pass has a number of its own; numbers need only increase */
    ag->grads_complete = false;
    return LT_OK;
}

lt_status lt_backward_from(lt_ctx *ctx, lt_tensor *const *roots, lt_tensor *const *grads, int n,
                           lt_deferred_wgrad **weights)
{
    LT_NEED_CTX(ctx, LT_EINVAL);
    backward b = {.ctx = ctx, .roots = roots, .grads = grads, .n = n, .loss = -1};
    for (int i = n - 1; i >= 0; i--)
        if (!grads[i])
            b.loss = i;
    return go_back(&b, weights);
}
