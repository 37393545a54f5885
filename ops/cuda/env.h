/* env.h - what the plugin's frame offers to those who call NVIDIA's libraries from C. */
#ifndef LT_OPS_CUDA_ENV_H
#define LT_OPS_CUDA_ENV_H

#include "ops/plugin.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lt_cuda_env {  /* borrowed for as long as they live */
    const lt_host *host;
    lt_device *device;         /* its copy, convert, fill and add go into the stream */
    void *stream;              /* cudaStream_t */
    int index;                 /* of the device, from 0 */
    bool deterministic, tf32;  /* as in lt_config */
    const char *model;         /* "NVIDIA H200, sm_90, 132 SMs, driver 13000": plans on disk are for
                                * no other one */
    /* to (cols) = the sum of the rows of from (rows, cols), written or added. Into the stream. */
    lt_status (*sum_rows)(lt_device *device, void *to, lt_dtype to_dtype, const void *from,
                          lt_dtype from_dtype, int64_t rows, int64_t cols, bool add);
} lt_cuda_env;

/* For scratch of several parts: each begins at a multiple of so many bytes. */
enum { LT_CUDA_ALIGN = 256 };
static inline size_t lt__cuda_padded(size_t bytes)
{
    return (bytes + LT_CUDA_ALIGN - 1) & ~(size_t)(LT_CUDA_ALIGN - 1);
}

/* For scratch() of lt_kernels: the larger of `most` and what one part needs, where status says
 * whether the part has a plan. */
static inline size_t lt__cuda_scratch(size_t most, lt_status status, size_t bytes)
{
    size_t part = status == LT_OK ? bytes : status == LT_EUNSUPPORTED ? 0 : LT_NO_SCRATCH;
    return part > most ? part : most;
}

/* Bytes of an element: the library's own function is not the plugin's to call. */
static inline size_t lt__cuda_dtype_bytes(lt_dtype dtype)
{
    return dtype == LT_F64 || dtype == LT_I64 ? 8
         : dtype == LT_F32 || dtype == LT_I32 ? 4
         : dtype == LT_U8                     ? 1
                                              : 2;
}

#ifdef __cplusplus
}
#endif
#endif
