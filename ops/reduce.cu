/* reduce.cu - the CUDA side of reduce.c, and the planning of reductions. */
#include "ops/cuda/reduction.h"
#include "ops/cuda/map.h"
#include "ops/reduce.h"

/* ==== Planning ================================================================================ */

enum {
    ENOUGH_BLOCKS = 512, /* with this many blocks, rows are not split into parts */
    MIN_ROWS = 8,        /* rows per thread at least, so that a part is worth its join */
    ACCUMULATOR = 16     /* bytes of the largest accumulator; a load reads at most one */
};

/* bytes: size of an element of this pass. */
static void plan_pass(lt_reduction_plan *plan, int64_t outer, int64_t rows, int64_t width,
                      size_t bytes)
{
    lt_reduction_pass *p = &plan->pass[plan->n++];
    *p = lt_reduction_pass{};
    p->outer = outer;
    p->rows = rows;
    p->width = width;
    p->run = width == 1 && bytes < 16 ? (int)(16 / bytes) : 1;
    p->columns = lt__next_power_of_two(width, 32);
    p->lanes = lt__next_power_of_two(lt__ceil_div(rows, p->run), LT_THREADS / p->columns);
    p->group = LT_THREADS / p->columns / p->lanes;
    p->part = rows;
    p->parts = 1;
    p->blocks = (unsigned)lt__ceil_div(width, p->columns);
    int64_t turn = (int64_t)p->lanes * p->run, blocks = lt__reduction_blocks(p);
    if (blocks == 0 || blocks >= ENOUGH_BLOCKS || rows < 2 * MIN_ROWS * turn)
        return;
    int64_t parts = lt__min(rows / (MIN_ROWS * turn), lt__ceil_div(ENOUGH_BLOCKS, blocks));
    p->part = lt__ceil_div(lt__ceil_div(rows, parts), turn) * turn;
    p->parts = (unsigned)lt__ceil_div(rows, p->part);
}

void lt__plan_reduction(lt_reduction_plan *plan, int ndim, const int64_t *dims, uint32_t mask,
                        size_t bytes)
{
    lt_row_reduction rows[LT_MAX_DIMS];
    int n = lt__plan_rows(rows, ndim, dims, mask);
    plan->n = 0;
    for (int i = 0; i < n; i++) {
        plan_pass(plan, rows[i].outer, rows[i].rows, rows[i].width,
                  i == 0 ? bytes : (size_t)ACCUMULATOR);
        int64_t parts = plan->pass[plan->n - 1].parts;
        if (parts > 1)
            plan_pass(plan, rows[i].outer, parts, rows[i].width, ACCUMULATOR);
    }
}

size_t lt__reduction_scratch(const lt_reduction_plan *plan, size_t bytes)
{
    size_t sum = 0;
    for (int i = 0; i < plan->n - 1; i++) {
        const lt_reduction_pass *p = &plan->pass[i];
        sum += lt__aligned((size_t)(p->outer * p->parts * p->width) * bytes);
    }
    return sum;
}

/* ==== Kinds of reductions ===================================================================== */

/* Sums of integers, in 64 bits, wrapping. */
template <class E> struct integer_sum {
    typedef E In;
    typedef int64_t Acc;
    typedef integer_sum<int64_t> Joined;
    static __device__ int64_t start() { return 0; }
    static __device__ int64_t reduce(int64_t a, E x, int64_t) { return join(a, (int64_t)x); }
    static __device__ int64_t join(int64_t a, int64_t b)
    {
        return (int64_t)((uint64_t)a + (uint64_t)b);
    }
    static __device__ void end(const lt_reduction_end &e, int64_t i, int64_t a)
    {
        if (e.dtype == LT_I64)
            ((int64_t *)e.out)[i] = a;
        else
            ((float *)e.out)[i] = (float)((double)a / e.divisor);
    }
};

template <class T> struct lowest {
    static __device__ T of() { return lt__saturated<T>(-1e300); }
};
template <> struct lowest<float> {
    static __device__ float of() { return -INFINITY; }
};
template <class T> struct highest {
    static __device__ T of() { return lt__saturated<T>(1e300); }
};
template <> struct highest<float> {
    static __device__ float of() { return INFINITY; }
};

/* The largest or smallest element. A NaN wins. */
template <class E, bool MAX, class O = E> struct extreme {
    typedef E In;
    typedef lt_wide<E> Acc;
    typedef extreme<Acc, MAX, O> Joined;
    static __device__ Acc start() { return MAX ? lowest<Acc>::of() : highest<Acc>::of(); }
    static __device__ Acc reduce(Acc a, E e, int64_t) { return join(a, lt__value(e)); }
    static __device__ Acc join(Acc a, Acc x) { return (MAX ? x > a : x < a) || x != x ? x : a; }
    static __device__ void end(const lt_reduction_end &e, int64_t i, Acc a)
    {
        ((O *)e.out)[i] = lt_element<O>::of(a);
    }
};

/* The row of the largest element: the first among equals. A NaN wins. */
template <class T> struct place {
    T value;
    int64_t row;
};

template <class T> struct first_place {
    static __device__ place<T> join(place<T> a, place<T> b)
    {
        bool nan = b.value != b.value, was_nan = a.value != a.value;
        bool better = a.row < 0 || (nan && !was_nan) || b.value > a.value;
        bool as_good = nan == was_nan && (nan || b.value == a.value);
        return b.row >= 0 && (better || (as_good && b.row < a.row)) ? b : a;
    }
    static __device__ void end(const lt_reduction_end &e, int64_t i, place<T> a)
    {
        ((int64_t *)e.out)[i] = a.row;
    }
    static __device__ place<T> start() { return place<T>{0, -1}; } /* no element yet */
};

template <class T> struct joined_place : first_place<T> {
    typedef place<T> In, Acc;
    typedef joined_place<T> Joined;
    static __device__ Acc reduce(Acc a, In b, int64_t) { return first_place<T>::join(a, b); }
};

template <class E> struct argmax_place : first_place<lt_wide<E>> {
    typedef E In;
    typedef place<lt_wide<E>> Acc;
    typedef joined_place<lt_wide<E>> Joined;
    static __device__ Acc reduce(Acc a, E e, int64_t row)
    {
        return first_place<lt_wide<E>>::join(a, Acc{lt__value(e), row});
    }
};

/* ==== Forward ================================================================================= */

static void plan_axes(lt_reduction_plan *plan, const lt_call *c, const lt_tensor *x)
{
    lt__plan_reduction(plan, x->ndim, x->dims, lt__reduced_axes(c, x->ndim),
                       lt__cuda_dtype_bytes(x->dtype));
}

static size_t forward_scratch(const lt_call *c, bool backward)
{
    lt_reduction_plan plan;
    if (backward)
        return 0;
    plan_axes(&plan, c, c->in[0]);
    return lt__reduction_scratch(&plan, ACCUMULATOR);
}

template <class F> static lt_status reduce_axes(lt_call *c, double divisor, bool root)
{
    const lt_tensor *x = c->in[0], *y = c->out[0];
    lt_reduction_end end = {y->data, y->dtype, root, false, divisor};
    lt_reduction_plan plan;
    plan_axes(&plan, c, x);
    return lt__reduce<F>(lt__cuda(c->ctx), &plan, x->data, end, c->scratch);
}

static lt_status reduce_sum(lt_call *c, double divisor)
{
    switch (c->in[0]->dtype) {
    case LT_I64: return reduce_axes<integer_sum<int64_t>>(c, divisor, false);
    case LT_I32: return reduce_axes<integer_sum<int32_t>>(c, divisor, false);
    case LT_U8: return reduce_axes<integer_sum<uint8_t>>(c, divisor, false);
    default:
        LT_CUDA_FLOATS(lt__cuda(c->ctx), c->in[0]->dtype, E,
                       return reduce_axes<lt_sum_reduction<E>>(c, divisor, false);)
    }
}

static lt_status sum_fwd(lt_call *c) { return reduce_sum(c, 1); }

static lt_status mean_fwd(lt_call *c)
{
    return reduce_sum(c, (double)c->in[0]->count / (double)c->out[0]->count);
}

LT_CUDA_CALL(norm_fwd, FLOATS, c->in[0], reduce_axes<lt_squares_reduction<E>>(c, 1, true))
LT_CUDA_CALL(max_fwd, NUMERICS, c->in[0], reduce_axes<extreme<E, true>>(c, 1, false))
LT_CUDA_CALL(min_fwd, NUMERICS, c->in[0], reduce_axes<extreme<E, false>>(c, 1, false))
LT_CUDA_CALL(argmax_fwd, NUMERICS, c->in[0], reduce_axes<argmax_place<E>>(c, 1, false))

/* ==== Sums for broadcasting ops =============================================================== */

static lt_reduction_plan plan_to(const lt_tensor *dst, const lt_tensor *like)
{
    lt_reduction_plan plan;
    lt__plan_reduction(&plan, like->ndim, like->dims,
                       lt__stretched_axes(dst->ndim, dst->dims, like->ndim), sizeof(float));
    return plan;
}

size_t lt__cuda_sum_to_scratch(const lt_tensor *dst, const lt_tensor *like)
{
    lt_reduction_plan plan = plan_to(dst, like);
    return lt__reduction_scratch(&plan, sizeof(double));
}

lt_status lt__cuda_sum_to(const lt_cuda *cuda, lt_tensor *dst, const lt_tensor *like,
                          const float *src, bool add, void *scratch)
{
    lt_reduction_plan plan = plan_to(dst, like);
    lt_reduction_end end = {dst->data, dst->dtype, false, add, 1};
    return lt__reduce<lt_sum_reduction<float>>(cuda, &plan, src, end, scratch);
}

size_t lt__cuda_grad_scratch(const lt_call *c, bool backward)
{
    size_t max = 0;
    const lt_tensor *dz = backward ? c->d_out[0] : NULL;
    for (int i = 0; backward && i < c->n_in; i++) {
        if (!c->d_in[i] || !lt__is_stretched(c, i))
            continue;
        size_t need = lt__aligned((size_t)dz->count * sizeof(float)) +
                      lt__cuda_sum_to_scratch(c->d_in[i], dz);
        max = need > max ? need : max;
    }
    return max;
}

/* ==== Backward ================================================================================ */

/* n: number of elements that were reduced to one. */
template <class E> struct spread : lt_types<1, E> {
    float n;
    __device__ float operator()(float dy, float, float) const { return dy / n; }
};

template <class E> struct norm_dx : lt_types<3, E> {
    __device__ float operator()(float dy, float x, float y) const
    {
        return y == 0 ? 0 : dy * (x / y);
    }
};

/* 1 where x is the extreme y, else 0. A NaN is the extreme of its group. */
template <class E> struct is_extreme : lt_types<2, uint8_t, E, E> {
    __device__ uint8_t operator()(float x, float y, uint8_t) const
    {
        return x == y || (x != x && y != y);
    }
};

/* count: number of elements of the group that are the extreme. */
template <class E> struct extreme_dx : lt_types<3, E, E, uint8_t, int64_t> {
    __device__ float operator()(float dy, uint8_t mark, int64_t count) const
    {
        return mark ? dy / (float)count : 0;
    }
};

/* Plans a walk over dx. Bit k of `kept` is set if operand k has the shape of the output, with size
 * 1 in the reduced axes. */
static void walk_back(lt_walk *w, const lt_call *c, int n, uint32_t kept)
{
    const lt_tensor *dx = c->d_in[0];
    uint32_t mask = lt__reduced_axes(c, dx->ndim);
    int64_t dims[LT_MAX_DIMS];
    for (int i = 0; i < dx->ndim; i++)
        dims[i] = mask >> i & 1 ? 1 : dx->dims[i];
    lt__walk_over(w, dx->ndim, dx->dims);
    for (int k = 1; k < n; k++)
        if (kept >> k & 1)
            lt__walk_stretch(w, k, dx->ndim, dims);
    lt__walk_merge(w, n);
}

template <class E> static lt_status spread_back(lt_call *c, float n)
{
    spread<E> f;
    lt_walk w;
    f.n = n;
    walk_back(&w, c, 2, 1 << 1);
    return lt__map(lt__cuda(c->ctx), w, f, c->add & 1, c->d_in[0]->data, c->d_out[0]->data);
}

LT_CUDA_CALL(sum_bwd, FLOATS, c->d_in[0], spread_back<E>(c, 1))

static lt_status mean_bwd(lt_call *c)
{
    float n = c->d_out[0]->count ? (float)(c->d_in[0]->count / c->d_out[0]->count) : 1;
    LT_CUDA_FLOATS(lt__cuda(c->ctx), c->d_in[0]->dtype, E, return spread_back<E>(c, n);)
}

template <class E> static lt_status norm_back(lt_call *c)
{
    lt_walk w;
    walk_back(&w, c, 4, 1 << 1 | 1 << 3);
    return lt__map(lt__cuda(c->ctx), w, norm_dx<E>(), c->add & 1, c->d_in[0]->data,
                   c->d_out[0]->data, c->in[0]->data, c->out[0]->data);
}

LT_CUDA_CALL(norm_bwd, FLOATS, c->d_in[0], norm_back<E>(c))

/* The scratch of extreme_bwd(): a mark for each element of x, a count for each element of y, and
 * the scratch of the counting. */
typedef struct tally {
    lt_reduction_plan plan;
    size_t counts, partials, bytes; /* offsets of counts and counting scratch; total size */
} tally;

static tally tally_for(const lt_call *c)
{
    const lt_tensor *dx = c->d_in[0], *dy = c->d_out[0];
    tally t;
    lt__plan_reduction(&t.plan, dx->ndim, dx->dims, lt__reduced_axes(c, dx->ndim), sizeof(uint8_t));
    t.counts = lt__aligned((size_t)dx->count);
    t.partials = t.counts + lt__aligned((size_t)dy->count * sizeof(int64_t));
    t.bytes = t.partials + lt__reduction_scratch(&t.plan, sizeof(int64_t));
    return t;
}

static size_t extreme_scratch(const lt_call *c, bool backward)
{
    return backward ? tally_for(c).bytes : forward_scratch(c, false);
}

template <class E> static lt_status extreme_back(lt_call *c)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    tally t = tally_for(c);
    lt_walk w;
    void *marks = c->scratch, *counts = (char *)c->scratch + t.counts;
    lt_reduction_end end = {counts, LT_I64, false, false, 1};
    walk_back(&w, c, 3, 1 << 2);
    LT_TRY(lt__map(cuda, w, is_extreme<E>(), false, marks, c->in[0]->data, c->out[0]->data));
    LT_TRY(lt__reduce<integer_sum<uint8_t>>(cuda, &t.plan, marks, end,
                                            (char *)c->scratch + t.partials));
    walk_back(&w, c, 4, 1 << 1 | 1 << 3);
    return lt__map(cuda, w, extreme_dx<E>(), c->add & 1, c->d_in[0]->data, c->d_out[0]->data, marks,
                   counts);
}

LT_CUDA_CALL(extreme_bwd, FLOATS, c->d_in[0], extreme_back<E>(c))

void lt__cuda_reduce(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_sum], forward_scratch, sum_fwd, sum_bwd);
    lt__set_kernels(&op[LT_OP_mean], forward_scratch, mean_fwd, mean_bwd);
    lt__set_kernels(&op[LT_OP_norm], forward_scratch, norm_fwd, norm_bwd);
    lt__set_kernels(&op[LT_OP_max], extreme_scratch, max_fwd, extreme_bwd);
    lt__set_kernels(&op[LT_OP_min], extreme_scratch, min_fwd, extreme_bwd);
    lt__set_kernels(&op[LT_OP_argmax], forward_scratch, argmax_fwd, NULL);
}
