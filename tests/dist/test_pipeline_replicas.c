/* test_pipeline_replicas.c - replicas of the stages of a pipeline: the sums of their gradients
 * begin within the last pass of a step, and have the bits of data parallelism. */
#include <stdatomic.h>

#include "dist/pipeline/internal.h"
#include "tests/dist/pipe_net.h"

enum { ROWS_OF_STEP = 12 };

/* ==== Data parallelism ======================================================================== */

static lt_status take_step(lt_optim *o, lt_step_status *status)
{
    lt_opt opts[LT_MAX_OPT];
    LT_TRY(lt_opts_parse(&lt_optim_def(o)->schema, "lr=0.1 momentum=0.9 weight_decay=0.01", opts));
    return lt_optim_step(o, (const lt_opt *const[]){opts}, 1, status);
}

typedef struct replica { /* with a context of its own */
    const plan *plan;
    lt_group *group;
    int rank;
    char hex[65];
} replica;

static lt_reducer *open_reducer(net *n, lt_group *g, const lt_reducer_config *config)
{
    lt_tensor *own[LAYERS];
    int n_own = 0;
    lt_reducer *r = lt_reducer_new(n->ctx, g, config);
    for (int i = 0; i < LAYERS; i++)
        if (!lt_is_meta(n->w[i]))
            own[n_own++] = n->w[i];
    if (r && lt_reducer_add(r, own, n_own) == LT_OK)
        return r;
    lt_reducer_free(r);
    return NULL;
}

/* A step of unequal halves of the batch: replica 0 has a third of the rows. */
static void set_rows(lt_reducer *r, int rank)
{
    lt_reducer_set_share(r, (rank + 1) * ROWS_OF_STEP / 3, ROWS_OF_STEP);
}

static void *train_replica(void *ud)
{
    replica *r = ud;
    net n;
    CHECK_OK(make_net(&n, r->plan->dtype));
    CHECK_OK(lt_params_place(n.params));
    lt_reducer *reducer = open_reducer(&n, r->group, &(lt_reducer_config){.blocking = true});
    lt_optim *o = lt_optim_new(n.ctx, "momentum_step", n.w, LAYERS);
    CHECK(reducer && o);
    for (int step = 0; step < STEPS; step++) {
        set_rows(reducer, r->rank);
        for (int i = 0; i < r->plan->micro; i++)
            CHECK_OK(learn(&n, r->plan, i, number_of(r->plan, r->rank, step, i)));
        CHECK_OK(take_step(o, NULL));
    }
    CHECK_OK(lt_params_sha256(n.params, r->hex));
    lt_optim_free(o);
    lt_reducer_free(reducer);
    destroy_net(&n);
    lt_group_close(r->group);
    return NULL;
}

static void train_replicas(const plan *p, char hex[65])
{
    lt_group *groups[REPLICAS];
    replica r[REPLICAS];
    CHECK_OK(lt_local_open(REPLICAS, NULL, groups));
    for (int i = 0; i < REPLICAS; i++)
        r[i] = (replica){p, groups[i], i, ""};
    run_threads(REPLICAS, train_replica, r, sizeof *r);
    CHECK_STR(r[0].hex, r[1].hex);
    memcpy(hex, r[0].hex, 65);
}

/* ==== Pipelines with replicas ================================================================= */

typedef struct stage stage;
typedef struct setup {
    lt_reducer_config config;
    lt_status (*open)(stage *s);   /* called before the first step; or NULL */
    lt_status (*before)(stage *s); /* called before each optimizer step of a batch; or NULL */
    int first_pass;                /* for await_bucket(): the first pass in which it waits */
    char hex[MOST_RANKS][65];      /* digests of the weights */
    char read[MOST_RANKS][65];     /* digests of the gradients that read_gradient() has read last */
} setup;

struct stage { /* of a replica: a rank */
    member *m;
    setup *setup;
    lt_reducer *reducer;
    int rank;
    int calls;           /* calls of the hook of the first layer */
    atomic_int n_summed; /* buckets summed so far */
    char text[256];      /* the first error */
};

static lt_status train_steps(stage *s, lt_optim *o)
{
    member *m = s->m;
    int r = lt_pipeline_replica(m->pipeline), micro = m->plan->micro;
    for (int step = 0; step < STEPS; step++) {
        set_rows(s->reducer, r);
        for (int i = 0; i < micro; i++) {
            lt_step_status status;
            LT_TRY(micro_batch(m, i, number_of(m->plan, r, step, i)));
            if (s->setup->before && i + 1 == micro)
                LT_TRY(s->setup->before(s));
            LT_TRY(take_step(o, &status));
            CHECK_EQ(status, i + 1 < micro ? LT_ACCUMULATING : LT_APPLIED);
        }
    }
    return lt_pipeline_sha256(m->pipeline, m->net.params, s->setup->hex[m->rank]);
}

static lt_status train_stage(member *m)
{
    stage s = {.m = m, .setup = m->ud, .rank = m->rank};
    CHECK_EQ(lt_pipeline_stage(m->pipeline), m->rank / REPLICAS);
    CHECK_EQ(lt_pipeline_replica(m->pipeline), m->rank % REPLICAS);
    CHECK_EQ(lt_group_size(lt_pipeline_group(m->pipeline)), REPLICAS);
    s.reducer = open_reducer(&m->net, lt_pipeline_group(m->pipeline), &s.setup->config);
    lt_optim *o = lt_optim_new(m->net.ctx, "momentum_step", m->net.w, LAYERS);
    lt_status status = s.reducer && o ? LT_OK : lt_errcode();
    if (status == LT_OK && s.setup->open)
        status = s.setup->open(&s);
    if (status == LT_OK)
        status = train_steps(&s, o);
    if (status != LT_OK)
        snprintf(s.text, sizeof s.text, "%s", lt_errmsg());
    lt_optim_free(o);
    lt_reducer_free(s.reducer); /* sets another message */
    return status == LT_OK ? LT_OK : lt_fail(status, "%s", s.text);
}

static void check_with(const plan *p, setup *with, const char *hex)
{
    member members[MOST_RANKS];
    check_run(p, p->stages * REPLICAS, train_stage, with, members);
    for (int i = 0; i < p->stages * REPLICAS; i++)
        CHECK_STR(with->hex[i], hex);
}

/* Sums that block, and sums that overlap, in a bucket and in a bucket per parameter. */
static void check_all_ways(const plan *p)
{
    char hex[65];
    train_replicas(p, hex);
    check_with(p, &(setup){.config.blocking = true}, hex);
    check_with(p, &(setup){.config.blocking = false}, hex);
    check_with(p, &(setup){.config = {.first_bucket = 1, .bucket = 1}}, hex);
}

/* ==== Bits ==================================================================================== */

/* In f32 and f64. */
TEST(replicas_have_the_bits_of_data_parallelism)
{
    for (int k = 0; k < 24; k++) {
        plan p = mixed_plan(k, k < 12 ? LT_F32 : LT_F64);
        p.delays = (uint64_t)k;
        check_all_ways(&p);
    }
}

TEST(each_schedule_has_the_bits_of_data_parallelism)
{
    for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++)
        for (int stages = 1; stages <= LAYERS; stages++)
            for (int lag = 0; lag < (kind == LT_GPIPE ? 1 : 3); lag++)
                check_all_ways(&(plan){.stages = stages,
                                       .micro = 4,
                                       .lag = lag,
                                       .kind = kind,
                                       .form = stages == LAYERS ? FAN : DEEP});
}

static lt_tensor *first_layer(const net *n)
{
    int i = 0;
    while (lt_is_meta(n->w[i]))
        i++;
    return n->w[i];
}

/* Reads a gradient before the sum, which runs all passes before the optimizer step does. The other
 * replica does not. */
static lt_status read_gradient(stage *s)
{
    if (s->rank % REPLICAS == 0)
        digest(lt_grad(first_layer(&s->m->net)), s->setup->read[s->rank]);
    return LT_OK;
}

/* Another pass of the last micro-batch. */
static lt_status pass_again(stage *s)
{
    member *m = s->m;
    LT_TRY(lt_scope_push(m->net.ctx));
    lt_tensor *loss = forward(&m->net, m->plan->form, 99, 0);
    lt_status status = loss ? lt_backward(loss, NULL) : lt_errcode();
    lt_pipeline_pop_scope(m->pipeline);
    return status;
}

/* Sums with another pass, or a gradient that is read, before each step: they need not overlap, but
 * have the bits of sums that block. */
static void check_before(lt_status (*before)(stage *s))
{
    for (int k = 0; k < 12; k++) {
        plan p = mixed_plan(k, LT_F32);
        setup blocking = {.config.blocking = true, .before = before};
        member members[MOST_RANKS];
        setup overlapping = {.before = before};
        check_run(&p, p.stages * REPLICAS, train_stage, &blocking, members);
        check_with(&p, &overlapping, blocking.hex[0]);
        for (int i = 0; i < p.stages * REPLICAS; i++)
            CHECK_STR(overlapping.read[i], blocking.read[i]);
    }
}

TEST(a_gradient_is_read_before_the_step) { check_before(read_gradient); }

TEST(a_micro_batch_with_several_passes) { check_before(pass_again); }

/* ==== Overlap ================================================================================= */

static void pack_nothing(void *ud, lt_packet *packet) { (void)ud, (void)packet; }

static bool count_bucket(void *ud, const lt_packet *packet)
{
    (void)packet;
    atomic_fetch_add(&((stage *)ud)->n_summed, 1);
    return false;
}

/* Waits until the bucket of the stage's last layer is summed, although its first layer still lacks
 * gradients. A sum that blocks would not begin. */
static lt_status await_bucket(void *ud, lt_tensor *x, lt_tensor *grad)
{
    stage *s = ud;
    const plan *p = s->m->plan;
    int step = s->calls / p->micro, pass = s->calls++ % p->micro;
    int before = step * LAYERS / p->stages; /* buckets of the steps before */
    (void)x, (void)grad;
    if (pass < s->setup->first_pass)
        return LT_OK;
    for (int i = 0; i < 20000 && atomic_load(&s->n_summed) <= before; i++)
        pause_ms(1);
    return atomic_load(&s->n_summed) > before
               ? LT_OK
               : lt_fail(LT_EINVAL, "the sum has not begun in pass %d of step %d", pass, step);
}

static lt_status open_await(stage *s)
{
    lt_bucket_filter filter = {.ud = s, .pack = pack_nothing, .unpack = count_bucket};
    LT_TRY(lt_reducer_set_filter(s->reducer, &filter));
    return lt_on_grad(first_layer(&s->m->net), await_bucket, s, NULL);
}

/* Also in the first step. A stage that never waits for messages has all second halves left after
 * its last pass, and adds them layer by layer. */
TEST(sums_begin_within_the_last_pass)
{
    enum { MICRO = 4 };
    for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++)
        for (int k = 0; k < 4; k++) {
            plan p = {.stages = 1 + k % 2, .micro = MICRO, .lag = k / 2 * 2, .kind = kind};
            bool keeps_all = kind == LT_ZERO_BUBBLE && p.stages == 1 && p.lag > 0;
            setup with = {.config = {.first_bucket = 1, .bucket = 1},
                          .open = open_await,
                          .first_pass = keeps_all ? 0 : MICRO - 1};
            char hex[65];
            train_replicas(&p, hex);
            check_with(&p, &with, hex);
        }
}

/* ==== Failures ================================================================================ */

enum { FAILING = 3 }; /* the rank */

static lt_status refuse(void *ud, lt_tensor *x, lt_tensor *grad)
{
    stage *s = ud;
    (void)x, (void)grad;
    return ++s->calls == s->m->plan->micro ? lt_fail(LT_EINVAL, "the hook refuses") : LT_OK;
}

static lt_status open_refusal(stage *s)
{
    return s->rank == FAILING ? lt_on_grad(first_layer(&s->m->net), refuse, s, NULL) : LT_OK;
}

/* Between the halves of the last pass, when the sums have begun. */
static void fail_between(void *ud, int what, int micro)
{
    lt_pipeline *p = ((stage *)ud)->m->pipeline;
    if (what != LT_BACKWARD || micro + 1 < ((stage *)ud)->m->plan->micro)
        return;
    p->failure = LT_EINVAL;
    strcpy(p->failure_text, "a message is lost");
}

static lt_status open_failure(stage *s)
{
    if (s->rank != FAILING)
        return LT_OK;
    s->m->pipeline->log = fail_between;
    s->m->pipeline->log_ud = s;
    return LT_OK;
}

/* All ranks fail, rank FAILING with this text, and none waits until the timeout. */
static void check_failure(lt_schedule_kind kind, lt_status (*open)(stage *s), const char *text)
{
    member members[MOST_RANKS];
    plan p = {.stages = 2, .micro = 3, .lag = 1, .kind = kind, .timeout = 60};
    double began = lt__seconds();
    run(&p, 2 * REPLICAS, train_stage, &(setup){.open = open}, members);
    for (int i = 0; i < 2 * REPLICAS; i++)
        CHECK_EQ(members[i].status, i == FAILING ? LT_EINVAL : LT_EPEER);
    CHECK_STR(members[FAILING].text, text);
    CHECK(lt__seconds() - began < 30);
}

TEST(a_last_pass_that_fails)
{
    for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++)
        check_failure(kind, open_refusal, "the hook refuses");
    check_failure(LT_ZERO_BUBBLE, open_failure, "a message is lost");
}
