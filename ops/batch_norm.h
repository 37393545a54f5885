/* batch_norm.h - what the files of batch norm share: batch_norm.c has the op and its plain kernels,
 * batch_norm_simd.c the fast ones, batch_norm_pass.c the loops of these over memory. */
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
    return (lt_moments){center + d, sums[1] - sums[0] * d};
}

/* LT_EINVAL when they are one. */
lt_status lt__check_rows(const lt_call *c);

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
    bool add, stream;             /* to what is in out; out is written past the caches */
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
