/* batch_norm.h - shared by the files of batch norm: batch_norm.c has the ops and their reference
 * kernels, cpu/batch_norm_simd.c the fast CPU kernels, cpu/batch_norm_pass.c their inner loops,
 * batch_norm.cu and batch_norm_stats.cu the CUDA kernels. */
#ifndef LT_OPS_BATCH_NORM_H
#define LT_OPS_BATCH_NORM_H

#include "ops/kernel.h"
#include "ops/moments.h"

enum { X, SCALE, SHIFT, MEAN, VAR, RESIDUAL }; /* inputs */
enum { TRAIN, MOMENTUM, EPS, ACT, SYNC };      /* options */
enum { Y, BATCH_MEAN, BATCH_VAR };             /* outputs */

/* The activation clamps y to low..high. The gradient is 0 where y is at or beyond a bound. An
 * infinite bound has no effect. */
typedef struct lt_bounds {
    float low, high;
} lt_bounds;

/* The bounds of option act: none, relu or relu6. */
static inline lt_bounds lt__bounds(const lt_call *c)
{
    static const lt_bounds of[] = {{-INFINITY, INFINITY}, {0, INFINITY}, {0, 6}};
    return of[lt__word(c, ACT)];
}

/* ==== Statistics over all ranks =============================================================== */

/* In training with sync=true on several ranks, a kernel runs twice. The first run fills c->sums:
 * the number of rows, then two sums for each channel. The ranks add these up. The second run
 * continues with the totals. Backward computes the gradients of the parameters in the first run, as
 * they depend only on the rows of this rank. */

/* Whether this is the first of two runs. */
static inline bool lt__is_first_run(const lt_call *c) { return c->sums && !c->summed; }
/* The two sums of a channel. */
static inline double *lt__sums_of(const lt_call *c, int64_t channel)
{
    return c->sums + 1 + 2 * channel;
}

/* The number of rows of all ranks in the second run, else of this rank. */
static inline double lt__all_rows(const lt_call *c)
{
    return c->summed ? c->sums[0] : (double)lt__rows_of(c->in[X]);
}

/* Ranks exchange moments as sums of deviations from a center that is the same on all ranks, the
 * running mean. If the center is k standard deviations from the mean, the relative error of the
 * variance is about 1e-16 * (1 + k^2). */

/* First run: writes the moments m of this rank's rows to the sums of the channel. c->sums[0] must
 * already be set. */
static inline void lt__write_moments(const lt_call *c, int64_t channel, double center, lt_moments m)
{
    double *sums = lt__sums_of(c, channel), d = m.mean - center;
    sums[0] = c->sums[0] * d;
    sums[1] = m.squares + c->sums[0] * d * d;
}

/* Second run: the moments of the rows of all ranks. */
static inline lt_moments lt__read_moments(const lt_call *c, int64_t channel, double center)
{
    const double *sums = lt__sums_of(c, channel);
    double d = c->sums[0] > 0 ? sums[0] / c->sums[0] : 0;
    lt_moments m = {center + d, sums[1] - sums[0] * d};
    return m;
}

/* LT_EINVAL in training if lt__all_rows() is 1, because one row has no variance. */
#ifndef __cplusplus
static inline lt_status lt__check_rows(const lt_call *c)
{
    if (!lt__flag(c, TRAIN) || lt__all_rows(c) != 1)
        return LT_OK;
    return lt_fail(LT_EINVAL,
                   "train=true requires more than one value per channel, but x has one (%s); use "
                   "a larger batch or train=false",
                   LT_TEXT(c->in[X]));
}
#endif

/* ==== Arithmetic ============================================================================== */

/* LT_NORMALISED is y before the residual is added and act is applied; LT_NORMALISED_BACK is dx.
 * d: x - mean; g: dy where act passes it, else 0. Both macros take floats or vectors of floats. */
#define LT_NORMALISED(x, mean, factor, shift) (((x) - (mean)) * (factor) + (shift))
#define LT_NORMALISED_BACK(g, d, factor, slope, offset)                                            \
    ((factor) * (g) + ((slope) * (d) + (offset)))

/* v clamped by act. */
LT_BOTH LT_INLINE float lt__act(lt_bounds act, float v)
{
    v = v < act.low ? act.low : v;
    return v > act.high ? act.high : v;
}

/* Whether y is at or beyond a bound. y may be a float or a double. */
#define LT_STOPS_LOW(act, y) ((y) <= (act).low && (act).low > -INFINITY)
#define LT_STOPS_HIGH(act, y) ((y) >= (act).high && (act).high < INFINITY)

/* The gradient through act: dy if y is strictly between the bounds, else 0. */
LT_BOTH LT_INLINE float lt__act_grad(lt_bounds act, float y, float dy)
{
    dy = LT_STOPS_LOW(act, y) ? 0 : dy;
    return LT_STOPS_HIGH(act, y) ? 0 : dy;
}

/* The factor of x - mean in y. */
LT_BOTH LT_INLINE double lt__norm_factor(float scale, float var, double eps)
{
    return scale / sqrt(var + eps);
}

/* The coefficient of x - mean in dx and, below, the constant term of dx. sum, product: the sums of
 * g and of g * (x - mean) over the rows. share: 1 / rows in training, 0 in evaluation. */
LT_BOTH LT_INLINE float lt__norm_slope(float factor, float var, double eps, double product,
                                       double share)
{
    double r = 1 / sqrt(var + eps);
    return (float)(-factor * r * r * product * share);
}

LT_BOTH LT_INLINE float lt__norm_offset(float factor, double sum, double share)
{
    return (float)(-factor * sum * share);
}

/* Like lt__merged(), for means and biased variances. part: the fraction of all values that are in
 * the second set. */
LT_BOTH LT_INLINE double lt__merged_var(double mean, double var, double mean2, double var2,
                                        double part)
{
    double d = mean2 - mean;
    return var * (1 - part) + var2 * part + d * d * part * (1 - part);
}

LT_BOTH LT_INLINE double lt__merged_mean(double mean, double mean2, double part)
{
    return mean + (mean2 - mean) * part;
}

/* The running statistic after one step. now: the statistic of the batch. */
LT_BOTH LT_INLINE double lt__running_update(double running, double now, double momentum)
{
    return (1 - momentum) * running + momentum * now;
}

/* The factor that makes a biased variance of `count` values unbiased. 1 for a count of 0 or 1. */
static inline double lt__unbias(double count) { return count > 1 ? count / (count - 1) : 1; }

/* ==== Passes ================================================================================== */

/* The form of an array's units: a unit is one f32, one bf16 or a pair of bf16. */
enum { FLOATS, HALVES, PAIRS };

/* Rows with fewer channels than this are laid end to end, to form wide rows of at least this many
 * lanes. */
enum { LANES = 128 };

/* Indices of the rows in lt_pass.coefs, and in lt_pass.lanes. */
enum { AT_MEAN, AT_FACTOR, AT_SHIFT, AT_SLOPE, AT_OFFSET, COEFFICIENTS };
enum { AT_CENTER, AT_SUM, AT_PRODUCT, SUMS };

/* How a pass computes g. MOMENTS: g is x - center, for the moments. PLAIN: g is dy. ACT_OF_Y: g is
 * lt__act_grad() of y and dy. ACT_OF_X: the same, with y recomputed from x. */
enum { MOMENTS, PLAIN, ACT_OF_Y, ACT_OF_X };

/* A pass over some wide rows. Arrays that the pass does not need are NULL. Borrows all arrays. */
typedef struct lt_pass {
    /* units in total; units of a row; floats per row of coefs and of lanes */
    int64_t n, units, pitch;
    const float *coefs, *center; /* (COEFFICIENTS, pitch); (pitch): a value for each lane */
    float *lanes;                /* (SUMS, pitch): the center and the sums of each lane */
    const void *x, *dy, *y, *residual;
    void *out;
    int form, mode;        /* values of the enums above */
    bool add, nontemporal; /* add to out; write out with nontemporal stores */
    lt_bounds act;
} lt_pass;

/* out = act((x - mean) * factor + shift + residual) */
void lt__forward_pass(const lt_pass *p);
/* out (+)= g, the gradient of the residual. Computes g from y and dy; ignores the mode. */
void lt__residual_pass(const lt_pass *p);
/* lanes += the sums of g and of g * (x - center) */
void lt__sum_pass(const lt_pass *p);
/* out (+)= factor * g + slope * (x - mean) + offset */
void lt__backward_pass(const lt_pass *p);

/* ==== The fast CPU kernels ==================================================================== */

/* fast_fwd, fast_bwd and scratch of lt__op_batch_norm */
lt_status lt__batch_norm_fwd(lt_call *c);
lt_status lt__batch_norm_bwd(lt_call *c);
size_t lt__batch_norm_scratch(const lt_call *c, bool backward);

#endif
