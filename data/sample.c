/* sample.c - prepares one image for a batch: resizes, shifts, mirrors and normalises it.
 *
 * Most images are bytes, and a byte of a channel has only 256 possible results. These are computed
 * once in double, rounded once to the target dtype, and then looked up. This is exact, works the
 * same for every dtype, and is as fast as arithmetic.
 *
 * The random choices for a sample use a fixed number of random words, so nothing depends on other
 * samples. Block 2i contains, word by word, the vertical shift, the horizontal shift and the mirror
 * flag; block 2i + 1 the area, the aspect ratio and the position (y, x) of a random crop.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/sample.h"

/* ==== Resizing ================================================================================ */

static double draw_between(uint32_t word, double low, double high)
{
    return low + (high - low) * ((double)word * 0x1p-32);
}

/* A random crop with a fraction of the area from `min` to 1 and an aspect ratio (width / height)
 * from 3/4 to 4/3, or as close to that as this image allows for the area. */
static lt_crop random_crop(const lt_image *image, double min, const uint32_t word[4])
{
    double height = (double)image->h, width = (double)image->w;
    double area = draw_between(word[0], min, 1) * height * width;
    double aspect = exp(draw_between(word[1], log(3.0 / 4), log(4.0 / 3)));
    aspect = fmin(fmax(aspect, area / (height * height)), width * width / area);
    double h = fmin(sqrt(area / aspect), height), w = fmin(sqrt(area * aspect), width);
    return (lt_crop){draw_between(word[2], 0, height - h), draw_between(word[3], 0, width - w), h,
                     w};
}

/* See lt_batch_options.center_crop. */
static lt_crop center_crop(const lt_image *image, int64_t h, int64_t w, double fraction)
{
    double height = (double)image->h, width = (double)image->w;
    if (fraction == 0)
        return (lt_crop){0, 0, height, width};
    double scale = fmin(height / (double)h, width / (double)w) * fraction;
    double part_h = scale * (double)h, part_w = scale * (double)w;
    return (lt_crop){(height - part_h) / 2, (width - part_w) / 2, part_h, part_w};
}

static lt_status resize(const lt_sample_spec *spec, int64_t i, lt_sample_buffers *buffers,
                        lt_image *image)
{
    const lt_source *source = spec->source;
    const lt_batch_options *o = &spec->options;
    lt_image whole = *image;
    if (o->area < 1) {
        uint32_t word[4];
        lt_random(spec->seed, LT_RNG_AUGMENT, o->epoch, 2 * (uint64_t)i + 1, word);
        return lt__resample(&whole, random_crop(&whole, o->area, word), source->h, source->w,
                            buffers, image);
    }
    if (image->h == source->h && image->w == source->w)
        return LT_OK;
    lt_crop crop = center_crop(&whole, source->h, source->w, o->center_crop);
    return lt__resample(&whole, crop, source->h, source->w, buffers, image);
}

/* ==== Shifting and mirroring ================================================================== */

/* A random integer in [-max, max]. */
static int64_t draw_shift(uint32_t word, int64_t max)
{
    return (int64_t)((uint64_t)word * (2 * (uint64_t)max + 1) >> 32) - max;
}

static void mirror_row(char *row, int64_t w, size_t pixel)
{
    for (char *a = row, *b = row + (size_t)(w - 1) * pixel; a < b; a += pixel, b -= pixel)
        for (size_t k = 0; k < pixel; k++) {
            char swapped = a[k];
            a[k] = b[k];
            b[k] = swapped;
        }
}

/* Copies a row of w pixels shifted by dx: pixel x of `to` is pixel x + dx of `row`. Pixels outside
 * the row become black, which is zero in every dtype. */
static void move_row(char *to, const char *row, int64_t w, int64_t dx, size_t pixel)
{
    size_t inside = (size_t)(w - llabs(dx)) * pixel, outside = (size_t)llabs(dx) * pixel;
    if (dx < 0) {
        memset(to, 0, outside);
        memcpy(to + outside, row, inside);
    } else {
        memcpy(to, row + outside, inside);
        memset(to + inside, 0, outside);
    }
}

static lt_status arrange(const lt_batch_options *o, const uint32_t word[4],
                         lt_sample_buffers *buffers, lt_image *image)
{
    int64_t dy = draw_shift(word[0], o->crop), dx = draw_shift(word[1], o->crop);
    bool mirrored = o->flip && word[2] >> 31;
    if (dy == 0 && dx == 0 && !mirrored)
        return LT_OK;
    size_t pixel = (size_t)image->c * lt_dtype_bytes(image->dtype), row = (size_t)image->w * pixel;
    char *to = (char *)lt__bytes_reserve(&buffers->arranged, (size_t)image->h * row);
    const char *from = image->pixels;
    if (!to)
        return LT_ENOMEM;
    image->pixels = to;
    for (int64_t y = dy; y < image->h + dy; y++, to += row) {
        if (y < 0 || y >= image->h)
            memset(to, 0, row);
        else
            move_row(to, from + (size_t)y * row, image->w, dx, pixel);
        if (mirrored)
            mirror_row(to, image->w, pixel);
    }
    return LT_OK;
}

/* ==== Normalising ============================================================================= */

static double normalise(const lt_batch_options *o, int64_t c, double value)
{
    return c < LT_MAX_CHANNELS ? (value - o->mean[c]) / o->std[c] : value;
}

void lt__sample_table(const lt_sample_spec *spec, void *table)
{
    lt_dtype dtype = spec->options.dtype;
    char *to = table;
    for (int64_t i = 0; i < spec->source->c * 256; i++, to += lt_dtype_bytes(dtype)) {
        double byte = (double)(i % 256);
        double value = dtype == LT_U8 ? byte : normalise(&spec->options, i / 256, byte / 255);
        lt_convert(to, dtype, &value, LT_F64, 1);
    }
}

/* The results are copied, so only their width matters. With a constant number of channels the
 * compiler unrolls the inner loop. */
#define LOOK_UP(T, channels)                                                                       \
    for (int64_t i = 0, k = 0; i < pixels; i++)                                                    \
        for (int64_t c = 0; c < (channels); c++, k++)                                              \
            ((T *)x)[k] = ((const T *)table)[256 * c + from[k]];
#define PUT_BYTES(T)                                                                               \
    if (image->c == 1)                                                                             \
        LOOK_UP(T, 1)                                                                              \
    else if (image->c == 3)                                                                        \
        LOOK_UP(T, 3)                                                                              \
    else                                                                                           \
        LOOK_UP(T, image->c)

static void put_bytes(const lt_sample_spec *spec, const lt_image *image, void *restrict x)
{
    const uint8_t *from = image->pixels;
    const void *table = spec->table;
    int64_t pixels = image->h * image->w;
    switch (lt_dtype_bytes(spec->options.dtype)) {
    case 1: PUT_BYTES(uint8_t) break;
    case 2: PUT_BYTES(uint16_t) break;
    case 4: PUT_BYTES(uint32_t) break;
    default: PUT_BYTES(uint64_t) break;
    }
}

/* Normalises in double. */
static void put_floats(const lt_sample_spec *spec, const lt_image *image, void *x)
{
    enum { CHUNK = 256 };
    double buffer[CHUNK];
    lt_dtype from = image->dtype, to = spec->options.dtype;
    size_t count = (size_t)(image->h * image->w * image->c);
    for (size_t done = 0; done < count; done += CHUNK) {
        size_t n = count - done < CHUNK ? count - done : CHUNK;
        lt_convert(buffer, LT_F64, (const char *)image->pixels + done * lt_dtype_bytes(from), from,
                   n);
        for (size_t i = 0; i < n; i++)
            buffer[i] = normalise(&spec->options, (int64_t)(done + i) % image->c, buffer[i]);
        lt_convert((char *)x + done * lt_dtype_bytes(to), to, buffer, LT_F64, n);
    }
}

/* ==== The whole sample ======================================================================== */

lt_status lt__sample_make(const lt_sample_spec *spec, int64_t i, lt_sample_buffers *buffers,
                          void *x, int64_t *label)
{
    const lt_batch_options *o = &spec->options;
    uint32_t word[4];
    lt_image image;
    LT_TRY(spec->source->read(spec->source, i, buffers, x ? &image : NULL, label));
    if (!x)
        return LT_OK;
    LT_TRY(resize(spec, i, buffers, &image));
    lt_random(spec->seed, LT_RNG_AUGMENT, o->epoch, 2 * (uint64_t)i, word);
    LT_TRY(arrange(o, word, buffers, &image));
    if (image.dtype == LT_U8)
        put_bytes(spec, &image, x);
    else
        put_floats(spec, &image, x);
    return LT_OK;
}
