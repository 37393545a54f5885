/* binary.h - the formulas of arithmetic of two tensors, for the CPU (binary.c) and for CUDA
 * (binary.cu). They are type generic, like those of unary.h. */
#ifndef LT_OPS_BINARY_H
#define LT_OPS_BINARY_H

#include "ops/kernel.h"

/* An op: its name; the types that forward is for, of which WRAPPING are unsigned; its cost and its
 * policy under autocast; what backward needs, BOTH inputs or NONE; the inputs whose gradient is dz
 * itself, as bits; what it is; z, a formula of x and y; dx and dy, formulas of dz and, if there, x
 * and y.
 *
 * The limits of pow are PyTorch's: d/dx is 0 for y = 0, d/dy is 0 for x = 0 and y >= 0. For
 * negative x, d/dy is no real number: nan. */
#define LT_BINARY_LIST(X)                                                                          \
    X(add, WRAPPING, LT_CHEAP, LT_CAST_WIDEST, NONE, 3, "x + y.",                                  \
      x + y, dz, dz)                                                                               \
    X(sub, WRAPPING, LT_CHEAP, LT_CAST_WIDEST, NONE, 1, "x - y.",                                  \
      x - y, dz, -dz)                                                                              \
    X(mul, WRAPPING, LT_CHEAP, LT_CAST_WIDEST, BOTH, 0, "x * y.",                                  \
      x * y, dz * y, dz * x)                                                                       \
    X(div, NUMERICS, LT_CHEAP, LT_CAST_WIDEST, BOTH, 0,                                            \
      "x / y; integers are truncated toward zero, and an integer / 0 is 0.",                       \
      LT_QUOTIENT(x, y), dz / y, -dz * ((x / y) / y))                                              \
    X(pow, NUMERICS, LT_COSTLY, LT_CAST_F32, BOTH, 0,                                              \
      "x to the power of y; an integer to a negative power is truncated toward zero.",             \
      LT_POWER(x, y),                                                                              \
      y == 0 ? 0 : dz * (y * pow(x, y - 1)),                                                       \
      x == 0 && y >= 0 ? 0 : dz * (pow(x, y) * log(x)))

/* Truncates toward zero. What has no answer gets one: x / 0 is 0, the least integer / -1 itself. */
LT_BOTH static inline int64_t lt__integer_quotient(int64_t x, int64_t y)
{
    return y == 0 ? 0 : y == -1 ? (int64_t)-(uint64_t)x : x / y;
}

/* By squaring, modulo 2^64. A negative power is 1 / x^-y, truncated. */
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
