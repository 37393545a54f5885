/* history.c - lt_replay_ops(): calls a hook for each op of a graph, with its results where they are
 * saved or can be recomputed. */
#include "autograd/tape.h"

/* The input as the op read it. Borrowed; NULL if it was not saved. */
static lt_tensor *input_of(const lt_edge *e)
{
    lt_tensor *x = e->saved ? e->saved : e->leaf ? e->leaf->x : NULL;
    if (!x || (lt_dtype)x->dtype == e->spec.dtype)
        return x;
    return lt_is_param(x) && lt__is_half(e->spec.dtype) ? lt_half(x, e->spec.dtype) : NULL;
}

static bool is_view(const lt_op *op) { return !op->fwd && !op->fast_fwd; }

/* Output i of node, if an op that read it has saved it or a view of it. Borrowed, or NULL. */
static lt_tensor *kept_by_readers(const lt_node *node, int i)
{
    lt_tensor *x = NULL;
    for (lt_node *reader = node->next; reader && !x; reader = reader->next)
        for (int k = 0; k < reader->n_in && reader->marked && !x; k++) {
            const lt_edge *e = &reader->edge[k];
            if (e->node != node || e->out_index != i)
                continue;
            x = e->saved ? e->saved : is_view(reader->def->op) ? kept_by_readers(reader, 0) : NULL;
        }
    return x;
}

/* Recomputes the outputs of node from its inputs, if all of these are saved. New. */
static void make_again(const lt_node *node, lt_tensor **in, lt_tensor **out)
{
    lt_ctx *ctx = node->ctx;
    void *ud;
    for (int i = 0; i < node->n_in; i++)
        if (!in[i] && node->edge[i].given)
            return;
    lt_cast_fn cast = lt_get_cast(ctx, &ud);
    lt_set_cast(ctx, NULL, NULL);
    lt_grad_off(ctx);
    if (lt_apply(ctx, node->def, in, node->n_in, node->opt, out) != LT_OK)
        out[0] = NULL;
    lt_grad_on(ctx);
    lt_set_cast(ctx, cast, ud);
}

static void call_hook(const lt_node *node, lt_op_hook_fn fn, void *ud)
{
    const lt_op *op = node->def->op;
    lt_tensor *in[LT_MAX_LIST], *out[LT_MAX_OUT] = {NULL}, *made[LT_MAX_OUT] = {NULL};
    for (int i = 0; i < node->n_in; i++)
        in[i] = input_of(&node->edge[i]);
    for (int i = 0; i < node->n_all; i++)
        out[i] = node->saved_out[i] ? node->saved_out[i]
                 : i < node->n_out  ? kept_by_readers(node, i)
                                    : NULL;
    if (!out[0] && node->n_all == 1 && !op->sums && !op->after) {
        make_again(node, in, made);
        out[0] = made[0];
    }
    lt_call call = lt__node_call(node, in);
    call.out = out;
    call.d_out = NULL;
    fn(ud, &call, false, node->where);
    lt_release(made[0]);
}

void lt_replay_ops(lt_tensor *loss, lt_op_hook_fn fn, void *ud)
{
    struct lt_autograd *ag = loss->ctx->slots.autograd;
    lt_op_hook_fn op_hook = ag->op_hook;
    if (!loss->node || loss->node->freed)
        return;
    lt_tape *tape = loss->node->tape;
    ag->op_hook = NULL;
    if (lt__mark(&loss, 1) == LT_OK)
        for (lt_node *node = tape->first; node; node = node->next)
            if (node->marked && !is_view(node->def->op))
                call_hook(node, fn, ud);
    lt__unmark(tape);
    ag->op_hook = op_hook;
}
