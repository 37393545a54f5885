/* cuda_runtime.h - a CPU emulation of the CUDA runtime, for tests. g++ compiles our .cu files
 * against this header instead of NVIDIA's, and links them with runtime.cpp and block.cpp.
 *
 * Its purpose is to find mistakes, so it does the worst that CUDA allows rather than the fastest:
 *   - A stream is a queue. Its work runs only when the host waits for it, or when the host queries
 *     an event of the stream; the first query returns cudaErrorNotReady. shim_set_schedule() makes
 *     work run early or at random instead.
 *   - The blocks of a grid, and the threads of a block, run one after the other, each thread until
 *     it must wait: ascending, descending or permuted (shim_set_order). __syncthreads() and warp
 *     exchanges wait for all participants; a participant that never arrives is a fault.
 *   - Shared memory and new memory, on devices and pinned, are filled with NaNs.
 *   - A copy from a device to pinned memory first fills that with NaNs. It is a fault if two copies
 *     that have not run use the same pinned memory, with the exceptions of add_transfer().
 *   - Only kernels and copies can access device memory. Each allocation has guard bytes around it,
 *     which are checked for overwrites. It is a fault if work on a device uses memory of another
 *     one, or if the arguments of a kernel contain a host address.
 *   - Allocating and freeing memory, and loading a kernel, can deadlock with sums by NCCL: see
 *     shim_watch_sums().
 * The next call that waits returns the fault, with a description as its error string.
 *
 * The variable SHIM sets the schedule of the streams, SHIM_HIDES what is missing (enter.h), and
 * SHIM_OPS whose kernels run (reference.cpp).
 *
 * Not emulated: grids and blocks of more than one dimension, <<<>>>, dynamic shared memory,
 * atomics, textures. Only one host thread at a time runs inside the emulation.
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
#define __shared__ static thread_local /* one contiguous range, see poison_shared() in block.cpp */

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

/* Waits for all lanes in mask and returns the values of all 32 lanes, in an array that is valid
 * until this thread's next exchange. Lanes that are not in mask have NaNs. */
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

/* The position of the lowest set bit, counted from 1, or 0 if x is 0. */
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
    size_t totalGlobalMem;
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

extern bool shim_is_null; /* see shim_set_null() */
/* kernel: its address, to tell kernels apart. */
cudaError_t shim_launch(const cudaLaunchConfig_t *config, void *kernel,
                        std::function<void()> thread);
/* Records a fault if a kernel argument contains an address of the host or of another device. */
void shim_check_argument(const void *argument, size_t bytes);

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...), A &&...args)
{
    if (shim_is_null)
        return shim_launch(config, (void *)kernel, NULL);
    std::tuple<P...> values(args...);
    std::apply([](const P &...p) { (shim_check_argument(&p, sizeof p), ...); }, values);
    return shim_launch(config, (void *)kernel, [=] { std::apply(kernel, values); });
}

#endif
