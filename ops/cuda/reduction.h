/* reduction.h - reductions of many elements to few on CUDA: sums, maxima, minima and argmax.
 *
 * A reduction treats its elements as (outer, rows, width) and reduces the rows. A thread block
 * processes some columns of one part of the rows, strided over its threads, then joins the threads'
 * accumulators in a tree. If there are few columns and many rows, the rows are split into parts to
 * occupy all multiprocessors, and another pass joins the parts. The split and the order depend only
 * on the shape, so that results are bit-identical in every run.
 */
#ifndef LT_OPS_CUDA_REDUCTION_H
#define LT_OPS_CUDA_REDUCTION_H

#include "ops/cuda/cuda.h"

typedef struct lt_reduction_pass {
    int64_t outer, rows, width;
    int64_t part;           /* rows per part */
    unsigned parts, blocks; /* parts of the rows; blocks that cover the columns */
    /* threads of a block along width, rows and outer. Their product is LT_THREADS */
    int columns, lanes, group;
    int run;   /* adjacent rows that a thread reads per iteration */
    bool wide; /* loads a run with one instruction */
} lt_reduction_pass;

/* in the worst case every second axis is reduced, in one or two passes each */
enum { LT_MAX_PASSES = LT_MAX_DIMS };

typedef struct lt_reduction_plan {
    int n;
    lt_reduction_pass pass[LT_MAX_PASSES];
} lt_reduction_plan;

/* Plans the reduction of a dense tensor over the axes in mask. bytes: size of an element. */
void lt__plan_reduction(lt_reduction_plan *p, int ndim, const int64_t *dims, uint32_t mask,
                        size_t bytes);
/* Plans the reduction of n elements to one. */
static inline lt_reduction_plan lt__plan_all(int64_t n, size_t bytes)
{
    lt_reduction_plan p;
    lt__plan_reduction(&p, 1, &n, 1, bytes);
    return p;
}
/* Bytes of scratch for the accumulators between passes. bytes: size of one accumulator. */
size_t lt__reduction_scratch(const lt_reduction_plan *p, size_t bytes);

typedef struct lt_reduction_end { /* turns the final accumulators into results */
    void *out;
    int dtype;      /* lt_dtype of out */
    bool root, add; /* take the square root; add to the values in out */
    double divisor; /* divisor of sums, unless root is set */
} lt_reduction_end;

/* A kind of reduction is a type with In, Acc, Joined (the kind that joins accumulators) and the
 * device functions
 *     static Acc start();                       the identity of join()
 *     static Acc reduce(Acc a, In x, int64_t row)
 *     static Acc join(Acc a, Acc b)             the rows of a and b may interleave
 *     static void end(const lt_reduction_end &e, int64_t i, Acc a)
 */

/* Joins the accumulators of each set of `lanes` threads that are `columns` apart, and returns the
 * result to every thread of the set. All threads of the block must call it. A second call for the
 * same F overwrites the slots, so it needs a barrier before it, unless only lane 0 uses the result:
 * lane 0 reads its own slot. */
template <class F>
__device__ inline typename F::Acc lt__join_lanes(typename F::Acc a, int columns, int lanes)
{
    __shared__ typename F::Acc all[LT_THREADS];
    int lane = (int)threadIdx.x / columns % lanes;
    all[threadIdx.x] = a;
    __syncthreads();
    for (int half = lanes / 2; half > 0; half /= 2) {
        if (lane < half)
            all[threadIdx.x] = F::join(all[threadIdx.x], all[threadIdx.x + half * columns]);
        __syncthreads();
    }
    return all[threadIdx.x - lane * columns];
}

/* Reduces the elements of one thread: rows first, first + step, ..., each the start of a run of
 * p.run rows. */
template <class F>
__device__ inline typename F::Acc lt__reduce_rows(const lt_reduction_pass &p,
                                                  const typename F::In *x, int64_t first,
                                                  int64_t last, int64_t step)
{
    typedef typename F::In In;
    enum { V = sizeof(In) < 16 ? 16 / sizeof(In) : 1 };
    typename F::Acc a = F::start();
    if (p.run == 1) {
#pragma unroll 4
        for (int64_t row = first; row < last; row += step)
            a = F::reduce(a, x[row * p.width], row);
        return a;
    }
    for (int64_t row = first; row < last; row += step) {
        if (p.wide) {
            lt_pack<In, V> v = *(const lt_pack<In, V> *)(x + row);
            for (int k = 0; k < V; k++)
                a = F::reduce(a, v.at[k], row + k);
        } else {
            for (int64_t r = row; r < row + V && r < last; r++)
                a = F::reduce(a, x[r], r);
        }
    }
    return a;
}

/* On sm_100 ptxas spills four bytes in some reductions unless it knows the available registers. */
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ == 1000
#define LT_REDUCTION_BOUNDS LT_FOUR_BLOCKS
#else
#define LT_REDUCTION_BOUNDS __launch_bounds__(LT_THREADS)
#endif

/* left receives the accumulators if more passes follow; it is NULL in the last pass. */
template <class F>
__global__ void LT_REDUCTION_BOUNDS
lt__reduction_kernel(const __grid_constant__ lt_reduction_pass p, const typename F::In *x,
                     typename F::Acc *left, const lt_reduction_end end)
{
    unsigned above = blockIdx.x / p.blocks;
    int64_t column = (int64_t)(blockIdx.x % p.blocks) * p.columns + threadIdx.x % p.columns;
    int64_t part = above % p.parts;
    int64_t o = (int64_t)(above / p.parts) * p.group + threadIdx.x / (p.columns * p.lanes);
    int lane = (int)threadIdx.x / p.columns % p.lanes;
    int64_t first = part * p.part, last = first + p.part < p.rows ? first + p.part : p.rows;
    bool mine = column < p.width && o < p.outer;
    typename F::Acc a = F::start();
    if (mine)
        a = lt__reduce_rows<F>(p, x + o * p.rows * p.width + column, first + (int64_t)lane * p.run,
                               last, (int64_t)p.lanes * p.run);
    a = lt__join_lanes<F>(a, p.columns, p.lanes);
    int64_t to = (o * p.parts + part) * p.width + column;
    if (mine && lane == 0 && left)
        left[to] = a;
    else if (mine && lane == 0)
        F::end(end, to, a);
}

static inline int64_t lt__reduction_blocks(const lt_reduction_pass *p)
{
    return lt__ceil_div(p->outer, p->group) * p->parts * p->blocks;
}

/* Whether the elements of a pass can be loaded 16 bytes at a time. */
static inline bool lt__is_wide(const lt_reduction_pass *p, const void *x)
{
    return p->run > 1 && (uintptr_t)x % 16 == 0 && p->rows % p->run == 0;
}

template <class F>
lt_status lt__reduction_pass(const lt_cuda *cuda, lt_reduction_pass p, const void *x, void *left,
                             const lt_reduction_end &end)
{
    p.wide = lt__is_wide(&p, x);
    return lt__launch(cuda, lt__reduction_blocks(&p), lt__reduction_kernel<F>, p,
                      (const typename F::In *)x, (typename F::Acc *)left, end);
}

/* Runs all passes over x. scratch: lt__reduction_scratch() bytes. */
template <class F>
lt_status lt__reduce(const lt_cuda *cuda, const lt_reduction_plan *plan, const void *x,
                     const lt_reduction_end &end, void *scratch)
{
    typedef typename F::Acc Acc;
    for (int i = 0; i < plan->n; i++) {
        const lt_reduction_pass *p = &plan->pass[i];
        void *left = i < plan->n - 1 ? scratch : NULL;
        LT_TRY(i == 0 ? lt__reduction_pass<F>(cuda, *p, x, left, end)
                      : lt__reduction_pass<typename F::Joined>(cuda, *p, x, left, end));
        x = left;
        scratch = (char *)scratch +
                  lt__aligned((size_t)(p->outer * p->parts * p->width) * sizeof(Acc));
    }
    return LT_OK;
}

/* ==== Sums ==================================================================================== */

template <class T> __device__ inline void lt__put_sum(void *out, int64_t i, bool add, double value)
{
    T *to = (T *)out + i;
    lt_wide<T> sum = (lt_wide<T>)value;
    *to = lt_element<T>::of(add ? lt__value(*to) + sum : sum);
}

/* Sums in double. The square root or the quotient is rounded to the dtype of the result. */
template <class E> struct lt_sum_reduction {
    typedef E In;
    typedef double Acc;
    typedef lt_sum_reduction<double> Joined;
    static __device__ double start() { return 0; }
    static __device__ double reduce(double a, E x, int64_t) { return a + (double)lt__value(x); }
    static __device__ double join(double a, double b) { return a + b; }
    static __device__ void end(const lt_reduction_end &e, int64_t i, double a)
    {
        double value = e.root ? sqrt(a) : a / e.divisor;
        if (e.dtype == LT_F32)
            lt__put_sum<float>(e.out, i, e.add, value);
        else if (e.dtype == LT_F16)
            lt__put_sum<__half>(e.out, i, e.add, value);
        else if (e.dtype == LT_BF16)
            lt__put_sum<__nv_bfloat16>(e.out, i, e.add, value);
        else
            lt__put_sum<double>(e.out, i, e.add, value);
    }
};

template <class E> struct lt_squares_reduction : lt_sum_reduction<E> {
    static __device__ double reduce(double a, E x, int64_t)
    {
        return a + (double)lt__value(x) * (double)lt__value(x);
    }
};

#endif
