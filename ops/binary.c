/* binary.c - elementwise arithmetic on two tensors, which broadcast as in NumPy: axes are matched
 * from the last one backwards, and an axis that is missing or has size 1 is repeated. */
#include <tgmath.h>

#include "ops/binary.h"
#include "ops/cpu/loops.h"

static lt_status binary_shape(lt_call *c)
{
    return lt__spec_broadcast(c, (lt_dtype)c->in[0]->dtype);
}

static lt_status forward(lt_call *c, lt_block_fn fn, int cost)
{
    lt_array x = lt__array(c->in[0]), y = lt__array(c->in[1]), z = lt__array(c->out[0]);
    lt__map(c, &(lt_map){fn, x.dtype, cost, .bf16 = true, .n_in = 2, .z = z, .in = {x, y}});
    return LT_OK;
}

/* fn[i] computes the gradient of input i from dz and, if the op saves them, from x and y. dx is
 * computed last, because it may be in the memory of dz. */
static lt_status backward(lt_call *c, const lt_block_fn fn[2], int cost)
{
    lt_array dz = lt__array(c->d_out[0]);
    lt_map map = {.dtype = dz.dtype, .cost = cost, .bf16 = true, .n_in = 1, .z = dz, .in = {dz}};
    if (c->op->save) {
        map.n_in = 3;
        map.in[1] = lt__array(c->in[0]);
        map.in[2] = lt__array(c->in[1]);
    }
    for (int i = 1; i >= 0; i--) {
        map.fn = fn[i];
        if (c->d_in[i])
            lt__put_grad(c, i, &map);
    }
    return LT_OK;
}

#define FORWARD_BLOCK(name, types, z_of)                                                           \
    LT_SIMD static void name(const lt_block *b)                                                    \
    {                                                                                              \
        LT_WITH_BF16(                                                                              \
            types, b->dtype, T, E, const E *restrict xs = b->in[0], *restrict ys = b->in[1];       \
            E *restrict out = b->z; for (int64_t i = 0; i < b->n; i++) {                           \
                const T x = LT_VALUE(xs[i]), y = LT_VALUE(ys[i]);                                  \
                out[i] = LT_ELEMENT(E, (T)(z_of));                                                 \
            });                                                                                    \
    }

/* saved: whether the op saves x and y; if not, they are not used. */
#define BACKWARD_BLOCK(name, saved, d_of)                                                          \
    LT_SIMD static void name(const lt_block *b)                                                    \
    {                                                                                              \
        LT_WITH_BF16(                                                                              \
            LT_FLOATS, b->dtype, T, E, const E *dzs = b->in[0];                                    \
            const E *xs = b->in[(saved) ? 1 : 0], *ys = b->in[(saved) ? 2 : 0];                    \
            E *out = b->z; /* dzs and out may be the same array */                                 \
            const bool add = b->add; const int64_t n = b->n;                                       \
            LT_IVDEP for (int64_t i = 0; i < n; i++) {                                             \
                const T dz = LT_VALUE(dzs[i]), x = LT_VALUE(xs[i]), y = LT_VALUE(ys[i]);           \
                T d = (T)(d_of);                                                                   \
                (void)dz, (void)x, (void)y;                                                        \
                if (add)                                                                           \
                    d += LT_VALUE(out[i]);                                                         \
                out[i] = LT_ELEMENT(E, d);                                                         \
            });                                                                                    \
    }

#define BINARY(name, types, cost, policy, saves, same, text, z_of, dx_of, dy_of)                   \
    FORWARD_BLOCK(name##_block, LT_##types, z_of)                                                  \
    BACKWARD_BLOCK(name##_dx_block, saves, dx_of)                                                  \
    BACKWARD_BLOCK(name##_dy_block, saves, dy_of)                                                  \
    static lt_status name##_fwd(lt_call *c) { return forward(c, name##_block, cost); }             \
    static lt_status name##_bwd(lt_call *c)                                                        \
    {                                                                                              \
        return backward(c, (const lt_block_fn[]){name##_dx_block, name##_dy_block}, cost);         \
    }                                                                                              \
    const lt_op lt__op_##name = {                                                                  \
        .sig = #name "(x, y)",                                                                     \
        .doc = text,                                                                               \
        .cast = policy,                                                                            \
        .to_floats = IS_##types,                                                                   \
        .any_dtype = true,                                                                         \
        .save = saves,                                                                             \
        .same_grad = same,                                                                         \
        .grad_in_place = 1,                                                                        \
        .shape = binary_shape,                                                                     \
        .scratch = lt__grad_scratch,                                                               \
        .fwd = name##_fwd,                                                                         \
        .bwd = name##_bwd,                                                                         \
    };
#define IS_FLOATS true
#define IS_NUMERICS false
#define IS_WRAPPING false
#define NONE 0
#define BOTH (LT_SAVE_IN(0) | LT_SAVE_IN(1))

#define LT_FLOOR_QUOTIENT(x, y)                                                                    \
    _Generic(x, float                                                                              \
             : floor(x / y), double                                                                \
             : floor(x / y), default                                                               \
             : lt__floor_quotient((int64_t)x, (int64_t)y))
#define LT_POWER(x, y)                                                                             \
    _Generic(x, float                                                                              \
             : pow(x, y), double                                                                   \
             : pow(x, y), default                                                                  \
             : lt__integer_power((int64_t)x, (int64_t)y))
LT_BINARY_LIST(BINARY)
