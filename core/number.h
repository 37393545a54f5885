/* number.h - dtypes, conversions of single values, random numbers. Included by tensor.h. */
#ifndef LT_CORE_NUMBER_H
#define LT_CORE_NUMBER_H

#include "core/core.h"
#include "core/simd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(dtype, size of an element in bytes, name), in the order of lt_dtype. */
/* clang-format off */
#define LT_DTYPE_LIST(X)                                                                           \
    X(LT_F32, 4, "f32") X(LT_F64, 8, "f64") X(LT_F16, 2, "f16") X(LT_BF16, 2, "bf16")              \
    X(LT_I64, 8, "i64") X(LT_I32, 4, "i32") X(LT_U8, 1, "u8")
/* clang-format on */

static inline bool lt__is_float(lt_dtype t) { return t <= LT_BF16; }
static inline bool lt__is_half(lt_dtype t) { return t == LT_F16 || t == LT_BF16; }

/* Whether a dtype can represent a number. An integer dtype represents the whole numbers in its
 * range; a float dtype represents any number, rounded. */
bool lt__dtype_can_represent(lt_dtype dtype, double value);
bool lt__dtype_can_represent_integer(lt_dtype dtype, int64_t value);
/* Whether a double represents value exactly. */
bool lt__is_exact_double(int64_t value);

/* Conversions of single values; the vector loops are in dtype.c. */
float lt__f16_to_f32(uint16_t h);
uint16_t lt__f32_to_f16(float f);
uint16_t lt__f64_to_f16(double d);
uint16_t lt__f32_to_bf16(float f);
uint16_t lt__f64_to_bf16(double d);
static inline float lt__bf16_to_f32(uint16_t h)
{
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)h << 16};
    return v.f;
}

/* lt__random_key() derives the key of lt_random() from seed and purpose; lt__philox() is
 * lt_philox(). Both are inline so that CUDA sources can use them, the latter also in kernels. The
 * mixing function of the key is from Steele, Lea and Flood, Fast splittable pseudorandom number
 * generators, OOPSLA 2014. */
static inline void lt__random_key(uint64_t seed, lt_purpose purpose, uint32_t key[2])
{
    uint64_t x = seed + ((uint64_t)purpose + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    x ^= x >> 31;
    key[0] = (uint32_t)x;
    key[1] = (uint32_t)(x >> 32);
}

LT_BOTH static inline void lt__philox(const uint32_t counter[4], const uint32_t key[2],
                                      uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xd2511f53 * c0, p1 = (uint64_t)0xcd9e8d57 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9e3779b9; /* the golden ratio, and sqrt(3) - 1 */
        k1 += 0xbb67ae85;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Updates h with `blocks` blocks of 64 bytes, in plain C. Declared here so that tests can compare
 * the fast version with it. */
void lt__sha256_plain(uint32_t h[8], const uint8_t *from, size_t blocks);

#ifdef __cplusplus
}
#endif
#endif
