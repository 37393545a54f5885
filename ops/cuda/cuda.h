/* cuda.h - what the .cu op files share: the device of a call, kernel launches, element types.
 *
 * A .cu file contains the kernels for calls whose tensors are on the accelerator. Kernels run
 * asynchronously in the device's single stream. They convert f16 and bf16 inputs to f32 as they
 * read them, compute in f32, and round each result once. Only sums, values that exist once per row
 * or channel, casts, fills and rescale.cu use double. Sums are in double, with exceptions:
 * embedding and pooling windows sum in f32; batch_norm and products sum in f32 first, and add any
 * partial sums in double. The order of a sum depends only on the shapes, and no atomics are used.
 *
 * This code must not use symbols of libluatrain: the plugin calls it through lt_host. The tests
 * compile the same sources for the CPU (tests/cuda/), so there is no <<<>>> here, and no NVIDIA
 * library except cudart.
 */
#ifndef LT_OPS_CUDA_CUDA_H
#define LT_OPS_CUDA_CUDA_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "ops/cuda/nvidia.h"
#include "ops/kernel.h"
#include "ops/backend/plugin.h"

enum { LT_THREADS = 256 }; /* threads of a block in every kernel */
/* Goes before the name of a kernel. */
#define LT_KERNEL __global__ void __launch_bounds__(LT_THREADS)
/* Launch bounds that limit a kernel's registers so that four blocks fit on a multiprocessor. On
 * sm_80 and sm_90 the compiler stays within that limit by itself. */
#if !defined __CUDA_ARCH__ || __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900
#define LT_FOUR_BLOCKS __launch_bounds__(LT_THREADS)
#else
#define LT_FOUR_BLOCKS __launch_bounds__(LT_THREADS, 4)
#endif

typedef struct lt_cuda {
    lt_device device; /* keep this first: the pointer is cast to lt_device * and back */
    const lt_host *host;
    int index;
    cudaStream_t stream;
    void *sums;      /* workspace of lt__cuda_sum_rows(), on the device */
    lt_cuda_env env; /* passed to nvidia */
    lt_nvidia *nvidia;
    char model[160];
    struct lt_bad_id *bad_id;        /* pinned host memory; see lt__cuda_check_ids() */
    cudaStream_t uploads, downloads; /* separate streams for copies */
    pthread_mutex_t lock;            /* guards the marks, and bad_id on the host */
    cudaEvent_t event[LT_MAX_MARKS]; /* events of the last LT_MAX_MARKS marks */
    uint64_t marks;                  /* number of marks recorded so far */
    char name[16];                   /* "cuda:0" */
} lt_cuda;

/* Makes the device the current one of this thread, and returns it. */
static inline lt_cuda *lt__cuda_enter(lt_device *device)
{
    lt_cuda *cuda = (lt_cuda *)device;
    (void)cudaSetDevice(cuda->index); /* if it fails, so does the next CUDA call */
    return cuda;
}
/* The same for the accelerator of a context. */
static inline lt_cuda *lt__cuda(const lt_ctx *ctx) { return lt__cuda_enter(ctx->devices[1]); }

/* Returns LT_OK, or LT_ENOMEM or LT_EENV with CUDA's message. The error may come from work that was
 * enqueued much earlier. */
lt_status lt__cuda_status(const lt_cuda *cuda, cudaError_t error);
/* Fails with LT_EUNSUPPORTED: "cuda:0 does not support f64 for this op; ..." */
lt_status lt__no_kernel(const lt_cuda *cuda, int dtype);

/* Returns an error of a CUDA call from the calling function, which returns a cudaError_t. */
#define LT_CUDA_TRY(call)                                                                          \
    do {                                                                                           \
        cudaError_t cuda_try_ = (call);                                                            \
        if (cuda_try_ != cudaSuccess)                                                              \
            return cuda_try_;                                                                      \
    } while (0)

/* Launches kernel(args...) in the stream with the given number of blocks of LT_THREADS threads.
 * Does nothing if blocks is 0. */
template <class... P, class... A>
lt_status lt__launch(const lt_cuda *cuda, int64_t blocks, void (*kernel)(P...), A... args)
{
    static_assert((sizeof(P) + ... + 0) <= 4000, "CUDA 12.0 allows 4096 bytes, with padding");
    if (blocks == 0)
        return LT_OK;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3(LT_THREADS);
    config.stream = cuda->stream;
    return lt__cuda_status(cuda, cudaLaunchKernelEx(&config, kernel, args...));
}

/* Returns the smallest power of two >= n, but at most `max`. */
static inline int lt__next_power_of_two(int64_t n, int max)
{
    int p = 1;
    while (p < n && p < max)
        p *= 2;
    return p;
}

/* n / piece, rounded up. */
static inline int64_t lt__ceil_div(int64_t n, int64_t piece) { return (n + piece - 1) / piece; }
/* a / b for nonnegative numbers. Uses a 32-bit division where both fit, which takes a fraction of
 * the time. */
static inline __device__ int64_t lt__quotient(int64_t a, int64_t b)
{
    return (uint64_t)(a | b) >> 32 ? a / b : (int64_t)((uint32_t)a / (uint32_t)b);
}

/* ==== Elements ================================================================================ */

/* The type in which elements of type E are computed, and the rounding to E. */
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

/* N elements, aligned so that up to 16 bytes are loaded or stored in one instruction. */
template <class E, int N> struct alignas(sizeof(E) * N) lt_pack {
    E at[N];
};

/* Returns the address of element i. */
static inline char *lt__cuda_at(const void *data, int dtype, int64_t i)
{
    return (char *)data + i * (int64_t)lt__cuda_dtype_bytes(dtype);
}

/* Reads V elements of an array of n elements, starting at index i. wide: element i is aligned for
 * one load. Elements outside the array read as 0. */
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
__device__ inline void lt__store(E *array, int64_t i, int64_t n, bool wide, const lt_pack<E, V> &p)
{
    if (wide && i <= n - V) {
        *(lt_pack<E, V> *)(array + i) = p;
        return;
    }
    for (int k = 0; k < V; k++)
        if (i + k >= 0 && i + k < n)
            array[i + k] = p.at[k];
}

/* Whether every array starts at a multiple of 16 bytes, so that packs can be loaded from it. NULL
 * pointers count as aligned; they are never read. */
template <class... P> inline bool lt__are_wide(const P *...at)
{
    return ((((uintptr_t)at) % 16 == 0) && ...);
}

/* Access to single elements of f32, f16 or bf16. Slow, for small tensors only. */
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

/* A tensor's elements for these functions; `at` is NULL if there is no tensor. dtype is 64 bits
 * wide so that the struct has no padding: the tests check kernel arguments for host addresses, and
 * could mistake leftover bytes in padding for one. */
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

/* Returns LT_OK, or lt__no_kernel() if a tensor is not f32, f16 or bf16. NULLs pass. */
static inline lt_status lt__require_kernels(const lt_cuda *cuda, const lt_tensor *const *x, int n)
{
    for (int i = 0; i < n; i++)
        if (x[i] && x[i]->dtype != LT_F32 && x[i]->dtype != LT_F16 && x[i]->dtype != LT_BF16)
            return lt__no_kernel(cuda, x[i]->dtype);
    return LT_OK;
}

/* ==== Indices ================================================================================= */

/* An index that is out of range. The kernel finds it while the host runs ahead, so it is written to
 * pinned host memory and reported by the next wait, as other deferred errors are. If several calls
 * have bad indices, only the first of these calls is reported. If a call has several bad indices,
 * the largest one as an unsigned number is reported, so negative ones come first. Results that
 * depend on a bad index are NaN, so that training does not seem to succeed before the report. */
typedef struct lt_bad_id {
    int64_t kind;             /* a value below; LT_NO_BAD_ID is 0 */
    int64_t place, id, limit; /* position and value of the index; number of valid values */
} lt_bad_id;
enum { LT_NO_BAD_ID, LT_BAD_LABEL, LT_BAD_ROW }; /* values of kind */

static __device__ inline int64_t lt__id(const void *ids, int dtype, int64_t i)
{
    return dtype == LT_I64   ? ((const int64_t *)ids)[i]
           : dtype == LT_I32 ? ((const int32_t *)ids)[i]
                             : ((const uint8_t *)ids)[i];
}

/* Checks that all ids are in 0..limit-1, with one or two small kernels. kind: LT_BAD_LABEL or
 * LT_BAD_ROW. scratch: lt__cuda_ids_scratch() bytes. In embedding.cu. */
lt_status lt__cuda_check_ids(const lt_cuda *cuda, const lt_tensor *ids, int64_t limit, int kind,
                             void *scratch);
size_t lt__cuda_ids_scratch(const lt_tensor *ids);
/* Fails with LT_EDATA and a message if a bad index was found. Call it after a wait, with cuda->lock
 * held. Waits for marks leave the record in place, because not every caller checks their result;
 * sync() clears it. */
lt_status lt__cuda_report_bad_id(const lt_cuda *cuda);

/* Converts d to the integer type T, saturating. NaN gives 0. */
template <class T> __host__ __device__ inline T lt__saturated(double d)
{
    const T min = (T)-1 < 0 ? (T)((uint64_t)1 << (8 * sizeof(T) - 1)) : 0, max = (T)~min;
    return d != d ? 0 : d >= (double)max ? max : d <= (double)min ? min : (T)d;
}

/* ==== Dispatch on dtypes ====================================================================== */

/* Runs the body once with E as the element type of f32, f16 or bf16. For other dtypes, returns
 * lt__no_kernel() from the calling function. */
#define LT_CUDA_FLOATS(cuda, dtype, E, ...)                                                        \
    switch (dtype) {                                                                               \
        LT_CASE(LT_F32, float, E, __VA_ARGS__)                                                     \
        LT_CASE(LT_F16, __half, E, __VA_ARGS__)                                                    \
        LT_CASE(LT_BF16, __nv_bfloat16, E, __VA_ARGS__)                                            \
    default: return lt__no_kernel(cuda, dtype);                                                    \
    }
/* The same with f64. */
#define LT_CUDA_ANY_FLOAT(cuda, dtype, E, ...)                                                     \
    switch (dtype) {                                                                               \
        LT_CASE(LT_F64, double, E, __VA_ARGS__)                                                    \
    default: LT_CUDA_FLOATS(cuda, dtype, E, __VA_ARGS__)                                           \
    }

#define LT_CUDA_NUMERICS(cuda, dtype, E, ...)                                                      \
    LT_CUDA_ALL(cuda, dtype, E, int64_t, int32_t, __VA_ARGS__)
/* The same with unsigned integers, whose overflow wraps. */
#define LT_CUDA_WRAPPING(cuda, dtype, E, ...)                                                      \
    LT_CUDA_ALL(cuda, dtype, E, uint64_t, uint32_t, __VA_ARGS__)
#define LT_CUDA_ALL(cuda, dtype, E, i64, i32, ...)                                                 \
    switch (dtype) {                                                                               \
        LT_CASE(LT_I64, i64, E, __VA_ARGS__)                                                       \
        LT_CASE(LT_I32, i32, E, __VA_ARGS__)                                                       \
        LT_CASE(LT_U8, uint8_t, E, __VA_ARGS__)                                                    \
    default: LT_CUDA_FLOATS(cuda, dtype, E, __VA_ARGS__)                                           \
    }

/* Runs the body with an unsigned integer of the dtype's size as E, to move elements of any
 * dtype. */
#define LT_CUDA_SIZES(dtype, E, ...)                                                               \
    switch (lt__cuda_dtype_bytes(dtype)) {                                                         \
        LT_CASE(1, uint8_t, E, __VA_ARGS__)                                                        \
        LT_CASE(2, uint16_t, E, __VA_ARGS__)                                                       \
        LT_CASE(4, uint32_t, E, __VA_ARGS__)                                                       \
    default: {                                                                                     \
        typedef uint64_t E;                                                                        \
        __VA_ARGS__                                                                                \
    }                                                                                              \
    }

/* Defines name(c), a kernel of an op, which returns the result of a call of a template. E: the
 * element type of tensor x; types: FLOATS, NUMERICS or WRAPPING. */
#define LT_CUDA_CALL(name, types, x, ...)                                                          \
    static lt_status name(lt_call *c)                                                              \
    {                                                                                              \
        LT_CUDA_##types(lt__cuda(c->ctx), (x)->dtype, E, return __VA_ARGS__;)                      \
    }

/* ==== The op files =============================================================================
 *
 * ops/NAME.cu defines void lt__cuda_NAME(lt_kernels *op), which sets its kernels in op[LT_OP_...].
 * CMake generates the list of these files for device.cu.
 */

static inline void lt__set_kernels(lt_kernels *k, size_t (*scratch)(const lt_call *, bool),
                                   lt_kernel fwd, lt_kernel bwd)
{
    k->scratch = scratch;
    k->fwd = fwd;
    k->bwd = bwd;
}

/* Functions of lt_accelerator; see plugin.h. */
lt_status lt__cuda_rescale(lt_tensor *x, const lt_tensor *from, double by, lt_grad_row *row);
lt_status lt__cuda_measure_scaled(const lt_tensor *x, double by, lt_grad_row *row);
lt_status lt__cuda_join(lt_device *device, const lt_grad_row *rows, int n, lt_grad_stats *stats);
lt_status lt__cuda_check_grads(lt_device *device, const lt_grad_stats *stats, int n,
                               lt_step_check *check);
lt_status lt__cuda_zero_leftover(lt_tensor *x, const lt_grad_stats *leftover,
                                 const lt_grad_stats *stats, int n);
lt_status lt__cuda_check_loss(lt_tensor *loss, lt_step_check *check);
lt_status lt__cuda_clip(lt_tensor *squares, double max, lt_step_check *check);

/* Creates the events of the marks and the streams for copies, and sets the device's functions that
 * use them. */
cudaError_t lt__cuda_stream_open(lt_cuda *cuda);
void lt__cuda_stream_close(lt_cuda *cuda);
cudaError_t lt__cuda_wait_for_all(const lt_cuda *cuda); /* all streams except comm.cu's */
/* Makes `stream` wait for the work before a mark. For an old mark, whose event was reused, it waits
 * for all work that is in the device's stream now. */
cudaError_t lt__cuda_stream_wait_mark(lt_cuda *cuda, cudaStream_t stream, uint64_t mark);

/* Enqueues kernels in the stream of cuda that measure `count` elements of a float dtype and write
 * the result to *stats. All pointers are device addresses. row: workspace. */
lt_status lt__cuda_measure(const lt_cuda *cuda, const void *data, int64_t count, int dtype,
                           lt_grad_row *row, lt_grad_stats *stats);
/* Allreduce between the devices of the ranks. In comm.cu. */
extern const lt_device_comm_calls lt__cuda_comm_calls;

#endif
