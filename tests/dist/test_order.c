/* test_order.c - the order of events in asynchronous training: random histories with duplicated
 * pushes, lost workers and late returns, against a checker that knows only the rules. */
#include <stdlib.h>

#include "dist/async/order.h"
#include "tests/dist/pick.h"
#include "tests/lt_test.h"

enum { WORKERS = 6, TICKETS = 48, HISTORIES = 100000 };

/* ==== The checker ============================================================================= */

typedef struct checker {
    int64_t staleness, drop, max_lead;
    int64_t version, next; /* next: the first ticket that was never issued */
    int done[TICKETS];     /* how often each ticket was applied or skipped */
    int holder[TICKETS];   /* worker that holds it, + 1; or 0 */
    bool computing[WORKERS], lost[WORKERS];
    int64_t read[WORKERS], ticket[WORKERS], pushes[WORKERS];
} checker;

/* The lowest ticket that is not done. */
static int64_t done_below(const checker *c)
{
    int64_t t = 0;
    while (t < TICKETS && c->done[t] > 0)
        t++;
    return t;
}

/* The rule that an answer to a pull breaks, or NULL. */
static const char *check_grant(checker *c, const lt_grant *g)
{
    if (g->version != c->version)
        return "a worker read another version than the current one";
    if (c->lost[g->worker] || c->computing[g->worker])
        return "a pull was answered for a worker that is lost or computes";
    for (int k = 0; k < g->n; k++) {
        int64_t t = g->ticket[k];
        if (c->done[t] > 0)
            return "a ticket was issued although it is done";
        if (c->holder[t] != 0 && c->holder[t] != g->worker + 1)
            return "two workers hold a ticket";
        if (t >= c->next && c->max_lead != LT_UNBOUNDED && t - done_below(c) >= c->max_lead)
            return "a ticket was issued beyond the window";
        c->next = t >= c->next ? t + 1 : c->next;
        c->holder[t] = g->worker + 1;
    }
    if (g->n == 0)
        return NULL;
    c->computing[g->worker] = true;
    c->ticket[g->worker] = g->ticket[0];
    c->read[g->worker] = g->version;
    return NULL;
}

/* The rule that the result of a push breaks, or NULL. */
static const char *check_push(checker *c, int worker, int64_t number, const lt_push *p)
{
    if (p->kind == LT_PUSH_FENCED)
        return c->lost[worker] ? NULL : "a worker was fenced, but is not lost";
    if (c->lost[worker])
        return "a push of a lost worker was accepted";
    if (p->kind == LT_PUSH_DUPLICATE)
        return number < c->pushes[worker] ? NULL : "a new push was taken for a duplicate";
    if (number != c->pushes[worker]++)
        return "a push was accepted twice or out of order";
    if (!c->computing[worker] || p->ticket != c->ticket[worker])
        return "a push has another ticket than its pull";
    if (p->delay != c->version - c->read[worker])
        return "a delay is wrong";
    c->computing[worker] = false;
    c->holder[p->ticket] = 0;
    if (p->kind == LT_PUSH_DROPPED)
        return c->drop != LT_UNBOUNDED && p->delay >= c->drop ? NULL : "a fresh push was dropped";
    if (++c->done[p->ticket] > 1)
        return "a ticket was applied twice";
    if (p->kind == LT_PUSH_SKIPPED)
        return NULL;
    c->version++;
    if (c->staleness != LT_UNBOUNDED && p->delay > c->staleness)
        return "a push is older than the staleness bound";
    if (c->drop != LT_UNBOUNDED && p->delay >= c->drop)
        return "a push above the drop limit was applied";
    return NULL;
}

static void release(checker *c, int worker)
{
    c->computing[worker] = false;
    for (int t = 0; t < TICKETS; t++)
        if (c->holder[t] == worker + 1)
            c->holder[t] = 0;
}

static void lose(checker *c, int worker)
{
    c->lost[worker] = true;
    release(c, worker);
}

/* ==== Random histories ======================================================================== */

/* Bugs that a history may have, as if the order had them. */
typedef enum bug {
    NO_BUG,
    LATE_BY_1,       /* the staleness bound is 1 too high */
    DROPS_LATE,      /* the drop limit is 1 too high */
    FORGETS_LOSS,    /* a lost worker may pull again */
    ISSUES_TWICE,    /* a ticket is issued again although its worker computes it */
    ACCEPTS_TWICE,   /* a repeated push counts as a new one */
    REPEATS_DROPPED, /* a dropped ticket is issued again although it is done */
    WIDE_WINDOW      /* the window is 1 too high */
} bug;

typedef struct history {
    lt_order *order;
    checker checker;
    bug bug;
    const char *broken; /* the first rule that was broken, or NULL */
    bool waiting[WORKERS];
    int workers, n_applied, n_dropped, n_duplicates, n_fenced, n_returned;
} history;

/* Notes a broken rule; NULL is allowed. */
static void note(history *h, const char *broken)
{
    if (!h->broken)
        h->broken = broken;
}

static void must(history *h, bool ok, const char *text) { note(h, ok ? NULL : text); }

static void answer_pulls(history *h)
{
    lt_grant g;
    while (lt__order_grant(h->order, &g)) {
        note(h, check_grant(&h->checker, &g));
        must(h, h->waiting[g.worker], "a pull was answered twice");
        must(h, g.n > 0 || lt__order_done_below(h->order) >= lt__order_limit(h->order),
             "a worker got no ticket");
        h->waiting[g.worker] = false;
    }
}

static void pull(history *h, int worker)
{
    bool idle = !h->checker.computing[worker] && !h->waiting[worker];
    lt_status status = lt__order_pull(h->order, worker);
    bool lost = h->checker.lost[worker];
    must(h, status == (lost || idle ? LT_OK : LT_EINVAL), "a pull was refused, or not refused");
    h->waiting[worker] |= idle && !lost;
}

static void push(history *h, int worker)
{
    checker *c = &h->checker;
    lt_push p;
    int64_t number = c->pushes[worker];
    bool skip = pick(10) == 0;
    if (number > 0 && pick(8) == 0)
        number = pick(number);
    if (pick(40) == 0)
        number += 1 + pick(3);
    lt_status status = lt__order_push(h->order, worker, number, skip, &p);
    bool refused = !c->lost[worker] && number >= c->pushes[worker] &&
                   (number > c->pushes[worker] || !c->computing[worker]);
    must(h, status == (refused ? LT_EDESYNC : LT_OK), "a push was refused, or not refused");
    if (status != LT_OK)
        return;
    if (h->bug == ACCEPTS_TWICE && p.kind == LT_PUSH_DUPLICATE)
        p.kind = LT_PUSH_APPLIED;
    if (h->bug == REPEATS_DROPPED && p.kind == LT_PUSH_DROPPED)
        p.kind = LT_PUSH_SKIPPED;
    note(h, check_push(c, worker, number, &p));
    must(h, lt__order_version(h->order) == c->version, "the version is wrong");
    h->n_applied += p.kind == LT_PUSH_APPLIED;
    h->n_dropped += p.kind == LT_PUSH_DROPPED;
    h->n_duplicates += p.kind == LT_PUSH_DUPLICATE;
    h->n_fenced += p.kind == LT_PUSH_FENCED;
}

/* Replaces the order by a restored copy, which has the same state. */
static void save_and_load(history *h)
{
    size_t n, m;
    int64_t *state = lt__order_save(h->order, &n);
    CHECK(state != NULL);
    lt__order_free(h->order);
    h->order = lt__order_load(state, n);
    CHECK(h->order != NULL);
    int64_t *again = lt__order_save(h->order, &m);
    CHECK(again && m == n && memcmp(state, again, n * sizeof *state) == 0);
    free(state);
    free(again);
}

static lt_order_config some_config(history *h, int64_t limit)
{
    lt_order_config config = {.workers = h->workers = 1 + (int)pick(WORKERS),
                              .prefetch = 1 + (int)pick(LT_MAX_PREFETCH),
                              .staleness = pick(2) ? LT_UNBOUNDED : pick(8),
                              .drop = pick(2) ? LT_UNBOUNDED : 1 + pick(6),
                              .max_lead = pick(2) ? LT_UNBOUNDED : 1 + pick(9),
                              .limit = limit};
    h->checker.staleness = config.staleness;
    h->checker.drop = config.drop;
    h->checker.max_lead = config.max_lead;
    config.staleness += h->bug == LATE_BY_1 && config.staleness != LT_UNBOUNDED;
    config.drop += h->bug == DROPS_LATE && config.drop != LT_UNBOUNDED;
    config.max_lead += h->bug == WIDE_WINDOW && config.max_lead != LT_UNBOUNDED;
    return config;
}

static void restart(history *h)
{
    checker *c = &h->checker;
    lt_order_config config = some_config(h, lt__order_limit(h->order));
    CHECK_OK(lt__order_restart(h->order, &config));
    for (int i = 0; i < WORKERS; i++) {
        lose(c, i);
        c->lost[i] = h->waiting[i] = false;
        c->pushes[i] = 0;
    }
}

static void some_event(history *h)
{
    int worker = (int)pick(h->workers);
    int64_t kind = pick(200);
    int64_t limit = lt__order_limit(h->order);
    if (kind < 1) {
        restart(h);
    } else if (kind < 3) {
        save_and_load(h);
    } else if (kind < 6) {
        if (h->bug == FORGETS_LOSS)
            lt__order_release(h->order, worker);
        else
            h->n_returned += lt__order_lose(h->order, worker);
        lose(&h->checker, worker);
        h->waiting[worker] = false;
    } else if (kind < 9) {
        lt__order_release(h->order, worker);
        if (h->bug != ISSUES_TWICE)
            release(&h->checker, worker);
        h->waiting[worker] = false;
    } else if (kind < 15 && limit < TICKETS) {
        CHECK_OK(lt__order_set_limit(h->order, limit + pick(TICKETS - limit) + 1));
    } else if (kind < 100) {
        pull(h, worker);
    } else {
        push(h, worker);
    }
    answer_pulls(h);
}

/* Lets the workers that are left finish. Without one, adds workers. */
static void finish(history *h)
{
    int64_t limit = lt__order_limit(h->order);
    bool any = false;
    for (int i = 0; i < h->workers; i++)
        any |= !h->checker.lost[i];
    if (!any)
        restart(h);
    for (int step = 0; !h->broken && lt__order_done_below(h->order) < limit; step++) {
        must(h, step < 100000, "training does not end");
        int worker = (int)pick(h->workers);
        if (h->checker.computing[worker])
            push(h, worker);
        else if (!h->waiting[worker])
            pull(h, worker);
        answer_pulls(h);
    }
    for (int t = 0; t < TICKETS; t++)
        must(h, h->checker.done[t] == (t < limit), "a ticket was lost");
}

/* Runs history `number` until it ends or breaks a rule. */
static void run_history(history *h, uint64_t number)
{
    seed = number;
    lt_order_config config = some_config(h, pick(TICKETS / 2));
    h->order = lt__order_new(&config);
    CHECK(h->order != NULL);
    for (int64_t left = pick(200); left > 0 && !h->broken; left--)
        some_event(h);
    if (!h->broken)
        finish(h);
    lt__order_free(h->order);
}

TEST(random_histories_keep_all_rules)
{
    int64_t applied = 0, dropped = 0, duplicates = 0, fenced = 0, returned = 0;
    for (int i = 0; i < HISTORIES; i++) {
        history h = {0};
        run_history(&h, (uint64_t)i);
        if (h.broken)
            FAIL("history %d: %s", i, h.broken);
        applied += h.n_applied;
        dropped += h.n_dropped;
        duplicates += h.n_duplicates;
        fenced += h.n_fenced;
        returned += h.n_returned;
    }
    printf("%lld applied, %lld dropped, %lld duplicates, %lld fenced, %lld returned\n",
           (long long)applied, (long long)dropped, (long long)duplicates, (long long)fenced,
           (long long)returned);
    CHECK(applied > 1000000 && dropped > 10000 && duplicates > 10000 && fenced > 10000 &&
          returned > 10000);
}

/* ==== The checker itself ====================================================================== */

TEST(the_checker_finds_each_broken_rule)
{
    checker c = {.staleness = 1, .drop = 3, .max_lead = 3};
    lt_grant a = {.worker = 0, .version = 0, .n = 2, .ticket = {0, 1}};
    lt_grant b = {.worker = 1, .version = 0, .n = 1, .ticket = {1}};
    CHECK(check_grant(&c, &a) == NULL);
    CHECK_STR(check_grant(&c, &a), "a pull was answered for a worker that is lost or computes");
    CHECK_STR(check_grant(&c, &b), "two workers hold a ticket");
    b.ticket[0] = 2;
    CHECK(check_grant(&c, &b) == NULL);
    lt_push p = {LT_PUSH_APPLIED, 0, 0, 1};
    CHECK(check_push(&c, 0, 0, &p) == NULL);
    CHECK_STR(check_push(&c, 0, 0, &p), "a push was accepted twice or out of order");
    c.pushes[0] = 1;
    CHECK_STR(check_push(&c, 0, 1, &p), "a push has another ticket than its pull");
    p = (lt_push){LT_PUSH_APPLIED, 2, 0, 2};
    CHECK_STR(check_push(&c, 1, 0, &p), "a delay is wrong");
    c.pushes[1] = 0;
    c.version = 2;
    p.delay = 2;
    CHECK_STR(check_push(&c, 1, 0, &p), "a push is older than the staleness bound");
    a = (lt_grant){.worker = 0, .version = 2, .n = 1, .ticket = {1}};
    CHECK_STR(check_grant(&c, &a), "a worker read another version than the current one");
    a.version = 3;
    a.ticket[0] = 0;
    CHECK_STR(check_grant(&c, &a), "a ticket was issued although it is done");
}

TEST(random_histories_find_each_bug)
{
    static const char *const found[] = {
        [LATE_BY_1] = "a push is older than the staleness bound",
        [DROPS_LATE] = "a push above the drop limit was applied",
        [FORGETS_LOSS] = "a pull was answered for a worker that is lost or computes",
        [ISSUES_TWICE] = "two workers hold a ticket",
        [ACCEPTS_TWICE] = "a push was accepted twice or out of order",
        [REPEATS_DROPPED] = "a ticket was issued although it is done",
        [WIDE_WINDOW] = "a ticket was issued beyond the window"};
    for (int i = LATE_BY_1; i <= WIDE_WINDOW; i++) {
        bool is_found = false;
        for (uint64_t number = 0; number < 1000 && !is_found; number++) {
            history h = {.bug = (bug)i};
            run_history(&h, number);
            is_found = h.broken && strcmp(h.broken, found[i]) == 0;
        }
        if (!is_found)
            FAIL("no history finds that %s", found[i]);
    }
}

/* ==== Single rules ============================================================================ */

/* A worker pulls, and gets this ticket. */
static void take(lt_order *o, int worker, int64_t ticket)
{
    lt_grant g;
    CHECK_OK(lt__order_pull(o, worker));
    CHECK(lt__order_grant(o, &g));
    CHECK(g.worker == worker && g.ticket[0] == ticket);
}

static lt_order *open_order(int workers, int64_t staleness, int64_t drop, int64_t limit)
{
    lt_order_config config = {workers, 1, staleness, drop, LT_UNBOUNDED, limit};
    lt_order *o = lt__order_new(&config);
    CHECK(o != NULL);
    return o;
}

TEST(with_staleness_0_one_worker_computes_at_a_time)
{
    lt_order *o = open_order(2, 0, LT_UNBOUNDED, 2);
    lt_grant g;
    lt_push p;
    CHECK_OK(lt__order_pull(o, 1));
    CHECK_OK(lt__order_pull(o, 0));
    CHECK(lt__order_grant(o, &g));
    CHECK_EQ(g.worker, 1); /* it pulled first */
    CHECK(!lt__order_grant(o, &g));
    CHECK_OK(lt__order_push(o, 1, 0, false, &p));
    CHECK(lt__order_grant(o, &g));
    CHECK(g.worker == 0 && g.ticket[0] == 1 && g.version == 1);
    CHECK_OK(lt__order_push(o, 0, 0, false, &p));
    CHECK_EQ(p.delay, 0);
    CHECK(lt__order_version(o) == 2 && lt__order_done_below(o) == 2);
    lt__order_free(o);
}

TEST(a_lost_worker_returns_its_tickets_and_stays_fenced)
{
    lt_order *o = open_order(2, LT_UNBOUNDED, LT_UNBOUNDED, 3);
    lt_push p;
    take(o, 0, 0);
    take(o, 1, 1);
    CHECK_EQ(lt__order_lose(o, 0), 1);
    CHECK_EQ(lt__order_lose(o, 0), 0);
    CHECK_EQ(lt__order_lose(o, 7), 0);
    CHECK(lt__order_is_lost(o, 0) && !lt__order_is_lost(o, 1));
    CHECK_OK(lt__order_push(o, 0, 0, false, &p));
    CHECK_EQ(p.kind, LT_PUSH_FENCED);
    CHECK_EQ(lt__order_version(o), 0);
    CHECK_OK(lt__order_push(o, 1, 0, false, &p));
    CHECK(p.ticket == 1 && lt__order_is_done(o, 1) && lt__order_done_below(o) == 0);
    take(o, 1, 0); /* again */
    lt__order_free(o);
}

TEST(a_worker_that_comes_back_is_a_new_one)
{
    lt_order *o = open_order(2, LT_UNBOUNDED, LT_UNBOUNDED, 2);
    lt_grant g;
    lt_push p;
    CHECK_OK(lt__order_pull(o, 0));
    CHECK(lt__order_grant(o, &g));
    CHECK_OK(lt__order_push(o, 0, 0, false, &p));
    CHECK_EQ(p.kind, LT_PUSH_APPLIED);
    lt__order_join(o, 0); /* it is not lost */
    CHECK_OK(lt__order_pull(o, 0));
    CHECK(lt__order_grant(o, &g));
    CHECK_EQ(g.ticket[0], 1);
    CHECK_EQ(lt__order_lose(o, 0), 1);
    lt__order_join(o, 0);
    CHECK(!lt__order_is_lost(o, 0));
    CHECK_FAILS(lt__order_check_push(o, 0, 0), LT_EDESYNC, "does not compute a ticket");
    CHECK_OK(lt__order_pull(o, 0));
    CHECK(lt__order_grant(o, &g));
    CHECK_EQ(g.ticket[0], 1);
    CHECK_OK(lt__order_push(o, 0, 0, false, &p)); /* its pushes count from 0 */
    CHECK_EQ(p.kind, LT_PUSH_APPLIED);
    CHECK_EQ(p.ticket, 1);
    CHECK_EQ(lt__order_done_below(o), 2);
    lt__order_free(o);
}

TEST(with_a_window_workers_wait_for_the_lowest_ticket)
{
    lt_order_config config = {2, 1, LT_UNBOUNDED, LT_UNBOUNDED, .max_lead = 2, .limit = 3};
    lt_order *o = lt__order_new(&config);
    lt_grant g;
    lt_push p;
    CHECK(o != NULL);
    take(o, 0, 0);
    take(o, 1, 1);
    CHECK_OK(lt__order_push(o, 1, 0, false, &p));
    CHECK_OK(lt__order_pull(o, 1));
    CHECK(!lt__order_grant(o, &g)); /* ticket 0 is not done */
    CHECK_OK(lt__order_push(o, 0, 0, false, &p));
    CHECK(lt__order_grant(o, &g));
    CHECK(g.worker == 1 && g.ticket[0] == 2);
    lt__order_free(o);
}

TEST(wrong_numbers_are_refused)
{
    lt_order *o = open_order(1, LT_UNBOUNDED, LT_UNBOUNDED, 1);
    lt_push p;
    CHECK_FAILS(lt__order_pull(o, 1), LT_EINVAL, "worker 1 does not exist");
    CHECK_FAILS(lt__order_push(o, -1, 0, false, &p), LT_EINVAL, "worker -1 does not exist");
    CHECK_FAILS(lt__order_push(o, 0, 0, false, &p), LT_EDESYNC,
                "worker 0 sent push 0, but has sent 0 before and does not compute a ticket");
    CHECK_FAILS(lt__order_set_limit(o, 0), LT_EINVAL,
                "the number of tickets cannot decrease from 1 to 0");
    CHECK_OK(lt__order_pull(o, 0));
    CHECK_FAILS(lt__order_pull(o, 0), LT_EINVAL, "worker 0 pulls twice without a push");
    lt_order_config config = {1, 1, 0, 1, 1, 1};
    lt_order_config wrong[] = {config, config, config, config, config, config};
    wrong[0].workers = 0;
    wrong[1].prefetch = LT_MAX_PREFETCH + 1;
    wrong[2].staleness = -2;
    wrong[3].drop = 0;
    wrong[4].max_lead = 0;
    wrong[5].limit = -1;
    for (int i = 0; i < 6; i++)
        CHECK(lt__order_new(&wrong[i]) == NULL && lt_errcode() == LT_EINVAL);
    lt__order_free(o);
}

/* Every number of a saved state replaced by others: a state that loads is consistent. */
TEST(a_damaged_state_is_refused_or_consistent)
{
    int refused = 0;
    for (uint64_t i = 0; i < 300; i++) {
        history h = {0};
        size_t n;
        seed = i;
        lt_order_config config = some_config(&h, 1 + pick(TICKETS - 1));
        h.order = lt__order_new(&config);
        for (int64_t left = pick(100); left > 0; left--)
            some_event(&h);
        CHECK(!h.broken);
        int64_t *state = lt__order_save(h.order, &n);
        for (size_t k = 0; k < n; k++) {
            const int64_t values[] = {state[k] + 1, state[k] - 1, -1,
                                      INT64_MAX,    INT64_MIN,    pick(9)};
            int64_t kept = state[k];
            for (int v = 0; v < 6; v++) {
                state[k] = values[v];
                lt_order *o = lt__order_load(state, n);
                refused += !o;
                lt__order_free(o);
            }
            state[k] = kept;
            CHECK(lt__order_load(state, k) == NULL);
        }
        free(state);
        lt__order_free(h.order);
    }
    CHECK(refused > 10000);
}
