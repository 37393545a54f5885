/* tape.c - the state of autograd in a context; nodes, tapes and lists of deferred
 * gradients. tape.h explains the ownership. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "autograd/tape.h"

/* ==== State =================================================================================== */

/* Called by core: drops the history of x, and its leaf and home if x is freed (gone). */
static void forget(lt_tensor *x, bool gone)
{
    if (x->node) {
        lt__node_release(x->node);
        x->node = NULL;
    }
    if (gone && x->leaf) {
        if (x->leaf->x == x) { /* x is not the half copy, which holds the leaf and must go too */
            lt_tensor *half = x->leaf->half;
            x->leaf->x = x->leaf->half = NULL;
            lt_release(half);
        }
        lt__leaf_release(x->leaf);
        x->leaf = NULL;
    }
    lt__home_forget(x, gone);
}

static void clear_tape(lt_tape *tape)
{
    lt_node *node;
    while ((node = tape->first)) {
        atomic_fetch_add_explicit(&node->refs, 1, memory_order_relaxed);
        lt__node_free_saved(node);
        lt__node_release(node);
    }
}

void lt__bn_entry_free(lt_ctx *ctx, lt_bn_entry *entry)
{
    lt_release(entry->running_mean);
    lt_release(entry->running_var);
    lt_release(entry->mean);
    lt_release(entry->var);
    lt__free(ctx, entry, sizeof *entry);
}

void lt_bn_stats_clear(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, );
    lt_bn_entry *s;
    while ((s = ctx->slots.autograd->bn_stats)) {
        ctx->slots.autograd->bn_stats = s->next;
        lt__bn_entry_free(ctx, s);
    }
}

/* Called by lt_ctx_free(). Frees the graphs and statistics now, not with the last reference to the
 * context: they hold tensors, which hold the context. */
static void closed(lt_ctx *ctx)
{
    struct lt_autograd *ag = ctx->slots.autograd;
    lt__weights_close(ctx);
    clear_tape(&ag->default_tape);
    clear_tape(&ag->dry_run.tape);
    lt_bn_stats_clear(ctx);
}

/* Frees the memory of the step check. */
static void free_step_check(lt_ctx *ctx)
{
    const lt_deferred_check *check = &ctx->slots.autograd->deferred;
    lt_device *device = ctx->devices[1];
    lt__device_free(ctx, device, check->on_device, sizeof *check->on_device);
    if (check->on_host)
        device->free_host(device, check->on_host);
}

static void ctx_freed(lt_ctx *ctx)
{
    struct lt_autograd *ag = ctx->slots.autograd;
    free_step_check(ctx);
    free(ag->noted);
    for (int i = 0; i < ag->n_defs; i++)
        lt__free(ctx, ag->defs[i], sizeof **ag->defs);
    lt__free(ctx, ag->defs, (size_t)ag->capacity * sizeof *ag->defs);
    lt__free(ctx, ag, sizeof *ag);
    ctx->slots.autograd = NULL;
}

static void seeded(lt_ctx *ctx)
{
    lt_tape *tape = ctx->slots.autograd->tape;
    tape->draws[0] = tape->draws[1] = 0;
}

struct lt_autograd *lt__autograd(lt_ctx *ctx)
{
    struct lt_autograd *ag = ctx->slots.autograd;
    if (ag || !(ag = lt__alloc_zero(ctx, sizeof *ag)))
        return ag;
    ag->default_tape.ctx = ag->dry_run.tape.ctx = ctx;
    ag->tape = &ag->default_tape;
    ctx->slots.autograd = ag;
    ctx->slots.forget = forget;
    ctx->slots.inherit = lt__home_inherit;
    ctx->slots.refuse_meta = lt__home_refuse;
    ctx->slots.closed = closed;
    ctx->slots.ctx_freed = ctx_freed;
    ctx->slots.seeded = seeded;
    return ag;
}

void lt_grad_off(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, );
    ctx->slots.autograd->no_grad_depth++;
}

void lt_grad_on(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, );
    if (ctx->slots.autograd->no_grad_depth > 0)
        ctx->slots.autograd->no_grad_depth--;
}

bool lt_grad_enabled(const lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, false);
    return ctx->slots.autograd->no_grad_depth == 0;
}

/* Defines a function that sets a callback and its ud. */
#define SETTER(name, type, callback)                                                               \
    void name(lt_ctx *ctx, type fn, void *ud)                                                      \
    {                                                                                              \
        LT_NEED_CTX(ctx, );                                                                        \
        ctx->slots.autograd->callback = fn;                                                        \
        ctx->slots.autograd->callback##_ud = ud;                                                   \
    }

SETTER(lt_set_cast, lt_cast_fn, cast)
SETTER(lt_set_allreduce, lt_allreduce_fn, allreduce)
SETTER(lt_set_where, lt_where_fn, where)
SETTER(lt_set_timer, lt_timer_fn, timer)
SETTER(lt_set_op_hook, lt_op_hook_fn, op_hook)

lt_cast_fn lt_get_cast(const lt_ctx *ctx, void **ud)
{
    LT_NEED_CTX(ctx, NULL);
    *ud = ctx->slots.autograd->cast_ud;
    return ctx->slots.autograd->cast;
}

void lt_set_kernels(lt_ctx *ctx, const lt_kernels *kernels, int n, lt_check_loss_fn check_loss,
                    lt_clip_fn clip)
{
    LT_NEED_CTX(ctx, );
    struct lt_autograd *ag = ctx->slots.autograd;
    ag->kernels = kernels;
    ag->n_kernels = n;
    ag->deferred.check_loss = check_loss;
    ag->deferred.clip = clip;
}

void lt_where(lt_ctx *ctx, char where[LT_WHERE_BYTES])
{
    LT_NEED_CTX(ctx, );
    const struct lt_autograd *ag = ctx->slots.autograd;
    where[0] = 0;
    if (ag->where)
        ag->where(ag->where_ud, where, LT_WHERE_BYTES);
}

/* ==== Nodes =================================================================================== */

void lt__leaf_release(lt_leaf *leaf)
{
    if (!leaf || atomic_fetch_sub_explicit(&leaf->refs, 1, memory_order_acq_rel) != 1)
        return;
    for (lt_hook *h = leaf->hooks, *next; h; h = next) {
        next = h->next;
        if (h->free)
            h->free(h->ud);
        lt__free(leaf->ctx, h, sizeof *h);
    }
    lt_release(leaf->grad);
    lt_release(leaf->unconverted);
    lt_release(leaf->dry_grad);
    lt__segment_release(leaf->segment);
    lt__free(leaf->ctx, leaf, sizeof *leaf);
}

static size_t node_bytes(const lt_def *def, int n_in)
{
    return sizeof(lt_node) + (size_t)n_in * sizeof(lt_edge) +
           (size_t)def->schema.n_opt * sizeof(lt_opt);
}

static void unlist(lt_node *node)
{
    lt_tape *tape = node->tape;
    if (!tape)
        return;
    *(node->prev ? &node->prev->next : &tape->first) = node->next;
    *(node->next ? &node->next->prev : &tape->last) = node->prev;
    tape->nodes--;
    node->tape = NULL;
}

/* Releases all that an edge holds; returns its node if this was the node's last reference. */
static lt_node *drop_edge(lt_edge *e)
{
    lt_node *from = e->node;
    lt_release(e->saved); /* first: the edge still holds the node, so it is not freed here */
    lt__leaf_release(e->leaf);
    e->saved = NULL;
    e->leaf = NULL;
    e->node = NULL;
    return from && atomic_fetch_sub_explicit(&from->refs, 1, memory_order_acq_rel) == 1 ? from
                                                                                        : NULL;
}

void lt__node_free_saved(lt_node *node)
{
    /* Edges hold nodes that hold edges, and a deep graph must not cause a deep recursion. Nodes
     * freed here are chained through `next`, which is unused once a node is unlisted. */
    node->freed = true;
    unlist(node);
    node->next = NULL;
    for (lt_node *head = node, *tail = node; head;) {
        for (int i = 0; i < LT_MAX_OUT; i++) {
            lt_release(head->d_out[i]);
            lt_release(head->saved_out[i]);
            head->d_out[i] = head->saved_out[i] = NULL;
        }
        for (int i = 0; i < head->n_in; i++) {
            lt_node *ended = drop_edge(&head->edge[i]);
            if (!ended)
                continue;
            unlist(ended);
            ended->next = NULL;
            tail = tail->next = ended;
        }
        lt_node *done = head;
        head = head->next;
        if (done != node)
            lt__free(done->ctx, done, node_bytes(done->def, done->n_in));
    }
    node->next = NULL;
}

void lt__node_release(lt_node *node)
{
    if (!node || atomic_fetch_sub_explicit(&node->refs, 1, memory_order_acq_rel) != 1)
        return;
    lt__node_free_saved(node);
    lt__free(node->ctx, node, node_bytes(node->def, node->n_in));
}

static lt_status save(lt_node *node, const lt_call *c)
{
    for (int i = 0; i < c->n_in; i++) {
        if (!c->in[i] || !(c->save & LT_SAVE_IN(i < 7 ? i : 7)))
            continue;
        node->edge[i].saved = lt_retain(c->in[i]);
        node->edge[i].version = lt__version_of(c->in[i]);
    }
    for (int i = 0; i < node->n_all; i++) {
        if (!(c->save & LT_SAVE_OUT(i)))
            continue;
        node->saved_out[i] = lt_view(c->out[i], c->out[i]->ndim, c->out[i]->dims);
        if (!node->saved_out[i])
            return lt_errcode();
        node->out_version[i] = lt__version_of(node->saved_out[i]);
    }
    return LT_OK;
}

lt_status lt__record(struct lt_autograd *ag, const lt_def *def, const lt_call *c, int64_t first_row)
{
    const lt_op *op = def->op;
    lt_tape *tape = ag->tape;
    for (int i = 0; i < c->n_in; i++)
        if (c->in[i] && c->in[i]->node && c->in[i]->node->tape != tape && !c->in[i]->node->freed)
            return lt_fail(LT_EINVAL, "input %d was recorded on another tape; detach() it", i + 1);
    size_t bytes = node_bytes(def, c->n_in);
    lt_node *node = lt__alloc(c->ctx, bytes);
    if (!node)
        return LT_ENOMEM;
    memset(node, 0, sizeof *node);
    atomic_init(&node->refs, 1);
    node->def = def;
    node->ctx = c->ctx;
    node->device = c->device;
    node->n_in = (uint8_t)c->n_in;
    node->n_out = op->n_out ? op->n_out : 1;
    node->n_all = (uint8_t)(node->n_out + op->n_aux);
    node->seed = c->seed;
    node->rng_stream = c->rng_stream;
    node->number = c->number;
    node->first_row = first_row;
    node->same_grad = c->same_grad;
    for (int i = 0; i < c->n_in; i++) {
        lt_edge *e = &node->edge[i];
        lt_tensor *x = c->in[i];
        *e = (lt_edge){0};
        if (!x)
            continue;
        e->given = true;
        e->spec.dtype = (lt_dtype)x->dtype;
        e->spec.ndim = x->ndim;
        memcpy(e->spec.dims, x->dims, (size_t)x->ndim * sizeof *x->dims);
        if (x->node) {
            e->node = x->node;
            e->out_index = x->out_index;
            atomic_fetch_add_explicit(&x->node->refs, 1, memory_order_relaxed);
        } else if (x->leaf && x->leaf->requires_grad) {
            e->leaf = x->leaf;
            atomic_fetch_add_explicit(&x->leaf->refs, 1, memory_order_relaxed);
        }
    }
    node->opt = (lt_opt *)(node->edge + c->n_in);
    memcpy(node->opt, c->opt, (size_t)def->schema.n_opt * sizeof(lt_opt));
    lt_status status = save(node, c);
    if (status != LT_OK) {
        lt__node_release(node);
        return status;
    }
    lt_where(c->ctx, node->where);
    node->tape = tape;
    node->prev = tape->last;
    *(tape->last ? &tape->last->next : &tape->first) = node;
    tape->last = node;
    tape->nodes++;
    for (int i = 0; i < node->n_out; i++) {
        c->out[i]->node = node;
        c->out[i]->out_index = (uint8_t)i;
        if (i > 0)
            atomic_fetch_add_explicit(&node->refs, 1, memory_order_relaxed);
    }
    return LT_OK;
}

/* ==== Deferred gradients ====================================================================== */

lt_deferred_wgrad *lt__wgrad_new(lt_ctx *ctx)
{
    lt_deferred_wgrad *w = lt__alloc_zero(ctx, sizeof *w);
    if (w)
        w->ctx = lt__ctx_retain(ctx);
    return w;
}

void lt__wgrad_add(lt_deferred_wgrad *w, lt_node *node)
{
    node->freed = true;
    unlist(node);
    node->next = node->prev = NULL;
    for (int i = 0; i < node->n_in; i++) {
        lt_edge *e = &node->edge[i];
        if (node->later >> i & 1) {
            e->leaf->uses = 0;
            e->leaf->deferred++;
            continue;
        }
        lt__node_release(e->node); /* this is not its last reference: the walk has one, too */
        lt__leaf_release(e->leaf);
        e->node = NULL;
        e->leaf = NULL;
    }
    *(w->last ? &w->last->next : &w->first) = node;
    w->last = node;
}

lt_node *lt__wgrad_take(lt_deferred_wgrad *w)
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

/* Whether both nodes add to the same deferred gradient. */
static bool share_leaf(const lt_node *a, const lt_node *b)
{
    for (int i = 0; i < a->n_in; i++)
        for (int k = 0; k < b->n_in; k++)
            if ((a->later >> i & 1) && (b->later >> k & 1) && a->edge[i].leaf == b->edge[k].leaf)
                return true;
    return false;
}

bool lt__wgrad_bring(lt_deferred_wgrad *w, const lt_node *like)
{
    lt_node *before = NULL, *node = w->first;
    while (node && !share_leaf(node, like)) {
        before = node;
        node = node->next;
    }
    if (!node || !before)
        return node != NULL;
    before->next = node->next;
    if (w->last == node)
        w->last = before;
    node->next = w->first;
    w->first = node;
    return true;
}

static void free_nodes(lt_deferred_wgrad *w)
{
    while (w->first) {
        lt_node *node = lt__wgrad_take(w);
        lt__node_free_saved(node);
        lt__node_release(node);
    }
}

void lt__wgrad_drop(lt_deferred_wgrad *w)
{
    if (!w)
        return;
    lt_ctx *ctx = w->ctx;
    free_nodes(w);
    lt__free(ctx, w, sizeof *w);
    lt__ctx_release(ctx);
}

void lt__wgrad_list(lt_deferred_wgrad *w)
{
    struct lt_autograd *ag = w->ctx->slots.autograd;
    lt_deferred_wgrad **end = &ag->weights;
    if (ag->dry_run.on) /* nothing was deferred, and end() is not called */
        return;
    while (*end)
        end = &(*end)->next;
    *end = w;
    w->is_listed = true;
}

void lt__wgrad_unlist(lt_deferred_wgrad *w)
{
    struct lt_autograd *ag = w->ctx->slots.autograd;
    lt_deferred_wgrad **at = &ag->weights;
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
        lt__wgrad_unlist(ag->weights);
    }
}

lt_status lt__weights_check_overlap(const struct lt_autograd *ag)
{
    return ag->weights && lt__step_is_exclusive(ag)
               ? lt_fail(LT_EINVAL, "backward cannot start before lt_backward_weights() has "
                                    "completed the earlier split backward, because the gradient "
                                    "callbacks do not support overlap")
               : LT_OK;
}

/* ==== Tapes =================================================================================== */

lt_tape *lt_tape_new(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, NULL);
    lt_tape *tape = lt__autograd(ctx) ? lt__alloc_zero(ctx, sizeof *tape) : NULL;
    if (tape)
        tape->ctx = lt__ctx_retain(ctx);
    return tape;
}

void lt_tape_free(lt_tape *tape)
{
    if (!tape)
        return;
    lt_ctx *ctx = tape->ctx;
    struct lt_autograd *ag = ctx->slots.autograd;
    clear_tape(tape);
    if (ag && ag->tape == tape)
        ag->tape = &ag->default_tape;
    if (ag && ag->dry_run.before == tape)
        ag->dry_run.before = &ag->default_tape;
    lt__free(ctx, tape, sizeof *tape);
    lt__ctx_release(ctx);
}

lt_tape *lt_tape_use(lt_ctx *ctx, lt_tape *tape)
{
    LT_NEED_CTX(ctx, NULL);
    struct lt_autograd *ag = ctx->slots.autograd;
    lt_tape *before = ag->tape;
    ag->tape = tape ? tape : &ag->default_tape;
    return before;
}

lt_tape *lt_tape_current(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, NULL);
    return ctx->slots.autograd->tape;
}

void lt_tape_set_first_row(lt_tape *tape, int64_t first_row)
{
    tape->first_row = first_row;
    tape->draws[0] = tape->draws[1] = 0;
}

lt_status lt_dry_run_begin(lt_ctx *ctx, const lt_step_part *scale, lt_op_hook_fn op_hook, void *ud)
{
    LT_NEED_CTX(ctx, LT_EINVAL);
    struct lt_autograd *ag = lt__autograd(ctx);
    if (!ag)
        return LT_ENOMEM;
    if (ag->in_backward || ag->dry_run.on)
        return lt_fail(LT_EINVAL, "a dry run cannot begin %s",
                       ag->in_backward ? "within backward" : "within another one");
    lt_dry_run *r = &ag->dry_run;
    r->before = ag->tape;
    lt__step_synchronize(ag); /* until the end, nothing waits for gradients */
    memcpy(r->parts, ag->parts, sizeof r->parts);
    r->op_hook = ag->op_hook;
    r->op_hook_ud = ag->op_hook_ud;
    r->seed = ctx->config.seed;
    r->seeded_at = ctx->seeded_at;
    r->draws = ctx->draws;
    r->trees = ctx->trees;
    r->tape.first_row = ag->tape->first_row;
    memcpy(r->tape.draws, ag->tape->draws, sizeof r->tape.draws);
    ag->tape = &r->tape;
    memset(ag->parts, 0, sizeof ag->parts);
    if (scale)
        ag->parts[LT_PART_SCALE] = *scale;
    ag->op_hook = op_hook;
    ag->op_hook_ud = ud;
    r->on = true;
    return LT_OK;
}

void lt_dry_run_end(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, );
    struct lt_autograd *ag = ctx->slots.autograd;
    lt_dry_run *r = &ag->dry_run;
    if (!r->on)
        return;
    clear_tape(&r->tape);
    ag->tape = r->before;
    memcpy(ag->parts, r->parts, sizeof r->parts);
    ag->op_hook = r->op_hook;
    ag->op_hook_ud = r->op_hook_ud;
    ctx->config.seed = r->seed;
    ctx->seeded_at = r->seeded_at;
    ctx->draws = r->draws;
    ctx->trees = r->trees;
    r->on = false;
}
