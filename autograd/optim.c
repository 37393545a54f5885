/* optim.c - runs an update op over the ranges of parameters that have gradients, and computes the
 * norm of these gradients. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "autograd/ranges.h"
#include "core/hash.h"

static int by_place(const void *a, const void *b)
{
    const lt_optim_item *x = a, *y = b;
    if (x->arena != y->arena)
        return x->arena < y->arena ? -1 : 1;
    int64_t ox = x->x->leaf->offset, oy = y->x->leaf->offset;
    return ox < oy ? -1 : ox > oy;
}

static lt_status add_item(lt_optim *o, lt_tensor *x, int index)
{
    if (!lt_is_param(x) || x->ctx != o->ctx)
        return lt_fail(LT_EINVAL, "an optimizer accepts only parameters of its own context");
    if (x->meta)
        return LT_OK;
    LT_TRY(lt__check_alive(x));
    int a = 0;
    while (a < o->n_arenas && o->arenas[a].segment != x->leaf->segment)
        a++;
    if (a == o->n_arenas) {
        lt_segment *segment = x->leaf->segment;
        o->arenas[a] = (lt_optim_slots){.segment = lt__segment_retain(segment)};
        o->n_arenas++;
        LT_TRY(lt__segment_need_grads(segment));
        for (int k = 0; k < o->n_slots; k++) {
            lt_storage *slot =
                lt__storage_new(o->ctx, segment->values->device,
                                (size_t)segment->count * lt_dtype_bytes(segment->dtype));
            if (!slot)
                return LT_ENOMEM;
            o->arenas[a].slot[k] = slot;
            LT_TRY(slot->device->fill(slot->device, slot->data, segment->dtype,
                                      (size_t)segment->count, 0));
        }
    }
    o->items[o->n_items++] = (lt_optim_item){.x = lt_retain(x), .arena = a, .index = index};
    x->leaf->optims++;
    return LT_OK;
}

lt_optim *lt_optim_new(lt_ctx *ctx, const char *update_op, lt_tensor *const *params, int n)
{
    LT_NEED_CTX(ctx, NULL);
    const lt_def *def = lt_op_find(ctx, update_op);
    if (!def)
        return NULL;
    if (!def->op->in_place || def->schema.n_in < 2) {
        lt_fail(LT_EINVAL, "%s is not an update op, which writes (w, g, slots...) in place",
                update_op);
        return NULL;
    }
    if (n < 0) {
        lt_fail(LT_EINVAL, "%s: the number of parameters must be at least 0, but is %d", update_op,
                n);
        return NULL;
    }
    lt_optim *o = lt__alloc_zero(ctx, sizeof *o);
    if (!o)
        return NULL;
    o->ctx = lt__ctx_retain(ctx);
    o->def = def;
    o->number = ++ctx->slots.autograd->optims;
    o->backwards = ctx->slots.autograd->backwards;
    o->step = lt_schema_index(&def->schema, "step");
    o->n_slots = def->schema.n_in - 2;
    o->capacity = n;
    o->last.status = LT_ACCUMULATING;
    o->items = lt__alloc(ctx, (size_t)n * sizeof *o->items);
    o->arenas = lt__alloc(ctx, (size_t)n * sizeof *o->arenas);
    lt_status status = o->items && o->arenas ? LT_OK : LT_ENOMEM;
    for (int i = 0; i < n && status == LT_OK; i++)
        status = add_item(o, params[i], i);
    if (status == LT_OK) {
        qsort(o->items, (size_t)o->n_items, sizeof *o->items, by_place);
        for (int i = 1; i < o->n_items && status == LT_OK; i++)
            if (o->items[i].x == o->items[i - 1].x)
                status = lt_fail(LT_EINVAL, "an optimizer was given the same parameter twice");
    }
    if (status == LT_OK)
        return o;
    lt_optim_free(o);
    return NULL;
}

int lt_optims_made(const lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, 0);
    return (int)ctx->slots.autograd->optims;
}

/* Adds o to the list of optimizers whose last step is pending. */
static void start_waiting(lt_optim *o)
{
    lt_deferred_check *check = &o->ctx->slots.autograd->deferred;
    o->last.next = check->steps;
    check->steps = &o->last;
}

static void stop_waiting(lt_optim *o)
{
    if (o->last.status != LT_PENDING)
        return;
    lt_pending_step **link = &o->ctx->slots.autograd->deferred.steps;
    while (*link != &o->last)
        link = &(*link)->next;
    *link = o->last.next;
}

void lt_optim_free(lt_optim *o)
{
    if (!o)
        return;
    lt_ctx *ctx = o->ctx;
    stop_waiting(o);
    for (int i = 0; i < o->n_items; i++) {
        o->items[i].x->leaf->optims--;
        lt_release(o->items[i].x);
    }
    for (int a = 0; a < o->n_arenas; a++) {
        lt__segment_release(o->arenas[a].segment);
        for (int k = 0; k < o->n_slots; k++)
            lt__storage_release(o->arenas[a].slot[k]);
    }
    lt_release(o->squares);
    lt__free(ctx, o->numbers, (size_t)o->capacity * sizeof *o->numbers);
    lt__free(ctx, o->items, (size_t)o->capacity * sizeof *o->items);
    lt__free(ctx, o->arenas, (size_t)o->capacity * sizeof *o->arenas);
    lt__free(ctx, o, sizeof *o);
    lt__ctx_release(ctx);
}

lt_status lt_optim_set_group(lt_optim *o, lt_tensor *param, int group)
{
    if (param->meta)
        return LT_OK;
    lt_optim_item *it = lt__optim_item(o, param);
    if (!it)
        return LT_EINVAL;
    if (group < 0)
        return lt_fail(LT_EINVAL, "the group must be at least 0, but is %d", group);
    it->group = group;
    return LT_OK;
}

lt_tensor *lt_optim_slot(lt_optim *o, int k, lt_tensor *param)
{
    if (param->meta && k >= 0 && k < o->n_slots)
        return lt__tensor_remote(param, (lt_dtype)param->dtype, param->ndim, param->dims, false);
    lt_optim_item *it = lt__optim_item(o, param);
    if (!it || k < 0 || k >= o->n_slots)
        return NULL;
    lt_tensor *slot = lt__tensor_over(o->arenas[it->arena].slot[k], (lt_dtype)param->dtype,
                                      param->ndim, param->dims, param->leaf->offset, false);
    return lt__tensor_inherit(slot, param);
}

const char *lt_optim_slot_name(const lt_optim *o, int k)
{
    return k >= 0 && k < o->n_slots ? o->def->schema.in[k + 2].name : NULL;
}

const lt_def *lt_optim_def(const lt_optim *o) { return o->def; }

static lt_segment *segment_of(const lt_optim *o, const lt_optim_range *r)
{
    return o->arenas[r->arena].segment;
}

/* The elements of a range in storage, one of the arenas of its segment. New. */
static lt_tensor *tensor_over(const lt_optim *o, const lt_optim_range *r, lt_storage *storage)
{
    return lt__tensor_over(storage, segment_of(o, r)->dtype, 1, &r->count, r->offset, true);
}

/* LT_EINVAL if some gradients were scaled by a loss scale that is no longer in use: only that one
 * knows whether they may be applied. */
static lt_status check_scaling(const lt_optim *o, const char *who)
{
    const lt_step_part *scale = lt__step_scale(o->ctx->slots.autograd);
    for (int i = 0; i < o->n_items; i++) {
        const lt_leaf *leaf = o->items[i].x->leaf;
        if (lt_optim_has_grad(o, i) && leaf->scaled_by && leaf->scaled_by != scale->ud)
            return lt_fail(
                LT_EINVAL,
                "%s cannot use gradients of a loss scale that is no longer in use; close the scale "
                "after the step, or discard the gradients with zero_grad",
                who);
    }
    return LT_OK;
}

/* On an accelerator the step check decides in the stream. Sends it to the host if the scale waits
 * for it, and updates the status of the step. */
static lt_status send_step_check(struct lt_autograd *ag, lt_ctx *ctx)
{
    lt_deferred_check *check = &ag->deferred;
    if (ag->step_status == LT_PENDING && !check->resolve) {
        check->resolve = lt__step_scale(ag)->resolve;
        check->resolve_ud = lt__step_scale(ag)->ud;
        return lt__deferred_check_send(ctx);
    }
    if (ag->step_status == LT_APPLIED && check->sent)
        ag->step_status = LT_PENDING;
    else if (ag->step_status == LT_APPLIED &&
             (check->reported || lt__deferred_check_is_unreported(check)))
        ag->step_status = LT_SKIPPED;
    return LT_OK;
}

static lt_status try_to_complete_grads(lt_optim *o, const char *who)
{
    lt_ctx *ctx = o->ctx;
    struct lt_autograd *ag = ctx->slots.autograd;
    LT_TRY(lt__check_open(ctx, who));
    if (ag->in_backward)
        return lt_fail(LT_EINVAL, "%s cannot run within backward: some gradients are not ready yet",
                       who);
    if (ag->dry_run.on)
        return lt_fail(LT_EINVAL, "%s cannot run in a dry run, which leaves no gradients", who);
    LT_TRY(lt__step_prepare(ag));
    if (ag->is_accumulating)
        return LT_OK;
    LT_TRY(lt__weights_check_none(ag, who, "cannot run"));
    LT_TRY(check_scaling(o, who));
    if (ag->grads_complete)
        return LT_OK;
    LT_TRY(lt__step_decide(ag, ctx));
    LT_TRY(send_step_check(ag, ctx));
    ag->grads_complete = true;
    return LT_OK;
}

/* Completes the gradients of the last backward before they are read, and decides on the step. On
 * LT_ENUMERIC the batch must not reach the running statistics. */
static lt_status complete_grads(lt_optim *o, const char *who)
{
    lt_status status = try_to_complete_grads(o, who);
    if (status == LT_ENUMERIC)
        lt_bn_stats_clear(o->ctx);
    return status;
}

static lt_status know_outcome(lt_ctx *ctx)
{
    return ctx->slots.autograd->step_status == LT_PENDING ? lt_synchronize(ctx) : LT_OK;
}

lt_status lt_optim_complete_grads(lt_optim *o, lt_step_status *step_status)
{
    LT_TRY(complete_grads(o, "a gradient comparison"));
    LT_TRY(know_outcome(o->ctx));
    *step_status = o->ctx->slots.autograd->step_status;
    return LT_OK;
}

/* Whether a step changes anything on the CPU, where kernels do not see an accelerator's skip. */
static bool is_on_cpu(const lt_optim *o)
{
    bool is = false;
    for (int a = 0; a < o->n_arenas; a++)
        is |= o->arenas[a].segment->values->device->is_host;
    for (const lt_bn_entry *s = o->ctx->slots.autograd->bn_stats; s; s = s->next)
        is |= s->running_mean->storage->device->is_host;
    return is;
}

static bool may_apply(const lt_ctx *ctx)
{
    lt_step_status step_status = ctx->slots.autograd->step_status;
    return step_status == LT_APPLIED || step_status == LT_PENDING;
}

/* Adds a step of an optimizer, or a computation of its norm, to the digest. Ranks may have
 * different numbers of micro-batches. */
static void note(struct lt_autograd *ag, const lt_optim *o, bool is_step)
{
    uint32_t event = 2 * o->number + is_step;
    if (ag->step_status != LT_ACCUMULATING)
        ag->digest = lt__fnv32(ag->digest, &event, sizeof event);
}

uint32_t lt_steps_digest(const lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, 0);
    const struct lt_autograd *ag = ctx->slots.autograd;
    return ag ? ag->digest : 0;
}

/* ==== The norm ================================================================================ */

static lt_device *device_of(const lt_optim *o)
{
    return o->n_arenas > 0 ? o->arenas[0].segment->values->device : o->ctx->device;
}

/* The sum of squares of the gradients that the next step would use, f64; 0 if none. New. */
static lt_tensor *add_squares(lt_optim *o)
{
    lt_tensor *total = lt__tensor_new(o->ctx, device_of(o), LT_F64, 0, NULL, true);
    lt_status status = total ? lt_fill(total, 0) : lt_errcode();
    if (status == LT_OK && may_apply(o->ctx))
        status = lt__optim_add_squares(o, total);
    return lt__tensor_if(status, total);
}

/* *norm = the root of squares. LT_ENUMERIC if it is not finite. */
static lt_status read_norm(lt_ctx *ctx, lt_tensor *squares, double *norm)
{
    LT_TRY(lt_item(squares, 0, norm));
    *norm = sqrt(*norm);
    if (isfinite(*norm))
        return LT_OK;
    lt_bn_stats_clear(ctx);
    return lt__fail_norm(ctx->step + 1, *norm);
}

lt_status lt_optim_grad_norm(lt_optim *o, double *norm)
{
    LT_TRY(complete_grads(o, "a gradient norm"));
    LT_TRY(know_outcome(o->ctx));
    note(o->ctx->slots.autograd, o, false);
    lt_tensor *squares = add_squares(o);
    if (!squares)
        return lt_errcode();
    lt_status status = read_norm(o->ctx, squares, norm);
    lt_release(squares);
    return status;
}

/* *factor = min(1, max_norm / norm), on the CPU. */
static lt_status clip_here(lt_ctx *ctx, double max_norm, lt_tensor *squares, double *factor)
{
    double norm;
    LT_TRY(read_norm(ctx, squares, &norm));
    *factor = norm > max_norm ? max_norm / norm : 1;
    return LT_OK;
}

/* Lets the accelerator compute the factor in its stream, if the step may be applied. */
static lt_status clip_there(lt_ctx *ctx, double max_norm, lt_tensor *squares)
{
    struct lt_autograd *ag = ctx->slots.autograd;
    if (!may_apply(ctx))
        return LT_OK;
    LT_TRY(ag->deferred.clip(squares, max_norm, ag->deferred.on_device));
    ag->deferred.norm_step = ctx->step + 1;
    ag->step_status = LT_PENDING;
    return lt__deferred_check_send(ctx);
}

/* Computes the factor that clips the gradients. *factor points to it: to *own on the CPU, to the
 * step check on an accelerator. *squares: the norm squared; new. */
static lt_status clip(lt_optim *o, double max_norm, double *own, const double **factor,
                      lt_tensor **squares)
{
    struct lt_autograd *ag = o->ctx->slots.autograd;
    bool is_here = device_of(o)->is_host;
    LT_TRY(is_here ? know_outcome(o->ctx) : lt__deferred_check_open(o->ctx));
    note(ag, o, false);
    ag->skip = is_here ? NULL : &ag->deferred.on_device->skip;
    lt_tensor *total = add_squares(o);
    ag->skip = NULL;
    if (!total)
        return lt_errcode();
    *factor = is_here ? own : &ag->deferred.on_device->factor;
    lt_status status = is_here ? clip_here(o->ctx, max_norm, total, own)
                               : clip_there(o->ctx, max_norm, total);
    if (status == LT_OK)
        *squares = total;
    else
        lt_release(total);
    return status;
}

/* ==== A step ================================================================================== */

/* Runs the update op over a range and its slots. */
static lt_status update_range(lt_optim *o, const lt_optim_range *r, const lt_opt *opts,
                              const double *factor)
{
    lt_tensor *in[LT_MAX_IN] = {NULL};
    lt_opt own[LT_MAX_OPT];
    int n = o->n_slots + 2;
    memcpy(own, opts, (size_t)o->def->schema.n_opt * sizeof *own);
    if (o->step >= 0)
        own[o->step] = (lt_opt){.kind = LT_KIND_INTS, .n = 1, .i = {r->steps + 1}};
    lt_call call = lt__call_of(o->ctx, o->def, in, n, own);
    call.device = segment_of(o, r)->values->device;
    call.factor = factor;
    lt_status status = LT_OK;
    for (int i = 0; i < n && status == LT_OK; i++) {
        in[i] = tensor_over(o, r,
                            i == 0   ? segment_of(o, r)->values
                            : i == 1 ? segment_of(o, r)->grads
                                     : o->arenas[r->arena].slot[i - 2]);
        status = in[i] ? LT_OK : LT_ENOMEM;
    }
    if (status == LT_OK && (status = o->def->op->shape(&call)) == LT_OK)
        status = lt__run_kernel(&call, o->def, false);
    if (status != LT_OK)
        lt_fail_prefix("%s", o->def->schema.name);
    for (int i = 0; i < n; i++)
        lt_release(in[i]);
    return status;
}

/* Counts a step for a range. If it is pending, lt__optim_count_pending() counts it later. */
static void count_step(lt_optim *o, const lt_optim_range *r)
{
    if (o->ctx->slots.autograd->step_status != LT_PENDING)
        lt_optim_count_step(o, r);
    else
        for (int i = r->first; i < r->end; i++)
            o->items[i].is_pending = true;
}

static lt_status update_all(lt_optim *o, const lt_opt *const *options, const double *factor)
{
    lt_optim_range r = {0};
    while (lt_optim_next_range(o, options, NULL, o->def->op->whole_params, &r)) {
        LT_TRY(update_range(o, &r, options[r.group], factor));
        lt_optim_updated(o, &r);
        count_step(o, &r);
    }
    return LT_OK;
}

/* LT_EINVAL for a step without a new backward. A step without gradients is fine after a backward:
 * it may have been for another part of the net, or the gradients were discarded on purpose. */
static lt_status check_backward(const lt_optim *o)
{
    const struct lt_autograd *ag = o->ctx->slots.autograd;
    bool wanted = false;
    if (ag->backwards != o->backwards || ag->in_backward || ag->dry_run.on || ag->weights)
        return LT_OK;
    for (int i = 0; i < o->n_items; i++) {
        if (lt_optim_has_grad(o, i))
            return LT_OK;
        wanted |= o->items[i].x->leaf->requires_grad;
    }
    return wanted
               ? lt_fail(
                     LT_EINVAL,
                     "an optimizer step has no gradients: no backward has run since the last step; "
                     "call backward on the loss first")
               : LT_OK;
}

/* The factor of clip() as a number, once the outcome of the step is known. The factor
 * of an accelerator has arrived on the host with the outcome. */
static double number_of(const lt_optim *o, const double *factor)
{
    if (!factor || !may_apply(o->ctx))
        return 1;
    return device_of(o)->is_host ? *factor : o->ctx->slots.autograd->deferred.on_host->factor;
}

/* Passes the step to a part, which applies it here or elsewhere. */
static lt_status pass_on(lt_optim *o, const lt_step_part *part, const lt_opt *const *options,
                         const double *factor)
{
    LT_TRY(know_outcome(o->ctx));
    lt_status status = part->apply(part->ud, o, options, o->ctx->slots.autograd->step_status,
                                   number_of(o, factor));
    lt_bn_stats_clear(o->ctx);
    return status;
}

/* Updates weights and running statistics, unless the step is skipped. */
static lt_status apply_or_not(lt_optim *o, const lt_opt *const *options, const double *factor)
{
    struct lt_autograd *ag = o->ctx->slots.autograd;
    ag->skip = ag->deferred.on_device ? &ag->deferred.on_device->skip : NULL;
    lt_status status = may_apply(o->ctx) ? update_all(o, options, factor) : LT_OK;
    if (status == LT_OK && ag->step_status == LT_SKIPPED)
        lt_bn_stats_clear(o->ctx);
    if (status == LT_OK && ag->step_status != LT_ACCUMULATING)
        status = lt__bn_stats_commit(o->ctx);
    ag->skip = NULL;
    return status;
}

/* A step, without the cleanup that follows it. */
static lt_status run_step(lt_optim *o, const lt_opt *const *options, double max_norm,
                          lt_tensor **squares)
{
    double own;
    const double *factor = NULL;
    if (max_norm > 0)
        LT_TRY(clip(o, max_norm, &own, &factor, squares));
    const lt_step_part *applier = lt__step_applier(o->ctx->slots.autograd);
    if (applier)
        return pass_on(o, applier, options, factor);
    if (is_on_cpu(o))
        LT_TRY(know_outcome(o->ctx));
    return apply_or_not(o, options, factor);
}

/* Runs a step and records it. */
static lt_status take_step(lt_optim *o, const lt_opt *const *options, int n_groups, double max_norm,
                           lt_tensor **squares)
{
    struct lt_autograd *ag = o->ctx->slots.autograd;
    LT_TRY(run_step(o, options, max_norm, squares));
    note(ag, o, true);
    return ag->step_status == LT_ACCUMULATING
               ? LT_OK
               : lt__record_settings(ag, o->number, o->def, options, n_groups, max_norm);
}

lt_status lt_optim_step_clipped(lt_optim *o, const lt_opt *const *options, int n_groups,
                                double max_norm, lt_tensor **squares, lt_step_status *step_status)
{
    struct lt_autograd *ag = o->ctx->slots.autograd;
    lt_tensor *total = NULL;
    if (!(max_norm >= 0))
        return lt_fail(LT_EINVAL,
                       "an optimizer step: the norm to clip to must be at least 0, but is %g",
                       max_norm);
    if (o->ctx->inf.step > 0 && !o->ctx->inf.armed)
        return lt_fail(LT_EUSAGE, "the fault names %s, which is not a parameter of an optimizer",
                       o->ctx->inf.param);
    LT_TRY(check_backward(o));
    LT_TRY(lt__check_settings(o, options, n_groups));
    lt__optim_count_pending(o);
    LT_TRY(complete_grads(o, "an optimizer step"));
    lt_status status = take_step(o, options, n_groups, max_norm, &total);
    if (status == LT_OK && total && squares)
        *squares = lt_retain(total);
    lt_release(total);
    LT_TRY(status);
    ag->grads_complete = false;
    ag->period += !ag->is_accumulating;
    o->backwards = ag->backwards;
    if (ag->step_status != LT_ACCUMULATING)
        lt__optim_use_grads(o);
    for (int i = 0; i < o->n_items && ag->step_status != LT_ACCUMULATING; i++)
        lt_zero_grad(o->items[i].x);
    o->ctx->step += ag->step_status != LT_ACCUMULATING;
    lt_tape_set_first_row(ag->tape, 0);
    stop_waiting(o);
    o->last.status = ag->step_status;
    if (o->last.status == LT_PENDING)
        start_waiting(o);
    if (step_status)
        *step_status = ag->step_status;
    return LT_OK;
}

lt_status lt_optim_step(lt_optim *o, const lt_opt *const *options, int n_groups,
                        lt_step_status *step_status)
{
    return lt_optim_step_clipped(o, options, n_groups, 0, NULL, step_status);
}
