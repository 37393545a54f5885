/* update.c - the update ops of the optimizers (SGD, SGD with momentum, LARS, Adam and AdamW), and
 * the sum of squares for gradient norms.
 *
 * Each update op is one in-place pass over flat arenas; LARS computes two norms before it. The
 * arithmetic is as in torch.optim, which has no LARS: term by term in the element type, with slots
 * that are zero before the first step. `scale` multiplies the gradient first, so that a loss scale
 * or a number of shards is undone without a pass of its own.
 */
#include "ops/update.h"

enum { BLOCK = LT_UPDATE_BLOCK };
enum { W = LT_UPDATE_W, G = LT_UPDATE_G, SLOT = LT_UPDATE_SLOT, SLOT2 = LT_UPDATE_SLOT2 };

lt_status lt__check_arenas(const lt_call *c, int n)
{
    LT_TRY(lt__same_float(c, n));
    for (int i = 1; i < n && i < c->n_in; i++)
        if (c->in[i] && c->in[i]->count != c->in[0]->count)
            return lt_fail(
                LT_EINVAL, "%s must have the same number of elements as %s (%s), but is %s",
                lt__in_name(c, i), c->schema->in[0].name, LT_TEXT(c->in[0]), LT_TEXT(c->in[i]));
    return LT_OK;
}

lt_status lt__check_ranges(const lt_call *c, const char *ranges)
{
    int64_t whole;
    for (int k = 0; ranges[k]; k++) {
        const char *name = c->schema->opt[k].name;
        if (ranges[k] == '+' || ranges[k] == '1')
            LT_TRY(lt__number_in(c, k, 0, ranges[k] == '1' ? 1 : INFINITY));
        if (ranges[k] == '<' && !(lt__number(c, k) >= 0 && lt__number(c, k) < 1))
            return lt_fail(LT_EINVAL, "%s must be at least 0 and below 1, but is %g", name,
                           lt__number(c, k));
        if (ranges[k] == '>' && !(lt__number(c, k) > 0 && lt__number(c, k) <= 1))
            return lt_fail(LT_EINVAL, "%s must be above 0 and at most 1, but is %g", name,
                           lt__number(c, k));
        if (ranges[k] == 's' && !lt__given(c, k))
            return lt_fail(LT_EINVAL, "option '%s' is missing", name);
        if (ranges[k] == 'n' || ranges[k] == 's')
            LT_TRY(lt__int(c, k, ranges[k] == 's', &whole));
    }
    return LT_OK;
}

lt_status lt__check_update(const lt_call *c, const char *ranges)
{
    LT_TRY(lt__check_ranges(c, ranges));
    return lt__check_arenas(c, c->n_in);
}

lt_status lt__for_blocks(lt_call *c, void (*block)(const lt_call *c, int64_t first, int64_t n))
{
    int64_t n = c->in[0]->count;
    LT_PARALLEL_FOR(c, n * c->n_in)
    for (int64_t i = 0; i < n; i += LT_UPDATE_BLOCK)
        block(c, i, n - i < LT_UPDATE_BLOCK ? n - i : LT_UPDATE_BLOCK);
    return LT_OK;
}

/* ==== Sums of squares ========================================================================= */

static int64_t blocks_of(const lt_tensor *x) { return (x->count + BLOCK - 1) / BLOCK; }

/* The sum of the squares of elements [first, first + n). */
LT_SIMD static double squares_of(const lt_tensor *x, int64_t first, int64_t n)
{
    enum { LANES = 16 }; /* partial sums, for vector instructions */
    double lane[LANES] = {0}, sum = 0;
    LT_FLOATS(x->dtype, T,
        const T *at = (const T *)x->data + first;
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES)
            for (int k = 0; k < LANES; k++)
                lane[k] += (double)at[i + k] * (double)at[i + k];
        for (; i < n; i++)
            lane[i % LANES] += (double)at[i] * (double)at[i];
    );
    for (int k = 0; k < LANES; k++)
        sum += lane[k];
    return sum;
}

/* The sum of the squares of all elements. block[] receives one sum for each block. They are added
 * in order, so the result does not depend on the number of threads. */
static double sum_squares(const lt_call *c, const lt_tensor *x, double *block)
{
    double sum = 0;
    LT_PARALLEL_FOR(c, x->count)
    for (int64_t i = 0; i < x->count; i += BLOCK)
        block[i / BLOCK] = squares_of(x, i, x->count - i < BLOCK ? x->count - i : BLOCK);
    for (int64_t i = 0; i < blocks_of(x); i++)
        sum += block[i];
    return sum;
}

/* ==== add_squares ============================================================================= */

enum { TOTAL, X };

static lt_status squares_shape(lt_call *c)
{
    for (int i = TOTAL; i <= X; i++)
        if (!lt__is_float((lt_dtype)c->in[i]->dtype))
            return lt_fail(LT_EINVAL, "%s must have a float dtype, but is %s", lt__in_name(c, i),
                           LT_TEXT(c->in[i]));
    if (c->in[TOTAL]->count != 1)
        return lt_fail(LT_EINVAL, "total must have one element, but is %s", LT_TEXT(c->in[TOTAL]));
    return LT_OK;
}

static size_t squares_scratch(const lt_call *c, bool backward)
{
    (void)backward;
    return (size_t)blocks_of(c->in[X]) * sizeof(double);
}

static lt_status add_squares(lt_call *c)
{
    double sum = sum_squares(c, c->in[X], c->scratch);
    LT_FLOATS(c->in[TOTAL]->dtype, T,
        T *total = c->in[TOTAL]->data;
        *total = (T)((double)*total + sum);
    );
    return LT_OK;
}

const lt_op lt__op_add_squares = {
    .sig = "add_squares(total, x)",
    .doc = "Adds the sum of x^2, computed in double, to total (one element), in place.",
    .in_place = 1 << TOTAL,
    .shape = squares_shape,
    .scratch = squares_scratch,
    .fwd = add_squares,
};

/* ==== sgd_step ================================================================================ */

static lt_status sgd_shape(lt_call *c) { return lt__check_update(c, "++"); }

LT_UPDATE(sgd, LT_SGD_NUMBERS, LT_SGD_STEP(w[i], g[i]), LT_ARRAY(w, W) LT_ARRAY(g, G) LT_CLIP)

const lt_op lt__op_sgd_step = {
    .sig = "sgd_step(w, g; lr#, weight_decay=0.0, scale=1.0)",
    .doc = "w -= lr (scale g + weight_decay w), in place; g has the number of elements of w.",
    .in_place = 1 << W,
    .shape = sgd_shape,
    .fwd = sgd,
};

/* ==== momentum_step =========================================================================== */

static lt_status momentum_shape(lt_call *c) { return lt__check_update(c, "++.+"); }

LT_UPDATE(momentum, LT_MOMENTUM_NUMBERS, LT_MOMENTUM_STEP(w[i], g[i], v[i]),
          LT_ARRAY(w, W) LT_ARRAY(g, G) LT_ARRAY(v, SLOT) LT_CLIP)

const lt_op lt__op_momentum_step = {
    .sig = "momentum_step(w, g, v; lr#, momentum=0.9, nesterov=false, weight_decay=0.0, scale=1.0)",
    .doc = "d = scale g + weight_decay w; v = momentum v + d; w -= lr v, or w -= lr (d + momentum "
           "v) with nesterov=true, in place.",
    .in_place = 1 << W | 1 << SLOT,
    .shape = momentum_shape,
    .fwd = momentum,
};

/* ==== lars_step =============================================================================== */

static lt_status lars_shape(lt_call *c) { return lt__check_update(c, "+++++"); }

/* One sum for each block. Later the first element is the ratio. */
static size_t lars_scratch(const lt_call *c, bool backward)
{
    (void)backward;
    return (size_t)(blocks_of(c->in[W]) + 1) * sizeof(double);
}

/* The trust ratio of the parameter, or 1 with adapt=false. */
static double lars_ratio(const lt_call *c)
{
    if (!lt__flag(c, ADAPT))
        return 1;
    double w = sqrt(sum_squares(c, c->in[W], c->scratch));
    double scale = lt__number(c, LARS_SCALE) * lt__grad_factor(c);
    double g = sqrt(sum_squares(c, c->in[G], c->scratch)) * fabs(scale);
    return lt__lars_ratio(w, g, lt__number(c, TRUST), lt__number(c, LARS_WEIGHT_DECAY),
                          lt__number(c, LARS_EPS));
}

#define LARS_NUMBERS(N) LT_LARS_NUMBERS(N) N(T, ratio, *(const double *)c->scratch)
LT_UPDATE(update_by_ratio, LARS_NUMBERS, LT_LARS_STEP(w[i], g[i], v[i], ratio),
          LT_ARRAY(w, W) LT_ARRAY(g, G) LT_ARRAY(v, SLOT) LT_CLIP)

static lt_status lars(lt_call *c)
{
    *(double *)c->scratch = lars_ratio(c);
    return update_by_ratio(c);
}

const lt_op lt__op_lars_step = {
    .sig = "lars_step(w, g, v; lr#, momentum=0.9, weight_decay=0.0, trust=0.001, eps=1e-8, "
           "adapt=true, "
           "scale=1.0)",
    .doc = "LARS (You, Gitman and Ginsburg, 2017) for one parameter, in place: d = scale g + "
           "weight_decay w; q = trust |w| / (|scale g| + weight_decay |w| + eps), or 1 if a norm "
           "is 0 or adapt=false; v = momentum v + q d; w -= lr v.",
    .in_place = 1 << W | 1 << SLOT,
    .whole_params = true,
    .shape = lars_shape,
    .scratch = lars_scratch,
    .fwd = lars,
};

/* ==== adam_step =============================================================================== */

static lt_status adam_shape(lt_call *c) { return lt__check_update(c, "+s<<++"); }

LT_UPDATE(adam, LT_ADAM_NUMBERS, LT_ADAM_STEP(w[i], g[i], m[i], v[i], LT_SQRT),
          LT_ARRAY(w, W) LT_ARRAY(g, G) LT_ARRAY(m, SLOT) LT_ARRAY(v, SLOT2) LT_CLIP)

const lt_op lt__op_adam_step = {
    .sig = "adam_step(w, g, m, v; lr#, step?, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, "
           "decoupled=false, scale=1.0)",
    .doc =
        "Adam (Kingma and Ba, 2015), in place, with step counted from 1; an optimizer sets it. d = "
        "scale g + weight_decay w; m = beta1 m + (1 - beta1) d; v = beta2 v + (1 - beta2) d^2; w "
        "-= lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + eps); or with "
        "decoupled=true AdamW (Loshchilov and Hutter, 2019): w *= 1 - lr weight_decay first, and "
        "d = scale g.",
    .in_place = 1 << W | 1 << SLOT | 1 << SLOT2,
    .shape = adam_shape,
    .fwd = adam,
};
