/* sums.h - dtypes and values that tests sum over ranks, and the tolerances. */
#ifndef TESTS_DIST_SUMS_H
#define TESTS_DIST_SUMS_H

#include <math.h>

#include "core/tensor.h"

/* Dtypes that can be summed, and the dtype on the wire. */
static const struct {
    lt_dtype dtype, wire;
} sum_types[] = {{LT_F32, LT_F32}, {LT_F32, LT_F16},   {LT_F32, LT_BF16}, {LT_F64, LT_F64},
                 {LT_F16, LT_F16}, {LT_BF16, LT_BF16}, {LT_I64, LT_I64}};
enum { N_SUM_TYPES = sizeof sum_types / sizeof *sum_types };

/* Values from -1 to 1. */
static inline double value_of(int who, int64_t i)
{
    uint32_t word[4];
    lt_random(7, LT_RNG_USER, (uint64_t)who, (uint64_t)i, word);
    return (double)word[0] * 0x1p-31 - 1;
}

/* Writes the elements of a rank to data, and the same values, rounded to the dtype, to x. */
static inline void elements_of(int who, int64_t count, lt_dtype dtype, void *data, double *x)
{
    for (int64_t i = 0; i < count; i++)
        x[i] = dtype == LT_I64 ? floor(1000 * value_of(who, i)) : value_of(who, i);
    lt_convert(data, dtype, x, LT_F64, (size_t)count);
    lt_convert(x, LT_F64, data, dtype, (size_t)count);
}

static inline double roundoff(lt_dtype dtype)
{
    return dtype == LT_F16    ? 0x1p-11
           : dtype == LT_BF16 ? 0x1p-8
           : dtype == LT_F64  ? 0x1p-53
                              : 0x1p-24;
}

#endif
