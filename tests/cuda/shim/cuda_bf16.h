/* cuda_bf16.h - emulates the part of CUDA's cuda_bf16.h that our sources use: see cuda_runtime.h.
 */
#ifndef TESTS_CUDA_SHIM_BFLOAT_H
#define TESTS_CUDA_SHIM_BFLOAT_H

#include "core/tensor.h"

struct __nv_bfloat16 {
    uint16_t bits;
};

static inline float __bfloat162float(__nv_bfloat16 h) { return lt__bf16_to_f32(h.bits); }
static inline __nv_bfloat16 __float2bfloat16_rn(float f)
{
    return __nv_bfloat16{lt__f32_to_bf16(f)};
}

#endif
