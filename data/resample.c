/* resample.c - resizes a region of an image with a triangle filter (linear interpolation) that
 * widens when the image gets smaller.
 *
 * The result equals Pillow's resize(size, BILINEAR, box = crop), except for the last bit, since
 * Pillow also rounds between the two axes. torchvision with antialias resizes the same way. At the
 * edges of the image the weights of the existing pixels are normalised to a sum of 1. The edges of
 * the region are not special: pixels around it contribute too.
 *
 * For each row of the result, a weighted sum of image rows is computed in float; its pixels are
 * then combined along the row. So there is no intermediate image, and the long loop runs over
 * contiguous memory.
 */
#include <math.h>
#include <string.h>

#include "data/source.h"

typedef struct axis { /* for each of n output positions: the input pixels and weights */
    int64_t n, max;
    struct taps {
        int64_t first, count;
    } * taps;       /* (n) ranges of at most `max` input pixels */
    float *weights; /* (n, max) */
} axis;

static double shrink(double length, int64_t n) { return fmax(length / (double)n, 1); }

/* Computes the taps and weights of an axis. size is the length of the image along it; begin and
 * length are those of the region. */
static void weigh(axis *a, int64_t size, double begin, double length)
{
    double scale = length / (double)a->n, reach = shrink(length, a->n);
    for (int64_t i = 0; i < a->n; i++) {
        float *weights = a->weights + i * a->max;
        double centre = fmin(fmax(begin + ((double)i + 0.5) * scale, 0.5), (double)size - 0.5);
        double sum = 0;
        int64_t first = (int64_t)fmax(centre - reach + 0.5, 0);
        int64_t end = (int64_t)fmin(centre + reach + 0.5, (double)size);
        for (int64_t k = first; k < end; k++)
            sum += fmax(1 - fabs((double)k + 0.5 - centre) / reach, 0);
        for (int64_t k = first; k < end; k++)
            weights[k - first] = (float)(fmax(1 - fabs((double)k + 0.5 - centre) / reach, 0) / sum);
        a->taps[i] = (struct taps){first, end - first};
    }
}

static void add_row(float *sum, const uint8_t *row, float weight, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        sum[i] += weight * row[i];
}

/* Writes one row of the result. sum starts at pixel x->taps[0].first. */
static void put_row(const axis *x, const float *sum, int64_t c, uint8_t *out)
{
    for (int64_t i = 0; i < x->n; i++) {
        const float *weights = x->weights + i * x->max;
        const float *from = sum + (x->taps[i].first - x->taps[0].first) * c;
        for (int64_t channel = 0; channel < c; channel++) {
            float value = 0.5f; /* rounds to nearest; the weights sum to 1, so it stays below 256 */
            for (int64_t k = 0; k < x->taps[i].count; k++)
                value += weights[k] * from[k * c + channel];
            *out++ = (uint8_t)value;
        }
    }
}

/* Takes bytes from the block at *at, rounded up to a multiple of 16. */
static void *cut(uint8_t **at, size_t bytes)
{
    void *p = *at;
    *at += (bytes + 15) / 16 * 16;
    return p;
}

lt_status lt__resample(const lt_image *image, lt_crop crop, int64_t h, int64_t w,
                       lt_sample_buffers *buffers, lt_image *result)
{
    axis y = {.n = h, .max = 2 * (int64_t)ceil(shrink(crop.h, h)) + 1};
    axis x = {.n = w, .max = 2 * (int64_t)ceil(shrink(crop.w, w)) + 1};
    size_t row = (size_t)(image->w * image->c) * sizeof(float), out = (size_t)(h * w * image->c);
    size_t taps = (size_t)(h + w) * sizeof(struct taps);
    size_t weights = (size_t)(h * y.max + w * x.max) * sizeof(float);
    uint8_t *block = lt__bytes_reserve(&buffers->resized, taps + weights + row + out + 6 * 16);
    if (!block)
        return LT_ENOMEM;
    y.taps = cut(&block, (size_t)h * sizeof(struct taps));
    x.taps = cut(&block, (size_t)w * sizeof(struct taps));
    y.weights = cut(&block, (size_t)(h * y.max) * sizeof(float));
    x.weights = cut(&block, (size_t)(w * x.max) * sizeof(float));
    float *sum = cut(&block, row);
    *result = (lt_image){block, LT_U8, h, w, image->c};
    weigh(&y, image->h, crop.y, crop.h);
    weigh(&x, image->w, crop.x, crop.w);
    int64_t begin = x.taps[0].first * image->c;
    int64_t length = (x.taps[w - 1].first + x.taps[w - 1].count) * image->c - begin;
    for (int64_t i = 0; i < h; i++) {
        memset(sum, 0, (size_t)length * sizeof *sum);
        for (int64_t k = 0; k < y.taps[i].count; k++)
            add_row(sum,
                    (const uint8_t *)image->pixels + (y.taps[i].first + k) * image->w * image->c +
                        begin,
                    y.weights[i * y.max + k], length);
        put_row(&x, sum, image->c, block + i * w * image->c);
    }
    return LT_OK;
}
