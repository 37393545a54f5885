/* dropout.h - what dropout keeps, for the CPU (dropout.c) and for CUDA (dropout.cu). */
#ifndef LT_OPS_DROPOUT_H
#define LT_OPS_DROPOUT_H

#include "ops/kernel.h"

enum { P, TRAIN };            /* options */

/* A random word is kept from this one on. */
static inline uint32_t lt__lowest_kept(double p)
{
    return p < 1 ? (uint32_t)ldexp(p, 32) : UINT32_MAX;
}

static inline double lt__kept_scale(double p) { return p < 1 ? 1 / (1 - p) : 0; }

#define LT_DROPPED(scaled, word, lowest) ((word) >= (lowest) ? (scaled) : 0)

/* Elements of the global batch before the first of x. The shape rule has seen that there are not
 * too many. */
static inline int64_t lt__elements_before(const lt_call *c, const lt_tensor *x)
{
    int64_t rows = x->ndim > 0 ? x->dims[0] : 1;
    return rows > 0 ? c->first_row * (x->count / rows) : 0;
}

#endif
