/* reduce.h - how a reduction over any set of axes is divided into passes, for the CPU (reduce.c)
 * and CUDA (reduce.cu). */
#ifndef LT_OPS_REDUCE_H
#define LT_OPS_REDUCE_H

#include "ops/kernel.h"

/* A reduction of the rows of (outer, rows, width). */
typedef struct lt_row_reduction {
    int64_t outer, rows, width;
} lt_row_reduction;

/* Plans the reduction of dims[0..ndim) over the axes in mask, where bit i stands for axis i.
 * Neighbouring axes of one kind, kept or reduced, are merged, and axes of size 1 are dropped. The
 * reduced axes are reduced from the last to the first. Returns the number of entries in list, at
 * least 1. */
static inline int lt__plan_rows(lt_row_reduction list[LT_MAX_DIMS], int ndim, const int64_t *dims,
                                uint32_t mask)
{
    int64_t size[LT_MAX_DIMS], width = 1;
    bool reduced[LT_MAX_DIMS];
    int n = 0, planned = 0;
    for (int i = 0; i < ndim; i++) {
        bool r = mask >> i & 1;
        if (dims[i] == 1)
            continue;
        if (n > 0 && reduced[n - 1] == r) {
            size[n - 1] *= dims[i];
        } else {
            size[n] = dims[i];
            reduced[n++] = r;
        }
    }
    for (int g = n - 1; g >= 0; g--) {
        lt_row_reduction pass = {1, size[g], width};
        for (int i = 0; i < g; i++)
            pass.outer *= size[i];
        if (reduced[g])
            list[planned++] = pass;
        else
            width *= size[g];
    }
    if (planned == 0) {
        lt_row_reduction copy = {1, 1, width};
        list[planned++] = copy;
    }
    return planned;
}

/* The axes of dims[0..ndim), as a mask, in which dst has size 1 or no axis. Axes are matched from
 * the last one backwards. */
static inline uint32_t lt__stretched_axes(int dst_ndim, const int64_t *dst_dims, int ndim)
{
    uint32_t mask = 0;
    for (int i = 1; i <= ndim; i++)
        if (i > dst_ndim || dst_dims[dst_ndim - i] == 1)
            mask |= 1u << (ndim - i);
    return mask;
}

/* The axes that option 0 names, as lt__axes() finds them. The shape rule has checked them. */
static inline uint32_t lt__reduced_axes(const lt_call *c, int ndim)
{
    const lt_opt *axes = &c->opt[0];
    uint32_t mask = axes->n == 0 ? (1u << ndim) - 1 : 0;
    for (int i = 0; i < axes->n; i++)
        mask |= 1u << (axes->i[i] < 0 ? axes->i[i] + ndim : axes->i[i]);
    return mask;
}

#endif
