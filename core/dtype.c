/* dtype.c - names and sizes of the dtypes, and conversion between any two of them.
 *
 * f16 and bf16 are converted to and from f32 only. A value of a wider type (f64, i64, i32) is first
 * rounded to odd in f32: truncated, with the last bit set if the result is inexact. Rounding that
 * to f16 or bf16 gives the same result as rounding the wide value directly, since f32 has more than
 * two extra bits. This includes the subnormal numbers of both (S. Boldo and G. Melquiond, Emulation
 * of FMA and correctly rounded sums: proved algorithms using rounding to odd, IEEE Trans. Comput.
 * 57(4), 2008).
 *
 * The vector code gives the same bits as the scalar functions; tests compare the two. It uses AVX2
 * with F16C only: AVX-512 was faster only for data in the caches. AVX-512-BF16 cannot be used,
 * since VCVTNEPS2BF16 treats subnormal numbers as zero; the integer code rounds them correctly.
 */
#include <math.h>
#include <string.h>

#include "core/tensor.h"

/* not with clang: no runtime check for F16C */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define FAST __attribute__((target("avx2,f16c")))
#endif

typedef float F32;
typedef double F64;
typedef uint16_t F16, BF16; /* bit patterns */
typedef int64_t I64;
typedef int32_t I32;
typedef uint8_t U8;

size_t lt_dtype_bytes(lt_dtype dtype)
{
    static const uint8_t table[] = {
#define X(name, bytes, text) [name] = bytes,
        LT_DTYPE_LIST(X)
#undef X
    };
    return (unsigned)dtype < LT_DTYPE_COUNT ? table[dtype] : 0;
}

static const char *const names[] = {
#define X(name, bytes, text) [name] = text,
    LT_DTYPE_LIST(X)
#undef X
};

const char *lt_dtype_name(lt_dtype dtype)
{
    return (unsigned)dtype < LT_DTYPE_COUNT ? names[dtype] : "unknown";
}

int lt_dtype_find(const char *name)
{
    for (int i = 0; i < LT_DTYPE_COUNT; i++)
        if (strcmp(name, names[i]) == 0)
            return i;
    return -1;
}

/* ==== Single values =========================================================================== */

static inline uint32_t bits_of(float f)
{
    union {
        float f;
        uint32_t u;
    } v = {f};
    return v.u;
}

static inline float float_of(uint32_t u)
{
    union {
        uint32_t u;
        float f;
    } v = {u};
    return v.f;
}

/* u / 2^shift, rounded to nearest even. A carry out of the fraction correctly increments the
 * exponent. */
static inline uint32_t shift_nearest(uint32_t u, int shift)
{
    return (u + (1u << (shift - 1)) - 1 + (u >> shift & 1)) >> shift;
}

uint16_t lt__f32_to_f16(float f)
{
    uint32_t u = bits_of(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) /* NaN: quiet, with the part of the payload that fits */
        return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x3ff));
    if (a >= 0x47800000) /* at least 65536 */
        return (uint16_t)(sign | 0x7c00);
    if (a >= 0x38800000) /* at least 2^-14: normal; rebias the exponent from 127 to 15 */
        return (uint16_t)(sign | shift_nearest(a - ((127u - 15) << 23), 13));
    if (a <= 0x33000000) /* at most 2^-25, half the smallest subnormal */
        return (uint16_t)sign;
    /* in units of 2^((a >> 23) - 150); the shift converts it to units of 2^-24 */
    uint32_t fraction = (a & 0x7fffff) | 0x800000;
    return (uint16_t)(sign | shift_nearest(fraction, 126 - (int)(a >> 23)));
}

float lt__f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 0)
        return float_of(sign | bits_of((float)fraction * 0x1p-24f));
    if (exponent == 31)
        return float_of(sign | 0x7f800000 | (fraction ? 0x400000 : 0) | fraction << 13);
    return float_of(sign | (exponent + 127 - 15) << 23 | fraction << 13);
}

static inline uint16_t f32_to_bf16(float f)
{
    uint32_t u = bits_of(f);
    bool nan = (u & 0x7fffffff) > 0x7f800000;
    return (uint16_t)(nan ? u >> 16 | 0x40 : shift_nearest(u, 16));
}

static float f64_to_odd(double d)
{
    float f = (float)d;
    if (isnan(d) || (double)f == d)
        return f;
    uint32_t u = bits_of(f);
    if (fabs((double)f) > fabs(d)) /* undo a rounding away from zero or to infinity */
        u--;
    return float_of(u | 1);
}

static float i64_to_odd(int64_t i)
{
    if (i >= -((int64_t)1 << 53) && i <= (int64_t)1 << 53)
        return f64_to_odd((double)i);
    return f64_to_odd((double)(i >> 11 | ((i & 2047) != 0)) * 2048);
}

uint16_t lt__f32_to_bf16(float f) { return f32_to_bf16(f); }
uint16_t lt__f64_to_f16(double d) { return lt__f32_to_f16(f64_to_odd(d)); }
uint16_t lt__f64_to_bf16(double d) { return f32_to_bf16(f64_to_odd(d)); }

bool lt__dtype_can_represent(lt_dtype dtype, double value)
{
    switch (dtype) {
    case LT_I64: return value == floor(value) && value >= -0x1p63 && value < 0x1p63;
    case LT_I32: return value == floor(value) && value >= -0x1p31 && value < 0x1p31;
    case LT_U8: return value == floor(value) && value >= 0 && value < 256;
    default: return true;
    }
}

bool lt__dtype_can_represent_integer(lt_dtype dtype, int64_t value)
{
    switch (dtype) {
    case LT_I32: return value >= INT32_MIN && value <= INT32_MAX;
    case LT_U8: return value >= 0 && value <= UINT8_MAX;
    default: return true;
    }
}

bool lt__is_exact_double(int64_t value)
{
    double near = (double)value;
    return near < 0x1p63 && (int64_t)near == value;
}

/* Truncates toward zero and saturates; NaN gives 0. */
static inline I64 to_i64(double d)
{
    return isnan(d) ? 0 : d >= 0x1p63 ? INT64_MAX : d <= -0x1p63 ? INT64_MIN : (I64)d;
}

static inline I32 to_i32(double d)
{
    return isnan(d) ? 0 : d >= 0x1p31 ? INT32_MAX : d <= -0x1p31 ? INT32_MIN : (I32)d;
}

static inline U8 to_u8(double d)
{
    return isnan(d) ? 0 : d >= 256 ? UINT8_MAX : d <= 0 ? 0 : (U8)d;
}

/* ==== Arrays ================================================================================== */

typedef void (*loop)(void *dst, const void *src, size_t n);

#define LOOP(name, FROM, TO, value)                                                                \
    static void name(void *dst, const void *src, size_t n)                                         \
    {                                                                                              \
        const FROM *restrict from = src;                                                           \
        TO *restrict to = dst;                                                                     \
        for (size_t i = 0; i < n; i++) {                                                           \
            FROM v = from[i];                                                                      \
            to[i] = (TO)(value);                                                                   \
        }                                                                                          \
    }

/*    from  to   conversion of v */
/* clang-format off */
#define LOOP_LIST(X)                                                                             \
    X(F32,  F64, v) X(F32, I64, to_i64(v)) X(F32, I32, to_i32(v)) X(F32, U8,  to_u8(v))          \
    X(F64,  F32, v) X(F64, I64, to_i64(v)) X(F64, I32, to_i32(v)) X(F64, U8,  to_u8(v))          \
    X(I64,  F32, v) X(I64, F64, v)         X(I64, I32, v)         X(I64, U8,  v)                 \
    X(I32,  F32, v) X(I32, F64, v)         X(I32, I64, v)         X(I32, U8,  v)                 \
    X(U8,   F32, v) X(U8,  F64, v)         X(U8,  I64, v)         X(U8,  I32, v)                 \
    X(F16,  F32, lt__f16_to_f32(v))        X(F32, F16, lt__f32_to_f16(v))                        \
    X(BF16, F32, lt__bf16_to_f32(v))       X(F32, BF16, f32_to_bf16(v))
/* clang-format on */

#define X(FROM, TO, value) LOOP(FROM##_##TO, FROM, TO, value)
LOOP_LIST(X)
#undef X

static const loop loops[LT_DTYPE_COUNT][LT_DTYPE_COUNT] = {
#define X(FROM, TO, value) [LT_##FROM][LT_##TO] = FROM##_##TO,
    LOOP_LIST(X)
#undef X
};

/* To f32, rounded to odd. */
LOOP(F64_odd, F64, F32, f64_to_odd(v))
LOOP(I64_odd, I64, F32, i64_to_odd(v))
LOOP(I32_odd, I32, F32, f64_to_odd(v))

static const loop odd_loops[LT_DTYPE_COUNT] = {
    [LT_F64] = F64_odd,
    [LT_I64] = I64_odd,
    [LT_I32] = I32_odd,
};

#ifdef FAST

FAST static void F32_F16_fast(void *dst, const void *src, size_t n)
{
    const F32 *from = src;
    F16 *to = dst;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(to + i), h);
    }
    F32_F16(to + i, from + i, n - i);
}

FAST static void F16_F32_fast(void *dst, const void *src, size_t n)
{
    const F16 *from = src;
    F32 *to = dst;
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    F16_F32(to + i, from + i, n - i);
}

/* clang-format off */
FAST LOOP(F32_BF16_fast, F32, BF16, f32_to_bf16(v))
FAST LOOP(BF16_F32_fast, BF16, F32, lt__bf16_to_f32(v))

static const loop fast_loops[LT_DTYPE_COUNT][LT_DTYPE_COUNT] = {
    [LT_F32][LT_F16] = F32_F16_fast,
    [LT_F16][LT_F32] = F16_F32_fast,
    [LT_F32][LT_BF16] = F32_BF16_fast,
    [LT_BF16][LT_F32] = BF16_F32_fast,
};
/* clang-format on */

#endif

static loop best_loop(lt_dtype from, lt_dtype to)
{
#ifdef FAST
    if (fast_loops[from][to] && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"))
        return fast_loops[from][to];
#endif
    return loops[from][to];
}

void lt_convert(void *dst, lt_dtype dst_dtype, const void *src, lt_dtype src_dtype, size_t n)
{
    enum { BLOCK = 2048 };
    size_t dst_size = lt_dtype_bytes(dst_dtype), src_size = lt_dtype_bytes(src_dtype);
    if (dst_dtype == src_dtype) {
        if (n > 0)
            memcpy(dst, src, n * dst_size);
        return;
    }
    loop odd = lt__is_half(dst_dtype) ? odd_loops[src_dtype] : NULL;
    loop direct = best_loop(src_dtype, dst_dtype);
    loop first = odd ? odd : best_loop(src_dtype, LT_F32), second = best_loop(LT_F32, dst_dtype);
    for (size_t i = 0; i < n; i += BLOCK) {
        size_t count = n - i < BLOCK ? n - i : BLOCK;
        char *to = (char *)dst + i * dst_size;
        const char *from = (const char *)src + i * src_size;
        if (direct) {
            direct(to, from, count);
        } else {
            float between[BLOCK];
            first(between, from, count);
            second(to, between, count);
        }
    }
}
