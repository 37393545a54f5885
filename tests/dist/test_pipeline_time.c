/* test_pipeline_time.c - a pipeline whose ops sleep takes as long as the simulation says, to 5 %.
 * Timed, so it runs with the long tests only, and a case may be repeated on a busy machine. */
#include <math.h>

#include "dist/pipeline/simulate.h"
#include "ops/kernel.h"
#include "tests/dist/pipe_net.h"

enum { MICRO = 8, TRIES = 5 };

/* Seconds of each layer; one layer is a stage. */
static const lt_pipe_stage times[LAYERS] = {
    {.forward = 0.008, .inputs = 0, .weights = 0.010}, /* the images need no gradient */
    {.forward = 0.012, .inputs = 0.009, .weights = 0.008},
    {.forward = 0.006, .inputs = 0.014, .weights = 0.012},
    {.forward = 0.010, .inputs = 0.008, .weights = 0.006}};

static void nap(double seconds) { nanosleep(&(struct timespec){0, (long)(seconds * 1e9)}, NULL); }

static const lt_pipe_stage *times_of(const lt_call *c) { return &times[c->opt[0].i[0]]; }

static lt_status nap_shape(lt_call *c)
{
    lt__spec_like(c, 0, c->in[0]);
    return LT_OK;
}

static lt_status nap_fwd(lt_call *c)
{
    nap(times_of(c)->forward);
    memcpy(c->out[0]->data, c->in[0]->data, sizeof(float) * (size_t)c->in[0]->count);
    return LT_OK;
}

static lt_status nap_bwd(lt_call *c)
{
    if (c->d_in[0]) {
        nap(times_of(c)->inputs);
        memcpy(c->d_in[0]->data, c->d_out[0]->data, sizeof(float) * (size_t)c->d_in[0]->count);
    }
    if (c->d_in[1]) {
        nap(times_of(c)->weights);
        memset(c->d_in[1]->data, 0, sizeof(float) * (size_t)c->d_in[1]->count);
    }
    return LT_OK;
}

static const lt_op nap_op = {.sig = "nap(x, w; layer=0)",
                             .doc = "x, after a while.",
                             .weights = 1 << 1,
                             .shape = nap_shape,
                             .fwd = nap_fwd,
                             .bwd = nap_bwd};

/* A parameter of a stage; see stage_of(). */
static lt_tensor *param_of(const net *n, int stage, int stages)
{
    return n->w[(stage * LAYERS + stages - 1) / stages];
}

static lt_status nap_micro_batch(member *m, int i)
{
    net *n = &m->net;
    lt_tensor *x, *y;
    LT_TRY(lt_pipeline_set_micro_batch(m->pipeline, i, MICRO, 1));
    LT_TRY(lt_scope_push(n->ctx));
    LT_TRY(make_rows(n, (uint64_t)i, &x, &y));
    for (int k = 0; x && k < m->plan->stages; k++) {
        char layer[] = {'l', 'a', 'y', 'e', 'r', '=', (char)('0' + k), 0};
        x = noted(n, lt_run(n->ctx, "nap", layer, x, param_of(n, k, m->plan->stages), NULL));
    }
    lt_tensor *loss = x ? noted(n, lt_run(n->ctx, "cross_entropy", NULL, x, y, NULL)) : NULL;
    lt_status status = loss ? lt_backward(loss, NULL) : lt_errcode();
    lt_pipeline_pop_scope(m->pipeline);
    return status;
}

/* ud: (stages) seconds of a step. */
static lt_status time_step(member *m)
{
    LT_TRY(lt_op_register(m->net.ctx, &nap_op));
    for (int step = 0; step < 2; step++) { /* the first one allocates memory */
        LT_TRY(lt_group_barrier(m->group, "a timed step"));
        double began = lt__seconds();
        for (int i = 0; i < MICRO; i++)
            LT_TRY(nap_micro_batch(m, i));
        LT_TRY(lt_pipeline_drain(m->pipeline));
        ((double *)m->ud)[m->rank] = lt__seconds() - began;
    }
    return LT_OK;
}

static double simulated(const plan *p)
{
    double bytes[LAYERS * LAYERS] = {0};
    lt_pipe_result result;
    for (int i = 0; i + 1 < p->stages; i++)
        bytes[i * p->stages + i + 1] = sizeof(float) * ROWS * WIDTH;
    CHECK_OK(lt__pipe_simulate(&(lt_pipe){.kind = p->kind,
                                          .stages = p->stages,
                                          .micro = MICRO,
                                          .lag = p->lag,
                                          .stage = times,
                                          .bytes = bytes,
                                          .link = {20e-6, 1e9}},
                               NULL, NULL, &result));
    return result.seconds;
}

static double executed(const plan *p)
{
    double seconds[LAYERS] = {0}, slowest = 0;
    member members[MOST_RANKS];
    check_run(p, p->stages, time_step, seconds, members);
    for (int i = 0; i < p->stages; i++)
        slowest = fmax(slowest, seconds[i]);
    return slowest;
}

static void check(const plan *p)
{
    double wanted = simulated(p), least = INFINITY;
    for (int i = 0; i < TRIES && least > wanted * 1.05; i++)
        least = fmin(least, executed(p));
    if (fabs(least / wanted - 1) > 0.05)
        FAIL("%d stages, schedule %s, lag %d: simulated %.4f s, executed %.4f s", p->stages,
             lt_schedule_name(p->kind), p->lag, wanted, least);
}

TEST(executed_steps_take_the_simulated_time)
{
    if (!getenv("LUATRAIN_TEST_SLOW"))
        SKIP("timed");
    for (int stages = 2; stages <= LAYERS; stages++)
        for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++)
            for (int lag = 0; lag <= 2; lag += 2)
                check(&(plan){.stages = stages, .micro = MICRO, .lag = lag, .kind = kind});
}
