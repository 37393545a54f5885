/* simd.h - vectors of 16 floats, for kernels that the compiler does not vectorise by itself: plain
 * C over a vector type, which becomes one register, two or four as the instruction set has it.
 *
 * Functions over them are inlined into one that is marked LT_SIMD (kernel.h) and so compiled for
 * each instruction set. Loads and stores want no alignment. bf16 is rounded to nearest, ties to
 * even; a NaN stays one.
 */
#ifndef LT_OPS_SIMD_H
#define LT_OPS_SIMD_H

#include "ops/kernel.h"

enum { LT_LANES = 16 };

typedef float lt_vec __attribute__((vector_size(64)));
typedef int32_t lt_vec_i32 __attribute__((vector_size(64)));
typedef uint32_t lt_vec_u32 __attribute__((vector_size(64)));
typedef uint16_t lt_vec_u16 __attribute__((vector_size(32)));

/* A loop over the lanes of vectors: for what depends on comparisons, of which gcc 12 makes scalar
 * code when whole vectors are compared; unrolled, it would not see vectors in it either. */
#ifdef __clang__
#define LT_EACH_LANE(k) for (int k = 0; k < LT_LANES; k++)
#else
#define LT_EACH_LANE(k) _Pragma("GCC unroll 1") for (int k = 0; k < LT_LANES; k++)
#endif

LT_INLINE lt_vec lt__load_f32(const float *from)
{
    lt_vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

LT_INLINE void lt__store_f32(float *to, lt_vec v) { memcpy(to, &v, sizeof v); }

LT_INLINE lt_vec lt__load_bf16(const uint16_t *from)
{
    lt_vec_u32 bits;
    for (int i = 0; i < LT_LANES; i++) /* one instruction; gcc makes five of a vector cast */
        bits[i] = (uint32_t)from[i] << 16;
    return (lt_vec)bits;
}

LT_INLINE void lt__store_bf16(uint16_t *to, lt_vec v)
{
    lt_vec_u32 bits = (lt_vec_u32)v;
    LT_EACH_LANE(k)
        bits[k] = v[k] != v[k] ? 0x7fc00000 : bits[k] + 0x7fff + (bits[k] >> 16 & 1);
    lt_vec_u16 half = __builtin_convertvector(bits >> 16, lt_vec_u16);
    memcpy(to, &half, sizeof half);
}

#endif
