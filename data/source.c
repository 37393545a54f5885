/* source.c - code that all sources share, and the source of images in memory.
 *
 * A source of images in memory keeps views of the caller's tensors, outside any scope. The views
 * live as long as the source, whatever happens to the caller's tensors, so a worker never sees a
 * dead tensor.
 */
#include <stdlib.h>

#include "core/hash.h"
#include "data/sample.h"

uint8_t *lt__bytes_reserve(lt_bytes *buffer, size_t bytes)
{
    if (bytes > buffer->capacity || !buffer->data) {
        free(buffer->data);
        buffer->capacity = bytes > 0 ? bytes : 1;
        buffer->data = malloc(buffer->capacity);
    }
    if (!buffer->data) {
        buffer->capacity = 0;
        lt_fail(LT_ENOMEM, "out of memory for an image of %zu bytes", bytes);
    }
    return buffer->data;
}

void lt__sample_buffers_free(lt_sample_buffers *buffers)
{
    free(buffers->file.data);
    free(buffers->decoded.data);
    free(buffers->resized.data);
    free(buffers->arranged.data);
}

void *lt__source_new(size_t bytes, const lt_source *base)
{
    lt_source *source = lt__calloc(1, bytes, "for a source of images");
    if (!source)
        return NULL;
    *source = *base;
    atomic_init(&source->refs, 1);
    lt__ctx_retain(source->ctx);
    return source;
}

void lt__source_free(lt_source *source)
{
    lt__ctx_release(source->ctx);
    free(source);
}

lt_source *lt_source_retain(lt_source *source)
{
    atomic_fetch_add_explicit(&source->refs, 1, memory_order_relaxed);
    return source;
}

void lt_source_release(lt_source *source)
{
    if (source && atomic_fetch_sub_explicit(&source->refs, 1, memory_order_acq_rel) == 1)
        source->free(source);
}

int64_t lt_source_count(const lt_source *source) { return source->count; }
int64_t lt_source_classes(const lt_source *source) { return source->classes; }

void lt_source_shape(const lt_source *source, int64_t shape[3])
{
    shape[0] = source->h;
    shape[1] = source->w;
    shape[2] = source->c;
}

const char *lt_source_class_name(const lt_source *source, int64_t i)
{
    return source->class_name ? source->class_name(source, i) : NULL;
}

/* ==== Resizing ================================================================================ */

typedef struct sized {
    lt_source base;
    lt_source *of;
} sized;

/* Returns the original image; the batch resizes it to the size of the source. */
static lt_status read_sized(const lt_source *source, int64_t i, lt_sample_buffers *buffers,
                            lt_image *image, int64_t *label)
{
    const lt_source *of = ((const sized *)source)->of;
    return of->read(of, i, buffers, image, label);
}

static const char *sized_class(const lt_source *source, int64_t i)
{
    return lt_source_class_name(((const sized *)source)->of, i);
}

static uint32_t sized_labels(const lt_source *source, uint32_t digest)
{
    const lt_source *of = ((const sized *)source)->of;
    return of->digest_labels ? of->digest_labels(of, digest) : digest;
}

static void free_sized(lt_source *source)
{
    lt_source_release(((sized *)source)->of);
    lt__source_free(source);
}

lt_source *lt_source_resized(lt_source *source, int64_t height, int64_t width)
{
    if (source->dtype != LT_U8 || height < 1 || width < 1 || height > LT_MAX_SIDE ||
        width > LT_MAX_SIDE) {
        lt_fail(LT_EINVAL,
                "data: only u8 images can be resized, to 1x1 to %dx%d; these are %s, and the size "
                "is %lldx%lld",
                LT_MAX_SIDE, LT_MAX_SIDE, lt_dtype_name(source->dtype), (long long)height,
                (long long)width);
        return NULL;
    }
    sized *s = lt__source_new(sizeof *s, &(lt_source){.ctx = source->ctx,
                                                      .count = source->count,
                                                      .h = height,
                                                      .w = width,
                                                      .c = source->c,
                                                      .classes = source->classes,
                                                      .dtype = LT_U8,
                                                      .in_files = true, /* resizing is slow too */
                                                      .read = read_sized,
                                                      .class_name = sized_class,
                                                      .digest_labels = sized_labels,
                                                      .free = free_sized});
    if (!s)
        return NULL;
    s->of = lt_source_retain(source);
    return &s->base;
}

/* ==== Digest ================================================================================== */

enum { SAMPLE = 16 }; /* images */

/* Adds image i and its label to the digests. An image that cannot be read is not an error here; the
 * error comes when a batch needs the image. */
static void add_image(const lt_source *s, int64_t i, lt_sample_buffers *buffers, uint32_t *labels,
                      uint32_t *images)
{
    lt_image image;
    int64_t label;
    if (s->read(s, i, buffers, &image, &label) != LT_OK) {
        *images = lt__fnv32(*images, "?", 1);
        return;
    }
    int64_t shape[3] = {image.h, image.w, image.c};
    *labels = lt__fnv32(*labels, &label, sizeof label);
    *images = lt__fnv32(*images, shape, sizeof shape);
    if (image.dtype == LT_U8)
        *images = lt__fnv32(*images, image.pixels, (size_t)(image.h * image.w * image.c));
}

/* The index of sample i of n samples that are spread evenly over count images, first and last
 * included: i (count - 1) / (n - 1), without overflow. */
static int64_t place_of(int64_t i, int64_t n, int64_t count)
{
    int64_t steps = n > 1 ? n - 1 : 1, last = count - 1;
    return last / steps * i + last % steps * i / steps;
}

void lt_source_digest(const lt_source *s, uint32_t *labels, uint32_t *images)
{
    lt_sample_buffers buffers = {0};
    *labels = *images = LT_FNV32_START;
    if (s->digest_labels)
        *labels = s->digest_labels(s, *labels);
    int64_t n = s->count < SAMPLE ? s->count : SAMPLE;
    for (int64_t i = 0; i < n; i++)
        add_image(s, place_of(i, n, s->count), &buffers, labels, images);
    lt__sample_buffers_free(&buffers);
}

/* ==== Images in memory ======================================================================== */

typedef struct tensors {
    lt_source base;
    lt_tensor *images, *labels; /* views or copies on the CPU, outside any scope */
} tensors;

static lt_status read_tensors(const lt_source *source, int64_t i, lt_sample_buffers *buffers,
                              lt_image *image, int64_t *label)
{
    const tensors *t = (const tensors *)source;
    lt_dtype dtype = lt_tensor_dtype(t->images), label_dtype = lt_tensor_dtype(t->labels);
    int64_t bytes = source->h * source->w * source->c * (int64_t)lt_dtype_bytes(dtype);
    (void)buffers;
    if (image)
        *image = (lt_image){(const char *)t->images->data + i * bytes, dtype, source->h, source->w,
                            source->c};
    lt_convert(label, LT_I64,
               (const char *)t->labels->data + i * (int64_t)lt_dtype_bytes(label_dtype),
               label_dtype, 1);
    return LT_OK;
}

static uint32_t tensor_labels(const lt_source *source, uint32_t digest)
{
    const lt_tensor *labels = ((const tensors *)source)->labels;
    lt_dtype dtype = lt_tensor_dtype(labels);
    return lt__fnv32(digest, labels->data, (size_t)source->count * lt_dtype_bytes(dtype));
}

static void free_tensors(lt_source *source)
{
    lt_release(((tensors *)source)->labels);
    lt_release(((tensors *)source)->images);
    lt__source_free(source);
}

static lt_status check(const lt_tensor *images, const lt_tensor *labels)
{
    char text[96];
    lt_dtype x = lt_tensor_dtype(images), y = lt_tensor_dtype(labels);
    LT_TRY(lt__check_alive(images));
    LT_TRY(lt__check_alive(labels));
    if (lt_ndim(images) != 3 && lt_ndim(images) != 4)
        return lt_fail(LT_EINVAL,
                       "data: images must have axes (n, h, w) or (n, h, w, c), but are %s",
                       lt_describe(images, text, sizeof text));
    for (int i = 1; i < lt_ndim(images); i++)
        if (lt_dim(images, i) == 0)
            return lt_fail(LT_EINVAL,
                           "data: images must have at least one pixel and one channel, but are %s",
                           lt_describe(images, text, sizeof text));
    if (x != LT_U8 && !lt__is_float(x))
        return lt_fail(LT_EINVAL, "data: images must be u8 or a float dtype, but are %s",
                       lt_dtype_name(x));
    if (lt_ndim(labels) != 1 || lt_dim(labels, 0) != lt_dim(images, 0))
        return lt_fail(LT_EINVAL,
                       "data: labels must have one axis of %lld, the number of images, but are %s",
                       (long long)lt_dim(images, 0), lt_describe(labels, text, sizeof text));
    if (y != LT_U8 && y != LT_I32 && y != LT_I64)
        return lt_fail(LT_EINVAL, "data: labels must be u8, i32 or i64, but are %s",
                       lt_dtype_name(y));
    return LT_OK;
}

/* Returns a view of x, or of a copy of x on the CPU, outside any scope. New. */
static lt_tensor *view_here(lt_tensor *x)
{
    lt_tensor *here = lt__on_host(x);
    lt_tensor *view = here ? lt__tensor_view(here, lt_ndim(x), lt_dims(x), 0, true) : NULL;
    lt_release(here);
    return view;
}

lt_source *lt_source_tensors(lt_ctx *ctx, lt_tensor *images, lt_tensor *labels)
{
    LT_NEED_CTX(ctx, NULL);
    if (check(images, labels) != LT_OK)
        return NULL;
    const int64_t *dims = lt_dims(images);
    tensors *t = lt__source_new(sizeof *t, &(lt_source){.ctx = ctx,
                                                        .count = dims[0],
                                                        .h = dims[1],
                                                        .w = dims[2],
                                                        .c = lt_ndim(images) == 4 ? dims[3] : 1,
                                                        .dtype = lt_tensor_dtype(images),
                                                        .read = read_tensors,
                                                        .digest_labels = tensor_labels,
                                                        .free = free_tensors});
    if (!t)
        return NULL;
    t->images = view_here(images);
    t->labels = view_here(labels);
    if (!t->images || !t->labels) {
        lt_source_release(&t->base);
        return NULL;
    }
    return &t->base;
}
