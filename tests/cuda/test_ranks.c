/* test_ranks.c - data-parallel training of two ranks on emulated CUDA devices. The thread of the
 * group moves and sums the buckets while the ranks compute.
 */
#include <lauxlib.h>
#include <pthread.h>
#include <unistd.h>

#include "dist/dist.h"
#include "lua/luatrain.h"
#include "tests/cuda/reference.h"
#include "tests/device/emu.h"

enum { RANKS = 2, TEXT = 1 << 13 };

typedef struct way { /* how gradients are summed */
    bool blocking;
    bool own;  /* each rank has its own device */
    bool lazy; /* kernels are loaded when they are first launched */
    lt_sum_backend sums;
    lt_dtype wire;
    double timeout; /* seconds; 0: a minute */
} way;

typedef struct rank {
    int number;
    const char *options, *fault;
    way way;
    lt_group *group;
    pthread_t thread;
    char text[TEXT];
    char note[256]; /* the log line that says where gradients are summed */
} rank;

static lt_status call(rank *r, lua_State *L)
{
    char code[512];
    lt_reducer_config small = {.first_bucket = 64,
                               .bucket = 64,
                               .blocking = r->way.blocking,
                               .wire = r->way.wire,
                               .sum_backend = r->way.sums};
    LT_TRY(lt_lua_join(L, r->group, &small));
    if (luaL_loadfile(L, "tests/device/deferred.lua") != LUA_OK)
        FAIL("%s", lua_tostring(L, -1));
    LT_TRY(lt_lua_call(L, 0, 1));
    lua_getfield(L, -1, "loop");
    snprintf(code, sizeof code, "return {rank = %d, %s}", r->number, r->options);
    if (luaL_dostring(L, code))
        FAIL("%s", lua_tostring(L, -1));
    LT_TRY(lt_lua_call(L, 1, 1));
    snprintf(r->text, sizeof r->text, "%s", lua_tostring(L, -1));
    return LT_OK;
}

/* An lt_log_fn. */
static void note(void *ud, lt_log_level level, const char *text)
{
    rank *r = ud;
    if (level == LT_LOG_WARN && strstr(text, "buckets are summed"))
        snprintf(r->note, sizeof r->note, "%s", text);
}

static void *run(void *ud)
{
    rank *r = ud;
    lt_ctx *ctx = lt_open(&(lt_config){.device = r->way.own && r->number ? "cuda:1" : "cuda",
                                       .threads = 1,
                                       .poison = true,
                                       .fault = r->fault});
    lua_State *L = ctx ? lt_lua_new(ctx) : NULL;
    if (ctx)
        lt_set_log(ctx, note, r);
    if (!L || call(r, L) != LT_OK) {
        snprintf(r->text, sizeof r->text, "%s", lt_errmsg());
        lt_group_fail(r->group);
    }
    if (L)
        lt_lua_close(L);
    lt_ctx_free(ctx);
    lt_group_close(r->group);
    return NULL;
}

static void set_devices(int n)
{
    void (*set_machine)(int driver, int devices, int capability);
    *(void **)&set_machine = from_plugin("shim_set_machine");
    set_machine(13000, n, 9);
}

static void run_all(const char *options, const char *fault, way by, rank *ranks)
{
    lt_group *group[RANKS];
    lt_group_config config = {.timeout = by.timeout > 0 ? by.timeout : 60};
    use_libraries(false);
    use_plugins("");
    set_devices(by.own ? RANKS : 1);
    setenv("CUDA_MODULE_LOADING", by.lazy ? "LAZY" : "EAGER", 1);
    CHECK_OK(lt_local_open(RANKS, &config, group));
    for (int i = 0; i < RANKS; i++) {
        ranks[i] =
            (rank){.number = i, .options = options, .fault = fault, .way = by, .group = group[i]};
        CHECK_EQ(pthread_create(&ranks[i].thread, NULL, run, &ranks[i]), 0);
    }
    for (int i = 0; i < RANKS; i++)
        pthread_join(ranks[i].thread, NULL);
}

/* Checks that all ranks report the same weights and loss scale, although their batches differ, and
 * that a blocking reducer gives the same result. Copies the report to text. */
static void check_loop(const char *options, const char *fault, const char *part, way by,
                       char text[TEXT])
{
    static rank ranks[2 * RANKS];
    by.blocking = false;
    run_all(options, fault, by, ranks);
    by.blocking = true;
    run_all(options, fault, by, ranks + RANKS);
    for (int i = 0; i < 2 * RANKS; i++) {
        if (!strstr(ranks[i].text, part))
            FAIL("%s: rank %d: no '%s' in\n%s", options, i % RANKS, part, ranks[i].text);
        CHECK_STR(ranks[i].text, ranks[0].text);
    }
    strcpy(text, ranks[0].text);
}

static const char inf[] = "inf:rank=1:step=3:param=5.b";

TEST(loops)
{
    static char text[TEXT];
    way host = {.own = false};
    check_loop("amp = 'off'", NULL, "done", host, text);
    check_loop("amp = 'bf16', accumulate = 2, rare = true", NULL, "done", host, text);
    check_loop("policy = 'dynamic'", inf, " skipped=0x1p+0", host, text);
}

/* A thread that records a fault after the given number of further kernels. */
static void *fail_then(void *ud)
{
    int64_t (*count)(int what);
    void (*fault)(const char *fmt, ...);
    *(void **)&count = from_plugin("shim_count");
    *(void **)&fault = from_plugin("shim_fault");
    const int64_t until = count(SHIM_LAUNCHES) + *(int *)ud;
    for (int i = 0; i < 60000 && count(SHIM_LAUNCHES) < until; i++)
        usleep(500);
    fault("an illegal memory access was encountered");
    return NULL;
}

/* All ranks end soon after a kernel fails, and report its error. */
static void check_fault(way by)
{
    static rank ranks[RANKS];
    void (*reset)(void);
    *(void **)&reset = from_plugin("shim_reset");
    for (int kernels = 20; kernels <= 180; kernels += 40) {
        pthread_t thread;
        double before = lt__seconds();
        CHECK_EQ(pthread_create(&thread, NULL, fail_then, &kernels), 0);
        run_all("amp = 'off'", NULL, by, ranks);
        pthread_join(thread, NULL);
        CHECK(lt__seconds() - before < 30);
        for (int i = 0; i < RANKS; i++)
            if (!strstr(ranks[i].text, "an illegal memory access was encountered"))
                FAIL("after %d kernels rank %d reports: %s", kernels, i, ranks[i].text);
        reset();
    }
}

TEST(a_kernel_fails) { check_fault((way){.own = false}); }

#ifdef LT_WITH_CUDNN
TEST(a_kernel_fails_with_nccl)
{
    stand_in_nccl *library = open_nccl();
    check_fault((way){.own = true, .sums = LT_SUM_BACKEND_NCCL});
    CHECK_EQ(library->live, 0);
}

/* In f32, the sums of two ranks by NCCL have the bits of those on the CPU. */
TEST(loops_with_nccl)
{
    static const struct {
        const char *options, *fault, *part;
    } loops[] = {{"amp = 'off'", NULL, "done"},
                 {"amp = 'bf16', accumulate = 2, rare = true", NULL, "done"},
                 {"policy = 'dynamic'", inf, " skipped=0x1p+0"}};
    static char here[TEXT], there[TEXT];
    stand_in_nccl *library = open_nccl();
    for (int i = 0; i < 3; i++) {
        way by = {.own = false};
        int before = library->sums;
        check_loop(loops[i].options, loops[i].fault, loops[i].part, by, here);
        CHECK_EQ(library->sums, before);
        by.own = true;
        by.sums = LT_SUM_BACKEND_NCCL;
        check_loop(loops[i].options, loops[i].fault, loops[i].part, by, there);
        CHECK_STR(there, here);
        CHECK(library->sums > before);
        by.wire = LT_F16;
        check_loop(loops[i].options, loops[i].fault, loops[i].part, by, there);
        by.wire = LT_BF16;
        check_loop(loops[i].options, loops[i].fault, loops[i].part, by, there);
        CHECK_EQ(library->aborted, 0);
        CHECK_EQ(library->live, 0);
    }
}

/* Threads do not use NCCL by default, because a rank that loads a kernel or allocates memory could
 * block the others while it waits for their part of a sum. */
TEST(threads_with_a_device_each)
{
    static const char hazard[] =
        "NCCL can deadlock between ranks that are threads (luatrain launch "
        "-n 2 starts processes)";
    static rank ranks[RANKS];
    static char text[TEXT], want[256];
    void (*watch_sums)(const int *unfinished);
    *(void **)&watch_sums = from_plugin("shim_watch_sums");
    stand_in_nccl *library = open_nccl();
    way by = {.own = true, .lazy = true};
    watch_sums(&library->unfinished);
    check_loop("amp = 'bf16', accumulate = 2, rare = true", NULL, "done", by, text);
    check_loop("policy = 'dynamic'", inf, " skipped=0x1p+0", by, text);
    watch_sums(NULL);
    CHECK_EQ(library->sums, 0);
    run_all("amp = 'off'", NULL, by, ranks);
    snprintf(want, sizeof want, "%s: buckets are summed on the CPU", hazard);
    CHECK_STR(ranks[0].note, want);
    CHECK_STR(ranks[1].note, "");
    by.sums = LT_SUM_BACKEND_NCCL;
    run_all("amp = 'off'", NULL, by, ranks);
    snprintf(want, sizeof want, "--sums nccl: %s", hazard);
    for (int i = 0; i < RANKS; i++)
        CHECK(strstr(ranks[i].text, want));
}

TEST(nccl_fails)
{
    static rank ranks[RANKS];
    stand_in_nccl *library = open_nccl();
    library->fail = 5;
    library->rank = 1;
    run_all("amp = 'off'", NULL, (way){.own = true, .sums = LT_SUM_BACKEND_NCCL}, ranks);
    CHECK(strstr(ranks[1].text, "bucket 4: cuda:1: an NCCL call: remote process exited or there "
                                "was a network error: socket closed by 10.0.0.2"));
    CHECK(strstr(ranks[0].text, "rank 1 failed: "));
    CHECK_EQ(library->aborted, 2);
    CHECK_EQ(library->live, 0);
}

TEST(nccl_hangs)
{
    static rank ranks[RANKS];
    stand_in_nccl *library = open_nccl();
    library->hang = 5;
    double before = lt__seconds();
    run_all("policy = 'dynamic'", NULL,
            (way){.own = true, .sums = LT_SUM_BACKEND_NCCL, .timeout = 2}, ranks);
    CHECK(lt__seconds() - before < 20);
    for (int i = 0; i < RANKS; i++)
        CHECK(strstr(ranks[i].text,
                     "bucket 4: the accelerators of the other ranks did not connect within 2 s"));
    CHECK_EQ(library->aborted, 2);
    CHECK_EQ(library->live, 0);
}

/* A rank that cannot free its communicator still ends with the failure. Takes 15 seconds. */
TEST(nccl_hangs_and_cannot_be_aborted)
{
    static rank ranks[RANKS];
    const char *slow = getenv("LUATRAIN_TEST_SLOW");
    if (!slow || strcmp(slow, "1") != 0)
        SKIP("it takes 15 seconds; LUATRAIN_TEST_SLOW=1 runs it");
    stand_in_nccl *library = open_nccl();
    library->hang = 5;
    library->stuck = true;
    run_all("policy = 'dynamic'", NULL,
            (way){.own = true, .sums = LT_SUM_BACKEND_NCCL, .timeout = 2}, ranks);
    for (int i = 0; i < RANKS; i++)
        CHECK(strstr(ranks[i].text,
                     "bucket 4: the accelerators of the other ranks did not connect within 2 s"));
    CHECK_EQ(library->live, 2);
    library->stuck = false;
    for (int i = 0; i < 5000 && library->live > 0; i++)
        usleep(1000);
    CHECK_EQ(library->live, 0);
}
#endif
