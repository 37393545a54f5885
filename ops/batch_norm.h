/* batch_norm.h - what the files of batch norm share: batch_norm.c has the op and its plain kernels,
 * batch_norm_simd.c the fast ones, batch_norm_pass.c the loops of these over memory, batch_norm.cu
 * those for CUDA. */
#ifndef LT_OPS_BATCH_NORM_H
#define LT_OPS_BATCH_NORM_H

#include "ops/kernel.h"

enum { X, SCALE, SHIFT, MEAN, VAR, RESIDUAL }; /* inputs */
enum { TRAIN, MOMENTUM, EPS, ACT, SYNC };      /* options */
enum { Y, BATCH_MEAN, BATCH_VAR };             /* outputs */

/* act brings a value into low..high, and stops the gradient at both and beyond. No number is below
 * or above a NaN: that is no bound. */
typedef struct lt_bounds {
    float low, high;
} lt_bounds;

static inline lt_bounds lt__bounds(const lt_call *c)
{
    static const lt_bounds of[] = {{NAN, NAN}, {0, NAN}, {0, 6}};
    return of[lt__word(c, ACT)];
}

/* Input i of the call, or its gradient, that may be absent. */
static inline lt_tensor *lt__optional(const lt_call *c, lt_tensor **of, int i)
{
    return i < c->n_in ? of[i] : NULL;
}

/* All axes of x but the last are rows. */
static inline int64_t lt__rows_of(const lt_tensor *x)
{
    int64_t rows = 1;
    for (int i = 0; i < x->ndim - 1; i++)
        rows *= x->dims[i];
    return rows;
}

/* ==== The rows of all ranks =================================================================== */

/* With sync=true the ranks add up, between the two runs of a kernel: their count of rows, and for
 * each channel two sums. */

/* This is the first of two runs, which ends with the sums. */
static inline bool lt__is_first_run(const lt_call *c) { return c->sums && !c->summed; }
static inline double *lt__sums_of(const lt_call *c, int64_t channel)
{
    return c->sums + 1 + 2 * channel;
}

static inline double lt__all_rows(const lt_call *c)
{
    return c->summed ? c->sums[0] : (double)lt__rows_of(c->in[X]);
}

/* The mean and the sum of squared deviations from it, over some rows. They travel as sums about a
 * center that all ranks have alike, the running mean: one that is k deviations off costs about k^2
 * of the 1e16 that a double can tell apart. */
typedef struct lt_moments {
    double mean, squares;
} lt_moments;

/* The moments of this rank's rows, in the first run, or of all, in the second. */
static inline void lt__give_moments(const lt_call *c, int64_t channel, double center, lt_moments m)
{
    double *sums = lt__sums_of(c, channel), d = m.mean - center;
    sums[0] = c->sums[0] * d;
    sums[1] = m.squares + c->sums[0] * d * d;
}

static inline lt_moments lt__take_moments(const lt_call *c, int64_t channel, double center)
{
    const double *sums = lt__sums_of(c, channel);
    double d = c->sums[0] > 0 ? sums[0] / c->sums[0] : 0;
    lt_moments m = {center + d, sums[1] - sums[0] * d};
    return m;
}

/* LT_EINVAL when they are one. */
lt_status lt__check_rows(const lt_call *c);

/* ==== Arithmetic ============================================================================== */

/* For floats, and for vectors of them. */
#define LT_NORMALISED(x, mean, factor, shift) (((x) - (mean)) * (factor) + (shift))
#define LT_NORMALISED_BACK(g, d, factor, slope, offset)                                            \
    ((factor) * (g) + ((slope) * (d) + (offset)))

LT_BOTH LT_INLINE float lt__bounded(lt_bounds act, float v)
{
    v = v < act.low ? act.low : v;
    return v > act.high ? act.high : v;
}

/* dy where act lets y pass, else 0. */
LT_BOTH LT_INLINE float lt__passed(lt_bounds act, float y, float dy)
{
    dy = y <= act.low ? 0 : dy;
    return y >= act.high ? 0 : dy;
}

LT_BOTH LT_INLINE double lt__norm_factor(float scale, float var, double eps)
{
    return scale / sqrt(var + eps);
}

/* The coefficients of x - mean and of 1 in dx, of the sums of g and of g (x - mean). share: 1 /
 * rows, or 0 in evaluation. */
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

/* What comes of moments and those of further rows, which are `share` of both, and weight = rows
 * before * share (Chan, Golub and LeVeque, 1983). */
LT_BOTH LT_INLINE lt_moments lt__merged(lt_moments m, lt_moments more, double share, double weight)
{
    double d = more.mean - m.mean;
    m.mean += d * share;
    m.squares += more.squares + d * d * weight;
    return m;
}

/* The same of a mean and a biased variance; `part` as share. */
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

LT_BOTH LT_INLINE double lt__moved(double running, double now, double momentum)
{
    return (1 - momentum) * running + momentum * now;
}

/* By what a biased variance is multiplied. */
static inline double lt__unbias(double count) { return count > 1 ? count / (count - 1) : 1; }

/* ==== Passes ================================================================================== */

/* What a unit of an array is: a float, a half, or two halves. */
enum { FLOATS, HALVES, PAIRS };

/* Of few channels as many rows are laid end to end as make so many lanes. */
enum { LANES = 128 };

/* Rows of coefficients, and of sums. */
enum { AT_MEAN, AT_FACTOR, AT_SHIFT, AT_SLOPE, AT_OFFSET, COEFFICIENTS };
enum { AT_CENTER, AT_SUM, AT_PRODUCT, SUMS };

/* Where a gradient comes through act: everywhere, or where y lies between the bounds, which is read
 * or made from x again. Moments: in place of a gradient stands x - center itself. */
enum { MOMENTS, OPEN, BY_Y, BY_X };

/* A pass over some wide rows. Arrays that it does not need are NULL. */
typedef struct lt_pass {
    int64_t n, units, room;       /* units in all, and in a row */
    const float *coefs, *center;
    float *lanes;
    const void *x, *dy, *y, *residual;
    void *out;
    int form, gate;
    bool add, nontemporal;             /* to what is in out; out is written past the caches */
    lt_bounds act;
} lt_pass;

/* out = act((x - mean) factor + shift + residual) */
void lt__forward_pass(const lt_pass *p);
/* out (+)= the dy that passed, by y */
void lt__residual_pass(const lt_pass *p);
/* lanes += the sums of g, that dy, and of g (x - center) */
void lt__sum_pass(const lt_pass *p);
/* out (+)= factor g + slope (x - mean) + offset */
void lt__backward_pass(const lt_pass *p);

/* ==== The fast kernels ======================================================================== */

lt_status lt__batch_norm_fwd(lt_call *c);
lt_status lt__batch_norm_bwd(lt_call *c);
size_t lt__batch_norm_scratch(const lt_call *c, bool backward);

#endif
