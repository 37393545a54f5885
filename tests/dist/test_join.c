/* test_join.c - an elastic job over ZeroMQ: workers join a server, leave it and come back. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "dist/async/gradient.h"
#include "dist/group.h"
#include "dist/mail/star_mail.h"
#include "tests/dist/async_net.h"

enum { TICKETS = 60 };

/* ThreadSanitizer does not see how the threads of ZeroMQ synchronize. */
LT_API const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "ignore_noninstrumented_modules=1"; }

static char folder[] = "/tmp/luatrain-join-XXXXXX";
static char key_file[64];
/* The plugin is in the build folder, two folders above this program's. */
__attribute__((constructor)) static void make_folder(void)
{
    char program[4096];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    program[n > 0 ? n : 0] = '\0';
    for (int i = 0; i < 3; i++)
        *strrchr(program, '/') = '\0';
    setenv("LUATRAIN_PLUGINS", program, 0);
    if (mkdtemp(folder))
        snprintf(key_file, sizeof key_file, "%s/key", folder);
}
__attribute__((destructor)) static void remove_folder(void)
{
    unlink(key_file);
    rmdir(folder);
}

/* A server at a free port of this machine. Its address is in `address`. */
static lt_group *serve(double timeout, char address[64])
{
    lt_group *server;
    lt_join_config config = {"127.0.0.1:0", key_file, timeout};
    lt_status status = lt_serve_open(&config, &server);
    if (status == LT_EENV && strstr(lt_errmsg(), "libluatrain-zmq.so is missing"))
        SKIP("%s", lt_errmsg());
    CHECK_OK(status);
    snprintf(address, 64, "%s", lt_serve_address(server));
    return server;
}

static lt_group *join(const char *address)
{
    lt_group *worker;
    CHECK_OK(lt_join_open(&(lt_join_config){address, key_file, 60}, &worker));
    return worker;
}

/* The next message at a mailbox must be of this kind and rank. Skips those that only tell that a
 * large message is on its way. */
static lt_message *expect(lt_group *group, lt_message_kind kind, int from)
{
    lt_message *m = lt__mail_take(lt__group_mail(group), 60);
    while (m && (m->kind == LT_MSG_HEARTBEAT || m->kind == LT_MSG_ALIVE)) {
        lt__message_free(m);
        m = lt__mail_take(lt__group_mail(group), 60);
    }
    CHECK(m != NULL);
    CHECK_EQ(m->kind, kind);
    CHECK_EQ(m->from, from);
    return m;
}

TEST(workers_get_free_ranks_and_come_back)
{
    char address[64], host[64] = "";
    lt_group *server = serve(60, address);
    gethostname(host, sizeof host - 1);
    lt_group *first = join(address), *second = join(address);
    CHECK_EQ(lt_group_rank(server), 0);
    CHECK_EQ(lt_group_rank(first), 1);
    CHECK_EQ(lt_group_rank(second), 2);
    CHECK_EQ(lt_group_size(second), LT_MAX_JOINED);
    lt_message *m = expect(server, LT_MAIL_JOINED, 1);
    CHECK(m->bytes == strlen(host) && memcmp(m->data, host, m->bytes) == 0);
    lt__message_free(m);
    lt__message_free(expect(server, LT_MAIL_JOINED, 2));
    lt_group_close(first);
    pause_ms(1000); /* so that the server notices it */
    lt_group *third = join(address);
    CHECK_EQ(lt_group_rank(third), 3); /* rank 1 may still get answers for the lost worker */
    lt__message_free(expect(server, LT_MAIL_LOST, 1));
    lt__message_free(expect(server, LT_MAIL_JOINED, 3));
    first = join(address);
    CHECK_EQ(lt_group_rank(first), 1);
    lt__message_free(expect(server, LT_MAIL_JOINED, 1));
    lt_group_close(third);
    lt_group_close(server);
    lt__message_free(expect(first, LT_MAIL_LOST, 0));
    lt__message_free(expect(second, LT_MAIL_LOST, 0));
    lt_group_close(first);
    lt_group_close(second);
}

static void send(lt_group *from, int to, lt_message_kind kind, int64_t number, size_t bytes)
{
    lt_message *m = lt__message_new(kind, bytes);
    CHECK(m != NULL);
    if (kind == LT_MSG_PUSH)
        m->as.push.number = number;
    else
        m->as.finish.steps = number;
    for (size_t i = 0; i < bytes; i++)
        m->data[i] = (char)(i * 7 + (size_t)number);
    lt__mail_send(lt__group_mail(from), to, m);
}

TEST(messages_arrive_whole_and_in_order)
{
    static const size_t bytes[] = {1, 64, 100000, 3, 5000000, 17};
    char address[64];
    lt_group *server = serve(60, address), *worker = join(address);
    lt__message_free(expect(server, LT_MAIL_JOINED, 1));
    for (int i = 0; i < 6; i++) {
        send(server, 1, LT_MSG_FINISH, i, bytes[i]);
        send(worker, 0, LT_MSG_PUSH, i, bytes[i]);
    }
    for (int k = 0; k < 12; k++) {
        int i = k / 2;
        lt_message *m = k % 2 ? expect(server, LT_MSG_PUSH, 1) : expect(worker, LT_MSG_FINISH, 0);
        CHECK_EQ(k % 2 ? m->as.push.number : m->as.finish.steps, i);
        CHECK_EQ(m->bytes, bytes[i]);
        for (size_t at = 0; at < m->bytes; at++)
            if (m->data[at] != (char)(at * 7 + (size_t)i))
                FAIL("byte %zu of message %d is wrong", at, i);
        lt__message_free(m);
    }
    lt_group_close(worker);
    lt_group_close(server);
}

TEST(a_worker_compares_with_rank_0_whenever_it_joins)
{
    char address[64];
    lt_group *server = serve(60, address);
    CHECK_OK(lt_group_compare(server, "the seed", "7"));
    CHECK_OK(lt_group_compare_numbers(server, "the mean", (double[]){1, 2}, 2, 0.1));
    lt_group *same = join(address), *other = join(address), *early = join(address);
    CHECK_OK(lt_group_compare(same, "the seed", "7"));
    CHECK_OK(lt_group_compare_numbers(same, "the mean", (double[]){1, 2.1}, 2, 0.1));
    CHECK_FAILS(lt_group_compare(other, "the seed", "8"), LT_EDESYNC,
                "the ranks disagree: the seed: rank 0 has '7', rank 2 has '8'");
    CHECK_FAILS(lt_group_compare(early, "the net", "7"), LT_EDESYNC,
                "the script of this worker is at 'the net', but the server's was at 'the seed'");
    int64_t number = 5;
    lt_sum sum = {"a sum", &number, 1, LT_I64, LT_I64, 1};
    CHECK_FAILS(lt_group_allreduce(same, &sum), LT_EUSAGE,
                "a sum requires all ranks at the same time, but workers join and leave");
    lt_group_close(same);
    lt_group_close(other);
    lt_group_close(early);
    lt_group_close(server);
}

TEST(a_key_is_required_and_must_be_the_servers)
{
    char address[64], other[80];
    struct stat now;
    lt_group *server = serve(60, address), *group = NULL;
    CHECK(stat(key_file, &now) == 0);
    CHECK_EQ(now.st_mode & 0777, 0600);
    CHECK_FAILS(lt_join_open(&(lt_join_config){address, NULL, 10}, &group), LT_EUSAGE,
                "--join requires --key FILE");
    CHECK_FAILS(lt_join_open(&(lt_join_config){address, "/nowhere/key", 10}, &group), LT_EENV,
                "the key /nowhere/key: No such file or directory");
    snprintf(other, sizeof other, "%s/other", folder);
    lt_group *second;
    CHECK_OK(lt_serve_open(&(lt_join_config){"127.0.0.1:0", other, 10}, &second)); /* makes it */
    CHECK_FAILS(lt_join_open(&(lt_join_config){address, other, 10}, &group), LT_EENV,
                "has closed the connection; it has another key");
    CHECK(chmod(other, 0640) == 0);
    CHECK_FAILS(lt_join_open(&(lt_join_config){address, other, 10}, &group), LT_EENV,
                "can be read by other users");
    CHECK(chmod(other, 0600) == 0 && truncate(other, 12) == 0);
    CHECK_FAILS(lt_join_open(&(lt_join_config){address, other, 10}, &group), LT_EENV,
                "is not a key; luatrain --serve writes one");
    unlink(other);
    lt_group_close(second);
    group = join(address); /* the server still works */
    lt_group_close(group);
    lt_group_close(server);
}

TEST(addresses_are_checked)
{
    char address[64];
    lt_group *server = serve(60, address), *group = NULL;
    CHECK_FAILS(lt_serve_open(&(lt_join_config){address, key_file, 10}, &group), LT_EENV,
                "Address already in use");
    CHECK_FAILS(lt_serve_open(&(lt_join_config){"host:99999", key_file, 10}, &group), LT_EUSAGE,
                "--serve must be [HOST:]PORT, but is 'host:99999'");
    CHECK_FAILS(lt_join_open(&(lt_join_config){"7000", key_file, 10}, &group), LT_EUSAGE,
                "--join must be HOST:PORT, but is '7000'");
    lt_group_close(server);
    CHECK_FAILS(lt_join_open(&(lt_join_config){address, key_file, 1}, &group), LT_EPEER,
                "no server of luatrain has answered at 127.0.0.1:");
}

/* ==== Training ================================================================================ */

typedef struct worker { /* a process, as a thread */
    const char *address;
    lt_group *group; /* NULL: it joins; else the server */
    int after;       /* it leaves after so many tickets; 0: it stays to the end */
    int computed, rank, joined, lost;
    int done[TICKETS]; /* server: how often each ticket was applied */
    atomic_int n_joined, n_applied;
    lt_status status;
    char text[256], end[65];
} worker;

static lt_status train(worker *w, net *n, lt_async *a, bool root)
{
    for (lt_async_event e;;) {
        LT_TRY(lt_async_next(a, &e));
        switch (e.kind) {
        case LT_ASYNC_EVENT_COMPUTE:
            if (w->after > 0 && w->computed == w->after)
                return lt_fail(LT_EDONE, "it leaves");
            pause_ms(root ? 40 : 5); /* rank 0 is slow, so that workers have time to join */
            LT_TRY(try_compute(n, e.ticket, 0));
            w->computed++;
            break;
        case LT_ASYNC_EVENT_PUSH:
            w->done[e.ticket] += e.applied > 0;
            w->n_applied += e.applied > 0;
            break;
        case LT_ASYNC_EVENT_JOINED:
            w->n_joined++;
            CHECK(e.host[0] != '\0');
            break;
        case LT_ASYNC_EVENT_LOST: w->lost++; break;
        default: return LT_OK;
        }
    }
}

static void *run_worker(void *ud)
{
    worker *w = ud;
    bool root = w->group != NULL;
    lt_group *group = root ? w->group : NULL;
    if (!root && (w->status = lt_join_open(&(lt_join_config){w->address, key_file, 60}, &group))) {
        snprintf(w->text, sizeof w->text, "%s", lt_errmsg());
        return NULL;
    }
    w->rank = lt_group_rank(group);
    net n = make("momentum_step", "lr=0.05 momentum=0.5");
    lt_async_config config = live_config("ddc", group, &n);
    lt_async *a = lt_async_new(n.ctx, n.optim, &config);
    w->status = a ? LT_OK : lt_errcode();
    if (w->status == LT_OK && root)
        w->status = lt_async_set_limit(a, TICKETS);
    if (w->status == LT_OK)
        w->status = train(w, &n, a, root);
    if (w->status == LT_OK)
        w->status = lt_async_finish(a);
    snprintf(w->text, sizeof w->text, "%s", w->status == LT_OK ? "" : lt_errmsg());
    if (lt_params_sha256(n.params, w->end) != LT_OK)
        w->end[0] = '\0';
    lt_async_free(a);
    destroy(&n);
    if (!root)
        lt_group_close(group);
    return NULL;
}

static void start(pthread_t *thread, worker *w)
{
    CHECK(pthread_create(thread, NULL, run_worker, w) == 0);
}

TEST(each_ticket_is_applied_once_while_workers_come_and_go)
{
    char address[64];
    static worker server, left, stayed, late;
    pthread_t thread[4];
    server = (worker){.group = serve(60, address)};
    left = (worker){.address = address, .after = 4};
    late = stayed = (worker){.address = address};
    start(&thread[0], &server);
    start(&thread[1], &left);
    start(&thread[2], &stayed);
    pthread_join(thread[1], NULL);
    start(&thread[3], &late);
    for (int i = 0; i < 4; i++)
        if (i != 1)
            pthread_join(thread[i], NULL);
    for (worker *const *w = (worker *const[]){&server, &stayed, &late, NULL}; *w; w++)
        if ((*w)->status != LT_OK)
            FAIL("rank %d: %s: %s", (*w)->rank, lt_status_text((*w)->status), (*w)->text);
    CHECK_EQ(left.status, LT_EDONE);
    CHECK_EQ(left.computed, 4);
    CHECK_EQ(server.n_joined, 3);
    CHECK_EQ(server.lost, 1);
    CHECK_EQ(server.n_applied, TICKETS);
    for (int i = 0; i < TICKETS; i++)
        CHECK_EQ(server.done[i], 1);
    CHECK_STR(stayed.end, server.end);
    CHECK_STR(late.end, server.end);
    CHECK_FAILS(lt_join_open(&(lt_join_config){address, key_file, 60}, &late.group), LT_EDONE,
                "the job at 127.0.0.1:");
    lt_group_close(server.group);
}

/* Trains on a server, and on a worker that gets a ticket and calls push. The worker must be lost,
 * and learn why: `text`. Nobody else is. */
static void lose_worker(void (*push)(lt_group *group), const char *text)
{
    char address[64], got[256] = "";
    static worker server;
    pthread_t thread;
    lt_status code;
    int rank = -1;
    server = (worker){.group = serve(60, address)};
    lt_group *group = join(address);
    start(&thread, &server);
    lt__mail_begin_run(lt__group_mail(group));
    lt_message *pull = lt__message_new(LT_MSG_PULL, 0);
    pull->as.pull.number = 1;
    lt__mail_send(lt__group_mail(group), 0, pull);
    lt_message *m = NULL;
    while ((!m || m->kind != LT_MSG_GRANT) && server.n_applied < TICKETS) {
        lt__message_free(m);
        m = lt__mail_take(lt__group_mail(group), 0.1);
    }
    lt__message_free(m);
    push(group);
    pthread_join(thread, NULL);
    if (server.status != LT_OK)
        FAIL("%s", server.text);
    CHECK(lt_group_failure(group, &rank, &code, got, sizeof got));
    CHECK_EQ(rank, 0);
    if (!strstr(got, text))
        FAIL("%s, not: %s", got, text);
    for (int i = 0; i < TICKETS; i++)
        CHECK_EQ(server.done[i], 1);
    CHECK_EQ(server.lost, 1);
    lt_group_close(group);
    lt_group_close(server.group);
}

static void push_64_bytes(lt_group *group) { send(group, 0, LT_MSG_PUSH, 0, 64); }

TEST(an_invalid_push_loses_its_worker_only)
{
    lose_worker(push_64_bytes, "the gradient of rank 1 does not fit the server's net");
}

/* Pushes a gradient with this momentum. */
static void push_momentum(lt_group *group, double momentum)
{
    net n = make("momentum_step", "lr=0.05 momentum=0.5");
    lt_image image;
    lt_gradient g;
    CHECK_OK(lt__image_open(&image, n.ctx, n.optim, n.buffers, 2));
    CHECK_OK(lt__gradient_open(&g, &image, true));
    lt_tensor *rest[6] = {0}, *loss = loss_of(&n, 0, rest);
    CHECK_OK(lt_backward(loss, NULL));
    n.opt[1][lt_schema_find(&lt_optim_def(n.optim)->schema, "momentum")].f = momentum;
    CHECK_OK(lt__gradient_store(&g, (const lt_opt *[]){n.opt[0], n.opt[1]}, LT_APPLIED, 1));
    lt__mail_send(lt__group_mail(group), 0, g.message);
    g.message = NULL;
    lt_release(loss);
    for (int i = 0; i < 6; i++)
        lt_release(rest[i]);
    lt__gradient_close(&g);
    lt__image_close(&image);
    destroy(&n);
}

static void push_momentum_of_one(lt_group *group) { push_momentum(group, 1); }
static void push_negative_momentum(lt_group *group) { push_momentum(group, -0.5); }

TEST(options_out_of_range_lose_their_worker_only)
{
    lose_worker(push_negative_momentum,
                "the gradient of rank 1: momentum_step: momentum must be at least 0, but is -0.5");
    lose_worker(push_momentum_of_one,
                "the gradient of rank 1: the rule ddc requires a momentum below 1, but it is 1");
}
