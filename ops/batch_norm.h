/* batch_norm.h - what the two halves of batch norm share: batch_norm.c has the op and its plain
 * kernels, batch_norm_simd.c the fast ones. */
#ifndef LT_OPS_BATCH_NORM_H
#define LT_OPS_BATCH_NORM_H

#include "ops/kernel.h"

enum { X, SCALE, SHIFT, MEAN, VAR, RESIDUAL }; /* inputs */
enum { TRAIN, MOMENTUM, EPS, ACT };            /* options */
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

lt_status lt__batch_norm_fwd(lt_call *c);
lt_status lt__batch_norm_bwd(lt_call *c);
size_t lt__batch_norm_scratch(const lt_call *c, bool backward);

#endif
