/* loss.cu - the CUDA side of loss.c. */
#include "ops/cuda/reduction.h"
#include "ops/cuda/map.h"
#include "ops/loss.h"

enum { X_IN, Y_IN };
enum { PACKS = 8 }; /* packs per thread */

/* sums[block] = the sum of (x - y)^2 over the elements of the block. */
template <class E>
LT_KERNEL squares_kernel(const E *x, const E *y, int64_t n, bool wide, double *sums)
{
    enum { V = 16 / sizeof(E) };
    double sum = 0;
    int64_t i = ((int64_t)blockIdx.x * PACKS * LT_THREADS + threadIdx.x) * V;
    for (int pack = 0; pack < PACKS; pack++, i += LT_THREADS * V) {
        lt_pack<E, V> a = lt__load<V>(x, i, n, wide), b = lt__load<V>(y, i, n, wide);
        for (int k = 0; k < V; k++) {
            double d = lt__value(a.at[k]) - lt__value(b.at[k]);
            sum += d * d;
        }
    }
    sum = lt__join_lanes<lt_sum_reduction<double>>(sum, 1, LT_THREADS);
    if (threadIdx.x == 0)
        sums[blockIdx.x] = sum;
}

static int64_t blocks_for(const lt_tensor *x)
{
    return lt__ceil_div(x->count, PACKS * LT_THREADS * (x->dtype == LT_F32 ? 4 : 8));
}

static size_t scratch(const lt_call *c, bool backward)
{
    int64_t blocks = blocks_for(c->in[X_IN]);
    lt_reduction_plan plan = lt__plan_all(blocks, sizeof(double));
    return backward ? 0
                    : lt__aligned((size_t)blocks * sizeof(double)) +
                          lt__reduction_scratch(&plan, sizeof(double));
}

template <class E> static lt_status forward(lt_call *c)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    const E *x = (const E *)c->in[X_IN]->data, *y = (const E *)c->in[Y_IN]->data;
    int64_t n = c->in[X_IN]->count, blocks = blocks_for(c->in[X_IN]);
    double *sums = (double *)c->scratch;
    lt_reduction_plan plan = lt__plan_all(blocks, sizeof(double));
    lt_reduction_end end = {c->out[0]->data, c->out[0]->dtype, false, false, n > 0 ? (double)n : 1};
    LT_TRY(lt__launch(cuda, blocks, squares_kernel<E>, x, y, n, lt__are_wide(x, y), sums));
    return lt__reduce<lt_sum_reduction<double>>(
        cuda, &plan, sums, end, (char *)sums + lt__aligned((size_t)blocks * sizeof(double)));
}

/* g is the gradient of the loss, the same for all n elements. */
template <class E> struct mse_dx : lt_types<3, E> {
    int64_t n;
    float sign;
    __device__ float operator()(float x, float y, float g) const
    {
        return sign * ((float)lt__mse_factor(g, n) * (x - y));
    }
};

template <class E> static lt_status backward(lt_call *c, int i)
{
    const lt_tensor *x = c->in[X_IN], *y = c->in[Y_IN], *g = c->d_out[0];
    mse_dx<E> f;
    lt_walk w;
    if (!c->d_in[i])
        return LT_OK;
    f.n = x->count;
    f.sign = i == X_IN ? 1.0f : -1.0f;
    lt__walk_over(&w, x->ndim, x->dims);
    lt__walk_stretch(&w, 3, g->ndim, g->dims);
    lt__walk_merge(&w, 4);
    return lt__map(lt__cuda(c->ctx), w, f, lt__adds(c, i), c->d_in[i]->data, x->data, y->data,
                   g->data);
}

LT_CUDA_CALL(mse_loss_fwd, FLOATS, c->in[X_IN], forward<E>(c))

static lt_status mse_loss_bwd(lt_call *c)
{
    LT_CUDA_FLOATS(lt__cuda(c->ctx), c->in[X_IN]->dtype, E, LT_TRY(backward<E>(c, X_IN));
                   return backward<E>(c, Y_IN);)
}

void lt__cuda_loss(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_mse_loss], scratch, mse_loss_fwd, mse_loss_bwd);
}
