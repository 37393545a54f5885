/* compare.cu - the CUDA side of compare.c. */
#include "ops/cuda/map.h"

/* ==== Comparisons ============================================================================= */

enum { LESS = 1, EQUAL = 2, MORE = 4, UNORDERED = 8 /* one is a NaN */ };

/* 1 where the relation of x and y is one of the bits in `wanted`. */
template <class E> struct as_wanted : lt_types<2, uint8_t, E, E> {
    typedef lt_wide<E> T;
    int wanted;
    __device__ uint8_t operator()(T x, T y, uint8_t) const
    {
        int is = x < y ? LESS : x == y ? EQUAL : x > y ? MORE : UNORDERED;
        return (is & wanted) != 0;
    }
};

template <class E> static lt_status compare(lt_call *c, int wanted)
{
    as_wanted<E> f;
    lt_walk w;
    f.wanted = wanted;
    lt__walk_inputs(&w, c->out[0], 2, c->in);
    return lt__map(lt__cuda(c->ctx), w, f, false, c->out[0]->data, c->in[0]->data, c->in[1]->data);
}

LT_CUDA_CALL(eq, NUMERICS, c->in[0], compare<E>(c, EQUAL))
LT_CUDA_CALL(ne, NUMERICS, c->in[0], compare<E>(c, LESS | MORE | UNORDERED))
LT_CUDA_CALL(lt, NUMERICS, c->in[0], compare<E>(c, LESS))
LT_CUDA_CALL(le, NUMERICS, c->in[0], compare<E>(c, LESS | EQUAL))
LT_CUDA_CALL(gt, NUMERICS, c->in[0], compare<E>(c, MORE))
LT_CUDA_CALL(ge, NUMERICS, c->in[0], compare<E>(c, MORE | EQUAL))

/* ==== where =================================================================================== */

enum { COND, X_IN, Y_IN }; /* inputs */

template <class E> struct pick : lt_types<3, E, uint8_t, E, E> {
    __device__ E operator()(uint8_t cond, E x, E y) const { return cond ? x : y; }
};

/* dz where cond equals WANTED, else 0. */
template <class Z, class E, bool WANTED> struct masked : lt_types<2, Z, uint8_t, E> {
    __device__ float operator()(uint8_t cond, float dz, float) const
    {
        return (cond != 0) == WANTED ? dz : 0;
    }
};
template <class Z, class E> struct where_dx : masked<Z, E, true> {
};
template <class Z, class E> struct where_dy : masked<Z, E, false> {
};

template <class E> static lt_status where_of(lt_call *c)
{
    lt_walk w;
    lt__walk_inputs(&w, c->out[0], 3, c->in);
    return lt__map(lt__cuda(c->ctx), w, pick<E>(), false, c->out[0]->data, c->in[COND]->data,
                   c->in[X_IN]->data, c->in[Y_IN]->data);
}

static lt_status where_fwd(lt_call *c)
{
    LT_CUDA_SIZES(c->out[0]->dtype, E, return where_of<E>(c);)
}

static lt_status where_bwd(lt_call *c)
{
    const lt_tensor *in[] = {c->in[COND], c->d_out[0]};
    LT_CUDA_FLOATS(lt__cuda(c->ctx), c->d_out[0]->dtype, E,
                   if (c->d_in[X_IN]) LT_TRY((lt__put_grad<where_dx, E>(c, X_IN, 2, in)));
                   return c->d_in[Y_IN] ? lt__put_grad<where_dy, E>(c, Y_IN, 2, in) : LT_OK;)
}

void lt__cuda_compare(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_eq], NULL, eq, NULL);
    lt__set_kernels(&op[LT_OP_ne], NULL, ne, NULL);
    lt__set_kernels(&op[LT_OP_lt], NULL, lt, NULL);
    lt__set_kernels(&op[LT_OP_le], NULL, le, NULL);
    lt__set_kernels(&op[LT_OP_gt], NULL, gt, NULL);
    lt__set_kernels(&op[LT_OP_ge], NULL, ge, NULL);
    lt__set_kernels(&op[LT_OP_where], lt__cuda_grad_scratch, where_fwd, where_bwd);
}
