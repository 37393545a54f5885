/* cuda_runtime.h - CUDA on the CPU, for tests: our .cu files are compiled by g++ against this
 * header instead of NVIDIA's, and linked with shim.cpp.
 *
 * What it is for is to find mistakes, so it does what CUDA may do rather than what is quick:
 *   - A stream is a queue. Nothing in it runs until somebody waits for it; or asks for an event
 *     in it, in vain the first time.
 *   - The threads of a block run one after the other, each until it has to wait, forward, backward
 *     or mixed (shim_order). __syncthreads() and the exchanges of a warp wait for all who take
 *     part; one who never comes is a fault.
 *   - Shared memory and fresh device memory are full of NaNs.
 *   - Device memory is a range of addresses that only kernels and copies can touch. What lies
 *     around an allocation is looked after; an address of the host's in a kernel's arguments is a
 *     fault.
 * A fault is the error of the next call that waits, with a sentence as its string.
 *
 * Not there: more than one dimension of blocks and threads, <<<>>>, dynamic shared memory, atomics,
 * textures. One thread of the host at a time is in here.
 */
#ifndef TESTS_CUDA_SHIM_RUNTIME_H
#define TESTS_CUDA_SHIM_RUNTIME_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <tuple>

#define CUDART_VERSION 13000
#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local /* which makes one range of them all: shim.cpp */

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

/* ==== Within a block ========================================================================== */

void shim_barrier(const char *file, int line);
#define __syncthreads() shim_barrier(__FILE__, __LINE__)

/* Waits for all lanes of mask; gives the values of all 32, in an array that lasts until this
 * thread's next exchange. Those of lanes that take no part are NaNs. */
const uint64_t *shim_exchange(unsigned mask, uint64_t value, const char *file, int line);

template <class T>
T shim_shuffle(unsigned mask, T value, int lane, int width, bool valid, const char *file, int line)
{
    uint64_t bits = 0;
    static_assert(sizeof(T) <= sizeof bits, "too large to shuffle");
    memcpy(&bits, &value, sizeof value);
    const uint64_t *all = shim_exchange(mask, bits, file, line);
    int self = threadIdx.x % 32;
    memcpy(&value, &all[valid ? self / width * width + lane : self], sizeof value);
    return value;
}

template <class T>
T shim_shuffle_at(unsigned mask, T value, int lane, int width, const char *file, int line)
{
    return shim_shuffle(mask, value, lane & (width - 1), width, true, file, line);
}

template <class T>
T shim_shuffle_by(unsigned mask, T value, int by, int width, const char *file, int line)
{
    int lane = (int)threadIdx.x % width + by;
    return shim_shuffle(mask, value, lane, width, lane >= 0 && lane < width, file, line);
}

template <class T>
T shim_shuffle_xor(unsigned mask, T value, int x, int width, const char *file, int line)
{
    int lane = (int)threadIdx.x % width ^ x;
    return shim_shuffle(mask, value, lane, width, lane < width, file, line);
}

static inline unsigned shim_ballot(unsigned mask, bool vote, const char *file, int line)
{
    const uint64_t *all = shim_exchange(mask, vote, file, line);
    unsigned votes = 0;
    for (int k = 0; k < 32; k++)
        votes |= (unsigned)(mask >> k & 1 && all[k]) << k;
    return votes;
}

#define SHIM_WIDTH(value, at, width, ...) value, at, width
#define SHIM_WITH(...) SHIM_WIDTH(__VA_ARGS__, 32, )
#define __shfl_sync(mask, ...) shim_shuffle_at(mask, SHIM_WITH(__VA_ARGS__), __FILE__, __LINE__)
#define __shfl_down_sync(mask, ...)                                                                \
    shim_shuffle_by(mask, SHIM_WITH(__VA_ARGS__), __FILE__, __LINE__)
#define __shfl_xor_sync(mask, ...)                                                                 \
    shim_shuffle_xor(mask, SHIM_WITH(__VA_ARGS__), __FILE__, __LINE__)
#define __ballot_sync(mask, vote) shim_ballot(mask, vote, __FILE__, __LINE__)
#define __any_sync(mask, vote) (shim_ballot(mask, vote, __FILE__, __LINE__) != 0)
#define __all_sync(mask, vote) (shim_ballot(mask, vote, __FILE__, __LINE__) == (mask))
#define __syncwarp() ((void)shim_exchange(~0u, 0, __FILE__, __LINE__))

static inline uint32_t __float_as_uint(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

/* From 1; 0 if there is none. */
static inline int __ffs(int x) { return __builtin_ffs(x); }

static inline float __uint_as_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* ==== The runtime ============================================================================= */

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorLaunchFailure = 719
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76
};
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };

typedef struct shim_stream *cudaStream_t;
typedef struct shim_event *cudaEvent_t;
struct cudaUUID_t {
    char bytes[16];
};
struct cudaDeviceProp {
    char name[256];
    cudaUUID_t uuid;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    void *attrs;
    unsigned numAttrs;
};

cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attr, int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int device);
cudaError_t cudaGetLastError(void);
const char *cudaGetErrorString(cudaError_t error);

cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaMallocHost(void **p, size_t bytes);
cudaError_t cudaFreeHost(void *p);
template <class T> cudaError_t cudaMalloc(T **p, size_t n) { return cudaMalloc((void **)p, n); }
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);

cudaError_t shim_launch(const cudaLaunchConfig_t *config, std::function<void()> thread);
/* Looks for addresses that are not the device's. */
void shim_look_at_argument(const void *argument, size_t bytes);

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...), A &&...args)
{
    std::tuple<P...> values(args...);
    std::apply([](const P &...p) { (shim_look_at_argument(&p, sizeof p), ...); }, values);
    return shim_launch(config, [=] { std::apply(kernel, values); });
}

#endif
