/* batches.c - hands out images and labels in batches: gather, normalisation and the change of
 * dtype in one pass.
 *
 * fill() is the work on one batch. It only reads the iterator and writes where it is told, so
 * that several threads may fill several batches at once; lt_batches_next() makes the tensors and
 * moves on.
 *
 * Images are mostly bytes, and a byte of a channel has 256 possible results. They are computed
 * once, in double, rounded once to the dtype wanted and looked up from then on: exact, the same
 * for every dtype, and as fast as arithmetic.
 */
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "data/data.h"

struct lt_batches {
    lt_ctx *ctx;
    lt_batch_options options;
    lt_tensor *images;            /* (n, h, w, c) or (n, h, w) */
    lt_tensor *labels;            /* (n) */
    lt_tensor *order;             /* (n) i64, or NULL: as they come */
    lt_tensor *table;             /* (c, 256) of options.dtype, for u8 images; else NULL */
    int64_t n, h, w, c;
    int64_t next;                 /* place in order of the next batch's first image */
};

/* ==== The work on one batch =================================================================== */

static double normalise(const lt_batches *b, int64_t c, double value)
{
    if (c >= LT_MAX_CHANNELS)
        return value;
    double std = b->options.std[c];
    return (value - b->options.mean[c]) / (std != 0 ? std : 1);
}

static lt_tensor *make_table(const lt_batches *b)
{
    lt_tensor *table = lt_tensor_new(b->ctx, b->options.dtype, 2, (int64_t[]){b->c, 256});
    if (!table)
        return NULL;
    lt_keep(table);
    char *to = lt_data(table);
    for (int64_t i = 0; i < b->c * 256; i++, to += lt_dtype_bytes(b->options.dtype)) {
        double value = normalise(b, i / 256, (double)(i % 256) / 255);
        lt_convert(to, b->options.dtype, &value, LT_F64, 1);
    }
    return table;
}

/* One image of bytes. Results are moved, not computed with, so that only their width matters. */
#define LOOK_UP(T)                                                                                 \
    for (int64_t i = 0; i < b->h * b->w; i++)                                                      \
        for (int64_t c = 0; c < b->c; c++)                                                         \
            *(T *)dst = ((const T *)table)[256 * c + *src++], dst += sizeof(T);

static void put_bytes(const lt_batches *b, const void *table, const void *image, char *dst)
{
    const uint8_t *src = image;
    switch (lt_dtype_bytes(b->options.dtype)) {
    case 2: LOOK_UP(uint16_t) break;
    case 4: LOOK_UP(uint32_t) break;
    default: LOOK_UP(uint64_t) break;
    }
}

/* One image of floats, through double. */
static void put_floats(const lt_batches *b, const char *src, char *dst)
{
    enum { CHUNK = 256 };
    double buffer[CHUNK];
    lt_dtype from = lt_tensor_dtype(b->images), to = b->options.dtype;
    int64_t count = b->h * b->w * b->c;
    for (int64_t done = 0; done < count; done += CHUNK) {
        int64_t n = count - done < CHUNK ? count - done : CHUNK;
        lt_convert(buffer, LT_F64, src + done * (int64_t)lt_dtype_bytes(from), from, (size_t)n);
        for (int64_t i = 0; i < n; i++)
            buffer[i] = normalise(b, (done + i) % b->c, buffer[i]);
        lt_convert(dst + done * (int64_t)lt_dtype_bytes(to), to, buffer, LT_F64, (size_t)n);
    }
}

/* Images [first, first + count) of the order. */
static lt_status fill(const lt_batches *b, int64_t first, int64_t count, char *x, int64_t *y)
{
    const char *images = lt_data(b->images), *labels = lt_data(b->labels);
    if (!images || !labels)
        return lt_errcode();
    const int64_t *order = b->order ? lt_data(b->order) : NULL;
    const void *table = b->table ? lt_data(b->table) : NULL;
    lt_dtype label_dtype = lt_tensor_dtype(b->labels);
    size_t elements = (size_t)(b->h * b->w * b->c);
    size_t image_bytes = elements * lt_dtype_bytes(lt_tensor_dtype(b->images));
    size_t x_bytes = elements * lt_dtype_bytes(b->options.dtype);
    for (int64_t i = 0; i < count; i++) {
        size_t sample = (size_t)(order ? order[first + i] : first + i);
        if (table)
            put_bytes(b, table, images + sample * image_bytes, x + (size_t)i * x_bytes);
        else
            put_floats(b, images + sample * image_bytes, x + (size_t)i * x_bytes);
        lt_convert(&y[i], LT_I64, labels + sample * lt_dtype_bytes(label_dtype), label_dtype, 1);
    }
    return LT_OK;
}

/* ==== The iterator ============================================================================ */

static lt_status check(const lt_tensor *images, const lt_tensor *labels,
                       const lt_batch_options *options)
{
    char text[96];
    lt_dtype x = lt_tensor_dtype(images), y = lt_tensor_dtype(labels);
    if (lt_ndim(images) != 3 && lt_ndim(images) != 4)
        return lt_fail(LT_EINVAL,
                       "batches: images want axes (n, h, w) or (n, h, w, c), they are %s",
                       lt_describe(images, text, sizeof text));
    if (x != LT_U8 && !lt__is_float(x))
        return lt_fail(LT_EINVAL, "batches: images want u8 or a float dtype, they are %s",
                       lt_dtype_name(x));
    if (lt_ndim(labels) != 1 || lt_dim(labels, 0) != lt_dim(images, 0))
        return lt_fail(LT_EINVAL,
                       "batches: labels want one axis of %lld, as many as there are images; "
                       "they are %s",
                       (long long)lt_dim(images, 0), lt_describe(labels, text, sizeof text));
    if (y != LT_U8 && y != LT_I32 && y != LT_I64)
        return lt_fail(LT_EINVAL, "batches: labels want u8, i32 or i64, they are %s",
                       lt_dtype_name(y));
    if (options->batch < 1)
        return lt_fail(LT_EINVAL, "batches: batch wants at least 1, it is %lld",
                       (long long)options->batch);
    if (!lt__is_float(options->dtype))
        return lt_fail(LT_EINVAL, "batches: dtype wants a float one, it is %s",
                       lt_dtype_name(options->dtype));
    for (int i = 0; i < LT_MAX_CHANNELS; i++)
        if (!(options->std[i] >= 0))
            return lt_fail(LT_EINVAL, "batches: std wants positive numbers, channel %d has %g",
                           i + 1, options->std[i]);
    return LT_OK;
}

lt_batches *lt_batches_new(lt_ctx *ctx, lt_tensor *images, lt_tensor *labels,
                           const lt_batch_options *options)
{
    if (check(images, labels, options) != LT_OK)
        return NULL;
    lt_batches *b = calloc(1, sizeof *b);
    if (!b) {
        lt_fail(LT_ENOMEM, "out of memory for batches");
        return NULL;
    }
    const int64_t *dims = lt_dims(images);
    b->ctx = ctx;
    b->options = *options;
    b->images = lt_retain(images);
    b->labels = lt_retain(labels);
    b->n = dims[0];
    b->h = dims[1];
    b->w = dims[2];
    b->c = lt_ndim(images) == 4 ? dims[3] : 1;
    if (lt_tensor_dtype(images) == LT_U8 && !(b->table = make_table(b)))
        goto fail;
    if (options->shuffle) {
        if (!(b->order = lt_tensor_new(ctx, LT_I64, 1, &b->n)))
            goto fail;
        lt_keep(b->order);
        lt_shuffle(lt_seed(ctx), options->epoch, lt_data(b->order), b->n);
    }
    return b;
fail:
    lt_batches_free(b);
    return NULL;
}

void lt_batches_free(lt_batches *b)
{
    if (!b)
        return;
    lt_release(b->table);
    lt_release(b->order);
    lt_release(b->labels);
    lt_release(b->images);
    free(b);
}

int64_t lt_batches_count(const lt_batches *b)
{
    return b->n / b->options.batch + (b->n % b->options.batch != 0);
}

lt_status lt_batches_next(lt_batches *b, lt_tensor **x, lt_tensor **y)
{
    int64_t left = b->n - b->next, count = left < b->options.batch ? left : b->options.batch;
    *x = *y = NULL;
    if (count == 0)
        return LT_OK;
    *x = lt_tensor_new(b->ctx, b->options.dtype, 4, (int64_t[]){count, b->h, b->w, b->c});
    *y = lt_tensor_new(b->ctx, LT_I64, 1, &count);
    if (!*x || !*y || fill(b, b->next, count, lt_data(*x), lt_data(*y)) != LT_OK) {
        lt_release(*x);
        lt_release(*y);
        *x = *y = NULL;
        return lt_errcode();
    }
    b->next += count;
    return LT_OK;
}
