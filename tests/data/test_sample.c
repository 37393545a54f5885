/* test_sample.c - augmentation and resizing of the images of a batch, compared with a plain
 * computation of each pixel. The result must depend only on (seed, epoch, image).
 */
#include <stdlib.h>

#include "data/source.h"
#include "tests/lt_test.h"

enum { N = 40, H = 5, W = 7, C = 3, SIZE = H * W * C, SEED = 11, EPOCH = 4 };

#define TEST_SEEDED(title)                                                                         \
    TEST_WITH(title, lt_ctx *ctx, lt_ctx_new(&(lt_config){.seed = SEED}), CLOSE_CTX)

/* Never 0, so that padding can be told apart. */
static uint8_t byte_of(int64_t i, int64_t y, int64_t x, int64_t c)
{
    return (uint8_t)(1 + (37 * i + 41 * y + 11 * x + 83 * c) % 255);
}

/* (N, H, W, C); floats are the bytes / 256. The label of an image is its number. */
static lt_source *open_images(lt_ctx *ctx, lt_dtype dtype)
{
    lt_tensor *images = lt_tensor_new(ctx, dtype, 4, (int64_t[]){N, H, W, C});
    lt_tensor *labels = lt_tensor_new(ctx, LT_I64, 1, (int64_t[]){N});
    for (int64_t i = 0; i < N; i++)
        ((int64_t *)lt_data(labels))[i] = i;
    for (int64_t k = 0; k < N * SIZE; k++) {
        double value = byte_of(k / SIZE, k / (W * C) % H, k / C % W, k % C);
        if (dtype != LT_U8)
            value /= 256;
        lt_convert((char *)lt_data(images) + k * (int64_t)lt_dtype_bytes(dtype), dtype, &value,
                   LT_F64, 1);
    }
    lt_source *source = lt_source_tensors(ctx, images, labels);
    RELEASE(images, labels);
    CHECK(source != NULL);
    return source;
}

/* Stores each image of a pass at the index of its number: out (count, image_bytes). Returns the
 * number of images. */
static int collect(lt_ctx *ctx, lt_source *source, const lt_batch_options *options, void *out,
                   size_t image_bytes)
{
    int count = 0;
    lt_batches *batches = lt_batches_new(ctx, source, options);
    CHECK(batches != NULL);
    for (;;) {
        lt_tensor *x, *y;
        CHECK_OK(lt_batches_next(batches, &x, &y));
        if (!x)
            break;
        for (int64_t i = 0; i < lt_dim(x, 0); i++, count++)
            memcpy((char *)out + (size_t)((int64_t *)lt_data(y))[i] * image_bytes,
                   (char *)lt_data(x) + (size_t)i * image_bytes, image_bytes);
        RELEASE(x, y);
    }
    lt_batches_free(batches);
    return count;
}

static int64_t below(uint32_t word, int64_t n) { return (int64_t)floor(word / 4294967296.0 * n); }

/* ==== Shifting and mirroring ================================================================== */

typedef struct move {
    int64_t dy, dx;
    bool mirrored;
} move;

static move move_of(int64_t i, int64_t crop, bool flip)
{
    uint32_t word[4];
    lt_random(SEED, LT_RNG_AUGMENT, EPOCH, 2 * (uint64_t)i, word);
    return (move){below(word[0], 2 * crop + 1) - crop, below(word[1], 2 * crop + 1) - crop,
                  flip && word[2] >= 0x80000000u};
}

/* The expected byte of an augmented image. */
static uint8_t wanted(move m, int64_t i, int64_t y, int64_t x, int64_t c)
{
    int64_t from_y = y + m.dy, from_x = (m.mirrored ? W - 1 - x : x) + m.dx;
    bool inside = from_y >= 0 && from_y < H && from_x >= 0 && from_x < W;
    return inside ? byte_of(i, from_y, from_x, c) : 0;
}

TEST_SEEDED(shifted_and_mirrored_bytes)
{
    static uint8_t out[N * SIZE];
    lt_source *source = open_images(ctx, LT_U8);
    for (int64_t crop = 0; crop < 5; crop++)
        for (int flip = 0; flip < 2; flip++) {
            lt_batch_options options = {
                .batch = 16, .epoch = EPOCH, .dtype = LT_U8, .crop = crop, .flip = flip};
            int mirrored = 0;
            CHECK_EQ(collect(ctx, source, &options, out, SIZE), N);
            for (int64_t i = 0, k = 0; i < N; i++) {
                move m = move_of(i, crop, flip);
                mirrored += m.mirrored;
                for (int64_t y = 0; y < H; y++)
                    for (int64_t x = 0; x < W; x++)
                        for (int64_t c = 0; c < C; c++)
                            CHECK_EQ(out[k++], wanted(m, i, y, x, c));
            }
            CHECK(flip ? mirrored > N / 4 && mirrored < 3 * N / 4 : mirrored == 0);
        }
    lt_source_release(source);
}

TEST_SEEDED(padding_is_black_before_normalisation)
{
    static const lt_dtype dtypes[] = {LT_U8, LT_F32, LT_F64};
    static float out[N * SIZE];
    static const double mean[] = {0.5, 0.25, 0.125}, std[] = {0.5, 2, 0.25};
    for (int d = 0; d < 3; d++) {
        lt_source *source = open_images(ctx, dtypes[d]);
        lt_batch_options options = {.batch = 16, .epoch = EPOCH, .crop = 3, .flip = true};
        memcpy(options.mean, mean, sizeof mean);
        memcpy(options.std, std, sizeof std);
        CHECK_EQ(collect(ctx, source, &options, out, sizeof(float) * SIZE), N);
        for (int64_t k = 0; k < N * SIZE; k++) {
            int64_t i = k / SIZE, c = k % C;
            double value = wanted(move_of(i, 3, true), i, k / (W * C) % H, k / C % W, c);
            value /= dtypes[d] == LT_U8 ? 255 : 256;
            CHECK_EQ(out[k] == (float)((value - mean[c]) / std[c]), 1);
        }
        lt_source_release(source);
    }
}

TEST(all_shifts_occur)
{
    bool seen[9][9] = {{false}};
    int n = 0;
    for (int64_t i = 0; i < 2000; i++) {
        move m = move_of(i, 4, true);
        seen[m.dy + 4][m.dx + 4] = true;
    }
    for (int k = 0; k < 81; k++)
        n += seen[k / 9][k % 9];
    CHECK_EQ(n, 81);
}

TEST_SEEDED(augmentation_is_a_function_of_seed_epoch_and_image)
{
    static float want[N * SIZE], got[N * SIZE];
    const size_t bytes = sizeof(float) * SIZE;
    const lt_batch_options kinds[] = {{.crop = 2, .flip = true}, {.area = 0.1, .flip = true}};
    lt_source *source = open_images(ctx, LT_U8);
    for (int kind = 0; kind < 2; kind++) {
        lt_batch_options options = kinds[kind];
        options.epoch = EPOCH;
        options.batch = N;
        options.workers = -1;
        CHECK_EQ(collect(ctx, source, &options, want, bytes), N);
        for (int k = 0; k < 24; k++) {
            options.batch = 1 + k % 6 * 7;
            options.shuffle = k % 2;
            options.workers = k % 4 - (k % 4 == 0);
            memset(got, 0, sizeof got);
            CHECK_EQ(collect(ctx, source, &options, got, bytes), N);
            CHECK_EQ(memcmp(got, want, sizeof got), 0);
        }
        options.epoch = EPOCH + 1;
        collect(ctx, source, &options, got, bytes);
        CHECK(memcmp(got, want, sizeof got) != 0);
        options.epoch = EPOCH;
        lt_set_seed(ctx, SEED + 1);
        collect(ctx, source, &options, got, bytes);
        CHECK(memcmp(got, want, sizeof got) != 0);
        lt_set_seed(ctx, SEED);
    }
    lt_source_release(source);
}

/* ==== Resizing ================================================================================ */

/* Checks that out is this crop of the image, resampled to h x w. */
static void check_crop(const uint8_t *out, lt_image image, lt_crop crop, int64_t h, int64_t w)
{
    lt_sample_buffers buffers = {0};
    lt_image want;
    CHECK_OK(lt__resample(&image, crop, h, w, &buffers, &want));
    CHECK_EQ(memcmp(out, want.pixels, (size_t)(h * w * image.c)), 0);
    free(buffers.resized.data);
}

static double between(uint32_t word, double low, double high)
{
    return low + (high - low) * (word / 4294967296.0);
}

/* The random crop of an image of height x width. It has exactly the fraction of the area that was
 * drawn. It has the aspect ratio that was drawn if that fits; otherwise it is as high or as wide as
 * the image. */
static lt_crop part_of(const uint32_t word[4], double least, double height, double width)
{
    double fraction = between(word[0], least, 1), area = fraction * height * width;
    double aspect = 0.75 * pow(16.0 / 9, word[1] / 4294967296.0);
    double h = sqrt(area / aspect), w = sqrt(area * aspect);
    if (h > height) {
        h = height;
        w = fraction * width;
    } else if (w > width) {
        w = width;
        h = fraction * height;
    }
    CHECK(h <= height && w <= width);
    CHECK_NEAR(h * w / (height * width), fraction, 1e-12);
    return (lt_crop){between(word[2], 0, height - h), between(word[3], 0, width - w), h, w};
}

TEST_SEEDED(a_random_crop_is_resized_to_the_full_size)
{
    static uint8_t out[N * SIZE], pixels[SIZE];
    double least = 1, most = 0;
    lt_source *source = open_images(ctx, LT_U8);
    lt_batch_options options = {.batch = 16, .epoch = EPOCH, .dtype = LT_U8, .area = 0.2};
    CHECK_EQ(collect(ctx, source, &options, out, SIZE), N);
    for (int64_t i = 0; i < N; i++) {
        uint32_t word[4];
        lt_random(SEED, LT_RNG_AUGMENT, EPOCH, 2 * (uint64_t)i + 1, word);
        lt_crop crop = part_of(word, 0.2, H, W);
        double area = crop.h * crop.w / (H * W);
        for (int64_t k = 0; k < SIZE; k++)
            pixels[k] = byte_of(i, k / (W * C), k / C % W, k % C);
        check_crop(out + i * SIZE, (lt_image){pixels, LT_U8, H, W, C}, crop, H, W);
        least = fmin(least, area);
        most = fmax(most, area);
    }
    CHECK(least < 0.3 && most > 0.9);
    lt_source_release(source);
}

/* A source whose images have h x w = 800 pixels, but are resized to another size. */
enum { PIXELS = 800 };

typedef struct photo {
    lt_source base;
    int64_t h, w;
    uint8_t pixels[PIXELS * 3];
} photo;

static lt_status read_photo(const lt_source *source, int64_t i, lt_sample_buffers *buffers,
                            lt_image *image, int64_t *label)
{
    const photo *p = (const photo *)source;
    (void)buffers;
    *image = (lt_image){p->pixels, LT_U8, p->h, p->w, 3};
    *label = i;
    return LT_OK;
}

static photo make_photo(int64_t count, int64_t h, int64_t w, int64_t to_h, int64_t to_w)
{
    photo p = {.base = {.refs = 1,
                        .count = count,
                        .h = to_h,
                        .w = to_w,
                        .c = 3,
                        .dtype = LT_U8,
                        .read = read_photo},
               .h = h,
               .w = w};
    CHECK_EQ(h * w, PIXELS);
    for (int i = 0; i < PIXELS * 3; i++)
        p.pixels[i] = (uint8_t)(i * i / 7);
    return p;
}

TEST_SEEDED(a_random_crop_of_a_narrow_image_has_the_full_area)
{
    enum { TO = 6 };
    static const struct {
        int64_t h, w;
        double least;
    } cases[] = {{40, 20, 0.08}, {20, 40, 0.9}, {8, 100, 0.08},
                 {100, 8, 0.5},  {1, 800, 0.3}, {800, 1, 0.9}};
    static uint8_t out[N * TO * TO * 3];
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        photo p = make_photo(N, cases[k].h, cases[k].w, TO, TO);
        lt_batch_options options = {
            .batch = 16, .epoch = EPOCH, .dtype = LT_U8, .area = cases[k].least};
        CHECK_EQ(collect(ctx, &p.base, &options, out, TO * TO * 3), N);
        for (int64_t i = 0; i < N; i++) {
            uint32_t word[4];
            lt_random(SEED, LT_RNG_AUGMENT, EPOCH, 2 * (uint64_t)i + 1, word);
            check_crop(out + i * TO * TO * 3, (lt_image){p.pixels, LT_U8, p.h, p.w, 3},
                       part_of(word, cases[k].least, (double)p.h, (double)p.w), TO, TO);
        }
    }
}

TEST_CTX(an_image_is_resized_as_a_whole_or_cropped_to_its_center)
{
    static const struct {
        int64_t h, w;
        double center_crop;
        lt_crop window;
    } cases[] = {
        {10, 10, 0, {0, 0, 40, 20}},
        {50, 100, 0, {0, 0, 40, 20}},
        {10, 10, 1, {10, 0, 20, 20}},
        {40, 20, 0.875, {0, 0, 40, 20}},            /* not resized, so no crop */
        {10, 10, 0.875, {11.25, 1.25, 17.5, 17.5}}, /* 7/8 of the narrow side */
        {20, 10, 0.875, {2.5, 1.25, 35, 17.5}},
        {50, 100, 0.875, {15.625, 1.25, 8.75, 17.5}}, /* enlarged */
    };
    static uint8_t out[50 * 100 * 3];
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        photo p = make_photo(1, 40, 20, cases[k].h, cases[k].w);
        lt_batch_options options = {
            .batch = 1, .dtype = LT_U8, .center_crop = cases[k].center_crop};
        CHECK_EQ(collect(ctx, &p.base, &options, out, (size_t)(cases[k].h * cases[k].w * 3)), 1);
        check_crop(out, (lt_image){p.pixels, LT_U8, 40, 20, 3}, cases[k].window, cases[k].h,
                   cases[k].w);
    }
}
