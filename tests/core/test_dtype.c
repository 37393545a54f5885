/* test_dtype.c - compares conversions with their definition: round to nearest, ties to even. The
 * definition is a search in the sorted list of the format's numbers, in long double, where all
 * sources and sums are exact. lt_convert() uses vector code where this machine supports it; the
 * scalar versions are called by name.
 */
#include <stdlib.h>

#include "core/tensor.h"
#include "tests/lt_test.h"

/* ==== The definition ========================================================================== */

typedef struct format {
    lt_dtype dtype;
    uint16_t infinity;
    double value[0x7f81]; /* of bits 0..infinity; there, the next power of two */
} format;

static format f16 = {.dtype = LT_F16, .infinity = 0x7c00};
static format bf16 = {.dtype = LT_BF16, .infinity = 0x7f80};

static void fill_format(format *f, int fraction_bits, int bias)
{
    for (int i = 0; i <= f->infinity; i++) {
        int exponent = i >> fraction_bits, fraction = i & ((1 << fraction_bits) - 1);
        int whole = exponent ? 1 << fraction_bits : 0;
        f->value[i] = ldexp(whole + fraction, (exponent ? exponent : 1) - bias - fraction_bits);
    }
}

static void fill_formats(void)
{
    fill_format(&f16, 10, 15);
    fill_format(&bf16, 7, 127);
}

/* The bits of the number nearest to x, which must not be NaN. */
static uint16_t nearest(const format *f, long double x)
{
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    long double a = fabsl(x);
    int low = 0, high = f->infinity;
    if (a >= f->value[high])
        return sign | f->infinity;
    while (high - low > 1) { /* value[low] <= a < value[high] */
        int middle = (low + high) / 2;
        *(f->value[middle] <= a ? &low : &high) = middle;
    }
    long double twice = (long double)f->value[low] + f->value[high];
    bool up = 2 * a > twice || (2 * a == twice && (high & 1) == 0);
    return sign | (uint16_t)(up ? high : low);
}

/* ==== Random bits ============================================================================= */

static uint64_t state;
static uint64_t random_bits(void)
{
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

static float float_of(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static uint16_t scalar_of_f32(const format *f, float x)
{
    return f == &f16 ? lt__f32_to_f16(x) : lt__f32_to_bf16(x);
}

static uint16_t scalar_of_f64(const format *f, double x)
{
    return f == &f16 ? lt__f64_to_f16(x) : lt__f64_to_bf16(x);
}

/* Checks n floats of f32 or f64: vector code, scalar code and definition agree in every bit. A NaN
 * becomes quiet and keeps its sign. */
static void check(const format *f, const void *x, lt_dtype dtype, size_t n)
{
    static uint16_t h[8192];
    lt_convert(h, f->dtype, x, dtype, n);
    for (size_t i = 0; i < n; i++) {
        double from = dtype == LT_F32 ? ((const float *)x)[i] : ((const double *)x)[i];
        uint16_t scalar = dtype == LT_F64 ? scalar_of_f64(f, from)
                                          : scalar_of_f32(f, ((const float *)x)[i]);
        if (h[i] != scalar)
            FAIL("%a to %s: %#x by lt_convert, %#x by the scalar version", from,
                 lt_dtype_name(f->dtype), h[i], scalar);
        if (isnan(from) ? (h[i] & 0x7fff) <= f->infinity || h[i] >> 15 != (signbit(from) != 0)
                        : h[i] != nearest(f, (long double)from))
            FAIL("%a to %s gives %#x", from, lt_dtype_name(f->dtype), h[i]);
    }
}

/* ==== Tests =================================================================================== */

TEST(names_and_sizes)
{
    static const size_t bytes[] = {4, 8, 2, 2, 8, 4, 1};
    static const char *const names[] = {"f32", "f64", "f16", "bf16", "i64", "i32", "u8"};
    CHECK_EQ(LT_DTYPE_COUNT, 7);
    for (int i = 0; i < LT_DTYPE_COUNT; i++) {
        CHECK_EQ(lt_dtype_bytes((lt_dtype)i), bytes[i]);
        CHECK_STR(lt_dtype_name((lt_dtype)i), names[i]);
        CHECK_EQ(lt_dtype_find(names[i]), i);
    }
    CHECK_EQ(lt_dtype_find("float32"), -1);
    CHECK_EQ(lt_dtype_find(""), -1);
}

/* Converts all 65536 bit patterns to f32, by vector and scalar code, and back. */
static void check_widening(const format *f)
{
    static uint16_t all[65536], back[65536];
    static float wide[65536];
    static double wider[65536];
    for (int i = 0; i < 65536; i++)
        all[i] = (uint16_t)i;
    lt_convert(wide, LT_F32, all, f->dtype, 65536);
    lt_convert(wider, LT_F64, all, f->dtype, 65536);
    lt_convert(back, f->dtype, wide, LT_F32, 65536);
    for (int i = 0; i < 65536; i++) {
        int magnitude = i & 0x7fff;
        uint32_t scalar =
            bits_of(f == &f16 ? lt__f16_to_f32((uint16_t)i) : lt__bf16_to_f32((uint16_t)i));
        CHECK_EQ(bits_of(wide[i]), scalar);
        CHECK_EQ(signbit(wide[i]) != 0, i >> 15);
        if (magnitude > f->infinity) {
            CHECK(isnan(wide[i]) && isnan(wider[i]));
            CHECK_EQ(back[i], i | (f == &f16 ? 0x200 : 0x40));
        } else {
            CHECK_NEAR(fabs(wide[i]), magnitude == f->infinity ? INFINITY : f->value[magnitude], 0);
            CHECK_NEAR(wider[i], wide[i], 0);
            CHECK_EQ(back[i], i);
        }
    }
}

TEST(every_half_widens_exactly_and_round_trips)
{
    fill_formats();
    check_widening(&f16);
    check_widening(&bf16);
}

/* Between each pair of adjacent numbers: the midpoint, and the nearest numbers of the source format
 * on both sides of it. */
static void check_ties(const format *f)
{
    for (int i = 0; i < f->infinity; i++) {
        double middle = (f->value[i] + f->value[i + 1]) / 2;
        float narrow = (float)middle,
              near[6] = {narrow, nextafterf(narrow, 0), nextafterf(narrow, INFINITY)};
        double near64[6] = {middle, nextafter(middle, 0), nextafter(middle, INFINITY)};
        for (int k = 0; k < 3; k++) {
            near[3 + k] = -near[k];
            near64[3 + k] = -near64[k];
        }
        CHECK_EQ(narrow == middle, 1);
        check(f, near, LT_F32, 6);
        check(f, near64, LT_F64, 6);
    }
}

TEST(every_tie_rounds_to_even)
{
    fill_formats();
    check_ties(&f16);
    check_ties(&bf16);
}

TEST(random_f32_bits)
{
    fill_formats();
    state = 1;
    for (int round = 0; round < 500; round++) {
        float x[8192];
        for (int i = 0; i < 8192; i++) {
            uint32_t u = (uint32_t)random_bits();
            if (i & 1) /* every other one near the range of f16 */
                u = (u & 0x807fffff) | (100 + u % 47) << 23;
            x[i] = float_of(u);
        }
        check(&f16, x, LT_F32, 8192);
        check(&bf16, x, LT_F32, 8192);
    }
}

TEST(random_f64_bits)
{
    fill_formats();
    state = 2;
    for (int round = 0; round < 250; round++) {
        double x[8192];
        for (int i = 0; i < 8192; i++) {
            uint64_t u = random_bits();
            if (i % 4 > 0) /* most near the range of f32 */
                u = (u & 0x800fffffffffffff) | (1023 - 160 + u % 300) << 52;
            if (i % 4 > 1) /* half of these near a tie */
                u = (u & ~(uint64_t)0xffffffffff) | (u & 1);
            memcpy(&x[i], &u, sizeof u);
        }
        check(&f16, x, LT_F64, 8192);
        check(&bf16, x, LT_F64, 8192);
    }
}

TEST(special_numbers)
{
    static const double x[] = {
        0.0,
        -0.0,
        INFINITY,
        -INFINITY,
        NAN,
        65504,
        65519.99,
        65520,
        1e300,
        -1e300,
        5e-324,
        0x1p-24,
        0x1p-25,
        0x1.0000000000001p-25,
        0x1p-133,
        0x1p-134,
        0x1.0000000000001p-134,
        0x1.fep127,
        0x1.fefp127,
        0x1.ffp127,
        0x1.fffffep127,
    };
    size_t n = sizeof x / sizeof *x;
    float y[sizeof x / sizeof *x];
    fill_formats();
    lt_convert(y, LT_F32, x, LT_F64, n);
    check(&f16, x, LT_F64, n);
    check(&bf16, x, LT_F64, n);
    check(&f16, y, LT_F32, n);
    check(&bf16, y, LT_F32, n);
    CHECK_EQ(lt__f64_to_f16(65519.99), 0x7bff);
    CHECK_EQ(lt__f64_to_f16(65520), 0x7c00);
    CHECK_EQ(lt__f64_to_bf16(-0x1.ffp127), 0xff80);
}

/* 1 + 2^-8 + 2^-40 is just above a tie of bf16 (and 1 + 2^-11 + 2^-40 of f16), but rounds to that
 * tie in f32. */
TEST(no_double_rounding_from_f64)
{
    CHECK_EQ(lt__f64_to_bf16(1 + 0x1p-8 + 0x1p-40), 0x3f81);
    CHECK_EQ(lt__f64_to_bf16(1 + 0x1p-8), 0x3f80);
    CHECK_EQ(lt__f64_to_f16(1 + 0x1p-11 + 0x1p-40), 0x3c01);
    CHECK_EQ(lt__f64_to_f16(1 + 0x1p-11), 0x3c00);
}

/* All integers are exact in long double. The largest are not exact in double, which could hide a
 * double rounding. */
TEST(integers_to_halves)
{
    fill_formats();
    state = 3;
    for (int k = 0; k < 300000; k++) {
        uint64_t u = random_bits();
        int64_t i = (int64_t)u >> (u & 63);
        if (k % 3 == 0) /* a power of two, plus half an ulp of bf16, plus -1, 0 or 1 */
            i = (int64_t)(((uint64_t)1 << u % 63 | (uint64_t)1 << u % 63 >> 8) + (u >> 8) % 3 - 1);
        int32_t j = (int32_t)i;
        uint16_t h[4];
        lt_convert(&h[0], LT_F16, &i, LT_I64, 1);
        lt_convert(&h[1], LT_BF16, &i, LT_I64, 1);
        lt_convert(&h[2], LT_F16, &j, LT_I32, 1);
        lt_convert(&h[3], LT_BF16, &j, LT_I32, 1);
        CHECK_EQ(h[0], nearest(&f16, (long double)i));
        CHECK_EQ(h[1], nearest(&bf16, (long double)i));
        CHECK_EQ(h[2], nearest(&f16, (long double)j));
        CHECK_EQ(h[3], nearest(&bf16, (long double)j));
    }
    int64_t above_tie = ((int64_t)1 << 62) + ((int64_t)1 << 54) + 1,
            ends[] = {INT64_MIN, INT64_MAX};
    uint16_t h[2];
    lt_convert(h, LT_BF16, &above_tie, LT_I64, 1);
    CHECK_EQ(h[0], 0x5e81);
    lt_convert(h, LT_BF16, ends, LT_I64, 2);
    CHECK_EQ(h[0], 0xdf00);
    CHECK_EQ(h[1], 0x5f00);
}

TEST(floats_to_integers_truncate_and_saturate)
{
    static const struct {
        double x;
        int64_t i64;
        int32_t i32;
        uint8_t u8;
    } known[] = {
        {0.0, 0, 0, 0},
        {-0.0, 0, 0, 0},
        {0.99, 0, 0, 0},
        {-0.99, 0, 0, 0},
        {1.5, 1, 1, 1},
        {-1.5, -1, -1, 0},
        {254.9, 254, 254, 254},
        {255, 255, 255, 255},
        {255.9, 255, 255, 255},
        {256, 256, 256, 255},
        {2147483646.5, 2147483646, 2147483646, 255},
        {2147483647.9, 2147483647, INT32_MAX, 255},
        {2147483648.0, 2147483648, INT32_MAX, 255},
        {-2147483648.9, -2147483648, INT32_MIN, 0},
        {-2147483649.0, -2147483649, INT32_MIN, 0},
        {0x1.fffffffffffffp62, 0x7ffffffffffffc00, INT32_MAX, 255},
        {0x1p63, INT64_MAX, INT32_MAX, 255},
        {-0x1p63, INT64_MIN, INT32_MIN, 0},
        {1e300, INT64_MAX, INT32_MAX, 255},
        {-1e300, INT64_MIN, INT32_MIN, 0},
        {INFINITY, INT64_MAX, INT32_MAX, 255},
        {-INFINITY, INT64_MIN, INT32_MIN, 0},
        {NAN, 0, 0, 0},
    };
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        float f = (float)known[k].x;
        bool is_f32 = (double)f == known[k].x || isnan(f);
        for (int narrow = 0; narrow <= is_f32; narrow++) {
            const void *from = narrow ? (const void *)&f : &known[k].x;
            lt_dtype dtype = narrow ? LT_F32 : LT_F64;
            int64_t i64;
            int32_t i32;
            uint8_t u8;
            lt_convert(&i64, LT_I64, from, dtype, 1);
            lt_convert(&i32, LT_I32, from, dtype, 1);
            lt_convert(&u8, LT_U8, from, dtype, 1);
            CHECK_EQ(i64, known[k].i64);
            CHECK_EQ(i32, known[k].i32);
            CHECK_EQ(u8, known[k].u8);
        }
    }
    uint16_t halves[] = {0x7c00, 0xfc00, 0x7e00, 0x5bff}; /* inf, -inf, NaN, 255.875 */
    uint8_t bytes[4];
    int64_t wide[4];
    lt_convert(bytes, LT_U8, halves, LT_F16, 4);
    lt_convert(wide, LT_I64, halves, LT_F16, 4);
    CHECK(bytes[0] == 255 && bytes[1] == 0 && bytes[2] == 0 && bytes[3] == 255);
    CHECK(wide[0] == INT64_MAX && wide[1] == INT64_MIN && wide[2] == 0 && wide[3] == 255);
}

TEST(integers_wrap)
{
    int64_t x[] = {256 + 7, -1, ((int64_t)1 << 32) + 5, ((int64_t)1 << 31), INT64_MIN};
    uint8_t u8[5];
    int32_t i32[5];
    lt_convert(u8, LT_U8, x, LT_I64, 5);
    lt_convert(i32, LT_I32, x, LT_I64, 5);
    CHECK(u8[0] == 7 && u8[1] == 255 && u8[2] == 5 && u8[3] == 0 && u8[4] == 0);
    CHECK(i32[0] == 263 && i32[1] == -1 && i32[2] == 5 && i32[3] == INT32_MIN && i32[4] == 0);
}

TEST(large_integers_to_floats_round_once)
{
    state = 4;
    for (int k = 0; k < 100000; k++) {
        uint64_t u = random_bits();
        int64_t i = (int64_t)u >> (u & 63);
        float f;
        double d;
        lt_convert(&f, LT_F32, &i, LT_I64, 1);
        lt_convert(&d, LT_F64, &i, LT_I64, 1);
        CHECK_NEAR(f, (float)(long double)i, 0);
        CHECK_NEAR(d, (double)(long double)i, 0);
    }
}

/* For each pair of dtypes and every length around the vector width: small integers convert exactly,
 * and nothing is written past the end. */
TEST(every_pair_every_length)
{
    uint8_t count[80], back[81];
    char a[8 * 80], b[8 * 80 + 1];
    for (int i = 0; i < 80; i++)
        count[i] = (uint8_t)i;
    for (int from = 0; from < LT_DTYPE_COUNT; from++)
        for (int to = 0; to < LT_DTYPE_COUNT; to++)
            for (size_t n = 0; n <= 80; n++) {
                size_t end = n * lt_dtype_bytes((lt_dtype)to);
                memset(b, 0x5a, sizeof b);
                memset(back, 0x5a, sizeof back);
                lt_convert(a, (lt_dtype)from, count, LT_U8, n);
                lt_convert(b, (lt_dtype)to, a, (lt_dtype)from, n);
                CHECK_EQ(b[end], 0x5a);
                lt_convert(back, LT_U8, b, (lt_dtype)to, n);
                CHECK_EQ(memcmp(back, count, n), 0);
                CHECK_EQ(back[n], 0x5a);
            }
    lt_convert(NULL, LT_F32, NULL, LT_F32, 0);
    lt_convert(NULL, LT_F16, NULL, LT_F64, 0);
}

/* Long enough for several threads and many blocks; the data start at an unaligned address. */
TEST(large_arrays_convert_like_single_elements)
{
    size_t n = 600001;
    float *x = malloc((n + 1) * sizeof *x);
    uint16_t *h = malloc(n * sizeof *h), *g = malloc(n * sizeof *g);
    state = 5;
    for (size_t i = 0; i <= n; i++)
        x[i] = float_of((uint32_t)random_bits());
    lt_convert(h, LT_BF16, x + 1, LT_F32, n);
    lt_convert(g, LT_F16, h, LT_BF16, n);
    for (size_t i = 0; i < n; i++) {
        CHECK_EQ(h[i], lt__f32_to_bf16(x[i + 1]));
        CHECK_EQ(g[i], lt__f32_to_f16(lt__bf16_to_f32(h[i])));
    }
    free(x);
    free(h);
    free(g);
}
