/* dropout.h - which elements dropout keeps, for the CPU (dropout.c) and CUDA (dropout.cu). */
#ifndef LT_OPS_DROPOUT_H
#define LT_OPS_DROPOUT_H

#include "ops/kernel.h"

enum { P, TRAIN }; /* options */

/* An element is kept if its random word is at least this. p: the probability of dropping it. */
static inline uint32_t lt__lowest_kept(double p)
{
    return p < 1 ? (uint32_t)ldexp(p, 32) : UINT32_MAX;
}

/* The factor of the elements that are kept. For p = 1 it is 0, so that all of y is 0. */
static inline double lt__kept_scale(double p) { return p < 1 ? 1 / (1 - p) : 0; }

/* y of an element: `scaled`, which is x times lt__kept_scale(), or 0 if the element is dropped. */
#define LT_DROPOUT(scaled, word, lowest) ((word) >= (lowest) ? (scaled) : 0)

/* Index of the first element of x in the global batch. The shape rule has checked that it does not
 * overflow. */
static inline int64_t lt__elements_before(const lt_call *c, const lt_tensor *x)
{
    int64_t rows = x->ndim > 0 ? x->dims[0] : 1;
    return rows > 0 ? c->first_row * (x->count / rows) : 0;
}

#endif
