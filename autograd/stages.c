/* stages.c - an op runs on the stage of a pipeline that has its parameters; see stages.h. */
#include "autograd/tape.h"

lt_status lt_set_stage_hooks(lt_ctx *ctx, const lt_stage_hooks *stages)
{
    struct lt_autograd *ag = lt__autograd(ctx);
    if (!ag)
        return LT_ENOMEM;
    if (ag->in_backward || ag->dry_run.on)
        return lt_fail(LT_EINVAL, "the stages of a pipeline cannot change %s",
                       ag->in_backward ? "within backward" : "in a dry run");
    ag->has_stages = stages != NULL;
    ag->stages = stages ? *stages : (lt_stage_hooks){0};
    return LT_OK;
}

bool lt_has_stages(const lt_ctx *ctx)
{
    const struct lt_autograd *ag = ctx->slots.autograd;
    return ag && ag->has_stages;
}

/* ==== Tensors of other stages ================================================================= */

static lt_tensor *new_remote(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims, int stage,
                             bool kept)
{
    lt_tensor *x = lt__tensor_meta(ctx, dtype, ndim, dims, kept);
    return x && stage != LT_NO_STAGE ? lt__tensor_if(lt_set_stage(x, stage), x) : x;
}

lt_tensor *lt__tensor_remote(const lt_tensor *x, lt_dtype dtype, int ndim, const int64_t *dims,
                             bool kept)
{
    return new_remote(x->ctx, dtype, ndim, dims, lt_stage_of(x), kept);
}

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
    LT_TRY(lt_set_stage(x, stage));
    if (stage == ag->stages.own)
        return LT_OK;
    x->pending = false;
    x->meta = true;
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
    if (!ag || !ag->has_stages || !x->home || x->dead)
        return lt_retain(x);
    if (!x->meta)
        return send_to_all(ag, x) == LT_OK ? lt_retain(x) : NULL;
    lt_tensor *y = lt__tensor_meta(x->ctx, (lt_dtype)x->dtype, x->ndim, x->dims, true);
    if (y && lt__tensor_arrive(y) == LT_OK &&
        ag->stages.receive(ag->stages.ud, y, x->home->stage, -1) == LT_OK)
        return y;
    lt_release(y);
    return NULL;
}

/* ==== Ops ===================================================================================== */

static bool is_placed(const lt_tensor *x)
{
    return x->leaf && (x->leaf->role == LT_PARAM || x->leaf->role == LT_BUFFER);
}

/* The highest of a set of stages that is not empty. */
static int highest(uint64_t stages) { return 63 - __builtin_clzll(stages); }

/* The last stage that has the values of x. */
static int latest_of(const lt_tensor *x)
{
    return x->home && x->home->sent_to ? highest(x->home->sent_to) : lt_stage_of(x);
}

/* The stage of an op. LT_EUSAGE if its parameters are on an earlier one. */
static lt_status find_stage(lt_tensor *const *in, int n_in, int *stage)
{
    bool has_params = false;
    for (int i = 0; i < n_in; i++)
        has_params |= in[i] && is_placed(in[i]);
    *stage = LT_NO_STAGE;
    for (int i = 0; i < n_in; i++) {
        int at = !in[i] ? LT_NO_STAGE : has_params ? lt_stage_of(in[i]) : latest_of(in[i]);
        *stage = at > *stage ? at : *stage;
    }
    for (int i = 0; i < n_in; i++)
        if (in[i] && is_placed(in[i]) && lt_stage_of(in[i]) != *stage)
            return lt_fail(
                LT_EUSAGE,
                "a parameter belongs to stage %d of the pipeline, but another input "
                "belongs to stage %d; parameters must be used in the order of the stages",
                lt_stage_of(in[i]), *stage);
    return LT_OK;
}

/* Whether an op on `stage` is the first one there that uses x, a value of another stage. */
static bool is_first_use(const lt_tensor *x, int stage)
{
    const struct lt_home *home = x ? x->home : NULL;
    return home && home->stage != stage && !(home->sent_to >> stage & 1);
}

bool lt_moves_values(lt_ctx *ctx, lt_tensor *const *in, int n)
{
    int stage;
    if (!lt_has_stages(ctx) || find_stage(in, n, &stage) != LT_OK || stage == LT_NO_STAGE)
        return false;
    for (int i = 0; i < n; i++)
        if (is_first_use(in[i], stage))
            return true;
    return false;
}

/* The stage to which `stage` returns the gradient of x: the last stage before it that uses x, or
 * else the stage of x. If a later stage has used x before, it is the stage of x, because that
 * later stage does not wait for another gradient. */
static int returns_to(const struct lt_home *home, int stage)
{
    uint64_t later = home->sent_to >> stage;
    return home->sent_to == 0 || later != 0 ? home->stage : highest(home->sent_to);
}

/* Receives the values of x from another stage. If x requires a gradient, it becomes a leaf. */
static lt_status receive(struct lt_autograd *ag, lt_tensor *x, int to)
{
    bool requires_grad = x->home->requires_grad;
    LT_TRY(lt__tensor_arrive(x));
    LT_TRY(ag->stages.receive(ag->stages.ud, x, x->home->stage, requires_grad ? to : -1));
    if (!requires_grad)
        return LT_OK;
    lt_leaf *leaf = lt__leaf_of(x);
    if (!leaf)
        return LT_ENOMEM;
    leaf->requires_grad = true;
    leaf->role = LT_RECEIVED;
    return LT_OK;
}

/* Does this rank's part in moving a value to the stage that is about to use it. */
static lt_status move(struct lt_autograd *ag, lt_tensor *x, int stage)
{
    int own = ag->stages.own, to = returns_to(x->home, stage), from = x->home->stage;
    bool requires_grad = lt_requires_grad(x);
    x->home->sent_to |= 1ull << stage;
    if (own == from)
        return ag->stages.send(ag->stages.ud, x, stage, requires_grad, requires_grad && to == from);
    if (own == stage)
        return x->meta ? receive(ag, x, to) : LT_OK;
    return own == to && requires_grad ? ag->stages.expect(ag->stages.ud, x, stage) : LT_OK;
}

static lt_status move_inputs(struct lt_autograd *ag, lt_tensor *const *in, int n_in, int stage)
{
    for (int i = 0; i < n_in; i++)
        if (is_first_use(in[i], stage))
            LT_TRY(move(ag, in[i], stage));
    return LT_OK;
}

/* Makes the results of an op that runs on another stage, with its shape rule only. */
static lt_status make_remote(struct lt_autograd *ag, lt_ctx *ctx, const lt_def *def, lt_tensor **in,
                             int n_in, const lt_opt *opts, int stage, lt_tensor **out)
{
    const lt_op *op = def->op;
    lt_spec spec[LT_MAX_OUT];
    lt_call call = lt__call_of(ctx, def, in, n_in, opts);
    call.device = ctx->device;
    call.spec = spec;
    LT_TRY(op->shape(&call));
    int n = lt_op_outputs(op);
    bool off = ag->no_grad_depth > 0;
    bool requires_grad = n > 0 && lt__is_recorded(ag, op, in, n_in, spec[0].dtype);
    for (int i = 0; i < n; i++) {
        out[i] = new_remote(ctx, spec[i].dtype, spec[i].ndim, spec[i].dims, stage, false);
        if (!out[i]) {
            while (i-- > 0)
                lt_release(out[i]);
            return LT_ENOMEM;
        }
        out[i]->home->requires_grad = requires_grad;
    }
    if (call.draws)
        ag->tape->draws[off]++;
    return LT_OK;
}

lt_status lt__stages_apply(struct lt_autograd *ag, lt_ctx *ctx, const lt_def *def, lt_tensor **in,
                           int n_in, const lt_opt *opts, lt_tensor **out, int *stage)
{
    LT_TRY(find_stage(in, n_in, stage));
    if (*stage == LT_NO_STAGE)
        return LT_OK;
    if (*stage == ag->stages.own)
        return move_inputs(ag, in, n_in, *stage);
    LT_TRY(make_remote(ag, ctx, def, in, n_in, opts, *stage, out));
    lt_status status = move_inputs(ag, in, n_in, *stage);
    for (int i = 0; status != LT_OK && i < lt_op_outputs(def->op); i++)
        lt_release(out[i]);
    return status;
}
