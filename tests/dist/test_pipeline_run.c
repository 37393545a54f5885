/* test_pipeline_run.c - a pipeline of threads: its gradients have the bits of one context that adds
 * up the same micro-batches, under each schedule and whatever the delays of the stages. */
#include "tests/dist/pipe_net.h"

static void check(const plan *p) { check_against_one(p, train); }

/* Checks plans like this one: all numbers of stages from p.stages on, all schedules, and all lags
 * up to p.lag. */
static void check_schedules(plan p)
{
    int last = p.lag;
    for (; p.stages <= LAYERS; p.stages++)
        for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++)
            for (p.lag = 0; p.lag <= last; p.lag++) {
                p.kind = kind;
                check(&p);
            }
}

TEST(each_schedule_has_the_bits_of_one_context)
{
    for (int micro = 1; micro <= 5; micro += 2)
        check_schedules((plan){.stages = 1, .micro = micro, .lag = 2});
}

/* With four stages, the last three use the value. */
TEST(a_value_that_several_stages_use)
{
    check_schedules((plan){.stages = 2, .micro = 5, .lag = 3, .form = WIDE});
}

/* All gradients of the value return to its stage, which must add them up as one process does: that
 * of the last use first. */
TEST(a_value_that_the_last_stage_uses_first)
{
    check_schedules((plan){.stages = LAYERS, .micro = 5, .form = FAN});
}

TEST(micro_batches_with_shares)
{
    check_schedules((plan){.stages = 1, .micro = 4, .lag = 1, .shares = true});
}

TEST(f64)
{
    check_schedules((plan){.stages = 1, .micro = 1, .lag = 1, .dtype = LT_F64});
    check_schedules((plan){.stages = 1, .micro = 4, .form = WIDE, .dtype = LT_F64});
    check_schedules((plan){.stages = 1, .micro = 7, .lag = 1, .shares = true, .dtype = LT_F64});
}

/* In the long tests, there are 500 seeds. */
TEST(delays_change_nothing)
{
    uint64_t seeds = getenv("LUATRAIN_TEST_SLOW") ? 500 : 20;
    for (uint64_t seed = 1; seed <= seeds; seed++)
        check(&(plan){.stages = 2 + (int)(seed % 3),
                      .micro = 6,
                      .lag = (int)(seed % 4),
                      .kind = seed % 5 == 0 ? LT_1F1B : LT_ZERO_BUBBLE,
                      .delays = seed,
                      .form = seed / 3 % 2 == 1 ? WIDE : DEEP});
}

/* Rank 1 leaves when it has got a gradient, so all ranks have begun. */
static lt_status leave(member *m)
{
    for (int i = 0; i < 2; i++)
        LT_TRY(micro_batch(m, i, 0));
    return m->rank == 1 ? lt_fail(LT_EUSAGE, "it leaves") : train_from(m, 2);
}

TEST(a_stage_that_fails_is_named)
{
    member members[MOST_RANKS];
    run(&(plan){.stages = 3, .micro = 4, .kind = LT_1F1B}, 3, leave, NULL, members);
    CHECK_EQ(members[1].status, LT_EUSAGE);
    for (int i = 0; i < 3; i += 2) {
        CHECK_EQ(members[i].status, LT_EPEER);
        if (!strstr(members[i].text, "stage 1 of the pipeline"))
            FAIL("rank %d: %s", i, members[i].text);
    }
}

/* ==== Hooks =================================================================================== */

typedef struct seen { /* by the hook of a parameter */
    lt_sha256 grads;  /* a digest of all gradients that it got */
    int calls;
    char hex[65]; /* the digest, at the end */
} seen;

/* Halves the gradient, to which the next micro-batch adds its own. */
static lt_status see(void *ud, lt_tensor *x, lt_tensor *grad)
{
    seen *s = ud;
    float *at = lt_data(grad);
    int64_t n = lt_count(grad);
    CHECK_EQ(n, lt_count(x));
    lt_sha256_add(&s->grads, at, (size_t)n * sizeof *at);
    s->calls++;
    for (int64_t i = 0; i < n; i++)
        at[i] /= 2;
    return LT_OK;
}

static lt_status add_hooks(net *n, seen s[LAYERS])
{
    for (int i = 0; i < LAYERS; i++) {
        s[i] = (seen){.calls = 0};
        lt_sha256_begin(&s[i].grads);
        LT_TRY(lt_on_grad(n->w[i], see, &s[i], NULL));
    }
    return LT_OK;
}

static void end_hooks(seen s[LAYERS])
{
    for (int i = 0; i < LAYERS; i++)
        lt_sha256_end(&s[i].grads, s[i].hex);
}

/* As in a script, each rank adds hooks to all parameters. ud: (ranks, LAYERS) */
static lt_status train_with_hooks(member *m)
{
    seen *s = (seen *)m->ud + m->rank * LAYERS;
    LT_TRY(add_hooks(&m->net, s));
    lt_status status = train(m);
    end_hooks(s);
    return status;
}

/* Checks that hooks see the same gradients on a rank as in one context. Returns the number of hooks
 * that ran on the rank. */
static int check_hooks(const seen got[LAYERS], const seen wanted[LAYERS])
{
    int n = 0;
    for (int i = 0; i < LAYERS; i++)
        if (got[i].calls > 0) {
            CHECK_EQ(got[i].calls, wanted[i].calls);
            CHECK_STR(got[i].hex, wanted[i].hex);
            n++;
        }
    return n;
}

static void check_with_hooks(const plan *p)
{
    net n;
    seen wanted[LAYERS], got[MOST_RANKS][LAYERS];
    char grads[LAYERS][65];
    member members[MOST_RANKS];
    int n_hooks = 0;
    CHECK_OK(make_net(&n, p->dtype));
    CHECK_OK(lt_params_place(n.params));
    CHECK_OK(add_hooks(&n, wanted));
    add_up_in(&n, p, grads);
    end_hooks(wanted);
    destroy_net(&n);
    for (int i = 0; i < LAYERS; i++)
        CHECK_EQ(wanted[i].calls, STEPS * p->micro);
    check_run(p, p->stages, train_with_hooks, got, members);
    for (int i = 0; i < p->stages; i++)
        n_hooks += check_hooks(got[i], wanted);
    CHECK_EQ(n_hooks, LAYERS);
    check_grads(members, p->stages, grads);
}

TEST(hooks_see_the_gradients_of_one_context)
{
    for (int stages = 1; stages <= LAYERS; stages++)
        for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++)
            for (int form = DEEP; form <= (stages == LAYERS ? FAN : WIDE); form++)
                check_with_hooks(&(plan){.stages = stages,
                                         .micro = 2 + form,
                                         .lag = form,
                                         .kind = kind,
                                         .form = form,
                                         .shares = form == WIDE});
}

static lt_status refuse(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)ud, (void)x, (void)grad;
    return lt_fail(LT_EINVAL, "the hook refuses");
}

static lt_status fail_in_hook(member *m)
{
    lt_status status = LT_OK;
    if (m->rank == 1)
        LT_TRY(lt_on_grad(m->net.w[LAYERS - 1], refuse, NULL, NULL));
    for (int i = 0; i < m->plan->micro && status == LT_OK; i++)
        status = micro_batch(m, i, (uint64_t)i);
    if (status == LT_OK)
        status = lt_pipeline_drain(m->pipeline);
    for (int i = 0; i < 2 && m->rank == 1; i++)
        CHECK_FAILS(lt_pipeline_drain(m->pipeline), LT_EINVAL, "the hook refuses");
    return status;
}

TEST(a_failed_pass_fails_again)
{
    for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++) {
        member members[MOST_RANKS];
        run(&(plan){.stages = 2, .micro = 3, .lag = 1, .kind = kind}, 2, fail_in_hook, NULL,
            members);
        CHECK_STR(members[1].text, "the hook refuses");
        CHECK_EQ(members[0].status, LT_EPEER);
    }
}

static int far_stage(void *ud, const char *name, const lt_tensor *x)
{
    (void)ud, (void)x;
    return strcmp(name, "w2") == 0 ? 2 : 0;
}

static lt_status open_wrongly(member *m)
{
    lt_pipeline_config config = {.stages = 1, .stage_of = far_stage};
    lt_params *params = lt_params_new(m->net.ctx);
    CHECK_OK(params ? LT_OK : lt_errcode());
    lt_pipeline_free(m->pipeline);
    m->pipeline = NULL;
    config.kind = LT_SCHEDULE_KINDS;
    CHECK(!lt_pipeline_new(m->net.ctx, m->group, &config) && lt_errcode() == LT_EINVAL);
    config.kind = LT_1F1B;
    config.lag = -1;
    CHECK(!lt_pipeline_new(m->net.ctx, m->group, &config) && lt_errcode() == LT_EINVAL);
    config.lag = 0;
    config.stages = 2;
    CHECK(!lt_pipeline_new(m->net.ctx, m->group, &config) && lt_errcode() == LT_EUSAGE);
    config.stages = 1;
    m->pipeline = lt_pipeline_new(m->net.ctx, m->group, &config);
    CHECK(m->pipeline != NULL);
    lt_tensor *w =
        lt_param_new(m->net.ctx, LT_F32, 1, (int64_t[]){2}, (lt_init){LT_INIT_CONSTANT, 0, 0});
    CHECK_OK(lt_params_add(params, "w2", w));
    CHECK_FAILS(lt_params_place(params), LT_EINVAL, "stage_of() returned stage 2 for w2");
    lt_release(w);
    lt_params_free(params);
    return LT_OK;
}

TEST(invalid_schedules_and_stages)
{
    member members[MOST_RANKS];
    check_run(&(plan){.stages = 1, .micro = 1}, 1, open_wrongly, NULL, members);
}
