/* cuda.h - what the CUDA sides of the op files share: the device behind a call, launching, types of
 * elements.
 *
 * A .cu holds kernels for calls whose tensors lie on the accelerator. They are put into its one
 * stream and nobody waits for them. Halves come as they are: arithmetic is in float, and rounded
 * once. There is no arithmetic in f64, but for sums and for what a row or a channel has one of.
 * Sums are in double, those of batch_norm, windows and products in f32 at first; in an order that
 * depends on shapes alone, without atomics.
 *
 * The library has no symbol in here: a plugin calls it through lt_host. The tests compile the same
 * sources for the CPU (tests/cuda/), so they use no <<<>>> and no library of NVIDIA's but cudart.
 */
#ifndef LT_OPS_CUDA_CUDA_H
#define LT_OPS_CUDA_CUDA_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "ops/cuda/nvidia.h"
#include "ops/kernel.h"
#include "ops/plugin.h"

enum { LT_THREADS = 256 };    /* of a block, everywhere */
/* What bounds a kernel of which four blocks are to fill a multiprocessor's registers. For sm_80 and
 * sm_90 these take no more by themselves. */
#if !defined __CUDA_ARCH__ || __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900
#define LT_FOUR_BLOCKS __launch_bounds__(LT_THREADS)
#else
#define LT_FOUR_BLOCKS __launch_bounds__(LT_THREADS, 4)
#endif

typedef struct lt_cuda {
    lt_device device;         /* first, so that the one is the other */
    const lt_host *host;
    int index;
    cudaStream_t stream;
    void *partial;            /* of lt_rescale(), on the device */
    void *sums;               /* of lt__cuda_sum_rows() */
    lt_cuda_env env;        /* to nvidia */
    lt_nvidia *nvidia;
    char model[160];
    struct lt_bad_id *bad_id; /* pinned; see lt__cuda_check_ids() */
    cudaStream_t uploads, downloads; /* copies beside it */
    pthread_mutex_t lock;     /* guards the marks, and what is read of bad_id */
    cudaEvent_t event[LT_MARKS]; /* of the last marks; */
    uint64_t marks;           /* so many there were */
    char name[16];            /* "cuda:0" */
} lt_cuda;

/* The accelerator of a context, which becomes the current device of this thread. */
static inline lt_cuda *lt__cuda(const lt_ctx *ctx)
{
    lt_cuda *cuda = (lt_cuda *)ctx->devices[1];
    (void)cudaSetDevice(cuda->index); /* what is wrong with it, the next call says too */
    return cuda;
}

/* LT_OK, or LT_ENOMEM or LT_EENV with what CUDA has to say: perhaps of work that was put into the
 * stream long ago. */
lt_status lt__cuda_status(const lt_cuda *cuda, cudaError_t error);
/* LT_EUNSUPPORTED: "cuda:0 does not compute in f64; ..." */
lt_status lt__no_kernel(const lt_cuda *cuda, int dtype);

/* Runs kernel(args...) in so many blocks; none is nothing to do. */
template <class... P, class... A>
lt_status lt__launch(const lt_cuda *cuda, int64_t blocks, void (*kernel)(P...), A... args)
{
    if (blocks == 0)
        return LT_OK;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3(LT_THREADS);
    config.stream = cuda->stream;
    return lt__cuda_status(cuda, cudaLaunchKernelEx(&config, kernel, args...));
}

static inline int64_t lt__least(int64_t a, int64_t b) { return a < b ? a : b; }
/* The least power of two from n on, at most `most`. */
static inline int lt__power_from(int64_t n, int most)
{
    int p = 1;
    while (p < n && p < most)
        p *= 2;
    return p;
}

static inline int64_t lt__cuts(int64_t n, int64_t piece) { return (n + piece - 1) / piece; }
/* a / b of numbers from 0 on: in 32 bits where they fit, which takes a fraction of the time. */
static inline __device__ int64_t lt__quotient(int64_t a, int64_t b)
{
    return (uint64_t)(a | b) >> 32 ? a / b : (int64_t)((uint32_t)a / (uint32_t)b);
}
/* bytes, rounded up so that what follows them in scratch is aligned like scratch itself. */
static inline size_t lt__aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* ==== Elements ================================================================================ */

/* What elements of type E are computed in, and rounded from. */
template <class E> struct lt_element {
    typedef E wide;
    static __device__ E of(E v) { return v; }
};
template <> struct lt_element<__half> {
    typedef float wide;
    static __device__ __half of(float v) { return __float2half_rn(v); }
};
template <> struct lt_element<__nv_bfloat16> {
    typedef float wide;
    static __device__ __nv_bfloat16 of(float v) { return __float2bfloat16_rn(v); }
};
template <class E> using lt_wide = typename lt_element<E>::wide;

template <class E> __device__ inline E lt__value(E e) { return e; }
__device__ inline float lt__value(__half e) { return __half2float(e); }
__device__ inline float lt__value(__nv_bfloat16 e) { return __bfloat162float(e); }

/* Moved by one load or store; of 16 bytes, where the elements lie so. */
template <class E, int N> struct alignas(sizeof(E) * N) lt_pack { E at[N]; };

/* Element i of so many bytes each. */
static inline char *lt__cuda_at(const void *data, int dtype, int64_t i)
{
    static const uint8_t bytes[] = {
#define X(name, bytes, text) bytes,
        LT_DTYPE_LIST(X)
#undef X
    };
    return (char *)data + i * bytes[dtype];
}

/* Moved by one load if wide is set, and only as far as the n elements of the array reach: what is
 * behind them is 0. */
template <int V, class E>
__device__ inline lt_pack<E, V> lt__load(const E *array, int64_t i, int64_t n, bool wide)
{
    lt_pack<E, V> p = {};
    if (wide && i <= n - V)
        return *(const lt_pack<E, V> *)(array + i);
    for (int k = 0; k < V; k++)
        if (i + k >= 0 && i + k < n)
            p.at[k] = array[i + k];
    return p;
}

template <int V, class E>
__device__ inline void lt__store(E *array, int64_t i, int64_t n, bool wide,
                                 const lt_pack<E, V> &p)
{
    if (wide && i <= n - V) {
        *(lt_pack<E, V> *)(array + i) = p;
        return;
    }
    for (int k = 0; k < V; k++)
        if (i + k >= 0 && i + k < n)
            array[i + k] = p.at[k];
}

/* Whether packs from 16-byte places on are to be found in each of so many arrays; NULL ones are not
 * read. */
template <class... P> inline bool lt__are_wide(const P *...at)
{
    return ((((uintptr_t)at) % 16 == 0) && ...);
}

/* Elements of any float dtype that kernels compute in, one by one: of what is small. */
static __device__ inline float lt__get_float(const void *from, int dtype, int64_t i)
{
    return dtype == LT_F32   ? ((const float *)from)[i]
           : dtype == LT_F16 ? __half2float(((const __half *)from)[i])
                             : __bfloat162float(((const __nv_bfloat16 *)from)[i]);
}

static __device__ inline void lt__put_float(void *to, int dtype, int64_t i, bool add, float value)
{
    float sum = add ? lt__get_float(to, dtype, i) + value : value;
    if (dtype == LT_F32)
        ((float *)to)[i] = sum;
    else if (dtype == LT_F16)
        ((__half *)to)[i] = __float2half_rn(sum);
    else
        ((__nv_bfloat16 *)to)[i] = __float2bfloat16_rn(sum);
}

/* The elements of a tensor for them; at: NULL when there is none. dtype leaves no gap: with what
 * lies in one, it might look like an address of the host's, to who checks arguments of kernels. */
typedef struct lt_numbers {
    void *at;
    int64_t dtype;
} lt_numbers;

static inline lt_numbers lt__numbers_of(const lt_tensor *x)
{
    lt_numbers n = {x ? x->data : NULL, x ? x->dtype : (int64_t)LT_F32};
    return n;
}

static __device__ inline float lt__number_at(const lt_numbers &n, int64_t i)
{
    return lt__get_float(n.at, (int)n.dtype, i);
}

static __device__ inline void lt__put_number(const lt_numbers &n, int64_t i, bool add, float value)
{
    lt__put_float(n.at, (int)n.dtype, i, add, value);
}

/* LT_OK, or what lt__no_kernel() says: a tensor is not of these. */
static inline lt_status lt__want_kernels(const lt_cuda *cuda, const lt_tensor *const *x, int n)
{
    for (int i = 0; i < n; i++)
        if (x[i] && x[i]->dtype != LT_F32 && x[i]->dtype != LT_F16 && x[i]->dtype != LT_BF16)
            return lt__no_kernel(cuda, x[i]->dtype);
    return LT_OK;
}

/* ==== Integers that name something ============================================================ */

/* One that names nothing. A kernel sees it and the host is not waiting, so it is written to memory
 * of the host and said by the next wait, as other late errors are: the one that is furthest off, of
 * the first call that had any. Meanwhile results that depend on it are NaN, so that nothing can be
 * mistaken for a training that goes well. */
typedef struct lt_bad_id {
    int64_t kind;             /* 0: there is none */
    int64_t place, id, limit;
} lt_bad_id;
enum { LT_NO_BAD_ID, LT_BAD_LABEL, LT_BAD_ROW }; /* kinds */

static __device__ inline int64_t lt__id(const void *ids, int dtype, int64_t i)
{
    return dtype == LT_I64   ? ((const int64_t *)ids)[i]
           : dtype == LT_I32 ? ((const int32_t *)ids)[i]
                             : ((const uint8_t *)ids)[i];
}

/* Looks for an id that is not in 0..limit-1, in one or two small kernels; in embedding.cu. scratch:
 * as many bytes as lt__cuda_ids_scratch() says. */
lt_status lt__cuda_check_ids(const lt_cuda *cuda, const lt_tensor *ids, int64_t limit, int kind,
                             void *scratch);
size_t lt__cuda_ids_scratch(const lt_tensor *ids);
/* LT_EDATA with the sentence about one that was found. After a wait. Those for marks leave it
 * there, as not everybody listens to them; sync() forgets it. */
lt_status lt__cuda_say_bad_id(const lt_cuda *cuda);

/* d brought into the integers of type T; NaN gives 0. */
template <class T> __host__ __device__ inline T lt__saturated(double d)
{
    const T least = (T)-1 < 0 ? (T)((uint64_t)1 << (8 * sizeof(T) - 1)) : 0, most = (T)~least;
    return d != d ? 0 : d >= (double)most ? most : d <= (double)least ? least : (T)d;
}

/* ==== From dtypes to types ==================================================================== */

#define LT_CASE(dtype, type, E, ...) case dtype: { typedef type E; __VA_ARGS__ } break;

/* Runs body once with E standing for the type of the elements; without one for this dtype it
 * returns lt__no_kernel(). */
#define LT_CUDA_FLOATS(cuda, dtype, E, ...)                                                        \
    switch (dtype) {                                                                               \
    LT_CASE(LT_F32, float, E, __VA_ARGS__)                                                         \
    LT_CASE(LT_F16, __half, E, __VA_ARGS__)                                                        \
    LT_CASE(LT_BF16, __nv_bfloat16, E, __VA_ARGS__)                                                \
    default: return lt__no_kernel(cuda, dtype);                                                    \
    }

#define LT_CUDA_NUMERICS(cuda, dtype, E, ...)                                                      \
    switch (dtype) {                                                                               \
    LT_CASE(LT_I64, int64_t, E, __VA_ARGS__)                                                       \
    LT_CASE(LT_I32, int32_t, E, __VA_ARGS__)                                                       \
    LT_CASE(LT_U8, uint8_t, E, __VA_ARGS__)                                                        \
    default: LT_CUDA_FLOATS(cuda, dtype, E, __VA_ARGS__)                                           \
    }

/* With unsigned integers: overflow wraps. */
#define LT_CUDA_WRAPPING(cuda, dtype, E, ...)                                                      \
    switch (dtype) {                                                                               \
    LT_CASE(LT_I64, uint64_t, E, __VA_ARGS__)                                                      \
    LT_CASE(LT_I32, uint32_t, E, __VA_ARGS__)                                                      \
    LT_CASE(LT_U8, uint8_t, E, __VA_ARGS__)                                                        \
    default: LT_CUDA_FLOATS(cuda, dtype, E, __VA_ARGS__)                                           \
    }

/* With an unsigned integer of the same size, for moving elements of any dtype. */
#define LT_CUDA_SIZES(dtype, E, ...)                                                               \
    switch (lt__cuda_at(NULL, dtype, 1) - (char *)NULL) {                                          \
    LT_CASE(1, uint8_t, E, __VA_ARGS__)                                                            \
    LT_CASE(2, uint16_t, E, __VA_ARGS__)                                                           \
    LT_CASE(4, uint32_t, E, __VA_ARGS__)                                                           \
    default: { typedef uint64_t E; __VA_ARGS__ }                                                   \
    }

/* ==== The op files =============================================================================
 *
 * ops/NAME.cu defines void lt__cuda_NAME(lt_kernels *op), which sets its kernels in op[LT_OP_...].
 * The build lists these files for device.cu.
 */

static inline void lt__set_kernels(lt_kernels *k, size_t (*scratch)(const lt_call *, bool),
                                   lt_kernel fwd, lt_kernel bwd)
{
    k->scratch = scratch;
    k->fwd = fwd;
    k->bwd = bwd;
}

/* Those of lt_accelerator. */
lt_status lt__cuda_rescale(lt_tensor *x, double by, lt_grad_stats *stats);
lt_status lt__cuda_measure_scaled(const lt_tensor *x, double by, lt_grad_stats *stats);
size_t lt__cuda_rescale_bytes(void); /* of cuda->partial */
lt_status lt__cuda_check_grads(lt_device *device, const lt_grad_stats *rows, int n,
                               lt_step_check *check);
lt_status lt__cuda_zero_leftover(lt_tensor *x, const lt_grad_stats *leftover,
                                 const lt_grad_stats *rows, int n);
lt_status lt__cuda_check_loss(lt_tensor *loss, lt_step_check *check);
lt_status lt__cuda_clip(lt_tensor *squares, double most, lt_step_check *check);

/* Makes what marks and copies beside the stream need, and sets their functions. */
cudaError_t lt__cuda_stream_open(lt_cuda *cuda);
void lt__cuda_stream_close(lt_cuda *cuda);
cudaError_t lt__cuda_wait_for_all(const lt_cuda *cuda); /* its streams: not those of comm.cu */
/* Puts what is behind a mark before what comes into another stream: of one that is old, all that is
 * in the device's stream by now. */
cudaError_t lt__cuda_stream_wait_mark(lt_cuda *cuda, cudaStream_t stream, uint64_t mark);

/* Kernels that look for what is in (count) elements, of a float dtype: *stats is that. partial: as
 * many bytes as lt__cuda_rescale_bytes() says. In the stream of cuda. */
lt_status lt__cuda_measure(const lt_cuda *cuda, const void *data, int64_t count, int dtype,
                        void *partial, lt_grad_stats *stats);
/* Sums with other ranks' devices; in comm.cu. */
extern const lt_device_comm_calls lt__cuda_comm_calls;

#endif
