/* test_stream.c - marks and copies in the stream of the CUDA backend, and uploads and downloads in
 * its other streams. The emulated streams run nothing until the host waits, unless the variable
 * SHIM says otherwise. */
#include <pthread.h>

#include "tests/cuda/reference.h"
#include "tests/device/deferred_batches.h"

static void get(machine *m, void *to, const void *from, size_t bytes)
{
    must(m->cuda.device->copy(m->cuda.device, to, from, bytes));
    must(m->cuda.device->sync(m->cuda.device));
}

TEST(copies_run_asynchronously)
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
    CHECK(here[0] == 1 || !is_lazy()); /* the host has not waited */
    must(d->wait(d, mark));
    CHECK_EQ(here[N - 1], 7);
    CHECK(here[N] == 1 || !is_lazy()); /* the copy after the mark has not run */
    for (int i = 0; i < LT_MAX_MARKS; i++)
        d->mark(d);
    must(d->wait(d, second)); /* an old mark, whose event has been reused */
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
    must(d->copy(d, to, there, N)); /* before the upload, which overwrites `there` */
    must(d->upload(d, there, here, N, d->mark(d), &mark));
    must(d->stream_wait(d, mark));
    must(d->wait(d, mark));
    memset(here, 6, N); /* the upload is complete, so its source may change */
    get(&m, got, to, N);
    CHECK_EQ(got[N - 1], 9);
    get(&m, got, there, N);
    CHECK_EQ(got[0], 5);
    CHECK_EQ(got[N - 1], 5);
    must(d->upload(d, there, here, N, d->mark(d), &second));
    for (int i = 0; i < LT_MAX_MARKS; i++)
        d->mark(d);
    must(d->wait(d, second)); /* an old mark */
    memset(here, 7, N);
    must(d->stream_wait(d, second));
    get(&m, got, there, N);
    CHECK_EQ(got[N - 1], 6);
    must(d->upload(d, there, here, N, d->mark(d), &mark));
    for (int i = 0; i < LT_MAX_MARKS; i++)
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

/* A download waits for the work before its mark, but not for the work after it. */
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
    CHECK(here[0] == 1 || !is_lazy());
    must(d->wait(d, mark));
    CHECK(here[0] == 7 && here[N - 1] == 7 && here[2 * N] == 7); /* in order */
    CHECK_EQ(here[2 * N + N / 2], 1);
    if (is_lazy()) {
        must(d->upload(d, other, here, N, after, &mark)); /* does not wait for the copy */
        must(d->wait(d, mark));
        CHECK_EQ(here[N], 1);
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

/* The main thread makes so many marks that those of the other thread are often old when it waits
 * for them. */
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

TEST(requested_batches)
{
    use_plugins("");
    check_requested_batches(1);
    check_requested_batches(3);
    check_requested_batches(-1);
    check_uploads_at_requests();
}

TEST(abandoned_batches)
{
    use_plugins("");
    check_abandoned_batches();
}
