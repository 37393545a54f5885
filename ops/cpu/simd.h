/* simd.h - vectors of 16 floats, for kernels that the compiler does not vectorise by itself. The
 * types are vector types of GNU C, which map to one, two or four registers of the instruction set.
 *
 * The functions are inlined into functions marked LT_SIMD (core/simd.h), which are compiled for
 * each instruction set. Loads and stores need no alignment. bf16 is rounded to nearest, ties to
 * even; a NaN stays a NaN.
 */
#ifndef LT_OPS_CPU_SIMD_H
#define LT_OPS_CPU_SIMD_H

#include "ops/kernel.h"

enum { LT_LANES = 16 };

typedef float lt_vec __attribute__((vector_size(64)));
typedef int32_t lt_vec_i32 __attribute__((vector_size(64)));
typedef uint32_t lt_vec_u32 __attribute__((vector_size(64)));
typedef uint16_t lt_vec_u16 __attribute__((vector_size(32)));

/* A loop over the lanes of vectors, for code that depends on comparisons. gcc 12 emits scalar code
 * for comparisons of whole vectors, and for such a loop if it is unrolled. */
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
    for (int i = 0; i < LT_LANES; i++) /* one instruction; for a vector cast gcc emits five */
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

/* Loads 32 bf16 as two vectors of floats, the even and the odd elements. Each vector takes one
 * shift or mask of 32-bit words, without a shuffle. */
LT_INLINE void lt__load_pairs(const uint16_t *from, lt_vec v[2])
{
    lt_vec_u32 pairs;
    memcpy(&pairs, from, sizeof pairs);
    v[0] = (lt_vec)(pairs << 16);
    v[1] = (lt_vec)(pairs & 0xffff0000);
}

/* Rounds to bf16, in the upper half of each lane. A NaN from bf16 or arithmetic has 16 trailing
 * zero bits and stays a NaN. */
LT_INLINE lt_vec_u32 lt__round_pairs(lt_vec v)
{
    lt_vec_u32 bits = (lt_vec_u32)v;
    return bits + 0x7fff + (bits >> 16 & 1);
}

LT_INLINE void lt__store_pairs(uint16_t *to, const lt_vec v[2])
{
    lt_vec_u32 pairs = lt__round_pairs(v[0]) >> 16 | (lt__round_pairs(v[1]) & 0xffff0000);
    memcpy(to, &pairs, sizeof pairs);
}

/* ==== Products of bf16 ======================================================================== */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(LT_NO_CLONES)
#define LT_SIMD_BF16 __attribute__((target("arch=x86-64-v4,avx512bf16")))

/* Whether to use the bf16 instructions below. False where oneDNN can use AMX tiles, which are
 * faster still. */
static inline bool lt__has_bf16_products(void)
{
    return __builtin_cpu_supports("x86-64-v4") && __builtin_cpu_supports("avx512bf16") &&
           !__builtin_cpu_supports("amx-bf16");
}

/* Like lt__store_bf16(), but in one instruction, which flushes subnormals to zero. */
LT_INLINE void lt__store_bf16_at_once(uint16_t *to, lt_vec v)
{
    lt_vec_u16 half;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(half) : "v"(v));
    memcpy(to, &half, sizeof half);
}

/* Packs words of two bf16: a in the lower half of each, b in the upper half. */
LT_INLINE lt_vec lt__pair_bf16(lt_vec a, lt_vec b)
{
    typedef uint16_t halves __attribute__((vector_size(64)));
    halves all;
    __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(all) : "v"(a), "v"(b));
    return (lt_vec)__builtin_shufflevector(all, all, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6,
                                           22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29,
                                           14, 30, 15, 31);
}

/* Adds to sum the products of both bf16 halves of each word. */
LT_INLINE lt_vec lt__dot_bf16(lt_vec sum, lt_vec a, lt_vec b)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
#else
#define LT_SIMD_BF16
/* Plain C versions, used only by tests. */
static inline bool lt__has_bf16_products(void) { return false; }

LT_INLINE void lt__store_bf16_at_once(uint16_t *to, lt_vec v) { lt__store_bf16(to, v); }

LT_INLINE lt_vec lt__pair_bf16(lt_vec a, lt_vec b)
{
    return (lt_vec)(lt__round_pairs(a) >> 16 | (lt__round_pairs(b) & 0xffff0000));
}

LT_INLINE lt_vec lt__dot_bf16(lt_vec sum, lt_vec a, lt_vec b)
{
    sum += (lt_vec)((lt_vec_u32)a << 16) * (lt_vec)((lt_vec_u32)b << 16);
    return sum + (lt_vec)((lt_vec_u32)a & 0xffff0000) * (lt_vec)((lt_vec_u32)b & 0xffff0000);
}
#endif

#endif
