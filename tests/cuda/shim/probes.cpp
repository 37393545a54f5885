/* probes.cpp - small kernels, correct and faulty ones. test_shim.c runs them to check that the
 * emulation detects the faults. */
#include <stdio.h>

#include "shim.h"
#include "tests/cuda/shim.h"

enum { N = 64 }; /* threads */

/* Each thread reads the value that its neighbour wrote. */
static __global__ void neighbours(int *out, bool barrier)
{
    __shared__ int s[N];
    s[threadIdx.x] = (int)threadIdx.x;
    if (barrier)
        __syncthreads();
    out[threadIdx.x] = s[(threadIdx.x + 1) % N];
}

static __global__ void partial_barrier(int *out)
{
    if (threadIdx.x < 16)
        __syncthreads();
    out[threadIdx.x] = 1;
}

static __global__ void two_barriers(int *out)
{
    if (threadIdx.x < 16)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = 1;
}

/* out: the sum over each warp, or -1 if another kind of exchange gave a wrong result. */
static __global__ void exchanges(int *out)
{
    int lane = threadIdx.x % 32, sum = (int)threadIdx.x;
    for (int half = 16; half > 0; half /= 2)
        sum += __shfl_xor_sync(~0u, sum, half);
    int down = __shfl_down_sync(~0u, (int)threadIdx.x, 3);
    int fifth = __shfl_sync(~0u, (int)threadIdx.x, 5);
    unsigned odd = __ballot_sync(~0u, lane % 2);
    bool all = __all_sync(~0u, lane >= 0) && !__all_sync(~0u, lane > 0);
    bool right = fifth == (int)threadIdx.x / 32 * 32 + 5 && odd == 0xaaaaaaaa && all &&
                 __any_sync(~0u, lane == 7) && down == (int)threadIdx.x + (lane < 29 ? 3 : 0);
    out[threadIdx.x] = right ? sum : -1;
}

static __global__ void a_lane_exits(int *out)
{
    if (threadIdx.x == 3)
        return;
    out[threadIdx.x] = __shfl_xor_sync(~0u, 1, 1);
}

static __global__ void out_of_bounds(int *out) { out[threadIdx.x + 1] = 0; }

/* out: whether shared memory is NaN. */
static __global__ void uninitialized(int *out)
{
    __shared__ float s[N];
    out[threadIdx.x] = s[threadIdx.x] != s[threadIdx.x];
    s[threadIdx.x] = 1;
}

static __global__ void add_one(const int *in, int *out) { out[threadIdx.x] = in[threadIdx.x] + 1; }

/* A block writes 1 if the block before it has done so already. */
static __global__ void block_after_block(int *out)
{
    unsigned b = blockIdx.x;
    if (threadIdx.x == 0)
        out[b] = b == 0 || out[b - 1] == 1;
}

static cudaError_t launch(cudaStream_t stream, void (*kernel)(int *), int *out)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kernel == block_after_block ? N : 1);
    config.blockDim = dim3(N);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, out);
}

/* The second stream reads what the first one writes. waits: it waits for an event of the first. */
static void chain(int *host, bool waits)
{
    cudaStream_t first, second;
    cudaEvent_t event;
    int *a, *b;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1);
    config.blockDim = dim3(N);
    cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaMalloc(&a, N * sizeof *a);
    cudaMalloc(&b, N * sizeof *b);
    cudaMemsetAsync(a, 0, N * sizeof *a, first);
    cudaEventRecord(event, first);
    if (waits)
        cudaStreamWaitEvent(second, event, 0);
    config.stream = second;
    cudaLaunchKernelEx(&config, add_one, (const int *)a, b);
    cudaMemcpyAsync(host, b, N * sizeof *b, cudaMemcpyDefault, second);
    cudaEventDestroy(event);
    cudaStreamDestroy(first);
    cudaStreamDestroy(second);
    cudaFree(a);
    cudaFree(b);
}

/* Uses memory of device 0 on device 1. */
static cudaError_t use_on_another(const char *how, int *out)
{
    cudaSetDevice(1);
    cudaError_t error = strcmp(how, "a kernel") == 0 ? launch(NULL, uninitialized, out)
                        : strcmp(how, "a copy") == 0
                            ? cudaMemcpyAsync(out, out + 1, sizeof *out, cudaMemcpyDefault, NULL)
                            : cudaMemsetAsync(out, 0, sizeof *out, NULL);
    cudaSetDevice(0);
    return error;
}

/* Two launches on device 1, whose kernels use shared memory. */
static cudaError_t launch_twice(void)
{
    cudaStream_t stream;
    int *out;
    cudaSetDevice(1);
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaMalloc(&out, N * sizeof *out);
    cudaError_t error = launch(stream, uninitialized, out);
    cudaStreamSynchronize(stream);
    if (error == cudaSuccess)
        error = launch(stream, uninitialized, out);
    cudaStreamDestroy(stream);
    cudaFree(out);
    cudaSetDevice(0);
    return error;
}

static __global__ void neighbours_together(int *out) { neighbours(out, true); }
static __global__ void neighbours_alone(int *out) { neighbours(out, false); }

extern "C" const char *shim_probe(const char *name, int *out)
{
    static const struct {
        const char *name;
        void (*kernel)(int *);
    } probes[] = {{"neighbours", neighbours_together},
                  {"no barrier", neighbours_alone},
                  {"partial barrier", partial_barrier},
                  {"two barriers", two_barriers},
                  {"exchanges", exchanges},
                  {"a lane exits", a_lane_exits},
                  {"out of bounds", out_of_bounds},
                  {"block after block", block_after_block},
                  {"uninitialized", uninitialized}};
    static int on_host[N + 1] = {0};
    static char text[400];
    int *device;
    cudaError_t error = cudaSuccess;
    if (strncmp(name, "chain", 5) == 0) {
        chain(out, name[5] == 0);
        return "";
    }
    cudaMalloc(&device, N * sizeof *device);
    for (auto &p : probes)
        if (strcmp(name, p.name) == 0)
            error = launch(NULL, p.kernel, device);
    if (strcmp(name, "host address") == 0)
        error = launch(NULL, uninitialized, on_host + 1);
    if (strcmp(name, "two launches") == 0)
        error = launch_twice();
    if (strncmp(name, "another: ", 9) == 0)
        error = use_on_another(name + 9, device);
    if (error == cudaSuccess)
        error = cudaDeviceSynchronize();
    snprintf(text, sizeof text, "%s", error == cudaSuccess ? "" : cudaGetErrorString(error));
    shim_reset();
    cudaMemcpyAsync(out, device, N * sizeof *device, cudaMemcpyDefault, NULL);
    cudaStreamSynchronize(NULL);
    cudaFree(device);
    return text;
}
