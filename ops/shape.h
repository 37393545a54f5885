/* shape.h - reads the options of the ops in shape.c, for the CPU and CUDA. The shape rules have
 * already checked the options. */
#ifndef LT_OPS_SHAPE_H
#define LT_OPS_SHAPE_H

#include "ops/kernel.h"

/* Entry i of option 0, the axes of transpose, permute, slice and cat, mapped to 0..ndim-1. */
static inline int axis_at(const lt_call *c, int i, int ndim)
{
    int64_t axis = c->opt[0].i[i];
    return (int)(axis < 0 ? axis + ndim : axis);
}

/* axes[i] = the axis of x that becomes axis i of y; both have ndim axes. */
static inline void axes_of_permute(const lt_call *c, int ndim, int *axes)
{
    for (int i = 0; i < ndim; i++)
        axes[i] = axis_at(c, i, ndim);
}

/* The same for transpose, which swaps two axes, by default the last two. */
static inline void axes_of_transpose(const lt_call *c, int ndim, int *axes)
{
    int a = lt__given(c, 0) ? axis_at(c, 0, ndim) : ndim - 2;
    int b = lt__given(c, 0) ? axis_at(c, 1, ndim) : ndim - 1;
    for (int i = 0; i < ndim; i++)
        axes[i] = i == a ? b : i == b ? a : i;
}

enum { AXIS, FIRST, LAST }; /* options of slice */

/* Option k of slice as a position in 0..dim-1; negative positions count from the end. */
static inline int64_t position(const lt_call *c, int k, int64_t dim)
{
    int64_t p = c->opt[k].i[0];
    return p < 0 ? p + dim : p;
}

enum { BEFORE, AFTER, VALUE }; /* options of pad */

/* How many elements to add to an axis. Option k, BEFORE or AFTER, has one count for all axes or one
 * per axis. */
static inline int64_t amount(const lt_call *c, int k, int axis)
{
    return c->opt[k].i[c->opt[k].n == 1 ? 0 : axis];
}

#endif
