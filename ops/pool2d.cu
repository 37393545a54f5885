/* pool2d.cu - the CUDA side of pool2d.c.
 *
 * Memory limits the speed. A thread computes as many neighbouring channels of a pixel as fit in 16
 * bytes, with one load per tap, and neighbouring outputs share the taps in the cache. Windows are
 * small, so their sums are in f32. Backward gathers, as on the CPU: each gradient is written once,
 * by one thread, so there are no atomics and results are bit-identical in every run. This is why
 * max pooling does not use cuDNN, whose backward scatters and which treats NaNs and ties
 * differently. For mean pooling cuDNN would gain nothing.
 */
#include "ops/cuda/reduction.h"
#include "ops/cuda/map.h"
#include "ops/window.h"

enum { KERNEL, STRIDE, PAD };
enum { FROM = 1 }; /* the extra output of max_pool2d: the tap of the maximum */

typedef struct pool {
    lt_window w;
    int64_t groups; /* groups of V channels in a pixel */
    int64_t threads;
    float taps, share; /* taps of a window; 1 / taps */
    int row, column;   /* taps from an output to the one below; to the one on its right */
    bool add;
} pool;

/* Elements of E per thread. */
template <class E> struct run {
    enum { V = 16 / sizeof(E) };
};

/* big and small are x and y, or their gradients; results is one of them. V: elements per thread. */
static pool pool_of(const lt_call *c, const lt_tensor *big, const lt_tensor *small,
                    const lt_tensor *results, int V)
{
    pool p = {};
    lt__pair_of(c, KERNEL, p.w.kernel);
    lt__pair_of(c, STRIDE, p.w.stride);
    lt__pair_of(c, PAD, p.w.pad);
    for (int i = 0; i < 2; i++) {
        p.w.dilation[i] = 1;
        p.w.in[i] = big->dims[1 + i];
        p.w.out[i] = small->dims[1 + i];
    }
    p.groups = big->dims[3] / V;
    p.threads = results->count / V;
    p.taps = (float)p.w.kernel[0] * (float)p.w.kernel[1];
    p.share = 1 / p.taps;
    p.row = (int)(p.w.stride[0] * p.w.kernel[1]);
    p.column = (int)p.w.stride[1];
    return p;
}

typedef struct place {
    int64_t image, row, column, channel;
} place;

/* Finds the pixel and channels of a thread, in the tensor of the results. */
static __device__ place place_of(const pool &p, int64_t thread, const int64_t size[2], int V)
{
    int64_t pixel = lt__quotient(thread, p.groups), line = lt__quotient(pixel, size[1]);
    place at;
    at.channel = (thread - pixel * p.groups) * V;
    at.column = pixel - line * size[1];
    at.image = lt__quotient(line, size[0]);
    at.row = line - at.image * size[0];
    return at;
}

/* The offset of the thread's first channel in a pixel of the other tensor. */
static __device__ int64_t pixel_at(const pool &p, const place &at, const int64_t size[2], int V,
                                   int64_t row, int64_t column)
{
    return ((at.image * size[0] + row) * size[1] + column) * (p.groups * V) + at.channel;
}

/* ==== Forward ================================================================================= */

/* The maximum of each window and the tap that has it or, if MAX is false, the mean. */
template <bool MAX, class E, class I, int V>
__global__ void LT_FOUR_BLOCKS forward_kernel(const __grid_constant__ pool p, const E *x, E *y,
                                              I *from)
{
    int64_t thread = (int64_t)blockIdx.x * LT_THREADS + threadIdx.x;
    if (thread >= p.threads)
        return;
    place at = place_of(p, thread, p.w.out, V);
    lt_extent down = lt__window_taps(&p.w, 0, at.row), right = lt__window_taps(&p.w, 1, at.column);
    int64_t top = at.row * p.w.stride[0] - p.w.pad[0];
    int64_t left = at.column * p.w.stride[1] - p.w.pad[1];
    lt_pack<E, V> result = {};
    lt_pack<I, V> tap = {};
    float sum[V] = {};
    bool first = true;
    for (int64_t kh = down.first; kh < down.end; kh++)
        for (int64_t kw = right.first; kw < right.end; kw++) {
            lt_pack<E, V> v = lt__take<V>(x + pixel_at(p, at, p.w.in, V, top + kh, left + kw), 1);
            for (int k = 0; k < V; k++)
                if (!MAX) {
                    sum[k] += lt__value(v.at[k]);
                } else if (first || LT_IS_GREATER(lt__value(v.at[k]), lt__value(result.at[k]))) {
                    result.at[k] = v.at[k];
                    tap.at[k] = (I)(kh * p.w.kernel[1] + kw);
                }
            first = false;
        }
    for (int k = 0; !MAX && k < V; k++)
        result.at[k] = lt_element<E>::of(sum[k] / p.taps);
    *(lt_pack<E, V> *)(y + thread * V) = result;
    if (MAX)
        *(lt_pack<I, V> *)(from + thread * V) = tap;
}

template <bool MAX, class E, class I, int V>
static lt_status launch_forward(lt_call *c, const lt_tensor *from)
{
    lt_tensor *x = c->in[0], *y = c->out[0];
    pool p = pool_of(c, x, y, y, V);
    return lt__launch(lt__cuda(c->ctx), lt__ceil_div(p.threads, LT_THREADS),
                      forward_kernel<MAX, E, I, V>, p, (const E *)x->data, (E *)y->data,
                      (I *)lt__data(from));
}

/* Whether threads can move V elements at once. from: taps in u8, or NULL. */
template <class E>
static bool is_wide(const lt_tensor *big, const lt_tensor *small, const lt_tensor *from)
{
    enum { V = run<E>::V, BYTES = V * sizeof(E) };
    return big->dims[3] % V == 0 && (uintptr_t)big->data % BYTES == 0 &&
           (uintptr_t)small->data % BYTES == 0 && (uintptr_t)lt__data(from) % V == 0;
}

template <bool MAX, class E> static lt_status forward_of(lt_call *c)
{
    const lt_tensor *from = MAX ? c->out[FROM] : NULL;
    if constexpr (MAX)
        if (from->dtype != LT_U8)
            return launch_forward<MAX, E, int32_t, 1>(c, from);
    return is_wide<E>(c->in[0], c->out[0], from)
               ? launch_forward<MAX, E, uint8_t, run<E>::V>(c, from)
               : launch_forward<MAX, E, uint8_t, 1>(c, from);
}

LT_CUDA_CALL(max_fwd, FLOATS, c->in[0], forward_of<true, E>(c))
LT_CUDA_CALL(mean_fwd, FLOATS, c->in[0], forward_of<false, E>(c))

/* ==== Backward ================================================================================ */

/* The gradient of max pooling if `from` is given, else of mean pooling. */
template <class E, class I, int V>
__global__ void __launch_bounds__(LT_THREADS, 4)
    back_kernel(const __grid_constant__ pool p, const E *dy, const I *from, E *dx)
{
    int64_t thread = (int64_t)blockIdx.x * LT_THREADS + threadIdx.x;
    if (thread >= p.threads)
        return;
    place at = place_of(p, thread, p.w.in, V);
    lt_extent down = lt__window_outputs(&p.w, 0, at.row);
    lt_extent right = lt__window_outputs(&p.w, 1, at.column);
    int64_t i = pixel_at(p, at, p.w.out, V, down.first, right.first), pixel = p.groups * V;
    int rows = (int)(down.end - down.first), columns = (int)(right.end - right.first);
    int mine = (int)lt__window_tap(&p.w, at.row, at.column, down.first, right.first);
    float sum[V] = {};
    for (int r = 0; r < rows; r++, i += p.w.out[1] * pixel, mine -= p.row)
        for (int q = 0; q < columns; q++) {
            lt_pack<E, V> v = lt__take<V>(dy + i + q * pixel, 1);
            lt_pack<I, V> tap = {};
            if (from)
                tap = lt__take<V>(from + i + q * pixel, 1);
            for (int k = 0; k < V; k++)
                sum[k] += !from || (int)tap.at[k] == mine - q * p.column ? lt__value(v.at[k]) : 0;
        }
    lt_pack<E, V> d = {};
    if (p.add)
        d = lt__take<V>((const E *)dx + thread * V, 1);
    for (int k = 0; k < V; k++) {
        float g = from ? sum[k] : sum[k] * p.share;
        d.at[k] = lt_element<E>::of(p.add ? lt__value(d.at[k]) + g : g);
    }
    *(lt_pack<E, V> *)(dx + thread * V) = d;
}

template <class E, class I, int V> static lt_status launch_back(lt_call *c, const lt_tensor *from)
{
    lt_tensor *dx = c->d_in[0], *dy = c->d_out[0];
    pool p = pool_of(c, dx, dy, dx, V);
    p.add = c->add & 1;
    return lt__launch(lt__cuda(c->ctx), lt__ceil_div(p.threads, LT_THREADS), back_kernel<E, I, V>,
                      p, (const E *)dy->data, (const I *)lt__data(from), (E *)dx->data);
}

template <class E> static lt_status back_of(lt_call *c)
{
    const lt_tensor *from = c->op->n_aux > 0 ? c->out[FROM] : NULL;
    if (from && from->dtype != LT_U8)
        return launch_back<E, int32_t, 1>(c, from);
    return is_wide<E>(c->d_in[0], c->d_out[0], from) ? launch_back<E, uint8_t, run<E>::V>(c, from)
                                                     : launch_back<E, uint8_t, 1>(c, from);
}

LT_CUDA_CALL(back, FLOATS, c->d_in[0], back_of<E>(c))

/* ==== global_avg_pool2d ======================================================================= */

/* Plans a reduction over the pixels of each image. */
static void plan_global(lt_reduction_plan *plan, const lt_tensor *x)
{
    int64_t dims[] = {x->dims[0], x->dims[1] * x->dims[2], x->dims[3]};
    lt__plan_reduction(plan, 3, dims, 1 << 1, lt__cuda_dtype_bytes(x->dtype));
}

static size_t global_scratch(const lt_call *c, bool backward)
{
    lt_reduction_plan plan;
    if (backward)
        return 0;
    plan_global(&plan, c->in[0]);
    return lt__reduction_scratch(&plan, sizeof(double));
}

static lt_status global_fwd(lt_call *c)
{
    const lt_tensor *x = c->in[0], *y = c->out[0];
    lt_reduction_end end = {y->data, y->dtype, false, false, (double)(x->dims[1] * x->dims[2])};
    lt_reduction_plan plan;
    plan_global(&plan, x);
    LT_CUDA_FLOATS(
        lt__cuda(c->ctx), x->dtype, E,
        return lt__reduce<lt_sum_reduction<E>>(lt__cuda(c->ctx), &plan, x->data, end, c->scratch);)
}

template <class E> struct shared : lt_types<1, E> {
    float share;
    __device__ float operator()(float dy, float, float) const { return dy * share; }
};

template <class E> static lt_status global_back(lt_call *c)
{
    lt_tensor *dx = c->d_in[0];
    int64_t pixels = dx->dims[1] * dx->dims[2];
    int64_t dims[] = {dx->dims[0], pixels, dx->dims[3]}, of_dy[] = {dx->dims[0], 1, dx->dims[3]};
    shared<E> f;
    lt_walk w;
    f.share = (float)(1 / (double)pixels);
    lt__walk_over(&w, 3, dims);
    lt__walk_stretch(&w, 1, 3, of_dy);
    lt__walk_merge(&w, 2);
    return lt__map(lt__cuda(c->ctx), w, f, c->add & 1, dx->data, c->d_out[0]->data);
}

LT_CUDA_CALL(global_bwd, FLOATS, c->d_in[0], global_back<E>(c))

void lt__cuda_pool2d(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_max_pool2d], NULL, max_fwd, back);
    lt__set_kernels(&op[LT_OP_avg_pool2d], NULL, mean_fwd, back);
    lt__set_kernels(&op[LT_OP_global_avg_pool2d], global_scratch, global_fwd, global_bwd);
}
