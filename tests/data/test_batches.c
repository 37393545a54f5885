/* test_batches.c - batches: every image once, in the order of the seed, with exact values. */
#include "data/data.h"
#include "tests/lt_test.h"

enum { N = 10 }; /* images in most tests */

/* Image i of (N, 2, 3) has bytes 20 i + 0..5, its label is i. */
static lt_tensor *some_images(lt_ctx *ctx)
{
    uint8_t bytes[N * 6];
    for (int i = 0; i < N * 6; i++)
        bytes[i] = (uint8_t)(20 * (i / 6) + i % 6);
    return lt_tensor_from(ctx, LT_U8, 3, (int64_t[]){N, 2, 3}, bytes);
}

static lt_tensor *some_labels(lt_ctx *ctx, lt_dtype dtype)
{
    int64_t values[N];
    uint8_t data[N * 8];
    for (int i = 0; i < N; i++)
        values[i] = i;
    lt_convert(data, dtype, values, LT_I64, N);
    return lt_tensor_from(ctx, dtype, 1, (int64_t[]){N}, data);
}

/* Walks a pass over N images; labels[] gets the labels in the order they came. Returns how many. */
static int walk(lt_batches *batches, int64_t batch, int64_t labels[N])
{
    int seen = 0, count = 0;
    for (;; count++) {
        lt_tensor *x, *y;
        CHECK_OK(lt_batches_next(batches, &x, &y));
        if (!x) {
            CHECK(!y);
            break;
        }
        int64_t b = lt_dim(x, 0);
        CHECK_EQ(b, N - seen < batch ? N - seen : batch);
        CHECK_EQ(lt_dim(y, 0), b);
        for (int64_t i = 0; i < b; i++) {
            labels[seen + i] = ((int64_t *)lt_data(y))[i];
            double pixel = (20.0 * (double)labels[seen + i] + 5) / 255;
            CHECK_NEAR(((float *)lt_data(x))[6 * i + 5], (float)pixel, 0);
        }
        seen += (int)b;
        lt_release(x);
        lt_release(y);
    }
    CHECK_EQ(count, lt_batches_count(batches));
    return seen;
}

TEST(comes_in_order_and_the_last_is_smaller)
{
    static const lt_dtype dtypes[] = {LT_U8, LT_I32, LT_I64};
    lt_ctx *ctx = lt_ctx_new(NULL);
    lt_tensor *images = some_images(ctx);
    for (int d = 0; d < 3; d++)
        for (int64_t batch = 1; batch <= N + 1; batch++) {
            int64_t got[N];
            lt_tensor *labels = some_labels(ctx, dtypes[d]);
            lt_batch_options options = {.batch = batch};
            lt_batches *batches = lt_batches_new(ctx, images, labels, &options);
            lt_release(labels);
            CHECK(batches != NULL);
            CHECK_EQ(walk(batches, batch, got), N);
            for (int i = 0; i < N; i++)
                CHECK_EQ(got[i], i);
            lt_batches_free(batches);
        }
    lt_release(images);
    CHECK_EQ(lt_memory_stats(ctx).live, 0);
    lt_ctx_free(ctx);
}

TEST(shuffled_order_is_that_of_seed_and_epoch)
{
    int64_t orders[4][N];
    for (int k = 0; k < 4;
         k++) { /* seed 1 epoch 0, seed 1 epoch 1, seed 2 epoch 0, seed 1 epoch 0 */
        uint64_t seed = k == 2 ? 2 : 1, epoch = k == 1;
        lt_ctx *ctx = lt_ctx_new(&(lt_config){.seed = seed});
        lt_tensor *images = some_images(ctx), *labels = some_labels(ctx, LT_U8);
        lt_batch_options options = {.batch = 4, .shuffle = true, .epoch = epoch};
        lt_batches *batches = lt_batches_new(ctx, images, labels, &options);
        CHECK_EQ(walk(batches, 4, orders[k]), N);
        int64_t want[N];
        lt_shuffle(seed, epoch, want, N);
        CHECK_EQ(memcmp(orders[k], want, sizeof want), 0);
        lt_batches_free(batches);
        lt_release(labels);
        lt_release(images);
        lt_ctx_free(ctx);
    }
    CHECK(memcmp(orders[0], orders[1], sizeof orders[0]) != 0);
    CHECK(memcmp(orders[0], orders[2], sizeof orders[0]) != 0);
    CHECK_EQ(memcmp(orders[0], orders[3], sizeof orders[0]), 0);
}

/* 1 image of (2, 2, c); all bytes come in it when c is 64. Returns the first batch's x. */
static lt_tensor *normalised(lt_ctx *ctx, lt_dtype from, int64_t c, lt_dtype to, const double *mean,
                             const double *std)
{
    lt_batch_options options = {.batch = 1, .dtype = to};
    lt_tensor *images = lt_tensor_new(ctx, from, 4, (int64_t[]){1, 2, 2, c}), *x, *y;
    lt_tensor *labels = lt_tensor_full(ctx, LT_I64, 1, (int64_t[]){1}, 3);
    for (int64_t i = 0; i < 4 * c; i++) {
        double value = from == LT_U8 ? (double)(i % 256) : (double)i / 8 - 1;
        lt_convert((char *)lt_data(images) + i * (int64_t)lt_dtype_bytes(from), from, &value,
                   LT_F64, 1);
    }
    for (int k = 0; mean && k < LT_MAX_CHANNELS; k++) {
        options.mean[k] = mean[k];
        options.std[k] = std[k];
    }
    lt_batches *batches = lt_batches_new(ctx, images, labels, &options);
    CHECK(batches != NULL);
    CHECK_OK(lt_batches_next(batches, &x, &y));
    CHECK_EQ(((int64_t *)lt_data(y))[0], 3);
    lt_batches_free(batches);
    lt_release(images);
    lt_release(labels);
    lt_release(y);
    return x;
}

TEST(values_are_rounded_once)
{
    static const lt_dtype dtypes[] = {LT_F32, LT_F64, LT_F16, LT_BF16};
    static const double mean[] = {0.485, 0.456, 0.406, 0}, std[] = {0.229, 0.224, 0.225, 0};
    lt_ctx *ctx = lt_ctx_new(NULL);
    for (int from = 0; from < 3; from++) /* u8, f32, f16 */
        for (int to = 0; to < 4; to++)
            for (int64_t c = 1; c <= 64; c *= 4) {
                lt_dtype source = from == 0 ? LT_U8 : dtypes[from == 1 ? 0 : 2],
                         target = dtypes[to];
                lt_tensor *x = normalised(ctx, source, c, target, mean, std);
                CHECK_EQ(lt_tensor_dtype(x), target);
                CHECK_EQ(lt_count(x), 4 * c);
                for (int64_t i = 0; i < 4 * c; i++) {
                    char want[8];
                    double value = from == 0 ? (double)(i % 256) / 255 : (double)i / 8 - 1;
                    if (i % c < 3)
                        value = (value - mean[i % c]) / std[i % c];
                    lt_convert(want, target, &value, LT_F64, 1);
                    size_t size = lt_dtype_bytes(target);
                    CHECK_EQ(memcmp((char *)lt_data(x) + (size_t)i * size, want, size), 0);
                }
                lt_release(x);
            }
    lt_ctx_free(ctx);
}

TEST(images_without_a_channel_axis_get_one)
{
    lt_ctx *ctx = lt_ctx_new(NULL);
    lt_tensor *images = some_images(ctx), *labels = some_labels(ctx, LT_U8), *x, *y;
    lt_batches *batches = lt_batches_new(ctx, images, labels, &(lt_batch_options){.batch = 4});
    CHECK_OK(lt_batches_next(batches, &x, &y));
    char text[64];
    CHECK_STR(lt_describe(x, text, sizeof text), "4x2x3x1 f32");
    CHECK_STR(lt_describe(y, text, sizeof text), "4 i64");
    lt_release(x);
    lt_release(y);
    lt_batches_free(batches);
    lt_release(labels);
    lt_release(images);
    lt_ctx_free(ctx);
}

TEST(batches_belong_to_the_scope_and_the_pass_does_not)
{
    lt_ctx *ctx = lt_ctx_new(NULL);
    lt_tensor *images = some_images(ctx), *labels = some_labels(ctx, LT_U8), *x, *y;
    lt_batch_options options = {.batch = 4, .shuffle = true};
    CHECK_OK(lt_scope_push(ctx));
    lt_batches *batches = lt_batches_new(ctx, images, labels, &options);
    CHECK_OK(lt_batches_next(batches, &x, &y));
    lt_scope_pop(ctx);
    CHECK(lt_is_dead(x) && lt_is_dead(y));
    lt_release(x);
    lt_release(y);
    CHECK_OK(lt_batches_next(batches, &x, &y));
    CHECK(x && !lt_is_dead(x));
    lt_release(x);
    lt_release(y);
    lt_batches_free(batches);
    lt_release(labels);
    lt_release(images);

    CHECK_OK(lt_scope_push(ctx)); /* images that die under the iterator */
    images = some_images(ctx);
    labels = some_labels(ctx, LT_U8);
    batches = lt_batches_new(ctx, images, labels, &options);
    lt_scope_pop(ctx);
    CHECK_FAILS(lt_batches_next(batches, &x, &y), LT_EINVAL, "belongs to a step that is over");
    CHECK(!x && !y);
    lt_batches_free(batches);
    lt_release(labels);
    lt_release(images);
    CHECK_EQ(lt_memory_stats(ctx).live, 0);
    lt_ctx_free(ctx);
}

TEST(bad_input_gets_a_sentence)
{
    lt_ctx *ctx = lt_ctx_new(NULL);
    lt_tensor *images = some_images(ctx), *labels = some_labels(ctx, LT_U8);
    lt_tensor *flat = lt_tensor_new(ctx, LT_U8, 2, (int64_t[]){N, 6});
    lt_tensor *whole = lt_tensor_new(ctx, LT_I64, 3, (int64_t[]){N, 2, 3});
    lt_tensor *few = lt_tensor_new(ctx, LT_U8, 1, (int64_t[]){N - 1});
    lt_tensor *real = lt_tensor_new(ctx, LT_F32, 1, (int64_t[]){N});
    const struct { lt_tensor *x, *y; lt_batch_options options; const char *text;
    } cases[] = {
        {flat,
         labels,
         {.batch = 1},
         "images want axes (n, h, w) or (n, h, w, c), they are 10x6 u8"},
        {whole, labels, {.batch = 1}, "images want u8 or a float dtype, they are i64"},
        {images, few, {.batch = 1}, "one axis of 10, as many as there are images; they are 9 u8"},
        {images, flat, {.batch = 1}, "labels want one axis of 10"},
        {images, real, {.batch = 1}, "labels want u8, i32 or i64, they are f32"},
        {images, labels, {.batch = 0}, "batch wants at least 1, it is 0"},
        {images, labels, {.batch = 1, .dtype = LT_U8}, "dtype wants a float one, it is u8"},
        {images,
         labels,
         {.batch = 1, .std = {1, -2}},
         "std wants positive numbers, channel 2 has -2"},
        {images, labels, {.batch = 1, .std = {NAN}}, "std wants positive numbers, channel 1 has"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK(lt_batches_new(ctx, cases[i].x, cases[i].y, &cases[i].options) == NULL);
        CHECK_EQ(lt_errcode(), LT_EINVAL);
        CHECK_MSG(cases[i].text);
    }
    lt_release(images);
    lt_release(labels);
    lt_release(flat);
    lt_release(whole);
    lt_release(few);
    lt_release(real);
    CHECK_EQ(lt_memory_stats(ctx).live, 0);
    lt_ctx_free(ctx);
}

TEST(memory_can_run_out)
{
    bool through = false;
    for (int n = 1; !through; n++) {
        char fault[32];
        snprintf(fault, sizeof fault, "alloc:n=%d", n);
        lt_ctx *ctx = lt_ctx_new(&(lt_config){.fault = fault});
        lt_tensor *images = some_images(ctx), *labels = images ? some_labels(ctx, LT_U8) : NULL;
        lt_tensor *x = NULL, *y = NULL;
        lt_batches *batches = NULL;
        lt_batch_options options = {.batch = 4, .shuffle = true};
        if (labels)
            batches = lt_batches_new(ctx, images, labels, &options);
        through = batches && lt_batches_next(batches, &x, &y) == LT_OK;
        CHECK(through || lt_errcode() == LT_ENOMEM);
        CHECK(n < 100);
        lt_release(x);
        lt_release(y);
        lt_batches_free(batches);
        lt_release(labels);
        lt_release(images);
        CHECK_EQ(lt_memory_stats(ctx).live, 0);
        lt_ctx_free(ctx);
    }
}
