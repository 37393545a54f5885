/* cuda_fp16.h - emulates the part of CUDA's cuda_fp16.h that our sources use: see cuda_runtime.h.
 */
#ifndef TESTS_CUDA_SHIM_HALF_H
#define TESTS_CUDA_SHIM_HALF_H

#include "core/tensor.h"

struct __half {
    uint16_t bits;
};

static inline float __half2float(__half h) { return lt__f16_to_f32(h.bits); }
static inline __half __float2half_rn(float f) { return __half{lt__f32_to_f16(f)}; }

#endif
