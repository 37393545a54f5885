/* test_async_live.c - asynchronous training on the ranks of a group that are threads: every ticket
 * is applied once, lost and silent workers are replaced by the others, values of an epoch are kept.
 */
#include <stdatomic.h>

#include "tests/dist/async_net.h"

enum { RANKS = 3, TICKETS = 60, HALF = 30 };

typedef struct job { /* what all ranks share */
    const char *rule;
    int64_t staleness;
    double timeout;
    int leaves, hangs; /* ranks that leave or sleep after some tickets; -1: none */
    int after;         /* how many tickets */
    int prefetch;      /* tickets that a rank holds at a time; 0: 1 */
    int n_buffers[RANKS];
    _Atomic uint64_t masks[TICKETS]; /* dropout masks */
    int asks;          /* rank that asks rank 0 to stop after some tickets; -1: none */
    int releases;      /* rank that gives each third ticket back; -1: none */
    bool ends;         /* rank 0 finishes after HALF tickets */
    bool writes;       /* rank 0 writes to the net before it finishes */
    atomic_int n_over; /* ranks that have finished */
    bool late;         /* rank 0 has read values of later steps when it begins its first batch */
    atomic_bool gone;  /* the rank that leaves or sleeps has come to that point */
    int stops_at;      /* rank 0 stops training after this many pushes; 0: never */
    int done[TICKETS]; /* how often each ticket was applied: by rank 0 */
    int n_applied, silent;
    atomic_int n_lost;
    int64_t largest_delay;
    lt_async_step trace[TICKETS];
    char kept[65], last[65], end[65]; /* SHA-256 of the values */
} job;

typedef struct rank {
    job *job;
    lt_group *group;
    lt_async_kind ended; /* kind of the last event */
    lt_status status;
    char text[256], end[65]; /* end: SHA-256 of the final values */
    int computed;
    int64_t steps; /* of the optimizer, for one parameter */
} rank;

static lt_status take_push(job *j, net *n, lt_async *a, const lt_async_event *e)
{
    j->n_applied += e->applied > 0;
    if (e->applied > 0) {
        j->trace[e->applied - 1] = (lt_async_step){e->worker, e->ticket, e->read};
        j->done[e->ticket]++;
        j->largest_delay = e->delay > j->largest_delay ? e->delay : j->largest_delay;
    }
    if (j->stops_at == j->n_applied)
        lt_async_stop(a, 75);
    if (e->done_below < HALF || j->kept[0])
        return LT_OK;
    LT_TRY(lt_async_load_snapshot(a, HALF));
    return lt_params_sha256(n->params, j->kept);
}

/* A dropout mask of the ticket that the rank computes: a bit for each element. */
static uint64_t mask_of(lt_ctx *ctx)
{
    uint64_t mask = 0;
    lt_tensor *ones = lt_tensor_new(ctx, LT_F32, 2, (int64_t[]){8, 8});
    CHECK_OK(lt_fill(ones, 1));
    lt_tensor *x = lt_run(ctx, "dropout", "p=0.5 train=true", ones, NULL);
    CHECK(x != NULL);
    for (int i = 0; i < 64; i++)
        mask |= (uint64_t)(((float *)lt_data(x))[i] != 0) << i;
    lt_release(x);
    lt_release(ones);
    return mask;
}

static lt_status train(rank *r, net *n, lt_async *a)
{
    job *j = r->job;
    int self = lt_group_rank(r->group);
    for (lt_async_event e = {0};;) {
        LT_TRY(lt_async_next(a, &e));
        r->ended = e.kind;
        if (e.kind == LT_ASYNC_EVENT_STOP && e.worker > 0) {
            CHECK(self == 0 && e.worker == j->asks && e.code == 15);
            lt_async_stop(a, 75);
            continue;
        }
        if (e.kind == LT_ASYNC_EVENT_DONE || e.kind == LT_ASYNC_EVENT_STOP)
            return LT_OK;
        if (e.kind == LT_ASYNC_EVENT_LOST) {
            j->n_lost++;
            j->silent += e.timed_out;
        }
        if (e.kind == LT_ASYNC_EVENT_PUSH)
            LT_TRY(take_push(j, n, a, &e));
        if (self == 0 && j->ends && j->kept[0])
            return LT_OK;
        if (e.kind != LT_ASYNC_EVENT_COMPUTE)
            continue;
        bool troubled = self == j->leaves || self == j->hangs;
        if (troubled && r->computed == j->after)
            j->gone = true;
        if (self == j->leaves && r->computed == j->after)
            return lt_fail(LT_EUSAGE, "it leaves");
        while (self == j->hangs && r->computed == j->after && j->n_lost == 0 &&
               failure_of(r->group) == LT_OK)
            pause_ms(10);
        while (!troubled && j->leaves + j->hangs > -2 && r->computed == j->after && !j->gone)
            pause_ms(1); /* so that it gets that far */
        if (self == j->asks && r->computed == j->after)
            lt_async_stop(a, 15);
        if (self == j->releases && r->computed++ % 3 == 0) {
            LT_TRY(lt_async_release(a));
            continue;
        }
        if (j->stops_at > 0 || j->asks >= 0 || j->ends)
            pause_ms(20); /* so that rank 0 handles events in time */
        j->masks[e.ticket] = mask_of(n->ctx);
        LT_TRY(try_compute(n, e.ticket, 0));
        r->computed++;
    }
}

static void *run_rank(void *ud)
{
    rank *r = ud;
    net n = make("momentum_step", "lr=0.05 momentum=0.5");
    bool root = lt_group_rank(r->group) == 0;
    lt_async_config config = live_config(r->job->rule, r->group, &n);
    config.staleness = r->job->staleness;
    config.prefetch = r->job->prefetch;
    config.n_buffers = r->job->n_buffers[lt_group_rank(r->group)];
    lt_async *a = lt_async_new(n.ctx, n.optim, &config);
    r->status = a ? LT_OK : lt_errcode();
    if (root && a) {
        pause_ms(30); /* the others pull before the run begins */
        r->status = lt_async_snapshot_at(a, HALF);
        if (r->status == LT_OK)
            r->status = lt_async_set_limit(a, TICKETS);
        while (r->job->late && r->status == LT_OK && lt_async_steps(a) == 0)
            pause_ms(1);
        if (r->job->late && r->status == LT_OK)
            r->status = lt_async_read(a);
    }
    if (r->status == LT_OK)
        r->status = train(r, &n, a);
    if (root && r->job->writes)
        CHECK_OK(lt_fill(n.w1, 2));
    snprintf(r->text, sizeof r->text, "%s", r->status == LT_OK ? "" : lt_errmsg());
    if (r->status == LT_OK)
        r->status = lt_async_finish(a);
    r->job->n_over++;
    for (int i = 0; i < 800 && root && r->job->writes && r->job->n_over < RANKS; i++)
        pause_ms(10); /* the others must not wait until it leaves */
    if (r->status == LT_OK)
        CHECK_OK(lt_params_sha256(n.params, r->end));
    r->steps = lt_optim_steps(n.optim, n.scale);
    if (root)
        memcpy(r->job->end, r->end, sizeof r->end);
    lt_async_free(a);
    destroy(&n);
    lt_group_close(r->group);
    return NULL;
}

static void run_job(job *j, rank *ranks, int n)
{
    lt_group *groups[RANKS];
    CHECK_OK(lt_local_open(n, &(lt_group_config){.timeout = j->timeout}, groups));
    for (int i = 0; i < n; i++)
        ranks[i] = (rank){.job = j, .group = groups[i]};
    run_threads(n, run_rank, ranks, sizeof *ranks);
}

/* Runs all ranks, none of which fails and all of which end with this event. */
static void check_job(job *j, rank ranks[RANKS], lt_async_kind ends_with)
{
    run_job(j, ranks, RANKS);
    for (int i = 0; i < RANKS; i++) {
        CHECK_STR(ranks[i].text, "");
        CHECK_EQ(ranks[i].ended, ends_with);
    }
}

static void check_all_applied(const job *j)
{
    for (int t = 0; t < TICKETS; t++)
        if (j->done[t] != 1)
            FAIL("ticket %d was applied %d times", t, j->done[t]);
    CHECK_EQ(j->n_applied, TICKETS);
}

static const job usual = {.rule = "ddc",
                          .staleness = LT_ASYNC_UNBOUNDED,
                          .leaves = -1,
                          .hangs = -1,
                          .after = 5,
                          .n_buffers = {2, 2, 2},
                          .asks = -1,
                          .releases = -1};

TEST(all_ranks_train_and_each_ticket_is_applied_once)
{
    rank ranks[RANKS];
    job j = usual;
    check_job(&j, ranks, LT_ASYNC_EVENT_DONE);
    for (int i = 0; i < RANKS; i++) {
        CHECK(ranks[i].computed > 0);
        CHECK_STR(ranks[i].end, j.end);
        CHECK_EQ(ranks[i].steps, TICKETS);
    }
    check_all_applied(&j);
    CHECK(strlen(j.kept) == 64 && strlen(j.end) == 64);
}

TEST(rank_0_may_begin_after_the_others)
{
    rank ranks[RANKS];
    job j = usual;
    j.late = true;
    check_job(&j, ranks, LT_ASYNC_EVENT_DONE);
    check_all_applied(&j);
}

/* The masks depend on the ticket, not on the worker, so the masks of all workers differ. */
TEST(dropout_masks_follow_the_ticket)
{
    rank ranks[RANKS];
    job j = usual;
    run_job(&j, ranks, RANKS);
    net n = make("sgd_step", "lr=0.1");
    for (int t = 0; t < TICKETS; t++) {
        lt_set_step(n.ctx, t);
        CHECK_EQ(j.masks[t], mask_of(n.ctx));
        compute(&n, t, 0);
        for (int k = 0; k < t; k++)
            CHECK(j.masks[t] != j.masks[k]);
    }
    destroy(&n);
}

/* Replays a trace in one process; *n gets the trained net. */
static void replay(const job *j, const char *rule, net *n)
{
    lt_async_config config = config_of(rule, RANKS);
    config.trace = j->trace;
    config.n_trace = TICKETS;
    *n = make("momentum_step", "lr=0.05 momentum=0.5");
    lt_async *a = open_async(n, &config);
    lt_async_event e = {0};
    CHECK_OK(lt_async_set_limit(a, TICKETS));
    for (int i = 0; e.kind != LT_ASYNC_EVENT_DONE; i++) {
        CHECK_OK(next_event(n, a, 0, &e));
        if (e.kind == LT_ASYNC_EVENT_PUSH)
            CHECK_EQ(e.delay, i - j->trace[i].read);
    }
    lt_async_free(a);
}

TEST(a_replay_has_the_same_weights)
{
    static const char *const rules[] = {"asgd", "dc-a", "gap", "dana", "ormo", "ddc"};
    for (int k = 0; k < 6; k++) {
        rank ranks[RANKS];
        job j = usual;
        net n;
        char sha256[65];
        j.rule = rules[k];
        run_job(&j, ranks, RANKS);
        CHECK_EQ(j.n_applied, TICKETS);
        replay(&j, rules[k], &n);
        CHECK_OK(lt_params_sha256(n.params, sha256));
        CHECK_STR(j.end, sha256);
        destroy(&n);
        replay(&j, "sa", &n); /* another rule: the same delays, other weights */
        destroy(&n);
    }
}

/* With one rank, nothing is delayed: it trains like an ordinary run. */
TEST(one_rank_trains_like_an_ordinary_run)
{
    static const char *const rules[] = {"asgd", "dc-a", "ddc"};
    for (int k = 0; k < 3; k++) {
        rank ranks[RANKS];
        job j = usual;
        char sha256[65];
        j.rule = rules[k];
        run_job(&j, ranks, 1);
        CHECK_STR(ranks[0].text, "");
        net n = make("momentum_step", "lr=0.05 momentum=0.5");
        for (int t = 0; t < TICKETS; t++) {
            lt_set_step(n.ctx, t);
            compute(&n, t, 0);
            if (t == HALF - 1) {
                CHECK_OK(lt_params_sha256(n.params, sha256));
                CHECK_STR(j.kept, sha256);
            }
        }
        CHECK_OK(lt_params_sha256(n.params, sha256));
        CHECK_STR(j.end, sha256);
        destroy(&n);
    }
}

TEST(no_applied_gradient_is_older_than_the_bound)
{
    for (int64_t staleness = 0; staleness <= 2; staleness++) {
        rank ranks[RANKS];
        job j = usual;
        j.staleness = staleness;
        run_job(&j, ranks, RANKS);
        CHECK_EQ(j.n_applied, TICKETS);
        CHECK(j.largest_delay <= staleness);
    }
}

/* The others wait for it, so that it gets that far: the tickets suffice, even if each of them holds
 * two. */
TEST(each_ticket_is_applied_once_if_a_worker_is_lost_at_any_step)
{
    for (int i = 0; i < 16; i++) {
        rank ranks[RANKS];
        job j = usual;
        j.leaves = 1 + i % 2;
        j.after = i;
        j.prefetch = 1 + i / 2 % 2;
        run_job(&j, ranks, RANKS);
        CHECK_STR(ranks[j.leaves].text, "it leaves");
        CHECK_STR(ranks[0].text, "");
        CHECK_STR(ranks[3 - j.leaves].text, "");
        CHECK_EQ(j.n_lost, 1);
        check_all_applied(&j);
    }
}

TEST(a_silent_worker_is_replaced_and_fenced)
{
    rank ranks[RANKS];
    job j = usual;
    j.hangs = 2;
    j.timeout = 1.5;
    run_job(&j, ranks, RANKS);
    CHECK_STR(ranks[0].text, "");
    CHECK_STR(ranks[1].text, "");
    CHECK(j.n_lost == 1 && j.silent == 1);
    check_all_applied(&j);
    CHECK_EQ(ranks[2].status, LT_EPEER);
}

TEST(a_rank_with_another_net_is_refused)
{
    rank ranks[RANKS];
    job j = usual;
    j.n_buffers[1] = 1;
    run_job(&j, ranks, RANKS);
    CHECK_EQ(ranks[0].status, LT_EDESYNC);
    CHECK_STR(ranks[0].text,
              "rank 1 begins asynchronous training with other weights or buffers than rank 0; "
              "initialise or load the same values on all ranks");
    CHECK_EQ(ranks[1].status, LT_EPEER);
}

/* Makes a net, and training of one rank, or of a simulation if group is NULL. */
static lt_async *begin_alone(net *n, lt_group *group)
{
    *n = make("momentum_step", "lr=0.1 momentum=0.9");
    lt_async_config config = config_of("ddc", 1);
    config.buffers = n->buffers;
    config.n_buffers = 2;
    if (group)
        config = live_config("ddc", group, n);
    return open_async(n, &config);
}

/* x is written after a batch, while training goes on. */
static void check_write(lt_group *group, bool is_buffer, double first)
{
    static const char wrong[] =
        "the weights or buffers of the net were written during asynchronous";
    char name[LT_ASYNC_NAME];
    lt_async_event e;
    double value;
    net n;
    lt_async *a = begin_alone(&n, group);
    lt_tensor *x = is_buffer ? n.mean : n.w1;
    CHECK_OK(lt_fill(x, first));
    CHECK_OK(lt_async_read(a)); /* it does nothing before the training */
    CHECK_OK(lt_async_set_limit(a, TICKETS));
    CHECK_OK(lt_async_next(a, &e));
    CHECK_EQ(e.kind, LT_ASYNC_EVENT_COMPUTE);
    CHECK_OK(lt_item(x, 3, &value));
    CHECK_NEAR(value, first, 0);
    compute(&n, e.ticket, 0);
    CHECK_OK(lt_fill(x, 2));
    CHECK_FAILS(lt_async_push(a), LT_EINVAL, wrong);
    CHECK_FAILS(lt_async_next(a, &e), LT_EINVAL, wrong);
    CHECK(!lt_async_state(a, 0, name) && name[0]);
    CHECK_FAILS(lt_errcode(), LT_EINVAL, wrong);
    CHECK_FAILS(lt_async_read(a), LT_EINVAL, wrong);
    CHECK_FAILS(lt_async_load_snapshot(a, HALF), LT_EINVAL, wrong);
    CHECK_FAILS(lt_async_finish(a), LT_EINVAL, wrong);
    lt_async_free(a);
    destroy(&n);
}

TEST(only_the_training_writes_to_the_net)
{
    lt_group *group;
    for (int i = 0; i < 2; i++) {
        CHECK_OK(lt_local_open(1, NULL, &group));
        check_write(group, i == 1, 0.25);
        check_write(NULL, i == 1, 0.25);
        lt_group_close(group);
    }
}

TEST(a_write_at_the_end_is_refused_and_the_other_ranks_finish)
{
    rank ranks[RANKS];
    job j = usual;
    j.writes = true;
    run_job(&j, ranks, RANKS);
    CHECK_EQ(ranks[0].status, LT_EINVAL);
    CHECK_EQ(ranks[1].status, LT_OK);
    CHECK_EQ(ranks[2].status, LT_OK);
    CHECK_STR(ranks[1].end, ranks[2].end);
}

TEST(values_of_a_run_without_batches_remain)
{
    lt_group *group;
    double value;
    CHECK_OK(lt_local_open(1, NULL, &group));
    net n;
    lt_async *a = begin_alone(&n, group);
    CHECK_OK(lt_fill(n.w1, 0.25));
    CHECK_OK(lt_async_finish(a));
    CHECK_OK(lt_item(n.w1, 3, &value));
    CHECK_NEAR(value, 0.25, 0);
    lt_async_free(a);
    destroy(&n);
    lt_group_close(group);
}

TEST(a_batch_may_have_no_gradients)
{
    lt_group *group;
    lt_async_event e;
    CHECK_OK(lt_local_open(1, NULL, &group));
    net n;
    lt_async *a = begin_alone(&n, group);
    CHECK_OK(lt_async_set_limit(a, 1));
    CHECK_OK(lt_async_next(a, &e));
    lt_tensor *all[] = {n.w1, n.scale, n.shift, n.w2, n.b2};
    CHECK_OK(compute_without(&n, e.ticket, 0, all, 5));
    CHECK_OK(lt_async_next(a, &e));
    CHECK_EQ(e.applied, 1);
    CHECK_OK(lt_async_finish(a));
    lt_async_free(a);
    destroy(&n);
    lt_group_close(group);
}

TEST(running_statistics_must_be_buffers_of_the_net)
{
    rank ranks[RANKS];
    job j = usual;
    memset(j.n_buffers, 0, sizeof j.n_buffers);
    run_job(&j, ranks, RANKS);
    CHECK_EQ(ranks[0].status, LT_EUSAGE);
    CHECK_STR(ranks[0].text,
              "a batch norm updates running statistics that are not buffers of the net; give the "
              "net with all its layers to lt.run, or to the optimizer if the loop is your own");
}

TEST(rank_0_stops_all_workers)
{
    rank ranks[RANKS];
    job j = usual;
    j.stops_at = 20;
    check_job(&j, ranks, LT_ASYNC_EVENT_STOP);
    CHECK(j.n_applied >= 20 && j.n_applied < TICKETS);
}

TEST(without_rank_0_the_others_fail)
{
    rank ranks[RANKS];
    job j = usual;
    j.leaves = 0;
    run_job(&j, ranks, RANKS);
    CHECK_STR(ranks[0].text, "it leaves");
    for (int i = 1; i < RANKS; i++)
        CHECK(ranks[i].status == LT_EPEER || ranks[i].ended == LT_ASYNC_EVENT_STOP);
}

TEST(rank_0_stops_when_another_rank_asks_it_to)
{
    rank ranks[RANKS];
    job j = usual;
    j.asks = 2;
    check_job(&j, ranks, LT_ASYNC_EVENT_STOP);
    CHECK(j.n_applied < TICKETS);
}

TEST(rank_0_may_finish_before_all_tickets_are_done)
{
    rank ranks[RANKS];
    job j = usual;
    j.ends = true;
    run_job(&j, ranks, RANKS);
    for (int i = 0; i < RANKS; i++) {
        CHECK_STR(ranks[i].text, "");
        CHECK_EQ(ranks[i].status, LT_OK);
        CHECK_STR(ranks[i].end, j.end);
    }
    CHECK_EQ(ranks[1].ended, LT_ASYNC_EVENT_DONE);
    CHECK(j.n_applied >= HALF && j.n_applied < TICKETS);
}

TEST(tickets_that_are_given_back_are_issued_again)
{
    for (int i = 0; i < 2; i++) {
        rank ranks[RANKS];
        job j = usual;
        j.releases = i; /* rank 0 has the server, too */
        run_job(&j, ranks, RANKS);
        check_all_applied(&j);
    }
}

TEST(a_silent_rank_0_fails_the_job)
{
    rank ranks[RANKS];
    job j = usual;
    j.hangs = 0;
    j.timeout = 1.5;
    run_job(&j, ranks, RANKS);
    for (int i = 0; i < RANKS; i++)
        CHECK_EQ(ranks[i].status, LT_EPEER);
    CHECK_STR(ranks[0].text, "rank 0 has computed for more than 1.5 s");
}
