/* test_mail.c - messages between ranks: threads of one process, and processes over a fake network
 * that delivers in pieces. */
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/tensor.h"
#include "dist/mail/mail.h"
#include "tests/dist/fake_net.h"
#include "tests/lt_test.h"

enum { RANKS = 3, LARGE = 3 * FAKE_PIPE + 17 };
static const lt_message_kind KIND = LT_MSG_GRANT;

typedef struct office { /* the mailboxes of all ranks of a test */
    lt_mail *mail[RANKS];
    bool closed[RANKS];
    fake_hub *hub; /* NULL: threads of one process */
    lt_net net[RANKS];
} office;

/* Opens the mailboxes of processes. Rank `without` has none, so that a test can act for it; -1: all
 * ranks have one. */
static void open_processes(office *o, int without)
{
    static const int node_of[RANKS] = {0, 1, 2};
    *o = (office){.hub = fake_hub_new()};
    for (int i = 0; i < RANKS; i++) {
        o->net[i] = fake_net_new(o->hub, i, RANKS, node_of);
        if (i == without)
            continue;
        o->mail[i] = lt__mail_open_net(&o->net[i]);
        CHECK(o->mail[i] != NULL);
    }
}

static void open_office(office *o, bool over_net)
{
    *o = (office){0};
    if (over_net)
        open_processes(o, -1);
    else
        CHECK_OK(lt__mail_open_local(RANKS, o->mail));
}

static void close_mail(office *o, int rank, double seconds)
{
    if (!o->closed[rank])
        lt__mail_close(o->mail[rank], seconds);
    o->closed[rank] = true;
}

static void close_office(office *o)
{
    for (int i = 0; i < RANKS; i++)
        close_mail(o, i, 1);
    if (!o->hub)
        return;
    for (int i = 0; i < RANKS; i++) {
        o->net[i].close(o->net[i].self);
        lt__mail_free_net(o->mail[i]);
    }
    fake_hub_free(o->hub);
}

static char byte_of(int64_t number, size_t i) { return (char)(number * 31 + (int64_t)i * 7); }

static void send(office *o, int from, int to, int64_t number, size_t bytes)
{
    lt_message *m = lt__message_new(KIND, bytes);
    CHECK(m != NULL);
    m->as.grant.pull = number;
    m->as.grant.ticket[LT_MSG_TICKETS - 1] = -number;
    for (size_t i = 0; i < bytes; i++)
        m->data[i] = byte_of(number, i);
    lt__mail_send(o->mail[from], to, m);
}

/* Takes the next message of rank `to`, which must be this one. */
static void expect(office *o, int to, int from, int64_t number, size_t bytes)
{
    lt_message *m = lt__mail_take(o->mail[to], 10);
    CHECK(m != NULL);
    CHECK_EQ(m->kind, KIND);
    CHECK_EQ(m->from, from);
    CHECK_EQ(m->as.grant.pull, number);
    CHECK_EQ(m->as.grant.ticket[LT_MSG_TICKETS - 1], -number);
    CHECK_EQ(m->bytes, bytes);
    for (size_t i = 0; i < bytes; i++)
        if (m->data[i] != byte_of(number, i))
            FAIL("byte %zu of message %lld is wrong", i, (long long)number);
    lt__message_free(m);
}

static void for_each_transport(void (*fn)(office *o))
{
    for (int over_net = 0; over_net < 2; over_net++) {
        office o;
        open_office(&o, over_net);
        fn(&o);
        close_office(&o);
    }
}

static void check_order(office *o)
{
    static const size_t bytes[] = {0, 1, 64, 100000, 0, LARGE, 3};
    for (int i = 0; i < 7; i++)
        send(o, 0, 1, i, bytes[i]);
    for (int i = 0; i < 7; i++)
        expect(o, 1, 0, i, bytes[i]);
}

TEST(messages_arrive_whole_and_in_order) { for_each_transport(check_order); }

/* Rank 1 begins the second run later than rank 0. */
static void check_runs(office *o)
{
    send(o, 0, 1, 1, 8); /* belongs to the first run; the second run drops it */
    lt__mail_begin_run(o->mail[0]);
    send(o, 0, 1, 2, 8);
    lt__mail_begin_run(o->mail[1]);
    expect(o, 1, 0, 2, 8);
    send(o, 1, 0, 3, 0);
    expect(o, 0, 1, 3, 0);
}

TEST(a_run_takes_no_messages_of_an_earlier_one) { for_each_transport(check_runs); }

/* Everyone sends before anyone takes: nobody blocks. */
static void check_all_to_one(office *o)
{
    int64_t seen[RANKS] = {0};
    for (int i = 0; i < 20; i++)
        for (int from = 0; from < RANKS; from++)
            send(o, from, 0, i, (size_t)i * 5000);
    for (int i = 0; i < 20 * RANKS; i++) {
        lt_message *m = lt__mail_take(o->mail[0], 10);
        CHECK(m != NULL);
        CHECK_EQ(m->as.grant.pull, seen[m->from]++);
        lt__message_free(m);
    }
}

TEST(nobody_waits_for_the_receiver) { for_each_transport(check_all_to_one); }

static void check_timeout(office *o)
{
    double before = lt__seconds();
    CHECK(lt__mail_take(o->mail[2], 0) == NULL);
    CHECK(lt__mail_take(o->mail[2], 0.05) == NULL);
    CHECK(lt__seconds() - before > 0.045);
    send(o, 2, 2, 9, 10);
    expect(o, 2, 2, 9, 10);
}

TEST(taking_waits_at_most_as_long_as_told) { for_each_transport(check_timeout); }

static void add_latency(office *o, double seconds)
{
    for (int i = 0; i < RANKS; i++)
        lt__mail_add_latency(o->mail[i], 0, seconds);
}

/* Messages from and to rank 0 are late, and stay in order. Those between others are not. */
static void check_latency(office *o)
{
    add_latency(o, 0.05);
    for (int to = 1, from = 0; to >= 0; to--, from++) {
        double before = lt__seconds();
        send(o, from, to, 1, 8);
        send(o, from, to, 2, LARGE);
        expect(o, to, from, 1, 8);
        CHECK(lt__seconds() - before >= 0.05);
        expect(o, to, from, 2, LARGE);
    }
    add_latency(o, 1000);
    send(o, 0, 1, 3, 8);
    send(o, 2, 1, 4, 8);
    send(o, 0, 0, 5, 8);
    expect(o, 1, 2, 4, 8);
    expect(o, 0, 0, 5, 8);
    CHECK(lt__mail_take(o->mail[1], 0.01) == NULL);
}

TEST(a_latency_delays_the_messages_of_one_rank) { for_each_transport(check_latency); }

typedef struct sender {
    office *office;
    int rank;
} sender;

static void *send_many(void *ud)
{
    sender *s = ud;
    for (int i = 0; i < 500; i++)
        send(s->office, s->rank, 1, i, (size_t)(i % 7) * 100);
    return NULL;
}

static void check_threads(office *o)
{
    pthread_t thread[2];
    sender senders[2] = {{o, 0}, {o, 2}};
    int64_t seen[RANKS] = {0};
    for (int i = 0; i < 2; i++)
        pthread_create(&thread[i], NULL, send_many, &senders[i]);
    for (int i = 0; i < 1000; i++) {
        lt_message *m = lt__mail_take(o->mail[1], 10);
        CHECK(m && m->as.grant.pull == seen[m->from]++);
        lt__message_free(m);
    }
    for (int i = 0; i < 2; i++)
        pthread_join(thread[i], NULL);
}

TEST(threads_may_send_at_the_same_time) { for_each_transport(check_threads); }

/* ==== Lost ranks ============================================================================== */

static void expect_lost(office *o, int to, int from)
{
    lt_message *m = lt__mail_take(o->mail[to], 10);
    CHECK(m && m->kind == LT_MAIL_LOST && m->from == from);
    lt__message_free(m);
}

TEST(a_rank_that_leaves_is_lost_to_the_others)
{
    office o;
    open_office(&o, false);
    send(&o, 2, 0, 1, 8);
    close_mail(&o, 2, 0);
    expect(&o, 0, 2, 1, 8); /* messages from before arrive */
    expect_lost(&o, 0, 2);
    expect_lost(&o, 1, 2);
    send(&o, 0, 2, 1, 8); /* dropped */
    send(&o, 0, 1, 2, 8);
    expect(&o, 1, 0, 2, 8);
    close_office(&o);
}

/* ==== Processes, one of which the test acts for =============================================== */

enum { ACTED = 2, PART = 1000 }; /* its rank; bytes of a message */

typedef struct head { /* the head of a message, in the order of its bytes */
    int64_t kind, bytes, run;
    lt_message_body as;
} head;

typedef struct bytes { /* the bytes of a message */
    head head;
    char data[PART];
} bytes;

static void fill(bytes *b, int64_t number)
{
    *b = (bytes){.head = {.kind = KIND, .bytes = PART, .as.grant.pull = number}};
    b->head.as.grant.ticket[LT_MSG_TICKETS - 1] = -number;
    for (size_t i = 0; i < PART; i++)
        b->data[i] = byte_of(number, i);
}

static void finish(office *o, lt_request *r)
{
    while (o->net[ACTED].test(o->net[ACTED].self, r) == 0)
        usleep(100);
}

/* Sends bytes [from, end) of a message to rank 0. */
static void send_part(office *o, const bytes *b, size_t from, size_t end)
{
    const lt_net *net = &o->net[ACTED];
    lt_request r;
    if (from == end)
        return;
    CHECK_EQ(net->send(net->self, 0, LT_NET_MAIL, (const char *)b + from, end - from, &r), 0);
    finish(o, &r);
}

static void receive_part(office *o, void *to, size_t n)
{
    const lt_net *net = &o->net[ACTED];
    lt_request r;
    CHECK_EQ(net->receive(net->self, 0, LT_NET_MAIL, to, n, &r), 0);
    finish(o, &r);
}

/* It ends after this many bytes of a message: in the head, between head and data, in the data. */
TEST(a_process_that_ends_is_lost_even_in_the_middle_of_a_message)
{
    static const size_t after[] = {0, 1, sizeof(head) - 1, sizeof(head), sizeof(bytes) - 1};
    for (int i = 0; i < 5; i++) {
        office o;
        bytes b;
        open_processes(&o, ACTED);
        fill(&b, 4);
        send_part(&o, &b, 0, sizeof b);
        expect(&o, 0, ACTED, 4, PART);
        send_part(&o, &b, 0, after[i]);
        atomic_store(&o.hub->ended[ACTED], true);
        expect_lost(&o, 0, ACTED);
        expect_lost(&o, 1, ACTED);
        send(&o, 0, 1, 2, 8); /* the others continue */
        expect(&o, 1, 0, 2, 8);
        send(&o, 0, ACTED, 3, 8); /* dropped */
        CHECK(lt__mail_take(o.mail[0], 0.05) == NULL);
        close_office(&o);
    }
}

TEST(a_slow_sender_delays_nobody)
{
    office o;
    bytes b;
    open_processes(&o, ACTED);
    fill(&b, 4);
    for (size_t at = 0; at < sizeof b; at++) { /* byte by byte */
        send_part(&o, &b, at, at + 1);
        if (at % 100 != 0)
            continue;
        send(&o, 1, 0, (int64_t)at, 8);
        expect(&o, 0, 1, (int64_t)at, 8);
    }
    expect(&o, 0, ACTED, 4, PART);
    close_office(&o);
}

TEST(a_slow_receiver_delays_nobody)
{
    office o;
    static char all[LARGE];
    head h;
    open_processes(&o, ACTED);
    send(&o, 0, ACTED, 9, LARGE); /* more than the network stores */
    send(&o, 0, ACTED, 10, 0);
    for (int i = 0; i < 5; i++) {
        send(&o, 0, 1, i, LARGE);
        expect(&o, 1, 0, i, LARGE);
    }
    receive_part(&o, &h, sizeof h);
    CHECK(h.kind == KIND && h.bytes == LARGE && h.as.grant.pull == 9);
    for (size_t at = 0; at < LARGE; at += 4099)
        receive_part(&o, all + at, LARGE - at < 4099 ? LARGE - at : 4099);
    for (size_t i = 0; i < LARGE; i++)
        if (all[i] != byte_of(9, i))
            FAIL("byte %zu is wrong", i);
    receive_part(&o, &h, sizeof h);
    CHECK(h.bytes == 0 && h.as.grant.pull == 10);
    close_office(&o);
}

TEST(messages_to_a_process_that_ends_are_dropped)
{
    office o;
    open_processes(&o, ACTED);
    send(&o, 0, ACTED, 1, LARGE); /* the end of it never leaves */
    send(&o, 0, ACTED, 2, LARGE);
    send(&o, 0, 1, 3, 8);
    expect(&o, 1, 0, 3, 8);
    atomic_store(&o.hub->ended[ACTED], true);
    expect_lost(&o, 0, ACTED);
    double before = lt__seconds();
    close_mail(&o, 0, 100); /* has nothing to wait for */
    CHECK(lt__seconds() - before < 50);
    close_office(&o);
}

TEST(closing_waits_until_messages_have_left)
{
    office o;
    open_office(&o, true);
    send(&o, 1, 0, 1, LARGE);
    close_mail(&o, 1, 10);
    expect(&o, 0, 1, 1, LARGE);
    close_office(&o);
}

TEST(closing_gives_up_after_a_time)
{
    office o;
    open_office(&o, true);
    close_mail(&o, 0, 0); /* takes nothing any more */
    send(&o, 1, 0, 1, LARGE);
    double before = lt__seconds();
    close_mail(&o, 1, 0.1);
    CHECK(lt__seconds() - before >= 0.1);
    close_office(&o);
}
