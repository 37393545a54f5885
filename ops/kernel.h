/* kernel.h - helpers shared by all op files: reading options, checking inputs, filling specs, and
 * typed and parallel loops.
 *
 * A kernel only computes. It does not allocate, synchronise, read the environment or know Lua. It
 * may trust the sizes, because the shape rule has checked them. The message of a shape rule does
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
 * lt_status check the value too: LT_EINVAL if it is not as described. */

static inline bool lt__given(const lt_call *c, int k) { return c->opt[k].n > 0; }
static inline double lt__number(const lt_call *c, int k)
{
    return c->opt[k].kind == LT_INTS ? (double)c->opt[k].i[0] : c->opt[k].f;
}
static inline bool lt__flag(const lt_call *c, int k) { return c->opt[k].i[0] != 0; }
/* Index, from 0, of the word chosen among those that the signature lists. */
static inline int lt__word(const lt_call *c, int k) { return (int)c->opt[k].i[0]; }
/* *value = the option, one integer >= low. */
lt_status lt__int(const lt_call *c, int k, int64_t low, int64_t *value);
/* value = (height, width), each >= low. The option has both, or one integer for both. */
lt_status lt__pair(const lt_call *c, int k, int64_t low, int64_t value[2]);
/* *axis = the option, one axis of ndim, mapped to 0..ndim-1. Negative ones count from the end. */
lt_status lt__axis(const lt_call *c, int k, int ndim, int *axis);
/* *mask = the option, a set of axes: bit i for axis i. All axes if the option is not given. A
 * repeated axis is LT_EINVAL. */
lt_status lt__axes(const lt_call *c, int k, int ndim, uint32_t *mask);

/* Checks that the option is in [low, high]: "p must be a number from 0 to 1, but is 2". */
lt_status lt__number_in(const lt_call *c, int k, double low, double high);

/* ==== Shape rules ============================================================================= */

/* Describes output `out`: dtype and dims[0..ndim), in memory of its own. */
void lt__spec(lt_call *c, int out, lt_dtype dtype, int ndim, const int64_t *dims);
/* Describes output `out` with the dtype and dims of x. */
void lt__spec_like(lt_call *c, int out, const lt_tensor *x);

/* The checks below return LT_EINVAL with a message that names the input. */

/* The inputs 0..n-1 that are present must have the same float dtype:
 * "x is f32, y is i64; cast one of them, e.g. y:cast('f32')". */
lt_status lt__same_float(const lt_call *c, int n);
/* The inputs 0..n-1 that are present must have the same dtype, whichever. */
lt_status lt__same_dtype(const lt_call *c, int n);
/* Input i must have an integer dtype: i64, i32 or u8. */
lt_status lt__want_integers(const lt_call *c, int i);
/* Input i must have ndim axes: "x must have 4 axes (n, h, w, c), but has 2 (32x10 f32)". layout
 * names the axes, "(n, h, w, c)". */
lt_status lt__want_ndim(const lt_call *c, int i, int ndim, const char *layout);
/* Input i must have exactly these dims. `what` describes them in the message: "one value per
 * channel". */
lt_status lt__want_dims(const lt_call *c, int i, int ndim, const int64_t *dims, const char *what);
/* The name of input i in the signature. The last name also covers the inputs after it. */
static inline const char *lt__in_name(const lt_call *c, int i)
{
    return c->schema->in[i < c->schema->n_in ? i : c->schema->n_in - 1].name;
}
/* dims[0..*ndim) = inputs a and b broadcast together: axes are matched from the last one backwards,
 * and a missing axis or one of size 1 is stretched. LT_EINVAL, with both shapes in the message, if
 * they do not match. */
lt_status lt__broadcast(const lt_call *c, int a, int b, int *ndim, int64_t dims[LT_MAX_DIMS]);

/* "32x10 f32": describes a tensor, for use in an argument list. The buffer is a temporary of the
 * calling block. */
#define LT_TEXT(t) lt_describe((t), (char[96]){0}, 96)
typedef long long lt_ll; /* for %lld */

/* ==== Loops =================================================================================== */

/* Runs the body once with T defined as the C type of a float dtype, float or double. Half-precision
 * elements have already been converted to f32. */
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

/* As LT_FLOATS, for f32, f64, i64, i32 and u8. */
#define LT_NUMERICS(dtype, T, ...)                                                                 \
    do {                                                                                           \
        switch (dtype) {                                                                           \
            LT_CASE(LT_F64, double, T, __VA_ARGS__)                                                \
            LT_CASE(LT_I64, int64_t, T, __VA_ARGS__)                                               \
            LT_CASE(LT_I32, int32_t, T, __VA_ARGS__)                                               \
            LT_CASE(LT_U8, uint8_t, T, __VA_ARGS__)                                                \
        default: {                                                                                 \
            typedef float T;                                                                       \
            __VA_ARGS__                                                                            \
        } break;                                                                                   \
        }                                                                                          \
    } while (0)

#ifdef _OPENMP
#define LT_PRAGMA(text) _Pragma(#text)
/* Goes before a for loop over independent iterations. Runs it in parallel if `work`, a count of
 * simple operations, repays starting the threads. The schedule is static: every run gives the same
 * iterations to the same threads, and sums kept per iteration are bit-identical. */
#define LT_PARALLEL_FOR(c, work)                                                                   \
    LT_PRAGMA(omp parallel for schedule(static) num_threads((c)->threads)                          \
              if ((work) > 32768 && (c)->threads > 1))
#else
#define LT_PARALLEL_FOR(c, work)
#endif

/* Goes before a for loop whose iterations are independent even if some of its pointers are equal:
 * gcc then vectorises it without checking for aliasing. */
#ifdef __clang__
#define LT_IVDEP
#else
#define LT_IVDEP _Pragma("GCC ivdep")
#endif

/* dst (+)= value: adds the gradient to dst, or overwrites dst. */
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
