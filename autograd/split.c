/* split.c - the second half of a split backward: gradients of parameters that lt_backward_from()
 * has left for later. A list holds the nodes that compute them, with their saved tensors and
 * incoming gradients. Lists are completed in the order of their backwards, so each parameter gets
 * its contributions in the order of whole backwards.
 */
#include "autograd/tape.h"

struct lt_weights {
    lt_ctx *ctx;
    lt_weights *next;      /* of the next backward, while listed */
    bool is_listed;        /* in lt_autograd.weights */
    lt_node *first, *last; /* in the order of the walk, linked through `next` */
};

lt_weights *lt__weights_new(lt_ctx *ctx)
{
    lt_weights *w = lt__alloc_zero(ctx, sizeof *w);
    if (w)
        w->ctx = lt__ctx_retain(ctx);
    return w;
}

void lt__weights_add(lt_weights *w, lt_node *node)
{
    node->freed = true;
    lt__node_unlist(node);
    node->next = node->prev = NULL;
    for (int i = 0; i < node->n_in; i++) {
        lt_edge *e = &node->edge[i];
        if (node->later >> i & 1) {
            e->leaf->uses = 0;
            e->leaf->deferred++;
            continue;
        }
        lt__node_release(e->node); /* not its last reference: the walk has one, too */
        lt__leaf_release(e->leaf);
        e->node = NULL;
        e->leaf = NULL;
    }
    *(w->last ? &w->last->next : &w->first) = node;
    w->last = node;
}

/* Removes the first node. The caller gets its reference. */
static lt_node *take_first(lt_weights *w)
{
    lt_node *node = w->first;
    w->first = node->next;
    if (!w->first)
        w->last = NULL;
    node->next = NULL;
    for (int i = 0; i < node->n_in; i++)
        if (node->later >> i & 1)
            node->edge[i].leaf->deferred--;
    return node;
}

static void free_node(lt_node *node)
{
    lt__node_free_saved(node);
    lt__node_release(node);
}

static void free_nodes(lt_weights *w)
{
    while (w->first)
        free_node(take_first(w));
}

void lt__weights_drop(lt_weights *w)
{
    if (!w)
        return;
    lt_ctx *ctx = w->ctx;
    free_nodes(w);
    lt__free(ctx, w, sizeof *w);
    lt__ctx_release(ctx);
}

/* ==== The lists of a context ================================================================== */

void lt__weights_list(lt_weights *w)
{
    struct lt_autograd *ag = w->ctx->slots.autograd;
    lt_weights **end = &ag->weights;
    if (ag->dry_run.on) /* nothing was deferred, and end() is not called */
        return;
    while (*end)
        end = &(*end)->next;
    *end = w;
    w->is_listed = true;
}

static void unlist(lt_weights *w)
{
    struct lt_autograd *ag = w->ctx->slots.autograd;
    lt_weights **at = &ag->weights;
    while (*at != w)
        at = &(*at)->next;
    *at = w->next;
    w->is_listed = false;
    ag->weights_discarded &= ag->weights != NULL;
}

void lt__weights_close(lt_ctx *ctx)
{
    struct lt_autograd *ag = ctx->slots.autograd;
    while (ag->weights) {
        free_nodes(ag->weights);
        unlist(ag->weights);
    }
}

lt_status lt__weights_check_none(const struct lt_autograd *ag, const char *what)
{
    return ag->weights ? lt_fail(LT_EINVAL,
                                 "%s while gradients of parameters are pending; call "
                                 "lt_backward_weights() first",
                                 what)
                       : LT_OK;
}

lt_status lt__weights_check_overlap(const struct lt_autograd *ag)
{
    const lt_grad_callbacks *c = &ag->callbacks;
    if (ag->dry_run.on || c->overlaps || !(c->begin || c->ready || c->end))
        return LT_OK;
    return lt__weights_check_none(ag, "backward: with these gradient callbacks it cannot start");
}

/* ==== The second half ========================================================================= */

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

static lt_status complete_all(lt_weights *w)
{
    struct lt_autograd *ag = w->ctx->slots.autograd;
    lt_status status = LT_OK;
    while (w->first && status == LT_OK) {
        lt_node *node = take_first(w);
        status = complete_node(ag, node);
        for (int i = 0; i < node->n_in && status != LT_OK; i++)
            if (node->edge[i].leaf)
                lt__leaf_abandon(node->edge[i].leaf);
        free_node(node);
    }
    return status;
}

static lt_status check(const lt_weights *w)
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

lt_status lt_backward_weights(lt_weights *w)
{
    LT_TRY(check(w));
    struct lt_autograd *ag = w->ctx->slots.autograd;
    lt_status status = LT_OK;
    if (w->is_listed) {
        ag->in_backward = true;
        ag->no_grad_depth++;
        status = lt__backward_end(w->ctx, complete_all(w));
        ag->no_grad_depth--;
        ag->in_backward = false;
        unlist(w);
    }
    lt__weights_drop(w);
    return status;
}

void lt_weights_free(lt_weights *w)
{
    if (w && w->is_listed) {
        struct lt_autograd *ag = w->ctx->slots.autograd;
        bool in_backward = ag->in_backward;
        ag->in_backward = true;
        lt_status status = lt__backward_end(w->ctx, LT_EINVAL);
        (void)status; /* the caller knows */
        ag->in_backward = in_backward;
        unlist(w);
    }
    lt__weights_drop(w);
}
