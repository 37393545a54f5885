/* test_stream.c - marks and copies in the stream of the CUDA backend, uploads and downloads in its
 * other streams, and what uses them: deferred scalars and batches. The emulated streams run nothing
 * until the host waits, unless the variable SHIM says otherwise. */
#include <pthread.h>

#include "data/data.h"
#include "tests/cuda/reference.h"
#include "tests/device/emu.h"

/* ==== Copies ================================================================================== */

TEST_CUDA(copies_run_asynchronously)
{
    enum { N = 1000 };
    lt_device *d = m->cuda.device;
    char *there = d->alloc(d, N), *here = d->alloc_host(d, 2 * N);
    memset(here, 1, 2 * N);
    must(d->fill(d, there, LT_U8, N, 7));
    must(d->copy(d, here, there, N));
    uint64_t mark = d->mark(d);
    must(d->fill(d, there, LT_U8, N, 8));
    must(d->copy(d, here + N, there, N));
    uint64_t second = d->mark(d);
    CHECK(mark > 0 && second > mark);
    CHECK(here[0] != 7 || !is_lazy()); /* the host has not waited */
    must(d->wait(d, mark));
    CHECK_EQ(here[N - 1], 7);
    CHECK(here[N] != 8 || !is_lazy()); /* the copy after the mark has not run */
    for (int i = 0; i < LT_MAX_MARKS; i++)
        d->mark(d);
    must(d->wait(d, second)); /* an old mark, whose event has been reused */
    CHECK_EQ(here[2 * N - 1], 8);
    must(d->wait(d, mark));
    d->free_host(d, here);
    d->free(d, there, N);
}

TEST_CUDA(uploads)
{
    enum { N = 1000 };
    char got[N];
    lt_device *d = m->cuda.device;
    char *here = d->alloc_host(d, N), *there = d->alloc(d, N), *to = d->alloc(d, N);
    uint64_t mark, second;
    memset(here, 5, N);
    must(d->fill(d, there, LT_U8, N, 9));
    must(d->copy(d, to, there, N)); /* before the upload, which overwrites `there` */
    must(d->upload(d, there, here, N, d->mark(d), &mark));
    must(d->stream_wait(d, mark));
    must(d->wait(d, mark));
    memset(here, 6, N); /* the upload is complete, so its source may change */
    get(m, got, to, N);
    CHECK_EQ(got[N - 1], 9);
    get(m, got, there, N);
    CHECK_EQ(got[0], 5);
    CHECK_EQ(got[N - 1], 5);
    must(d->upload(d, there, here, N, d->mark(d), &second));
    for (int i = 0; i < LT_MAX_MARKS; i++)
        d->mark(d);
    must(d->wait(d, second)); /* an old mark */
    memset(here, 7, N);
    must(d->stream_wait(d, second));
    get(m, got, there, N);
    CHECK_EQ(got[N - 1], 6);
    must(d->upload(d, there, here, N, d->mark(d), &mark));
    for (int i = 0; i < LT_MAX_MARKS; i++)
        d->mark(d);
    must(d->stream_wait(d, mark));
    must(d->copy(d, to, there, N));
    get(m, got, to, N);
    CHECK_EQ(got[N - 1], 7);
    d->free(d, to, N);
    d->free(d, there, N);
    d->free_host(d, here);
}

/* A download waits for the work before its mark, but not for the work after it. */
TEST_CUDA(downloads)
{
    enum { N = 1000 };
    lt_device *d = m->cuda.device;
    char *here = d->alloc_host(d, 3 * N), *there = d->alloc(d, N), *other = d->alloc(d, N);
    uint64_t mark, old;
    memset(here, 1, 3 * N);
    must(d->fill(d, there, LT_U8, N, 7));
    uint64_t after = d->mark(d);
    must(d->fill(d, other, LT_U8, N, 8));
    must(d->copy(d, here + N, other, N));
    must(d->download(d, here, there, N, after, NULL));
    must(d->download(d, here + 2 * N, there, N / 2, after, &mark));
    CHECK(here[0] != 7 || !is_lazy());
    must(d->wait(d, mark));
    CHECK(here[0] == 7 && here[N - 1] == 7 && here[2 * N] == 7); /* in order */
    CHECK_EQ(here[2 * N + N / 2], 1);
    if (is_lazy()) {
        must(d->upload(d, other, here, N, after, &mark)); /* does not wait for the copy */
        must(d->wait(d, mark));
        CHECK(here[N] != 8);
    }
    must(d->sync(d));
    must(d->fill(d, there, LT_U8, N, 9));
    after = d->mark(d);
    for (int i = 0; i < LT_MAX_MARKS; i++)
        d->mark(d);
    must(d->download(d, here, there, N, after, &old));
    for (int i = 0; i < LT_MAX_MARKS; i++)
        d->mark(d);
    must(d->wait(d, old)); /* both marks are old */
    CHECK_EQ(here[N - 1], 9);
    d->free(d, other, N);
    d->free(d, there, N);
    d->free_host(d, here);
}

typedef struct marks {
    lt_device *device;
    char *here, *there;
    uint64_t after;
    atomic_bool stop;
} marks;

static void *use_marks(void *ud)
{
    marks *m = ud;
    lt_device *d = m->device;
    uint64_t mark;
    for (int i = 0; i < 300; i++) {
        must(d->download(d, m->here, m->there, 8, m->after, &mark));
        must(d->wait(d, mark));
        CHECK_EQ(m->here[7], 3);
        must(d->upload(d, m->there, m->here, 8, m->after, &mark));
        must(d->wait(d, mark));
    }
    atomic_store(&m->stop, true);
    return NULL;
}

/* The main thread makes so many marks that those of the other thread are often old when it waits
 * for them. */
TEST_CUDA(two_threads)
{
    lt_device *d = m->cuda.device;
    char *there = d->alloc(d, 64), *other = d->alloc(d, 64);
    marks job = {.device = d, .here = d->alloc_host(d, 8), .there = there};
    pthread_t thread;
    must(d->fill(d, there, LT_U8, 64, 3));
    job.after = d->mark(d);
    CHECK_EQ(pthread_create(&thread, NULL, use_marks, &job), 0);
    while (!atomic_load(&job.stop)) {
        must(d->fill(d, other, LT_U8, 64, 4));
        uint64_t mark = d->mark(d);
        must(d->wait(d, mark));
    }
    pthread_join(thread, NULL);
    d->free(d, other, 64);
    d->free(d, there, 64);
    d->free_host(d, job.here);
}

/* ==== Deferred scalars ======================================================================== */

/* More deferred scalars than there are slots. Each has the value at the time of its request. */
TEST_EMU(deferred_scalars)
{
    enum { N = 300 };
    lt_tensor *x = lt_tensor_full(ctx, LT_F16, 1, (int64_t[]){1}, 0);
    lt_tensor *two = lt_tensor_full(ctx, LT_F32, 1, (int64_t[]){2}, 0);
    lt_deferred *deferred[N];
    int64_t waits = counted(SHIM_WAITS);
    for (int i = 0; i < N; i++) {
        CHECK_OK(lt_fill(x, i));
        CHECK((deferred[i] = lt_item_deferred(x)) != NULL);
        CHECK(i >= 256 || counted(SHIM_WAITS) == waits);
    }
    for (int i = N - 1; i >= 0; i--) {
        double value;
        if (i % 3 > 0)
            CHECK_OK(lt_deferred_item(deferred[i], &value));
        if (i % 3 > 0)
            CHECK_NEAR(value, i, 0);
        lt_deferred_free(deferred[i]);
    }
    CHECK_OK(lt_fill(x, -1));
    deferred[0] = lt_item_deferred(x); /* reuses the slot of a scalar that was never read */
    double value, again;
    CHECK_OK(lt_deferred_item(deferred[0], &value));
    CHECK_OK(lt_deferred_item(deferred[0], &again));
    CHECK(value == -1 && again == -1);
    lt_deferred_free(deferred[0]);
    CHECK(!lt_item_deferred(two));
    CHECK_MSG("a deferred scalar must be one element, but this is 2 f32");
    RELEASE(two, x);
}

/* ==== Batches ================================================================================= */

/* A source of 100 images of (2, 2, 1) f32 in memory of a device. Image i has values 4 i + 0..3 and
 * label i. New. */
static lt_source *open_quads(lt_ctx *ctx, const char *device)
{
    float all[400];
    int64_t label[100];
    for (int i = 0; i < 400; i++)
        all[i] = (float)i;
    for (int i = 0; i < 100; i++)
        label[i] = i;
    lt_tensor *images = lt_tensor_from(ctx, LT_F32, 4, (int64_t[]){100, 2, 2, 1}, all);
    lt_tensor *labels = lt_tensor_from(ctx, LT_I64, 1, (int64_t[]){100}, label);
    lt_tensor *x = lt_to(images, device), *y = lt_to(labels, device);
    lt_source *source = lt_source_tensors(ctx, x, y);
    RELEASE(images, labels, x, y);
    return source;
}

/* Takes all batches of an epoch, or requests batches in another order, before it waits for any of
 * them, then checks their contents. The memory of a slot is reused for a smaller and a larger
 * batch. */
static void check_batches(lt_ctx *ctx, int workers, bool on_request)
{
    enum { MOST = 40, BATCH = 7 };
    const int n = on_request ? MOST : 15;
    lt_tensor *x[MOST], *y[MOST];
    lt_source *source = open_quads(ctx, on_request ? "cuda" : "cpu");
    lt_batch_options options = {.batch = BATCH, .workers = workers, .on_request = on_request};
    lt_batches *batches = lt_batches_new(ctx, source, &options);
    CHECK(batches != NULL);
    for (int i = 0; i < n + LT_MAX_REQUESTS; i++) {
        if (i >= LT_MAX_REQUESTS)
            CHECK_OK(lt_batches_next(batches, &x[i - LT_MAX_REQUESTS], &y[i - LT_MAX_REQUESTS]));
        if (i < n && on_request)
            CHECK_OK(lt_batches_request(batches, i * 37 % 100));
    }
    for (int i = 0; i < n; i++) {
        float got[BATCH * 4];
        int64_t label[BATCH], first = on_request ? i * 37 % 100 : i * BATCH, left = 100 - first;
        CHECK_EQ(lt_count(y[i]), left < BATCH ? left : BATCH);
        CHECK_OK(lt_read(x[i], got));
        CHECK_OK(lt_read(y[i], label));
        for (int64_t k = 0; k < lt_count(x[i]); k++)
            CHECK(got[k] == (float)(4 * first + k));
        for (int64_t k = 0; k < lt_count(y[i]); k++)
            CHECK_EQ(label[k], first + k);
        RELEASE(x[i], y[i]);
    }
    lt_batches_free(batches);
    lt_source_release(source);
}

/* A request uploads earlier requested batches that are complete. */
static void check_uploads_at_requests(void)
{
    lt_ctx *ctx = open_device();
    lt_source *source = open_quads(ctx, "cuda");
    lt_batch_options options = {.batch = 7, .workers = 1, .on_request = true};
    lt_batches *batches = lt_batches_new(ctx, source, &options);
    CHECK(batches != NULL);
    size_t before = lt_device_memory_stats(ctx).live;
    for (int i = 0; i < LT_MAX_REQUESTS && lt_device_memory_stats(ctx).live == before; i++) {
        CHECK_OK(lt_batches_request(batches, i));
        usleep(20000 * (unsigned)(i + 1)); /* up to 2.7 s in all */
    }
    CHECK(lt_device_memory_stats(ctx).live > before);
    lt_batches_free(batches);
    lt_source_release(source);
    CHECK_EQ(lt_device_memory_stats(ctx).live, before);
    lt_ctx_free(ctx);
}

/* Makes an epoch of normalized and augmented batches in ctx, from a data set of bytes, and copies
 * them to x. */
static void read_batches(lt_ctx *ctx, lt_dtype dtype, int64_t channels, int workers, char *x)
{
    enum { IMAGES = 20, H = 5, W = 3 };
    uint8_t bytes[IMAGES * H * W * 4], label[IMAGES] = {0};
    lt_tensor *batch, *labels;
    for (int i = 0; i < IMAGES * H * W * 4; i++)
        bytes[i] = (uint8_t)(i * 37);
    lt_tensor *set[] = {lt_tensor_from(ctx, LT_U8, 4, (int64_t[]){IMAGES, H, W, channels}, bytes),
                        lt_tensor_from(ctx, LT_U8, 1, (int64_t[]){IMAGES}, label)};
    lt_source *source = lt_source_tensors(ctx, set[0], set[1]);
    lt_batch_options options = {.batch = 7,
                                .shuffle = true,
                                .crop = 1,
                                .flip = true,
                                .dtype = dtype,
                                .workers = workers,
                                .mean = {0.5, 0.4, 0.3},
                                .std = {0.1, 0.2, 0.3, 0.4}};
    lt_batches *batches = lt_batches_new(ctx, source, &options);
    CHECK(batches != NULL);
    for (int i = 0; i < 3; i++) { /* the last one is smaller */
        CHECK_OK(lt_batches_next(batches, &batch, &labels));
        CHECK_EQ(lt_tensor_dtype(batch), dtype);
        CHECK(strcmp(lt_device_of(batch), lt_device_name(ctx)) == 0);
        CHECK_OK(lt_read(batch, x));
        x += (size_t)lt_count(batch) * lt_dtype_bytes(dtype);
        RELEASE(batch, labels);
    }
    RELEASE(set[0], set[1]);
    lt_batches_free(batches);
    lt_source_release(source);
}

static void check_batches_of_bytes(void)
{
    static const lt_dtype dtypes[] = {LT_F32, LT_F64, LT_F16, LT_BF16, LT_U8};
    static char here[20 * 5 * 3 * 4 * 8], there[sizeof here];
    lt_ctx *cpu = lt_open(NULL), *ctx = open_device();
    for (int i = 0; i < 5; i++)
        for (int channels = 1; channels <= 4; channels++)
            for (int workers = -1; workers <= 2; workers += 3) {
                size_t bytes = (size_t)(20 * 5 * 3 * channels) * lt_dtype_bytes(dtypes[i]);
                read_batches(cpu, dtypes[i], channels, workers, here);
                read_batches(ctx, dtypes[i], channels, workers, there);
                if (memcmp(here, there, bytes) != 0)
                    FAIL("images of %d channels in %s differ", channels, lt_dtype_name(dtypes[i]));
            }
    lt_ctx_free(ctx);
    lt_ctx_free(cpu);
}

/* Abandons an epoch while batches are in progress. */
static void check_abandoned_batches(void)
{
    lt_ctx *ctx = open_device();
    lt_tensor *images = lt_tensor_full(ctx, LT_F32, 4, (int64_t[]){100, 2, 2, 1}, 1), *x, *y;
    lt_tensor *labels = lt_tensor_full(ctx, LT_I64, 1, (int64_t[]){100}, 1);
    for (int taken = 0; taken < 3; taken++) {
        lt_source *source = lt_source_tensors(ctx, images, labels);
        lt_batches *batches = lt_batches_new(ctx, source, &(lt_batch_options){.batch = 7});
        for (int i = 0; i < taken; i++) {
            CHECK_OK(lt_batches_next(batches, &x, &y));
            RELEASE(x, y);
        }
        lt_batches_free(batches);
        lt_source_release(source);
    }
    RELEASE(images, labels);
    lt_ctx_free(ctx);
}

TEST(batches)
{
    for (int workers = -1; workers <= 3; workers += 2) {
        use_shim();
        lt_ctx *ctx = open_device();
        check_batches(ctx, workers, false);
        check_batches(ctx, workers, true);
        lt_ctx_free(ctx);
    }
    check_uploads_at_requests();
    check_batches_of_bytes();
    check_abandoned_batches();
}

/* Without pinned host memory every copy is synchronous, and step checks are not possible. */
TEST(without_pinned_memory)
{
    double value;
    lt_ctx *ctx = open_emu();
    setenv("SHIM_HIDES", "pinned", 1);
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 0, NULL, 3);
    lt_deferred *deferred = lt_item_deferred(x);
    CHECK_OK(lt_deferred_item(deferred, &value));
    CHECK(value == 3);
    CHECK_OK(lt_set_requires_grad(x, true));
    CHECK_FAILS(lt_backward(x, NULL), LT_ENOMEM, "out of host memory for copies from cuda:0");
    lt_deferred_free(deferred);
    lt_release(x);
    check_batches(ctx, 1, false);
    check_batches(ctx, 1, true);
    lt_ctx_free(ctx);
    unsetenv("SHIM_HIDES");
}
