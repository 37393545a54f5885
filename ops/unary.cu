/* unary.cu - the CUDA side of unary.c. */
#include "ops/cuda/map.h"
#include "ops/unary.h"

/* y = f(x). F gives the element types of x and y. */
template <class F> static lt_status forward(lt_call *c, const F &f)
{
    const lt_tensor *x = c->in[0], *y = c->out[0];
    lt_walk w;
    lt__walk_inputs(&w, y, 1, &x);
    return lt__map(lt__cuda(c->ctx), w, f, false, y->data, x->data);
}

/* dx (+)= f(dy, saved tensor). Passes dy again if the op saves nothing. */
template <class F> static lt_status backward(lt_call *c, const F &f)
{
    const lt_tensor *dy = c->d_out[0], *dx = c->d_in[0];
    const lt_tensor *saved = c->in[0] ? c->in[0] : c->out[0] ? c->out[0] : dy;
    const lt_tensor *in[] = {dy, saved};
    lt_walk w;
    lt__walk_inputs(&w, dx, 2, in);
    return lt__map(lt__cuda(c->ctx), w, f, c->add & 1, dx->data, dy->data, saved->data);
}

#define FORWARD(name, y_of)                                                                        \
    template <class E> struct name##_y : lt_types<1, E> {                                          \
        typedef lt_wide<E> T;                                                                      \
        __device__ T operator()(T x, T, T) const { return (T)(y_of); }                             \
    };

#define BACKWARD(name, dx_of)                                                                      \
    template <class E> struct name##_dx : lt_types<2, E> {                                         \
        typedef lt_wide<E> T;                                                                      \
        __device__ T operator()(T dy, T x, T) const                                                \
        {                                                                                          \
            const T y = x;                                                                         \
            (void)y;                                                                               \
            return (T)(dx_of);                                                                     \
        }                                                                                          \
    };

/* types: FLOATS, NUMERICS or WRAPPING, the dtypes of the forward kernel. */
#define KERNELS(name, types, y_of, dx_of)                                                          \
    FORWARD(name, y_of)                                                                            \
    BACKWARD(name, dx_of)                                                                          \
    LT_CUDA_CALL(name##_fwd, types, c->in[0], forward(c, name##_y<E>()))                           \
    LT_CUDA_CALL(name##_bwd, FLOATS, c->d_in[0], backward(c, name##_dx<E>()))

#define UNARY(name, cost, policy, saves, text, y_of, dx_of) KERNELS(name, FLOATS, y_of, dx_of)
LT_UNARY_LIST(UNARY)

__device__ static float magnitude(float x) { return fabsf(x); }
__device__ static int64_t magnitude(int64_t x) { return lt__magnitude(x); }
__device__ static int32_t magnitude(int32_t x) { return (int32_t)lt__magnitude(x); }
__device__ static uint8_t magnitude(uint8_t x) { return x; }

KERNELS(neg, WRAPPING, LT_NEG, LT_NEG_BACK)
KERNELS(abs, NUMERICS, magnitude(x), LT_ABS_BACK)

/* ==== clamp =================================================================================== */

enum { MIN, MAX }; /* options */

template <class E> struct clamp_y : lt_types<1, E> {
    typedef lt_wide<E> T;
    T min, max;
    __device__ T operator()(T x, T, T) const { return LT_CLAMP; }
};

template <class E> struct clamp_dx : lt_types<2, E> {
    typedef lt_wide<E> T;
    T min, max;
    __device__ T operator()(T dy, T x, T) const { return LT_CLAMP_BACK; }
};

/* For integers: the least and the largest integer within the bounds. Infinite bounds become the
 * limits of T. */
template <class T> static void set_bounds(const lt_call *c, T *min, T *max)
{
    *min = lt__saturated<T>(ceil(lt__number(c, MIN)));
    *max = lt__saturated<T>(floor(lt__number(c, MAX)));
}

static void set_bounds(const lt_call *c, float *min, float *max)
{
    *min = (float)lt__number(c, MIN);
    *max = (float)lt__number(c, MAX);
}

template <class E> static lt_status clamp_forward(lt_call *c)
{
    clamp_y<E> f;
    set_bounds(c, &f.min, &f.max);
    f.min = f.min > f.max ? f.max : f.min;
    return forward(c, f);
}

template <class E> static lt_status clamp_backward(lt_call *c)
{
    clamp_dx<E> f;
    set_bounds(c, &f.min, &f.max);
    return backward(c, f);
}

LT_CUDA_CALL(clamp_fwd, NUMERICS, c->in[0], clamp_forward<E>(c))
LT_CUDA_CALL(clamp_bwd, FLOATS, c->d_in[0], clamp_backward<E>(c))

void lt__cuda_unary(lt_kernels *op)
{
#define FILL(name, ...) lt__set_kernels(&op[LT_OP_##name], NULL, name##_fwd, name##_bwd);
    LT_UNARY_LIST(FILL)
    FILL(neg)
    FILL(abs)
    FILL(clamp)
}
