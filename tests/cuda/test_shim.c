/* test_shim.c - the CPU emulation of the CUDA runtime detects the mistakes that it should. */
#include <sys/wait.h>

#include "tests/cuda/reference.h"

enum { N = 64 };

static const char *(*probe)(const char *name, int *out);
static int out[N];
static void (*set_order)(int order);

static void begin(void)
{
    *(void **)&probe = from_plugin("shim_probe");
    *(void **)&set_order = from_plugin("shim_set_order");
}

static bool contains(const char *text, const char *part)
{
    if (strstr(text, part))
        return true;
    printf("'%s' is not in '%s'\n", part, text);
    return false;
}

TEST(threads_meet_at_barriers)
{
    begin();
    for (int order = 0; order < 5; order++) {
        set_order(order);
        CHECK(strcmp(probe("neighbours", out), "") == 0);
        for (int i = 0; i < N; i++)
            CHECK_EQ(out[i], (i + 1) % N);
    }
    set_order(0);
}

/* In every order of threads, some threads read values that are not written yet. */
TEST(a_missing_barrier_is_detected)
{
    begin();
    for (int order = 0; order < 5; order++) {
        int wrong = 0;
        set_order(order);
        CHECK(strcmp(probe("no barrier", out), "") == 0);
        for (int i = 0; i < N; i++)
            wrong += out[i] != (i + 1) % N;
        CHECK(wrong > 0);
    }
    set_order(0);
}

TEST(divergent_barriers)
{
    begin();
    CHECK(contains(probe("partial barrier", out), "48 of 64 threads have exited"));
    CHECK(contains(probe("two barriers", out), "thread 0 waits at the barrier of "));
    CHECK(strcmp(probe("neighbours", out), "") == 0); /* the device works again */
}

TEST(warp_exchanges)
{
    begin();
    for (int order = 0; order < 5; order++) {
        set_order(order);
        CHECK(strcmp(probe("exchanges", out), "") == 0);
        for (int i = 0; i < N; i++)
            CHECK_EQ(out[i], i < 32 ? 31 * 32 / 2 : 31 * 32 / 2 + 32 * 32);
    }
    set_order(0);
    CHECK(contains(probe("a lane exits", out), "waits forever at "));
}

TEST(invalid_memory_accesses)
{
    begin();
    CHECK(contains(probe("out of bounds", out),
                   "a kernel or copy wrote outside the block of 256 bytes at"));
    CHECK(contains(probe("host address", out), "a kernel argument contains the host address"));
    CHECK(strcmp(probe("uninitialized", out), "") == 0);
    for (int i = 0; i < N; i++)
        CHECK_EQ(out[i], 1);
}

TEST(streams_wait_only_for_events)
{
    begin();
    (void)probe("chain", out);
    CHECK_EQ(out[N - 1], 1);
    (void)probe("chain without", out);
    CHECK_EQ(out[N - 1], 0); /* new memory is -1 */
}

/* A child process that tries is killed by a signal, or by AddressSanitizer with an exit status. */
TEST(the_host_cannot_read_device_memory)
{
    machine m = machine_open();
    lt_device *device = m.cuda.device;
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
    lt_ctx_free(m.ctx);
}
