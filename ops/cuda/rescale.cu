/* rescale.cu - the CUDA side of rescale.c and grad_table.c. The statistics of gradients and losses
 * stay on the device, where they decide whether the step is applied. */
#include "ops/cuda/reduction.h"

enum { BLOCKS = 1024 }; /* at most; cuda->partial has one lt_grad_stats for each */

struct stats_join {
    typedef lt_grad_stats Acc;
    static __device__ lt_grad_stats start() { return lt_grad_stats{0, 0}; }
    static __device__ lt_grad_stats join(lt_grad_stats a, lt_grad_stats b)
    {
        return lt_grad_stats{a.largest > b.largest ? a.largest : b.largest,
                             a.not_finite + b.not_finite};
    }
};

static __device__ lt_grad_stats measure_elements(double value)
{
    bool finite = value - value == 0;
    return lt_grad_stats{finite ? fabs(value) : 0, !finite};
}

/* Measures x, and multiplies it by `by` if RESCALE. */
template <bool RESCALE, class E>
__global__ void __launch_bounds__(LT_THREADS)
    measure_kernel(E *x, int64_t count, double by, lt_grad_stats *stats)
{
    lt_grad_stats seen = stats_join::start();
    int64_t stride = (int64_t)gridDim.x * LT_THREADS;
    for (int64_t i = (int64_t)blockIdx.x * LT_THREADS + threadIdx.x; i < count; i += stride) {
        double was = (double)lt__value(x[i]);
        if (RESCALE)
            x[i] = lt_element<E>::of((lt_wide<E>)(was * by));
        seen = stats_join::join(seen, measure_elements(was));
    }
    seen = lt__join_lanes<stats_join>(seen, 1, LT_THREADS);
    if (threadIdx.x == 0)
        stats[blockIdx.x] = seen;
}

/* Joins n statistics. Only the block's first thread gets the result. */
static __device__ lt_grad_stats join_all(const lt_grad_stats *stats, int n)
{
    lt_grad_stats seen = stats_join::start();
    for (int i = threadIdx.x; i < n; i += LT_THREADS)
        seen = stats_join::join(seen, stats[i]);
    return lt__join_lanes<stats_join>(seen, 1, LT_THREADS);
}

static __global__ void __launch_bounds__(LT_THREADS)
    join_kernel(const lt_grad_stats *stats, int n, double by, lt_grad_stats *row)
{
    lt_grad_stats seen = join_all(stats, n);
    if (threadIdx.x == 0)
        *row = lt_grad_stats{by * seen.largest, seen.not_finite};
}

/* The number of blocks for count elements, and of the statistics that they write. */
static int64_t blocks_of(int64_t count)
{
    return lt__least(lt__ceil_div(count, LT_THREADS * 8), BLOCKS);
}

template <bool RESCALE, class E>
static lt_status launch(const lt_cuda *cuda, void *data, int64_t count, double by, void *partial)
{
    return lt__launch(cuda, blocks_of(count), measure_kernel<RESCALE, E>, (E *)data, count, by,
                      (lt_grad_stats *)partial);
}

template <bool RESCALE>
static lt_status measure(const lt_cuda *cuda, void *data, int64_t count, int dtype, double by,
                         void *partial)
{
    if (dtype == LT_F64)
        return launch<RESCALE, double>(cuda, data, count, by, partial);
    LT_CUDA_FLOATS(cuda, dtype, E, return (launch<RESCALE, E>(cuda, data, count, by, partial));)
}

static lt_status join(const lt_cuda *cuda, const void *partial, int64_t count, double by,
                      lt_grad_stats *stats)
{
    return lt__launch(cuda, 1, join_kernel, (const lt_grad_stats *)partial, (int)blocks_of(count),
                      by, stats);
}

lt_status lt__cuda_rescale(lt_tensor *x, double by, lt_grad_stats *stats)
{
    const lt_cuda *cuda = lt__cuda(x->ctx);
    LT_TRY(measure<true>(cuda, x->data, x->count, x->dtype, by, cuda->partial));
    return stats ? join(cuda, cuda->partial, x->count, 1, stats) : LT_OK;
}

lt_status lt__cuda_measure_scaled(const lt_tensor *x, double by, lt_grad_stats *stats)
{
    const lt_cuda *cuda = lt__cuda(x->ctx);
    LT_TRY(measure<false>(cuda, x->data, x->count, x->dtype, 1, cuda->partial));
    return join(cuda, cuda->partial, x->count, by, stats);
}

lt_status lt__cuda_measure(const lt_cuda *cuda, const void *data, int64_t count, int dtype,
                           void *partial, lt_grad_stats *stats)
{
    LT_TRY(measure<false>(cuda, (void *)data, count, dtype, 1, partial));
    return join(cuda, partial, count, 1, stats);
}

size_t lt__cuda_rescale_bytes(void) { return BLOCKS * sizeof(lt_grad_stats); }

/* ==== Step checks ============================================================================= */

static __global__ void __launch_bounds__(LT_THREADS)
    check_grads_kernel(const lt_grad_stats *rows, int n, lt_step_check *check)
{
    lt_grad_stats seen = join_all(rows, n);
    if (threadIdx.x > 0)
        return;
    check->grads = seen;
    if (seen.not_finite > 0)
        check->skip = 1;
}

lt_status lt__cuda_check_grads(lt_device *device, const lt_grad_stats *rows, int n,
                               lt_step_check *check)
{
    lt_cuda *cuda = (lt_cuda *)device;
    (void)cudaSetDevice(cuda->index);
    return lt__launch(cuda, 1, check_grads_kernel, rows, n, check);
}

/* Every block reads all rows. They are few, and this only runs for leaves without an optimizer. */
template <class E>
__global__ void __launch_bounds__(LT_THREADS)
    zero_leftover_kernel(E *x, int64_t count, const lt_grad_stats *leftover,
                         const lt_grad_stats *rows, int n)
{
    if (leftover->not_finite == 0)
        return;
    bool found = false;
    for (int i = 0; i < n; i++)
        found |= rows[i].not_finite > 0;
    int64_t i = (int64_t)blockIdx.x * LT_THREADS + threadIdx.x;
    if (!found && i < count)
        x[i] = lt_element<E>::of(0);
}

template <class E>
static lt_status launch_zero_leftover(const lt_cuda *cuda, lt_tensor *x,
                                      const lt_grad_stats *leftover, const lt_grad_stats *rows,
                                      int n)
{
    return lt__launch(cuda, lt__ceil_div(x->count, LT_THREADS), zero_leftover_kernel<E>,
                      (E *)x->data, x->count, leftover, rows, n);
}

lt_status lt__cuda_zero_leftover(lt_tensor *x, const lt_grad_stats *leftover,
                                 const lt_grad_stats *rows, int n)
{
    const lt_cuda *cuda = lt__cuda(x->ctx);
    if (x->dtype == LT_F64)
        return launch_zero_leftover<double>(cuda, x, leftover, rows, n);
    LT_CUDA_FLOATS(cuda, x->dtype, E, return launch_zero_leftover<E>(cuda, x, leftover, rows, n);)
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
