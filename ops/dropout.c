/* dropout.c - dropout (Srivastava et al., 2014) whose mask is a function of the element's place.
 *
 * Element i of the global batch is kept when word i % 4 of lt_random(seed, LT_RNG_DROPOUT, stream,
 * i / 4) is at least p 2^32. i counts from the first row of the global batch, so the shards of a
 * batch draw what the whole would, on any number of ranks. Backward draws the mask again: that is
 * simpler than keeping it, and takes no memory.
 */
#include "ops/kernel.h"

enum { P, TRAIN };
enum { BLOCK = 1024 }; /* elements */

static bool drops(const lt_call *c) { return lt__flag(c, TRAIN) && lt__number(c, P) > 0; }

static lt_status shape(lt_call *c)
{
    LT_TRY(lt__same_float(c, 1));
    LT_TRY(lt__number_in(c, P, 0, 1));
    lt__spec_like(c, 0, c->in[0]);
    c->draws = drops(c);
    c->spec[0].view = !c->draws; /* nothing to drop: y is x */
    return LT_OK;
}

/* The words of n <= BLOCK elements from element `first` of the global batch: within word[]. */
static const uint32_t *draw(const lt_call *c, int64_t first, int64_t n, uint32_t word[BLOCK + 8])
{
    for (int64_t k = 0; k < first % 4 + n; k += 4)
        lt_random(lt_seed(c->ctx), LT_RNG_DROPOUT, c->stream, (uint64_t)(first + k) / 4, word + k);
    return word + first % 4;
}

/* y (+)= mask x / (1 - p) for n elements from the first. */
LT_SIMD static void mask(lt_tensor *out, const lt_tensor *in, int64_t first, int64_t n, double p,
                         const uint32_t *restrict word, bool add)
{
    uint32_t lowest = p < 1 ? (uint32_t)ldexp(p, 32) : UINT32_MAX;
    LT_FLOATS(in->dtype, T,
        T *restrict y = (T *)out->data + first;
        const T *restrict x = (const T *)in->data + first;
        T scale = p < 1 ? (T)(1 / (1 - p)) : 0;
        for (int64_t k = 0; k < n; k++) {
            T scaled = x[k] * scale;
            LT_PUT(add, y[k], word[k] >= lowest ? scaled : 0);
        }
    );
}

static lt_status drop(const lt_call *c, lt_tensor *y, const lt_tensor *x, bool add)
{
    int64_t rows = x->ndim > 0 ? x->dims[0] : 1;
    int64_t before = rows > 0 ? c->first_row * (x->count / rows) : 0;
    LT_PARALLEL_FOR(c, x->count * 4)
    for (int64_t i = 0; i < x->count; i += BLOCK) {
        uint32_t word[BLOCK + 8];
        int64_t n = x->count - i < BLOCK ? x->count - i : BLOCK;
        mask(y, x, i, n, lt__number(c, P), draw(c, before + i, n, word), add);
    }
    return LT_OK;
}

static lt_status forward(lt_call *c) { return drop(c, c->out[0], c->in[0], false); }

static lt_status backward(lt_call *c)
{
    if (drops(c))
        return drop(c, c->d_in[0], c->d_out[0], lt__adds(c, 0));
    LT_FLOATS(c->d_out[0]->dtype, T,
        T *dx = c->d_in[0]->data;
        const T *dy = c->d_out[0]->data;
        for (int64_t i = 0; i < c->d_out[0]->count; i++)
            LT_PUT(lt__adds(c, 0), dx[i], dy[i]);
    );
    return LT_OK;
}

const lt_op lt__op_dropout = {
    .sig = "dropout(x; p=0.5, train=true)",
    .doc = "y = x / (1 - p) with probability 1 - p, else 0, for each element; with train=false "
           "y = x.",
    .cast = LT_CAST_ANY,
    .shape = shape,
    .fwd = forward,
    .bwd = backward,
};
