/* test_threads.c - kernels give the same results when OpenMP gives them fewer threads than the
 * context requests: under OMP_THREAD_LIMIT, and in a host program that has its own OpenMP settings.
 *
 * oneDNN splits a task by the number of threads that it expects. With fewer threads, parts of
 * the result are missing, or threads wait in a barrier forever.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#else /* this test is skipped */
#define omp_get_dynamic() 0
#define omp_set_dynamic(on) ((void)(on))
#define omp_get_max_threads() 1
#define omp_get_max_active_levels() 1
#define omp_set_max_active_levels(n) ((void)(n))
#endif

#include "tests/ops/run.h"

enum { THREADS = 4 };

/* Lines as in cases.txt, without an expression for PyTorch; large enough for four threads. */
static const char *const lines[] = {
    "linear | x=normal(256,320), w=normal(192,320), b=normal(192) | | -",
    "matmul | x=normal(160,256), y=normal(256,192) | | -",
    "matmul | x=normal(6,48,64), y=normal(6,64,48) | | -",
    "conv2d | x=normal(4,14,14,64), w=normal(128,1,1,64), b=normal(128) | | -",
    "conv2d | x=normal(4,14,14,64), w=normal(64,1,1,64) | stride=2 | -",
    "conv2d | x=normal(4,16,16,32), w=normal(48,3,3,32) | pad=1 | -",
    "conv2d | x=normal(8,16,16,3), w=normal(32,3,3,3) | pad=1 | -",
    "conv2d | x=normal(16,16,16,16), w=normal(32,3,3,16) | stride=2 pad=1 | -",
    "conv2d | x=normal(4,9,9,32), w=normal(64,3,3,16) | pad=1 groups=2 | -",
    "conv2d | x=normal(4,16,16,48), w=normal(48,3,3,1) | pad=1 groups=48 | -",
    "batch_norm | x=normal(8,16,16,32), scale=normal(32), shift=normal(32), mean=normal(32), "
    "var=positive(32) | train=true | -",
    "layer_norm | x=normal(128,320), scale=normal(320), shift=normal(320) | | -",
    "max_pool2d | x=distinct(8,16,16,32) | kernel=3 stride=2 pad=1 | -",
    "avg_pool2d | x=normal(8,16,16,32) | kernel=2 | -",
    "softmax | x=normal(96,32,16) | axis=1 | -",
    "sum | x=normal(64,16,64) | | -",
    "mean | x=normal(64,16,64) | axis=0,1 | -",
    "mul | x=normal(64,16,64), y=normal(16,1) | | -",
};
enum { LINES = sizeof lines / sizeof *lines, RUNS = 2 * LINES }; /* f32, bf16 */

/* The inputs of a case, the results of the reference, and those with four threads. */
typedef struct task {
    op_case of;
    lt_dtype dtype;
    values v;
    result want, full;
} task;

static lt_ctx *open_ctx(int threads, bool reference)
{
    return ctx_with((lt_config){.threads = threads, .reference = reference});
}

static void round_values(task *j)
{
    for (int i = 0; i < GIVEN; i++)
        if (j->v.part[i].at) {
            block_round(&j->v.part[i], j->dtype);
            j->v.part[i].dtype = LT_F64;
        }
}

/* Makes random inputs and a random upstream gradient. */
static void fill_values(lt_ctx *plain, task *j)
{
    result own;
    for (int i = 0; i < j->of.n_in; i++)
        j->v.part[IN + i] = make_input(&j->of, i);
    if (!run_case(plain, &j->of, &j->v, LT_F32, &own))
        FAIL("%s", lt_errmsg());
    block dy = block_copy(&own.part[OUT]);
    for (int64_t i = 0; i < dy.count; i++)
        dy.at[i] = normal(seed_of(&j->of, "dy"), (uint64_t)i);
    dy.dtype = LT_F64;
    j->v.part[DY] = dy;
    free_result(&own);
    round_values(j);
}

/* All tasks, made once, before a test changes a setting. They live as long as the program. */
static const task *all_tasks(void)
{
    static task tasks[RUNS];
    if (tasks[RUNS - 1].full.part[OUT].at)
        return tasks;
    lt_ctx *plain = open_ctx(1, true), *ctx = open_ctx(THREADS, false);
    for (int i = 0; i < RUNS; i++) {
        char text[256];
        task *j = &tasks[i];
        snprintf(text, sizeof text, "%s", lines[i / 2]);
        read_case(&j->of, text, i / 2);
        j->dtype = i % 2 ? LT_BF16 : LT_F32;
        fill_values(plain, j);
        if (!run_case(plain, &j->of, &j->v, LT_F32, &j->want) ||
            !run_case(ctx, &j->of, &j->v, j->dtype, &j->full))
            FAIL("%s", lt_errmsg());
    }
    lt_ctx_free(plain);
    lt_ctx_free(ctx);
    return tasks;
}

/* exact: the bits must be equal; else they may differ by rounding and the order of sums. */
static void compare(const task *j, const block *got, const block *want, const char *name,
                    bool exact)
{
    double most = 0, margin = 0;
    for (int64_t i = 0; i < want->count; i++)
        most = fmax(most, fabs(want->at[i]));
    if (!exact)
        margin = most * (j->dtype == LT_F32 ? 1e-5 : 0.03);
    for (int64_t i = 0; i < want->count; i++)
        if (!(fabs(got->at[i] - want->at[i]) <= margin)) {
            FAIL("%s in %s: %s[%lld] is %.9g, not %.9g", lines[j->of.line], lt_dtype_name(j->dtype),
                 name, (long long)i, got->at[i], want->at[i]);
            return; /* in a parallel region, FAIL() does not leave the test */
        }
}

static void check(lt_ctx *ctx, const task *j, const result *want, bool exact)
{
    char name[32];
    result got;
    if (!run_case(ctx, &j->of, &j->v, j->dtype, &got))
        FAIL("%s", lt_errmsg());
    for (int part = 0; part < FOUND; part++)
        if (want->part[part].at)
            compare(j, &got.part[part], &want->part[part], part_name(&j->of, part, name), exact);
    free_result(&got);
}

static void want_openmp(void)
{
#ifndef _OPENMP
    SKIP("the build has no OpenMP");
#endif
}

/* ==== Settings of the host program ============================================================ */

TEST(all_threads)
{
    const task *tasks = all_tasks();
    lt_ctx *ctx = open_ctx(THREADS, false);
    for (int i = 0; i < RUNS; i++) {
        check(ctx, &tasks[i], &tasks[i].want, false);
        check(ctx, &tasks[i], &tasks[i].full, true);
    }
    lt_ctx_free(ctx);
}

/* With omp_set_dynamic(), libgomp gives at most as many threads as there are idle CPUs: one, for a
 * thread that is bound to one CPU. */
TEST(a_host_that_calls_omp_set_dynamic)
{
    want_openmp();
    const task *tasks = all_tasks();
    cpu_set_t before, one;
    CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0);
    CPU_ZERO(&one);
    for (int cpu = 0; CPU_COUNT(&one) == 0; cpu++)
        if (CPU_ISSET(cpu, &before))
            CPU_SET(cpu, &one);
    int dynamic = omp_get_dynamic(), threads = omp_get_max_threads();
    lt_ctx *ctx = open_ctx(THREADS, false);
    CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    omp_set_dynamic(1);
    for (int i = 0; i < RUNS; i++) {
        check(ctx, &tasks[i], &tasks[i].full, true);
        CHECK_EQ(omp_get_dynamic(), 1);
        CHECK_EQ(omp_get_max_threads(), threads);
    }
    omp_set_dynamic(dynamic);
    CHECK_EQ(sched_setaffinity(0, sizeof before, &before), 0);
    lt_ctx_free(ctx);
}

/* A nested parallel region has one thread, unless the host program allows more levels. */
TEST(a_host_that_calls_in_a_parallel_region)
{
    want_openmp();
    const task *tasks = all_tasks();
    lt_ctx *ctx[2] = {open_ctx(THREADS, false), open_ctx(THREADS, false)};
    int levels = omp_get_max_active_levels();
    jmp_buf *leave = test_exit;
    test_exit = NULL; /* a failed check must not jump out of the region */
    for (int most = 1; most <= 2; most++) {
        omp_set_max_active_levels(most);
#ifdef _OPENMP
#pragma omp parallel for num_threads(2)
#endif
        for (int k = 0; k < 2; k++)
            for (int i = 0; i < RUNS; i++)
                check(ctx[k], &tasks[i], &tasks[i].want, false);
    }
    test_exit = leave;
    omp_set_max_active_levels(levels);
    lt_ctx_free(ctx[0]);
    lt_ctx_free(ctx[1]);
}

TEST(a_host_without_levels_of_parallel_regions)
{
    want_openmp();
    const task *tasks = all_tasks();
    int levels = omp_get_max_active_levels();
    lt_ctx *early = open_ctx(THREADS, false);
    omp_set_max_active_levels(0);
    lt_ctx *late = open_ctx(THREADS, false);
    CHECK_EQ(lt_threads(late), 1);
    for (int i = 0; i < RUNS; i++) {
        check(early, &tasks[i], &tasks[i].want, false);
        check(late, &tasks[i], &tasks[i].want, false);
    }
    omp_set_max_active_levels(levels);
    lt_ctx_free(early);
    lt_ctx_free(late);
}

/* ==== OMP_THREAD_LIMIT, which is read when a program starts =================================== */

/* A context gets `limit` threads, and gives the same bits as a context that requested `limit`. */
static void check_limit(int limit)
{
    const task *tasks = all_tasks();
    lt_ctx *ctx = open_ctx(THREADS, false), *same = open_ctx(limit, false);
    CHECK_EQ(lt_threads(ctx), limit < THREADS ? limit : THREADS);
    CHECK_EQ(lt_threads(same), limit);
    for (int i = 0; i < RUNS; i++) {
        result want;
        CHECK(run_case(same, &tasks[i].of, &tasks[i].v, tasks[i].dtype, &want));
        check(ctx, &tasks[i], &tasks[i].want, false);
        check(ctx, &tasks[i], &want, true);
        free_result(&want);
    }
    lt_ctx_free(ctx);
    lt_ctx_free(same);
}

TEST(a_thread_limit)
{
    want_openmp();
    const char *set = getenv("OMP_THREAD_LIMIT");
    if (set) {
        check_limit(atoi(set));
        return;
    }
    for (int limit = 1; limit < THREADS; limit++) {
        int status;
        char number[12];
        snprintf(number, sizeof number, "%d", limit);
        pid_t child = fork();
        if (child == 0) {
            setenv("OMP_THREAD_LIMIT", number, 1);
            alarm(60); /* ends a wait for missing threads */
            execl("/proc/self/exe", "test_threads", "a_thread_limit", (char *)NULL);
            _exit(127);
        }
        CHECK(waitpid(child, &status, 0) == child);
        if (status != 0)
            FAIL("with OMP_THREAD_LIMIT=%d: status %#x", limit, status);
    }
}
