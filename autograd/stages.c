/* stages.c - an op runs on the stage of a pipeline that has its parameters; see stages.h. */
#include "autograd/tape.h"

lt_status lt_set_stages(lt_ctx *ctx, const lt_stages *stages)
{
    struct lt_autograd *ag = lt__autograd(ctx);
    if (!ag)
        return LT_ENOMEM;
    if (ag->in_backward || ag->dry_run.on)
        return lt_fail(LT_EINVAL, "the stages of a pipeline cannot change %s",
                       ag->in_backward ? "within backward" : "in a dry run");
    ag->has_stages = stages != NULL;
    ag->stages = stages ? *stages : (lt_stages){0};
    return LT_OK;
}

bool lt_has_stages(const lt_ctx *ctx)
{
    const struct lt_autograd *ag = ctx->slots.autograd;
    return ag && ag->has_stages;
}

bool lt_is_remote(const lt_tensor *x) { return x->remote; }

lt_tensor *lt__tensor_with_history(lt_tensor *x)
{
    lt_tensor *y = lt__tensor_view(x, x->ndim, x->dims, 0, true);
    if (!y || !x->node)
        return y;
    y->node = x->node;
    y->out_index = x->out_index;
    atomic_fetch_add_explicit(&x->node->refs, 1, memory_order_relaxed);
    return y;
}

/* ==== Placing ================================================================================= */

lt_status lt__stages_assign(struct lt_autograd *ag, const char *name, lt_tensor *x)
{
    int stage = ag->stages.stage_of(ag->stages.ud, name, x);
    if (stage < 0 || stage >= ag->stages.stages)
        return lt_fail(LT_EINVAL, "stage_of() returned stage %d for %s, but the pipeline has %d",
                       stage, name, ag->stages.stages);
    x->stage = (uint8_t)(stage + 1);
    if (stage == ag->stages.own)
        return LT_OK;
    x->pending = false;
    x->remote = true;
    return LT_OK;
}

/* ==== Values for all ranks ==================================================================== */

static lt_status send_to_all(struct lt_autograd *ag, lt_tensor *x)
{
    for (int to = 0; to < ag->stages.stages; to++)
        if (to != ag->stages.own)
            LT_TRY(ag->stages.send(ag->stages.ud, x, to, false, false));
    return LT_OK;
}

lt_tensor *lt_fetch(lt_tensor *x)
{
    struct lt_autograd *ag = x->ctx->slots.autograd;
    if (!ag || !ag->has_stages || x->stage == 0 || x->dead)
        return lt_retain(x);
    if (!x->remote)
        return send_to_all(ag, x) == LT_OK ? lt_retain(x) : NULL;
    lt_tensor *y = lt__tensor_remote(x->ctx, (lt_dtype)x->dtype, x->ndim, x->dims, 0, false, true);
    if (y && lt__tensor_arrive(y) == LT_OK &&
        ag->stages.receive(ag->stages.ud, y, x->stage - 1, -1) == LT_OK)
        return y;
    lt_release(y);
    return NULL;
}

/* ==== Ops ===================================================================================== */

static bool is_placed(const lt_tensor *x)
{
    return x->leaf && (x->leaf->role == LT_PARAM || x->leaf->role == LT_BUFFER);
}

/* The last stage that has the values of x, as in lt_tensor. */
static uint8_t latest_of(const lt_tensor *x)
{
    return x->sent_to ? (uint8_t)(64 - __builtin_clzll(x->sent_to)) : x->stage;
}

/* The stage of an op, as in lt_tensor. LT_EUSAGE if its parameters are on an earlier one. */
static lt_status find_stage(lt_tensor *const *in, int n_in, uint8_t *stage)
{
    bool has_params = false;
    for (int i = 0; i < n_in; i++)
        has_params |= in[i] && is_placed(in[i]);
    *stage = 0;
    for (int i = 0; i < n_in; i++) {
        uint8_t at = !in[i] ? 0 : has_params ? in[i]->stage : latest_of(in[i]);
        *stage = at > *stage ? at : *stage;
    }
    for (int i = 0; i < n_in; i++)
        if (in[i] && is_placed(in[i]) && in[i]->stage != *stage)
            return lt_fail(
                LT_EUSAGE,
                "a parameter belongs to stage %d of the pipeline, but another input "
                "belongs to stage %d; parameters must be used in the order of the stages",
                in[i]->stage - 1, *stage - 1);
    return LT_OK;
}

/* Whether an op on `stage`, as in lt_tensor, is the first one there that uses x, a value of another
 * stage. */
static bool is_first_use(const lt_tensor *x, uint8_t stage)
{
    return x && x->stage != 0 && x->stage != stage && !(x->sent_to >> (stage - 1) & 1);
}

/* The stage, from 0, to which `stage` returns the gradient of x: the last stage before it that uses
 * x, or else the stage of x. Also the stage of x if a later stage has used x before, because that
 * stage does not wait for another gradient. */
static int returns_to(const lt_tensor *x, uint8_t stage)
{
    uint64_t later = x->sent_to >> (stage - 1);
    return x->sent_to == 0 || later != 0 ? x->stage - 1 : 63 - __builtin_clzll(x->sent_to);
}

/* Receives the values of x from another stage. If x requires a gradient, it becomes a leaf. */
static lt_status receive(struct lt_autograd *ag, lt_tensor *x, int to)
{
    LT_TRY(lt__tensor_arrive(x));
    LT_TRY(ag->stages.receive(ag->stages.ud, x, x->stage - 1, x->tracked ? to : -1));
    if (!x->tracked)
        return LT_OK;
    lt_leaf *leaf = lt__leaf_of(x);
    if (!leaf)
        return LT_ENOMEM;
    leaf->collects = true;
    leaf->role = LT_RECEIVED;
    return LT_OK;
}

/* Moves a value to the stage that is about to use it, as far as this rank takes part. */
static lt_status move(struct lt_autograd *ag, lt_tensor *x, uint8_t stage)
{
    int own = ag->stages.own, to = returns_to(x, stage), home = x->stage - 1;
    bool tracked = lt_requires_grad(x);
    x->sent_to |= 1ull << (stage - 1);
    if (own == home)
        return ag->stages.send(ag->stages.ud, x, stage - 1, tracked, tracked && to == home);
    if (own == stage - 1)
        return x->remote ? receive(ag, x, to) : LT_OK;
    return own == to && tracked ? ag->stages.expect(ag->stages.ud, x, stage - 1) : LT_OK;
}

static lt_status move_inputs(struct lt_autograd *ag, lt_tensor *const *in, int n_in, uint8_t stage)
{
    for (int i = 0; i < n_in; i++)
        if (is_first_use(in[i], stage))
            LT_TRY(move(ag, in[i], stage));
    return LT_OK;
}

/* Makes the results of an op that runs on another stage: runs its shape rule only. */
static lt_status make_remote(struct lt_autograd *ag, lt_ctx *ctx, const lt_def *def, lt_tensor **in,
                             int n_in, const lt_opt *opts, uint8_t stage, lt_tensor **out)
{
    const lt_op *op = def->op;
    lt_spec spec[LT_MAX_OUT];
    lt_call call = {.ctx = ctx,
                    .device = ctx->device,
                    .op = op,
                    .schema = &def->schema,
                    .opt = opts,
                    .n_in = n_in,
                    .in = in,
                    .save = op->save,
                    .same_grad = op->same_grad,
                    .spec = spec};
    LT_TRY(op->shape(&call));
    int n = lt_op_outputs(op);
    bool off = ag->no_grad_depth > 0;
    bool tracked = n > 0 && lt__is_recorded(ag, op, in, n_in, spec[0].dtype);
    for (int i = 0; i < n; i++) {
        out[i] = lt__tensor_remote(ctx, spec[i].dtype, spec[i].ndim, spec[i].dims, stage, tracked,
                                   false);
        if (!out[i]) {
            while (i-- > 0)
                lt_release(out[i]);
            return LT_ENOMEM;
        }
    }
    if (call.draws)
        ag->tape->draws[off]++;
    return LT_OK;
}

lt_status lt__stages_apply(struct lt_autograd *ag, lt_ctx *ctx, const lt_def *def, lt_tensor **in,
                           int n_in, const lt_opt *opts, lt_tensor **out, uint8_t *stage)
{
    LT_TRY(find_stage(in, n_in, stage));
    if (*stage == 0)
        return LT_OK;
    if (*stage == ag->stages.own + 1)
        return move_inputs(ag, in, n_in, *stage);
    LT_TRY(make_remote(ag, ctx, def, in, n_in, opts, *stage, out));
    lt_status status = move_inputs(ag, in, n_in, *stage);
    for (int i = 0; status != LT_OK && i < lt_op_outputs(def->op); i++)
        lt_release(out[i]);
    return status;
}
