/* test_sums.c - where ranks on emulated accelerators sum gradients, and what happens if a kernel or
 * NCCL fails meanwhile. The thread of the group moves and sums the buckets while the ranks compute.
 */
#include "tests/device/ranks.h"

static rank ranks[MAX_RANKS];

/* ==== Backends ================================================================================ */

/* Runs two ranks and checks their status, the text of both, and the log line of rank 0. If one rank
 * fails, the other one may report that failure (LT_EPEER) instead of its own. */
static void check_backend(lt_sum_backend sums, where at, const char *hidden, lt_status status,
                          const char *text, const char *note)
{
    job j = loop_of(2, at, "amp = 'off'");
    j.hidden = hidden;
    j.timeout = 12; /* waiting for a rank that refuses takes half of it */
    j.config.sum_backend = sums;
    run_all(&j, ranks);
    CHECK(ranks[0].status == status || ranks[1].status == status);
    for (int i = 0; i < 2; i++) {
        CHECK(ranks[i].status == status || ranks[i].status == LT_EPEER);
        if (!strstr(ranks[i].text, text))
            FAIL("rank %d: no '%s' in\n%s", i, text, ranks[i].text);
    }
    CHECK_STR(ranks[0].note, note);
    CHECK_STR(ranks[1].note, "");
}

TEST(sum_backends)
{
    stand_in_nccl *library = open_nccl();
    check_backend(LT_SUM_BACKEND_HOST, ON_OWN, "", LT_OK, "done", "");
    check_backend(LT_SUM_BACKEND_AUTO, ON_ONE, "", LT_OK, "done",
                  "ranks 0 and 1 share cuda:0: buckets are summed on the CPU");
    check_backend(LT_SUM_BACKEND_AUTO, ON_OWN, "NCCL", LT_OK, "done",
                  "rank 0: a test hides NCCL: buckets are summed on the CPU");
    CHECK_EQ(library->sums, 0);
    check_backend(LT_SUM_BACKEND_AUTO, ON_OWN, "", LT_OK, "done", "");
    int sums = library->sums;
    CHECK(sums > 0);
    check_backend(LT_SUM_BACKEND_NCCL, ON_OWN, "", LT_OK, "done", "");
    CHECK_EQ(library->sums, 2 * sums);
    CHECK_EQ(library->aborted, 0);
    CHECK_EQ(library->live, 0);
}

/* NCCL refuses to connect ranks with other versions of it. */
TEST(versions_of_nccl)
{
    char host[64] = "", text[400];
    gethostname(host, sizeof host - 1);
    snprintf(text, sizeof text, "rank 0 on %s has NCCL 2.28.9, but rank 1 on %s has NCCL 2.28.10",
             host, host);
    open_nccl();
    SHIM(shim_set_nccl_versions)(1);
    check_backend(LT_SUM_BACKEND_NCCL, ON_OWN, "", LT_EENV, text, "");
    strcat(text, ": buckets are summed on the CPU");
    check_backend(LT_SUM_BACKEND_AUTO, ON_OWN, "", LT_OK, "done", text);
    SHIM(shim_set_nccl_versions)(0);
}

TEST(sum_backends_that_are_not_available)
{
    check_backend(LT_SUM_BACKEND_NCCL, ON_ONE, "", LT_EENV,
                  "--sums nccl: ranks 0 and 1 share cuda:0", "");
    check_backend(LT_SUM_BACKEND_NCCL, ON_OWN, "NCCL", LT_EENV,
                  "--sums nccl: rank 0: a test hides NCCL", "");
    check_backend(
        LT_SUM_BACKEND_NCCL, ON_CPU, "", LT_EENV,
        "--sums nccl requires every rank on an accelerator, but 2 of 2 are not; use --device cuda",
        "");
}

TEST(a_rank_that_cannot_connect)
{
    const char *text = "rank 1: cuda:1: ncclCommInitRankConfig: remote process exited or there was "
                       "a network error";
    char all[256];
    stand_in_nccl *library = open_nccl();
    library->refuse_rank = library->refuse_at = 1;
    library->refuse_with = 6; /* ncclRemoteError */
    snprintf(all, sizeof all, "%s: buckets are summed on the CPU", text);
    check_backend(LT_SUM_BACKEND_AUTO, ON_OWN, "", LT_OK, "done", all);
    snprintf(all, sizeof all, "--sums nccl: %s", text);
    check_backend(LT_SUM_BACKEND_NCCL, ON_OWN, "", LT_EENV, all, "");
    CHECK_EQ(library->live, 0);
}

/* ==== Failures ================================================================================ */

/* A thread that records a fault after the given number of further kernels. */
static void *fail_then(void *ud)
{
    const int64_t until = counted(SHIM_LAUNCHES) + *(int *)ud;
    for (int i = 0; i < 60000 && counted(SHIM_LAUNCHES) < until; i++)
        usleep(500);
    SHIM(shim_fault)("an illegal memory access was encountered");
    return NULL;
}

/* All ranks end soon after a kernel fails, and report its error. */
static void check_fault(where at, lt_sum_backend sums)
{
    job j = loop_of(2, at, "amp = 'off'");
    j.cuda = true;
    j.config.sum_backend = sums;
    for (int kernels = 20; kernels <= 180; kernels += 40) {
        pthread_t thread;
        double before = lt__seconds();
        CHECK_EQ(pthread_create(&thread, NULL, fail_then, &kernels), 0);
        run_all(&j, ranks);
        pthread_join(thread, NULL);
        CHECK(lt__seconds() - before < 30);
        for (int i = 0; i < 2; i++)
            if (!strstr(ranks[i].text, "an illegal memory access was encountered"))
                FAIL("after %d kernels rank %d reports: %s", kernels, i, ranks[i].text);
        SHIM(shim_reset)();
    }
}

TEST(a_kernel_fails) { check_fault(ON_ONE, LT_SUM_BACKEND_AUTO); }

TEST(a_kernel_fails_with_nccl)
{
    stand_in_nccl *library = open_nccl();
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    check_fault(ON_OWN, LT_SUM_BACKEND_NCCL);
    CHECK_EQ(library->live, 0);
}

/* Checks that all ranks report the same weights and loss scale, although their batches differ, and
 * that a blocking reducer gives the same result. */
static void check_same(job j, const char *part)
{
    static rank both[2][MAX_RANKS];
    for (int blocking = 0; blocking < 2; blocking++) {
        j.config.blocking = blocking;
        run_all(&j, both[blocking]);
        for (int i = 0; i < j.ranks; i++) {
            CHECK(strstr(both[blocking][i].text, part));
            CHECK_STR(both[blocking][i].text, both[0][0].text);
        }
    }
}

/* Threads do not use NCCL by default, because a rank that loads a kernel or allocates memory could
 * block the others while it waits for their part of a sum. */
TEST(threads_with_a_device_each)
{
    static const char hazard[] =
        "NCCL can deadlock between ranks that are threads (luatrain launch "
        "-n 2 starts processes)";
    char want[256];
    stand_in_nccl *library = open_nccl();
    job j = loop_of(2, ON_OWN, "amp = 'bf16', accumulate = 2, rare = true");
    j.cuda = true;
    setenv("CUDA_MODULE_LOADING", "LAZY", 1);
    SHIM(shim_watch_sums)(&library->unfinished);
    check_same(j, "done");
    j.options = "policy = 'dynamic'";
    j.fault = "inf:rank=1:step=3:param=5.b";
    check_same(j, " skipped=0x1p+0");
    SHIM(shim_watch_sums)(NULL);
    CHECK_EQ(library->sums, 0);
    j.options = "amp = 'off'";
    j.fault = NULL;
    run_all(&j, ranks);
    snprintf(want, sizeof want, "%s: buckets are summed on the CPU", hazard);
    CHECK_STR(ranks[0].note, want);
    CHECK_EQ(ranks[0].level, LT_LOG_WARN);
    CHECK_STR(ranks[1].note, "");
    j.config.sum_backend = LT_SUM_BACKEND_NCCL;
    run_all(&j, ranks);
    snprintf(want, sizeof want, "--sums nccl: %s", hazard);
    for (int i = 0; i < 2; i++)
        CHECK(strstr(ranks[i].text, want));
}

TEST(nccl_fails)
{
    stand_in_nccl *library = open_nccl();
    library->fail = 5;
    library->rank = 1;
    const job j = loop_of(2, ON_OWN, "amp = 'off'");
    run_all(&j, ranks);
    CHECK(strstr(ranks[1].text, "bucket 4: cuda:1: an NCCL call: remote process exited or there "
                                "was a network error: socket closed by 10.0.0.2"));
    CHECK(strstr(ranks[0].text, "rank 1 failed: "));
    CHECK_EQ(library->aborted, 2);
    CHECK_EQ(library->live, 0);
}

/* Runs ranks whose fifth sum never completes. The first rank whose timeout expires informs the
 * other. */
static void hang(stand_in_nccl *library)
{
    double before = lt__seconds();
    job j = loop_of(2, ON_OWN, "policy = 'dynamic'");
    j.timeout = 2;
    library->hang = 5;
    run_all(&j, ranks);
    CHECK(library->stuck || lt__seconds() - before < 20);
    for (int i = 0; i < 2; i++)
        CHECK(strstr(ranks[i].text,
                     "bucket 4: the accelerators of the other ranks did not connect within 2 s"));
}

TEST(nccl_hangs)
{
    stand_in_nccl *library = open_nccl();
    hang(library);
    CHECK_EQ(library->aborted, 2);
    CHECK_EQ(library->live, 0);
}

/* A rank that cannot free its communicator still ends with the failure. Takes 15 seconds. */
TEST(nccl_hangs_and_cannot_be_aborted)
{
    if (!getenv("LUATRAIN_TEST_SLOW"))
        SKIP("it takes 15 seconds; LUATRAIN_TEST_SLOW=1 runs it");
    stand_in_nccl *library = open_nccl();
    library->stuck = true;
    hang(library);
    CHECK_EQ(library->live, 2);
    library->stuck = false;
    for (int i = 0; i < 5000 && library->live > 0; i++)
        usleep(1000);
    CHECK_EQ(library->live, 0);
}
