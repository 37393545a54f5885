/* test_source.c - sources: their properties and digests, and the synthetic source. */
#include "data/source.h"
#include "tests/lt_test.h"

TEST(images_in_memory)
{
    lt_ctx *ctx = lt_ctx_new(NULL);
    lt_tensor *images = lt_tensor_full(ctx, LT_U8, 4, (int64_t[]){6, 2, 3, 4}, 7);
    lt_tensor *labels = lt_tensor_full(ctx, LT_I32, 1, (int64_t[]){6}, -5);
    lt_source *source = lt_source_tensors(ctx, images, labels);
    int64_t shape[3];
    RELEASE(images, labels);
    CHECK_EQ(lt_source_count(source), 6);
    lt_source_shape(source, shape);
    CHECK(shape[0] == 2 && shape[1] == 3 && shape[2] == 4);
    CHECK_EQ(lt_source_classes(source), 0);
    CHECK(lt_source_class_name(source, 0) == NULL);
    CHECK(lt_source_retain(source) == source);
    lt_source_release(source);
    CHECK(lt_memory_stats(ctx).live > 0);
    lt_ctx_free(ctx); /* the source keeps what it needs */
    lt_sample_buffers buffers = {0};
    lt_image image;
    int64_t label;
    CHECK_OK(source->read(source, 5, &buffers, &image, &label));
    CHECK_EQ(((const uint8_t *)image.pixels)[23], 7);
    CHECK_EQ(label, -5);
    lt_source_release(source);
    lt_source_release(NULL);
}

TEST_CTX(labels_can_be_read_without_images)
{
    const uint8_t classes[] = {3, 1, 4, 1, 5, 9};
    lt_tensor *images = lt_tensor_full(ctx, LT_U8, 4, (int64_t[]){6, 2, 3, 1}, 7);
    lt_tensor *labels = lt_tensor_from(ctx, LT_U8, 1, (int64_t[]){6}, classes);
    lt_source *in_memory = lt_source_tensors(ctx, images, labels);
    lt_source *sources[] = {in_memory, lt_source_resized(in_memory, 4, 4),
                            lt_source_synthetic(ctx, 0, 6, 2, 3, 1, 4)};
    for (int k = 0; k < 3; k++) {
        for (int i = 0; i < 6; i++) {
            int64_t label = -1;
            CHECK_OK(sources[k]->read(sources[k], i, NULL, NULL, &label));
            CHECK_EQ(label, k < 2 ? classes[i] : i % 4);
        }
        lt_source_release(sources[k]);
    }
    RELEASE(images, labels);
}

TEST_CTX(images_in_memory_have_at_least_one_pixel)
{
    static const int64_t dims[][4] = {{4, 0, 5, 1}, {4, 5, 0, 1}, {4, 5, 5, 0}, {4, 0, 5, 0}};
    static const char *const texts[] = {"4x0x5x1 u8", "4x5x0x1 u8", "4x5x5x0 u8", "4x0x5 u8"};
    lt_tensor *labels = lt_tensor_full(ctx, LT_U8, 1, (int64_t[]){4}, 0);
    for (int i = 0; i < 4; i++) {
        lt_tensor *images = lt_tensor_full(ctx, LT_U8, i < 3 ? 4 : 3, dims[i], 0);
        CHECK(images && lt_source_tensors(ctx, images, labels) == NULL);
        CHECK_EQ(lt_errcode(), LT_EINVAL);
        CHECK_MSG("data: images must have at least one pixel and one channel, but are ");
        CHECK_MSG(texts[i]);
        lt_release(images);
    }
    lt_release(labels);
}

/* Computes the digests of six images in memory, after changing a pixel of image `at` and the class
 * of image `label`; -1: no change. */
static void digest_with(lt_dtype dtype, int at, int label, uint32_t digests[2])
{
    lt_ctx *ctx = lt_ctx_new(NULL);
    lt_tensor *images = lt_tensor_full(ctx, dtype, 4, (int64_t[]){6, 2, 3, 1}, 7);
    lt_tensor *labels = lt_tensor_full(ctx, LT_I64, 1, (int64_t[]){6}, 1);
    if (at >= 0 && dtype == LT_U8)
        ((uint8_t *)lt_data(images))[6 * at] = 8;
    else if (at >= 0)
        ((float *)lt_data(images))[6 * at] = 8;
    if (label >= 0)
        ((int64_t *)lt_data(labels))[label] = 0;
    lt_source *source = lt_source_tensors(ctx, images, labels);
    lt_source_digest(source, &digests[0], &digests[1]);
    lt_source_release(source);
    RELEASE(images, labels);
    lt_ctx_free(ctx);
}

TEST(digests_cover_labels_and_a_sample_of_images)
{
    uint32_t usual[2], other[2];
    digest_with(LT_U8, -1, -1, usual);
    digest_with(LT_U8, -1, -1, other);
    CHECK(memcmp(usual, other, sizeof usual) == 0);
    for (int i = 0; i < 6; i++) {
        digest_with(LT_U8, i, -1, other);
        CHECK(other[0] == usual[0] && other[1] != usual[1]);
        digest_with(LT_U8, -1, i, other);
        CHECK(other[0] != usual[0] && other[1] == usual[1]);
    }
    digest_with(LT_F32, -1, -1, usual);
    digest_with(LT_F32, 3, -1, other); /* the last bits may differ between CPUs */
    CHECK(memcmp(usual, other, sizeof usual) == 0);
}

enum { MAX_SEEN = 32 };
static int64_t seen[MAX_SEEN];
static int n_seen;

/* Records the number of the image and fails. */
static lt_status note_number(const lt_source *source, int64_t i, lt_sample_buffers *buffers,
                             lt_image *image, int64_t *label)
{
    (void)source, (void)buffers, (void)image, (void)label;
    if (n_seen < MAX_SEEN)
        seen[n_seen++] = i;
    return lt_fail(LT_EDATA, "there is no image");
}

TEST(a_digest_samples_from_the_first_image_to_the_last)
{
    static const int64_t counts[] = {1, 2, 15, 16, 17, 100, INT64_MAX / 15, INT64_MAX};
    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        lt_source source = {.count = counts[k], .in_files = true, .read = note_number};
        uint32_t labels, images;
        n_seen = 0;
        lt_source_digest(&source, &labels, &images);
        CHECK_EQ(n_seen, counts[k] < 16 ? counts[k] : 16);
        CHECK_EQ(seen[0], 0);
        CHECK_EQ(seen[n_seen - 1], counts[k] - 1);
        for (int i = 1; i < n_seen; i++)
            CHECK(seen[i] > seen[i - 1]);
    }
}

/* ==== Synthetic =============================================================================== */

enum { H = 12, W = 9, MOST = 3, CLASSES = 10 };

/* Generates image i for a seed and a part. Returns its class. */
static int64_t synthetic(uint64_t seed, uint64_t part, int64_t i, int64_t channels,
                         uint8_t out[H * W * MOST])
{
    lt_ctx *ctx = lt_ctx_new(&(lt_config){.seed = seed});
    lt_source *source = lt_source_synthetic(ctx, part, 100, H, W, channels, CLASSES);
    lt_batch_options options = {.batch = 1, .first = i, .dtype = LT_U8};
    lt_batches *batches = source ? lt_batches_new(ctx, source, &options) : NULL;
    lt_tensor *x, *y;
    CHECK(batches != NULL);
    CHECK_EQ(lt_source_classes(source), CLASSES);
    CHECK_OK(lt_batches_next(batches, &x, &y));
    CHECK_EQ(lt_count(x), H * W * channels);
    memcpy(out, lt_data(x), (size_t)lt_count(x));
    int64_t label = ((int64_t *)lt_data(y))[0];
    RELEASE(x, y);
    lt_batches_free(batches);
    lt_source_release(source);
    CLOSE_CTX(ctx);
    return label;
}

TEST(synthetic_images_are_a_function_of_seed_part_and_number)
{
    uint8_t a[H * W * MOST] = {0}, b[H * W * MOST] = {0};
    CHECK_EQ(synthetic(1, 0, 13, 3, a), 3);
    CHECK_EQ(synthetic(1, 0, 13, 3, b), 3);
    CHECK_EQ(memcmp(a, b, sizeof a), 0);
    CHECK_EQ(synthetic(2, 0, 13, 3, b), 3);
    CHECK(memcmp(a, b, sizeof a) != 0);
    CHECK_EQ(synthetic(1, 1, 13, 3, b), 3);
    CHECK(memcmp(a, b, sizeof a) != 0);
    CHECK_EQ(synthetic(1, 0, 23, 3, b), 3);
    CHECK(memcmp(a, b, sizeof a) != 0);
}

/* The mean of an image's channel, minus that of the noise, is half the colour of its class. */
TEST(synthetic_colours_distinguish_the_classes)
{
    static const int base[] = {0, 10, 4, 3}; /* the smallest base with at least 10 colours */
    for (int64_t channels = 1; channels <= MOST; channels++)
        for (int64_t class = 0; class < CLASSES; class ++) {
            uint8_t image[H * W * MOST];
            CHECK_EQ(synthetic(1, 0, 50 + class, channels, image), class);
            int64_t rest = class;
            for (int64_t c = 0; c < channels; c++, rest /= base[channels]) {
                double sum = 0, digit = (double)(rest % base[channels]);
                for (int64_t i = 0; i < H * W; i++)
                    sum += image[i * channels + c];
                double colour = 255 * digit / (base[channels] - 1);
                CHECK_NEAR(sum / (H * W), 127.5 / 2 + colour / 2, 12); /* 3.4 standard deviations */
            }
        }
}

TEST_CTX(bad_synthetic_arguments_are_refused)
{
    static const struct {
        int64_t count, h, w, c, classes;
        const char *text;
    } cases[] = {
        {1, 0, 1, 1, 1, "images must have 1 to 16384 pixels per side, but are 0x1"},
        {1, 1, 16385, 1, 1, "but are 1x16385"},
        {1, 1, 1, 5, 1, "images must have 1 to 4 channels, but have 5"},
        {0, 1, 1, 1, 1, "at least one image and 1 to 1048576 classes, got 0 images"},
        {1, 1, 1, 1, 0, "got 1 images and 0 classes"},
        {1, 1, 1, 1, INT64_MAX, "got 1 images and 9223372036854775807 classes"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_NULL(lt_source_synthetic(ctx, 0, cases[i].count, cases[i].h, cases[i].w, cases[i].c,
                                       cases[i].classes),
                   LT_EINVAL, cases[i].text);
    }
    CHECK_NULL(lt_source_synthetic(ctx, 1 << 24, 1, 1, 1, 1, 1), LT_EINVAL,
               "part must be below 2^24");
}
