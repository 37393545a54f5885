/* split.c - the second half of a split backward: gradients of parameters that lt_backward_from()
 * has left for later. A list (tape.c) holds the nodes that compute them, with their saved tensors
 * and incoming gradients. Lists are completed in the order of their backwards, or together. In both
 * cases each parameter gets its contributions in the order of whole backwards: a parameter is
 * deferred only if one node of the backward uses it, so it has at most one node in each list, and a
 * later backward that would add to it at once fails.
 */
#include "autograd/tape.h"

/* Computes the deferred gradients of a node and completes their leaves. */
static lt_status complete_node(struct lt_autograd *ag, lt_node *node)
{
    if (lt__node_back_later(node) != LT_OK)
        return lt__node_failed(node);
    for (int i = 0; i < node->n_in; i++) {
        lt_leaf *leaf = node->edge[i].leaf;
        if (leaf && leaf->touched && leaf->x)
            LT_TRY(lt__leaf_complete(ag, leaf, node));
    }
    return LT_OK;
}

/* Completes the first node of list w. Each gradient must get its contributions in order. So this
 * function first completes the nodes of earlier lists, from `first` on, that add to the same
 * gradients. */
static lt_status complete_first(lt_deferred_wgrad *first, lt_deferred_wgrad *w)
{
    struct lt_autograd *ag = w->ctx->slots.autograd;
    lt_node *node = w->first;
    lt_status status = LT_OK;
    for (lt_deferred_wgrad *before = first; before != w; before = before->next)
        while (lt__wgrad_bring(before, node))
            LT_TRY(complete_first(first, before));
    node = lt__wgrad_take(w);
    status = complete_node(ag, node);
    for (int i = 0; i < node->n_in && status != LT_OK; i++)
        if (node->edge[i].leaf)
            lt__leaf_abandon(node->edge[i].leaf);
    lt__node_free_saved(node);
    lt__node_release(node);
    return status;
}

static lt_status complete_all(lt_deferred_wgrad *w)
{
    lt_status status = LT_OK;
    while (w->first && status == LT_OK)
        status = complete_first(w, w);
    return status;
}

static lt_status check_discarded(const struct lt_autograd *ag, const char *who)
{
    return ag->weights_discarded
               ? lt_fail(LT_EINVAL,
                         "%s: lt_zero_grad() has discarded a gradient to which a backward had yet "
                         "to add",
                         who)
               : LT_OK;
}

/* Whether lists of ctx can be completed now. */
static lt_status check_context(lt_ctx *ctx, const char *who)
{
    LT_TRY(lt__check_open(ctx, who));
    return ctx->slots.autograd->in_backward
               ? lt_fail(LT_EINVAL, "%s: called from a hook of a running backward", who)
               : LT_OK;
}

/* Whether the list can be completed now. */
static lt_status check(const lt_deferred_wgrad *w)
{
    static const char who[] = "lt_backward_weights()";
    const struct lt_autograd *ag = w->ctx->slots.autograd;
    LT_TRY(check_context(w->ctx, who));
    if (!w->is_listed)
        return LT_OK;
    if (ag->dry_run.on)
        return lt_fail(LT_EINVAL, "%s: its backward ran before the dry run", who);
    if (ag->weights != w)
        return lt_fail(LT_EINVAL,
                       "%s: an earlier backward must be completed first, so that gradients are "
                       "added in order",
                       who);
    return check_discarded(ag, who);
}

static lt_status complete(lt_deferred_wgrad *w)
{
    struct lt_autograd *ag = w->ctx->slots.autograd;
    ag->in_backward = true;
    ag->no_grad_depth++;
    lt_status status = lt__backward_end(w->ctx, LT_PART_KINDS, complete_all(w), false);
    ag->no_grad_depth--;
    ag->in_backward = false;
    lt__wgrad_unlist(w);
    return status;
}

void lt_deferred_wgrad_free(lt_deferred_wgrad *w)
{
    if (w && w->is_listed) {
        struct lt_autograd *ag = w->ctx->slots.autograd;
        bool in_backward = ag->in_backward;
        ag->in_backward = true;
        lt_status status = lt__backward_end(w->ctx, LT_PART_KINDS, LT_EINVAL, false);
        (void)status; /* the caller knows */
        ag->in_backward = in_backward;
        lt__wgrad_unlist(w);
    }
    lt__wgrad_drop(w);
}

lt_status lt_backward_weights(lt_deferred_wgrad *w)
{
    lt_status status = check(w);
    if (status == LT_OK && w->is_listed)
        status = complete(w);
    lt_deferred_wgrad_free(w);
    return status;
}

/* Completes the nodes of all lists. It follows the order of the newest backward, and completes
 * earlier contributions to a gradient before each of its nodes. The other nodes come last. */
static lt_status complete_together(struct lt_autograd *ag, const char *who)
{
    lt_deferred_wgrad *newest = ag->weights;
    lt_status status = check_discarded(ag, who);
    while (newest->next)
        newest = newest->next;
    while (newest->first && status == LT_OK) {
        status = complete_first(ag->weights, newest);
        if (status == LT_OK)
            status = check_discarded(ag, who);
    }
    for (lt_deferred_wgrad *w = ag->weights; w && status == LT_OK; w = w->next)
        status = complete_all(w);
    return status;
}

lt_status lt_backward_weights_all(lt_ctx *ctx)
{
    static const char who[] = "lt_backward_weights_all()";
    LT_NEED_CTX(ctx, LT_EINVAL);
    struct lt_autograd *ag = ctx->slots.autograd;
    LT_TRY(check_context(ctx, who));
    if (!ag->weights)
        return LT_OK;
    if (ag->dry_run.on)
        return lt_fail(LT_EINVAL, "%s: a dry run has begun since the backward", who);
    ag->in_backward = true;
    ag->no_grad_depth++;
    lt_status status = complete_together(ag, who);
    while (ag->weights) {
        status = lt__backward_end(ctx, LT_PART_KINDS, status, false);
        lt__wgrad_unlist(ag->weights);
    }
    ag->no_grad_depth--;
    ag->in_backward = false;
    return status;
}
