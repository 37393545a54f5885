/* test_shim.c - the CPU emulation of the CUDA runtime detects the mistakes that it should. */
#include <sys/wait.h>

#include "tests/cuda/reference.h"

enum { N = 64 };

static int out[N];

static const char *probe(const char *name, int *to) { return SHIM(shim_probe)(name, to); }

static bool contains(const char *text, const char *part)
{
    if (strstr(text, part))
        return true;
    printf("'%s' is not in '%s'\n", part, text);
    return false;
}

TEST(threads_meet_at_barriers)
{
    for (int order = 0; order < 5; order++) {
        SHIM(shim_set_order)(order);
        CHECK(strcmp(probe("neighbours", out), "") == 0);
        for (int i = 0; i < N; i++)
            CHECK_EQ(out[i], (i + 1) % N);
    }
    SHIM(shim_set_order)(0);
}

/* In every order of threads, some threads read values that are not written yet. */
TEST(a_missing_barrier_is_detected)
{
    for (int order = 0; order < 5; order++) {
        int wrong = 0;
        SHIM(shim_set_order)(order);
        CHECK(strcmp(probe("no barrier", out), "") == 0);
        for (int i = 0; i < N; i++)
            wrong += out[i] != (i + 1) % N;
        CHECK(wrong > 0);
    }
    SHIM(shim_set_order)(0);
}

/* In every order but the ascending one, some blocks run before the block that they read from. */
TEST(a_block_that_needs_another)
{
    for (int order = 0; order < 5; order++) {
        int right = 0, written = 0;
        SHIM(shim_set_order)(order);
        CHECK(strcmp(probe("block after block", out), "") == 0);
        for (int i = 0; i < N; i++) {
            right += out[i] == 1;
            written += out[i] >= 0;
        }
        CHECK_EQ(written, N);
        CHECK_EQ(right == N, order == 0);
    }
    SHIM(shim_set_order)(0);
}

TEST(divergent_barriers)
{
    CHECK(contains(probe("partial barrier", out), "48 of 64 threads have exited"));
    CHECK(contains(probe("two barriers", out), "thread 0 waits at the barrier of "));
    CHECK(strcmp(probe("neighbours", out), "") == 0); /* the device works again */
}

TEST(warp_exchanges)
{
    for (int order = 0; order < 5; order++) {
        SHIM(shim_set_order)(order);
        CHECK(strcmp(probe("exchanges", out), "") == 0);
        for (int i = 0; i < N; i++)
            CHECK_EQ(out[i], i < 32 ? 31 * 32 / 2 : 31 * 32 / 2 + 32 * 32);
    }
    SHIM(shim_set_order)(0);
    CHECK(contains(probe("a lane exits", out), "waits forever at "));
}

TEST(invalid_memory_accesses)
{
    CHECK(contains(probe("out of bounds", out),
                   "a kernel or copy wrote outside the block of 256 bytes at"));
    CHECK(contains(probe("host address", out), "a kernel argument contains the host address"));
    CHECK(strcmp(probe("uninitialized", out), "") == 0);
    for (int i = 0; i < N; i++)
        CHECK_EQ(out[i], 1);
}

TEST_CUDA(pinned_memory)
{
    lt_device *d = m->cuda.device;
    signed char *here = d->alloc_host(d, N), *there = d->alloc(d, N);
    for (int i = 0; i < N; i++)
        CHECK_EQ(here[i], -1);
    memset(here, 5, N);
    must(d->copy(d, here, there, N));
    for (int i = 0; i < N; i++)
        CHECK_EQ(here[i], -1); /* the copy has not run */
    CHECK_FAILS(d->copy(d, here, there, N), LT_EENV,
                "two copies that have not run use the pinned memory at ");
    SHIM(shim_reset)();
    d->free(d, there, N);
    d->free_host(d, here);
}

TEST(memory_of_another_device)
{
    static const char *const uses[] = {"another: a kernel", "another: a copy", "another: a memset"};
    for (int i = 0; i < 3; i++)
        CHECK(contains(probe(uses[i], out), "work on device 1 uses memory of device 0"));
    CHECK(strcmp(probe("two launches", out), "") == 0); /* the thread's device is still 1 */
}

TEST(streams_wait_only_for_events)
{
    (void)probe("chain", out);
    CHECK_EQ(out[N - 1], 1);
    (void)probe("chain without", out);
    CHECK_EQ(out[N - 1], 0); /* new memory is -1 */
}

TEST(schedules)
{
    enum { SEEDS = 40 };
    char random[24];
    int early = 0;
    SHIM(shim_set_schedule)("eager");
    (void)probe("chain without", out);
    CHECK_EQ(out[N - 1], 1); /* the first stream has run, although nothing waits for it */
    for (int seed = 0; seed < SEEDS; seed++) {
        snprintf(random, sizeof random, "random:%d", seed);
        SHIM(shim_set_schedule)(random);
        (void)probe("chain without", out);
        early += out[N - 1] == 1;
        (void)probe("chain", out);
        CHECK_EQ(out[N - 1], 1);
    }
    CHECK(early > 0 && early < SEEDS);
    SHIM(shim_set_schedule)("lazy");
    (void)probe("chain without", out);
    CHECK_EQ(out[N - 1], 0);
}

/* Checks that the device reports a call that waits for a sum, and resets it. */
static void check_wait(machine *m, const char *call)
{
    char text[128];
    snprintf(text, sizeof text,
             "cuda:0: %s waits for a sum that the other ranks cannot begin before it returns",
             call);
    CHECK_FAILS(m->cuda.device->sync(m->cuda.device), LT_EENV, text);
    SHIM(shim_reset)();
}

TEST_CUDA(calls_that_wait_for_sums)
{
    int unfinished = 0;
    lt_device *d = m->cuda.device;
    SHIM(shim_watch_sums)(&unfinished);
    void *there = d->alloc(d, 64), *here = d->alloc_host(d, 64);
    must(d->fill(d, there, LT_F32, 16, 7));
    must(d->sync(d));
    unfinished = 1;
    must(d->fill(d, there, LT_F32, 16, 8)); /* the kernel is loaded */
    must(d->sync(d));
    CHECK(d->convert(d, there, LT_F32, there, LT_F64, 1) != LT_OK);
    check_wait(m, "the first launch of a kernel");
    CHECK(!d->alloc(d, 64));
    check_wait(m, "cudaMalloc()");
    CHECK(!d->alloc_host(d, 64));
    check_wait(m, "cudaMallocHost()");
    d->free(d, there, 64);
    check_wait(m, "cudaFree()");
    d->free_host(d, here);
    check_wait(m, "cudaFreeHost()");
    SHIM(shim_watch_sums)(NULL);
}

/* A child process that tries is killed by a signal, or by AddressSanitizer with an exit status. */
TEST_CUDA(the_host_cannot_read_device_memory)
{
    lt_device *device = m->cuda.device;
    float *p = device->alloc(device, 64);
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        (void)!freopen("/dev/null", "w", stderr);
        (void)*(volatile float *)p;
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status != 0);
    device->free(device, p, 64);
}
