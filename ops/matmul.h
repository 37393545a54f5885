/* matmul.h - the sizes of matmul and linear, for the CPU (matmul.c) and CUDA (matmul.cu,
 * cuda/cublas_calls.c). */
#ifndef LT_OPS_MATMUL_H
#define LT_OPS_MATMUL_H

#include "ops/kernel.h"

/* linear: y (m, n) = x (m, k) w^T + b (n). Pointwise conv2d is the same, with w (n, 1, 1, k). */
typedef struct lt_linear_sizes {
    int64_t m, n, k;
} lt_linear_sizes;

static inline lt_linear_sizes lt__linear_sizes(const lt_tensor *w, const lt_tensor *y)
{
    lt_linear_sizes s = {lt__rows_of(y), w->dims[0], w->dims[w->ndim - 1]};
    return s;
}

/* matmul: how the leading axes of x (side 0) and y (side 1) pair up their matrices. */
typedef struct lt_pairs {
    int64_t m, n, k;      /* sizes of one product */
    int64_t total, of[2]; /* number of pairs; of matrices in x and in y */
    int n_lead;
    int64_t lead[LT_MAX_DIMS];    /* leading dims of the output */
    int64_t step[2][LT_MAX_DIMS]; /* steps in elements; 0 for a broadcast axis */
} lt_pairs;

static inline void lt__lead_steps(lt_pairs *s, int side, const lt_tensor *t)
{
    int64_t size = t->dims[t->ndim - 2] * t->dims[t->ndim - 1];
    s->of[side] = 1;
    for (int i = s->n_lead - 1; i >= 0; i--) {
        int axis = i - s->n_lead + t->ndim - 2;
        int64_t dim = axis < 0 ? 1 : t->dims[axis];
        s->step[side][i] = dim == 1 ? 0 : s->of[side] * size;
        s->of[side] *= dim;
        if (dim != 1)
            s->lead[i] = dim;
    }
}

/* If y is a single matrix, the matrices of x are the rows of one matrix. */
static inline lt_pairs lt__pair_up(const lt_tensor *x, const lt_tensor *y)
{
    lt_pairs s;
    s.m = x->dims[x->ndim - 2];
    s.n = y->dims[y->ndim - 1];
    s.k = x->dims[x->ndim - 1];
    s.total = 1;
    s.n_lead = (x->ndim > y->ndim ? x->ndim : y->ndim) - 2;
    for (int i = 0; i < s.n_lead; i++)
        s.lead[i] = 1;
    lt__lead_steps(&s, 0, x);
    lt__lead_steps(&s, 1, y);
    for (int i = 0; i < s.n_lead; i++)
        s.total *= s.lead[i];
    if (s.of[1] == 1 && s.of[0] == s.total) {
        s.m *= s.total;
        s.total = s.of[0] = 1;
        s.n_lead = 0;
    }
    return s;
}

/* The offset, in elements, of the matrix that pair i takes from x or y. */
static inline int64_t lt__pair_offset(const lt_pairs *s, int side, int64_t i)
{
    int64_t offset = 0;
    for (int axis = s->n_lead - 1; axis >= 0 && s->total > 0; axis--) {
        offset += i % s->lead[axis] * s->step[side][axis];
        i /= s->lead[axis];
    }
    return offset;
}

#endif
