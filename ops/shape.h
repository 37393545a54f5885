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

/* ==== Boxes: slice, pad, cat ================================================================== */

/* The position of a dense tensor, the part, in another one, the whole. An axis that the part fills
 * is merged with the axis before it, so the last axis is contiguous in both. Starts as no_axes, a
 * single axis of size 1. */
typedef struct box {
    int ndim;
    int64_t part[LT_MAX_DIMS], whole[LT_MAX_DIMS]; /* dims */
    int64_t first[LT_MAX_DIMS];                    /* start of the part in the whole */
} box;

static const box no_axes = {1, {1}, {1}, {0}};

/* Appends an axis, given the sizes of the part and the whole, and the part's start. */
static inline void add_axis(box *b, int64_t part, int64_t whole, int64_t first)
{
    int i = b->ndim - 1;
    if (part != whole && b->whole[i] != 1) {
        i = b->ndim++;
        b->part[i] = b->whole[i] = 1;
        b->first[i] = 0;
    }
    b->part[i] *= part;
    b->whole[i] *= whole;
    b->first[i] = b->first[i] * whole + first;
}

/* The part with positions [first, first + count) of one axis, and all positions of the others. */
static inline box box_along(int ndim, const int64_t *whole, int axis, int64_t first, int64_t count)
{
    box b = no_axes;
    for (int i = 0; i < ndim; i++)
        add_axis(&b, i == axis ? count : whole[i], whole[i], i == axis ? first : 0);
    return b;
}

/* The box of a slice in a tensor with the dims of x. */
static inline box slice_box(const lt_call *c, const lt_tensor *like)
{
    int axis = axis_at(c, AXIS, like->ndim);
    int64_t dim = like->dims[axis], first = position(c, FIRST, dim), last = position(c, LAST, dim);
    return box_along(like->ndim, like->dims, axis, first, last - first + 1);
}

/* The box of x in a tensor with the dims of y, the padded x. */
static inline box pad_box(const lt_call *c, const lt_tensor *y)
{
    box b = no_axes;
    for (int i = 0; i < y->ndim; i++) {
        int64_t before = amount(c, BEFORE, i), after = amount(c, AFTER, i);
        add_axis(&b, y->dims[i] - before - after, y->dims[i], before);
    }
    return b;
}

#endif
