/* embedding.c - looks up rows of a table by integer ids.
 *
 * Forward copies bytes, whatever the dtype. Backward adds rows to the gradient of the table in the
 * order of ids, in one thread, so that the sum for a repeated id is bit-identical every time.
 */
#include "ops/kernel.h"

enum { W, IDS };

static lt_status shape(lt_call *c)
{
    const lt_tensor *w = c->in[W], *ids = c->in[IDS];
    int64_t dims[LT_MAX_DIMS];
    if (w->ndim < 1)
        return lt_fail(LT_EINVAL, "w must have at least 1 axis (rows, ...), but has none");
    LT_TRY(lt__require_integers(c, IDS));
    int ndim = ids->ndim + w->ndim - 1;
    if (ndim > LT_MAX_DIMS)
        return lt_fail(LT_EINVAL,
                       "the result would have %d axes, but the limit is %d (w %s, ids %s)", ndim,
                       LT_MAX_DIMS, LT_TEXT(w), LT_TEXT(ids));
    for (int i = 0; i < ndim; i++)
        dims[i] = i < ids->ndim ? ids->dims[i] : w->dims[i - ids->ndim + 1];
    lt__spec(c, 0, (lt_dtype)w->dtype, ndim, dims);
    return LT_OK;
}

static lt_status forward(lt_call *c)
{
    const lt_tensor *w = c->in[W], *ids = c->in[IDS];
    int64_t rows = w->dims[0];
    for (int64_t i = 0; i < ids->count; i++) {
        int64_t id = lt__integer(ids, i);
        if (id < 0 || id >= rows)
            return lt_fail(LT_EDATA, LT_BAD_ROW_TEXT, (lt_ll)i + 1, (lt_ll)id, (lt_ll)rows);
    }
    if (rows == 0)
        return LT_OK;
    size_t bytes = (size_t)(w->count / rows) * lt_dtype_bytes((lt_dtype)w->dtype);
    LT_PARALLEL_FOR(c, c->out[0]->count)
    for (int64_t i = 0; i < ids->count; i++)
        memcpy((char *)c->out[0]->data + (size_t)i * bytes,
               (const char *)w->data + (size_t)lt__integer(ids, i) * bytes, bytes);
    return LT_OK;
}

/* A half-precision gradient is summed in f32. Scratch contains the sums, of the size of the table,
 * then one row of d_out in f32. */
static size_t scratch(const lt_call *c, bool backward)
{
    if (!backward || !lt__is_half((lt_dtype)c->d_in[W]->dtype))
        return 0;
    const lt_tensor *dw = c->d_in[W];
    return (size_t)(dw->count + dw->count / (dw->dims[0] > 0 ? dw->dims[0] : 1)) * sizeof(float);
}

/* dw[ids[i]] += d_out[i], in the order of i. Forward has checked the ids. */
static lt_status backward(lt_call *c)
{
    lt_tensor *dw = c->d_in[W];
    const lt_tensor *ids = c->in[IDS], *dy = c->d_out[0];
    lt_dtype dtype = (lt_dtype)dw->dtype;
    if (dw->count == 0)
        return LT_OK;
    bool half = lt__is_half(dtype);
    int64_t width = dw->dims[0] > 0 ? dw->count / dw->dims[0] : 0;
    void *sums = half ? c->scratch : dw->data;
    if (!lt__adds(c, W))
        memset(sums, 0, (size_t)dw->count * (half ? sizeof(float) : lt_dtype_bytes(dtype)));
    else if (half)
        lt_convert(sums, LT_F32, dw->data, dtype, (size_t)dw->count);
    LT_FLOATS(dtype, T,
        T *sum = sums;
        T *row = sum + dw->count;
        for (int64_t i = 0; i < ids->count; i++) {
            const T *from = (const T *)dy->data + i * width;
            T *to = sum + lt__integer(ids, i) * width;
            if (half) {
                const uint16_t *narrow = (const uint16_t *)dy->data + i * width;
                lt_convert(row, LT_F32, narrow, dtype, (size_t)width);
                from = row;
            }
            for (int64_t k = 0; k < width; k++)
                to[k] += from[k];
        }
    );
    if (half)
        lt_convert(dw->data, dtype, sums, LT_F32, (size_t)dw->count);
    return LT_OK;
}

const lt_op lt__op_embedding = {
    .sig = "embedding(w, ids)",
    .doc = "y[i] = w[ids[i]]: rows of w (rows, ...), selected by integer ids of any shape, which "
           "count from 0; y has the shape of ids, then that of a row.",
    .cast = LT_CAST_ANY,
    .any_dtype = true,
    .save = LT_SAVE_IN(IDS),
    .shape = shape,
    .scratch = scratch,
    .fwd = forward,
    .bwd = backward,
};
