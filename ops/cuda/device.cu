/* device.cu - lt_device for CUDA: memory, copies and conversions, and the functions that the plugin
 * exports.
 *
 * All work is enqueued in one stream, in order. Host memory that takes part in a copy, pageable or
 * pinned, must not be touched until the stream has reached the copy: CUDA only documents that
 * cudaMemcpyAsync() may be synchronous.
 */
#include <cuda_op_files.h>
#include <stdio.h>
#include <stdlib.h>

#include "ops/cuda/map.h"
#include "ops/cuda/tile.h"

#define X(file) void lt__cuda_##file(lt_kernels *op);
LT_CUDA_OP_FILES(X)
#undef X

/* ==== Memory ================================================================================== */

static void *cuda_alloc(lt_device *device, size_t bytes)
{
    void *p = NULL;
    lt__cuda_enter(device);
    if (cudaMalloc(&p, bytes) == cudaSuccess)
        return p;
    (void)cudaGetLastError();
    return NULL;
}

/* CUDA documents that cudaFree() may wait for kernels, but does not guarantee it. */
static void cuda_free(lt_device *device, void *p, size_t bytes)
{
    lt_cuda *cuda = lt__cuda_enter(device);
    (void)bytes;
    (void)lt__cuda_wait_for_all(cuda); /* a later call reports the error */
    (void)cudaFree(p);
}

static lt_status cuda_copy(lt_device *device, void *dst, const void *src, size_t bytes)
{
    lt_cuda *cuda = lt__cuda_enter(device);
    if (bytes == 0)
        return LT_OK;
    return lt__cuda_status(cuda, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, cuda->stream));
}

static lt_status cuda_sync(lt_device *device)
{
    lt_cuda *cuda = lt__cuda_enter(device);
    LT_TRY(lt__cuda_status(cuda, cudaStreamSynchronize(cuda->stream)));
    pthread_mutex_lock(&cuda->lock);
    lt_status status = lt__cuda_report_bad_id(cuda);
    cuda->bad_id->kind = LT_NO_BAD_ID;
    pthread_mutex_unlock(&cuda->lock);
    return status;
}

static void cuda_close(lt_device *device)
{
    lt_cuda *cuda = lt__cuda_enter(device);
    (void)lt__cuda_wait_for_all(cuda);
    lt__nvidia_free(cuda->nvidia);
    lt__cuda_stream_close(cuda);
    (void)cudaStreamDestroy(cuda->stream);
    (void)cudaFree(cuda->sums);
    (void)cudaFreeHost(cuda->bad_id);
    pthread_mutex_destroy(&cuda->lock);
    free(cuda);
}

/* ==== Conversion between any two dtypes ======================================================= */

/* Rounds to float by rounding to odd. Rounding the result to a half then equals rounding d directly
 * (see core/dtype.c). */
static __device__ float to_odd(double d)
{
    float f = (float)d;
    if (d != d || (double)f == d)
        return f;
    uint32_t bits = __float_as_uint(f);
    if (fabs((double)f) > fabs(d)) /* rounded away from zero, maybe to infinity: step back */
        bits--;
    return __uint_as_float(bits | 1);
}

static __device__ float to_odd(int64_t i)
{
    const int64_t exact = (int64_t)1 << 53;
    if (i >= -exact && i <= exact)
        return to_odd((double)i);
    return to_odd((double)(i >> 11 | ((i & 2047) != 0)) * 2048);
}

template <class I> __device__ I to_integer(double d) { return lt__saturated<I>(d); }
template <class I> __device__ I to_integer(int64_t i) { return (I)i; }

/* to[i] = v; T is double or int64_t. */
template <class T> __device__ void store(void *to, int dtype, int64_t i, T v)
{
    switch (dtype) {
    case LT_F32: ((float *)to)[i] = (float)v; break;
    case LT_F64: ((double *)to)[i] = (double)v; break;
    case LT_F16: ((__half *)to)[i] = __float2half_rn(to_odd(v)); break;
    case LT_BF16: ((__nv_bfloat16 *)to)[i] = __float2bfloat16_rn(to_odd(v)); break;
    case LT_I64: ((int64_t *)to)[i] = to_integer<int64_t>(v); break;
    case LT_I32: ((int32_t *)to)[i] = to_integer<int32_t>(v); break;
    default: ((uint8_t *)to)[i] = to_integer<uint8_t>(v);
    }
}

static LT_KERNEL convert_any(void *to, int to_dtype, const void *from, int dtype, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * LT_THREADS + threadIdx.x;
    if (i >= n)
        return;
    switch (dtype) {
    case LT_F32: store(to, to_dtype, i, (double)((const float *)from)[i]); break;
    case LT_F64: store(to, to_dtype, i, ((const double *)from)[i]); break;
    case LT_F16: store(to, to_dtype, i, (double)__half2float(((const __half *)from)[i])); break;
    case LT_BF16:
        store(to, to_dtype, i, (double)__bfloat162float(((const __nv_bfloat16 *)from)[i]));
        break;
    case LT_I64: store(to, to_dtype, i, ((const int64_t *)from)[i]); break;
    case LT_I32: store(to, to_dtype, i, (int64_t)((const int32_t *)from)[i]); break;
    default: store(to, to_dtype, i, (int64_t)((const uint8_t *)from)[i]);
    }
}

/* The conversions that training uses most, 16 bytes at a time. */
template <class Z, class A> struct converted : lt_types<1, Z, A> {
    __device__ lt_wide<Z> operator()(lt_wide<A> x, lt_wide<Z>, lt_wide<Z>) const { return x; }
};

static void walk_dense(lt_walk *w, size_t n)
{
    int64_t count = (int64_t)n;
    lt__walk_over(w, 1, &count);
    lt__walk_merge(w, 2);
}

static lt_status cuda_convert(lt_device *device, void *dst, lt_dtype dst_dtype, const void *src,
                              lt_dtype src_dtype, size_t n)
{
    lt_cuda *cuda = lt__cuda_enter(device);
    lt_walk w;
    if (dst_dtype == src_dtype)
        return cuda_copy(device, dst, src, n * lt__cuda_dtype_bytes(src_dtype));
    walk_dense(&w, n);
    switch (src_dtype * LT_DTYPE_COUNT + dst_dtype) {
#define PAIR(from, A, to, Z)                                                                       \
    case from *LT_DTYPE_COUNT + to: return lt__map(cuda, w, converted<Z, A>(), false, dst, src);
        PAIR(LT_F32, float, LT_F16, __half)
        PAIR(LT_F16, __half, LT_F32, float)
        PAIR(LT_F32, float, LT_BF16, __nv_bfloat16)
        PAIR(LT_BF16, __nv_bfloat16, LT_F32, float)
        PAIR(LT_U8, uint8_t, LT_F32, float)
    }
    return lt__launch(cuda, lt__ceil_div((int64_t)n, LT_THREADS), convert_any, dst, (int)dst_dtype,
                      src, (int)src_dtype, (int64_t)n);
}

static LT_KERNEL fill_any(void *to, int dtype, int64_t n, double value)
{
    int64_t i = (int64_t)blockIdx.x * LT_THREADS + threadIdx.x;
    if (i < n)
        store(to, dtype, i, value);
}

static lt_status cuda_fill(lt_device *device, void *dst, lt_dtype dtype, size_t n, double value)
{
    lt_cuda *cuda = lt__cuda_enter(device);
    if (n > 0 && value == 0 && !signbit(value))
        return lt__cuda_status(
            cuda, cudaMemsetAsync(dst, 0, n * lt__cuda_dtype_bytes(dtype), cuda->stream));
    return lt__launch(cuda, lt__ceil_div((int64_t)n, LT_THREADS), fill_any, dst, (int)dtype,
                      (int64_t)n, value);
}

static lt_status cuda_add(lt_device *device, void *dst, const void *src, lt_dtype dtype, size_t n)
{
    lt_cuda *cuda = lt__cuda_enter(device);
    lt_walk w;
    walk_dense(&w, n);
    if (!lt__is_float(dtype))
        return cuda->host->fail(LT_EINVAL, "gradients must have a float dtype, but got %s",
                                lt__cuda_dtype_name(dtype));
    LT_CUDA_ANY_FLOAT(cuda, dtype, E, return lt__map(cuda, w, converted<E, E>(), true, dst, src);)
}

enum { LOOKS = 4 }; /* consecutive elements per thread */

template <class T>
LT_KERNEL look_up_kernel(T *to, const uint8_t *from, const T *table, int64_t n, int64_t channels)
{
    int64_t i = ((int64_t)blockIdx.x * LT_THREADS + threadIdx.x) * LOOKS;
    int64_t c = i - lt__quotient(i, channels) * channels;
    const lt_pack<uint8_t, LOOKS> bytes = lt__load<LOOKS>(from, i, n, true);
    lt_pack<T, LOOKS> values = {};
    for (int k = 0; k < LOOKS; k++, c = c + 1 < channels ? c + 1 : 0)
        values.at[k] = table[256 * c + bytes.at[k]];
    lt__store<LOOKS>(to, i, n, true, values);
}

template <class T>
static lt_status look_up(lt_cuda *cuda, void *dst, const uint8_t *src, const void *table, int64_t n,
                         int64_t channels)
{
    return lt__launch(cuda, lt__ceil_div(n, LT_THREADS * LOOKS), look_up_kernel<T>, (T *)dst, src,
                      (const T *)table, n, channels);
}

static lt_status cuda_look_up(lt_device *device, void *dst, const uint8_t *src, const void *table,
                              size_t each, int64_t n, int64_t channels)
{
    lt_cuda *cuda = lt__cuda_enter(device);
    return each == 1   ? look_up<uint8_t>(cuda, dst, src, table, n, channels)
           : each == 2 ? look_up<uint16_t>(cuda, dst, src, table, n, channels)
           : each == 4 ? look_up<uint32_t>(cuda, dst, src, table, n, channels)
                       : look_up<uint64_t>(cuda, dst, src, table, n, channels);
}

/* ==== Opening ================================================================================= */

/* Major and minor version of CUDA: 13000 is 13.0. */
static int major_of(int version) { return version / 1000; }
static int minor_of(int version) { return version % 1000 / 10; }

/* Returns the index of the requested device, or an error code of lt_accelerator_open(). */
static int find_device(const lt_accelerator_config *config, char *text, size_t bytes)
{
    int driver = 0, n = 0, major = 0, index = config->index;
    (void)cudaDriverGetVersion(&driver);
    cudaError_t error = cudaGetDeviceCount(&n);
    if (index == LT_ANY_DEVICE && error == cudaSuccess && n > 0)
        index = config->local_rank % n;
    if (driver == 0)
        snprintf(text, bytes, "no NVIDIA driver (libcuda.so.1) is installed");
    else if (error == cudaErrorInsufficientDriver)
        snprintf(text, bytes,
                 "the NVIDIA driver supports CUDA %d.%d, but this build requires %d.%d; install a "
                 "newer driver",
                 major_of(driver), minor_of(driver), major_of(CUDART_VERSION),
                 minor_of(CUDART_VERSION));
    else if (error == cudaErrorNoDevice || (error == cudaSuccess && n == 0))
        snprintf(text, bytes,
                 "no CUDA device is available to this process (CUDA_VISIBLE_DEVICES can hide "
                 "devices)");
    else if (error != cudaSuccess)
        snprintf(text, bytes, "CUDA cannot be initialized: %s", cudaGetErrorString(error));
    else if (index < 0 || index >= n)
        snprintf(text, bytes, "cuda:%d is out of range; this machine has %d, starting at cuda:0",
                 index, n);
    else if ((error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index)) !=
             cudaSuccess)
        snprintf(text, bytes, "cuda:%d cannot be queried: %s", index, cudaGetErrorString(error));
    else if (major < 8)
        snprintf(text, bytes,
                 "cuda:%d is too old: its compute capability is %d, but this build requires 8 "
                 "(A100) or more",
                 index, major);
    else
        return index;
    (void)cudaGetLastError();
    return driver == 0 || error == cudaErrorNoDevice || (error == cudaSuccess && n == 0)
               ? LT_NO_ACCELERATOR
               : -1;
}

/* Creates the stream and the fixed buffers of a device. */
static cudaError_t begin(lt_cuda *cuda)
{
    LT_CUDA_TRY(cudaSetDevice(cuda->index));
    LT_CUDA_TRY(cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking));
    LT_CUDA_TRY(cudaMalloc(&cuda->sums, lt__cuda_sum_rows_bytes()));
    LT_CUDA_TRY(cudaMallocHost((void **)&cuda->bad_id, sizeof *cuda->bad_id));
    cuda->bad_id->kind = LT_NO_BAD_ID;
    return lt__cuda_stream_open(cuda);
}

static lt_cuda *device_new(const lt_host *host, const lt_accelerator_config *config, int index)
{
    lt_cuda *cuda = (lt_cuda *)calloc(1, sizeof *cuda);
    if (!cuda)
        return NULL;
    pthread_mutex_init(&cuda->lock, NULL);
    cuda->host = host;
    cuda->index = index;
    cuda->env = lt_cuda_env{host,         &cuda->device, NULL, index, config->deterministic,
                            config->tf32, cuda->model,   0};
    snprintf(cuda->name, sizeof cuda->name, "cuda:%d", index);
    lt_device *device = &cuda->device;
    device->name = cuda->name;
    device->alloc = cuda_alloc;
    device->free = cuda_free;
    device->copy = cuda_copy;
    device->convert = cuda_convert;
    device->fill = cuda_fill;
    device->add = cuda_add;
    device->look_up = cuda_look_up;
    device->sync = cuda_sync;
    device->close = cuda_close;
    return cuda;
}

/* Opens NVIDIA's libraries and completes their environment. Returns false if out of memory. */
static bool make_env(lt_cuda *cuda, const char *name, size_t memory)
{
    int major = 0, minor = 0, processors = 0, driver = 0;
    (void)cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, cuda->index);
    (void)cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, cuda->index);
    (void)cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, cuda->index);
    (void)cudaDriverGetVersion(&driver);
    snprintf(cuda->model, sizeof cuda->model, "%.64s, sm_%d%d, %d SMs, driver %d", name, major,
             minor, processors, driver);
    cuda->env.stream = cuda->stream;
    cuda->env.memory = memory;
    cuda->nvidia = lt__nvidia_new(&cuda->env);
    return cuda->nvidia != NULL;
}

static bool describe(lt_accelerator *accelerator, lt_cuda *cuda)
{
    cudaDeviceProp prop;
    char version[72];
    int runtime = 0;
    const char *name = "CUDA device";
    size_t memory = 0;
    if (cudaGetDeviceProperties(&prop, cuda->index) == cudaSuccess) {
        name = prop.name;
        memory = prop.totalGlobalMem;
    }
    (void)cudaRuntimeGetVersion(&runtime);
    if (!make_env(cuda, name, memory))
        return false;
    snprintf(accelerator->name, sizeof accelerator->name, "%.48s (%s, CUDA %d.%d)", name,
             lt__nvidia_version(cuda->nvidia, version), major_of(runtime), minor_of(runtime));
    return true;
}

extern "C" LT_API int lt_accelerator_open(const char *version, const lt_host *host,
                                          const lt_accelerator_config *config,
                                          lt_accelerator *accelerator, char *text, size_t bytes)
{
    if (!lt__same_version(version, text, bytes))
        return -1;
    int index = find_device(config, text, bytes);
    if (index < 0)
        return index;
    lt_cuda *cuda = device_new(host, config, index);
    cudaError_t error = cuda ? begin(cuda) : cudaErrorMemoryAllocation;
    *accelerator = lt_accelerator{};
    if (error == cudaSuccess && !describe(accelerator, cuda))
        error = cudaErrorMemoryAllocation;
    if (error != cudaSuccess) {
        snprintf(text, bytes, "cuda:%d cannot be used: %s", index, cudaGetErrorString(error));
        if (cuda)
            cuda_close(&cuda->device);
        return -1;
    }
    cuda->device.comm_calls = &lt__cuda_comm_calls;
    accelerator->device = &cuda->device;
    accelerator->rescale = lt__cuda_rescale;
    accelerator->measure = lt__cuda_measure_scaled;
    accelerator->join = lt__cuda_join;
    accelerator->check_grads = lt__cuda_check_grads;
    accelerator->zero_leftover = lt__cuda_zero_leftover;
    accelerator->check_loss = lt__cuda_check_loss;
    accelerator->clip = lt__cuda_clip;
#define X(file) lt__cuda_##file(accelerator->op);
    LT_CUDA_OP_FILES(X)
#undef X
    return 0;
}

extern "C" LT_API void lt_accelerator_libraries(char *text, size_t bytes)
{
    lt_nvidia *n = lt__nvidia_new(NULL);
    if (n)
        lt__nvidia_report(n, text, bytes);
    lt__nvidia_free(n);
}
