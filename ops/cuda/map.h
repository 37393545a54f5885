/* map.h - elementwise loops on CUDA: z (+)= f(a, b, c), where operands may be broadcast, permuted,
 * or slices of larger tensors.
 *
 * A thread computes as many elements of the widest operand type as fit into 16 bytes. Where shapes
 * and addresses allow, the elements are contiguous and each operand takes one load. Otherwise the
 * thread computes them one by one, so that the threads of a warp access adjacent elements.
 */
#ifndef LT_OPS_CUDA_MAP_H
#define LT_OPS_CUDA_MAP_H

#include "ops/cuda/cuda.h"

enum { LT_OPERANDS = 4 }; /* z, which is operand 0, and up to three inputs */

/* A traversal of all elements of a shape: the stride of each operand along each axis, in elements.
 * Axes are in the order of the tensor until lt__walk_merge(), and innermost first afterwards. */
typedef struct lt_walk {
    int64_t count;
    int ndim;
    bool small; /* count fits in 31 bits */
    bool wide;  /* elements are moved in packs; set by lt__map() */
    int64_t dims[LT_MAX_DIMS], step[LT_OPERANDS][LT_MAX_DIMS];
} lt_walk;

/* Starts a walk over a shape; all operands are dense and have that shape. */
void lt__walk_over(lt_walk *w, int ndim, const int64_t *dims);
/* Gives operand k its own shape, which broadcasts to the walk's shape. */
void lt__walk_stretch(lt_walk *w, int k, int ndim, const int64_t *dims);
/* Merges neighbouring axes that are contiguous in all n operands, drops axes of size 1, and
 * reverses the order of axes. */
void lt__walk_merge(lt_walk *w, int n);
/* Does all three: a merged walk over the shape of z, with n inputs that broadcast to it. */
void lt__walk_inputs(lt_walk *w, const lt_tensor *z, int n, const lt_tensor *const *in);

/* Sets at[k] to the offset of element i in operand k. The axes of w must be innermost first. */
template <int N>
__device__ inline void lt__offsets_of(const lt_walk &w, int64_t i, int64_t (&at)[N])
{
    int last = w.ndim - 1;
    for (int k = 0; k < N; k++)
        at[k] = 0;
#pragma unroll 1
    for (int a = 0; a < last; a++) {
        int64_t next = w.small ? (uint32_t)i / (uint32_t)w.dims[a] : i / w.dims[a];
        i -= next * w.dims[a];
        for (int k = 0; k < N; k++)
            at[k] += i * w.step[k][a];
        i = next;
    }
    for (int k = 0; k < N; k++)
        at[k] += i * w.step[k][last];
}

template <class T, class U>
using lt_larger = lt_pack<uint8_t, (sizeof(T) > sizeof(U) ? sizeof(T) : sizeof(U))>;

/* The operand types of a map. The functor f derives from this and has
 *     lt_wide<Z> operator()(lt_wide<A> a, lt_wide<B> b, lt_wide<C> c) const;
 * Only the first N arguments are used. A thread computes V elements. */
template <int N_, class Z_, class A_ = Z_, class B_ = Z_, class C_ = Z_> struct lt_types {
    typedef Z_ Z;
    typedef A_ A;
    typedef B_ B;
    typedef C_ C;
    enum { N = N_, V = 16 / sizeof(lt_larger<lt_larger<Z, A>, lt_larger<B, C>>) };
};

template <class F> struct lt_operands {
    typename F::Z *z;
    const typename F::A *a;
    const typename F::B *b;
    const typename F::C *c;
    bool add; /* add to the values in z */
};

template <class F>
__device__ inline typename F::Z lt__map_of(const F &f, bool add, typename F::Z old, typename F::A a,
                                           typename F::B b, typename F::C c)
{
    lt_wide<typename F::Z> z = f(lt__value(a), lt__value(b), lt__value(c));
    return lt_element<typename F::Z>::of(add ? (lt_wide<typename F::Z>)(lt__value(old) + z) : z);
}

/* Loads V adjacent elements, or repeats a single element V times if step is 0. */
template <int V, class E> __device__ inline lt_pack<E, V> lt__take(const E *from, int64_t step)
{
    lt_pack<E, V> p;
    if (step)
        return *(const lt_pack<E, V> *)from;
    E one = *from;
    for (int k = 0; k < V; k++)
        p.at[k] = one;
    return p;
}

template <class F>
__device__ inline void lt__map_pack(const F &f, const lt_walk &w, const lt_operands<F> &o,
                                    const int64_t *at)
{
    enum { V = F::V };
    lt_pack<typename F::Z, V> z = {};
    lt_pack<typename F::A, V> a = lt__take<V>(o.a + at[1], w.step[1][0]);
    lt_pack<typename F::B, V> b = {};
    lt_pack<typename F::C, V> c = {};
    if (F::N > 1)
        b = lt__take<V>(o.b + at[F::N > 1 ? 2 : 0], w.step[2][0]);
    if (F::N > 2)
        c = lt__take<V>(o.c + at[F::N > 2 ? 3 : 0], w.step[3][0]);
    if (o.add)
        z = lt__take<V>((const typename F::Z *)o.z + at[0], 1);
    for (int k = 0; k < V; k++)
        z.at[k] = lt__map_of(f, o.add, z.at[k], a.at[k], b.at[k], c.at[k]);
    *(lt_pack<typename F::Z, V> *)(o.z + at[0]) = z;
}

template <class F>
__device__ inline void lt__map_one(const F &f, const lt_operands<F> &o, const int64_t *at)
{
    typename F::B b = {};
    typename F::C c = {};
    typename F::Z old = {};
    typename F::Z *z = o.z + at[0];
    if (F::N > 1)
        b = o.b[at[F::N > 1 ? 2 : 0]];
    if (F::N > 2)
        c = o.c[at[F::N > 2 ? 3 : 0]];
    if (o.add)
        old = *z;
    *z = lt__map_of(f, o.add, old, o.a[at[1]], b, c);
}

template <class F>
LT_KERNEL lt__map_kernel(F f, const __grid_constant__ lt_walk w, lt_operands<F> o)
{
    enum { V = F::V };
    int64_t at[F::N + 1];
    int64_t i = (int64_t)blockIdx.x * (LT_THREADS * V) + threadIdx.x * (w.wide ? V : 1);
    bool pack = w.wide && i + V <= w.count;
#pragma unroll 1
    for (int k = 0; k < V && i < w.count; k++, i += w.wide ? 1 : LT_THREADS) {
        lt__offsets_of(w, i, at);
        if (pack) {
            lt__map_pack(f, w, o, at);
            break;
        }
        lt__map_one(f, o, at);
    }
}

/* Whether V elements of operand k, which starts at `at`, can be moved at once. */
static inline bool lt__is_wide(const lt_walk *w, int k, const void *at, size_t size, int V)
{
    if (k > 0 && w->step[k][0] == 0)
        return true;
    bool wide = w->step[k][0] == 1 && (uintptr_t)at % (size * V) == 0;
    for (int i = 1; i < w->ndim; i++)
        wide &= w->step[k][i] % V == 0;
    return wide;
}

/* Computes z (+)= f(a, b, c) over a merged walk. z may be one of the inputs: each element is
 * written by the thread that read it. */
template <class F>
lt_status lt__map(const lt_cuda *cuda, lt_walk w, const F &f, bool add, void *z, const void *a,
                  const void *b = NULL, const void *c = NULL)
{
    enum { V = F::V };
    lt_operands<F> o = {(typename F::Z *)z, (const typename F::A *)a, (const typename F::B *)b,
                        (const typename F::C *)c, add};
    w.wide = w.ndim == 1 || w.dims[0] % V == 0;
    w.wide &= lt__is_wide(&w, 0, z, sizeof *o.z, V) && lt__is_wide(&w, 1, a, sizeof *o.a, V);
    w.wide &= F::N < 2 || lt__is_wide(&w, 2, b, sizeof *o.b, V);
    w.wide &= F::N < 3 || lt__is_wide(&w, 3, c, sizeof *o.c, V);
    return lt__launch(cuda, lt__ceil_div(w.count, LT_THREADS * V), lt__map_kernel<F>, f, w, o);
}

/* ==== Gradients of broadcasting ops =========================================================== */

/* Whether input i is stretched by broadcasting, so that its gradient is a sum over output
 * elements. */
static inline bool lt__is_stretched(const lt_call *c, int i)
{
    return c->d_in[i]->count != c->d_out[0]->count;
}

/* dst (+)= the sum of src over the axes in which dst has size 1 or no axis. src has the shape of
 * `like`. In reduce.cu. */
lt_status lt__cuda_sum_to(const lt_cuda *cuda, lt_tensor *dst, const lt_tensor *like,
                          const float *src, bool add, void *scratch);
size_t lt__cuda_sum_to_scratch(const lt_tensor *dst, const lt_tensor *like);

/* d_in[i] (+)= f(in...), where f computes the gradient for one element of the output. If the input
 * is stretched, f writes f32 to scratch, which is then summed. F<E, E> returns elements of type E,
 * F<float, E> returns floats. */
template <template <class Z, class E> class F, class E>
lt_status lt__put_grad(lt_call *c, int i, int n, const lt_tensor *const *in)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    lt_tensor *d = c->d_in[i];
    const lt_tensor *dz = c->d_out[0];
    bool add = c->add >> i & 1;
    lt_walk w;
    lt__walk_inputs(&w, dz, n, in);
    const void *at[3] = {in[0]->data, n > 1 ? in[1]->data : NULL, n > 2 ? in[2]->data : NULL};
    if (!lt__is_stretched(c, i))
        return lt__map(cuda, w, F<E, E>(), add, d->data, at[0], at[1], at[2]);
    LT_TRY(lt__map(cuda, w, F<float, E>(), false, c->scratch, at[0], at[1], at[2]));
    return lt__cuda_sum_to(cuda, d, dz, (const float *)c->scratch, add,
                           (char *)c->scratch + lt__aligned((size_t)dz->count * sizeof(float)));
}
/* Bytes of scratch that lt__put_grad() needs for any input. Can be used as lt_kernels.scratch. */
size_t lt__cuda_grad_scratch(const lt_call *c, bool backward);

#endif
