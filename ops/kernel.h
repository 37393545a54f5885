/* kernel.h - helpers shared by all op files: reading options, checking inputs, filling specs, and
 * typed and parallel loops.
 *
 * A kernel only computes. It does not allocate, synchronise, read the environment or know Lua. It
 * can rely on the sizes, because the shape rule has checked them. The message of a shape rule does
 * not name the op, because the caller prepends the name:
 *     return lt_fail(LT_EINVAL, "w has %lld input channels, but x has %lld (x %s, w %s)", ...);
 */
#ifndef LT_OPS_KERNEL_H
#define LT_OPS_KERNEL_H

#include <math.h>
#include <string.h>

#include "core/simd.h"
#include "core/tensor.h"
#include "ops/ops.h"

/* ==== Options, by position in the signature =================================================== */

/* k is the position of the option in the op's signature, from 0. The functions that return
 * lt_status also check the value. If it is not as described, they fail with LT_EINVAL and a message
 * that names the option. */

/* Whether the option has a value: it was given or has a default. */
static inline bool lt__given(const lt_call *c, int k) { return c->opt[k].n > 0; }
/* The option's number, or its first integer. */
static inline double lt__number(const lt_call *c, int k)
{
    return c->opt[k].kind == LT_KIND_INTS ? (double)c->opt[k].i[0] : c->opt[k].f;
}
/* The value of a boolean option. */
static inline bool lt__flag(const lt_call *c, int k) { return c->opt[k].i[0] != 0; }
/* The index, from 0, of the chosen word among the words in the signature. */
static inline int lt__word(const lt_call *c, int k) { return (int)c->opt[k].i[0]; }
/* *value = the option, a single integer >= low. */
lt_status lt__int(const lt_call *c, int k, int64_t low, int64_t *value);
/* value = (height, width), each >= low. The option is two integers, or one for both. */
lt_status lt__pair(const lt_call *c, int k, int64_t low, int64_t value[2]);
/* *axis = the option, a single axis, mapped to 0..ndim-1. Negative axes count from the end. */
lt_status lt__axis(const lt_call *c, int k, int ndim, int *axis);
/* *mask = the option, a set of axes: bit i for axis i. All axes if the option is not given. A
 * repeated axis is LT_EINVAL. */
lt_status lt__axes(const lt_call *c, int k, int ndim, uint32_t *mask);

/* Checks that the option is in [low, high]: "p must be a number from 0 to 1, but is 2". high may be
 * INFINITY. */
lt_status lt__number_in(const lt_call *c, int k, double low, double high);

/* ==== Tensors of a call ======================================================================= */

/* of[i], or NULL if the call does not have input i. of: c->in or c->d_in. */
static inline lt_tensor *lt__optional(const lt_call *c, lt_tensor *const *of, int i)
{
    return i < c->n_in ? of[i] : NULL;
}

/* The address of the elements of x; NULL if x is NULL. */
static inline void *lt__data(const lt_tensor *x) { return x ? x->data : NULL; }

#ifndef __cplusplus
/* The address of element i of an array. */
static inline void *lt__at(const void *data, lt_dtype dtype, int64_t i)
{
    return (char *)data + i * (int64_t)lt_dtype_bytes(dtype);
}
/* The address of element i of x; NULL if x is NULL. */
static inline void *lt__address(const lt_tensor *x, int64_t i)
{
    return x ? lt__at(x->data, (lt_dtype)x->dtype, i) : NULL;
}
#endif

static inline int64_t lt__min(int64_t a, int64_t b) { return a < b ? a : b; }
/* Rounds bytes up, so that the next part of scratch is aligned like scratch itself. */
static inline size_t lt__aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* The number of rows of x (..., channels): the product of all dims but the last. */
static inline int64_t lt__rows_of(const lt_tensor *x)
{
    int64_t rows = 1;
    for (int i = 0; i < x->ndim - 1; i++)
        rows *= x->dims[i];
    return rows;
}

/* ==== Shape rules ============================================================================= */

/* Describes output `out`, which is not a view: dtype and dims[0..ndim). */
void lt__spec(lt_call *c, int out, lt_dtype dtype, int ndim, const int64_t *dims);
/* Describes output `out` with the dtype and dims of x. */
void lt__spec_like(lt_call *c, int out, const lt_tensor *x);

/* The checks below return LT_EINVAL with a message that names the input. Input 0, and the input
 * that an argument selects, must be present. */

/* The inputs 0..n-1 that are present must have the same float dtype:
 * "x is f32, y is i64; cast one of them, e.g. y to f32". */
lt_status lt__same_float(const lt_call *c, int n);
/* The inputs 0..n-1 that are present must have the same dtype. Any dtype is allowed. */
lt_status lt__same_dtype(const lt_call *c, int n);
/* Input i must have an integer dtype: i64, i32 or u8. */
lt_status lt__require_integers(const lt_call *c, int i);
/* Input i must have ndim axes: "x must have 4 axes (n, h, w, c), but has 2 (32x10 f32)". layout
 * names the axes, "(n, h, w, c)". */
lt_status lt__require_ndim(const lt_call *c, int i, int ndim, const char *layout);
/* Input i must have exactly these dims. `what` describes them in the message: "one value per
 * channel". */
lt_status lt__require_dims(const lt_call *c, int i, int ndim, const int64_t *dims,
                           const char *what);
/* The name of input i in the signature. The last name also covers the inputs after it. */
static inline const char *lt__in_name(const lt_call *c, int i)
{
    return c->schema->in[i < c->schema->n_in ? i : c->schema->n_in - 1].name;
}
/* Fails because inputs a and b differ in dtype: "x is f32, y is i64; cast one of them, e.g. y to
 * f32". */
lt_status lt__dtypes_differ(const lt_call *c, int a, int b);
/* dims[0..*ndim) = the shape of inputs a and b broadcast together. Axes are matched from the last
 * one backwards. An axis that is missing or has size 1 is stretched. LT_EINVAL, with both shapes in
 * the message, if other sizes differ. */
lt_status lt__broadcast(const lt_call *c, int a, int b, int *ndim, int64_t dims[LT_MAX_DIMS]);
/* Describes output 0, of this dtype, with the shape of inputs 0 and 1 broadcast together. They must
 * have the same dtype. */
lt_status lt__spec_broadcast(lt_call *c, lt_dtype dtype);

/* The messages for labels and ids that are out of range. The arguments, each an lt_ll, are the
 * position of the label or id, from 1, its value, and the number of classes or rows. */
#define LT_BAD_LABEL_TEXT "label number %lld is %lld, but x has %lld classes (labels start at 0)"
#define LT_BAD_ROW_TEXT "id number %lld is %lld, but w has %lld rows (ids start at 0)"

/* "32x10 f32": describes a tensor, for use in an argument list. The text is valid until the end of
 * the enclosing block. */
#define LT_TEXT(t) lt_describe((t), (char[96]){0}, 96)
typedef long long lt_ll; /* for %lld */

/* ==== Loops =================================================================================== */

/* Runs the body once, with T defined as double for f64 and as float for all other float dtypes.
 * Kernels get halves as f32 copies, unless the op sets any_dtype or fast_bf16. */
#define LT_FLOATS(dtype, T, ...)                                                                   \
    do {                                                                                           \
        if ((dtype) == LT_F64) {                                                                   \
            typedef double T;                                                                      \
            __VA_ARGS__                                                                            \
        } else {                                                                                   \
            typedef float T;                                                                       \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    } while (0)

/* A case of a switch: runs the body with T as `type`. */
#define LT_CASE(value, type, T, ...)                                                               \
    case value: {                                                                                  \
        typedef type T;                                                                            \
        __VA_ARGS__                                                                                \
    } break;

/* Like LT_FLOATS, but integer dtypes give int64_t, int32_t or uint8_t. */
#define LT_NUMERICS(dtype, T, ...) LT_ALL_TYPES(dtype, T, int64_t, int32_t, __VA_ARGS__)
/* The same with unsigned types for integers. Sums, differences and products have the same bits, and
 * overflow wraps instead of being undefined. */
#define LT_WRAPPING(dtype, T, ...) LT_ALL_TYPES(dtype, T, uint64_t, uint32_t, __VA_ARGS__)
#define LT_ALL_TYPES(dtype, T, i64, i32, ...)                                                      \
    do {                                                                                           \
        switch (dtype) {                                                                           \
            LT_CASE(LT_F64, double, T, __VA_ARGS__)                                                \
            LT_CASE(LT_I64, i64, T, __VA_ARGS__)                                                   \
            LT_CASE(LT_I32, i32, T, __VA_ARGS__)                                                   \
            LT_CASE(LT_U8, uint8_t, T, __VA_ARGS__)                                                \
        default: {                                                                                 \
            typedef float T;                                                                       \
            __VA_ARGS__                                                                            \
        } break;                                                                                   \
        }                                                                                          \
    } while (0)

#ifdef _OPENMP
#define LT_PRAGMA(text) _Pragma(#text)
/* Goes before a for loop with independent iterations; c is the lt_call. The loop runs in parallel
 * if `work`, its number of simple operations, is large enough to pay for starting the threads. The
 * schedule is static: each thread gets the same iterations in every run. A sum within one iteration
 * is bit-identical with any number of threads. */
#define LT_PARALLEL_FOR(c, work)                                                                   \
    LT_PRAGMA(omp parallel for schedule(static) num_threads((c)->threads)                          \
              if ((work) > 32768 && (c)->threads > 1))
#else
#define LT_PARALLEL_FOR(c, work) (void)(c);
#endif

/* Goes before a for loop whose iterations are independent even if some of its pointers are equal:
 * gcc then vectorises it without checking for aliasing. */
#ifdef __clang__
#define LT_IVDEP
#else
#define LT_IVDEP _Pragma("GCC ivdep")
#endif

/* dst (+)= value: adds the gradient to dst if `add` is set, otherwise overwrites dst. */
#define LT_PUT(add, dst, value)                                                                    \
    do {                                                                                           \
        if (add)                                                                                   \
            (dst) += (value);                                                                      \
        else                                                                                       \
            (dst) = (value);                                                                       \
    } while (0)

/* Element i of an i64, i32 or u8 tensor on the CPU. */
static inline int64_t lt__integer(const lt_tensor *x, int64_t i)
{
    return x->dtype == LT_I64   ? ((const int64_t *)x->data)[i]
           : x->dtype == LT_I32 ? ((const int32_t *)x->data)[i]
                                : ((const uint8_t *)x->data)[i];
}

/* Whether backward must add to d_in[i] instead of overwriting it. */
static inline bool lt__adds(const lt_call *c, int i) { return c->add >> i & 1; }

#endif
