/* dropout.c - dropout (Srivastava et al., 2014) with a mask that is a function of the element's
 * index in the global batch.
 *
 * Element i is kept if word i % 4 of lt_random(seed, LT_RNG_DROPOUT, stream, i / 4) is at least
 * 2^32 p. Because i counts from the first row of the global batch, the mask does not depend on how
 * the batch is divided into shards or on the number of ranks. Backward draws the mask again, which
 * is simpler than saving it and takes no memory.
 */
#include "ops/dropout.h"
#include "ops/cpu/loops.h"

/* LT_EINVAL if the index of an element in the global batch would overflow. */
static lt_status check_place(const lt_call *c)
{
    const lt_tensor *x = c->in[0];
    int64_t rows = x->ndim > 0 ? x->dims[0] : 1, before = 0;
    if (rows > 0 &&
        (c->first_row < 0 || __builtin_mul_overflow(c->first_row, x->count / rows, &before) ||
         before > INT64_MAX / 2))
        return lt_fail(LT_EINVAL, "row %lld of a batch with %lld elements per row is out of range",
                       (lt_ll)c->first_row, (lt_ll)(x->count / rows));
    return LT_OK;
}

static lt_status shape(lt_call *c)
{
    LT_TRY(lt__same_float(c, 1));
    LT_TRY(lt__number_in(c, P, 0, 1));
    lt__spec_like(c, 0, c->in[0]);
    c->draws = lt__flag(c, TRAIN) && lt__number(c, P) > 0;
    if (c->draws)
        LT_TRY(check_place(c));
    c->spec[0].view = !c->draws; /* nothing to drop: y is x */
    c->same_grad = !c->draws;
    return LT_OK;
}

/* Draws the random words of n <= LT_BLOCK elements, starting at element `first` of the global
 * batch. Returns the first of them, which is inside word[LT_BLOCK + 8]. */
static const uint32_t *draw(const lt_call *c, int64_t first, int64_t n, uint32_t *word)
{
    for (int64_t k = 0; k < first % 4 + n; k += 4)
        lt_random(c->seed, LT_RNG_DROPOUT, c->rng_stream, (uint64_t)(first + k) / 4, word + k);
    return word + first % 4;
}

/* out (+)= mask in / (1 - p) */
LT_SIMD static void mask(const lt_block *b, double p, const uint32_t *restrict word)
{
    uint32_t lowest = lt__lowest_kept(p);
    LT_FLOATS(b->dtype, T,
        const T *in = b->in[0];
        T *out = b->z; /* in and out may be the same array */
        const bool add = b->add;
        T scale = (T)lt__kept_scale(p);
        LT_IVDEP
        for (int64_t k = 0; k < b->n; k++) {
            T scaled = in[k] * scale;
            LT_PUT(add, out[k], LT_DROPOUT(scaled, word[k], lowest));
        }
    );
}

static void drop_block(const lt_block *b)
{
    const lt_tensor *x = b->c->out[0] ? b->c->out[0] : b->c->d_out[0]; /* same dims */
    int64_t first = lt__elements_before(b->c, x) + b->first;
    uint32_t word[LT_BLOCK + 8];
    mask(b, lt__number(b->c, P), draw(b->c, first, b->n, word));
}

/* y (+)= mask x / (1 - p). Backward calls it with dx for y, and dy for x. */
static lt_status drop(lt_call *c, lt_tensor *y, const lt_tensor *x, bool add)
{
    lt_dtype dtype = (lt_dtype)x->dtype;
    lt__map(c, &(lt_map){drop_block, dtype, LT_COSTLY, add, .n_in = 1, .z = lt__array(y),
                         .in = {lt__array(x)}});
    return LT_OK;
}

static lt_status forward(lt_call *c) { return drop(c, c->out[0], c->in[0], false); }

static lt_status backward(lt_call *c) { return drop(c, c->d_in[0], c->d_out[0], lt__adds(c, 0)); }

const lt_op lt__op_dropout = {
    .sig = "dropout(x; p=0.5, train=true)",
    .doc = "y = x / (1 - p) with probability 1 - p, else 0, independently for each element; with "
           "train=false, y = x.",
    .cast = LT_CAST_ANY,
    .any_dtype = true,
    .same_grad = 1,
    .grad_in_place = 1,
    .shape = shape,
    .fwd = forward,
    .bwd = backward,
};
