/* split.c - the second half of a split backward: gradients of parameters that lt_backward_from()
 * has left for later. A list (tape.c) holds the nodes that compute them, with their saved tensors
 * and incoming gradients. Lists are completed in the order of their backwards, so each parameter
 * gets its contributions in the order of whole backwards.
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

static lt_status complete_all(lt_deferred_wgrad *w)
{
    struct lt_autograd *ag = w->ctx->slots.autograd;
    lt_status status = LT_OK;
    while (w->first && status == LT_OK) {
        lt_node *node = lt__wgrad_take(w);
        status = complete_node(ag, node);
        for (int i = 0; i < node->n_in && status != LT_OK; i++)
            if (node->edge[i].leaf)
                lt__leaf_abandon(node->edge[i].leaf);
        lt__node_free_saved(node);
        lt__node_release(node);
    }
    return status;
}

/* Whether the list can be completed now. */
static lt_status check(const lt_deferred_wgrad *w)
{
    const struct lt_autograd *ag = w->ctx->slots.autograd;
    LT_TRY(lt__check_open(w->ctx, "lt_backward_weights()"));
    if (ag->in_backward)
        return lt_fail(LT_EINVAL,
                       "lt_backward_weights(): called from a hook of a running backward");
    if (!w->is_listed)
        return LT_OK;
    if (ag->dry_run.on)
        return lt_fail(LT_EINVAL, "lt_backward_weights(): its backward ran before the dry run");
    if (ag->weights != w)
        return lt_fail(LT_EINVAL, "lt_backward_weights(): an earlier backward must be completed "
                                  "first, so that gradients are added in order");
    if (ag->weights_discarded)
        return lt_fail(LT_EINVAL, "lt_backward_weights(): lt_zero_grad() has discarded a gradient "
                                  "to which a backward had yet to add");
    return LT_OK;
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
