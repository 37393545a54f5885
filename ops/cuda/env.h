/* env.h - what the plugin's C files need from its .cu files to call NVIDIA's libraries. */
#ifndef LT_OPS_CUDA_ENV_H
#define LT_OPS_CUDA_ENV_H

#include "ops/backend/plugin.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lt_cuda_env { /* borrowed by its users for their whole lifetime */
    const lt_host *host;
    lt_device *device;        /* its copy, convert, fill and add are enqueued in the stream */
    void *stream;             /* cudaStream_t */
    int index;                /* number of the CUDA device, from 0 */
    bool deterministic, tf32; /* as in lt_config */
    /* "NVIDIA H200, sm_90, 132 SMs, driver 13000"; a plan file is only valid for the same text */
    const char *model;
    size_t memory; /* bytes of the device; 0: unknown */
} lt_cuda_env;

/* For scratch with several parts: each part is aligned to LT_CUDA_ALIGN bytes. */
enum { LT_CUDA_ALIGN = 256 };
static inline size_t lt__cuda_padded(size_t bytes)
{
    return (bytes + LT_CUDA_ALIGN - 1) & ~(size_t)(LT_CUDA_ALIGN - 1);
}

/* For lt_kernels.scratch: the maximum of `max` and the bytes of one part. status is the result of
 * planning that part: LT_EUNSUPPORTED counts as 0 bytes, other errors give LT_SCRATCH_FAILED. */
static inline size_t lt__cuda_scratch(size_t max, lt_status status, size_t bytes)
{
    size_t part = status == LT_OK ? bytes : status == LT_EUNSUPPORTED ? 0 : LT_SCRATCH_FAILED;
    return part > max ? part : max;
}

/* Bytes of an element. The plugin cannot call lt_dtype_bytes(), which is in libluatrain. */
static inline size_t lt__cuda_dtype_bytes(int dtype)
{
    return dtype == LT_F64 || dtype == LT_I64   ? 8
           : dtype == LT_F32 || dtype == LT_I32 ? 4
           : dtype == LT_U8                     ? 1
                                                : 2;
}
/* The name of a dtype. Replaces lt_dtype_name() for the same reason. */
static inline const char *lt__cuda_dtype_name(int dtype)
{
    static const char *const names[] = {
#define X(name, bytes, text) text,
        LT_DTYPE_LIST(X)
#undef X
    };
    return names[dtype];
}

#ifdef __cplusplus
}
#endif
#endif
