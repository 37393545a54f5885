/* test_delay.c - reducers with a delay: a step applies the sums of the step before. The reference
 * is one context that computes the gradients of all replicas, adds them up, and keeps the sums for
 * the next step. */
#include <stdatomic.h>

#include "autograd/step.h"
#include "dist/sum.h"
#include "tests/dist/pipe_net.h"

enum { LONG = 5, ROWS_OF_STEP = 12, NONE = -1, DISCARDED = 1 };

typedef struct job {
    plan plan;
    lt_dtype wire; /* LT_F32 or LT_BF16 */
    int discards;  /* in this step, the gradient of layer DISCARDED is discarded; or NONE */
    int freezes;   /* from this step on, the layer is frozen; 0: never */
    bool saves;    /* each sum is saved and restored between steps */
    bool is_plain; /* two whole nets, without a pipeline */
    char hex[MOST_RANKS][65];
} job;

static lt_status take_step(lt_optim *o)
{
    lt_opt opts[LT_MAX_OPT];
    LT_TRY(lt_opts_parse(&lt_optim_def(o)->schema, "lr=0.1 momentum=0.9 weight_decay=0.01", opts));
    return lt_optim_step(o, (const lt_opt *const[]){opts}, 1, NULL);
}

/* The rows of a replica: a third or two thirds, in turn. */
static int rows_of(int step, int r) { return ((r + step) % REPLICAS + 1) * ROWS_OF_STEP / 3; }

static void set_rows(lt_reducer *reducer, int step, int r)
{
    lt_reducer_set_share(reducer, rows_of(step, r), ROWS_OF_STEP);
}

static bool is_discarded(const job *j, int step, int layer)
{
    return step == j->discards && layer == DISCARDED;
}

static bool is_frozen(const job *j, int step, int layer)
{
    return j->freezes > 0 && step >= j->freezes && layer == DISCARDED;
}

static void freeze(net *n, const job *j, int step)
{
    for (int i = 0; i < LAYERS; i++)
        if (is_frozen(j, step, i))
            CHECK_OK(lt_set_requires_grad(n->w[i], false));
}

/* ==== The reference =========================================================================== */

typedef struct sums { /* the sums of a step */
    float grad[REPLICAS][LAYERS][WIDTH * WIDTH];
    bool is_set[LAYERS];
} sums;

/* The gradients of a step, summed over the replicas. No gradient is left. */
static void compute_sums(net *n, const job *j, int step, sums *s)
{
    for (int r = 0; r < REPLICAS; r++) {
        for (int i = 0; i < j->plan.micro; i++) {
            CHECK_OK(lt_scope_push(n->ctx));
            CHECK_OK(learn(n, &j->plan, i, number_of(&j->plan, r, step, i)));
            lt_scope_pop(n->ctx);
        }
        for (int i = 0; i < LAYERS; i++) {
            if (!is_frozen(j, step, i))
                memcpy(s->grad[r][i], lt_data(lt_grad(n->w[i])), sizeof s->grad[r][i]);
            lt_zero_grad(n->w[i]);
        }
    }
    for (int i = 0; i < LAYERS; i++) {
        lt_summand of[REPLICAS];
        for (int r = 0; r < REPLICAS; r++)
            of[r] = (lt_summand){s->grad[r][i], (double)rows_of(step, r) / ROWS_OF_STEP};
        lt__sum_arrays(of, REPLICAS, LT_F32, j->wire, 0, WIDTH * WIDTH);
        s->is_set[i] = !is_discarded(j, step, i) && !is_frozen(j, step, i);
    }
}

/* delayed: whether each step applies the sums of the step before; otherwise, its own. */
static void train_reference(const job *j, bool delayed, char hex[65])
{
    net n;
    sums list[LONG];
    CHECK_OK(make_net(&n, LT_F32));
    CHECK_OK(lt_params_place(n.params));
    lt_optim *o = lt_optim_new(n.ctx, "momentum_step", n.w, LAYERS);
    for (int step = 0; step < LONG; step++) {
        int at = step - delayed;
        freeze(&n, j, step);
        compute_sums(&n, j, step, &list[step]);
        for (int i = 0; i < LAYERS && at >= 0; i++) {
            lt_grad_place place;
            CHECK_OK(lt_grad_find(n.w[i], &place));
            memcpy((float *)place.arena + place.offset, list[at].grad[0][i],
                   sizeof list[at].grad[0][i]);
            if (list[at].is_set[i] && !is_frozen(j, step, i))
                CHECK_OK(lt_grad_set(n.w[i], true));
        }
        if (at >= 0)
            CHECK_OK(take_step(o));
    }
    CHECK_OK(lt_params_sha256(n.params, hex));
    lt_optim_free(o);
    destroy_net(&n);
}

/* ==== Replicas ================================================================================ */

/* Saves the sum of a parameter, loses it, and restores it, as a run does that resumes. */
static lt_status save_and_restore(lt_reducer *r, lt_tensor *x)
{
    float copy[WIDTH * WIDTH];
    bool is_set, is_still_set;
    lt_tensor *sum = lt_reducer_delayed(r, x, &is_set);
    if (!sum)
        return lt_errcode();
    CHECK_EQ(lt_count(sum), lt_count(x));
    memcpy(copy, lt_data(sum), sizeof copy);
    lt_status status = lt_fill(sum, 7);
    if (status == LT_OK)
        status = lt_reducer_set_delayed(r, x, !is_set);
    lt_release(sum);
    LT_TRY(status);
    if (!(sum = lt_reducer_delayed(r, x, &is_still_set)))
        return lt_errcode();
    CHECK(is_still_set == !is_set && ((float *)lt_data(sum))[0] == 7);
    memcpy(lt_data(sum), copy, sizeof copy);
    lt_release(sum);
    return lt_reducer_set_delayed(r, x, is_set);
}

/* Before and after the optimizer step of a rank. */
static lt_status step_with(const job *j, lt_reducer *r, net *n, lt_optim *o, int step)
{
    for (int i = 0; i < LAYERS; i++)
        if (is_discarded(j, step, i) && !lt_is_meta(n->w[i]))
            lt_zero_grad(n->w[i]);
    LT_TRY(take_step(o));
    for (int i = 0; i < LAYERS && j->saves; i++)
        if (!lt_is_meta(n->w[i]))
            LT_TRY(save_and_restore(r, n->w[i]));
    return LT_OK;
}

static lt_status train_stage(member *m)
{
    job *j = m->ud;
    net *n = &m->net;
    lt_tensor *own[LAYERS];
    int n_own = 0, replica = lt_pipeline_replica(m->pipeline);
    for (int i = 0; i < LAYERS; i++)
        if (!lt_is_meta(n->w[i]))
            own[n_own++] = n->w[i];
    lt_reducer_config config = {.delay = true, .wire = j->wire, .first_bucket = 1, .bucket = 200};
    lt_reducer *r = lt_reducer_new(n->ctx, lt_pipeline_group(m->pipeline), &config);
    lt_optim *o = lt_optim_new(n->ctx, "momentum_step", n->w, LAYERS);
    lt_status status = r && o ? lt_reducer_add(r, own, n_own) : lt_errcode();
    for (int k = 0; k < LONG * j->plan.micro && status == LT_OK; k++) {
        int step = k / j->plan.micro, i = k % j->plan.micro;
        set_rows(r, step, replica);
        freeze(n, j, step);
        status = micro_batch(m, i, number_of(&j->plan, replica, step, i));
        if (status == LT_OK)
            status = i + 1 < j->plan.micro ? take_step(o) : step_with(j, r, n, o, step);
    }
    if (status == LT_OK)
        status = lt_pipeline_sha256(m->pipeline, n->params, j->hex[m->rank]);
    if (status != LT_OK)
        snprintf(m->text, sizeof m->text, "%s", lt_errmsg());
    lt_optim_free(o);
    lt_reducer_free(r);
    return status == LT_OK ? LT_OK : lt_fail(status, "%s", m->text);
}

typedef struct replica { /* a whole net */
    job *job;
    lt_group *group;
    int rank;
} replica;

static void *train_replica(void *ud)
{
    replica *of = ud;
    job *j = of->job;
    net n;
    CHECK_OK(make_net(&n, LT_F32));
    CHECK_OK(lt_params_place(n.params));
    lt_reducer *r =
        lt_reducer_new(n.ctx, of->group, &(lt_reducer_config){.delay = true, .wire = j->wire});
    lt_optim *o = lt_optim_new(n.ctx, "momentum_step", n.w, LAYERS);
    CHECK(r && o);
    CHECK_OK(lt_reducer_add(r, n.w, LAYERS));
    for (int step = 0; step < LONG; step++) {
        set_rows(r, step, of->rank);
        freeze(&n, j, step);
        for (int i = 0; i < j->plan.micro; i++) {
            CHECK_OK(lt_scope_push(n.ctx));
            CHECK_OK(learn(&n, &j->plan, i, number_of(&j->plan, of->rank, step, i)));
            lt_scope_pop(n.ctx);
        }
        CHECK_OK(step_with(j, r, &n, o, step));
        CHECK(lt_reducer_last(r).loss > 0);
    }
    CHECK_OK(lt_params_sha256(n.params, j->hex[of->rank]));
    lt_optim_free(o);
    lt_reducer_free(r);
    destroy_net(&n);
    lt_group_close(of->group);
    return NULL;
}

static void check(job *j)
{
    char hex[65], undelayed[65];
    int ranks = j->is_plain ? REPLICAS : j->plan.stages * REPLICAS;
    train_reference(j, true, hex);
    train_reference(j, false, undelayed);
    CHECK(strcmp(hex, undelayed) != 0);
    if (j->is_plain) {
        lt_group *groups[REPLICAS];
        replica r[REPLICAS];
        CHECK_OK(lt_local_open(REPLICAS, NULL, groups));
        for (int i = 0; i < REPLICAS; i++)
            r[i] = (replica){j, groups[i], i};
        run_threads(REPLICAS, train_replica, r, sizeof *r);
    } else {
        member members[MOST_RANKS];
        check_run(&j->plan, ranks, train_stage, j, members);
    }
    for (int i = 0; i < ranks; i++)
        CHECK_STR(j->hex[i], hex);
}

TEST(a_step_of_a_pipeline_applies_the_sums_of_the_step_before)
{
    for (int k = 0; k < 12; k++) {
        job j = {.plan = mixed_plan(k, LT_F32), .discards = NONE};
        j.plan.delays = (uint64_t)k;
        check(&j);
    }
}

TEST(without_a_pipeline)
{
    for (int micro = 1; micro <= 3; micro++)
        check(&(job){.plan = {.stages = 1, .micro = micro}, .discards = NONE, .is_plain = true});
}

TEST(the_sums_travel_in_bf16)
{
    check(&(job){
        .plan = {.stages = 1, .micro = 1}, .wire = LT_BF16, .discards = NONE, .is_plain = true});
    check(&(job){.plan = {.stages = 2, .micro = 3}, .wire = LT_BF16, .discards = NONE});
}

/* The next step does not update this layer, and does not decay it. */
TEST(a_parameter_without_a_gradient)
{
    for (int step = 0; step < LONG - 1; step++) {
        check(&(job){.plan = {.stages = 1, .micro = 2}, .discards = step, .is_plain = true});
        check(&(job){.plan = {.stages = 2, .micro = 1}, .discards = step});
    }
}

/* The sum of the step before is not applied to it, either. */
TEST(a_parameter_that_is_frozen)
{
    check(&(job){
        .plan = {.stages = 1, .micro = 2}, .discards = NONE, .freezes = 2, .is_plain = true});
    check(&(job){.plan = {.stages = 2, .micro = 2}, .discards = NONE, .freezes = 3});
}

TEST(sums_are_saved_and_restored)
{
    for (int discards = NONE; discards < 2; discards++) {
        check(&(job){.plan = {.stages = 1, .micro = 1},
                     .discards = discards,
                     .saves = true,
                     .is_plain = true});
        check(&(job){.plan = {.stages = 2, .micro = 1}, .discards = discards, .saves = true});
    }
}

/* ==== Errors ================================================================================== */

/* Makes a reducer for `ranks` ranks in turn, which must fail. */
static void refuses(int ranks, const lt_reducer_config *config, const char *text)
{
    lt_group *groups[REPLICAS];
    net n;
    CHECK_OK(make_net(&n, LT_F32));
    CHECK_OK(lt_local_open(ranks, NULL, groups));
    CHECK(!lt_reducer_new(n.ctx, groups[0], config));
    CHECK_EQ(lt_errcode(), LT_EUSAGE);
    CHECK_MSG(text);
    for (int i = 0; i < ranks; i++)
        lt_group_close(groups[i]);
    destroy_net(&n);
}

TEST(reducers_that_cannot_have_a_delay)
{
    refuses(1, &(lt_reducer_config){.delay = true},
            "a delay requires several ranks: with one rank, there is no sum that it could hide");
    refuses(2, &(lt_reducer_config){.delay = true, .vranks = 2},
            "a delay cannot be combined with vranks");
    refuses(2, &(lt_reducer_config){.delay = true, .server = true},
            "a delay cannot be combined with a synchronous parameter server");
}

static void *take_two(void *ud)
{
    replica *of = ud;
    net n;
    bool is_set;
    CHECK_OK(make_net(&n, LT_F32));
    CHECK_OK(lt_params_place(n.params));
    lt_reducer *r = lt_reducer_new(n.ctx, of->group, &(lt_reducer_config){.delay = true});
    CHECK_OK(lt_reducer_add(r, n.w, LAYERS - 1));
    CHECK(lt_reducer_has_delay(r));
    CHECK(!lt_reducer_delayed(r, n.w[LAYERS - 1], &is_set));
    CHECK_MSG("lt_reducer_delayed: the reducer does not have this parameter");
    lt_optim *a = lt_optim_new(n.ctx, "sgd_step", n.w, 1);
    lt_optim *b = lt_optim_new(n.ctx, "sgd_step", n.w + 1, LAYERS - 1);
    lt_opt opts[LT_MAX_OPT];
    CHECK_OK(lt_opts_parse(&lt_optim_def(a)->schema, "lr=0.1", opts));
    CHECK_OK(learn(&n, &of->job->plan, 0, 1));
    CHECK_FAILS(lt_optim_step(a, (const lt_opt *const[]){opts}, 1, NULL), LT_EUSAGE,
                "a delay requires that one optimizer has all parameters, but 2 optimizers were "
                "made; make one, or remove the delay");
    CHECK_OK(lt_reducer_configure(r, &(lt_reducer_config){.delay = false}));
    CHECK_FAILS(lt_reducer_set_delayed(r, n.w[0], true), LT_EINVAL,
                "lt_reducer_set_delayed: the reducer has no delay");
    lt_optim_free(a);
    lt_optim_free(b);
    lt_reducer_free(r);
    destroy_net(&n);
    lt_group_close(of->group);
    return NULL;
}

TEST(several_optimizers_are_refused)
{
    job j = {.plan = {.stages = 1, .micro = 1}};
    lt_group *groups[REPLICAS];
    replica r[REPLICAS];
    CHECK_OK(lt_local_open(REPLICAS, NULL, groups));
    for (int i = 0; i < REPLICAS; i++)
        r[i] = (replica){&j, groups[i], i};
    run_threads(REPLICAS, take_two, r, sizeof *r);
}

/* ==== Overlap ================================================================================= */

typedef struct overlap { /* of both ranks */
    job job;
    replica replicas[REPLICAS];
    atomic_int computed; /* ranks that have computed the second step */
    atomic_int overlaps; /* ranks whose first sum has seen that */
} overlap;

typedef struct watch { /* the filter of a rank */
    overlap *of;
    int calls;
} watch;

static void pack_nothing(void *ud, lt_packet *packet) { (void)ud, (void)packet; }

/* The bucket of the first step waits until both ranks have computed the second step. */
static bool await_second_step(void *ud, const lt_packet *packet)
{
    watch *w = ud;
    (void)packet;
    for (int i = 0; w->calls == 0 && i < 20000 && atomic_load(&w->of->computed) < REPLICAS; i++)
        pause_ms(1);
    if (w->calls++ == 0 && atomic_load(&w->of->computed) == REPLICAS)
        atomic_fetch_add(&w->of->overlaps, 1);
    return false;
}

static void *compute_twice(void *ud)
{
    replica *of = ud;
    watch w = {.of = (overlap *)of->job};
    net n;
    CHECK_OK(make_net(&n, LT_F32));
    CHECK_OK(lt_params_place(n.params));
    lt_reducer *r = lt_reducer_new(n.ctx, of->group, &(lt_reducer_config){.delay = true});
    lt_optim *o = lt_optim_new(n.ctx, "momentum_step", n.w, LAYERS);
    lt_bucket_filter filter = {.ud = &w, .pack = pack_nothing, .unpack = await_second_step};
    CHECK_OK(lt_reducer_add(r, n.w, LAYERS));
    CHECK_OK(lt_reducer_set_filter(r, &filter));
    CHECK_OK(learn(&n, &of->job->plan, 0, 1));
    CHECK_OK(take_step(o));
    CHECK_OK(learn(&n, &of->job->plan, 0, 2));
    atomic_fetch_add(&w.of->computed, 1);
    CHECK_OK(take_step(o));
    CHECK_EQ(lt_reducer_last(r).buckets, 1);
    CHECK_OK(lt_group_wait(of->group));
    CHECK_EQ(w.calls, 2);
    lt_optim_free(o);
    lt_reducer_free(r);
    destroy_net(&n);
    lt_group_close(of->group);
    return NULL;
}

TEST(the_sums_of_a_step_end_within_the_next_one)
{
    lt_group *groups[REPLICAS];
    overlap both = {.job.plan = {.stages = 1, .micro = 1}};
    CHECK_OK(lt_local_open(REPLICAS, NULL, groups));
    for (int i = 0; i < REPLICAS; i++)
        both.replicas[i] = (replica){&both.job, groups[i], i};
    run_threads(REPLICAS, compute_twice, both.replicas, sizeof *both.replicas);
    CHECK_EQ(atomic_load(&both.overlaps), REPLICAS);
}
