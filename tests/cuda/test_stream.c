/* test_stream.c - marks in the stream of the CUDA backend, what is fetched from it, and uploads
 * beside it. The device's streams do nothing before somebody waits. */
#include "tests/cuda/twin.h"
#include "tests/device/late_batches.h"

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
    must(d->upload(d, there, here, N, &mark));
    must(d->follow(d, mark));
    must(d->wait(d, mark));
    memset(here, 6, N); /* its memory is free again */
    get(&m, got, to, N);
    CHECK_EQ(got[N - 1], 9);
    get(&m, got, there, N);
    CHECK_EQ(got[0], 5);
    CHECK_EQ(got[N - 1], 5);
    must(d->upload(d, there, here, N, &second));
    for (int i = 0; i < LT_MARKS; i++)
        d->mark(d);
    must(d->wait(d, second)); /* told apart no more */
    memset(here, 7, N);
    must(d->follow(d, second));
    get(&m, got, there, N);
    CHECK_EQ(got[N - 1], 6);
    must(d->upload(d, there, here, N, &mark));
    for (int i = 0; i < LT_MARKS; i++)
        d->mark(d);
    must(d->follow(d, mark));
    must(d->copy(d, to, there, N));
    get(&m, got, to, N);
    CHECK_EQ(got[N - 1], 7);
    d->free(d, to, N);
    d->free(d, there, N);
    d->free_host(d, here);
    lt_ctx_free(m.ctx);
}

TEST(batches)
{
    use_plugins("");
    check_batches(1);
    check_batches(3);
    check_batches(-1);
}

TEST(batches_that_are_left)
{
    use_plugins("");
    check_batches_left();
}
