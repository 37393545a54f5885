/* test_shim.c - the device that the CPU plays finds the mistakes that it is there for. */
#include <sys/wait.h>

#include "tests/cuda/reference.h"

enum { N = 64 };

static const char *(*probe)(const char *name, int *out);
static int out[N];
static void (*set_order)(int order);

static void begin(void)
{
    *(void **)&probe = from_plugin("shim_probe");
    *(void **)&set_order = from_plugin("shim_order");
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

/* Some find what nobody has written yet, in each order some others. */
TEST(a_missing_barrier_shows)
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

TEST(barriers_that_are_not_for_all)
{
    begin();
    CHECK(contains(probe("some stay away", out), "48 of 64 threads have left"));
    CHECK(contains(probe("two barriers", out), "thread 0 is at the barrier of "));
    CHECK(strcmp(probe("neighbours", out), "") == 0); /* all goes on */
}

TEST(warps_exchange)
{
    begin();
    for (int order = 0; order < 5; order++) {
        set_order(order);
        CHECK(strcmp(probe("exchanges", out), "") == 0);
        for (int i = 0; i < N; i++)
            CHECK_EQ(out[i], i < 32 ? 31 * 32 / 2 : 31 * 32 / 2 + 32 * 32);
    }
    set_order(0);
    CHECK(contains(probe("a lane leaves", out), "waits for ever at "));
}

TEST(memory_is_looked_after)
{
    begin();
    CHECK(contains(probe("writes behind", out), "something has written around the 256 bytes at"));
    CHECK(contains(probe("host", out), "has the address"));
    CHECK(strcmp(probe("fresh", out), "") == 0);
    for (int i = 0; i < N; i++)
        CHECK_EQ(out[i], 1);
}

TEST(streams_wait_for_events_alone)
{
    begin();
    (void)probe("chain", out);
    CHECK_EQ(out[N - 1], 1);
    (void)probe("chain without", out);
    CHECK_EQ(out[N - 1], 0); /* fresh memory is -1 */
}

/* A child that tries ends by a signal, of which AddressSanitizer makes an exit. */
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
