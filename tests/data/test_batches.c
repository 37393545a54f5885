/* test_batches.c - batches: every image once, in the order of the seed and with exact values, for
 * any number of workers. test_sample.c tests how a single image is processed.
 */
#include "tests/data/threads.h"

#include "tests/data/numbers.h"

enum { N = 10 }; /* images in most tests */

/* (N, 2, 3): image i has bytes 20 i + 0..5 and label i. */
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

/* A pass over images in memory. */
static lt_batches *open_batches(lt_ctx *ctx, lt_tensor *images, lt_tensor *labels,
                                const lt_batch_options *options)
{
    lt_source *source = lt_source_tensors(ctx, images, labels);
    lt_batches *batches = source ? lt_batches_new(ctx, source, options) : NULL;
    lt_source_release(source);
    return batches;
}

/* Reads all batches of a pass over N images and stores the labels in order. Returns the number of
 * images. */
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
        RELEASE(x, y);
    }
    CHECK_EQ(count, lt_batches_count(batches));
    return seen;
}

TEST_CTX(batches_are_in_order_and_the_last_is_smaller)
{
    static const lt_dtype dtypes[] = {LT_U8, LT_I32, LT_I64};
    lt_tensor *images = some_images(ctx);
    for (int d = 0; d < 3; d++)
        for (int64_t batch = 1; batch <= N + 1; batch++) {
            int64_t got[N];
            lt_tensor *labels = some_labels(ctx, dtypes[d]);
            lt_batch_options options = {.batch = batch};
            lt_batches *batches = open_batches(ctx, images, labels, &options);
            lt_release(labels);
            CHECK(batches != NULL);
            CHECK_EQ(walk(batches, batch, got), N);
            for (int i = 0; i < N; i++)
                CHECK_EQ(got[i], i);
            lt_batches_free(batches);
        }
    lt_release(images);
}

TEST(shuffled_order_depends_on_seed_and_epoch)
{
    int64_t orders[4][N];
    for (int k = 0; k < 4;
         k++) { /* seed 1 epoch 0, seed 1 epoch 1, seed 2 epoch 0, seed 1 epoch 0 */
        uint64_t seed = k == 2 ? 2 : 1, epoch = k == 1;
        lt_ctx *ctx = lt_ctx_new(&(lt_config){.seed = seed});
        lt_tensor *images = some_images(ctx), *labels = some_labels(ctx, LT_U8);
        lt_batch_options options = {.batch = 4, .shuffle = true, .epoch = epoch};
        lt_batches *batches = open_batches(ctx, images, labels, &options);
        CHECK_EQ(walk(batches, 4, orders[k]), N);
        int64_t want[N];
        lt_shuffle(seed, epoch, want, N);
        CHECK_EQ(memcmp(orders[k], want, sizeof want), 0);
        lt_batches_free(batches);
        RELEASE(labels, images);
        lt_ctx_free(ctx);
    }
    CHECK(memcmp(orders[0], orders[1], sizeof orders[0]) != 0);
    CHECK(memcmp(orders[0], orders[2], sizeof orders[0]) != 0);
    CHECK_EQ(memcmp(orders[0], orders[3], sizeof orders[0]), 0);
}

/* One image of (2, 2, c); it has all byte values if c is 64. Returns the x of the first batch. */
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
    lt_batches *batches = open_batches(ctx, images, labels, &options);
    CHECK(batches != NULL);
    CHECK_OK(lt_batches_next(batches, &x, &y));
    CHECK_EQ(((int64_t *)lt_data(y))[0], 3);
    lt_batches_free(batches);
    RELEASE(images, labels, y);
    return x;
}

TEST_CTX(values_are_rounded_once)
{
    static const lt_dtype dtypes[] = {LT_F32, LT_F64, LT_F16, LT_BF16};
    static const double mean[] = {0.485, 0.456, 0.406, 0}, std[] = {0.229, 0.224, 0.225, 0};
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
}

TEST_CTX(images_without_a_channel_axis_get_one_channel)
{
    lt_tensor *images = some_images(ctx), *labels = some_labels(ctx, LT_U8), *x, *y;
    lt_batches *batches = open_batches(ctx, images, labels, &(lt_batch_options){.batch = 4});
    CHECK_OK(lt_batches_next(batches, &x, &y));
    char text[64];
    CHECK_STR(lt_describe(x, text, sizeof text), "4x2x3x1 f32");
    CHECK_STR(lt_describe(y, text, sizeof text), "4 i64");
    RELEASE(x, y);
    lt_batches_free(batches);
    RELEASE(labels, images);
}

TEST_CTX(batches_belong_to_the_scope_and_the_pass_does_not)
{
    lt_tensor *images = some_images(ctx), *labels = some_labels(ctx, LT_U8), *x, *y;
    lt_batch_options options = {.batch = 4, .shuffle = true};
    int64_t got[N];
    CHECK_OK(lt_scope_push(ctx));
    lt_batches *batches = open_batches(ctx, images, labels, &options);
    CHECK_OK(lt_batches_next(batches, &x, &y));
    lt_scope_pop(ctx);
    CHECK(lt_is_dead(x) && lt_is_dead(y));
    RELEASE(x, y);
    CHECK_OK(lt_batches_next(batches, &x, &y));
    CHECK(x && !lt_is_dead(x));
    RELEASE(x, y);
    lt_batches_free(batches);
    RELEASE(labels, images);

    CHECK_OK(lt_scope_push(ctx)); /* images whose scope ends before the pass */
    images = some_images(ctx);
    labels = some_labels(ctx, LT_U8);
    batches = open_batches(ctx, images, labels, &options);
    lt_scope_pop(ctx);
    CHECK(lt_is_dead(images));
    CHECK_EQ(walk(batches, 4, got), N);
    lt_batches_free(batches);
    RELEASE(labels, images);
}

TEST_CTX(bad_arguments_get_a_clear_message)
{
    lt_tensor *images = some_images(ctx), *labels = some_labels(ctx, LT_U8);
    lt_tensor *flat = lt_tensor_new(ctx, LT_U8, 2, (int64_t[]){N, 6});
    lt_tensor *whole = lt_tensor_new(ctx, LT_I64, 3, (int64_t[]){N, 2, 3});
    lt_tensor *few = lt_tensor_new(ctx, LT_U8, 1, (int64_t[]){N - 1});
    lt_tensor *real = lt_tensor_new(ctx, LT_F32, 1, (int64_t[]){N});
    lt_tensor *floats = lt_tensor_new(ctx, LT_F32, 3, (int64_t[]){N, 2, 3});
#define WRONG(x, y, text, ...)                                                                     \
    CHECK_NULL(open_batches(ctx, x, y, &(lt_batch_options){.batch = 1, __VA_ARGS__}), LT_EINVAL,   \
               text)
    WRONG(flat, labels, "images must have axes (n, h, w) or (n, h, w, c), but are 10x6 u8");
    WRONG(whole, labels, "images must be u8 or a float dtype, but are i64");
    WRONG(images, few, "one axis of 10, the number of images, but are 9 u8");
    WRONG(images, flat, "labels must have one axis of 10");
    WRONG(images, real, "labels must be u8, i32 or i64, but are f32");
    WRONG(floats, labels, "dtype must be a float dtype, but is u8", .dtype = LT_U8);
    WRONG(floats, labels, "area requires u8 images, but these are f32", .area = 0.5);
    CHECK_NULL(open_batches(ctx, images, labels, &(lt_batch_options){.batch = 0}), LT_EINVAL,
               "batch must be at least 1, but is 0");
#define WRONG_OPTION(text, ...) WRONG(images, labels, text, __VA_ARGS__)
    WRONG_OPTION("a float dtype or u8, but is i32", .dtype = LT_I32);
    WRONG_OPTION("a float dtype or u8, but is unknown", .dtype = (lt_dtype)99);
    WRONG_OPTION("area must be a fraction above 0 and up to 1, but is 1.5", .area = 1.5);
    WRONG_OPTION("area must be a fraction above 0 and up to 1, but is nan", .area = NAN);
    WRONG_OPTION("center_crop must be a fraction above 0 and up to 1, but is -0.5",
                 .center_crop = -0.5);
    WRONG_OPTION("up to 1, but is 2", .center_crop = 2);
    WRONG_OPTION("up to 1, but is nan", .center_crop = NAN);
    WRONG_OPTION("area and crop cannot be combined", .area = 0.5, .crop = 1);
    WRONG_OPTION("crop must be 0 to 1 pixels, less than the size of the images (2x3), but is -1",
                 .crop = -1);
    WRONG_OPTION("crop must be 0 to 1 pixels", .crop = 2);
    WRONG_OPTION("first must be 0 to 10, the number of images, but is -1", .first = -1);
    WRONG_OPTION("first must be 0 to 10", .first = N + 1);
    WRONG_OPTION("first must be 0 to 10", .first = INT64_MAX);
    WRONG_OPTION("workers must be at most 1024, but is 1025", .workers = 1025);
    WRONG_OPTION("std must be positive, but channel 2 has -2", .std = {1, -2});
    WRONG_OPTION("std must be positive, but channel 1 has nan", .std = {NAN});
    WRONG_OPTION("std must be positive, but channel 2 has inf", .std = {1, INFINITY});
    WRONG_OPTION("mean must be finite, but channel 3 has nan", .mean = {0, 0, NAN});
    WRONG_OPTION("mean must be finite, but channel 1 has -inf", .mean = {-INFINITY});
    WRONG_OPTION("micro must be at least 1, but is -1", .micro = -1);
    RELEASE(images, labels, flat, whole, few, real, floats);
}

TEST(running_out_of_memory_is_an_error)
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
            batches = open_batches(ctx, images, labels, &options);
        through = batches && lt_batches_next(batches, &x, &y) == LT_OK;
        CHECK(through || lt_errcode() == LT_ENOMEM);
        CHECK(n < 100);
        RELEASE(x, y);
        lt_batches_free(batches);
        RELEASE(labels, images);
        CLOSE_CTX(ctx);
    }
}

/* ==== Threads ================================================================================= */

/* Stores the labels of a pass in order and checks that each image has its label. Returns the number
 * of images. */
static int64_t run(lt_ctx *ctx, numbers *s, const lt_batch_options *options, int64_t *labels)
{
    int64_t seen = 0;
    lt_batches *batches = lt_batches_new(ctx, &s->base, options);
    CHECK(batches != NULL);
    for (;;) {
        lt_tensor *x, *y;
        CHECK_OK(lt_batches_next(batches, &x, &y));
        if (!x)
            break;
        for (int64_t i = 0; i < lt_dim(x, 0); i++) {
            labels[seen] = ((int64_t *)lt_data(y))[i];
            CHECK_EQ(((uint8_t *)lt_data(x))[i], labels[seen++] & 255);
        }
        RELEASE(x, y);
    }
    lt_batch_stats stats = lt_batches_stats(batches);
    CHECK_EQ(stats.images, seen);
    CHECK_EQ(stats.workers, options->workers > 0 ? options->workers : 0);
    CHECK(stats.work_s > 0 && stats.wait_s > 0);
    lt_batches_free(batches);
    return seen;
}

TEST(batches_do_not_depend_on_the_number_of_workers)
{
    enum { MANY = 1000 };
    static const int64_t sizes[] = {1, 7, 16, 100, MANY, MANY + 1};
    static int64_t want[MANY], got[MANY];
    lt_ctx *ctx = lt_ctx_new(&(lt_config){.seed = 5});
    lt_shuffle(5, 3, want, MANY);
    for (int workers = -1; workers <= 4; workers += workers < 0 ? 2 : 1)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            numbers s = numbers_to(MANY);
            lt_batch_options options = {
                .batch = sizes[k], .shuffle = true, .epoch = 3, .dtype = LT_U8, .workers = workers};
            CHECK_EQ(run(ctx, &s, &options, got), MANY);
            CHECK_EQ(memcmp(got, want, sizeof want), 0);
            CHECK_EQ(s.reads, MANY);
            CHECK_EQ(s.open_to_signals, workers < 0);
            lt_source_release(&s.base);
            CHECK(s.freed);
        }
    CLOSE_CTX(ctx);
}

static void keep_line(void *ud, lt_log_level level, const char *line)
{
    CHECK_EQ(level, LT_LOG_WARN);
    snprintf(ud, 128, "%s", line);
}

TEST(a_limit_on_threads_reduces_the_workers)
{
    enum { MANY = 300 };
    int64_t want[MANY];
    lt_ctx *ctx = lt_ctx_new(&(lt_config){.seed = 5});
    char line[128];
    lt_set_log(ctx, keep_line, line);
    lt_shuffle(5, 3, want, MANY);
    for (int limit = 0; limit <= 4; limit++) {
        char wanted[128] = "";
        lt_tensor *x, *y;
        numbers s = numbers_to(MANY);
        lt_batch_options options = {
            .batch = 40, .shuffle = true, .epoch = 3, .dtype = LT_U8, .workers = 4};
        lt_batches *batches = lt_batches_new(ctx, &s.base, &options);
        line[0] = '\0';
        threads_left = limit;
        for (int64_t seen = 0; seen < MANY; seen += lt_dim(x, 0), lt_release(x), lt_release(y)) {
            CHECK_OK(lt_batches_next(batches, &x, &y));
            CHECK_EQ(memcmp(lt_data(y), want + seen, sizeof *want * (size_t)lt_dim(y, 0)), 0);
        }
        CHECK_OK(lt_batches_next(batches, &x, &y));
        CHECK(!x && !y);
        threads_left = -1;
        CHECK_EQ(lt_batches_stats(batches).workers, limit);
        CHECK_EQ(lt_batches_stats(batches).images, MANY);
        if (limit < 4)
            snprintf(wanted, sizeof wanted,
                     "batches: cannot start worker %d of 4 (%s); continues with %d", limit + 1,
                     strerror(EAGAIN), limit);
        CHECK_STR(line, wanted);
        lt_batches_free(batches);
    }
    CLOSE_CTX(ctx);
}

TEST_CTX(the_batch_size_has_a_limit)
{
    numbers s = numbers_to(INT64_MAX);
    static const int64_t sizes[] = {8589934577, INT64_MAX}; /* 16 * (2^31 / 4 - 1) + 1 */
    for (int i = 0; i < 2; i++) {
        lt_batch_options options = {.batch = sizes[i], .dtype = LT_U8, .workers = 2};
        CHECK_NULL(lt_batches_new(ctx, &s.base, &options), LT_EINVAL,
                   "batches: batch must be at most 8589934576, but is ");
    }
    CHECK_EQ(s.base.refs, 1);
}

TEST(images_before_first_are_skipped)
{
    enum { MANY = 100 };
    int64_t want[MANY], got[MANY];
    lt_ctx *ctx = lt_ctx_new(&(lt_config){.seed = 5});
    lt_shuffle(5, 1, want, MANY);
    for (int64_t first = 0; first <= MANY; first += 10) {
        numbers s = numbers_to(MANY);
        lt_batch_options options = {
            .batch = 30, .shuffle = true, .epoch = 1, .first = first, .dtype = LT_U8, .workers = 2};
        lt_batches *batches = lt_batches_new(ctx, &s.base, &options);
        CHECK_EQ(lt_batches_count(batches), (MANY - first + 29) / 30);
        lt_batches_free(batches);
        if (first == MANY)
            break;
        CHECK_EQ(run(ctx, &s, &options, got), MANY - first);
        CHECK_EQ(memcmp(got, want + first, (size_t)(MANY - first) * sizeof *got), 0);
    }
    lt_ctx_free(ctx);
}

TEST_CTX(an_empty_source_has_no_batches)
{
    numbers s = numbers_to(0);
    lt_batches *batches = lt_batches_new(ctx, &s.base, &(lt_batch_options){.batch = 4});
    lt_tensor *x, *y;
    CHECK_EQ(lt_batches_count(batches), 0);
    CHECK_OK(lt_batches_next(batches, &x, &y));
    CHECK(!x && !y);
    CHECK(lt_batches_stats(batches).workers >= 1);
    lt_batches_free(batches);
    lt_batches_free(NULL);
}

TEST_CTX(next_reports_the_first_failure)
{
    for (int workers = -1; workers <= 3; workers += 2) {
        numbers s = numbers_to(500);
        s.fail_at = 120; /* and all later ones: later chunks fail too, perhaps sooner */
        lt_batch_options options = {.batch = 100, .workers = workers};
        lt_batches *batches = lt_batches_new(ctx, &s.base, &options);
        lt_tensor *x, *y;
        CHECK_OK(lt_batches_next(batches, &x, &y));
        CHECK_EQ(lt_dim(x, 0), 100);
        RELEASE(x, y);
        for (int again = 0; again < 7; again++) { /* the pass never ends normally */
            CHECK_FAILS(lt_batches_next(batches, &x, &y), LT_EDATA, "number 120 is bad");
            CHECK(!x && !y);
        }
        lt_batches_free(batches);
    }
}

TEST_CTX(a_pass_can_have_only_labels)
{
    numbers s = numbers_to(N);
    lt_tensor *x[2][3], *y[2][3];
    for (int labels_only = 1; labels_only >= 0; labels_only--) {
        lt_batch_options options = {
            .batch = 4, .shuffle = true, .dtype = LT_BF16, .labels_only = labels_only};
        lt_batches *batches = lt_batches_new(ctx, &s.base, &options);
        for (int k = 0; k < 3; k++)
            CHECK_OK(lt_batches_next(batches, &x[labels_only][k], &y[labels_only][k]));
        CHECK_EQ(lt_batches_stats(batches).workers == 0, labels_only);
        CHECK_EQ(s.reads == 0, labels_only);
        lt_batches_free(batches);
    }
    for (int k = 0; k < 3; k++) {
        lt_tensor *all = x[0][k], *none = x[1][k];
        double value;
        CHECK(!all->meta && none->meta);
        CHECK_FAILS(lt_item(none, 0, &value), LT_EINVAL, "this tensor has dims, but no values");
        CHECK_EQ(none->dtype, LT_BF16);
        CHECK_EQ(memcmp(lt_dims(none), lt_dims(all), 4 * sizeof(int64_t)), 0);
        CHECK_EQ(memcmp(lt_data(y[0][k]), lt_data(y[1][k]), (size_t)lt_count(y[0][k]) * 8), 0);
        for (int i = 0; i < 2; i++) {
            RELEASE(x[i][k], y[i][k]);
        }
    }
}

TEST_CTX(an_abandoned_pass_ends_soon)
{
    for (int workers = -1; workers <= 3; workers += 2)
        for (int taken = 0; taken < 3; taken++) {
            numbers s = numbers_to(4000);
            s.pause = 1000;
            lt_batch_options options = {.batch = 100, .workers = workers};
            lt_batches *batches = lt_batches_new(ctx, &s.base, &options);
            for (int i = 0; i < taken; i++) {
                lt_tensor *x, *y;
                CHECK_OK(lt_batches_next(batches, &x, &y));
                RELEASE(x, y);
            }
            int before = s.reads;
            lt_batches_free(batches);
            CHECK(s.reads - before < 150); /* only images in progress, of the 300 ahead */
            CHECK_EQ(s.base.refs, 1);
        }
}
