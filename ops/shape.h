/* shape.h - how the ops of shape.c read their options, on the CPU and by CUDA. What these want has
 * been checked by the shape rules. */
#ifndef LT_OPS_SHAPE_H
#define LT_OPS_SHAPE_H

#include "ops/kernel.h"

/* Axis i of the list in option 0, which is where each of these ops has its axes. */
static inline int axis_at(const lt_call *c, int i, int ndim)
{
    int64_t axis = c->opt[0].i[i];
    return (int)(axis < 0 ? axis + ndim : axis);
}

/* axes[i]: the axis of x, which has ndim, that becomes axis i of y. */
static inline void axes_of_permute(const lt_call *c, int ndim, int *axes)
{
    for (int i = 0; i < ndim; i++)
        axes[i] = axis_at(c, i, ndim);
}

static inline void axes_of_transpose(const lt_call *c, int ndim, int *axes)
{
    int a = lt__given(c, 0) ? axis_at(c, 0, ndim) : ndim - 2;
    int b = lt__given(c, 0) ? axis_at(c, 1, ndim) : ndim - 1;
    for (int i = 0; i < ndim; i++)
        axes[i] = i == a ? b : i == b ? a : i;
}

enum { AXIS, FIRST, LAST };    /* options of slice */

static inline int64_t position(const lt_call *c, int k, int64_t dim)
{
    int64_t p = c->opt[k].i[0];
    return p < 0 ? p + dim : p;
}

enum { BEFORE, AFTER, VALUE }; /* options of pad */

static inline int64_t amount(const lt_call *c, int k, int axis)
{
    return c->opt[k].i[c->opt[k].n == 1 ? 0 : axis];
}

#endif
