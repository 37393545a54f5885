/* test_async.c - simulated asynchronous training: one worker trains like an ordinary run, several
 * workers see the delays that their times cause, and every ticket is applied once. A replay has the
 * same bits, whatever the numbers of the workers are. */
#include <stdlib.h>

#include "tests/dist/async_net.h"

enum { STEPS = 9, MAX_EVENTS = 4096 };

typedef struct trace {
    int n;
    lt_async_event event[MAX_EVENTS];
} trace;

/* Trains n with a simulation until all tickets are done; t, which may be NULL, gets the pushes. */
static void simulate(net *n, const lt_async_config *config, int64_t tickets, double clip, trace *t)
{
    lt_async *async = open_async(n, config);
    lt_async_event e = {0};
    CHECK_OK(lt_async_set_limit(async, tickets));
    for (int i = 0; i < 100000 && e.kind != LT_ASYNC_EVENT_DONE; i++) {
        CHECK_OK(next_event(n, async, clip, &e));
        if (e.kind == LT_ASYNC_EVENT_PUSH && t && t->n < MAX_EVENTS)
            t->event[t->n++] = e;
    }
    CHECK_EQ(e.kind, LT_ASYNC_EVENT_DONE);
    CHECK_EQ(lt_async_done_below(async), tickets);
    lt_async_free(async);
}

/* ==== One worker ============================================================================== */

static void check_one_worker(const char *rule, const char *op, const char *options, double clip)
{
    lt_async_config config = config_of(rule, 1);
    net a = make(op, options), b = make(op, options);
    simulate(&a, &config, STEPS, clip, NULL);
    compute_all(&b, STEPS, clip);
    check_same(&a, &b);
    destroy(&a);
    destroy(&b);
}

TEST(one_worker_trains_like_an_ordinary_run)
{
    static const char *const same[] = {"asgd", "sa", "dc-c", "dc-a", "dc-m", "ddc"};
    for (int i = 0; i < 6; i++) {
        check_one_worker(same[i], "momentum_step", "lr=0.1 momentum=0.9", 0);
        check_one_worker(same[i], "momentum_step", "lr=0.1 momentum=0.9", 0.1);
        check_one_worker(same[i], "sgd_step", "lr=0.1", 0);
    }
    check_one_worker("asgd", "adam_step", "lr=0.01", 0);
    check_one_worker("dc-a", "lars_step", "lr=0.1", 0);
}

/* ==== Several workers ========================================================================= */

TEST(delays_follow_the_times_of_workers)
{
    lt_async_config config = config_of("asgd", 3);
    static trace t;
    t.n = 0;
    config.times = (double[]){1, 1, 2.5};
    config.n_times = 3;
    net n = make("momentum_step", "lr=0.05 momentum=0.5");
    simulate(&n, &config, 12, 0, &t);
    CHECK_EQ(t.n, 12);
    /* workers 0 and 1 push at 1 s and 2 s, worker 2 at 2.5 s */
    static const int workers[] = {0, 1, 0, 1, 2}, delays[] = {0, 1, 1, 1, 4};
    for (int i = 0; i < 5; i++) {
        CHECK_EQ(t.event[i].worker, workers[i]);
        CHECK_EQ(t.event[i].delay, delays[i]);
        CHECK_EQ(t.event[i].applied, i + 1);
        CHECK_EQ(t.event[i].read + t.event[i].delay + 1, t.event[i].applied);
    }
    CHECK_NEAR(t.event[4].time, 2.5, 1e-12);
    CHECK(t.event[0].loss > 0.5 && t.event[0].lr == 0.05);
    destroy(&n);
}

/* ==== Links =================================================================================== */

typedef struct cycle { /* seconds between pushes of a single worker, which computes for 1 s */
    double first, next;
    lt_async_stats stats;
} cycle;

static cycle cycle_of(lt_async_config config)
{
    static trace t;
    cycle c;
    t.n = 0;
    config.rule = "asgd";
    config.workers = 1;
    config.staleness = config.drop = LT_ASYNC_UNBOUNDED;
    net n = make("sgd_step", "lr=0.05");
    config.buffers = n.buffers;
    config.n_buffers = 2;
    lt_async *async = open_async(&n, &config);
    lt_async_event e = {0};
    CHECK_OK(lt_async_set_limit(async, 4));
    while (e.kind != LT_ASYNC_EVENT_DONE) {
        CHECK_OK(next_event(&n, async, 0, &e));
        if (e.kind == LT_ASYNC_EVENT_PUSH)
            t.event[t.n++] = e;
    }
    CHECK_OK(lt_async_read_stats(async, 0, &c.stats));
    lt_async_free(async);
    destroy(&n);
    c.first = t.event[0].time;
    c.next = t.event[1].time - c.first;
    CHECK_NEAR(t.event[3].time, c.first + 3 * c.next, 1e-9);
    return c;
}

TEST(messages_take_bytes_over_rate_plus_latency_twice)
{
    double rate = 1000, latency = 0.25;
    cycle none = cycle_of((lt_async_config){0});
    cycle late = cycle_of((lt_async_config){.latencies = &latency, .n_latencies = 1});
    cycle slow = cycle_of((lt_async_config){.rates = &rate, .n_rates = 1});
    cycle both = cycle_of((lt_async_config){
        .rates = &rate, .n_rates = 1, .latencies = &latency, .n_latencies = 1, .service = 0.125});
    CHECK_NEAR(none.first, 1, 1e-12);
    CHECK_NEAR(none.next, 1, 1e-12);
    CHECK(none.stats.link_share == 0);
    CHECK_NEAR(late.next, 1.5, 1e-12);
    /* the values and a gradient of 73 elements each, with padding and options */
    CHECK(slow.next > 1 + 2 * 73 * 4 / rate && slow.next < 30);
    CHECK_NEAR(both.next, slow.next + 0.5 + 0.125, 1e-9);
    CHECK_NEAR(both.stats.server_busy, 0.125 / both.next, 1e-9);
    CHECK_NEAR(both.stats.queue_share, 0.125 / both.next, 1e-9);
    CHECK_NEAR(both.stats.link_share, 1 - 1.125 / both.next, 1e-9);
    rate = 2000;
    cycle twice = cycle_of((lt_async_config){.rates = &rate, .n_rates = 1});
    CHECK_NEAR(2 * (twice.next - 1), slow.next - 1, 1e-9);
    /* the slower of two links decides; a worker on the server's host uses neither */
    cycle server = cycle_of((lt_async_config){.rates = &rate, .n_rates = 1, .server_rate = 1000});
    CHECK_NEAR(server.next, slow.next, 1e-9);
    cycle here = cycle_of((lt_async_config){.server_rate = 1});
    CHECK_NEAR(here.next, 1, 1e-12);
}

/* Four equal workers push at the same moment. */
static void check_queue(lt_async_config config, double first, double each)
{
    static trace t;
    lt_async_config all = config_of("asgd", 4);
    all.service = config.service;
    all.rates = config.rates;
    all.n_rates = config.n_rates;
    all.server_rate = config.server_rate;
    t.n = 0;
    net n = make("sgd_step", "lr=0.05");
    simulate(&n, &all, 4, 0, &t);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(t.event[i].worker, i);
        CHECK_EQ(t.event[i].delay, i);
        CHECK_NEAR(t.event[i].time, first + i * each, 1e-9);
    }
    destroy(&n);
}

TEST(the_server_handles_one_push_at_a_time)
{
    check_queue((lt_async_config){.service = 0.25}, 1.25, 0.25);
}

/* The values leave one after the other, so the workers are apart by the time of a grant; a push is
 * larger than a grant, so pushes wait for each other. */
TEST(messages_share_the_link_of_the_server)
{
    double rate = 1e12, server_rate = 1000;
    static trace t;
    lt_async_config config = config_of("asgd", 3);
    config.rates = &rate;
    config.n_rates = 1;
    config.server_rate = server_rate;
    t.n = 0;
    net n = make("sgd_step", "lr=0.05");
    simulate(&n, &config, 30, 0, &t);
    double last = t.event[29].time, early = t.event[14].time,
           push = t.event[1].time - t.event[0].time;
    CHECK(push > 0.3);
    /* the link is the bottleneck, in the direction of the pushes */
    CHECK_NEAR((last - early) / 15, push, 1e-9);
    destroy(&n);
}

TEST(links_that_are_not_possible_are_refused)
{
    static const struct {
        double rate, latency, service, server_rate;
        const char *text;
    } bad[] = {{0, 0, 0, 0, "the rate of a link must be positive, but is 0"},
               {-1, 0, 0, 0, "the rate of a link must be positive, but is -1"},
               {1, -1, 0, 0, "the latency of a link must be at least 0, but is -1"},
               {1, 0, -1, 0, "the time of the server must be at least 0, but is -1"},
               {1, 0, 0, -2, "the rate of the server's link must be positive, but is -2"}};
    net n = make("sgd_step", "lr=0.05");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        lt_async_config config = config_of("asgd", 2);
        config.rates = &bad[i].rate;
        config.latencies = &bad[i].latency;
        config.n_rates = config.n_latencies = 1;
        config.service = bad[i].service;
        config.server_rate = bad[i].server_rate;
        CHECK_NULL(lt_async_new(n.ctx, n.optim, &config), LT_EUSAGE, bad[i].text);
    }
    destroy(&n);
}

static int count(const trace *t, int64_t ticket)
{
    int n = 0;
    for (int i = 0; i < t->n; i++)
        n += t->event[i].ticket == ticket && !t->event[i].dropped;
    return n;
}

TEST(every_ticket_is_applied_once_within_the_bounds)
{
    static trace t;
    for (int64_t staleness = -1; staleness <= 3; staleness++)
        for (int64_t drop = 0; drop <= 4; drop += 2) {
            lt_async_config config = config_of("asgd", 5);
            t.n = 0;
            config.prefetch = 2;
            config.sigma = 0.5;
            config.staleness = staleness;
            config.drop = drop > 0 ? drop : LT_ASYNC_UNBOUNDED;
            net n = make("sgd_step", "lr=0.05");
            simulate(&n, &config, 40, 0, &t);
            for (int64_t ticket = 0; ticket < 40; ticket++)
                CHECK_EQ(count(&t, ticket), 1);
            for (int i = 0; i < t.n; i++) {
                bool applied = t.event[i].applied > 0;
                CHECK(applied == !t.event[i].dropped);
                CHECK(!applied || staleness < 0 || t.event[i].delay <= staleness);
                CHECK(!applied || drop == 0 || t.event[i].delay < drop);
            }
            destroy(&n);
        }
}

TEST(a_simulation_is_deterministic_and_depends_on_the_rule)
{
    char sha256[RULES][65];
    for (int i = 0; i < RULES; i++) {
        lt_async_config config = config_of(all_rules[i], 4);
        config.sigma = 0.3;
        net a = make("momentum_step", "lr=0.02 momentum=0.5");
        net b = make("momentum_step", "lr=0.02 momentum=0.5");
        simulate(&a, &config, 30, 0, NULL);
        simulate(&b, &config, 30, 0, NULL);
        check_same(&a, &b);
        CHECK_OK(lt_params_sha256(a.params, sha256[i]));
        for (int k = 0; k < i; k++)
            if (strcmp(sha256[i], sha256[k]) == 0)
                FAIL("%s trains like %s", all_rules[i], all_rules[k]);
        destroy(&a);
        destroy(&b);
    }
}

TEST(a_limit_may_grow)
{
    lt_async_config config = config_of("asgd", 2);
    lt_async_event e;
    net n = make("sgd_step", "lr=0.05");
    lt_async *async = open_async(&n, &config);
    int computed = 0;
    for (int64_t limit = 0; limit <= 6; limit += 3) {
        CHECK_OK(lt_async_set_limit(async, limit));
        do {
            CHECK_OK(lt_async_next(async, &e));
            if (e.kind == LT_ASYNC_EVENT_COMPUTE) {
                computed++;
                compute(&n, e.ticket, 0);
            }
        } while (e.kind != LT_ASYNC_EVENT_DONE);
        CHECK_EQ(computed, limit);
    }
    CHECK_FAILS(lt_async_set_limit(async, 5), LT_EINVAL, "cannot decrease from 6 to 5");
    lt_async_free(async);
    compute(&n, 0, 0); /* an ordinary step again */
    destroy(&n);
}

/* ==== Replays ================================================================================= */

enum { WORKERS = 4 };

/* Replays a trace with other numbers of the workers; *n gets the trained net. */
static void replay(net *n, const char *rule, const trace *t, const int numbers[WORKERS])
{
    static lt_async_step steps[MAX_EVENTS];
    lt_async_config config = config_of(rule, WORKERS);
    config.trace = steps;
    config.n_trace = t->n;
    for (int i = 0; i < t->n; i++) {
        const lt_async_event *e = &t->event[i];
        steps[i] = (lt_async_step){numbers[e->worker], e->ticket, e->read};
    }
    *n = make("momentum_step", "lr=0.02 momentum=0.5");
    simulate(n, &config, t->n, 0, NULL);
}

TEST(the_numbers_of_workers_do_not_matter)
{
    static trace t;
    for (int i = 0; i < RULES; i++) {
        lt_async_config config = config_of(all_rules[i], WORKERS);
        net a = make("momentum_step", "lr=0.02 momentum=0.5"), b, c;
        t.n = 0;
        config.sigma = 0.5;
        simulate(&a, &config, 30, 0, &t);
        replay(&b, all_rules[i], &t, (const int[]){0, 1, 2, 3});
        replay(&c, all_rules[i], &t, (const int[]){2, 0, 3, 1});
        check_same(&a, &b);
        check_same(&b, &c);
        destroy(&a);
        destroy(&b);
        destroy(&c);
    }
}

static void refuse_trace(const lt_async_step *steps, int64_t n, const char *message)
{
    lt_async_config config = config_of("asgd", 2);
    config.trace = steps;
    config.n_trace = n;
    net a = make("sgd_step", "lr=0.1");
    lt_async *async = lt_async_new(a.ctx, a.optim, &config);
    CHECK_FAILS(async ? lt_async_set_limit(async, 5) : lt_errcode(), LT_EUSAGE, message);
    lt_async_free(async);
    destroy(&a);
}

TEST(wrong_traces_are_refused)
{
    static const lt_async_step right[] = {{0, 0, 0}, {1, 1, 0}, {0, 2, 1}},
                               worker[] = {{0, 0, 0}, {2, 1, 0}}, late[] = {{0, 0, 1}},
                               early[] = {{0, 0, 0}, {1, 1, 0}, {0, 2, 0}},
                               negative[] = {{0, -1, 0}}, twice[] = {{0, 3, 0}, {1, 3, 0}},
                               beyond[] = {{0, 5, 0}};
    int fresh;
    refuse_trace(worker, 2, "step 2 of the trace has an invalid worker");
    refuse_trace(late, 1, "step 1 of the trace has an impossible delay");
    refuse_trace(early, 3, "step 3 of the trace has an impossible delay");
    refuse_trace(negative, 1, "step 1 of the trace has an invalid ticket");
    refuse_trace(twice, 2, "step 2 of the trace has an invalid ticket");
    refuse_trace(beyond, 1, "the trace has ticket 5, but the run has only 5 tickets");
    lt_async_config config = config_of("asgd", 2);
    config.trace = right;
    config.n_trace = 3;
    net n = make("sgd_step", "lr=0.1");
    lt_async *async = open_async(&n, &config);
    CHECK_FAILS(lt_async_restore(async, NULL, NULL, 0, &fresh), LT_EUSAGE,
                "the replay of a trace cannot be resumed");
    lt_async_free(async);
    destroy(&n);
}

/* ==== Misuse ================================================================================== */

/* Runs backward from the sum of a parameter. */
static void back_from_sum(net *n)
{
    lt_tensor *loss = lt_run(n->ctx, "sum", NULL, n->b2, NULL);
    CHECK_OK(lt_backward(loss, NULL));
    lt_release(loss);
}

static void refuse(const char *op, const char *options, const lt_async_config *config,
                   const char *message)
{
    net n = make(op, options);
    lt_async *async = lt_async_new(n.ctx, n.optim, config);
    lt_async_event e;
    lt_status status = async ? lt_async_set_limit(async, 1) : lt_errcode();
    if (status == LT_OK)
        status = lt_async_next(async, &e);
    if (status == LT_OK) {
        back_from_sum(&n);
        status = step(&n, 0);
    }
    CHECK_FAILS(status, LT_EUSAGE, message);
    lt_async_free(async);
    destroy(&n);
}

TEST(wrong_settings_are_refused)
{
    static const double times[] = {1, 0};
#define REFUSE(change, text)                                                                       \
    do {                                                                                           \
        lt_async_config c = config_of("asgd", 1);                                                  \
        c.change;                                                                                  \
        refuse("sgd_step", "lr=0.1", &c, text);                                                    \
    } while (0)
    REFUSE(rule = "dcc",
           "the rule must be asgd, sa, dc-c, dc-a, dc-m, gap, dana, ormo or ddc, but is 'dcc' "
           "(did you mean 'dc-c'?)");
    REFUSE(workers = 0, "the number of workers must be from 1 to 4096, but is 0");
    REFUSE(sigma = -1, "sigma must be from 0 to 10, but is -1");
    REFUSE(n_times = 2; c.times = times, "the time of a batch must be positive, but is 0");
    REFUSE(lam = -1, "lam must be at least 0, but is -1");
    REFUSE(staleness = -2, "staleness must be at least 0, but is -2");
    REFUSE(drop = 0, "drop must be at least 1, but is 0");
    REFUSE(prefetch = LT_ASYNC_MAX_PREFETCH + 1, "a worker must hold 1 to 4 tickets, not 5");
#undef REFUSE
}

static void refuse_new(lt_ctx *ctx, lt_optim *optim, const lt_async_config *c, const char *message)
{
    CHECK(lt_async_new(ctx, optim, c) == NULL);
    CHECK_FAILS(lt_errcode(), LT_EINVAL, message);
}

TEST(invalid_arguments_are_refused)
{
    lt_async_step no_step = {0};
    const lt_async_config usual = config_of("asgd", 1);
    net n = make("momentum_step", "lr=0.1 momentum=0.9");
#define REFUSE(change, text)                                                                       \
    do {                                                                                           \
        lt_async_config c = usual;                                                                 \
        c.change;                                                                                  \
        refuse_new(n.ctx, n.optim, &c, text);                                                      \
    } while (0)
    REFUSE(n_trace = -1; c.trace = &no_step, "lt_async_new: n_trace is -1, but trace is a list");
    REFUSE(n_times = 3, "lt_async_new: n_times is 3, but times is NULL");
    REFUSE(n_buffers = 2, "lt_async_new: n_buffers is 2, but buffers is NULL");
    REFUSE(steps = -1, "lt_async_new: steps must be from 0 to 4611686018427387903, but is -1");
    REFUSE(steps = INT64_MAX, "lt_async_new: steps must be from 0 to 4611686018427387903, but is");
#undef REFUSE
    refuse_new(NULL, n.optim, &usual, "lt_async_new: the context is NULL");
    refuse_new(n.ctx, NULL, &usual, "lt_async_new: optim is NULL");
    refuse_new(n.ctx, n.optim, NULL, "lt_async_new: config is NULL");
    lt_async *a = open_async(&n, &usual);
    lt_async_stats stats;
    refuse_new(n.ctx, n.optim, &usual,
               "lt_async_new: this context already has a reducer or asynchronous");
    CHECK_FAILS(lt_async_read_stats(a, -1, &stats), LT_EINVAL, "group must be at least 0");
    CHECK_FAILS(lt_async_read_stats(a, INT32_MIN, &stats), LT_EINVAL, "but is -2147483648");
    CHECK_OK(lt_async_read_stats(a, INT32_MAX, &stats));
    lt_async_free(a);
    lt_async_free(open_async(&n, &usual));
    destroy(&n);
}

TEST(wrong_optimizers_are_refused)
{
    static const char *const own_step[] = {"dana", "ormo", "ddc", "gap"};
    for (int i = 0; i < 4; i++) {
        lt_async_config c = config_of(own_step[i], 1);
        char text[100];
        snprintf(text, sizeof text, "the rule %s works with optim.sgd, not with adam", c.rule);
        refuse("adam_step", "lr=0.1", &c, text);
        snprintf(text, sizeof text, "the rule %s works with optim.sgd, not with lars", c.rule);
        refuse("lars_step", "lr=0.1", &c, text);
        if (i == 3)
            break; /* gap supports the options below */
        snprintf(text, sizeof text, "the rule %s cannot be used with nesterov = true", c.rule);
        refuse("momentum_step", "lr=0.1 nesterov=true", &c, text);
        snprintf(text, sizeof text, "the rule %s requires a momentum below 1, but it is 1", c.rule);
        refuse("momentum_step", "lr=0.1 momentum=1", &c, text);
    }
}

TEST(another_optimizer_is_refused)
{
    lt_async_event e;
    const lt_async_config config = config_of("asgd", 1);
    net n = make("sgd_step", "lr=0.1");
    lt_optim *other = lt_optim_new(n.ctx, "sgd_step", &n.b2, 1);
    lt_async *async = open_async(&n, &config);
    const lt_opt *options[] = {n.opt[0]};
    CHECK(other != NULL);
    CHECK_OK(lt_async_set_limit(async, 1));
    CHECK_OK(lt_async_next(async, &e));
    back_from_sum(&n);
    CHECK_FAILS(lt_optim_step(other, options, 1, NULL), LT_EINVAL,
                "asynchronous training supports one optimizer; this is another");
    lt_async_free(async);
    lt_optim_free(other);
    destroy(&n);
}

TEST(each_ticket_needs_one_step_of_one_optimizer)
{
    lt_async_event e;
    const lt_async_config config = config_of("asgd", 1);
    net n = make("sgd_step", "lr=0.1");
    lt_async *async = open_async(&n, &config);
    CHECK_OK(lt_async_set_limit(async, 2));
    CHECK_OK(lt_async_next(async, &e));
    compute(&n, 0, 0);
    back_from_sum(&n);
    CHECK_FAILS(step(&n, 0), LT_EINVAL,
                "each batch has exactly one optimizer step, but this is another");
    lt_async_free(async);
    async = open_async(&n, &config);
    CHECK_OK(lt_async_set_limit(async, 2));
    CHECK_OK(lt_async_next(async, &e));
    CHECK_FAILS(lt_async_next(async, &e), LT_EINVAL,
                "ticket 0 had no optimizer step; each batch requires one");
    CHECK_FAILS(lt_async_next(async, &e), LT_EINVAL, "has failed before");
    lt_async_free(async);
    destroy(&n);
}

/* ==== Packed gradients ======================================================================== */

/* A net whose optimizer has parameters that are adjacent in the server's replica only. */
static net make_some(void)
{
    net n = make("momentum_step", "lr=0.1 momentum=0.9");
    lt_optim_free(n.optim);
    n.optim = lt_optim_new(n.ctx, "momentum_step", (lt_tensor *[]){n.w1, n.shift, n.b2}, 3);
    CHECK(n.optim != NULL);
    return n;
}

/* One batch, in which one of these parameters or another has no gradient, or all have one. */
static void compute_some(net *n, int64_t ticket)
{
    lt_tensor *without = ticket % 3 == 1 ? n->w1 : n->shift;
    CHECK_OK(compute_without(n, ticket, 0.1, &without, ticket % 3 > 0));
}

TEST(a_push_has_the_gradients_of_some_parameters)
{
    lt_group *group;
    lt_async_event e = {0};
    net a = make_some(), b = make_some();
    CHECK_OK(lt_local_open(1, NULL, &group));
    lt_async_config config = live_config("asgd", group, &a);
    lt_async *async = open_async(&a, &config);
    CHECK_OK(lt_async_set_limit(async, STEPS));
    while (e.kind != LT_ASYNC_EVENT_DONE) {
        CHECK_OK(lt_async_next(async, &e));
        if (e.kind == LT_ASYNC_EVENT_COMPUTE)
            compute_some(&a, e.ticket);
    }
    CHECK_OK(lt_async_finish(async));
    lt_async_free(async);
    for (int i = 0; i < STEPS; i++) {
        lt_set_step(b.ctx, i);
        compute_some(&b, i);
    }
    check_same(&a, &b);
    destroy(&a);
    destroy(&b);
    lt_group_close(group);
}
