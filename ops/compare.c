/* compare.c - comparisons, which return a u8 tensor with 1 for true, and `where`, which selects by
 * such a tensor. All of them broadcast. */
#include "ops/cpu/loops.h"

/* ==== Comparisons ============================================================================= */

static lt_status compare_shape(lt_call *c) { return lt__spec_broadcast(c, LT_U8); }

static lt_status compare(lt_call *c, lt_block_fn fn)
{
    lt_array x = lt__array(c->in[0]), y = lt__array(c->in[1]), z = lt__array(c->out[0]);
    lt__map(c, &(lt_map){fn, x.dtype, LT_CHEAP, .n_in = 2, .z = z, .in = {x, y}});
    return LT_OK;
}

#define COMPARISON(name, op, text)                                                                 \
    LT_SIMD static void name##_each(const lt_block *b)                                             \
    {                                                                                              \
        LT_NUMERICS(b->dtype, T,                                                                   \
            const T *restrict x = b->in[0], *restrict y = b->in[1];                                \
            uint8_t *restrict z = b->z;                                                            \
            for (int64_t i = 0; i < b->n; i++)                                                     \
                z[i] = x[i] op y[i];                                                               \
        );              \
    }                                                                                              \
    static lt_status name##_fwd(lt_call *c) { return compare(c, name##_each); }                    \
    const lt_op lt__op_##name = {                                                                  \
        .sig = #name "(x, y)",                                                                     \
        .doc = text,                                                                               \
        .cast = LT_CAST_WIDEST,                                                                    \
        .any_dtype = true,                                                                         \
        .shape = compare_shape,                                                                    \
        .fwd = name##_fwd,                                                                         \
    };

COMPARISON(eq, ==, "1 where x = y, else 0, as u8; x and y broadcast.")
COMPARISON(ne, !=, "1 where x != y (true if either is nan), else 0, as u8; x and y broadcast.")
COMPARISON(lt, <, "1 where x < y, else 0, as u8; x and y broadcast.")
COMPARISON(le, <=, "1 where x <= y, else 0, as u8; x and y broadcast.")
COMPARISON(gt, >, "1 where x > y, else 0, as u8; x and y broadcast.")
COMPARISON(ge, >=, "1 where x >= y, else 0, as u8; x and y broadcast.")

/* ==== where =================================================================================== */

enum { COND, X, Y }; /* inputs */

/* Broadcasts all three inputs together. The result is the last *ndim entries of dims. Three shapes
 * broadcast if each pair of them does. */
static lt_status broadcast_three(const lt_call *c, int *ndim, int64_t dims[LT_MAX_DIMS])
{
    static const int pairs[3][2] = {{X, Y}, {COND, X}, {COND, Y}};
    *ndim = 0;
    for (int i = 0; i < LT_MAX_DIMS; i++)
        dims[i] = 1;
    for (int p = 0; p < 3; p++) {
        int n;
        int64_t two[LT_MAX_DIMS];
        LT_TRY(lt__broadcast(c, pairs[p][0], pairs[p][1], &n, two));
        for (int i = 1; i <= n; i++)
            if (two[n - i] != 1)
                dims[LT_MAX_DIMS - i] = two[n - i];
        *ndim = n > *ndim ? n : *ndim;
    }
    return LT_OK;
}

static lt_status where_shape(lt_call *c)
{
    lt_dtype cond = (lt_dtype)c->in[COND]->dtype;
    int ndim;
    int64_t dims[LT_MAX_DIMS];
    if (cond != LT_U8)
        return lt_fail(LT_EINVAL, "cond must be u8, as from a comparison, but is %s",
                       lt_dtype_name(cond));
    if (c->in[X]->dtype != c->in[Y]->dtype)
        return lt__dtypes_differ(c, X, Y);
    LT_TRY(broadcast_three(c, &ndim, dims));
    lt__spec(c, 0, (lt_dtype)c->in[X]->dtype, ndim, dims + LT_MAX_DIMS - ndim);
    return LT_OK;
}

LT_SIMD static void where_each(const lt_block *b)
{
    LT_NUMERICS(b->dtype, T,
        const uint8_t *restrict cond = b->in[COND];
        const T *restrict x = b->in[X], *restrict y = b->in[Y];
        T *restrict z = b->z;
        for (int64_t i = 0; i < b->n; i++)
            z[i] = cond[i] ? x[i] : y[i];
    );
}

static lt_status where_fwd(lt_call *c)
{
    lt_array cond = lt__array(c->in[COND]), x = lt__array(c->in[X]), y = lt__array(c->in[Y]);
    lt_array z = lt__array(c->out[0]);
    lt__map(c, &(lt_map){where_each, z.dtype, LT_CHEAP, .n_in = 3, .z = z, .in = {cond, x, y}});
    return LT_OK;
}

/* d (+)= dz where cond, as a boolean, equals `wanted`, else 0. */
#define MASKED(name, wanted)                                                                       \
    LT_SIMD static void name(const lt_block *b)                                                    \
    {                                                                                              \
        LT_FLOATS(b->dtype, T,                                                                     \
            const uint8_t *restrict cond = b->in[0];                                               \
            const T *restrict dz = b->in[1];                                                       \
            T *restrict d = b->z;                                                                  \
            const bool add = b->add;                                                               \
            for (int64_t i = 0; i < b->n; i++)                                                     \
                LT_PUT(add, d[i], (cond[i] != 0) == wanted ? dz[i] : 0);                           \
        );       \
    }
MASKED(where_dx_each, true)
MASKED(where_dy_each, false)

static lt_status where_bwd(lt_call *c)
{
    lt_array cond = lt__array(c->in[COND]), dz = lt__array(c->d_out[0]);
    lt_map map = {.dtype = dz.dtype, .cost = LT_CHEAP, .n_in = 2, .z = dz, .in = {cond, dz}};
    for (int i = X; i <= Y; i++) {
        map.fn = i == X ? where_dx_each : where_dy_each;
        if (c->d_in[i])
            lt__put_grad(c, i, &map);
    }
    return LT_OK;
}

const lt_op lt__op_where = {
    .sig = "where(cond, x, y)",
    .doc = "x where cond (u8) is not 0, else y; cond, x and y broadcast.",
    .cast = LT_CAST_WIDEST,
    .any_dtype = true,
    .save = LT_SAVE_IN(COND),
    .shape = where_shape,
    .scratch = lt__grad_scratch,
    .fwd = where_fwd,
    .bwd = where_bwd,
};
