/* synthetic.c - generated images: noise with a class-specific colour.
 *
 * Each byte is the mean of a noise byte and the class's colour in that channel. The colours are as
 * far apart as possible: one digit of the class number per channel, in the smallest base that can
 * represent every class.
 */
#include <math.h>

#include "data/source.h"

typedef struct synthetic {
    lt_source base;
    uint64_t seed, part;
    int64_t radix; /* base of the digits */
} synthetic;

static void make_colour(const synthetic *s, int64_t class, unsigned colour[LT_MAX_CHANNELS])
{
    for (int64_t c = 0; c < s->base.c; c++, class /= s->radix)
        colour[c] = s->radix > 1 ? (unsigned)(255 * (class % s->radix) / (s->radix - 1)) : 0;
}

/* Generates image i. Its noise comes from stream i, starting at index part * 2^40. */
static lt_status read_synthetic(const lt_source *source, int64_t i, lt_sample_buffers *buffers,
                                lt_image *image, int64_t *label)
{
    const synthetic *s = (const synthetic *)source;
    int64_t h = source->h, w = source->w, channels = source->c;
    uint64_t block = s->part << 40;
    unsigned colour[LT_MAX_CHANNELS], k = 0;
    uint32_t word[4];
    *label = i % source->classes;
    if (!image)
        return LT_OK;
    uint8_t *to = lt__bytes_reserve(&buffers->decoded, (size_t)(h * w * channels));
    if (!to)
        return LT_ENOMEM;
    *image = (lt_image){to, LT_U8, h, w, channels};
    make_colour(s, *label, colour);
    for (int64_t pixel = 0; pixel < h * w; pixel++)
        for (int64_t c = 0; c < channels; c++, k++) {
            if (k % 16 == 0)
                lt_random(s->seed, LT_RNG_SYNTHETIC, (uint64_t)i, block++, word);
            unsigned noise = (word[k / 4 % 4] >> k % 4 * 8) & 255;
            *to++ = (uint8_t)((noise + colour[c]) / 2);
        }
    return LT_OK;
}

static lt_status check(uint64_t part, int64_t count, int64_t height, int64_t width,
                       int64_t channels, int64_t classes)
{
    enum { MAX_CLASSES = 1 << 20 };
    if (part >> 24)
        return lt_fail(LT_EINVAL, "synthetic data: part must be below 2^24, but is %llu",
                       (unsigned long long)part);
    if (height < 1 || width < 1 || height > LT_MAX_SIDE || width > LT_MAX_SIDE)
        return lt_fail(LT_EINVAL,
                       "synthetic data: images must have 1 to %d pixels per side, but are "
                       "%lldx%lld",
                       LT_MAX_SIDE, (long long)height, (long long)width);
    if (channels < 1 || channels > LT_MAX_CHANNELS)
        return lt_fail(LT_EINVAL,
                       "synthetic data: images must have 1 to %d channels, but have %lld",
                       LT_MAX_CHANNELS, (long long)channels);
    if (count < 1 || classes < 1 || classes > MAX_CLASSES)
        return lt_fail(LT_EINVAL,
                       "synthetic data: there must be at least one image and 1 to %d classes, got "
                       "%lld images and %lld classes",
                       MAX_CLASSES, (long long)count, (long long)classes);
    return LT_OK;
}

/* The smallest radix for which this many digits can represent every class. */
static int64_t find_radix(int64_t classes, int64_t digits)
{
    for (int64_t radix = 1;; radix++)
        if (pow((double)radix, (double)digits) >= (double)classes)
            return radix;
}

lt_source *lt_source_synthetic(lt_ctx *ctx, uint64_t part, int64_t count, int64_t height,
                               int64_t width, int64_t channels, int64_t classes)
{
    LT_NEED_CTX(ctx, NULL);
    if (check(part, count, height, width, channels, classes) != LT_OK)
        return NULL;
    synthetic *s =
        lt__source_new(sizeof *s, &(lt_source){.ctx = ctx,
                                               .count = count,
                                               .h = height,
                                               .w = width,
                                               .c = channels,
                                               .classes = classes,
                                               .dtype = LT_U8,
                                               .in_files = true, /* generating is slow too */
                                               .read = read_synthetic,
                                               .free = lt__source_free});
    if (!s)
        return NULL;
    s->seed = lt_seed(ctx);
    s->part = part;
    s->radix = find_radix(classes, channels);
    return &s->base;
}
