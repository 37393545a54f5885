/* test_mpi_transport.c - ranks as processes, on one node and on several with a fake net: sums
 * against f64, the same bits on all ranks, ranks that disagree, fail, exit, hang or are killed. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include "core/tensor.h"
#include "dist/group.h"
#include "tests/dist/processes.h"
#include "tests/dist/sums.h"

enum { SIDE_SUMS = 30, LARGE = 300007, WORDS = 700001 };

/* ==== Sums ==================================================================================== */

static const char *const layouts[] = {"0",    "00",  "000",  "0000", "01",  "0011",
                                      "0101", "012", "0123", "0001", "0122"};
enum { N_LAYOUTS = sizeof layouts / sizeof *layouts };

static lt_status check_sum(rank *r, int64_t count, lt_dtype dtype, lt_dtype wire)
{
    size_t bytes = (size_t)count * lt_dtype_bytes(dtype);
    unsigned char *data = malloc(bytes + 1);
    double *x = malloc((size_t)count * sizeof *x + 1);
    double *want = calloc((size_t)count + 1, sizeof *want);
    double *size = calloc((size_t)count + 1, sizeof *size);
    double scale = dtype == LT_I64 ? 1 : 1.0 / 3;
    for (int who = 0; who < r->size; who++) {
        elements_of(who, count, dtype, data, x);
        for (int64_t i = 0; i < count; i++) {
            want[i] += scale * x[i];
            size[i] += fabs(scale * x[i]);
        }
    }
    elements_of(r->rank, count, dtype, data, x);
    data[bytes] = 42;
    lt_sum sum = {"numbers", data, count, dtype, wire, scale};
    lt_status status = lt_group_allreduce(r->group, &sum);
    lt_convert(x, LT_F64, data, dtype, (size_t)count);
    for (int64_t i = 0; i < count && status == LT_OK; i++) {
        double most = (r->size + 2) * size[i] * (roundoff(wire) + roundoff(dtype));
        most = dtype == LT_I64 ? 0 : most + (wire == LT_F16 ? 0x1p-24 : 0);
        if (!(fabs(x[i] - want[i]) <= most))
            status = lt_fail(LT_EINVAL, "rank %d, %lld %s as %s: element %lld is %g, not %g",
                             r->rank, (long long)count, lt_dtype_name(dtype), lt_dtype_name(wire),
                             (long long)i, x[i], want[i]);
    }
    if (status == LT_OK && data[bytes] != 42)
        status = lt_fail(LT_EINVAL, "something was written after the data");
    for (size_t i = 0; i < bytes; i++)
        r->result->bits = (r->result->bits ^ data[i]) * 1099511628211u;
    free(data);
    free(x);
    free(want);
    free(size);
    return status;
}

static lt_status check_sums(rank *r)
{
    int n = r->size;
    for (size_t t = 0; t < N_SUM_TYPES; t++) {
        const int64_t counts[] = {0, 1, n - 1, n, n + 1, 1009, 30011};
        for (size_t k = 0; k < sizeof counts / sizeof *counts; k++)
            LT_TRY(check_sum(r, counts[k], sum_types[t].dtype, sum_types[t].wire));
    }
    LT_TRY(check_sum(r, 150007, LT_F32, LT_F32)); /* larger than the staging memory of 256 KiB */
    LT_TRY(check_sum(r, 300007, LT_F32, LT_BF16));
    return check_sum(r, 65536, LT_F64, LT_F64);
}

TEST(sums_equal_those_in_f64_and_each_other)
{
    result results[MOST];
    for (int i = 0; i < N_LAYOUTS; i++) {
        on_ranks(&(job){.nodes = layouts[i], .body = check_sums}, results);
        for (size_t r = 0; r < strlen(layouts[i]); r++) {
            CHECK_STR(results[r].text, "");
            if (results[r].bits != results[0].bits)
                FAIL("nodes %s: the bits of ranks 0 and %zu differ", layouts[i], r);
        }
    }
}

/* Gives the same bits for any number of nodes that have the same number of ranks. */
static lt_status sum_as_a_tree(rank *r)
{
    static float x[LARGE];
    for (int i = 0; i < LARGE; i++)
        x[i] = (float)value_of(r->rank, i);
    lt_sum sum = {"numbers", x, LARGE, LT_F32, LT_F32, 1};
    LT_TRY(lt__group_add_as_tree(r->group));
    LT_TRY(lt_group_allreduce(r->group, &sum));
    for (int i = 0; i < LARGE; i++)
        if (x[i] != ((float)value_of(0, i) + (float)value_of(1, i)) +
                        ((float)value_of(2, i) + (float)value_of(3, i)))
            return lt_fail(LT_EINVAL, "element %d is %.9g", i, x[i]);
    return LT_OK;
}

TEST(sums_can_use_a_balanced_tree)
{
    static const char refused[] = "vranks requires the same number of consecutive ranks on each "
                                  "machine, as with -H one:2,other:2";
    static const char *const even[] = {"0000", "0011", "0123"}, *const uneven[] = {"0101", "0001"};
    result results[MOST];
    for (int i = 0; i < 5; i++) {
        on_ranks(&(job){.nodes = i < 3 ? even[i] : uneven[i - 3], .body = sum_as_a_tree}, results);
        for (int r = 0; r < 4; r++)
            CHECK_STR(results[r].text, i < 3 ? "" : refused);
    }
}

/* Sums in shared memory. In each round a different rank has none. */
static lt_status sum_in_shared_memory(rank *r)
{
    enum { N = 300007 };
    for (int round = 0; round <= r->size; round++) {
        lt_external_memory memory = {0};
        bool shared = r->rank != round &&
                      lt__group_alloc_shared(r->group, N * sizeof(float), &memory);
        float *x = shared ? memory.data : malloc(N * sizeof *x);
        int wrong = shared != (r->rank != round);
        for (int i = 0; i < N; i++)
            x[i] = (float)(i % 1000 + r->rank);
        lt_sum sum = {"numbers", x, N, LT_F32, LT_F32, 1};
        LT_TRY(lt_group_allreduce(r->group, &sum));
        for (int i = 0; i < N; i++)
            wrong += x[i] != (float)(r->size * (i % 1000) + r->size * (r->size - 1) / 2);
        if (shared)
            memory.deleter(memory.ud, x);
        else
            free(x);
        if (wrong > 0)
            return lt_fail(LT_EINVAL, "round %d: %d wrong elements", round, wrong);
    }
    return LT_OK;
}

TEST(data_in_shared_memory_is_summed_in_place)
{
    result results[MOST];
    on_ranks(&(job){.nodes = "000", .body = sum_in_shared_memory}, results);
    for (int r = 0; r < 3; r++)
        CHECK_STR(results[r].text, "");
}

typedef struct side {
    rank *rank;
    atomic_int done; /* side sums completed */
    float x[LARGE];
} side;

static lt_status sum_by_turns(void *ud)
{
    side *a = ud;
    for (int k = 0; k < SIDE_SUMS; k++) {
        while (atomic_load(&a->done) < k)
            pause_ms(1);
        lt_sum sum = {"a bucket", a->x, LARGE, LT_F32, LT_F32, 1.0 / a->rank->size};
        LT_TRY(lt_group_allreduce(a->rank->group, &sum));
    }
    return LT_OK;
}

static lt_status sum_on_side(rank *r)
{
    static side a;
    lt_status status = LT_OK;
    double x[1000];
    a.rank = r;
    a.x[0] = a.x[LARGE - 1] = 1;
    LT_TRY(lt_group_start(r->group, sum_by_turns, &a));
    for (int k = 0; k < SIDE_SUMS && status == LT_OK; k++) {
        for (int i = 0; i < 1000; i++)
            x[i] = r->rank + i + k;
        status = lt_group_allreduce_side(r->group, &(lt_sum){"a norm", x, 1000, LT_F64, LT_F64, 1});
        for (int i = 0; i < 1000 && status == LT_OK; i++)
            if (x[i] != r->size * (r->size - 1) / 2 + r->size * (i + k))
                status = lt_fail(LT_EINVAL, "sum %d: element %d is %g", k, i, x[i]);
        atomic_fetch_add(&a.done, 1);
    }
    atomic_store(&a.done, SIDE_SUMS);
    LT_TRY(status);
    LT_TRY(lt_group_wait(r->group));
    bool good = fabs(a.x[0] - 1) < 1e-4 && fabs(a.x[LARGE - 1] - 1) < 1e-4;
    return good ? LT_OK : lt_fail(LT_EINVAL, "the elements are %g, %g", a.x[0], a.x[LARGE - 1]);
}

TEST(side_sums_run_beside_started_tasks)
{
    result results[MOST];
    for (int i = 0; i < N_LAYOUTS; i++) {
        on_ranks(&(job){.nodes = layouts[i], .body = sum_on_side, .timeout = 20}, results);
        for (size_t r = 0; r < strlen(layouts[i]); r++)
            CHECK_STR(results[r].text, "");
    }
}

/* ==== Other collectives ======================================================================= */

static lt_status pass_around(rank *r)
{
    int *data = calloc(WORDS, sizeof *data), wrong = 0;
    lt_status status = LT_OK;
    for (int root = 0; root < r->size && status == LT_OK; root++) {
        data[0] = data[WORDS - 1] = r->rank == root ? 77 + root : 0;
        status = lt_group_broadcast(r->group, "words", data, WORDS * sizeof *data, root);
        wrong += data[0] != 77 + root || data[WORDS - 1] != 77 + root;
    }
    if (status == LT_OK)
        status = lt_group_barrier(r->group, "here");
    data[0] = data[WORDS - 1] = r->rank == 0 ? 5 : 0; /* from each rank to the next */
    size_t bytes = WORDS * sizeof *data;
    if (status == LT_OK && r->rank > 0)
        status = lt_group_receive(r->group, r->rank - 1, data, bytes);
    if (status == LT_OK && r->rank < r->size - 1)
        status = lt_group_send(r->group, r->rank + 1, data, bytes);
    wrong += data[0] != 5 || data[WORDS - 1] != 5;
    free(data);
    return status != LT_OK || wrong == 0 ? status : lt_fail(LT_EINVAL, "%d wrong elements", wrong);
}

TEST(broadcasts_and_messages_arrive)
{
    result results[MOST];
    for (int i = 0; i < N_LAYOUTS; i++) {
        on_ranks(&(job){.nodes = layouts[i], .body = pass_around}, results);
        for (size_t r = 0; r < strlen(layouts[i]); r++)
            CHECK_STR(results[r].text, "");
    }
}

static lt_status tell_local_rank(rank *r)
{
    r->result->bits = (uint64_t)lt_group_local_rank(r->group);
    return lt_group_barrier(r->group, "here");
}

TEST(local_ranks_count_from_0_on_each_machine)
{
    result results[MOST];
    on_ranks(&(job){.nodes = "0101", .body = tell_local_rank}, results);
    for (int r = 0; r < 4; r++)
        CHECK_EQ(results[r].bits, r / 2);
}

static lt_status sum_of(rank *r, const char *what, int64_t count)
{
    double x[100] = {0};
    lt_sum sum = {what, x, count, LT_F64, LT_F64, 1};
    return lt_group_allreduce(r->group, &sum);
}

static lt_status disagree(rank *r)
{
    return sum_of(r, "bucket 3", r->rank == r->size - 1 ? 10 : 9);
}

TEST(all_ranks_name_a_disagreement)
{
    static const char *const nodes[] = {"000", "012", "011"};
    static const char *const texts[] = {
        "the ranks disagree: rank 0 is in the allreduce of bucket 3 (9 f64), rank 2 in the "
        "allreduce of bucket 3 (10 f64)",
        NULL,
        "the ranks disagree: rank 1 is in the allreduce of bucket 3 (9 f64), rank 2 in the "
        "allreduce of bucket 3 (10 f64)"};
    result results[MOST];
    for (int i = 0; i < 3; i++) {
        on_ranks(&(job){.nodes = nodes[i], .body = disagree}, results);
        for (int r = 0; r < 3; r++) {
            CHECK_EQ(results[r].status, LT_EDESYNC);
            if (texts[i])
                CHECK_STR(results[r].text, texts[i]);
            else /* neighbours compare: rank 2 differs from both of its neighbours */
                CHECK(strstr(results[r].text, "rank 2 in the allreduce of bucket 3 (10 f64)"));
        }
    }
}

static lt_status one_fails(rank *r)
{
    int who;
    char text[64];
    lt_status code;
    lt_status status = lt_group_barrier(r->group, "all are there");
    if (r->rank == 1) {
        pause_ms(20);
        lt_fail(LT_ENUMERIC, "train.lua:9: the loss is nan");
        lt_group_fail(r->group);
        return LT_OK;
    }
    if (status == LT_OK)
        status = sum_of(r, "bucket 3", 9);
    if (lt_group_failure(r->group, &who, &code, text, sizeof text) && who == 1)
        r->result->later = code;
    return status;
}

TEST(a_failure_reaches_the_other_ranks)
{
    static const char *const nodes[] = {"0000", "0123", "0011", "0122"};
    result results[MOST];
    for (int i = 0; i < 4; i++) {
        on_ranks(&(job){.nodes = nodes[i], .body = one_fails}, results);
        for (int r = 0; r < 4; r++) {
            if (r == 1)
                continue;
            CHECK_STR(results[r].text, "rank 1 failed: train.lua:9: the loss is nan");
            CHECK_EQ(results[r].status, LT_EPEER);
            CHECK_EQ(results[r].later, LT_ENUMERIC);
        }
    }
}

static lt_status last_one_leaves(rank *r)
{
    return r->rank < r->size - 1 ? sum_of(r, "bucket 3", 9) : lt_group_leave(r->group);
}

TEST(the_exit_of_a_rank_reaches_the_others)
{
    static const char *const nodes[] = {"000", "012", "011", "001"};
    result results[MOST];
    for (int i = 0; i < 4; i++) {
        on_ranks(&(job){.nodes = nodes[i], .body = last_one_leaves}, results);
        for (int r = 0; r < 2; r++) {
            CHECK_EQ(results[r].status, LT_EPEER);
            CHECK(strstr(results[r].text, "rank 2 exited while rank "));
            CHECK(strstr(results[r].text, " was waiting for it in bucket 3"));
        }
        bool alone = nodes[i][1] != nodes[i][2];
        CHECK_EQ(results[2].status, alone ? LT_OK : LT_EPEER);
    }
}

static bool has_failed(const rank *r)
{
    int who;
    char text[64];
    lt_status code;
    return lt_group_failure(r->group, &who, &code, text, sizeof text);
}

/* The last rank waits until the others time out. It learns of that only from its own node. */
static lt_status last_rank_is_late(rank *r)
{
    lt_group_set_location(r->group, "train.lua:31", 7);
    LT_TRY(lt_group_barrier(r->group, "all are there"));
    for (int i = 0; i < 300 && r->rank == r->size - 1 && !has_failed(r); i++)
        pause_ms(10);
    double begin = lt__seconds();
    lt_status status = sum_of(r, "bucket 3", 9);
    r->result->seconds = lt__seconds() - begin;
    return status;
}

TEST(a_missing_rank_is_named)
{
    result results[MOST];
    on_ranks(&(job){.nodes = "00", .body = last_rank_is_late, .timeout = 0.5}, results);
    CHECK_STR(results[0].text, "rank 1 did not reach bucket 3 within 0.5 s; it was last seen at "
                               "train.lua:31, step 7");
    on_ranks(&(job){.nodes = "011", .body = last_rank_is_late, .timeout = 0.5}, results);
    for (int r = 0; r < 3; r++) {
        CHECK_EQ(results[r].status, LT_EPEER);
        CHECK(strstr(results[r].text, "rank 2 did not reach bucket 3 within 0.5 s; it was last "
                                      "seen at train.lua:31, step 7"));
    }
    on_ranks(&(job){.nodes = "01", .body = last_rank_is_late, .timeout = 0.5}, results);
    CHECK_STR(results[0].text, "rank 1 did not reach bucket 3 within 0.5 s; it was last seen at "
                               "train.lua:31, step 7");
    CHECK(results[0].seconds < 2.5); /* a second longer than within a node */
}

/* The job is stopped and continued: rank 0 by a signal while it waits; rank 1 sleeps. */
static lt_status is_stopped(rank *r)
{
    pid_t pid = getpid();
    LT_TRY(lt_group_broadcast(r->group, "who is to be stopped", &pid, sizeof pid, 0));
    if (r->rank == 1) {
        pause_ms(50);
        kill(pid, SIGSTOP);
        pause_ms(2000);
        kill(pid, SIGCONT);
        pause_ms(50);
    }
    return sum_of(r, "bucket 3", 9);
}

TEST(time_while_the_job_is_stopped_does_not_count)
{
    result results[MOST];
    for (int i = 0; i < 2; i++) {
        on_ranks(&(job){.nodes = i == 0 ? "00" : "01", .body = is_stopped, .timeout = 1}, results);
        CHECK_STR(results[0].text, "");
        CHECK_STR(results[1].text, "");
    }
}

static lt_status last_rank_is_killed(rank *r)
{
    lt_group_set_location(r->group, "train.lua:31", 7);
    LT_TRY(lt_group_barrier(r->group, "all are there"));
    if (r->rank == r->size - 1)
        kill(getpid(), SIGKILL);
    double begin = lt__seconds();
    lt_status status = sum_of(r, "bucket 3", 9);
    r->result->seconds = lt__seconds() - begin;
    return status;
}

/* MPI over TCP does not report lost ranks; the liveness connections do. */
TEST(a_killed_rank_is_detected_quickly)
{
    static const char *const nodes[] = {"00", "01", "000", "001", "011", "012"};
    static const char text[] = "rank 1 was lost while rank 0 was waiting for it in bucket 3; it "
                               "was last seen at train.lua:31, step 7";
    result results[MOST];
    for (int i = 0; i < 12; i++) {
        job j = {.nodes = nodes[i / 2], .body = last_rank_is_killed, .timeout = 5, .silent = i % 2};
        on_ranks(&j, results);
        for (size_t r = 0; r + 1 < strlen(j.nodes); r++) {
            CHECK_EQ(results[r].status, LT_EPEER);
            CHECK(strstr(results[r].text, j.nodes[2] ? "rank 2 was lost" : text));
            CHECK(results[r].seconds < 1);
        }
    }
}

static volatile sig_atomic_t n_signals;
static void count_signal(int number) { n_signals += number == SIGALRM; }

static lt_status get_signals(rank *r)
{
    struct itimerval often = {{0, 20}, {0, 20}}, never = {{0, 0}, {0, 0}};
    signal(SIGALRM, count_signal);
    setitimer(ITIMER_REAL, &often, NULL);
    for (int i = 0; i < 200000 && n_signals < 10000; i++)
        has_failed(r);
    setitimer(ITIMER_REAL, &never, NULL);
    return lt_group_barrier(r->group, "all got signals");
}

TEST(signals_are_not_mistaken_for_an_exit)
{
    result results[MOST];
    on_ranks(&(job){.nodes = "00", .body = get_signals}, results);
    CHECK_STR(results[0].text, "");
    CHECK_STR(results[1].text, "");
}

static lt_status some_poll(rank *r)
{
    int who;
    char text[256];
    lt_status code;
    lt_group_set_location(r->group, "train.lua:31", 7);
    LT_TRY(lt_group_barrier(r->group, "all are there"));
    if (r->rank == r->size - 1)
        kill(getpid(), SIGKILL);
    for (int i = 0; i < 200; i++) {
        pause_ms(10);
        if (lt_group_failure(r->group, &who, &code, text, sizeof text))
            return lt_fail(code, "%s", text);
    }
    return LT_OK;
}

TEST(ranks_that_do_not_wait_detect_a_killed_rank)
{
    result results[MOST];
    static const char *const nodes[] = {"00", "01", "011", "001", "012"};
    for (int i = 0; i < 5; i++) {
        int last = (int)strlen(nodes[i]) - 1;
        on_ranks(&(job){.nodes = nodes[i], .body = some_poll, .timeout = 5, .silent = true},
                 results);
        for (int r = 0; r < last; r++) {
            char text[64];
            snprintf(text, sizeof text, "rank %d was lost", last);
            CHECK_EQ(results[r].status, LT_EPEER);
            CHECK(strncmp(results[r].text, text, strlen(text)) == 0);
        }
        CHECK(strstr(results[0].text, " was lost; it was last seen at train.lua:31, step 7"));
    }
}

static lt_status one_rank_fails(rank *r)
{
    lt_status status = lt_group_barrier(r->group, "all are there");
    if (r->rank == 1) {
        lt_fail(LT_ENUMERIC, "no");
        lt_group_fail(r->group);
        pause_ms(300);
    } else if (status == LT_OK && sum_of(r, "bucket 3", 9) == LT_OK) {
        return LT_OK;
    }
    r->result->spoke = lt_group_is_reporter(r->group, 20);
    r->result->seconds = lt__seconds();
    if (r->result->spoke)
        pause_ms(100);
    return LT_OK;
}

TEST(exactly_one_rank_reports)
{
    result results[MOST];
    on_ranks(&(job){.nodes = "0000", .body = one_rank_fails}, results);
    int speakers = 0, speaker = 0;
    for (int r = 0; r < 4; r++) {
        speakers += results[r].spoke;
        speaker = results[r].spoke ? r : speaker;
    }
    CHECK_EQ(speakers, 1);
    for (int r = 0; r < 4; r++)
        CHECK(r == speaker || results[r].seconds >= results[speaker].seconds + 0.1);
}

/* Runs longer than the timeout, while no other rank waits for it. */
static lt_status runs_on(rank *r)
{
    LT_TRY(lt_group_barrier(r->group, "all are there"));
    if (r->rank == 0)
        pause_ms(1500);
    return LT_OK;
}

TEST(the_others_wait_for_a_rank_that_is_still_running)
{
    result results[MOST];
    for (int i = 0; i < 2; i++) {
        on_ranks(&(job){.nodes = i == 0 ? "00" : "01", .body = runs_on, .timeout = 0.3}, results);
        for (int r = 0; r < 2; r++)
            CHECK_STR(results[r].text, "");
        CHECK(results[1].closed > results[0].closed - 0.7);
    }
}

/* ==== Where memory is not shared ============================================================== */

/* Rank 0 gets a pid namespace: its own pid is a different process to the others. */
static void own_pids(int which)
{
    int status = 0;
    pid_t child;
    if (which != 0)
        return;
    if (unshare(CLONE_NEWPID) != 0 || (child = fork()) < 0)
        _exit(1);
    if (child > 0) {
        waitpid(child, &status, 0);
        _exit(WEXITSTATUS(status));
    }
}

/* Rank 2 has no network for a connection. */
static void own_net(int which)
{
    if (which == 2 && unshare(CLONE_NEWNET) != 0)
        _exit(1);
}

static bool can_unshare(int what)
{
    int status = 1;
    pid_t child = fork();
    if (child == 0)
        _exit(unshare(what) != 0);
    return waitpid(child, &status, 0) == child && status == 0;
}

/* Others wait for it no longer than the timeout. */
TEST(nodes_without_liveness_work_together)
{
    result results[MOST];
    if (!can_unshare(CLONE_NEWNET))
        SKIP("this user cannot create network namespaces");
    on_ranks(&(job){.nodes = "001", .body = check_sums, .before = own_net, .timeout = 1}, results);
    for (int r = 0; r < 3; r++)
        CHECK_STR(results[r].text, "");
}

TEST(processes_without_shared_memory_are_separate_nodes)
{
    result results[MOST];
    if (!can_unshare(CLONE_NEWPID))
        SKIP("this user cannot create pid namespaces");
    on_ranks(&(job){.nodes = "000", .body = check_sums, .before = own_pids}, results);
    for (int r = 0; r < 3; r++) {
        CHECK_STR(results[r].text, "");
        CHECK(results[r].bits != 0 && results[r].bits == results[0].bits);
    }
    on_ranks(&(job){.nodes = "000", .body = tell_local_rank, .before = own_pids}, results);
    for (int r = 0; r < 3; r++)
        CHECK_EQ(results[r].bits, r);
}
