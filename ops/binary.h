/* binary.h - the formulas of elementwise arithmetic on two tensors, for the CPU (binary.c) and CUDA
 * (binary.cu). The formulas are type-generic, as in unary.h. */
#ifndef LT_OPS_BINARY_H
#define LT_OPS_BINARY_H

#include "ops/kernel.h"

/* The columns of a row are:
 *   name, types of the forward kernel (NUMERICS; WRAPPING: the same with unsigned integers, so that
 *   overflow wraps; FLOATS: only floats, and integer inputs are cast first), cost, autocast policy,
 *   inputs saved for backward (BOTH or NONE),
 *   inputs whose gradient is dz itself (bit i for input i), the documentation text,
 *   z as a formula of x and y,
 *   dx and dy as formulas of dz and, if saved, of x and y.
 *
 * The gradients of pow in edge cases are as in PyTorch: dx is 0 for y = 0, and dy is 0 for x = 0
 * and y >= 0. For negative x, dy is NaN, because log(x) is not a real number. */
/* clang-format off */
#define LT_BINARY_LIST(X)                                                                          \
    X(add, WRAPPING, LT_CHEAP, LT_CAST_WIDEST, NONE, 3, "x + y, with broadcasting.",               \
      x + y, dz, dz)                                                                               \
    X(sub, WRAPPING, LT_CHEAP, LT_CAST_WIDEST, NONE, 1, "x - y, with broadcasting.",               \
      x - y, dz, -dz)                                                                              \
    X(mul, WRAPPING, LT_CHEAP, LT_CAST_WIDEST, BOTH, 0, "x * y, with broadcasting.",               \
      x * y, dz * y, dz * x)                                                                       \
    X(div, FLOATS, LT_CHEAP, LT_CAST_WIDEST, BOTH, 0,                                              \
      "x / y, with broadcasting. Integers are converted to f32 first, or to the float dtype of "   \
      "the other tensor.",                                                                         \
      x / y, dz / y, -dz * ((x / y) / y))                                                          \
    X(floor_divide, NUMERICS, LT_CHEAP, LT_CAST_WIDEST, NONE, 0,                                   \
      "x / y rounded down to an integer, in the same dtype, with broadcasting; an integer // 0 "   \
      "is 0. Gradients are 0.",                                                                    \
      LT_FLOOR_QUOTIENT(x, y), 0, 0)                                                               \
    X(pow, NUMERICS, LT_COSTLY, LT_CAST_F32, BOTH, 0,                                              \
      "x^y, with broadcasting. An integer to a negative power is truncated toward zero.",         \
      LT_POWER(x, y),                                                                              \
      y == 0 ? 0 : dz * (y * pow(x, y - 1)),                                                       \
      x == 0 && y >= 0 ? 0 : dz * (pow(x, y) * log(x)))
/* clang-format on */

/* x / y, rounded down. Defined for all inputs: x / 0 is 0, and the smallest integer divided by -1
 * is itself. */
LT_BOTH static inline int64_t lt__floor_quotient(int64_t x, int64_t y)
{
    if (y == 0 || y == -1)
        return y == 0 ? 0 : (int64_t) - (uint64_t)x;
    return x / y - (x % y != 0 && (x < 0) != (y < 0));
}

/* x^y modulo 2^64, by repeated squaring. A negative power is 1 / x^-y, truncated toward zero; 0 to
 * a negative power is 0. */
LT_BOTH static inline int64_t lt__integer_power(int64_t x, int64_t y)
{
    if (y < 0)
        return x == 1 ? 1 : x == -1 ? (y & 1 ? -1 : 1) : 0;
    uint64_t power = 1;
    for (uint64_t square = (uint64_t)x; y > 0; y >>= 1, square *= square)
        if (y & 1)
            power *= square;
    return (int64_t)power;
}

#endif
