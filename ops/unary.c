/* unary.c - elementwise ops with one input. To add one, write a row in the table of unary.h and a
 * name in list.h. */
#include <tgmath.h>

#include "ops/cpu/loops.h"
#include "ops/unary.h"

/* Runs fn over x. bf16: whether fn takes bf16 elements as they are. */
static lt_status forward(lt_call *c, lt_block_fn fn, int cost, bool bf16)
{
    lt_array x = lt__array(c->in[0]), y = lt__array(c->out[0]);
    lt__map(c, &(lt_map){fn, x.dtype, cost, false, bf16, .n_in = 1, .z = y, .in = {x}});
    return LT_OK;
}

/* Runs fn over dy and the saved x or y, or dy twice if nothing was saved. */
static lt_status backward(lt_call *c, lt_block_fn fn, int cost, bool bf16)
{
    bool add = lt__adds(c, 0);
    lt_array dy = lt__array(c->d_out[0]), dx = lt__array(c->d_in[0]);
    lt_array saved = c->in[0] ? lt__array(c->in[0]) : c->out[0] ? lt__array(c->out[0]) : dy;
    lt__map(c, &(lt_map){fn, dx.dtype, cost, add, bf16, .n_in = 2, .z = dx, .in = {dy, saved}});
    return LT_OK;
}

/* The forward and backward loops of an op, for elements of type E. They compute in type T. */
#define FORWARD_LOOP(T, E, y_of)                                                                   \
    const E *restrict in = b->in[0];                                                               \
    E *restrict out = b->z;                                                                        \
    for (int64_t i = 0; i < b->n; i++) {                                                           \
        const T x = LT_VALUE(in[i]);                                                               \
        out[i] = LT_ELEMENT(E, (T)(y_of));                                                         \
    }

#define BACKWARD_LOOP(T, E, dx_of)                                                                 \
    const E *in = b->in[0], *saved = b->in[1];                                                     \
    E *out = b->z; /* in and out may be the same array */                                          \
    const bool add = b->add;                                                                       \
    const int64_t n = b->n;                                                                        \
    LT_IVDEP                                                                                       \
    for (int64_t i = 0; i < n; i++) {                                                              \
        const T dy = LT_VALUE(in[i]), x = LT_VALUE(saved[i]), y = x;                               \
        T dx = (T)(dx_of);                                                                         \
        (void)x, (void)y;                                                                          \
        if (add)                                                                                   \
            dx += LT_VALUE(out[i]);                                                                \
        out[i] = LT_ELEMENT(E, dx);                                                                \
    }

/* Defines both loops for all types, and the kernels NAME_fwd and NAME_bwd. types: the macro of the
 * forward loop that defines T, such as LT_FLOATS. Backward is for floats only. */
#define KERNELS(name, types, cost, y_of, dx_of)                                                    \
    LT_SIMD static void name##_forward_block(const lt_block *b)                                    \
    {                                                                                              \
        LT_WITH_BF16(types, b->dtype, T, E, FORWARD_LOOP(T, E, y_of));                             \
    }                                                                                              \
    LT_SIMD static void name##_backward_block(const lt_block *b)                                   \
    {                                                                                              \
        LT_WITH_BF16(LT_FLOATS, b->dtype, T, E, BACKWARD_LOOP(T, E, dx_of));                       \
    }                                                                                              \
    static lt_status name##_fwd(lt_call *c)                                                        \
    {                                                                                              \
        return forward(c, name##_forward_block, cost, true);                                       \
    }                                                                                              \
    static lt_status name##_bwd(lt_call *c)                                                        \
    {                                                                                              \
        return backward(c, name##_backward_block, cost, true);                                     \
    }

/* ==== The table =============================================================================== */

static lt_status same_float(lt_call *c)
{
    LT_TRY(lt__same_float(c, 1));
    lt__spec_like(c, 0, c->in[0]);
    return LT_OK;
}

#define UNARY(name, cost, policy, saves, text, y_of, dx_of)                                        \
    KERNELS(name, LT_FLOATS, cost, y_of, dx_of)                                                    \
    const lt_op lt__op_##name = {                                                                  \
        .sig = #name "(x)",                                                                        \
        .doc = text,                                                                               \
        .cast = policy,                                                                            \
        .any_dtype = true,                                                                         \
        .save = saves,                                                                             \
        .grad_in_place = 1,                                                                        \
        .shape = same_float,                                                                       \
        .fwd = name##_fwd,                                                                         \
        .bwd = name##_bwd,                                                                         \
    };
#define IN LT_SAVE_IN(0)
#define OUT LT_SAVE_OUT(0)
LT_UNARY_LIST(UNARY)

/* ==== Ops that take integers too ============================================================== */

static lt_status same_any(lt_call *c)
{
    lt__spec_like(c, 0, c->in[0]);
    return LT_OK;
}

static lt_status same_signed(lt_call *c)
{
    if (c->in[0]->dtype == LT_U8)
        return lt_fail(LT_EINVAL, "x is u8, which has no negative numbers; cast it, e.g. "
                                  "to i32");
    return same_any(c);
}

KERNELS(neg, LT_WRAPPING, LT_CHEAP, LT_NEG, LT_NEG_BACK)
const lt_op lt__op_neg = {
    .sig = "neg(x)",
    .doc = "y = -x for each element of x; the most negative integer is unchanged.",
    .any_dtype = true,
    .grad_in_place = 1,
    .shape = same_signed,
    .fwd = neg_fwd,
    .bwd = neg_bwd,
};

KERNELS(abs, LT_NUMERICS, LT_CHEAP,
        _Generic(x, float
                 : fabs(x), double
                 : fabs(x), default
                 : lt__magnitude((int64_t)x)),
        LT_ABS_BACK)
const lt_op lt__op_abs = {
    .sig = "abs(x)",
    .doc = "y = |x| for each element of x; the gradient at 0 is 0.",
    .any_dtype = true,
    .save = IN,
    .grad_in_place = 1,
    .shape = same_any,
    .fwd = abs_fwd,
    .bwd = abs_bwd,
};

/* ==== clamp =================================================================================== */

enum { MIN, MAX }; /* options */

static lt_status clamp_shape(lt_call *c)
{
    for (int k = MIN; k <= MAX; k++)
        if (isnan(lt__number(c, k)))
            return lt_fail(LT_EINVAL, "%s must not be nan", c->schema->opt[k].name);
    return same_any(c);
}

/* min and max in the type of x. For integers they are rounded inwards, and bounds that the type
 * cannot represent, such as infinities, become its smallest and largest value. */
#define BOUNDS(T)                                                                                  \
    T min, max;                                                                                    \
    double low = lt__number(b->c, MIN), high = lt__number(b->c, MAX);                              \
    if (!lt__is_float(b->dtype))                                                                   \
        low = ceil(low), high = floor(high);                                                       \
    lt_convert(&min, b->dtype, &low, LT_F64, 1);                                                   \
    lt_convert(&max, b->dtype, &high, LT_F64, 1);

LT_SIMD static void clamp_forward_block(const lt_block *b)
{
    LT_NUMERICS(b->dtype, T,
        BOUNDS(T)
        min = min > max ? max : min;
        FORWARD_LOOP(T, T, LT_CLAMP)
    );
}

LT_SIMD static void clamp_backward_block(const lt_block *b)
{
    LT_FLOATS(b->dtype, T,
        BOUNDS(T)
        BACKWARD_LOOP(T, T, LT_CLAMP_BACK)
    );
}

static lt_status clamp_fwd(lt_call *c) { return forward(c, clamp_forward_block, LT_CHEAP, false); }

static lt_status clamp_bwd(lt_call *c)
{
    return backward(c, clamp_backward_block, LT_CHEAP, false);
}

const lt_op lt__op_clamp = {
    .sig = "clamp(x; min=-inf, max=inf)",
    .doc = "y = min(max(x, min), max) for each element of x; the gradient is 0 except strictly "
           "between min and max.",
    .any_dtype = true,
    .save = IN,
    .grad_in_place = 1,
    .shape = clamp_shape,
    .fwd = clamp_fwd,
    .bwd = clamp_bwd,
};
