/* test_async_memory.c - memory runs out at each allocation in turn, of asynchronous training and of
 * messages. Each time, the calls must fail with a message or do without the memory, and no rank may
 * wait forever. The test also runs under AddressSanitizer, which finds leaks.
 */
#include <stdlib.h>
#include <unistd.h>

#include "dist/mail/mail.h"
#include "tests/dist/async_net.h"
#include "tests/dist/failing.h"

/* The fake network's own memory never runs out. */
#define malloc __real_malloc
#define calloc __real_calloc
#include "tests/dist/fake_net.h"
#undef malloc
#undef calloc

static void check_failure(int n, lt_status status, const char *text)
{
    bool ok = status == LT_EPEER ? text[0] != '\0' && !strstr(text, "silent")
                                 : status == LT_ENOMEM && strstr(text, "out of memory");
    if (!ok)
        FAIL("allocation %d: '%s': %s", n, lt_status_text(status), text);
}

/* ==== Simulation and replay =================================================================== */

enum { TICKETS = 6, WORKERS = 2 };

static lt_status train(net *n, lt_async *a, int64_t tickets)
{
    lt_async_event e = {0};
    LT_TRY(lt_async_set_limit(a, tickets));
    while (e.kind != LT_ASYNC_EVENT_DONE)
        LT_TRY(next_event(n, a, 0.5, &e));
    return LT_OK;
}

static lt_status simulate(net *n, net *other, const lt_async_config *config)
{
    lt_async *a = lt_async_new(n->ctx, n->optim, config), *b = NULL;
    lt_status status = a ? train(n, a, TICKETS) : lt_errcode();
    if (status == LT_OK && !config->trace) {
        b = lt_async_new(other->ctx, other->optim, config);
        status = b ? pass_state(a, b) : lt_errcode();
        if (status == LT_OK)
            status = train(other, b, TICKETS + 3);
    }
    lt_async_free(a);
    lt_async_free(b);
    return status;
}

static void walk(const lt_async_config *config)
{
    int n = 0;
    for (bool any = true; any;) {
        net a = make("momentum_step", "lr=0.05 momentum=0.5");
        net b = make("momentum_step", "lr=0.05 momentum=0.5");
        fail_at(++n);
        lt_status status = simulate(&a, &b, config);
        any = end_failing();
        if (status != LT_OK)
            check_failure(n, status, lt_errmsg());
        CHECK(any || status == LT_OK);
        compute(&a, 0, 0); /* an ordinary step */
        destroy(&a);
        destroy(&b);
    }
    printf("%s: %d allocations\n", config->rule, n - 1);
    CHECK(n > 100);
}

static lt_async_config usual_config(const char *rule)
{
    lt_async_config config = config_of(rule, WORKERS);
    config.prefetch = 2;
    return config;
}

TEST(every_allocation_of_a_simulation_can_fail)
{
    static const char *const rules[] = {"ddc", "dc-a", "ormo"};
    for (int i = 0; i < 3; i++) {
        lt_async_config config = usual_config(rules[i]);
        config.times = (double[]){1, 1.5};
        config.n_times = 2;
        walk(&config);
    }
}

TEST(every_allocation_of_a_replay_can_fail)
{
    static const lt_async_step trace[] = {{0, 0, 0}, {1, 1, 0}, {1, 2, 2}, {0, 3, 1}};
    lt_async_config config = usual_config("ddc");
    config.trace = trace;
    config.n_trace = 4;
    walk(&config);
}

/* ==== Ranks =================================================================================== */

enum { RANKS = 2 };

typedef struct rank {
    lt_group *group;
    net net, other; /* other: to restore the state in */
    lt_ctx *server;
    lt_status status;
    char text[256];
    int applied;
    bool silent;
} rank;

static lt_status run_events(rank *r, lt_async *a)
{
    for (lt_async_event e = {0}; e.kind != LT_ASYNC_EVENT_DONE && e.kind != LT_ASYNC_EVENT_STOP;) {
        LT_TRY(next_event(&r->net, a, 0.5, &e));
        r->applied += e.kind == LT_ASYNC_EVENT_PUSH && e.applied > 0;
        r->silent |= e.kind == LT_ASYNC_EVENT_LOST && e.timed_out;
    }
    return LT_OK;
}

static lt_status read_results(rank *r, lt_async *a)
{
    lt_async_config config = usual_config("ddc");
    LT_TRY(lt_async_load_snapshot(a, TICKETS));
    LT_TRY(lt_async_read(a));
    lt_async *b = lt_async_new(r->other.ctx, r->other.optim, &config);
    lt_status status = b ? pass_state(a, b) : lt_errcode();
    lt_async_free(b);
    return status;
}

static lt_status run_live(rank *r, lt_async *a)
{
    bool root = lt_group_rank(r->group) == 0;
    if (root) {
        LT_TRY(lt_async_snapshot_at(a, TICKETS));
        LT_TRY(lt_async_set_limit(a, TICKETS));
    }
    LT_TRY(run_events(r, a));
    return root ? read_results(r, a) : LT_OK;
}

static void *run_rank(void *ud)
{
    rank *r = ud;
    lt_async_config config = usual_config("ddc");
    config.group = r->group;
    config.buffers = r->net.buffers;
    config.n_buffers = 2;
    config.server = r->server;
    lt_async *a = lt_async_new(r->net.ctx, r->net.optim, &config);
    r->status = a ? run_live(r, a) : lt_errcode();
    snprintf(r->text, sizeof r->text, "%s", r->status == LT_OK ? "" : lt_errmsg());
    lt_async_free(a);
    lt_group_close(r->group);
    return NULL;
}

/* Opens the group and runs all ranks. */
static lt_status run_ranks(rank *ranks)
{
    lt_group *groups[RANKS];
    LT_TRY(lt_local_open(RANKS, NULL, groups));
    for (int i = 0; i < RANKS; i++)
        ranks[i].group = groups[i];
    run_threads(RANKS, run_rank, ranks, sizeof *ranks);
    return LT_OK;
}

static void check_ranks(int n, const rank *ranks, bool any)
{
    for (int i = 0; i < RANKS; i++) {
        if (ranks[i].status != LT_OK)
            check_failure(n, ranks[i].status, ranks[i].text);
        CHECK(any || ranks[i].status == LT_OK);
        CHECK(!ranks[i].silent); /* nobody has waited for the timeout */
    }
    if (ranks[0].status == LT_OK)
        CHECK_EQ(ranks[0].applied, TICKETS);
}

/* The ranks wait for each other for a part of a second each time. Therefore only each fifth
 * allocation fails, except in the long tests. */
TEST(every_allocation_of_two_ranks_can_fail)
{
    int n = 0, stride = getenv("LUATRAIN_TEST_SLOW") ? 1 : 5 * test_stride(3);
    alarm(600); /* ends the test if a rank waits forever */
    for (bool any = true; any;) {
        static rank ranks[RANKS];
        memset(ranks, 0, sizeof ranks);
        for (int i = 0; i < RANKS; i++) {
            ranks[i].net = make("momentum_step", "lr=0.05 momentum=0.5");
            ranks[i].other = make("momentum_step", "lr=0.05 momentum=0.5");
        }
        ranks[0].server = lt_open(&(lt_config){.device = "cpu"});
        fail_at(n += stride);
        lt_status status = run_ranks(ranks);
        any = end_failing();
        if (status == LT_OK) {
            check_ranks(n, ranks, any);
        } else {
            check_failure(n, status, lt_errmsg());
            lt_ctx_free(ranks[0].server);
        }
        for (int i = 0; i < RANKS; i++) {
            destroy(&ranks[i].net);
            destroy(&ranks[i].other);
        }
    }
    alarm(0);
    printf("at least %d allocations\n", n - stride);
    CHECK(n > 100);
}

/* ==== Messages ================================================================================ */

enum { MESSAGES = 4, LARGE = 100000 };

/* Sends messages from rank 0 to rank 1. Each arrives, unless rank 0 is lost to rank 1. */
static lt_status exchange(lt_mail *const *mail)
{
    static const size_t bytes[MESSAGES] = {0, LARGE, 1, 64};
    lt_status status = LT_OK;
    int sent = 0;
    for (lt_message *m; sent < MESSAGES && (m = lt__message_new(5, bytes[sent])); sent++) {
        memset(m->data, 7, m->bytes);
        lt__mail_send(mail[0], 1, m);
    }
    if (sent < MESSAGES)
        status = lt_errcode();
    for (int i = 0; i < sent; i++) {
        lt_message *m = lt__mail_take(mail[1], 60);
        CHECK(m != NULL);
        bool lost = m->kind == LT_MAIL_LOST;
        if (!lost)
            CHECK_EQ(m->bytes, bytes[i]);
        lt__message_free(m);
        if (lost)
            break;
    }
    return status;
}

static lt_status exchange_as_threads(void)
{
    lt_mail *mail[2];
    LT_TRY(lt__mail_open_local(2, mail));
    lt_status status = exchange(mail);
    lt__mail_close(mail[0], 0);
    lt_message *m = lt__mail_take(mail[1], 60);
    CHECK(m && m->kind == LT_MAIL_LOST && m->from == 0);
    lt__message_free(m);
    lt__mail_close(mail[1], 0);
    return status;
}

static lt_status exchange_as_processes(void)
{
    static const int node_of[2] = {0, 1};
    fake_hub *hub = fake_hub_new();
    lt_net nets[2];
    lt_mail *mail[2] = {NULL, NULL};
    lt_status status = LT_OK;
    for (int i = 0; i < 2; i++)
        nets[i] = fake_net_new(hub, i, 2, node_of);
    for (int i = 0; i < 2 && status == LT_OK; i++)
        status = (mail[i] = lt__mail_open_net(&nets[i])) ? LT_OK : lt_errcode();
    if (status == LT_OK)
        status = exchange(mail);
    for (int i = 0; i < 2; i++)
        lt__mail_close(mail[i], 0);
    for (int i = 0; i < 2; i++) {
        nets[i].close(nets[i].self);
        lt__mail_free_net(mail[i]);
    }
    fake_hub_free(hub);
    return status;
}

static void walk_messages(lt_status (*fn)(void))
{
    int n = 0;
    for (bool any = true; any;) {
        fail_at(++n);
        lt_status status = fn();
        any = end_failing();
        if (status != LT_OK)
            check_failure(n, status, lt_errmsg());
        CHECK(any || status == LT_OK);
    }
    CHECK(n > 2 * MESSAGES);
}

TEST(every_allocation_of_messages_can_fail)
{
    walk_messages(exchange_as_threads);
    walk_messages(exchange_as_processes);
}
