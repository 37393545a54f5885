/* test_resample.c - compares the resampler with the plain formula in double, and with Pillow. */
#include <stdlib.h>

#include "data/source.h"
#include "tests/lt_test.h"

enum { MOST = 64 * 64 * 4 };

/* An image with edges, and with both ends of the range. */
static lt_image make_image(uint8_t *pixels, int h, int w, int c)
{
    for (int i = 0; i < h * w * c; i++)
        pixels[i] = (uint8_t)(i % 11 == 0 ? 255 : i % 7 == 0 ? 0 : i * 37 + i / w * 5);
    return (lt_image){pixels, LT_U8, h, w, c};
}

/* The weight of input pixel k in output pixel i of n along an axis, before normalisation. */
static double weight(double begin, double length, int n, int i, int k)
{
    double scale = length / n, reach = scale > 1 ? scale : 1;
    double distance = fabs(k + 0.5 - (begin + (i + 0.5) * scale)) / reach;
    return distance < 1 ? 1 - distance : 0;
}

static double plain(const lt_image *image, lt_crop v, int h, int w, int y, int x, int c)
{
    const uint8_t *pixels = image->pixels;
    double value = 0, sum = 0;
    for (int i = 0; i < image->h; i++)
        for (int j = 0; j < image->w; j++) {
            double u = weight(v.y, v.h, h, y, i) * weight(v.x, v.w, w, x, j);
            value += u * pixels[(i * image->w + j) * image->c + c];
            sum += u;
        }
    return value / sum;
}

static void check_case(int ih, int iw, int c, lt_crop crop, int h, int w)
{
    static uint8_t pixels[MOST];
    lt_sample_buffers buffers = {0};
    lt_image image = make_image(pixels, ih, iw, c), result;
    CHECK_OK(lt__resample(&image, crop, h, w, &buffers, &result));
    CHECK_EQ(result.h, h);
    CHECK_EQ(result.w, w);
    CHECK_EQ(result.c, c);
    CHECK_EQ(result.dtype, LT_U8);
    const uint8_t *p = result.pixels;
    for (int y = 0; y < h; y++)
        for (int x = 0; x < w; x++)
            for (int k = 0; k < c; k++)
                CHECK_NEAR(*p++, plain(&image, crop, h, w, y, x, k), 0.5 + 1e-3);
    free(buffers.resized.data);
}

TEST(resampling_applies_the_triangle_filter)
{
    check_case(20, 31, 3, (lt_crop){0, 0, 20, 31}, 7, 9);
    check_case(20, 31, 3, (lt_crop){0, 0, 20, 31}, 33, 50);
    check_case(20, 31, 3, (lt_crop){3, 5, 8, 10}, 8, 40);
    check_case(20, 31, 1, (lt_crop){2.25, 0.5, 17.5, 30.5}, 13, 1);
    check_case(20, 31, 4, (lt_crop){0.125, 7.75, 3.375, 1.5}, 5, 6);
    check_case(40, 60, 2, (lt_crop){0, 0, 40, 60}, 1, 1);
    check_case(1, 1, 3, (lt_crop){0, 0, 1, 1}, 4, 5);
    check_case(1, 64, 3, (lt_crop){0, 0.5, 1, 63}, 2, 3);
    check_case(64, 64, 1, (lt_crop){63.5, 63.25, 0.5, 0.75}, 3, 3);
}

TEST(the_same_size_is_a_copy)
{
    static uint8_t pixels[MOST];
    lt_sample_buffers buffers = {0};
    lt_image image = make_image(pixels, 33, 21, 3), result;
    CHECK_OK(lt__resample(&image, (lt_crop){0, 0, 33, 21}, 33, 21, &buffers, &result));
    CHECK_EQ(memcmp(result.pixels, pixels, 33 * 21 * 3), 0);
    CHECK_OK(lt__resample(&image, (lt_crop){4, 6, 20, 10}, 20, 10, &buffers, &result));
    const uint8_t *p = result.pixels;
    for (int y = 0; y < 20; y++)
        CHECK_EQ(memcmp(p + y * 30, pixels + ((y + 4) * 21 + 6) * 3, 30), 0);
    free(buffers.resized.data);
}

TEST(constant_images_stay_constant)
{
    static uint8_t pixels[50 * 50];
    lt_sample_buffers buffers = {0};
    lt_image result;
    for (int value = 0; value < 256; value++) {
        memset(pixels, value, sizeof pixels);
        lt_image image = {pixels, LT_U8, 50, 50, 1};
        CHECK_OK(lt__resample(&image, (lt_crop){0.3, 1.7, 48.9, 41.1}, 17, 61, &buffers, &result));
        for (int i = 0; i < 17 * 61; i++)
            CHECK_EQ(((const uint8_t *)result.pixels)[i], value);
    }
    free(buffers.resized.data);
}

/* Expected values: Image.resize((n, 1), BILINEAR, box) of Pillow 13. */
TEST(the_result_equals_that_of_pillow)
{
    static const uint8_t row[] = {0, 10, 40, 90, 160, 250, 130, 20};
    static const struct {
        double x, w;
        int n;
        uint8_t want[12];
    } cases[] = {{0, 8, 3, {21, 129, 129}},
                 {0, 8, 12, {0, 5, 15, 35, 65, 102, 148, 205, 230, 150, 75, 20}},
                 {1.5, 4.75, 4, {27, 75, 159, 219}}};
    lt_image image = {row, LT_U8, 1, 8, 1}, result;
    lt_sample_buffers buffers = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_OK(lt__resample(&image, (lt_crop){0, cases[i].x, 1, cases[i].w}, 1, cases[i].n,
                              &buffers, &result));
        CHECK_EQ(memcmp(result.pixels, cases[i].want, (size_t)cases[i].n), 0);
    }
    free(buffers.resized.data);
}
