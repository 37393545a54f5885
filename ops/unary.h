/* unary.h - the formulas of ops of one tensor, for the CPU (unary.c) and for CUDA (unary.cu).
 *
 * They are type generic: exp is expf for a float, by <tgmath.h> or by the overloads of C++. T is
 * the type of the element; a constant with a point is written (T)0.5, so that it does not turn a
 * float formula into a double one.
 */
#ifndef LT_OPS_UNARY_H
#define LT_OPS_UNARY_H

#include "ops/kernel.h"

/* An op on floats: its name; its cost and its policy under autocast; what backward needs; what it
 * is; y, a formula of x; dx, a formula of dy and of x if backward needs IN, of y if OUT. */
#define LT_UNARY_LIST(X)                                                                           \
    X(exp, LT_COSTLY, LT_CAST_F32, OUT, "e to the power of x.",                                    \
      exp(x), dy * y)                                                                              \
    X(log, LT_COSTLY, LT_CAST_F32, IN, "The natural logarithm of x.",                              \
      log(x), dy / x)                                                                              \
    X(sqrt, LT_CHEAP, LT_CAST_ANY, OUT, "The square root of x.",                                   \
      sqrt(x), dy / (2 * y))                                                                       \
    X(sigmoid, LT_COSTLY, LT_CAST_ANY, OUT, "1 / (1 + exp(-x)).",                                  \
      1 / (1 + exp(-x)), dy * y * (1 - y))                                                         \
    X(tanh, LT_COSTLY, LT_CAST_ANY, OUT, "The hyperbolic tangent of x.",                           \
      tanh(x), dy * (1 - y * y))                                                                   \
    /* These compare so that a nan passes through. */                                              \
    X(relu, LT_CHEAP, LT_CAST_ANY, OUT, "x where it is positive, else 0.",                         \
      x < 0 ? 0 : x, y <= 0 ? 0 : dy)                                                              \
    X(relu6, LT_CHEAP, LT_CAST_ANY, OUT, "x brought into 0..6.",                                   \
      x < 0 ? 0 : x > 6 ? 6 : x, y <= 0 || y >= 6 ? 0 : dy)                                        \
    X(gelu, LT_COSTLY, LT_CAST_ANY, IN,                                                            \
      "x P(X <= x), X normal: x (1 + erf(x / sqrt(2))) / 2.",                                      \
      x * LT_NORMAL_P(x), dy * (LT_NORMAL_P(x) + x * LT_NORMAL_DENSITY(x)))

/* Hendrycks and Gimpel, Gaussian Error Linear Units, 2016: the normal distribution and its
 * density. */
#define LT_NORMAL_P(x) ((T)0.5 * (1 + erf((x) * (T)0.70710678118654752440)))
#define LT_NORMAL_DENSITY(x) ((T)0.39894228040143267794 * exp((T)-0.5 * (x) * (x)))

/* The ops that take integers too: y, and dx. */
#define LT_NEG (-x)
#define LT_NEG_BACK (-dy)
#define LT_ABS_BACK (x > 0 ? dy : x < 0 ? -dy : 0)
#define LT_CLAMP (x > max ? max : x < min ? min : x)
#define LT_CLAMP_BACK (x > min && x < max ? dy : 0)

LT_BOTH static inline int64_t lt__magnitude(int64_t x)
{
    return x < 0 ? (int64_t)-(uint64_t)x : x;
}

#endif
