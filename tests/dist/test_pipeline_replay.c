/* test_pipeline_replay.c - each stage of a pipeline logs its passes, and what it had to wait for.
 * The function that orders the passes of simulated steps, fed with the recorded arrivals, repeats
 * the passes. */
#include <limits.h>

#include "dist/pipeline/internal.h"
#include "tests/dist/pipe_net.h"

enum { MOST_EVENTS = 512, MICRO = 7 };

typedef struct history { /* of a stage in one step */
    struct {
        int what, micro; /* see struct lt_pipeline */
    } events[MOST_EVENTS];
    int n, waits;
} history;

static void note(void *ud, int what, int micro)
{
    history *h = ud;
    CHECK(h->n < MOST_EVENTS && micro <= MICRO);
    h->events[h->n].what = what;
    h->events[h->n++].micro = micro;
    h->waits += what == LT_WAIT;
}

/* ud: (stages) the histories. */
static lt_status take_step(member *m)
{
    m->pipeline->log = note;
    m->pipeline->log_ud = (history *)m->ud + m->rank;
    for (int i = 0; i < MICRO; i++)
        LT_TRY(micro_batch(m, i, (uint64_t)i));
    return lt_pipeline_drain(m->pipeline);
}

/* The number of micro-batches, the first ones, all of whose messages of a kind have arrived among
 * the first n events. */
static int count_arrived(const history *h, int n, int kind)
{
    int missing[MICRO + 1] = {0}, complete = 0;
    for (int i = n; i < h->n; i++)
        missing[h->events[i].micro] += h->events[i].what == kind;
    while (complete < MICRO && missing[complete] == 0)
        complete++;
    return complete;
}

static void replay(const plan *p, int stage, const history *h)
{
    lt_schedule s = {p->kind, p->stages, stage, p->lag};
    lt_stage_state t = {.micro = INT_MAX};
    for (int i = 0; i < h->n; i++) {
        int what = h->events[i].what;
        t.inputs = count_arrived(h, i, LT_PIPE_INPUT);
        t.grads = count_arrived(h, i, LT_PIPE_GRAD);
        if (what == LT_DONE)
            t.micro = h->events[i].micro;
        if (what > LT_WAIT)
            continue;
        lt_action next = lt__schedule_next(&s, &t);
        if (next != (lt_action)what)
            FAIL("schedule %s, lag %d, %d stages: stage %d, event %d: action %d, replayed as %d",
                 lt_schedule_name(p->kind), p->lag, p->stages, stage, i, what, (int)next);
        t.forward += what == LT_FORWARD;
        t.backward += what == LT_BACKWARD;
        t.weights += what == LT_WEIGHTS;
    }
    CHECK_EQ(lt__schedule_next(&s, &t), LT_DONE);
    CHECK(t.micro == MICRO && t.forward == MICRO && t.backward == MICRO);
    CHECK_EQ(t.weights, p->kind == LT_ZERO_BUBBLE ? MICRO : 0);
}

TEST(recorded_arrivals_repeat_the_actions)
{
    int waits = 0;
    for (int k = 0; k < 90; k++) {
        static history histories[LAYERS];
        plan p = {.stages = 1 + k % LAYERS,
                  .micro = MICRO,
                  .lag = k / 4 % 4,
                  .kind = k % LT_SCHEDULE_KINDS,
                  .delays = (uint64_t)k,
                  .form = k % 5 == 0 ? WIDE : DEEP};
        member members[MOST_RANKS];
        memset(histories, 0, sizeof histories);
        check_run(&p, p.stages, take_step, histories, members);
        for (int i = 0; i < p.stages; i++) {
            replay(&p, i, &histories[i]);
            waits += histories[i].waits;
        }
    }
    CHECK(waits > 100);
}
