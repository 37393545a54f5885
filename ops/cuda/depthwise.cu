/* depthwise.cu - depthwise 3x3 convolution on CUDA, forward and backward, for conv2d.cu.
 *
 * There are only nine multiplications per element, and tensor cores are no help, so what counts is
 * how often an element is loaded. A thread computes a patch of 2x2 results in neighbouring
 * channels. It loads 4 pixels per result (6 with stride 2), where separate results would load 9,
 * and its block keeps the weights in shared memory. A thread loads 8 bytes of each pixel. With 16
 * bytes, the sums would need more registers than four resident blocks leave, and four blocks with 8
 * bytes have as many bytes in flight as two with 16.
 *
 * With stride 1, the gradient of x is the convolution of dy with the rotated kernel; with stride 2,
 * each pixel of dx gathers from dy. The gradient of w is summed in f32 over parts of the pixels,
 * and the parts are summed in double. Both depend only on the sizes.
 */
#include "ops/cuda/conv.h"
#include "ops/cuda/reduction.h"
#include "ops/cuda/tile.h"

enum { X, W, B };
enum { SIDE = 3, TAPS = SIDE * SIDE, PATCH = 2, PATCHES = 4 };
enum { MAX_VECTOR = 4, MAX_COLUMNS = 32 };

/* Elements of a pixel that a thread loads at once. */
template <class E> struct vector {
    enum { N = 8 / sizeof(E) };
};

/* How results map to their source along an axis: stride 1; stride 2; dx from dy with stride 2. */
enum { BY_ONE, BY_TWO, BACK };

typedef struct pass {
    int from[2], to[2];   /* heights and widths */
    int channels, groups; /* groups of the channels that a thread computes */
    int columns, blocks;  /* adjacent groups in a block; blocks that cover the groups */
    int pad;
    bool turned, add;
    int patches[2]; /* patches of an image, vertically and horizontally */
    int all;        /* number of patches, or of pixels for a gradient of w */
    int part;       /* patches or pixels per block */
} pass;

static void put_channels(pass *p, int64_t channels, int V)
{
    p->channels = (int)channels;
    p->groups = (int)(channels / V);
    p->columns = lt__next_power_of_two(p->groups, MAX_COLUMNS);
    p->blocks = (int)lt__ceil_div(p->groups, p->columns);
}

/* ==== y and dx ================================================================================ */

struct kernels {
    alignas(16) float at[TAPS][MAX_COLUMNS * MAX_VECTOR];
};

/* Source pixels that a patch needs along an axis. */
template <int WAY> struct met {
    enum { N = WAY == BY_ONE ? 4 : WAY == BY_TWO ? 5 : 2 };
};

/* The tap that connects source pixel r with result i of the patch. Outside 0..2 if no tap does. */
template <int WAY> __device__ constexpr int tap_of(int r, int i)
{
    return WAY == BY_ONE ? r - i : WAY == BY_TWO ? r - 2 * i : i + 2 - 2 * r;
}

/* The first source pixel that patch i needs, and its first result. */
template <int WAY> __device__ int source_of(int i, int pad)
{
    return WAY == BACK ? i - 1 : (WAY == BY_ONE ? PATCH : 2 * PATCH) * i - pad;
}
template <int WAY> __device__ int result_of(int i, int pad)
{
    return WAY == BACK ? PATCH * i - pad : PATCH * i;
}

static __device__ bool is_in(int h, int w, const int size[2])
{
    return h >= 0 && h < size[0] && w >= 0 && w < size[1];
}

/* Loads the weights of the block's n channels, starting at channel `first`. */
template <class E> __device__ void fetch(const pass &p, const E *w, int first, int n, kernels &to)
{
    for (int i = threadIdx.x; i < n * TAPS; i += LT_THREADS) {
        int channel = i / TAPS, tap = i - channel * TAPS;
        float v = first + channel < p.channels ? lt__value(w[(int64_t)first * TAPS + i]) : 0;
        to.at[p.turned ? TAPS - 1 - tap : tap][channel] = v;
    }
}

template <class E, int V, int WAY>
__device__ void add_up(const pass &p, const E *from, const kernels &w, int lane, int top, int left,
                       float (&sum)[PATCH][PATCH][V])
{
#pragma unroll 1 /* fully unrolled, it would load all pixels first and run out of registers */
    for (int r = 0; r < met<WAY>::N; r++)
#pragma unroll
        for (int q = 0; q < met<WAY>::N; q++) {
            lt_pack<E, V> x = {};
            if (is_in(top + r, left + q, p.from))
                x = *(const lt_pack<E, V> *)(from + (r * p.from[1] + q) * (int64_t)p.channels);
#pragma unroll
            for (int i = 0; i < PATCH * PATCH; i++) {
                int kh = tap_of<WAY>(r, i / PATCH), kw = tap_of<WAY>(q, i % PATCH);
                if (kh < 0 || kh >= SIDE || kw < 0 || kw >= SIDE)
                    continue;
                lt_pack<float, V> k = *(const lt_pack<float, V> *)&w.at[kh * SIDE + kw][lane * V];
                for (int v = 0; v < V; v++)
                    sum[i / PATCH][i % PATCH][v] =
                        fmaf(lt__value(x.at[v]), k.at[v], sum[i / PATCH][i % PATCH][v]);
            }
        }
}

/* Computes one patch, which is numbered over all images, for the thread's channels. */
template <class E, int V, int WAY>
__device__ void make_patch(const pass &p, const E *from, const kernels &w, int lane, int channel,
                           const E *bias, int patch, E *to)
{
    int line = patch / p.patches[1], image = line / p.patches[0];
    int down = line - image * p.patches[0], across = patch - line * p.patches[1];
    int top = source_of<WAY>(down, p.pad), left = source_of<WAY>(across, p.pad);
    int64_t corner = ((int64_t)image * p.from[0] + top) * p.from[1] + left;
    float sum[PATCH][PATCH][V];
    for (int i = 0; i < PATCH * PATCH * V; i++)
        sum[i / V / PATCH][i / V % PATCH][i % V] = bias ? lt__value(bias[channel + i % V]) : 0;
    add_up<E, V, WAY>(p, from + (corner * p.channels + channel), w, lane, top, left, sum);
#pragma unroll
    for (int i = 0; i < PATCH * PATCH; i++) {
        int h = result_of<WAY>(down, p.pad) + i / PATCH;
        int c = result_of<WAY>(across, p.pad) + i % PATCH;
        if (!is_in(h, c, p.to))
            continue;
        int64_t pixel = ((int64_t)image * p.to[0] + h) * p.to[1] + c;
        lt_pack<E, V> *y = (lt_pack<E, V> *)(to + (pixel * p.channels + channel)), out = {};
        if (p.add)
            out = *y;
        for (int v = 0; v < V; v++) {
            float value = sum[i / PATCH][i % PATCH][v];
            out.at[v] = lt_element<E>::of(p.add ? lt__value(out.at[v]) + value : value);
        }
        *y = out;
    }
}

template <class E, int V, int WAY>
LT_KERNEL pass_kernel(const __grid_constant__ pass p, const E *from, const E *w, const E *bias,
                      E *to)
{
    __shared__ kernels of_block;
    int side = blockIdx.x % p.blocks * p.columns, lane = threadIdx.x % p.columns;
    int first = blockIdx.x / p.blocks * p.part, patch = first + threadIdx.x / p.columns;
    int last = p.all - first < p.part ? p.all : first + p.part;
    fetch(p, w, side * V, p.columns * V, of_block);
    __syncthreads();
    if (side + lane >= p.groups)
        return;
#pragma unroll 1
    for (; patch < last; patch += LT_THREADS / p.columns)
        make_patch<E, V, WAY>(p, from, of_block, lane, (side + lane) * V, bias, patch, to);
}

/* Computes `to` from `from`: x and y, or their gradients. */
template <class E, int V, int WAY>
static lt_status run_pass(const lt_cuda *cuda, pass p, int64_t images, const void *from,
                          const void *w, const void *bias, void *to)
{
    put_channels(&p, p.channels, V);
    for (int i = 0; i < 2; i++)
        p.patches[i] = (p.to[i] + (WAY == BACK ? p.pad : 0) + PATCH - 1) / PATCH;
    p.all = (int)images * p.patches[0] * p.patches[1];
    p.part = LT_THREADS / p.columns * PATCHES;
    return lt__launch(cuda, lt__ceil_div(p.all, p.part) * p.blocks, pass_kernel<E, V, WAY>, p,
                      (const E *)from, (const E *)w, (const E *)bias, (E *)to);
}

template <class E, int V>
static lt_status run_way(const lt_cuda *cuda, int way, const pass &p, int64_t images,
                         const void *from, const void *w, const void *bias, void *to)
{
    return way == BY_ONE   ? run_pass<E, V, BY_ONE>(cuda, p, images, from, w, bias, to)
           : way == BY_TWO ? run_pass<E, V, BY_TWO>(cuda, p, images, from, w, bias, to)
                           : run_pass<E, V, BACK>(cuda, p, images, from, w, bias, to);
}

/* Whether pixels of images with these channels and addresses can be loaded as vectors. */
template <class E> static bool is_wide(int64_t channels, const void *a, const void *b)
{
    return channels % vector<E>::N == 0 && (uintptr_t)a % 8 == 0 && (uintptr_t)b % 8 == 0;
}

static lt_status run_dtype(const lt_cuda *cuda, int way, const pass &p, int64_t images, int dtype,
                           const void *from, const void *w, const void *bias, void *to)
{
    LT_CUDA_FLOATS(cuda, dtype, E,
                   return is_wide<E>(p.channels, from, to)
                              ? run_way<E, vector<E>::N>(cuda, way, p, images, from, w, bias, to)
                              : run_way<E, 1>(cuda, way, p, images, from, w, bias, to);)
}

static pass pass_of(const lt_conv *v, bool back)
{
    pass p = {};
    for (int i = 0; i < 2; i++) {
        p.from[i] = (int)(back ? v->window.out[i] : v->window.in[i]);
        p.to[i] = (int)(back ? v->window.in[i] : v->window.out[i]);
    }
    p.channels = (int)v->in;
    p.pad = (int)v->window.pad[0];
    return p;
}

lt_status lt__cuda_depthwise_fwd(const lt_conv *v, lt_call *c)
{
    const lt_tensor *bias = lt__optional(c, c->in, B);
    return run_dtype(lt__cuda(c->ctx), v->window.stride[0] == 1 ? BY_ONE : BY_TWO,
                     pass_of(v, false), v->n, c->in[X]->dtype, c->in[X]->data, c->in[W]->data,
                     lt__data(bias), c->out[0]->data);
}

static lt_status data_gradient(const lt_conv *v, lt_call *c)
{
    pass p = pass_of(v, true);
    bool by_one = v->window.stride[0] == 1;
    p.add = c->add >> X & 1;
    p.turned = by_one;
    if (by_one)
        p.pad = SIDE - 1 - p.pad;
    return run_dtype(lt__cuda(c->ctx), by_one ? BY_ONE : BACK, p, v->n, c->d_out[0]->dtype,
                     c->d_out[0]->data, c->in[W]->data, NULL, c->d_in[X]->data);
}

/* ==== dw ====================================================================================== */

template <int V> struct vector_sum {
    typedef lt_pack<float, V> Acc;
    static __device__ Acc join(Acc a, const Acc &b)
    {
        for (int i = 0; i < V; i++)
            a.at[i] += b.at[i];
        return a;
    }
};

/* Keeps the compiler from moving loads across it. Loading nine pixels at once would take too many
 * registers. */
#define ROW_BY_ROW __asm__ volatile("" ::: "memory")

/* p.from is the size of x, p.to the size of dy. sums: (parts, channels, taps). */
template <class E, int V, int STRIDE>
__global__ void __launch_bounds__(LT_THREADS, 4)
    weights_kernel(const __grid_constant__ pass p, const E *x, const E *dy, float *sums)
{
    int part = blockIdx.x / p.blocks, lane = threadIdx.x % p.columns;
    int group = (int)(blockIdx.x % p.blocks) * p.columns + lane, channel = group * V;
    int first = part * p.part, pixel = first + threadIdx.x / p.columns;
    int last = p.all - first < p.part ? p.all : first + p.part;
    lt_pack<float, V> sum[TAPS] = {};
#pragma unroll 1
    for (; pixel < last && group < p.groups; pixel += LT_THREADS / p.columns) {
        int line = pixel / p.to[1], image = line / p.to[0];
        int top = (line - image * p.to[0]) * STRIDE - p.pad;
        int left = (pixel - line * p.to[1]) * STRIDE - p.pad;
        int64_t corner = ((int64_t)image * p.from[0] + top) * p.from[1] + left;
        const E *row = x + (corner * p.channels + channel);
        lt_pack<E, V> g = *(const lt_pack<E, V> *)(dy + ((int64_t)pixel * p.channels + channel));
#pragma unroll
        for (int k = 0; k < TAPS; k++) {
            if (k > 0 && k % SIDE == 0) {
                row += (int64_t)p.from[1] * p.channels;
                ROW_BY_ROW;
            }
            lt_pack<E, V> v = {};
            if (is_in(top + k / SIDE, left + k % SIDE, p.from))
                v = *(const lt_pack<E, V> *)(row + k % SIDE * (int64_t)p.channels);
            for (int i = 0; i < V; i++)
                sum[k].at[i] = fmaf(lt__value(v.at[i]), lt__value(g.at[i]), sum[k].at[i]);
        }
    }
    float *to = sums + ((int64_t)part * p.channels + channel) * TAPS;
#pragma unroll
    for (int k = 0; k < TAPS; k++) {
        sum[k] = lt__join_lanes<vector_sum<V>>(sum[k], p.columns, LT_THREADS / p.columns);
        for (int i = 0; i < V && (int)threadIdx.x < p.columns && group < p.groups; i++)
            to[i * TAPS + k] = sum[k].at[i];
        __syncthreads();
    }
}

static int64_t pixels_of(const lt_conv *v) { return v->n * v->window.out[0] * v->window.out[1]; }

/* Returns the number of parts, so that a thread has at least eight pixels. The split assumes the
 * widest vectors that the channels allow, even if the addresses do not allow them: the order of
 * sums must depend only on the shapes. */
template <class E> static int64_t cut(const lt_conv *v, pass *p)
{
    enum { ENOUGH_BLOCKS = 1024, MIN_PATCHES = 8 };
    put_channels(p, v->in, v->in % vector<E>::N == 0 ? vector<E>::N : 1);
    p->all = (int)pixels_of(v);
    int64_t down = LT_THREADS / p->columns, max = lt__ceil_div(ENOUGH_BLOCKS, p->blocks);
    int64_t parts = lt__ceil_div(p->all, down * MIN_PATCHES);
    parts = parts < max ? parts : max;
    p->part = parts > 0 ? (int)lt__ceil_div(p->all, parts) : 0;
    return p->part > 0 ? lt__ceil_div(p->all, p->part) : 0;
}

template <class E, int V>
static lt_status sum_weights(const lt_cuda *cuda, const lt_conv *v, lt_call *c)
{
    pass p = pass_of(v, false);
    int64_t parts = cut<E>(v, &p);
    p.groups = p.channels / V;
    p.blocks = (int)lt__ceil_div(p.groups, p.columns);
    const E *x = (const E *)c->in[X]->data, *dy = (const E *)c->d_out[0]->data;
    float *sums = (float *)c->scratch;
    lt_tensor *dw = c->d_in[W];
    if (v->window.stride[0] == 1)
        LT_TRY(lt__launch(cuda, parts * p.blocks, weights_kernel<E, V, 1>, p, x, dy, sums));
    else
        LT_TRY(lt__launch(cuda, parts * p.blocks, weights_kernel<E, V, 2>, p, x, dy, sums));
    return lt__cuda_sum_rows(cuda, dw->data, dw->dtype, sums, LT_F32, parts, dw->count,
                             c->add >> W & 1);
}

static lt_status weights_gradient(const lt_conv *v, lt_call *c)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    LT_CUDA_FLOATS(cuda, c->d_out[0]->dtype, E,
                   return is_wide<E>(v->in, c->in[X]->data, c->d_out[0]->data)
                              ? sum_weights<E, vector<E>::N>(cuda, v, c)
                              : sum_weights<E, 1>(cuda, v, c);)
}

/* ==== Interface for conv2d.cu ================================================================= */

bool lt__cuda_is_depthwise(const lt_conv *v)
{
    const int64_t max = INT32_MAX / 4;
    bool yes = v->groups == v->in && v->groups == v->out && v->in < max &&
               v->window.stride[0] == v->window.stride[1] && v->window.stride[0] <= 2 &&
               v->window.pad[0] == v->window.pad[1] && v->window.pad[0] <= 1 &&
               v->n * (v->window.in[0] + 2) * (v->window.in[1] + 2) < max;
    for (int i = 0; i < 2; i++)
        yes = yes && v->window.kernel[i] == SIDE && v->window.dilation[i] == 1;
    return yes;
}

lt_status lt__cuda_depthwise_grad(const lt_conv *v, lt_call *c, int i)
{
    return i == X ? data_gradient(v, c) : weights_gradient(v, c);
}

size_t lt__cuda_depthwise_scratch(const lt_conv *v)
{
    pass p = {};
    int64_t wide = cut<float>(v, &p), wider = cut<__half>(v, &p);
    return (size_t)((wide > wider ? wide : wider) * v->in * TAPS) * sizeof(float);
}
