/* rescale.cu - the CUDA side of rescale.c and grad_table.c. The statistics of gradients and losses
 * stay on the device, where they decide whether the step is applied. A kernel measures each
 * gradient in parts. One kernel joins the parts of all gradients of a step. */
#include "ops/cuda/reduction.h"

struct stats_join {
    typedef lt_grad_stats Acc;
    static __device__ lt_grad_stats start() { return lt_grad_stats{0, 0}; }
    static __device__ lt_grad_stats join(lt_grad_stats a, lt_grad_stats b)
    {
        return lt_grad_stats{a.largest > b.largest ? a.largest : b.largest,
                             a.not_finite + b.not_finite};
    }
};

static __device__ lt_grad_stats measure_element(double value)
{
    bool finite = value - value == 0;
    return lt_grad_stats{finite ? fabs(value) : 0, !finite};
}

/* Measures `from`, and sets to = by * from unless `to` is NULL. Each block writes a part of *row,
 * which may be NULL. times: for row->by. */
template <class To, class From>
LT_KERNEL measure_kernel(To *to, const From *from, int64_t count, double by, lt_grad_row *row,
                         double times, bool wide)
{
    enum { V = 16 / sizeof(To) };
    lt_grad_stats seen = stats_join::start();
    int64_t stride = (int64_t)gridDim.x * LT_THREADS * V;
    for (int64_t i = ((int64_t)blockIdx.x * LT_THREADS + threadIdx.x) * V; i < count; i += stride) {
        lt_pack<From, V> x = lt__load<V>(from, i, count, wide);
        lt_pack<To, V> y;
        for (int k = 0; k < V; k++) {
            double was = (double)lt__value(x.at[k]);
            seen = stats_join::join(seen, measure_element(was));
            y.at[k] = lt_element<To>::of((lt_wide<To>)(was * by));
        }
        if (to)
            lt__store(to, i, count, wide, y);
    }
    seen = lt__join_lanes<stats_join>(seen, 1, LT_THREADS);
    if (threadIdx.x > 0 || !row)
        return;
    row->part[blockIdx.x] = seen;
    if (blockIdx.x == 0) {
        row->parts = gridDim.x;
        row->by = times;
    }
}

/* Joins n statistics. Only the block's first thread gets the result. */
static __device__ lt_grad_stats join_all(const lt_grad_stats *stats, int64_t n)
{
    lt_grad_stats seen = stats_join::start();
    for (int64_t i = threadIdx.x; i < n; i += LT_THREADS)
        seen = stats_join::join(seen, stats[i]);
    return lt__join_lanes<stats_join>(seen, 1, LT_THREADS);
}

/* Each block joins the parts of one row. */
static LT_KERNEL join_kernel(const lt_grad_row *rows, lt_grad_stats *stats)
{
    const lt_grad_row *row = &rows[blockIdx.x];
    lt_grad_stats seen = join_all(row->part, row->parts);
    if (threadIdx.x == 0)
        stats[blockIdx.x] = lt_grad_stats{row->by * seen.largest, seen.not_finite};
}

template <class To, class From>
static lt_status launch(const lt_cuda *cuda, void *to, const void *from, int64_t count, double by,
                        lt_grad_row *row, double times)
{
    int64_t blocks = lt__min(lt__ceil_div(count, LT_THREADS * 8), LT_GRAD_PARTS);
    return lt__launch(cuda, blocks > 0 ? blocks : 1, measure_kernel<To, From>, (To *)to,
                      (const From *)from, count, by, row, times, lt__are_wide(to, from));
}

/* The same for arrays of one dtype. */
static lt_status measure(const lt_cuda *cuda, void *to, const void *from, int64_t count, int dtype,
                         double by, lt_grad_row *row, double times)
{
    LT_CUDA_ANY_FLOAT(cuda, dtype, E, return (launch<E, E>(cuda, to, from, count, by, row, times));)
}

static lt_status join(const lt_cuda *cuda, const lt_grad_row *rows, int n, lt_grad_stats *stats)
{
    return lt__launch(cuda, n, join_kernel, rows, stats);
}

lt_status lt__cuda_rescale(lt_tensor *x, const lt_tensor *from, double by, lt_grad_row *row)
{
    const lt_cuda *cuda = lt__cuda(x->ctx);
    if (from->dtype == x->dtype)
        return measure(cuda, x->data, from->data, x->count, x->dtype, by, row, 1);
    if (from->dtype == LT_F16)
        return launch<float, __half>(cuda, x->data, from->data, x->count, by, row, 1);
    return launch<float, __nv_bfloat16>(cuda, x->data, from->data, x->count, by, row, 1);
}

lt_status lt__cuda_measure_scaled(const lt_tensor *x, double by, lt_grad_row *row)
{
    return measure(lt__cuda(x->ctx), NULL, x->data, x->count, x->dtype, 1, row, by);
}

lt_status lt__cuda_measure(const lt_cuda *cuda, const void *data, int64_t count, int dtype,
                           lt_grad_row *row, lt_grad_stats *stats)
{
    LT_TRY(measure(cuda, NULL, data, count, dtype, 1, row, 1));
    return join(cuda, row, 1, stats);
}

lt_status lt__cuda_join(lt_device *device, const lt_grad_row *rows, int n, lt_grad_stats *stats)
{
    return join(lt__cuda_enter(device), rows, n, stats);
}

/* ==== Step checks ============================================================================= */

static LT_KERNEL check_grads_kernel(const lt_grad_stats *stats, int n, lt_step_check *check)
{
    lt_grad_stats seen = join_all(stats, n);
    if (threadIdx.x > 0)
        return;
    check->grads = seen;
    if (seen.not_finite > 0)
        check->skip = 1;
}

lt_status lt__cuda_check_grads(lt_device *device, const lt_grad_stats *stats, int n,
                               lt_step_check *check)
{
    return lt__launch(lt__cuda_enter(device), 1, check_grads_kernel, stats, n, check);
}

/* Every block reads all statistics. They are few, and this only runs for leaves without an
 * optimizer. */
template <class E>
LT_KERNEL zero_leftover_kernel(E *x, int64_t count, const lt_grad_stats *leftover,
                               const lt_grad_stats *stats, int n)
{
    if (leftover->not_finite == 0)
        return;
    bool found = false;
    for (int i = 0; i < n; i++)
        found |= stats[i].not_finite > 0;
    int64_t i = (int64_t)blockIdx.x * LT_THREADS + threadIdx.x;
    if (!found && i < count)
        x[i] = lt_element<E>::of(0);
}

lt_status lt__cuda_zero_leftover(lt_tensor *x, const lt_grad_stats *leftover,
                                 const lt_grad_stats *stats, int n)
{
    const lt_cuda *cuda = lt__cuda(x->ctx);
    LT_CUDA_ANY_FLOAT(cuda, x->dtype, E,
                      return lt__launch(cuda, lt__ceil_div(x->count, LT_THREADS),
                                        zero_leftover_kernel<E>, (E *)x->data, x->count, leftover,
                                        stats, n);)
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
    LT_CUDA_ANY_FLOAT(cuda, loss->dtype, E,
                      return lt__launch(cuda, 1, check_kernel<E>, (const E *)loss->data, check);)
}

static __global__ void clip_kernel(const double *squares, double max_norm, lt_step_check *check)
{
    double norm = sqrt(*squares);
    if (threadIdx.x > 0)
        return;
    check->factor = norm > max_norm ? max_norm / norm : 1;
    if (norm - norm == 0)
        return;
    check->norm = norm;
    check->skip = 1;
}

lt_status lt__cuda_clip(lt_tensor *squares, double max_norm, lt_step_check *check)
{
    return lt__launch(lt__cuda(squares->ctx), 1, clip_kernel, (const double *)squares->data,
                      max_norm, check);
}
