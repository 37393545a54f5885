/* test_pipeline_processes.c - a pipeline of processes, on one node or several: its gradients have
 * the bits of one context, whatever the delays of the stages. */
#include "tests/dist/jobs.h"

#include "tests/dist/pipe_net.h"

static plan current; /* set before the ranks start */
static char wanted[LAYERS][65];

static lt_status train_stage(rank *r)
{
    member m = {.plan = &current, .group = r->group, .rank = r->rank, .body = train};
    LT_TRY(make_net(&m.net, current.dtype));
    run_member(&m);
    for (int i = 0; i < LAYERS && m.status == LT_OK; i++) {
        if (m.grads[i][0] && strcmp(m.grads[i], wanted[i]) != 0)
            m.status = lt_fail(LT_EINVAL, "the gradient of w%d is wrong", i);
        r->result->bits += m.grads[i][0] != '\0';
    }
    destroy_net(&m.net);
    return m.status;
}

TEST(delays_of_processes_change_nothing)
{
    static const char *const nodes[] = {"00", "01", "000", "011", "012", "0000", "0011", "0123"};
    for (int seed = 1; seed <= 20; seed++) {
        job j = {.nodes = nodes[seed % 8], .timeout = 30, .body = train_stage};
        result results[MOST];
        int ranks = (int)strlen(j.nodes), n = 0;
        current = (plan){.stages = ranks,
                         .micro = 5,
                         .lag = seed % 3,
                         .kind = seed % LT_SCHEDULE_KINDS,
                         .delays = (uint64_t)seed,
                         .form = seed / 2 % 2 == 1 ? WIDE : DEEP};
        add_up(&current, wanted);
        on_ranks(&j, results);
        for (int i = 0; i < ranks; i++) {
            if (results[i].status != LT_OK)
                FAIL("seed %d, nodes %s, rank %d: %s", seed, j.nodes, i, results[i].text);
            n += (int)results[i].bits;
        }
        CHECK_EQ(n, LAYERS);
    }
}

typedef struct end {
    int rank;
    int signal; /* that the rank sends itself; 0: it exits */
} end;

static end current_end; /* set before the ranks start */

static lt_status end_early(member *m)
{
    for (int i = 0; i < 2; i++)
        LT_TRY(micro_batch(m, i, (uint64_t)i));
    if (m->rank == current_end.rank && current_end.signal)
        raise(current_end.signal);
    if (m->rank == current_end.rank)
        _exit(0);
    return train_from(m, 2);
}

static lt_status train_until_one_ends(rank *r)
{
    member m = {.plan = &current, .group = r->group, .rank = r->rank, .body = end_early};
    LT_TRY(make_net(&m.net, current.dtype));
    run_member(&m);
    destroy_net(&m.net);
    return m.status;
}

/* Checks that a stage beside the one that has ended names it with its stage. Another stage may
 * first receive the group's message, which names only the rank. On other nodes, it may first notice
 * the end of a stage that has failed because of this one. */
static void check_end(const char *nodes, end e, double timeout)
{
    job j = {.nodes = nodes, .timeout = timeout, .body = train_until_one_ends};
    result results[MOST];
    char name[40], lost[40];
    int named = 0;
    snprintf(name, sizeof name, "rank %d, stage %d", e.rank, e.rank);
    snprintf(lost, sizeof lost, "rank %d was lost", e.rank);
    current = (plan){.stages = 3, .micro = 6, .kind = LT_1F1B};
    current_end = e;
    double began = lt__seconds();
    on_ranks(&j, results);
    for (int i = 0; i < 3; i++) {
        if (i == e.rank)
            continue;
        const char *text = results[i].text;
        CHECK_EQ(results[i].status, LT_EPEER);
        if (strstr(text, name))
            named++;
        else if (abs(i - e.rank) == 1 && strcmp(nodes, "000") == 0)
            FAIL("signal %d of rank %d, rank %d: %s", e.signal, e.rank, i, text);
        else if (!strstr(text, ", stage ") && !strstr(text, lost))
            FAIL("nodes %s, signal %d of rank %d, rank %d: %s", nodes, e.signal, e.rank, i, text);
    }
    CHECK(named > 0);
    CHECK(lt__seconds() - began < 25);
}

static const char *const nodes_of_ends[] = {"000", "011", "012"};

static void check_ends(int signal)
{
    for (int k = 0; k < 9; k++)
        check_end(nodes_of_ends[k / 3], (end){k % 3, signal}, 30);
}

TEST(a_process_that_ends_is_named_with_its_stage) { check_ends(0); }

TEST(a_killed_process_is_named_with_its_stage) { check_ends(SIGKILL); }

TEST(a_stopped_process_is_named_with_its_stage)
{
    for (int k = 0; k < 9; k++)
        check_end(nodes_of_ends[k / 3], (end){k % 3, SIGSTOP}, 2);
}
