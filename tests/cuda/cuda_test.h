/* cuda_test.h - helpers for the tests that call NVIDIA's libraries. */
#ifndef TESTS_CUDA_CUDA_TEST_H
#define TESTS_CUDA_CUDA_TEST_H

#include "ops/cuda/cudnn.h"
#include "tests/cuda/libs.h"

static const lt_host test_host = {lt_fail, lt_log};
static void *const test_stream = (void *)&test_host; /* any stream except the default one */

/* Reads a whole file, with a final 0, into a buffer of `bytes` bytes. */
static inline void read_text(const char *path, char *text, size_t bytes)
{
    FILE *file = fopen(path, "r");
    if (!file)
        FAIL("%s: cannot open the file", path);
    size_t n = fread(text, 1, bytes - 1, file);
    text[n] = 0;
    fclose(file);
}

/* A random number from 0 to n - 1, by xorshift64* (Vigna, 2016). */
static inline int64_t draw(uint64_t *seed, int64_t n)
{
    *seed ^= *seed >> 12;
    *seed ^= *seed << 25;
    *seed ^= *seed >> 27;
    return (int64_t)((*seed * 0x2545f4914f6cdd1d) >> 33) % n;
}

/* Random values between -1 and 1; duplicates are unlikely. New. */
static inline lt_tensor *random_tensor(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims,
                                       uint64_t *seed)
{
    lt_tensor *x = lt_tensor_new(ctx, dtype, ndim, dims);
    if (!x)
        FAIL("%s", lt_errmsg());
    for (int64_t i = 0; i < x->count; i++) {
        double value = (double)draw(seed, 1 << 20) / (1 << 19) - 1;
        lt_convert((char *)x->data + i * (int64_t)lt_dtype_bytes(dtype), dtype, &value, LT_F64, 1);
    }
    return x;
}

/* A copy of x in f64, or in its own dtype if that is an integer. New. */
static inline lt_tensor *exact_copy(lt_tensor *x)
{
    bool is_float = lt__is_float((lt_dtype)x->dtype);
    lt_tensor *y = lt_tensor_new(x->ctx, is_float ? LT_F64 : (lt_dtype)x->dtype, x->ndim, x->dims);
    if (!y)
        FAIL("%s", lt_errmsg());
    CHECK_OK(lt_copy(y, x));
    return y;
}

/* The largest relative error when a number is rounded to dtype. */
static inline double rounding(lt_dtype dtype)
{
    return dtype == LT_BF16 ? 0x1p-8 : dtype == LT_F16 ? 0x1p-11 : 0x1p-24;
}

/* Compares with an exact result, which includes `old` if that is not NULL. Tolerates `times`
 * roundings to dtype of the result and of what was added to `old`, plus 2^-23, because f16 numbers
 * near zero are multiples of 2^-24. */
static inline void compare(const char *what, lt_tensor *got, lt_tensor *want, lt_tensor *old,
                           lt_dtype dtype, int times)
{
    for (int64_t i = 0; i < got->count; i++) {
        double value, before = 0, right = ((double *)want->data)[i];
        CHECK_OK(lt_item(got, i, &value));
        if (old)
            CHECK_OK(lt_item(old, i, &before));
        double by = times * rounding(dtype) * (fabs(right) + fabs(right - before)) + 0x1p-23;
        if (!(fabs(value - right) <= by))
            FAIL("%s: element %lld must be near %.9g, but is %.9g", what, (long long)i, right,
                 value);
    }
}

#endif
