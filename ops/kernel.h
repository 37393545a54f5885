/* kernel.h - what the op files of this room share: reading options, filling specs, typed and
 * parallel loops.
 *
 * A kernel computes. It does not allocate, synchronise, read the environment or know Lua. Sizes
 * it may trust: the shape rule has checked them. A shape rule's message need not name the op,
 * its caller does:
 *     return lt_fail(LT_EINVAL, "w wants %lld input channels, x has %lld (x %s, w %s)", ...);
 */
#ifndef LT_OPS_KERNEL_H
#define LT_OPS_KERNEL_H

#include <math.h>
#include <string.h>

#include "core/simd.h"
#include "core/tensor.h"
#include "ops/ops.h"

/* ==== Options, by position in the signature =================================================== */

static inline bool lt__given(const lt_call *c, int k) { return c->opt[k].n > 0; }
static inline double lt__number(const lt_call *c, int k)
{
    return c->opt[k].kind == LT_INTS ? (double)c->opt[k].i[0] : c->opt[k].f;
}
static inline bool lt__flag(const lt_call *c, int k) { return c->opt[k].i[0] != 0; }
/* Which of its words the option is, from 0. */
static inline int lt__word(const lt_call *c, int k) { return (int)c->opt[k].i[0]; }
/* One integer, at least low. */
lt_status lt__int(const lt_call *c, int k, int64_t low, int64_t *value);
/* One integer for both, or two (height, width), each at least low. */
lt_status lt__pair(const lt_call *c, int k, int64_t low, int64_t value[2]);
/* One axis of ndim, brought into 0..ndim-1. */
lt_status lt__axis(const lt_call *c, int k, int ndim, int *axis);
/* A set of axes as a bit mask; all of them when the option is not given. A repeated axis is
 * LT_EINVAL. */
lt_status lt__axes(const lt_call *c, int k, int ndim, uint32_t *mask);

/* A number within [low, high]: "p wants a number from 0 to 1, it is 2". */
lt_status lt__number_in(const lt_call *c, int k, double low, double high);

/* ==== Shape rules ============================================================================= */

void lt__spec(lt_call *c, int out, lt_dtype dtype, int ndim, const int64_t *dims);
void lt__spec_like(lt_call *c, int out, const lt_tensor *x);
/* Inputs 0..n-1 that are present have one dtype, and it is a float one:
 * "x is f32, y is i64; cast one of them, e.g. y:cast('f32')". */
lt_status lt__same_float(const lt_call *c, int n);
/* The same for any one dtype. */
lt_status lt__same_dtype(const lt_call *c, int n);
/* Input i has an integer dtype. */
lt_status lt__want_integers(const lt_call *c, int i);
/* Input i has ndim axes: "x wants 4 axes (n, h, w, c), it has 2 (32x10 f32)". layout is the text
 * in brackets. */
lt_status lt__want_ndim(const lt_call *c, int i, int ndim, const char *layout);
/* Input i has exactly these dims. what: "one value per channel". */
lt_status lt__want_dims(const lt_call *c, int i, int ndim, const int64_t *dims, const char *what);
/* Input i's name in the signature. */
static inline const char *lt__in_name(const lt_call *c, int i)
{
    return c->schema->in[i < c->schema->n_in ? i : c->schema->n_in - 1].name;
}
/* y's dims under broadcasting of a and b (from the last axis backwards, 1 stretches), or
 * LT_EINVAL with both. */
lt_status lt__broadcast(const lt_call *c, int a, int b, int *ndim, int64_t dims[LT_MAX_DIMS]);

/* "32x10 f32" of input i, in a buffer of the caller: LT_TEXT(x) in an argument list. */
#define LT_TEXT(t) lt_describe((t), (char[96]){0}, 96)
typedef long long lt_ll; /* for %lld */

/* ==== Loops =================================================================================== */

/* Runs body once with T standing for the C type of a float dtype (f32 or f64: halves come
 * widened). */
#define LT_FLOATS(dtype, T, ...)                                                                   \
    do {                                                                                           \
        if ((dtype) == LT_F64) { typedef double T; __VA_ARGS__ }                                   \
        else { typedef float T; __VA_ARGS__ }                                                      \
    } while (0)

/* The same for f32, f64, i64, i32 and u8. */
#define LT_NUMERICS(dtype, T, ...)                                                                 \
    do {                                                                                           \
        switch (dtype) {                                                                           \
        case LT_F64: { typedef double T; __VA_ARGS__ } break;                                      \
        case LT_I64: { typedef int64_t T; __VA_ARGS__ } break;                                     \
        case LT_I32: { typedef int32_t T; __VA_ARGS__ } break;                                     \
        case LT_U8: { typedef uint8_t T; __VA_ARGS__ } break;                                      \
        default: { typedef float T; __VA_ARGS__ } break;                                           \
        }                                                                                          \
    } while (0)

#ifdef _OPENMP
#define LT_PRAGMA(text) _Pragma(#text)
/* Before a for over independent iterations: in parallel when work (a count of simple operations)
 * repays waking the team. Which thread runs which iteration is fixed, so sums kept per iteration
 * give the same bits every time. */
#define LT_PARALLEL_FOR(c, work)                                                                   \
    LT_PRAGMA(omp parallel for schedule(static) num_threads((c)->threads)                          \
              if ((work) > 32768 && (c)->threads > 1))
#else
#define LT_PARALLEL_FOR(c, work)
#endif

/* Before a for whose iterations are independent though pointers in it may be equal: gcc vectorises
 * it without a look at them. */
#ifdef __clang__
#define LT_IVDEP
#else
#define LT_IVDEP _Pragma("GCC ivdep")
#endif

/* dst (+)= value: the two ways to give a gradient. */
#define LT_PUT(add, dst, value)                                                                    \
    do {                                                                                           \
        if (add)                                                                                   \
            (dst) += (value);                                                                      \
        else                                                                                       \
            (dst) = (value);                                                                       \
    } while (0)

/* Element i of an i64, i32 or u8 tensor. */
static inline int64_t lt__integer(const lt_tensor *x, int64_t i)
{
    return x->dtype == LT_I64   ? ((const int64_t *)x->data)[i]
           : x->dtype == LT_I32 ? ((const int32_t *)x->data)[i]
                                : ((const uint8_t *)x->data)[i];
}

static inline bool lt__adds(const lt_call *c, int i) { return c->add >> i & 1; }

/* ==== Room-private state ====================================================================== */

/* This context's oneDNN engine, plans and so on; made on first use by dnnl.c, freed with the
 * context. */
struct lt_ops {
    struct lt_dnnl *dnnl;
    struct lt_accelerator *accelerator; /* of the plugin, or NULL */
};
void lt__dnnl_free(struct lt_dnnl *dnnl);
/* What lt_backend() says of the CPU. */
char *lt__cpu_backend(char *buffer, size_t bytes);

/* Whether a device text is that of an accelerator, or "auto". */
bool lt__is_accelerator(const char *device);
/* Opens it for ctx, whose ops are registered, so that new tensors go there. LT_EENV; under "auto"
 * only a note for the log. */
lt_status lt__accelerator_open(lt_ctx *ctx, const char *device);
void lt__accelerator_free(lt_ctx *ctx, struct lt_accelerator *accelerator); /* NULL is fine */
/* Borrowed; NULL: there is none. */
const struct lt_accelerator *lt__accelerator(const lt_ctx *ctx);
/* What all of both is. */
lt_grad_stats lt__grad_stats_join(lt_grad_stats a, lt_grad_stats b);

#define X(name) extern const lt_op lt__op_##name;
#include "ops/list.h"
LT_OP_LIST(X)
#undef X

#endif
