/* moments.h - the moments of a set of values, for the CPU and CUDA. */
#ifndef LT_OPS_MOMENTS_H
#define LT_OPS_MOMENTS_H

#include "core/simd.h"

/* The mean, and the sum of squared deviations from it. */
typedef struct lt_moments {
    double mean, squares;
} lt_moments;

/* The combined moments of two sets of values (Chan, Golub and LeVeque, 1983). share: the fraction
 * of all values that are in `more`; weight: the number of values in m, times share. */
LT_BOTH LT_INLINE lt_moments lt__merged(lt_moments m, lt_moments more, double share, double weight)
{
    double d = more.mean - m.mean;
    m.mean += d * share;
    m.squares += more.squares + d * d * weight;
    return m;
}

#endif
