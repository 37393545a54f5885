/* test_stream.c - marks in the stream of the CUDA backend, what is fetched from it, and uploads
 * and downloads beside it. The device's streams do nothing before somebody waits. */
#include <pthread.h>

#include "tests/cuda/reference.h"
#include "tests/device/deferred_batches.h"

static void get(machine *m, void *to, const void *from, size_t bytes)
{
    must(m->cuda.device->copy(m->cuda.device, to, from, bytes));
    must(m->cuda.device->sync(m->cuda.device));
}

TEST(what_is_fetched_comes_late)
{
    enum { N = 1000 };
    machine m = machine_open();
    lt_device *d = m.cuda.device;
    char *there = d->alloc(d, N), *here = d->alloc_host(d, 2 * N);
    memset(here, 1, 2 * N);
    must(d->fill(d, there, LT_U8, N, 7));
    must(d->copy(d, here, there, N));
    uint64_t mark = d->mark(d);
    must(d->fill(d, there, LT_U8, N, 8));
    must(d->copy(d, here + N, there, N));
    uint64_t second = d->mark(d);
    CHECK(mark > 0 && second > mark);
    CHECK_EQ(here[0], 1); /* nobody has waited */
    must(d->wait(d, mark));
    CHECK_EQ(here[N - 1], 7);
    CHECK_EQ(here[N], 1); /* nor for what is behind the mark */
    for (int i = 0; i < LT_MARKS; i++)
        d->mark(d);
    must(d->wait(d, second)); /* which is told apart no more */
    CHECK_EQ(here[2 * N - 1], 8);
    must(d->wait(d, mark));
    d->free_host(d, here);
    d->free(d, there, N);
    lt_ctx_free(m.ctx);
}

TEST(uploads)
{
    enum { N = 1000 };
    char got[N];
    machine m = machine_open();
    lt_device *d = m.cuda.device;
    char *here = d->alloc_host(d, N), *there = d->alloc(d, N), *to = d->alloc(d, N);
    uint64_t mark, second;
    memset(here, 5, N);
    must(d->fill(d, there, LT_U8, N, 9));
    must(d->copy(d, to, there, N)); /* it comes before the upload, which writes over it */
    must(d->upload(d, there, here, N, d->mark(d), &mark));
    must(d->stream_wait(d, mark));
    must(d->wait(d, mark));
    memset(here, 6, N); /* its memory is free again */
    get(&m, got, to, N);
    CHECK_EQ(got[N - 1], 9);
    get(&m, got, there, N);
    CHECK_EQ(got[0], 5);
    CHECK_EQ(got[N - 1], 5);
    must(d->upload(d, there, here, N, d->mark(d), &second));
    for (int i = 0; i < LT_MARKS; i++)
        d->mark(d);
    must(d->wait(d, second)); /* told apart no more */
    memset(here, 7, N);
    must(d->stream_wait(d, second));
    get(&m, got, there, N);
    CHECK_EQ(got[N - 1], 6);
    must(d->upload(d, there, here, N, d->mark(d), &mark));
    for (int i = 0; i < LT_MARKS; i++)
        d->mark(d);
    must(d->stream_wait(d, mark));
    must(d->copy(d, to, there, N));
    get(&m, got, to, N);
    CHECK_EQ(got[N - 1], 7);
    d->free(d, to, N);
    d->free(d, there, N);
    d->free_host(d, here);
    lt_ctx_free(m.ctx);
}

/* What comes beside the stream waits for what is before its mark, and for nothing behind. */
TEST(downloads)
{
    enum { N = 1000 };
    machine m = machine_open();
    lt_device *d = m.cuda.device;
    char *here = d->alloc_host(d, 3 * N), *there = d->alloc(d, N), *other = d->alloc(d, N);
    uint64_t mark, old;
    memset(here, 1, 3 * N);
    must(d->fill(d, there, LT_U8, N, 7));
    uint64_t after = d->mark(d);
    must(d->fill(d, other, LT_U8, N, 8));
    must(d->copy(d, here + N, other, N));
    must(d->download(d, here, there, N, after, NULL));
    must(d->download(d, here + 2 * N, there, N / 2, after, &mark));
    CHECK_EQ(here[0], 1);
    must(d->wait(d, mark));
    CHECK(here[0] == 7 && here[N - 1] == 7 && here[2 * N] == 7); /* in order */
    CHECK(here[N] == 1 && here[2 * N + N / 2] == 1);
    must(d->upload(d, other, here, N, after, &mark)); /* not behind the copy */
    must(d->wait(d, mark));
    CHECK_EQ(here[N], 1);
    must(d->sync(d));
    must(d->fill(d, there, LT_U8, N, 9));
    after = d->mark(d);
    for (int i = 0; i < LT_MARKS; i++)
        d->mark(d);
    must(d->download(d, here, there, N, after, &old));
    for (int i = 0; i < LT_MARKS; i++)
        d->mark(d);
    must(d->wait(d, old)); /* both are told apart no more */
    CHECK_EQ(here[N - 1], 9);
    d->free(d, other, N);
    d->free(d, there, N);
    d->free_host(d, here);
    lt_ctx_free(m.ctx);
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

/* The other one takes so many that its marks are often too old when they are waited for. */
TEST(two_threads)
{
    machine m = machine_open();
    lt_device *d = m.cuda.device;
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
    lt_ctx_free(m.ctx);
}

TEST(batches)
{
    use_plugins("");
    check_batches(1);
    check_batches(3);
    check_batches(-1);
    check_batches_of_bytes();
}

TEST(batches_that_are_left)
{
    use_plugins("");
    check_batches_left();
}
