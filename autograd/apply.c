/* apply.c - runs an op: checks the arguments, applies the shape rule, makes the outputs, runs the
 * kernel, records a node. Optimizers call lt__run_kernel() themselves, on ranges of arenas.
 *
 * CPU kernels compute in f32 and f64. An f16 or bf16 tensor reaches a kernel as an f32 copy, and
 * results are rounded once on the way back, as on Tensor Cores. Ops that only move bytes, or that
 * convert block by block, take halves directly (any_dtype). So do some fast kernels, for bf16 only
 * (fast_bf16), and the kernels of an accelerator. A call whose tensors are on an accelerator never
 * runs a CPU kernel.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "autograd/tape.h"

/* ==== Kernels ================================================================================= */

/* Runs a kernel; twice if it needs sums over all ranks. */
static lt_status call_kernel(lt_call *c, lt_kernel kernel, bool backward)
{
    const struct lt_autograd *ag = c->ctx->slots.autograd;
    LT_TRY(kernel(c));
    if (!c->sums)
        return LT_OK;
    LT_TRY(ag->allreduce(ag->allreduce_ud, c->sums, c->n_sums, backward));
    c->summed = true;
    return kernel(c);
}

static lt_status pick_kernel(lt_call *c, const lt_op *op, bool backward)
{
    lt_kernel fast = backward ? op->fast_bwd : op->fast_fwd;
    lt_kernel plain = backward ? op->bwd : op->fwd;
    if (fast && (!plain || !c->ctx->config.reference)) {
        lt_status status = call_kernel(c, fast, backward);
        if (status != LT_EUNSUPPORTED || !plain)
            return status;
    }
    return plain ? call_kernel(c, plain, backward)
                 : lt_fail(LT_EUNSUPPORTED, "no kernel supports this call");
}

/* Allocates the op's scratch memory and runs `kernel`, or pick_kernel() if it is NULL. */
static lt_status run_with_scratch(lt_call *c, const lt_op *op, bool backward, lt_kernel kernel)
{
    size_t bytes = op->scratch ? op->scratch(c, backward) : 0;
    if (bytes > 0 && !(c->scratch = lt__alloc(c->ctx, bytes)))
        return LT_ENOMEM;
    c->scratch_bytes = bytes;
    lt_status status = kernel ? call_kernel(c, kernel, backward) : pick_kernel(c, op, backward);
    lt__free(c->ctx, c->scratch, bytes);
    c->scratch = NULL;
    return status;
}

/* One of the tensor arrays of a call, with halves replaced by f32 copies. */
typedef struct {
    lt_tensor **at; /* the array in the call */
    int n;
    uint64_t read;  /* bit i: the kernel reads tensor i */
    uint64_t write; /* bit i: the kernel writes tensor i, which is rounded afterwards */
    lt_tensor *half[LT_MAX_LIST]; /* the replaced tensors, or NULL */
} lt_wide;

/* A tensor like x in f32: a copy for a kernel to read, or one for it to write. New. */
static lt_tensor *wide_of(lt_tensor *x, bool read)
{
    return read ? lt__tensor_copy(x, LT_F32) : lt__tensor_like(x, x->storage->device, LT_F32);
}

static lt_status widen(lt_wide *w)
{
    for (int i = 0; i < w->n; i++) {
        lt_tensor *x = w->at[i];
        w->half[i] = NULL;
        if (!x || !lt__is_half((lt_dtype)x->dtype))
            continue;
        lt_tensor *wide = wide_of(x, w->read >> i & 1);
        if (!wide)
            return lt_errcode();
        w->half[i] = x;
        w->at[i] = wide;
    }
    return LT_OK;
}

static lt_status narrow(lt_wide *w, lt_status status)
{
    for (int i = 0; i < w->n; i++) {
        if (!w->half[i])
            continue;
        if (status == LT_OK && (w->write >> i & 1))
            status = lt_copy(w->half[i], w->at[i]);
        lt_release(w->at[i]);
        w->at[i] = w->half[i];
        w->half[i] = NULL;
    }
    return status;
}

static bool has(lt_tensor **x, int n, lt_dtype dtype)
{
    for (int i = 0; i < n; i++)
        if (x[i] && x[i]->dtype == dtype)
            return true;
    return false;
}

static int all_outputs(const lt_op *op) { return lt_op_outputs(op) + op->n_aux; }

static lt_status run_widened(lt_call *c, const lt_op *op, bool backward)
{
    lt_wide set[4] = {
        {.at = c->in, .n = c->n_in, .read = ~0ull, .write = op->in_place},
        {.at = c->out,
         .n = all_outputs(op),
         .read = backward ? ~0ull : 0,
         .write = backward ? 0 : ~0ull},
        {.at = c->d_out, .n = backward ? lt_op_outputs(op) : 0, .read = ~0ull},
        {.at = c->d_in, .n = backward ? c->n_in : 0, .read = c->add, .write = ~0ull},
    };
    lt_status status = LT_OK;
    for (int i = 0; i < 4; i++) {
        memset(set[i].half, 0, sizeof set[i].half);
        if (status == LT_OK)
            status = widen(&set[i]);
    }
    if (status == LT_OK)
        status = run_with_scratch(c, op, backward, NULL);
    for (int i = 0; i < 4; i++)
        status = narrow(&set[i], status);
    return status;
}

/* Whether any tensor of the call has this dtype. */
static bool call_has(const lt_call *c, const lt_op *op, bool backward, lt_dtype dtype)
{
    return has(c->in, c->n_in, dtype) || has(c->out, all_outputs(op), dtype) ||
           (backward && (has(c->d_out, lt_op_outputs(op), dtype) || has(c->d_in, c->n_in, dtype)));
}

static lt_status run_with_sums(lt_call *c, const lt_op *op, bool backward)
{
    bool f16 = !op->any_dtype && call_has(c, op, backward, LT_F16);
    bool bf16 = !op->any_dtype && call_has(c, op, backward, LT_BF16);
    lt_kernel fast = backward ? op->fast_bwd : op->fast_fwd;
    if (bf16 && !f16 && op->fast_bf16 && fast && !c->ctx->config.reference) {
        lt_status status = run_with_scratch(c, op, backward, fast);
        if (status != LT_EUNSUPPORTED)
            return status;
    }
    return f16 || bf16 ? run_widened(c, op, backward) : run_with_scratch(c, op, backward, NULL);
}

/* ==== On an accelerator ======================================================================= */

const lt_kernels *lt__kernels_of(const struct lt_autograd *ag, const lt_def *def)
{
    return def->id < ag->n_kernels ? &ag->kernels[def->id] : NULL;
}

static lt_status run_on_device(lt_call *c, const lt_def *def, bool backward)
{
    const struct lt_autograd *ag = c->ctx->slots.autograd;
    const lt_kernels *own = lt__kernels_of(ag, def);
    lt_kernel kernel = !own ? NULL : backward ? own->bwd : own->fwd;
    lt_device *device = c->device;
    c->skip = def->op->in_place ? ag->skip : NULL;
    if (!kernel)
        return lt_fail(LT_EUNSUPPORTED,
                       "no %s kernel on %s; use the CPU, with copies by x:to('cpu')",
                       backward ? "backward" : "forward", device->name);
    if (ag->allreduce && def->op->sums && def->op->sums(c, backward) > 0)
        return lt_fail(LT_EUNSUPPORTED,
                       "sums over all ranks are not supported on %s yet; use the CPU, or omit sync",
                       device->name);
    size_t bytes = own->scratch ? own->scratch(c, backward) : 0;
    if (bytes == LT_SCRATCH_FAILED)
        return lt_errcode();
    if (bytes > 0 && !(c->scratch = lt__device_alloc(c->ctx, device, bytes)))
        return LT_ENOMEM;
    c->scratch_bytes = bytes;
    lt_status status = kernel(c);
    lt__device_free(c->ctx, device, c->scratch, bytes);
    c->scratch = NULL;
    return status;
}

/* ==== On either device ======================================================================== */

static lt_status run_on_cpu(lt_call *c, const lt_op *op, bool backward)
{
    const struct lt_autograd *ag = c->ctx->slots.autograd;
    if (ag->allreduce && op->sums && !ag->dry_run.on)
        c->n_sums = op->sums(c, backward);
    size_t bytes = (size_t)c->n_sums * sizeof *c->sums;
    if (bytes > 0 && !(c->sums = lt__alloc(c->ctx, bytes)))
        return LT_ENOMEM;
    lt_status status = run_with_sums(c, op, backward);
    lt__free(c->ctx, c->sums, bytes);
    c->sums = NULL;
    return status;
}

static lt_status run_kernel(lt_call *c, const lt_def *def, bool backward)
{
    return c->device->is_host ? run_on_cpu(c, def->op, backward) : run_on_device(c, def, backward);
}

bool lt__is_idle(const lt_op *op, lt_tensor *const *to, int n)
{
    bool idle = !op->sums; /* other ranks wait for the sums */
    for (int i = 0; i < n; i++)
        idle &= !to[i] || to[i]->count == 0;
    return idle;
}

lt_status lt__run_kernel(lt_call *c, const lt_def *def, bool backward)
{
    const struct lt_autograd *ag = c->ctx->slots.autograd;
    c->threads = c->ctx->threads;
    if (!ag->timer && !c->ctx->trace)
        return run_kernel(c, def, backward);
    LT_TRY(c->device->sync(c->device)); /* exclude the time of earlier kernels */
    double before = lt__seconds();
    lt_status status = run_kernel(c, def, backward);
    if (status == LT_OK)
        status = c->device->sync(c->device);
    double seconds = lt__seconds() - before;
    if (status == LT_OK && ag->timer)
        ag->timer(ag->timer_ud, c, backward, seconds);
    if (c->ctx->trace) {
        char name[64];
        snprintf(name, sizeof name, "%s%s", c->schema->name, backward ? " back" : "");
        lt_trace(c->ctx, LT_TRACK_COMPUTE, name, before, seconds);
    }
    return status;
}

/* ==== Again in f32 ============================================================================ */

/* to[0..n) = from[0..n) for a kernel to read, or else tensors like these for it to write, with f32
 * instead of f16 and bf16. NULL stays NULL. New. */
static lt_status make_wide(lt_tensor *const *from, int n, bool read, lt_tensor **to)
{
    for (int i = 0; i < n; i++) {
        lt_tensor *x = from[i];
        if (!x)
            continue;
        if (lt__is_half((lt_dtype)x->dtype))
            to[i] = wide_of(x, read);
        else
            to[i] = read ? lt_retain(x)
                         : lt__tensor_like(x, x->storage->device, (lt_dtype)x->dtype);
        if (!to[i])
            return lt_errcode();
    }
    return LT_OK;
}

lt_status lt_recompute_f32(const lt_call *call, bool backward, int which, int64_t index,
                           double *value)
{
    enum { IN, OUT, D_OUT, D_IN };
    const lt_op *op = call->op;
    int n_all = all_outputs(op), n_out = lt_op_outputs(op);
    lt_tensor *at[4][LT_MAX_LIST] = {{NULL}};
    lt_call c = *call;
    if (op->in_place || (op->sums && c.ctx->slots.autograd->allreduce))
        return lt_fail(LT_EUNSUPPORTED, "%s cannot be run again", call->schema->name);
    c.in = at[IN];
    c.out = at[OUT];
    c.d_out = backward ? at[D_OUT] : NULL;
    c.d_in = backward ? at[D_IN] : NULL;
    c.add = 0;
    lt_status status = make_wide(call->in, call->n_in, true, at[IN]);
    if (status == LT_OK)
        status = make_wide(call->out, n_all, backward, at[OUT]);
    if (status == LT_OK && backward)
        status = make_wide(call->d_out, n_out, true, at[D_OUT]);
    if (status == LT_OK && backward)
        status = make_wide(&call->d_in[which], 1, false, &at[D_IN][which]);
    if (status == LT_OK)
        status = run_kernel(&c, lt_op_find(c.ctx, c.schema->name), backward);
    if (status == LT_OK)
        status = lt_item(at[backward ? D_IN : OUT][which], index, value);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < LT_MAX_LIST; j++)
            lt_release(at[i][j]);
    return status;
}

/* ==== Arguments =============================================================================== */

/* Finds the device of a call. LT_EINVAL unless all inputs are on the same one. */
static lt_status find_device(const lt_def *def, lt_tensor *const *in, int n_in, lt_device **device)
{
    const lt_schema *s = &def->schema;
    int first = 0;
    while (!in[first]) /* at least one input is required */
        first++;
    *device = in[first]->storage->device;
    for (int i = first + 1; i < n_in; i++) {
        const char *name = s->in[i < s->n_in ? i : s->n_in - 1].name;
        const char *there = in[i] ? in[i]->storage->device->name : NULL;
        if (in[i] && in[i]->storage->device != *device)
            return lt_fail(
                LT_EINVAL,
                "%s is on %s, but %s is on %s; copy one to the device of the other, e.g. "
                "%s:to('%s')",
                s->in[first].name, (*device)->name, name, there, name, (*device)->name);
    }
    return LT_OK;
}

static lt_status check_inputs(lt_ctx *ctx, const lt_def *def, lt_tensor *const *in, int n_in)
{
    const lt_schema *s = &def->schema;
    LT_TRY(lt__check_open(ctx, s->name));
    const int max = s->variadic ? LT_MAX_LIST : s->n_in;
    if (n_in > max)
        return lt_fail(LT_EINVAL, "%s: expected at most %d tensor%s, got %d", s->name, max,
                       max == 1 ? "" : "s", n_in);
    for (int i = 0; i < n_in || i < s->n_in; i++) {
        const lt_tensor *x = i < n_in ? in[i] : NULL;
        const char *name = s->in[i < s->n_in ? i : s->n_in - 1].name;
        if (!x) {
            if (i < s->n_in ? !s->in[i].optional : true)
                return lt_fail(LT_EINVAL, "%s: tensor %s is missing", s->name, name);
            continue;
        }
        if (x->ctx != ctx)
            return lt_fail(LT_EINVAL, "%s: %s belongs to another context", s->name, name);
        if (x->dead || x->pending || (x->meta && !ctx->slots.autograd->has_stages)) {
            lt_status status = lt__check_alive(x);
            lt_fail_prefix("%s: %s", s->name, name);
            return status;
        }
    }
    return LT_OK;
}

/* Creates out[0..n) by their specs. On failure all of them are released. */
static lt_status make_outputs(lt_call *c, int n)
{
    for (int i = 0; i < n; i++) {
        const lt_spec *s = &c->spec[i];
        lt_tensor *of = s->view ? c->in[s->view - 1] : NULL;
        c->out[i] = of ? lt__tensor_view(of, s->ndim, s->dims, s->offset, false)
                       : lt__tensor_new(c->ctx, c->device, s->dtype, s->ndim, s->dims, false);
        if (!c->out[i]) {
            while (i-- > 0)
                lt_release(c->out[i]);
            return lt_errcode();
        }
    }
    return LT_OK;
}

/* Passes a forward call to the op hook. */
static void call_hook(const struct lt_autograd *ag, const lt_call *c)
{
    char where[LT_WHERE_BYTES];
    lt_where(c->ctx, where);
    ag->op_hook(ag->op_hook_ud, c, false, where);
}

static lt_status apply(lt_ctx *ctx, struct lt_autograd *ag, const lt_def *def, lt_tensor **in,
                       int n_in, const lt_opt *opts, lt_tensor **out)
{
    const lt_op *op = def->op;
    lt_spec spec[LT_MAX_OUT];
    lt_tensor *made[LT_MAX_OUT] = {NULL};
    lt_call call = lt__call_of(ctx, def, in, n_in, opts);
    call.out = made;
    call.spec = spec;
    call.number = ++ag->calls;
    call.seed = lt_seed(ctx);
    call.first_row = ag->tape->first_row;
    LT_TRY(find_device(def, in, n_in, &call.device));
    LT_TRY(op->shape(&call));
    int n_all = all_outputs(op), n_out = lt_op_outputs(op);
    LT_TRY(make_outputs(&call, n_all));

    bool off = ag->no_grad_depth > 0;
    bool record = n_all > 0 && lt__is_recorded(ag, op, in, n_in, spec[0].dtype);
    /* evaluation must not shift the random numbers of training */
    uint64_t *draws = &ag->tape->draws[off];
    if (call.draws)
        call.rng_stream = (uint64_t)off << 63 | (uint64_t)lt_random_step(ctx) << 32 | *draws;
    bool view = n_all > 0 && spec[0].view;
    bool skips = view || (n_all > 0 && lt__is_idle(op, made, n_all));
    lt_status status = skips ? LT_OK : lt__run_kernel(&call, def, false);
    if (status == LT_OK && ag->op_hook && !view)
        call_hook(ag, &call);
    if (status == LT_OK && record)
        status = lt__record(ag, def, &call, call.first_row);
    if (status == LT_OK && op->after)
        status = op->after(&call);
    for (int i = status == LT_OK ? n_out : 0; i < n_all; i++)
        lt_release(made[i]);
    if (status != LT_OK)
        return status;
    for (int i = 0; i < n_in && op->in_place; i++)
        if (in[i] && op->in_place >> i & 1)
            lt__bump_version(in[i]);
    if (call.draws)
        ++*draws;
    for (int i = 0; i < n_out; i++)
        out[i] = made[i];
    return LT_OK;
}

static lt_status run_all(const lt_def *def, lt_call *calls, int n)
{
    const lt_ctx *ctx = calls->ctx;
    const struct lt_autograd *ag = ctx->slots.autograd;
    const lt_kernels *own = lt__kernels_of(ag, def);
    bool at_once = own && own->fwd_all && !ag->timer && !ctx->trace;
    for (int i = 0; i < n; i++) {
        at_once &= !calls[i].device->is_host;
        calls[i].skip = ag->skip;
    }
    if (at_once)
        return own->fwd_all(calls, n);
    for (int i = 0; i < n; i++)
        LT_TRY(lt__run_kernel(&calls[i], def, false));
    return LT_OK;
}

lt_status lt__apply_all(lt_ctx *ctx, const lt_def *def, lt_call *calls, int n)
{
    for (int i = 0; i < n; i++) {
        lt_call *c = &calls[i];
        c->ctx = ctx;
        c->op = def->op;
        c->schema = &def->schema;
        LT_TRY(check_inputs(ctx, def, c->in, c->n_in));
        if (find_device(def, c->in, c->n_in, &c->device) != LT_OK || def->op->shape(c) != LT_OK)
            return lt_fail_prefix("%s", def->schema.name);
    }
    if (run_all(def, calls, n) != LT_OK)
        return lt_fail_prefix("%s", def->schema.name);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < calls[i].n_in; k++)
            if (def->op->in_place >> k & 1)
                lt__bump_version(calls[i].in[k]);
    return LT_OK;
}

static lt_status apply_in_stage(lt_ctx *ctx, struct lt_autograd *ag, const lt_def *def,
                                lt_tensor **in, int n_in, const lt_opt *opts, lt_tensor **out)
{
    int stage;
    lt_status status = LT_OK;
    LT_TRY(lt__stages_apply(ag, ctx, def, in, n_in, opts, out, &stage));
    bool is_here = stage == LT_NO_STAGE || stage == ag->stages.own;
    if (is_here)
        LT_TRY(apply(ctx, ag, def, in, n_in, opts, out));
    int n = is_here && stage != LT_NO_STAGE ? lt_op_outputs(def->op) : 0;
    for (int i = 0; i < n && status == LT_OK; i++)
        status = lt_set_stage(out[i], stage);
    if (status != LT_OK) {
        for (int i = 0; i < n; i++)
            lt_release(out[i]);
        return status;
    }
    if (ag->stages.note)
        ag->stages.note(ag->stages.ud, def, in, n_in, out);
    return LT_OK;
}

/* For lt_op.to_floats: casts integer inputs. Releases the tensors that it replaces. */
static lt_status cast_integers(lt_ctx *ctx, lt_tensor **in, int n_in)
{
    char to[24] = "dtype=f32";
    for (int i = 0; i < n_in; i++)
        if (lt__is_float((lt_dtype)in[i]->dtype))
            snprintf(to, sizeof to, "dtype=%s", lt_dtype_name((lt_dtype)in[i]->dtype));
    for (int i = 0; i < n_in; i++) {
        if (lt__is_float((lt_dtype)in[i]->dtype))
            continue;
        lt_tensor *x = lt_run(ctx, "cast", to, in[i], NULL);
        if (!x)
            return lt_errcode();
        lt_release(in[i]);
        in[i] = x;
    }
    return LT_OK;
}

lt_status lt_apply(lt_ctx *ctx, const lt_def *def, lt_tensor *const *given, int n_in,
                   const lt_opt *opts, lt_tensor **out)
{
    LT_NEED_CTX(ctx, LT_EINVAL);
    struct lt_autograd *ag = ctx->slots.autograd;
    const char *name = def->schema.name;
    lt_tensor *in[LT_MAX_LIST];
    LT_TRY(check_inputs(ctx, def, given, n_in));
    if (!opts) {
        if (def->must_give) {
            lt_opt complete[LT_MAX_OPT];
            return lt_opts_parse(&def->schema, NULL, complete);
        }
        opts = def->defaults;
    }
    memcpy(in, given, (size_t)n_in * sizeof *in);
    lt_status status = LT_OK;
    /* replaced inputs are new references; retain the others too, so that all can be released */
    bool replaces = ag->cast || def->op->to_floats;
    for (int i = 0; replaces && i < n_in; i++)
        lt_retain(in[i]);
    if (def->op->to_floats && (status = cast_integers(ctx, in, n_in)) != LT_OK)
        lt_fail_prefix("%s", name);
    if (status == LT_OK && ag->cast)
        status = ag->cast(ag->cast_ud, def, in, n_in);
    if (status == LT_OK) {
        status = ag->has_stages ? apply_in_stage(ctx, ag, def, in, n_in, opts, out)
                                : apply(ctx, ag, def, in, n_in, opts, out);
        if (status != LT_OK)
            lt_fail_prefix("%s", name);
    }
    for (int i = 0; replaces && i < n_in; i++)
        lt_release(in[i]);
    return status;
}

/* ==== By name ================================================================================= */

lt_tensor *lt_runv(lt_ctx *ctx, const char *op, const char *options, lt_tensor *const *in, int n_in)
{
    LT_NEED_CTX(ctx, NULL);
    lt_tensor *out[LT_MAX_OUT] = {NULL};
    lt_opt opts[LT_MAX_OPT];
    const lt_def *def = lt_op_find(ctx, op);
    if (!def)
        return NULL;
    if (lt_op_outputs(def->op) != 1) {
        lt_fail(LT_EINVAL, "%s does not return exactly one tensor; use lt_apply", op);
        return NULL;
    }
    if (options && lt_opts_parse(&def->schema, options, opts) != LT_OK)
        return NULL;
    return lt_apply(ctx, def, in, n_in, options ? opts : NULL, out) == LT_OK ? out[0] : NULL;
}

/* Whether n inputs are too few for an op. If so, extends the message of the last error: the missing
 * input may be the NULL of the nested call that failed with it. */
static bool misses_input(lt_ctx *ctx, const char *op, int n)
{
    const lt_def *def = ctx ? lt_op_find(ctx, op) : NULL;
    if (!def || n >= def->schema.min_in)
        return false;
    lt_fail_prefix("%s: tensor %s is missing; the last error was", op, def->schema.in[n].name);
    return true;
}

lt_tensor *lt_run(lt_ctx *ctx, const char *op, const char *options, ...)
{
    lt_tensor *in[LT_MAX_LIST + 1]; /* one too many lets lt_apply() report the error */
    int n = 0;
    va_list args;
    va_start(args, options);
    for (lt_tensor *x; n <= LT_MAX_LIST && (x = va_arg(args, lt_tensor *));)
        in[n++] = x;
    va_end(args);
    if (lt_errcode() != LT_OK && misses_input(ctx, op, n))
        return NULL;
    return lt_runv(ctx, op, options, in, n);
}
