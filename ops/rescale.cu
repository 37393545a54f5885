/* rescale.cu - the CUDA side of rescale.c: two kernels, and a wait for what they have found. */
#include "ops/cuda_fold.h"

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

template <class E>
__global__ void __launch_bounds__(LT_THREADS)
    rescale_kernel(E *x, int64_t count, double by, lt_found *found)
{
    lt_found seen = finds::start();
    int64_t stride = (int64_t)gridDim.x * LT_THREADS;
    for (int64_t i = (int64_t)blockIdx.x * LT_THREADS + threadIdx.x; i < count; i += stride) {
        double was = (double)lt__value(x[i]);
        bool finite = was - was == 0;
        x[i] = lt_element<E>::of((lt_wide<E>)(was * by));
        seen = finds::join(seen, lt_found{finite ? fabs(was) : 0, !finite});
    }
    seen = lt__join_lanes<finds>(seen, 1, LT_THREADS);
    if (threadIdx.x == 0)
        found[blockIdx.x] = seen;
}

/* found[0] = all n of them. */
static __global__ void __launch_bounds__(LT_THREADS) join_found(lt_found *found, int n)
{
    lt_found seen = finds::start();
    for (int i = threadIdx.x; i < n; i += LT_THREADS)
        seen = finds::join(seen, found[i]);
    seen = lt__join_lanes<finds>(seen, 1, LT_THREADS);
    if (threadIdx.x == 0)
        found[0] = seen;
}

template <class E>
static lt_status launch(const lt_cuda *cuda, lt_tensor *x, double by, int64_t blocks)
{
    return lt__launch(cuda, blocks, rescale_kernel<E>, (E *)x->data, x->count, by,
                      (lt_found *)cuda->partial);
}

static lt_status find(const lt_cuda *cuda, lt_tensor *x, double by, int64_t blocks)
{
    if (x->dtype == LT_F64)
        return launch<double>(cuda, x, by, blocks);
    LT_CUDA_FLOATS(cuda, x->dtype, E, return launch<E>(cuda, x, by, blocks);)
}

lt_status lt__cuda_rescale(lt_tensor *x, double by, lt_found *found)
{
    lt_cuda *cuda = lt__cuda(x->ctx);
    lt_found *seen = (lt_found *)cuda->result;
    int64_t blocks = lt__cuts(x->count, LT_THREADS * 8);
    blocks = blocks < BLOCKS ? blocks : (int64_t)BLOCKS;
    if (blocks == 0)
        return LT_OK;
    LT_TRY(find(cuda, x, by, blocks));
    LT_TRY(lt__launch(cuda, 1, join_found, (lt_found *)cuda->partial, (int)blocks));
    LT_TRY(cuda->device.copy(&cuda->device, seen, cuda->partial, sizeof *seen));
    LT_TRY(cuda->device.sync(&cuda->device));
    found->largest = seen->largest > found->largest ? seen->largest : found->largest;
    found->not_finite += seen->not_finite;
    return LT_OK;
}

size_t lt__cuda_rescale_bytes(void) { return BLOCKS * sizeof(lt_found); }
