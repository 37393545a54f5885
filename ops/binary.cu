/* binary.cu - the CUDA side of binary.c. */
#include "ops/binary.h"
#include "ops/cuda/map.h"

template <class F> static lt_status forward(lt_call *c)
{
    const lt_tensor *z = c->out[0];
    lt_walk w;
    lt__walk_inputs(&w, z, 2, c->in);
    return lt__map(lt__cuda(c->ctx), w, F(), false, z->data, c->in[0]->data, c->in[1]->data);
}

/* The gradient of input i: F of dz, or of dz, x and y if the op saves its inputs. */
template <template <class, class> class F, class E> static lt_status put_grad(lt_call *c, int i)
{
    const lt_tensor *in[] = {c->d_out[0], c->in[0], c->in[1]};
    return c->d_in[i] ? lt__put_grad<F, E>(c, i, c->op->save ? 3 : 1, in) : LT_OK;
}

static inline __device__ float quotient(float x, float y) { return floorf(x / y); }
static inline __device__ int64_t quotient(int64_t x, int64_t y) { return lt__floor_quotient(x, y); }
static inline __device__ float power(float x, float y) { return powf(x, y); }
static inline __device__ int64_t power(int64_t x, int64_t y) { return lt__integer_power(x, y); }

#define LT_FLOOR_QUOTIENT(x, y) quotient((W)x, (W)y)
#define LT_POWER(x, y) power((W)x, (W)y)
/* W is the type in which quotients and powers are computed. */
template <class T> struct widest {
    typedef int64_t type;
};
template <> struct widest<float> {
    typedef float type;
};

#define NONE 1 /* number of inputs of a gradient: dz, or dz, x and y */
#define BOTH 3

#define GRADIENT(name, n, d_of)                                                                    \
    template <class Z, class E> struct name : lt_types<n, Z, E, E, E> {                            \
        typedef float T;                                                                           \
        __device__ T operator()(T dz, T x, T y) const                                              \
        {                                                                                          \
            (void)dz, (void)x, (void)y;                                                            \
            return (T)(d_of);                                                                      \
        }                                                                                          \
    };

/* The gradient of x is computed last, as it may overwrite dz. */
#define BINARY(name, types, cost, policy, saves, same, text, z_of, dx_of, dy_of)                   \
    template <class E> struct name##_z : lt_types<2, E> {                                          \
        typedef lt_wide<E> T;                                                                      \
        typedef typename widest<T>::type W;                                                        \
        __device__ T operator()(T x, T y, T) const { return (T)(z_of); }                           \
    };                                                                                             \
    GRADIENT(name##_dx, saves, dx_of)                                                              \
    GRADIENT(name##_dy, saves, dy_of)                                                              \
    LT_CUDA_CALL(name##_fwd, types, c->in[0], forward<name##_z<E>>(c))                             \
    static lt_status name##_bwd(lt_call *c)                                                        \
    {                                                                                              \
        LT_CUDA_FLOATS(lt__cuda(c->ctx), c->d_out[0]->dtype, E,                                    \
                       LT_TRY((put_grad<name##_dy, E>(c, 1)));                                     \
                       return put_grad<name##_dx, E>(c, 0);)                                       \
    }
LT_BINARY_LIST(BINARY)

void lt__cuda_binary(lt_kernels *op)
{
#define FILL(name, ...)                                                                            \
    lt__set_kernels(&op[LT_OP_##name], lt__cuda_grad_scratch, name##_fwd, name##_bwd);
    LT_BINARY_LIST(FILL)
}
