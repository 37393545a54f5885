/* test_pipeline.c - the order of the passes of a pipeline, simulated steps, and partitions. */
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dist/pipeline/costs.h"
#include "tests/dist/pick.h"
#include "tests/lt_test.h"

/* ==== Schedules =============================================================================== */

enum { STAGES = 5, MICRO = 8, PASSES = 3, LOG = STAGES * MICRO * PASSES };

typedef struct pass {
    int stage;
    lt_action action;
    int micro;
    double time;
} pass;

typedef struct history {
    pass log[LOG];
    int n;
} history;

static void note(void *ud, int stage, lt_action action, int micro, double time)
{
    history *h = ud;
    CHECK(h->n < LOG);
    h->log[h->n++] = (pass){stage, action, micro, time};
}

static lt_pipe make(lt_schedule_kind kind, int stages, int micro, int lag, lt_pipe_stage *stage,
                    double *bytes)
{
    for (int i = 0; i < stages; i++) {
        stage[i] = (lt_pipe_stage){pick(9), pick(9), pick(9), pick(9), pick(3)};
        for (int j = i + 1; j < stages; j++)
            bytes[i * stages + j] = j == i + 1 || pick(3) == 0 ? 1 + pick(20) : 0;
    }
    return (lt_pipe){kind, stages, micro, lag, stage, bytes, {pick(3), 1 + pick(5)},
                     NULL, 0,      NULL,  NULL};
}

/* The action that comes at place k of a stage's log, without the passes for weights. */
static pass nth(const history *h, int stage, int k)
{
    for (int i = 0; i < h->n; i++)
        if (h->log[i].stage == stage && h->log[i].action != LT_WEIGHTS && k-- == 0)
            return h->log[i];
    FAIL("stage %d has too few passes", stage);
    return h->log[0];
}

/* Checks that each stage runs each pass of each micro-batch once, in order, and that no pass runs
 * before those that it needs. */
static void check_history(const lt_pipe *p, const history *h)
{
    int done[STAGES][PASSES] = {0};
    for (int i = 0; i < h->n; i++) {
        const pass *a = &h->log[i];
        int *mine = done[a->stage];
        CHECK_EQ(a->micro, mine[a->action]);
        mine[a->action]++;
        if (a->action == LT_FORWARD && a->stage > 0)
            CHECK(done[a->stage - 1][LT_FORWARD] > a->micro);
        if (a->action == LT_BACKWARD && a->stage + 1 < p->stages)
            CHECK(done[a->stage + 1][LT_BACKWARD] > a->micro);
        CHECK(mine[LT_FORWARD] >= mine[LT_BACKWARD] && mine[LT_BACKWARD] >= mine[LT_WEIGHTS]);
    }
    for (int i = 0; i < p->stages; i++) {
        CHECK_EQ(done[i][LT_FORWARD], p->micro);
        CHECK_EQ(done[i][LT_BACKWARD], p->micro);
        CHECK_EQ(done[i][LT_WEIGHTS], p->kind == LT_ZERO_BUBBLE ? p->micro : 0);
    }
}

TEST(every_schedule_ends_within_its_memory)
{
    for (int stages = 1; stages <= STAGES; stages++)
        for (int micro = 1; micro <= MICRO; micro++)
            for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++)
                for (int lag = 0; lag <= 3; lag++)
                    for (int k = 0; k < 5; k++) {
                        lt_pipe_stage stage[STAGES];
                        double bytes[STAGES * STAGES] = {0};
                        lt_pipe p = make(kind, stages, micro, lag, stage, bytes);
                        lt_pipe_result r;
                        history h = {.n = 0};
                        CHECK_OK(lt__pipe_simulate(&p, note, &h, &r));
                        check_history(&p, &h);
                        for (int i = 0; i < stages; i++) {
                            lt_schedule s = {kind, stages, i, lag};
                            CHECK(r.in_memory[i] <= lt__schedule_in_memory(&s, micro));
                        }
                    }
}

/* The order of forward and backward passes depends on the schedule, not on times. */
TEST(times_do_not_change_the_order_of_passes)
{
    for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++) {
        history h[2] = {{.n = 0}, {.n = 0}};
        for (int k = 0; k < 2; k++) {
            lt_pipe_stage stage[4];
            double bytes[16] = {0};
            lt_pipe p = make(kind, 4, MICRO, 1, stage, bytes);
            lt_pipe_result r;
            CHECK_OK(lt__pipe_simulate(&p, note, &h[k], &r));
        }
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 2 * MICRO; k++) {
                pass a = nth(&h[0], i, k), b = nth(&h[1], i, k);
                CHECK(a.action == b.action && a.micro == b.micro);
            }
    }
}

/* An optimizer step of unknown length: the backward passes that are left run when it ends. */
TEST(the_number_of_micro_batches_may_be_unknown)
{
    for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++) {
        lt_schedule s = {kind, 3, 1, 1};
        lt_stage_state t = {.micro = INT_MAX, .inputs = INT_MAX, .grads = INT_MAX};
        for (lt_action a; t.forward < 10;) {
            a = lt__schedule_next(&s, &t);
            CHECK(a != LT_WAIT && a != LT_DONE);
            t.forward += a == LT_FORWARD;
            t.backward += a == LT_BACKWARD;
            t.weights += a == LT_WEIGHTS;
            CHECK(t.forward - t.backward <= lt__schedule_in_flight(&s, INT_MAX));
        }
        t.micro = 10;
        for (lt_action a; (a = lt__schedule_next(&s, &t)) != LT_DONE;) {
            t.backward += a == LT_BACKWARD;
            t.weights += a == LT_WEIGHTS;
            CHECK(a == LT_BACKWARD || a == LT_WEIGHTS);
        }
        CHECK_EQ(t.backward, 10);
        CHECK_EQ(t.weights, kind == LT_ZERO_BUBBLE ? 10 : 0);
    }
}

/* ==== Simulated steps ========================================================================= */

static double simulate(lt_schedule_kind kind, int stages, int micro, lt_pipe_result *r)
{
    lt_pipe_stage stage[STAGES];
    double bytes[STAGES * STAGES] = {0};
    lt_pipe p = make(kind, stages, micro, 0, stage, bytes);
    for (int i = 0; i < stages; i++) {
        stage[i] = (lt_pipe_stage){1, 1, 1, 0, 0};
        for (int j = 0; j < stages; j++)
            bytes[i * stages + j] = j == i + 1 ? 1e-9 : 0;
    }
    p.link = (lt_pipe_link){0, 1};
    CHECK_OK(lt__pipe_simulate(&p, NULL, NULL, r));
    return r->seconds;
}

/* With passes of 1 s and messages that take no time, a step of P stages and M micro-batches takes
 * 3 (M + P - 1) s. With split backward passes, it takes P - 1 s less. */
TEST(idle_time_is_that_of_the_literature)
{
    for (int stages = 1; stages <= STAGES; stages++)
        for (int micro = stages; micro <= MICRO; micro++) {
            lt_pipe_result r;
            double all = 3.0 * (micro + stages - 1);
            CHECK(fabs(simulate(LT_GPIPE, stages, micro, &r) - all) < 1e-6);
            CHECK(fabs(simulate(LT_1F1B, stages, micro, &r) - all) < 1e-6);
            for (int i = 0; i < stages; i++)
                CHECK(fabs(r.busy[i] - 3.0 * micro) < 1e-9 && r.in_memory[i] <= stages - i);
            CHECK(fabs(simulate(LT_ZERO_BUBBLE, stages, micro, &r) - (all - (stages - 1))) < 1e-6);
        }
}

/* A simulation with a limit gives the same time, or ends early if the step takes longer. */
TEST(a_limit_only_ends_simulations_of_slower_steps)
{
    int ended = 0;
    for (int k = 0; k < 500; k++) {
        lt_pipe_stage stage[STAGES];
        double bytes[STAGES * STAGES] = {0};
        lt_pipe p = make(pick(LT_SCHEDULE_KINDS), 1 + pick(STAGES), MICRO, pick(3), stage, bytes);
        lt_pipe_result r, limited;
        CHECK_OK(lt__pipe_simulate(&p, NULL, NULL, &r));
        p.limit = r.seconds;
        CHECK_OK(lt__pipe_simulate(&p, NULL, NULL, &limited));
        CHECK(limited.seconds == r.seconds);
        p.limit = r.seconds * 0.9;
        CHECK_OK(lt__pipe_simulate(&p, NULL, NULL, &limited));
        CHECK(limited.seconds == r.seconds || isinf(limited.seconds));
        ended += isinf(limited.seconds);
    }
    CHECK(ended > 250);
}

/* By hand: the first message arrives at 2 + 1 s, stage 1 computes 2 * 3 s. Without gradients, stage
 * 0 only waits for itself. */
TEST(gradients_may_have_other_sizes_than_values)
{
    lt_pipe_stage stage[2] = {{1, 1, 1, 0, 0}, {1, 1, 1, 0, 0}};
    double bytes[4] = {0, 1, 0, 0}, grads[4] = {0, 0, 0, 0};
    lt_pipe p = {LT_GPIPE, 2, 2, 0, stage, bytes, {1, 1}, grads, 0, NULL, NULL};
    lt_pipe_result r;
    CHECK_OK(lt__pipe_simulate(&p, NULL, NULL, &r));
    CHECK_NEAR(r.seconds, 3 + 6, 1e-12);
    grads[1] = 3; /* stage 1: B0 ends at 7, B1 at 9; the second gradient arrives at 13 + 1 s */
    CHECK_OK(lt__pipe_simulate(&p, NULL, NULL, &r));
    CHECK_NEAR(r.seconds, 14 + 2, 1e-12);
}

TEST(invalid_pipelines_are_refused)
{
    lt_pipe_stage stage[2] = {{1, 1, 1, 0, 0}, {1, 1, 1, 0, 0}};
    double bytes[4] = {0, 1, 0, 0};
    const lt_pipe good = {LT_1F1B, 2, 4, 0, stage, bytes, {0, 1}, NULL, 0, NULL, NULL};
    lt_pipe bad[] = {good, good, good, good, good};
    lt_pipe_result r;
    bad[0].stages = 0;
    bad[1].stages = LT_MAX_STAGES + 1;
    bad[2].micro = 0;
    bad[3].lag = -1;
    bad[4].link.bytes_per_s = 0;
    CHECK_OK(lt__pipe_simulate(&good, NULL, NULL, &r));
    for (int i = 0; i < 5; i++)
        CHECK_EQ(lt__pipe_simulate(&bad[i], NULL, NULL, &r), LT_EINVAL);
}

/* ==== Partitions ============================================================================== */

enum { UNITS = 12, CHAINS = 10000 };

typedef struct chain { /* costs of units that are blocks, for a partition */
    lt_pipe_job job;
    lt_costs costs;
    lt_unit_costs before[UNITS + 1];
    int begin[UNITS + 1];
    double cut_bytes[UNITS];
} chain;

static void chain_open(chain *c, int micro)
{
    *c = (chain){.job.link.bytes_per_s = 4};
    c->costs = (lt_costs){.job = &c->job,
                          .micro = micro,
                          .before = c->before,
                          .begin = c->begin,
                          .cut_bytes = c->cut_bytes};
}

static void chain_add(chain *c, double seconds, double cut_bytes, double saved, double state)
{
    int i = c->costs.n_blocks++;
    c->begin[i + 1] = i + 1;
    c->cut_bytes[i] = cut_bytes;
    c->before[i + 1] = c->before[i];
    c->before[i + 1].inputs += seconds;
    c->before[i + 1].saved += saved;
    c->before[i + 1].state += state;
}

/* The time of the slowest stage or link; infinity if a stage does not fit. */
static double slowest_of(const chain *c, const lt_schedule *schedule, double memory,
                         const int *first)
{
    double slowest = 0;
    for (int k = 0; k < schedule->stages; k++) {
        lt_schedule s = {schedule->kind, schedule->stages, k, schedule->lag};
        const lt_unit_costs *from = &c->before[first[k]], *to = &c->before[first[k + 1]];
        double cut = k > 0 ? c->cut_bytes[first[k]] : 0;
        double saved = (to->saved - from->saved + cut) * lt__schedule_in_memory(&s, c->costs.micro);
        if (memory > 0 && to->state - from->state + saved > memory)
            return INFINITY;
        slowest = fmax(slowest, fmax(to->inputs - from->inputs, cut / c->job.link.bytes_per_s));
    }
    return slowest;
}

/* The best of all partitions of which stages 0 to k - 1 are given. */
static double best_of_all(const chain *c, const lt_schedule *s, double memory, int *first, int k)
{
    double best = INFINITY;
    int n = c->costs.n_blocks;
    first[s->stages] = n;
    if (k == s->stages)
        return slowest_of(c, s, memory, first);
    for (int i = k == 0 ? 0 : first[k - 1] + 1; i < (k == 0 ? 1 : n); i++) {
        first[k] = i;
        best = fmin(best, best_of_all(c, s, memory, first, k + 1));
    }
    return best;
}

TEST(a_partition_is_as_good_as_the_best_of_all)
{
    int too_large = 0;
    for (int k = 0; k < CHAINS; k++) {
        chain c;
        int n = 1 + pick(UNITS), first[UNITS + 1], given[UNITS + 1];
        lt_schedule s = {pick(LT_SCHEDULE_KINDS), 1 + pick(n < 5 ? n : 5), 0, pick(3)};
        double memory = pick(2) * (100 + pick(600));
        bool fits;
        chain_open(&c, 1 + pick(8));
        for (int i = 0; i < n; i++)
            chain_add(&c, pick(50), pick(200), pick(10), pick(60));
        double best = best_of_all(&c, &s, memory, given, 0);
        CHECK_OK(lt__partition(&c.costs, &s, memory, first, &fits));
        too_large += !fits;
        CHECK_EQ(fits, isfinite(best));
        if (!fits)
            continue;
        CHECK(slowest_of(&c, &s, memory, first) == best);
        CHECK(first[0] == 0 && first[s.stages] == n);
    }
    CHECK(too_large > 100 && too_large < CHAINS / 2);
}

TEST(impossible_partitions)
{
    chain c;
    int first[4];
    bool fits;
    chain_open(&c, 1);
    chain_add(&c, 1, 1, 1, 1);
    chain_add(&c, 1, 1, 1, 1);
    CHECK_OK(lt__partition(&c.costs, &(lt_schedule){LT_1F1B, 3, 0, 0}, 0, first, &fits));
    CHECK(!fits);
    CHECK_OK(lt__partition(&c.costs, &(lt_schedule){LT_1F1B, 2, 0, 0}, 1, first, &fits));
    CHECK(!fits);
    CHECK_OK(lt__partition(&c.costs, &(lt_schedule){LT_1F1B, 2, 0, 0}, 5, first, &fits));
    CHECK(fits && first[1] == 1);
}
