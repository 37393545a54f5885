/* devices.cpp - the emulated machine: its driver and its CUDA devices. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "enter.h"
#include "shim.h"
#include "tests/cuda/shim.h"

namespace {

int driver = CUDART_VERSION, n_devices = 4, capability = 9;
/* The device and the counters of the host thread. Not in thread_local variables, because
 * poison_shared() overwrites this module's thread_local variables. */
pthread_key_t device_key, counts_key;
const int key_errors = pthread_key_create(&device_key, NULL) +
                       pthread_key_create(&counts_key, free);

} // namespace

bool shim_hides(const char *name)
{
    const char *at = getenv("SHIM_HIDES");
    for (size_t n = strlen(name); at && *at; at += strcspn(at, " "), at += *at == ' ')
        if (strncmp(at, name, n) == 0 && (!at[n] || at[n] == ' '))
            return true;
    return false;
}

bool shim_hides_library(const char *name, char *text, size_t bytes)
{
    bool is_unused = shim_has_reference_ops() && strcmp(name, "NCCL") != 0;
    bool hides = is_unused || shim_hides(name);
    if (hides)
        snprintf(text, bytes, is_unused ? "no kernel uses %s" : "a test hides %s", name);
    return hides;
}

bool shim_has_reference_ops(void)
{
    const char *ops = getenv("SHIM_OPS");
    return ops && strcmp(ops, "reference") == 0;
}

int shim_device(void) { return (int)(intptr_t)pthread_getspecific(device_key); }

int64_t *shim_own_counts(void)
{
    if (!pthread_getspecific(counts_key))
        (void)pthread_setspecific(counts_key, calloc(SHIM_COUNTS, sizeof(int64_t)));
    return (int64_t *)pthread_getspecific(counts_key);
}

extern "C" void shim_set_machine(int a_driver, int devices, int a_capability)
{
    driver = a_driver;
    n_devices = devices;
    capability = a_capability;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = shim_hides("driver") ? 0 : driver;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *n)
{
    int version;
    (void)cudaDriverGetVersion(&version);
    *n = n_devices;
    return version < CUDART_VERSION ? cudaErrorInsufficientDriver
           : *n == 0                ? cudaErrorNoDevice
                                    : cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (device >= n_devices)
        return cudaErrorInvalidDevice;
    (void)pthread_setspecific(device_key, (void *)(intptr_t)device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attr, int)
{
    *value = attr == cudaDevAttrComputeCapabilityMajor   ? capability
             : attr == cudaDevAttrComputeCapabilityMinor ? 0
                                                         : 4;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int device)
{
    *prop = cudaDeviceProp();
    strcpy(prop->name, "shim");
    prop->uuid.bytes[0] = (char)device;
    prop->totalGlobalMem = (size_t)1 << 34;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void) { return cudaSuccess; }

const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorLaunchFailure: return shim_fault_text();
    default: return "some error";
    }
}
