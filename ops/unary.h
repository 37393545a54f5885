/* unary.h - the formulas of elementwise ops with one input, for the CPU (unary.c) and CUDA
 * (unary.cu).
 *
 * The formulas are type-generic: for a float, exp means expf, through <tgmath.h> in C and through
 * overloading in C++. T is the type of the computation; for halves it is float. Write a fractional
 * constant as (T)0.5, because a plain 0.5 would turn a float formula into a double one.
 */
#ifndef LT_OPS_UNARY_H
#define LT_OPS_UNARY_H

#include "ops/kernel.h"

/* The ops for float dtypes. The columns of a row are:
 *   name, cost (LT_CHEAP or LT_COSTLY), autocast policy,
 *   what is saved for backward (IN: the input x; OUT: the output y), the documentation text,
 *   y as a formula of x,
 *   dx as a formula of dy and of x (if IN) or y (if OUT). */
/* clang-format off */
#define LT_UNARY_LIST(X)                                                                           \
    X(exp, LT_COSTLY, LT_CAST_F32, OUT, "y = e^x for each element of x.",                          \
      exp(x), dy * y)                                                                              \
    X(log, LT_COSTLY, LT_CAST_F32, IN, "y = ln(x) for each element of x.",                         \
      log(x), dy / x)                                                                              \
    X(sqrt, LT_CHEAP, LT_CAST_ANY, OUT, "y = sqrt(x) for each element of x.",                      \
      sqrt(x), dy / (2 * y))                                                                       \
    X(sigmoid, LT_COSTLY, LT_CAST_ANY, OUT, "y = 1 / (1 + exp(-x)) for each element of x.",        \
      LT_LOGISTIC(x), dy * y * (1 - y))                                                            \
    X(tanh, LT_COSTLY, LT_CAST_ANY, OUT, "y = tanh(x) for each element of x.",                     \
      tanh(x), dy * (1 - y * y))                                                                   \
    /* These comparisons let a NaN pass through. */                                                \
    X(relu, LT_CHEAP, LT_CAST_ANY, OUT, "y = max(x, 0) for each element of x.",                    \
      x < 0 ? 0 : x, y <= 0 ? 0 : dy)                                                              \
    X(relu6, LT_CHEAP, LT_CAST_ANY, OUT, "y = min(max(x, 0), 6) for each element of x.",           \
      x < 0 ? 0 : x > 6 ? 6 : x, y <= 0 || y >= 6 ? 0 : dy)                                        \
    X(gelu, LT_COSTLY, LT_CAST_ANY, IN,                                                            \
      "y = x (1 + erf(x / sqrt(2))) / 2 for each element of x (exact, not the tanh form).",        \
      x * LT_NORMAL_P(x), dy * (LT_NORMAL_P(x) + x * LT_NORMAL_DENSITY(x)))                        \
    X(silu, LT_COSTLY, LT_CAST_ANY, IN, "y = x / (1 + exp(-x)) for each element of x.",            \
      x < LT_EXP_MIN ? x * 0 : x / (1 + exp(-x)),                                                  \
      dy * LT_LOGISTIC(x) * (1 + x * (1 - LT_LOGISTIC(x))))
/* clang-format on */

/* The cumulative distribution function and the density of the standard normal distribution, for
 * gelu (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016). Beyond 40 the density is 0 in f64
 * too, and x * x might overflow. */
#define LT_NORMAL_P(x) ((T)0.5 * (1 + erf((x) * (T)0.70710678118654752440)))
#define LT_NORMAL_DENSITY(x)                                                                       \
    ((x) < -40 || (x) > 40 ? 0 : (T)0.39894228040143267794 * exp((T)-0.5 * (x) * (x)))
/* The logistic function, for sigmoid and silu (Elfwing, Uchibe and Doya, 2018). Below LT_EXP_MIN,
 * exp(-x) overflows. The result is still right, 1 / inf = 0, but some programs trap overflows. */
#define LT_LOGISTIC(x) ((x) < LT_EXP_MIN ? 0 : 1 / (1 + exp(-(x))))
#define LT_EXP_MIN (sizeof(T) == sizeof(float) ? (T)-88.7228317 : (T)-709.78271289338397)

/* Formulas of y and dx for the ops that take integers too: neg, abs and clamp. */
#define LT_NEG (-x)
#define LT_NEG_BACK (-dy)
#define LT_ABS_BACK (x > 0 ? dy : x < 0 ? -dy : 0)
#define LT_CLAMP (x > max ? max : x < min ? min : x)
#define LT_CLAMP_BACK (x > min && x < max ? dy : 0)

/* |x|. The most negative integer is unchanged, because its magnitude does not fit. */
LT_BOTH static inline int64_t lt__magnitude(int64_t x)
{
    return x < 0 ? (int64_t) - (uint64_t)x : x;
}

#endif
