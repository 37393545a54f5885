/* devices.cpp - the emulated machine: its driver and its CUDA devices. */
#include <pthread.h>

#include "shim.h"
#include "tests/cuda/shim.h"

namespace {

int driver = CUDART_VERSION, n_devices = 1, capability = 9;
/* The device of the host thread. Not in a thread_local variable, because poison_shared() overwrites
 * this module's thread_local variables. */
pthread_key_t device_key;
const int key_error = pthread_key_create(&device_key, NULL);

} // namespace

int shim_device(void) { return (int)(intptr_t)pthread_getspecific(device_key); }

extern "C" void shim_set_machine(int a_driver, int devices, int a_capability)
{
    driver = a_driver;
    n_devices = devices;
    capability = a_capability;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = driver;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = n_devices;
    return driver < CUDART_VERSION ? cudaErrorInsufficientDriver
           : n_devices == 0        ? cudaErrorNoDevice
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
