/* anomaly.c - finds the first result that is not finite, and why it is not.
 *
 * The results of each op are checked as soon as they exist, forward and backward. The first op with
 * a result that is not finite has either received such a number from outside, such as the data, or
 * made it. In the second case its kernel runs again in f32 instead of f16. If the number is finite
 * then, it was too large for f16. Otherwise the op and its inputs cause it in any dtype.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "amp/anomaly.h"
#include "core/locale.h"
#include "core/tensor.h"

#define IN_F32 "compute it in f32 with lt.autocast(\"off\", ...)"

/* ==== Tensors ================================================================================= */

/* Index of the first element whose exponent bits are all ones, as in inf and NaN; -1 if none. x is
 * on the CPU. */
#define FIND(bits, mask)                                                                           \
    for (int64_t i = 0; i < x->count; i++)                                                         \
        if ((((const bits *)x->data)[i] & (mask)) == (mask))                                       \
            return i;                                                                              \
    return -1

static int64_t first_non_finite_on_host(const lt_tensor *x)
{
    switch (x->dtype) {
    case LT_F16: FIND(uint16_t, 0x7c00);
    case LT_BF16: FIND(uint16_t, 0x7f80);
    case LT_F32: FIND(uint32_t, 0x7f800000);
    case LT_F64: FIND(uint64_t, 0x7ff0000000000000);
    default: return -1;
    }
}

static int64_t first_non_finite(lt_tensor *x)
{
    if (!x || !x->data)
        return -1;
    lt_tensor *here = lt__on_host(x);
    int64_t index = here ? first_non_finite_on_host(here) : -1;
    lt_release(here);
    return index;
}

/* The first of list[0..n) that is not finite, and the index of its first such element; or -1. */
static int find_non_finite(lt_tensor *const *list, int n, int64_t *index)
{
    for (int i = 0; i < n; i++)
        if ((*index = first_non_finite(list[i])) >= 0)
            return i;
    return -1;
}

static double value_at(lt_tensor *x, int64_t index)
{
    double value = NAN;
    return lt_item(x, index, &value) == LT_OK ? value : NAN;
}

static const char *word(double value) { return isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"; }

/* ==== The sentence ============================================================================ */

/* A call that is checked. */
typedef struct view {
    lt_loss_scale *scale;
    const lt_call *call;
    bool backward;
    const char *where;
    bool whole; /* no tensor of the call is missing */
} view;

/* Writes "net.4 conv2d: its x is the first non-finite tensor: ...". of: "", "the gradient of ". */
LT_PRINTF(4, 5)
static void describe(const view *v, const char *of, const char *what, const char *why, ...)
{
    char *text = v->scale->anomaly;
    va_list args;
    int n = snprintf(text, LT_ANOMALY_BYTES,
                     "%s%s%s: %sits %s is the first non-finite tensor: ", v->where,
                     v->backward ? "backward of " : "", v->call->schema->name, of, what);
    va_start(args, why);
    if (n > 0 && n < LT_ANOMALY_BYTES)
        vsnprintf(text + n, (size_t)(LT_ANOMALY_BYTES - n), why, args);
    va_end(args);
}

static const char *input_name(const lt_call *c, int i)
{
    const lt_schema *s = c->schema;
    return s->in[i < s->n_in ? i : s->n_in - 1].name;
}

static void describe_input(const view *v, lt_tensor *x, int64_t index, const char *name)
{
    double value = value_at(x, index);
    bool f16 = x->dtype == LT_F16 && isinf(value);
    if (!lt_is_param(x))
        describe(v, "", name, "it already contains %s%s; check the data", word(value),
                 f16 ? " or a number beyond 65504, the f16 maximum" : "");
    else if (f16)
        describe(
            v, "", name,
            "it is a parameter that contains inf or a number beyond 65504, the f16 maximum; check "
            "the learning rate and the loaded weights");
    else
        describe(v, "", name,
                 "it is a parameter that contains %s before the step; check the learning rate and "
                 "the loaded weights",
                 word(value));
}

/* number: the value as text, or "it". */
static void describe_overflow(const view *v, const char *what, const char *number)
{
    int k = v->scale->scaler.k;
    if (!v->backward)
        describe(v, "", what, "%s does not fit in f16, whose maximum is 65504; " IN_F32, number);
    else
        describe(
            v, "the gradient of ", what,
            "including the loss scale of 2^%d, %s does not fit in f16, whose maximum is 65504; %s",
            k, number,
            k > LT_SCALE_MIN ? "lower the scale, or use an adaptive one"
                             : IN_F32 ", or try a smaller learning rate");
}

/* Describes element `index` of x, which is out[i] or d_in[i]. All inputs of the call are finite. */
static void describe_output(const view *v, const char *what, lt_tensor *x, int i, int64_t index)
{
    double value = value_at(x, index), wide = value;
    bool seen = v->whole && lt_recompute_f32(v->call, v->backward, i, index, &wide) == LT_OK;
    bool f16 = x->dtype == LT_F16 && (seen ? isfinite(wide) : isinf(value));
    char number[32] = "it";
    if (seen && fabs(wide) > 65504) /* else the sum with an earlier d_in overflowed */
        lt__format(number, sizeof number, "%.6g", wide);
    if (f16)
        describe_overflow(v, what, number);
    else if (!v->whole)
        describe(v, "", what, "it contains %s; check the learning rate and the data", word(value));
    else
        describe(v, v->backward ? "the gradient of " : "", what,
                 "it contains %s, in f32 as well, although all its inputs are finite; check the "
                 "learning rate and the data, and look for a division by 0",
                 word(value));
}

/* ==== The op hook ============================================================================= */

/* Whether one of list[0..n) is not finite, so that the op is not the cause. Describes it. */
static bool input_is_first(const view *v, lt_tensor *const *list, int n)
{
    int64_t index;
    int i = find_non_finite(list, n, &index);
    if (i >= 0)
        describe_input(v, list[i], index, list == v->call->in ? input_name(v->call, i) : "output");
    return i >= 0;
}

/* Likewise for the incoming gradients. Those made by ops were finite, but the sum of several may
 * not be, nor the gradient that backward started with. */
static bool d_out_is_first(const view *v, lt_tensor *const *d_out, int n)
{
    int64_t index;
    int i = find_non_finite(d_out, n, &index);
    if (i < 0)
        return false;
    double value = value_at(d_out[i], index);
    if (d_out[i]->dtype == LT_F16 && isinf(value))
        describe_overflow(v, "output", "it");
    else
        describe(v, "the gradient of ", "output",
                 "it contains %s, from the gradient that backward began with or from a sum; check "
                 "the learning rate and the data",
                 word(value));
    return true;
}

static void check_call(const view *v)
{
    const lt_call *c = v->call;
    int n_out = lt_op_outputs(c->op), n_all = n_out + c->op->n_aux;
    lt_tensor **made = v->backward ? c->d_in : c->out;
    int64_t index;
    int i = find_non_finite(made, v->backward ? c->n_in : n_all, &index);
    if (i < 0)
        return;
    if (v->backward && (d_out_is_first(v, c->d_out, n_out) || input_is_first(v, c->out, n_all)))
        return;
    if (!input_is_first(v, c->in, c->n_in))
        describe_output(v, v->backward ? input_name(c, i) : "output", made[i], i, index);
}

/* Ignores ops with gradients off, as in an evaluation: they do not affect training. Gradients are
 * always off in backward. */
static void op_hook(void *ud, const lt_call *c, bool backward, const char *where)
{
    lt_loss_scale *s = ud;
    if (!s->anomaly[0] && (backward || lt_grad_enabled(c->ctx)))
        check_call(&(view){s, c, backward, where, true});
}

static void replay_hook(void *ud, const lt_call *c, bool backward, const char *where)
{
    lt_loss_scale *s = ud;
    bool whole = true;
    for (int i = 0; i < c->n_in; i++)
        whole &= c->in[i] || (i < c->schema->n_in && c->schema->in[i].optional);
    if (!s->anomaly[0])
        check_call(&(view){s, c, backward, where, whole});
}

const char *lt__anomaly_first(lt_loss_scale *s, lt_tensor *loss)
{
    if (!s->detects_anomaly) {
        s->anomaly[0] = '\0';
        lt_replay_ops(loss, replay_hook, s);
    }
    return s->anomaly;
}

void lt__anomaly_enable(lt_loss_scale *s, bool on)
{
    s->anomaly[0] = '\0';
    if (s->detects_anomaly == on)
        return;
    s->detects_anomaly = on;
    lt__anomaly_install(s->ctx, s);
}

void lt__anomaly_install(lt_ctx *ctx, lt_loss_scale *s)
{
    lt_set_op_hook(ctx, s && s->detects_anomaly ? op_hook : NULL, s);
}
