/* dropout.cu - the CUDA side of dropout.c. It keeps exactly the elements that the CPU keeps.
 *
 * A thread computes a pack of neighbouring elements of the global batch, aligned to the start of
 * that batch, so that it uses all words of a random block that it generates. The first and the last
 * pack may extend beyond x.
 */
#include "ops/cuda/cuda.h"
#include "ops/dropout.h"

typedef struct drawing {
    int64_t before, n; /* elements of the global batch before x; elements of x */
    uint64_t stream;
    uint32_t key[2], lowest;
    float scale;
    bool add, wide;
} drawing;

/* Drops or scales the four elements that belong to random block number `block`. */
template <class E> __device__ void drop_four(const drawing &q, uint64_t block, const E *x, E *y)
{
    uint32_t word[4], counter[4] = {(uint32_t)block, (uint32_t)(block >> 32), (uint32_t)q.stream,
                                    (uint32_t)(q.stream >> 32)};
    lt__philox(counter, q.key, word);
    for (int k = 0; k < 4; k++) {
        float scaled = lt__value(x[k]) * q.scale, v = LT_DROPOUT(scaled, word[k], q.lowest);
        y[k] = lt_element<E>::of(q.add ? lt__value(y[k]) + v : v);
    }
}

template <class E> LT_KERNEL drop_kernel(E *out, const E *in, const __grid_constant__ drawing q)
{
    enum { V = 16 / sizeof(E) };
    int64_t first = (q.before / V + (int64_t)blockIdx.x * LT_THREADS + threadIdx.x) * V;
    int64_t i = first - q.before;
    if (i >= q.n)
        return;
    lt_pack<E, V> x = lt__load<V>(in, i, q.n, q.wide), y = {};
    if (q.add)
        y = lt__load<V>((const E *)out, i, q.n, q.wide);
    for (int k = 0; k < V; k += 4)
        drop_four(q, (uint64_t)(first + k) / 4, x.at + k, y.at + k);
    lt__store(out, i, q.n, q.wide, y);
}

/* out (+)= mask in / (1 - p) */
template <class E> static lt_status drop(lt_call *c, lt_tensor *out, const lt_tensor *in, bool add)
{
    enum { V = 16 / sizeof(E) };
    drawing q = {};
    q.before = lt__elements_before(c, in);
    q.n = in->count;
    q.stream = c->rng_stream;
    lt__random_key(c->seed, LT_RNG_DROPOUT, q.key);
    q.lowest = lt__lowest_kept(lt__number(c, P));
    q.scale = (float)lt__kept_scale(lt__number(c, P));
    q.add = add;
    q.wide = lt__are_wide((E *)out->data, (E *)in->data) && q.before % V == 0;
    int64_t packs = lt__ceil_div(q.before % V + q.n, V);
    return lt__launch(lt__cuda(c->ctx), lt__ceil_div(q.n > 0 ? packs : 0, LT_THREADS),
                      drop_kernel<E>, (E *)out->data, (const E *)in->data, q);
}

LT_CUDA_CALL(dropout_fwd, FLOATS, c->in[0], drop<E>(c, c->out[0], c->in[0], false))
LT_CUDA_CALL(dropout_bwd, FLOATS, c->d_out[0], drop<E>(c, c->d_in[0], c->d_out[0], lt__adds(c, 0)))

void lt__cuda_dropout(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_dropout], NULL, dropout_fwd, dropout_bwd);
}
