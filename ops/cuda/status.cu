/* status.cu - error reports: CUDA errors, and dtypes without a kernel. */
#include "ops/cuda/cuda.h"

lt_status lt__cuda_status(const lt_cuda *cuda, cudaError_t error)
{
    if (error == cudaSuccess)
        return LT_OK;
    (void)cudaGetLastError(); /* clears errors that persist until they are read */
    return cuda->host->fail(error == cudaErrorMemoryAllocation ? LT_ENOMEM : LT_EENV, "%s: %s",
                            cuda->name, cudaGetErrorString(error));
}

lt_status lt__no_kernel(const lt_cuda *cuda, int dtype)
{
    return cuda->host->fail(LT_EUNSUPPORTED,
                            "%s does not support %s for this op; cast to f32, or compute on the "
                            "CPU",
                            cuda->name, lt__cuda_dtype_name(dtype));
}
