/* test_request.c - passes that prepare only requested batches. Whatever the requests, a batch has
 * the bytes that the whole epoch has at its position. */
#include "tests/data/threads.h"

#include "tests/data/numbers.h"

enum { N = 37, BYTES = 6 * 5 * 3 * 4 /* of an image in f32 */, AHEAD = 4 };

static int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* A random number below n that depends only on i. */
static int64_t draw(uint64_t i, int64_t n)
{
    uint32_t word[4];
    lt_random(11, LT_RNG_MIXUP, i, 0, word);
    return word[0] % n;
}

typedef struct epoch { /* all images of an epoch, in its order */
    int64_t image_bytes;
    char x[N][BYTES];
    int64_t y[N];
} epoch;

/* Reads an ordinary pass. */
static void read_epoch(lt_ctx *ctx, lt_source *source, lt_batch_options options, epoch *e)
{
    lt_tensor *x, *y;
    options.batch = 5;
    options.on_request = false;
    lt_batches *batches = lt_batches_new(ctx, source, &options);
    CHECK(batches != NULL);
    for (int64_t seen = 0; seen < N; seen += lt_dim(x, 0), lt_release(x), lt_release(y)) {
        CHECK_OK(lt_batches_next(batches, &x, &y));
        e->image_bytes = lt_count(x) / lt_dim(x, 0) * (int64_t)lt_dtype_bytes(options.dtype);
        for (int64_t i = 0; i < lt_dim(x, 0); i++) {
            memcpy(e->x[seen + i], (char *)lt_data(x) + i * e->image_bytes, (size_t)e->image_bytes);
            e->y[seen + i] = ((int64_t *)lt_data(y))[i];
        }
    }
    lt_batches_free(batches);
}

/* Takes a batch and checks that it has the images from position first. */
static void check_batch(lt_batches *batches, const epoch *e, int64_t first, int64_t batch)
{
    lt_tensor *x, *y;
    int64_t count = lesser(batch, N - first);
    CHECK_OK(lt_batches_next(batches, &x, &y));
    CHECK(x && y);
    CHECK_EQ(lt_dim(x, 0), count);
    CHECK_EQ(lt_dim(y, 0), count);
    for (int64_t i = 0; i < count; i++)
        CHECK_EQ(memcmp((char *)lt_data(x) + i * e->image_bytes, e->x[first + i],
                        (size_t)e->image_bytes),
                 0);
    CHECK_EQ(memcmp(lt_data(y), e->y + first, (size_t)count * sizeof *e->y), 0);
    RELEASE(x, y);
}

static void check_none_left(lt_batches *batches)
{
    lt_tensor *x, *y;
    CHECK_OK(lt_batches_next(batches, &x, &y));
    CHECK(!x && !y);
}

/* Requests and takes batches in a random sequence, with up to LT_MAX_REQUESTS outstanding. */
static void check_sequence(lt_ctx *ctx, lt_source *source, const lt_batch_options *options,
                           const epoch *e, uint64_t seed)
{
    enum { STEPS = 150 };
    int64_t outstanding[STEPS], images = 0;
    int n = 0, taken = 0;
    lt_batches *batches = lt_batches_new(ctx, source, options);
    CHECK(batches != NULL);
    for (int i = 0; i < STEPS || taken < n; i++) {
        bool more = i < STEPS && n - taken < LT_MAX_REQUESTS;
        if (more && (taken == n || draw(seed + (uint64_t)i, 5) < 3)) {
            outstanding[n] = draw(seed + 1000 + (uint64_t)i, N);
            CHECK_OK(lt_batches_request(batches, outstanding[n++]));
            continue;
        }
        check_batch(batches, e, outstanding[taken], options->batch);
        images += lesser(options->batch, N - outstanding[taken++]);
    }
    check_none_left(batches);
    lt_batch_stats stats = lt_batches_stats(batches);
    CHECK_EQ(stats.images, images);
    CHECK_EQ(stats.workers, options->workers > 0 ? options->workers : 0);
    CHECK(stats.work_s > 0 && stats.wait_s > 0);
    lt_batches_free(batches);
}

TEST(requested_batches_equal_those_of_the_epoch)
{
    static const int64_t sizes[] = {1, 8, 20, N, N + 5};
    static const int workers[] = {-1, 1, 4};
    const lt_batch_options kinds[] = {
        {.dtype = LT_U8},
        {.shuffle = true, .epoch = 3, .crop = 2, .flip = true, .mean = {0.5}, .std = {0.2}},
        {.shuffle = true, .epoch = 4, .area = 0.1, .flip = true}};
    static epoch e;
    lt_ctx *ctx = lt_ctx_new(&(lt_config){.seed = 5});
    lt_source *source = lt_source_synthetic(ctx, 0, N, 6, 5, 3, 10);
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        read_epoch(ctx, source, kinds[kind], &e);
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
            for (size_t w = 0; w < sizeof workers / sizeof *workers; w++) {
                lt_batch_options options = kinds[kind];
                options.batch = sizes[k];
                options.workers = workers[w];
                options.on_request = true;
                check_sequence(ctx, source, &options, &e, 10000 * (3 * k + w));
            }
    }
    lt_source_release(source);
    CLOSE_CTX(ctx);
}

/* Opens a pass over numbers; prepares only requested batches. New. */
static lt_batches *open_pass(lt_ctx *ctx, numbers *s, int64_t batch, int workers)
{
    lt_batch_options options = {
        .batch = batch, .dtype = LT_U8, .workers = workers, .on_request = true};
    lt_batches *batches = lt_batches_new(ctx, &s->base, &options);
    CHECK(batches != NULL);
    return batches;
}

/* Takes a batch of numbers and checks that it has count images, from number first. */
static void check_numbers(lt_batches *batches, int64_t first, int64_t count)
{
    lt_tensor *x, *y;
    CHECK_OK(lt_batches_next(batches, &x, &y));
    CHECK(x && y);
    CHECK_EQ(lt_dim(y, 0), count);
    for (int64_t i = 0; i < count; i++) {
        CHECK_EQ(((int64_t *)lt_data(y))[i], first + i);
        CHECK_EQ(((uint8_t *)lt_data(x))[i], (first + i) & 255);
    }
    RELEASE(x, y);
}

TEST_CTX(requests_have_a_maximum)
{
    static const char text[] = "batches: 16 requests are outstanding, the maximum; take a batch "
                               "before the next request";
    for (int workers = -1; workers <= 4; workers += workers < 0 ? 2 : 3) {
        numbers s = numbers_to(100);
        lt_batches *batches = open_pass(ctx, &s, 30, workers);
        check_none_left(batches);
        for (int64_t i = 0; i < LT_MAX_REQUESTS; i++)
            CHECK_OK(lt_batches_request(batches, 90 - i));
        for (int64_t i = 0; i < LT_MAX_REQUESTS; i++) { /* one more after each batch */
            CHECK_FAILS(lt_batches_request(batches, 99), LT_EINVAL, text);
            check_numbers(batches, 90 - i, lesser(30, 10 + i));
            CHECK_OK(lt_batches_request(batches, i));
        }
        CHECK_FAILS(lt_batches_request(batches, 99), LT_EINVAL, text);
        for (int64_t i = 0; i < LT_MAX_REQUESTS; i++)
            check_numbers(batches, i, 30);
        check_none_left(batches);
        CHECK_OK(lt_batches_request(batches, 99)); /* the pass does not end */
        check_numbers(batches, 99, 1);
        check_none_left(batches);
        lt_batches_free(batches);
    }
}

TEST_CTX(bad_requests_get_a_clear_message)
{
    static const int64_t bad[] = {-1, 10, INT64_MIN, INT64_MAX};
    numbers s = numbers_to(10);
    lt_batches *batches = open_pass(ctx, &s, 4, 1);
    CHECK_EQ(lt_batches_count(batches), 3);
    for (int i = 0; i < 4; i++) {
        char text[128];
        snprintf(text, sizeof text,
                 "batches: position %lld was requested, but the source has 10 images, counted "
                 "from 0",
                 (long long)bad[i]);
        CHECK_FAILS(lt_batches_request(batches, bad[i]), LT_EINVAL, text);
    }
    check_none_left(batches);
    lt_batches_free(batches);

    batches = lt_batches_new(ctx, &s.base, &(lt_batch_options){.batch = 4});
    CHECK_FAILS(lt_batches_request(batches, 0), LT_EINVAL,
                "batches: only a pass with on_request accepts requests");
    lt_batches_free(batches);

    s = numbers_to(0);
    batches = open_pass(ctx, &s, 4, 1);
    CHECK_FAILS(lt_batches_request(batches, 0), LT_EINVAL, "the source has 0 images");
    check_none_left(batches);
    lt_batches_free(batches);
}

TEST_CTX(options_that_exclude_requests)
{
    numbers s = numbers_to(10);
    static const struct {
        lt_batch_options options;
        const char *text;
    } cases[] = {
        {{.first = 4}, "batches: on_request cannot be combined with first"},
        {{.ranks = 2}, "batches: on_request cannot be combined with ranks"},
        {{.ranks = 2, .shards = 2}, "batches: on_request cannot be combined with ranks"},
        {{.micro = 2}, "batches: on_request cannot be combined with micro = 2"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lt_batch_options options = cases[i].options;
        options.batch = 4;
        options.on_request = true;
        CHECK_NULL(lt_batches_new(ctx, &s.base, &options), LT_EINVAL, cases[i].text);
    }
    lt_batch_options alone = {.batch = 4, .on_request = true, .ranks = 1, .shards = 1};
    lt_batches *batches = lt_batches_new(ctx, &s.base, &alone);
    CHECK(batches != NULL);
    lt_batches_free(batches);
    CHECK_EQ(s.base.refs, 1);
}

/* Waits until the source was read n times, at most 20 s. */
static void wait_for_reads(numbers *s, int n)
{
    for (int i = 0; i < 20000 && s->reads < n; i++)
        usleep(1000);
    CHECK_EQ(s->reads, n);
}

TEST_CTX(workers_prepare_requested_batches_ahead)
{
    for (int workers = 1; workers <= 4; workers += 3) {
        numbers s = numbers_to(200);
        lt_batches *batches = open_pass(ctx, &s, 20, workers);
        CHECK_OK(lt_batches_request(batches, 190));
        wait_for_reads(&s, 10);
        for (int i = 0; i < 6; i++)
            CHECK_OK(lt_batches_request(batches, 20 * i));
        wait_for_reads(&s, 10 + 20 * (AHEAD - 1)); /* the others wait for a free slot */
        check_numbers(batches, 190, 10);
        CHECK_OK(lt_batches_request(batches, 150)); /* the slot is free for the oldest of them */
        wait_for_reads(&s, 10 + 20 * AHEAD);
        for (int i = 0; i < 6; i++)
            check_numbers(batches, 20 * i, 20);
        check_numbers(batches, 150, 20);
        check_none_left(batches);
        CHECK_EQ(lt_batches_stats(batches).images, 150);
        lt_batches_free(batches);
    }
}

TEST_CTX(batches_of_the_whole_source_are_prepared_ahead)
{
    numbers s = numbers_to(10);
    lt_batches *batches = open_pass(ctx, &s, 20, 1);
    CHECK_EQ(lt_batches_count(batches), 1);
    for (int i = 0; i < AHEAD; i++)
        CHECK_OK(lt_batches_request(batches, 0));
    wait_for_reads(&s, 10 * AHEAD);
    for (int i = 0; i < AHEAD; i++)
        check_numbers(batches, 0, 10);
    lt_batches_free(batches);
}

TEST_CTX(without_workers_next_does_the_work)
{
    numbers s = numbers_to(100);
    lt_batches *batches = open_pass(ctx, &s, 20, -1);
    for (int i = 0; i < 3; i++)
        CHECK_OK(lt_batches_request(batches, 30 * i));
    CHECK_EQ(s.reads, 0);
    for (int i = 0; i < 3; i++) {
        check_numbers(batches, 30 * i, 20);
        CHECK_EQ(s.reads, 20 * (i + 1));
    }
    lt_batches_free(batches);
}

TEST_CTX(a_limit_on_threads)
{
    for (int limit = 0; limit <= 2; limit++) {
        numbers s = numbers_to(100);
        lt_batches *batches = open_pass(ctx, &s, 20, 4);
        threads_left = limit;
        for (int i = 0; i < 2 * AHEAD; i++)
            CHECK_OK(lt_batches_request(batches, 10 * i));
        threads_left = -1;
        CHECK_EQ(lt_batches_stats(batches).workers, limit);
        for (int i = 0; i < 2 * AHEAD; i++)
            check_numbers(batches, 10 * i, 20);
        check_none_left(batches);
        lt_batches_free(batches);
    }
}

TEST_CTX(a_batch_that_cannot_be_read)
{
    for (int workers = -1; workers <= 3; workers += 2) {
        lt_tensor *x, *y;
        numbers s = numbers_to(500);
        s.fail_at = 120;
        lt_batches *batches = open_pass(ctx, &s, 50, workers);
        CHECK_OK(lt_batches_request(batches, 70));
        CHECK_OK(lt_batches_request(batches, 100));
        CHECK_OK(lt_batches_request(batches, 0));
        check_numbers(batches, 70, 50);
        for (int again = 0; again < 3; again++) {
            CHECK_FAILS(lt_batches_next(batches, &x, &y), LT_EDATA, "number 120 is bad");
            CHECK(!x && !y);
            CHECK_OK(lt_batches_request(batches, 0));
        }
        lt_batches_free(batches);
    }
}

TEST_CTX(outstanding_requests_are_dropped_with_the_pass)
{
    for (int workers = -1; workers <= 3; workers += 2)
        for (int taken = 0; taken <= 2; taken++)
            for (int requests = taken; requests <= LT_MAX_REQUESTS; requests += 7) {
                numbers s = numbers_to(4000);
                s.pause = 1000;
                lt_batches *batches = open_pass(ctx, &s, 50, workers);
                for (int i = 0; i < requests; i++)
                    CHECK_OK(lt_batches_request(batches, 100 * i));
                for (int i = 0; i < taken; i++)
                    check_numbers(batches, 100 * i, 50);
                int before = s.reads;
                lt_batches_free(batches);
                CHECK(s.reads - before < 100); /* only images in progress */
                CHECK_EQ(s.base.refs, 1);
            }
}

/* Requests 6 batches, takes one, requests another, and takes the rest. Each call that runs out of
 * memory is repeated. Returns the number of these. */
static int count_failures(lt_batches *batches)
{
    int failures = 0, requested = 0, taken = 0;
    for (;;) {
        lt_tensor *x = NULL, *y = NULL;
        bool request = requested < 6 || (requested == 6 && taken == 1);
        lt_status status = request ? lt_batches_request(batches, 10 * requested)
                                   : lt_batches_next(batches, &x, &y);
        if (status != LT_OK) {
            CHECK_EQ(status, LT_ENOMEM);
            CHECK(!x && !y);
            failures++;
            continue;
        }
        requested += request;
        if (!request && !x)
            break;
        if (x)
            CHECK_EQ(((int64_t *)lt_data(y))[0], 10 * taken++);
        RELEASE(x, y);
    }
    CHECK_EQ(taken, 7); /* a request that failed is not outstanding */
    return failures;
}

TEST(running_out_of_memory_is_an_error)
{
    int failures = 0;
    bool through = false;
    for (int workers = -1; workers <= 1; workers += 2, through = false)
        for (int n = 1; !through; n++) {
            char fault[32];
            numbers s = numbers_to(100);
            snprintf(fault, sizeof fault, "alloc:n=%d", n);
            lt_ctx *ctx = lt_ctx_new(&(lt_config){.fault = fault});
            lt_batch_options options = {
                .batch = 20, .shuffle = false, .workers = workers, .on_request = true};
            lt_batches *batches = lt_batches_new(ctx, &s.base, &options);
            int failed = batches ? count_failures(batches) : 1;
            CHECK(failed <= 1);
            CHECK(batches || lt_errcode() == LT_ENOMEM);
            failures += failed;
            through = failed == 0;
            lt_batches_free(batches);
            CLOSE_CTX(ctx);
            CHECK(n < 100);
        }
    CHECK(failures > 28); /* at least for x and y of 7 batches, with and without workers */
}
