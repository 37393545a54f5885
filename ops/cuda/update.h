/* update.h - one pass over flat arenas that updates them in place on CUDA, 16 bytes of each at a
 * time. update.cu and delay.cu use it.
 */
#ifndef LT_OPS_CUDA_UPDATE_H
#define LT_OPS_CUDA_UPDATE_H

#include "ops/cuda/cuda.h"

/* The arenas of a call: its first inputs, as many as the update uses. */
enum { LT_MAX_ARENAS = 5 };
template <class E> struct lt_arenas {
    E *at[LT_MAX_ARENAS];
    int64_t count;
    const int32_t *skip;  /* the call's skip flag, or NULL */
    const double *factor; /* the call's factor for gradients, or NULL */
    bool wide;
};

/* Defines NAME_update, an update. n: the number of arenas; writes: a mask of those that it writes;
 * scaled: whether `scale` is a number, the factor of gradients. The last argument updates the
 * values x[0..n) of one element. The numbers are members; of(c) reads them from a call. T is
 * float. */
#define LT_CUDA_UPDATE(name, n, writes, scaled, numbers, ...)                                      \
    struct name##_update {                                                                         \
        enum { N = n, WRITES = writes, SCALED = scaled };                                          \
        numbers(LT_MEMBER) __device__ void step(T *x) const { __VA_ARGS__ }                        \
        static name##_update of(const lt_call *c)                                                  \
        {                                                                                          \
            name##_update f = {};                                                                  \
            numbers(LT_SET_MEMBER) return f;                                                       \
        }                                                                                          \
    };
#define LT_MEMBER(type, name, value) type name;
#define LT_SET_MEMBER(type, name, value) f.name = (type)(value);

template <class F, class E> LT_KERNEL lt__update_kernel(F f, const __grid_constant__ lt_arenas<E> a)
{
    enum { V = 16 / sizeof(E), N = F::N };
    if (a.skip && *a.skip)
        return;
    if constexpr (F::SCALED)
        if (a.factor)
            f.scale *= (float)*a.factor;
    int64_t first = (int64_t)blockIdx.x * (LT_THREADS * V);
    int64_t i = first + (int64_t)threadIdx.x * (a.wide ? V : 1);
    float v[N];
    if (a.wide && i + V <= a.count) {
        lt_pack<E, V> p[N];
        for (int k = 0; k < N; k++)
            p[k] = *(const lt_pack<E, V> *)(a.at[k] + i);
        for (int j = 0; j < V; j++) {
            for (int k = 0; k < N; k++)
                v[k] = lt__value(p[k].at[j]);
            f.step(v);
            for (int k = 0; k < N; k++)
                p[k].at[j] = lt_element<E>::of(v[k]);
        }
        for (int k = 0; k < N; k++)
            if (F::WRITES >> k & 1)
                *(lt_pack<E, V> *)(a.at[k] + i) = p[k];
        return;
    }
#pragma unroll 1
    for (int j = 0; j < V && i < a.count; j++, i += a.wide ? 1 : LT_THREADS) {
        for (int k = 0; k < N; k++)
            v[k] = lt__value(a.at[k][i]);
        f.step(v);
        for (int k = 0; k < N; k++)
            if (F::WRITES >> k & 1)
                a.at[k][i] = lt_element<E>::of(v[k]);
    }
}

/* The first n inputs of the call, whose element type is E. */
template <class E> lt_arenas<E> lt__arenas_of(const lt_call *c, int n)
{
    lt_arenas<E> a = {};
    a.count = c->in[0]->count;
    a.skip = c->skip;
    a.factor = c->factor;
    a.wide = true;
    for (int k = 0; k < n; k++) {
        a.at[k] = (E *)c->in[k]->data;
        a.wide &= (uintptr_t)a.at[k] % 16 == 0;
    }
    return a;
}

template <class F, class E> lt_status lt__launch_update(lt_call *c, const F &f)
{
    lt_arenas<E> a = lt__arenas_of<E>(c, F::N);
    return lt__launch(lt__cuda(c->ctx), lt__ceil_div(a.count, LT_THREADS * (16 / sizeof(E))),
                      lt__update_kernel<F, E>, f, a);
}

/* Updates the arenas of the call with f. */
template <class F> lt_status lt__update(lt_call *c, const F &f)
{
    LT_CUDA_FLOATS(lt__cuda(c->ctx), c->in[0]->dtype, E, return (lt__launch_update<F, E>(c, f));)
}

#endif
