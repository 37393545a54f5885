/* stand_in_driver.c - a libcuda.so.1 for processes that build plans but run none. When cuDNN builds
 * a plan it compiles some engines and loads the code into the driver; here that succeeds. All other
 * functions fail with the error of NVIDIA's stub library, so that this one is never mistaken for a
 * driver. Parameters that are not used are omitted.
 */
#pragma GCC visibility push(default)

enum { DONE = 0, STUB_LIBRARY = 34 }; /* of CUresult */

static char any;

int cuLibraryLoadData(void **library);
int cuLibraryLoadData(void **library)
{
    *library = &any;
    return DONE;
}

int cuLibraryGetKernel(void **kernel);
int cuLibraryGetKernel(void **kernel)
{
    *kernel = &any;
    return DONE;
}

int cuKernelSetAttribute(void);
int cuKernelSetAttribute(void) { return DONE; }

int cuLibraryUnload(void);
int cuLibraryUnload(void) { return DONE; }

/* cuDNN prints the text without checking the status. */
int cuGetErrorString(int status, const char **text);
int cuGetErrorString(int status, const char **text)
{
    (void)status;
    *text = "no CUDA driver";
    return DONE;
}

int cuGetErrorName(int status, const char **text);
int cuGetErrorName(int status, const char **text) { return cuGetErrorString(status, text); }

/* clang-format off */
#define OTHERS(X)                                                                                  \
    X(cuCtxGetCurrent) X(cuCtxGetDevice) X(cuCtxGetLimit) X(cuCtxPopCurrent) X(cuCtxPopCurrent_v2) \
    X(cuCtxPushCurrent) X(cuCtxPushCurrent_v2) X(cuDeviceGet) X(cuDeviceGetAttribute)              \
    X(cuDeviceGetCount) X(cuDevicePrimaryCtxRelease) X(cuDevicePrimaryCtxReset)                    \
    X(cuDevicePrimaryCtxRetain) X(cuDriverGetVersion) X(cuFuncGetAttribute) X(cuFuncSetAttribute)  \
    X(cuGetProcAddress_v2) X(cuInit) X(cuKernelGetAttribute) X(cuKernelGetFunction)                \
    X(cuLaunchCooperativeKernel) X(cuLaunchKernel) X(cuLaunchKernelEx) X(cuLibraryLoadFromFile)    \
    X(cuLinkAddData) X(cuLinkAddData_v2) X(cuLinkAddFile_v2) X(cuLinkComplete) X(cuLinkCreate)     \
    X(cuLinkCreate_v2) X(cuLinkDestroy) X(cuMemcpyDtoH_v2) X(cuModuleGetFunction)                  \
    X(cuModuleGetGlobal_v2) X(cuModuleLoadData) X(cuModuleLoadDataEx) X(cuModuleLoadFatBinary)     \
    X(cuModuleUnload) X(cuOccupancyMaxActiveBlocksPerMultiprocessor)                               \
    X(cuOccupancyMaxPotentialClusterSize) X(cuStreamGetCtx) X(cuStreamSynchronize)                 \
    X(cuTensorMapEncodeTiled)
/* clang-format on */
#define X(name)                                                                                    \
    int name(void);                                                                                \
    int name(void) { return STUB_LIBRARY; }
OTHERS(X)
