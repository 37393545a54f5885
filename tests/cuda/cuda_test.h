/* cuda_test.h - what the tests of NVIDIA's libraries share. */
#ifndef TESTS_CUDA_CUDA_TEST_H
#define TESTS_CUDA_CUDA_TEST_H

#include "ops/cuda/cudnn.h"
#include "tests/cuda/libs.h"

static const lt_host test_host = {lt_fail, lt_log};
static void *const test_stream = (void *)&test_host; /* any but the default one */

/* The whole of a small file. */
static inline void read_text(const char *path, char *text, size_t bytes)
{
    FILE *file = fopen(path, "r");
    if (!file)
        FAIL("%s: cannot be opened", path);
    size_t n = fread(text, 1, bytes - 1, file);
    text[n] = 0;
    fclose(file);
}

/* xorshift64* (Vigna, 2016): from 0 to n - 1. */
static inline int64_t draw(uint64_t *seed, int64_t n)
{
    *seed ^= *seed >> 12;
    *seed ^= *seed << 25;
    *seed ^= *seed >> 27;
    return (int64_t)((*seed * 0x2545f4914f6cdd1d) >> 33) % n;
}

/* Values between -1 and 1, no two of which are likely to be equal. New. */
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

/* x in f64; floats only, others are kept. New. */
static inline lt_tensor *exact_copy(lt_tensor *x)
{
    bool is_float = lt__is_float((lt_dtype)x->dtype);
    lt_tensor *y = lt_tensor_new(x->ctx, is_float ? LT_F64 : (lt_dtype)x->dtype, x->ndim, x->dims);
    if (!y)
        FAIL("%s", lt_errmsg());
    CHECK_OK(lt_copy(y, x));
    return y;
}

/* Twice the largest error of rounding a number of size 1. */
static inline double rounding(lt_dtype dtype)
{
    return dtype == LT_BF16 ? 0x1p-8 : dtype == LT_F16 ? 0x1p-11 : 0x1p-24;
}

/* What a gradient or output may be off by: it, and what was added to the old value, are each
 * rounded to `dtype`, so many times; and what is below f16's numbers to 2^-24. */
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
            FAIL("%s: element %lld is %.9g, not %.9g", what, (long long)i, value, right);
    }
}

#endif
