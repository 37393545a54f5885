/* test_mpi_transport.c - what only ranks that are processes do: share memory, count their machine's
 * ranks, end when a rank is killed, stopped or has nothing to share. See also test_group.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <sys/time.h>

#include "tests/dist/collectives.h"
#include "tests/dist/jobs.h"

/* Sums in shared memory. In each round a different rank has none. */
static lt_status sum_in_shared_memory(rank *r)
{
    for (int round = 0; round <= r->size; round++) {
        lt_external_memory memory = {0};
        bool shared = r->rank != round &&
                      lt__group_alloc_shared(r->group, LARGE * sizeof(float), &memory);
        float *x = shared ? memory.data : malloc(LARGE * sizeof *x);
        int wrong = shared != (r->rank != round);
        for (int i = 0; i < LARGE; i++)
            x[i] = (float)(i % 1000 + r->rank);
        lt_sum sum = {"numbers", x, LARGE, LT_F32, LT_F32, 1};
        LT_TRY(lt_group_allreduce(r->group, &sum));
        for (int i = 0; i < LARGE; i++)
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
    check_job(&(job){.nodes = "000", .body = sum_in_shared_memory}, results);
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
    return sum_of(r->group, "bucket 3", 9);
}

TEST(time_while_the_job_is_stopped_does_not_count)
{
    result results[MOST];
    check_job(&(job){.nodes = "00", .body = is_stopped, .timeout = 1}, results);
    check_job(&(job){.nodes = "01", .body = is_stopped, .timeout = 1}, results);
}

static lt_status kill_last(rank *r)
{
    lt_group_set_location(r->group, "train.lua:31", 7);
    LT_TRY(lt_group_barrier(r->group, "all are there"));
    if (r->rank == r->size - 1)
        kill(getpid(), SIGKILL);
    return LT_OK;
}

static lt_status last_rank_is_killed(rank *r)
{
    LT_TRY(kill_last(r));
    double begin = lt__seconds();
    lt_status status = sum_of(r->group, "bucket 3", 9);
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
        failure_of(r->group);
    setitimer(ITIMER_REAL, &never, NULL);
    return lt_group_barrier(r->group, "all got signals");
}

TEST(signals_are_not_mistaken_for_an_exit)
{
    result results[MOST];
    check_job(&(job){.nodes = "00", .body = get_signals}, results);
}

static lt_status some_poll(rank *r)
{
    int who;
    char text[256];
    lt_status code;
    LT_TRY(kill_last(r));
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
    } else if (status == LT_OK && sum_of(r->group, "bucket 3", 9) == LT_OK) {
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
        check_job(&(job){.nodes = i == 0 ? "00" : "01", .body = runs_on, .timeout = 0.3}, results);
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

static lt_status add_up(rank *r)
{
    adder a = adder_of(r->group, add_in_group, false);
    lt_status status = check_sums(&a);
    r->result->bits = a.bits;
    return status;
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
    check_job(&(job){.nodes = "001", .body = add_up, .before = own_net, .timeout = 1}, results);
}

TEST(processes_without_shared_memory_are_separate_nodes)
{
    result results[MOST];
    if (!can_unshare(CLONE_NEWPID))
        SKIP("this user cannot create pid namespaces");
    check_job(&(job){.nodes = "000", .body = add_up, .before = own_pids}, results);
    for (int r = 0; r < 3; r++)
        CHECK(results[r].bits != 0 && results[r].bits == results[0].bits);
    on_ranks(&(job){.nodes = "000", .body = tell_local_rank, .before = own_pids}, results);
    for (int r = 0; r < 3; r++)
        CHECK_EQ(results[r].bits, r);
}
