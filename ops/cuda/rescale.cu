/* rescale.cu - the CUDA side of rescale.c and ledger.c: what is found in gradients and losses stays
 * on the device, where it decides on the step. */
#include "ops/cuda/reduction.h"

enum { BLOCKS = 1024 };       /* at most, and so many findings lie in cuda->partial */

struct finds {
    typedef lt_found Acc;
    static __device__ lt_found start() { return lt_found{0, 0}; }
    static __device__ lt_found join(lt_found a, lt_found b)
    {
        return lt_found{a.largest > b.largest ? a.largest : b.largest,
                        a.not_finite + b.not_finite};
    }
};

static __device__ lt_found find_in(double value)
{
    bool finite = value - value == 0;
    return lt_found{finite ? fabs(value) : 0, !finite};
}

/* x = by * x, if it is to be; and what was found in it. */
template <bool RESCALE, class E>
__global__ void __launch_bounds__(LT_THREADS)
    find_kernel(E *x, int64_t count, double by, lt_found *found)
{
    lt_found seen = finds::start();
    int64_t stride = (int64_t)gridDim.x * LT_THREADS;
    for (int64_t i = (int64_t)blockIdx.x * LT_THREADS + threadIdx.x; i < count; i += stride) {
        double was = (double)lt__value(x[i]);
        if (RESCALE)
            x[i] = lt_element<E>::of((lt_wide<E>)(was * by));
        seen = finds::join(seen, find_in(was));
    }
    seen = lt__join_lanes<finds>(seen, 1, LT_THREADS);
    if (threadIdx.x == 0)
        found[blockIdx.x] = seen;
}

/* In the block's first thread: all n of them. */
static __device__ lt_found all_found(const lt_found *found, int n)
{
    lt_found seen = finds::start();
    for (int i = threadIdx.x; i < n; i += LT_THREADS)
        seen = finds::join(seen, found[i]);
    return lt__join_lanes<finds>(seen, 1, LT_THREADS);
}

static __global__ void __launch_bounds__(LT_THREADS)
    join_found(const lt_found *found, int n, double by, lt_found *row)
{
    lt_found seen = all_found(found, n);
    if (threadIdx.x == 0)
        *row = lt_found{by * seen.largest, seen.not_finite};
}

/* As many findings come of count elements. */
static int64_t blocks_of(int64_t count)
{
    return lt__least(lt__cuts(count, LT_THREADS * 8), BLOCKS);
}

template <bool RESCALE, class E>
static lt_status launch(const lt_cuda *cuda, void *data, int64_t count, double by, void *partial)
{
    return lt__launch(cuda, blocks_of(count), find_kernel<RESCALE, E>, (E *)data, count, by,
                      (lt_found *)partial);
}

template <bool RESCALE>
static lt_status find(const lt_cuda *cuda, void *data, int64_t count, int dtype, double by,
                      void *partial)
{
    if (dtype == LT_F64)
        return launch<RESCALE, double>(cuda, data, count, by, partial);
    LT_CUDA_FLOATS(cuda, dtype, E,
                   return (launch<RESCALE, E>(cuda, data, count, by, partial));)
}

static lt_status join(const lt_cuda *cuda, const void *partial, int64_t count, double by,
                      lt_found *found)
{
    return lt__launch(cuda, 1, join_found, (const lt_found *)partial, (int)blocks_of(count), by,
                      found);
}

lt_status lt__cuda_rescale(lt_tensor *x, double by, lt_found *found)
{
    const lt_cuda *cuda = lt__cuda(x->ctx);
    LT_TRY(find<true>(cuda, x->data, x->count, x->dtype, by, cuda->partial));
    return found ? join(cuda, cuda->partial, x->count, 1, found) : LT_OK;
}

lt_status lt__cuda_find_scaled(const lt_tensor *x, double by, lt_found *found)
{
    const lt_cuda *cuda = lt__cuda(x->ctx);
    LT_TRY(find<false>(cuda, x->data, x->count, x->dtype, 1, cuda->partial));
    return join(cuda, cuda->partial, x->count, by, found);
}

lt_status lt__cuda_find(const lt_cuda *cuda, const void *data, int64_t count, int dtype,
                        void *partial, lt_found *found)
{
    LT_TRY(find<false>(cuda, (void *)data, count, dtype, 1, partial));
    return join(cuda, partial, count, 1, found);
}

size_t lt__cuda_rescale_bytes(void) { return BLOCKS * sizeof(lt_found); }

/* ==== Verdicts ================================================================================ */

static __global__ void __launch_bounds__(LT_THREADS)
    judge_kernel(const lt_found *rows, int n, lt_step_check *check)
{
    lt_found seen = all_found(rows, n);
    if (threadIdx.x > 0)
        return;
    check->found = seen;
    if (seen.not_finite > 0)
        check->skip = 1;
}

lt_status lt__cuda_judge(lt_device *device, const lt_found *rows, int n, lt_step_check *check)
{
    lt_cuda *cuda = (lt_cuda *)device;
    (void)cudaSetDevice(cuda->index);
    return lt__launch(cuda, 1, judge_kernel, rows, n, check);
}

/* Each block looks at all rows: they are few, and only leaves that nobody optimizes come here. */
template <class E>
__global__ void __launch_bounds__(LT_THREADS)
    pardon_kernel(E *x, int64_t count, const lt_found *left, const lt_found *rows, int n)
{
    if (left->not_finite == 0)
        return;
    bool found = false;
    for (int i = 0; i < n; i++)
        found |= rows[i].not_finite > 0;
    int64_t i = (int64_t)blockIdx.x * LT_THREADS + threadIdx.x;
    if (!found && i < count)
        x[i] = lt_element<E>::of(0);
}

template <class E>
static lt_status launch_pardon(const lt_cuda *cuda, lt_tensor *x, const lt_found *left,
                               const lt_found *rows, int n)
{
    return lt__launch(cuda, lt__cuts(x->count, LT_THREADS), pardon_kernel<E>, (E *)x->data,
                      x->count, left, rows, n);
}

lt_status lt__cuda_pardon(lt_tensor *x, const lt_found *left, const lt_found *rows, int n)
{
    const lt_cuda *cuda = lt__cuda(x->ctx);
    if (x->dtype == LT_F64)
        return launch_pardon<double>(cuda, x, left, rows, n);
    LT_CUDA_FLOATS(cuda, x->dtype, E, return launch_pardon<E>(cuda, x, left, rows, n);)
}

template <class E> __global__ void check_kernel(const E *loss, lt_step_check *check)
{
    double value = (double)lt__value(*loss);
    if (threadIdx.x > 0 || value - value == 0 || check->loss != 0)
        return;
    check->loss = value;
    check->skip = 1;
}

lt_status lt__cuda_check_loss(lt_tensor *loss, lt_step_check *check)
{
    const lt_cuda *cuda = lt__cuda(loss->ctx);
    if (loss->dtype == LT_F64)
        return lt__launch(cuda, 1, check_kernel<double>, (const double *)loss->data, check);
    LT_CUDA_FLOATS(cuda, loss->dtype, E,
                   return lt__launch(cuda, 1, check_kernel<E>, (const E *)loss->data, check);)
}

static __global__ void clip_kernel(const double *squares, double most, lt_step_check *check)
{
    double norm = sqrt(*squares);
    if (threadIdx.x > 0)
        return;
    check->factor = norm > most ? most / norm : 1;
    if (norm - norm == 0)
        return;
    check->norm = norm;
    check->skip = 1;
}

lt_status lt__cuda_clip(lt_tensor *squares, double most, lt_step_check *check)
{
    return lt__launch(lt__cuda(squares->ctx), 1, clip_kernel, (const double *)squares->data, most,
                      check);
}
