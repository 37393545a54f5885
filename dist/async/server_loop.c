/* server_loop.c - the server thread of live asynchronous training; see server_loop.h. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/async/server_loop.h"
#include "dist/group.h"
#include "dist/mail/star_mail.h"

static const double TICK_SECONDS = 0.1; /* time between two checks of the workers */

/* ==== Answers ================================================================================= */

static double now_of(lt_server_loop *l) { return lt__active_seconds(&l->clock); }

/* After a failure, all workers are told to stop, and rank 0 gets the failure. */
static void fail(lt_server_loop *l, lt_status status)
{
    if (l->status == LT_OK) {
        l->status = status;
        strncpy(l->text, lt_errmsg(), sizeof l->text - 1);
    }
    l->stopped = true;
}

/* Sends m, which is taken. NULL means that its allocation has failed; the receiver waits for the
 * message, so the job then fails. */
static void send(lt_server_loop *l, int to, lt_message *m)
{
    if (!m) {
        fail(l, LT_ENOMEM);
        lt_group_fail(l->group);
        return;
    }
    if (to != 0) {
        l->wire_bytes += (int64_t)m->bytes;
        lt__mail_send(l->mail, to, m);
    } else {
        m->from = 0;
        lt__inbox_put(&l->to_root, m);
    }
}

static void report(lt_server_loop *l, const lt_async_event *event)
{
    lt_message *m = lt__message_new(LT_MSG_EVENT, sizeof *event);
    if (m)
        memcpy(m->data, event, sizeof *event);
    send(l, 0, m);
}

/* Tells a worker to stop, once. */
static void stop_worker(lt_server_loop *l, int i)
{
    if (l->members[i].stop_sent)
        return;
    l->members[i].stop_sent = true;
    lt_message *m = lt__message_new(LT_MSG_STOP, 0);
    if (m)
        m->as.stop.code = l->code;
    send(l, i, m);
}

/* A message with the values of the net; with_slots: see lt__image_pack(). New. NULL with LT_ENOMEM,
 * or the device's error. */
static lt_message *pack(const lt_image *net, lt_message_kind kind, bool with_slots)
{
    lt_message *m = lt__message_new(kind, net->bytes + (with_slots ? net->slot_bytes : 0));
    if (!m || lt__image_pack(net, with_slots, m->data) == LT_OK)
        return m;
    lt__message_free(m);
    return NULL;
}

static lt_status grant(lt_server_loop *l, const lt_grant *g)
{
    bool any = g->n > 0;
    lt_member *w = &l->members[g->worker];
    lt_message *m = any ? pack(&l->replica.image, LT_MSG_GRANT, false)
                        : lt__message_new(LT_MSG_GRANT, 0);
    if (!m)
        return lt_errcode();
    m->as.grant.pull = w->pull;
    m->as.grant.version = g->version;
    m->as.grant.n = g->n;
    _Static_assert(sizeof m->as.grant.ticket == sizeof g->ticket, "a grant has all tickets");
    memcpy(m->as.grant.ticket, g->ticket, sizeof g->ticket);
    w->last_message = now_of(l);
    w->computing = w->pull_expected = any;
    w->stop_sent = !any;
    w->read = g->version;
    send(l, g->worker, m);
    return LT_OK;
}

static lt_status answer_pulls(lt_server_loop *l)
{
    lt_grant g;
    for (bool any = !l->stopped; any;) {
        LT_TRY(lt__server_grant(&l->server, &g, &any));
        if (any)
            LT_TRY(grant(l, &g));
    }
    return LT_OK;
}

/* ==== Messages ================================================================================ */

/* Returns the tickets of a lost worker to the order, which issues them to others. Returns their
 * number. */
static int forget(lt_server_loop *l, int i)
{
    l->members[i].computing = l->members[i].pull_expected = false;
    l->members[i].stop_sent = l->members[i].lost = true;
    return lt__order_lose(l->server.order, i);
}

/* Declares a worker lost, and reports it to rank 0. */
static void lose(lt_server_loop *l, int i, bool silent)
{
    if (lt__order_is_lost(l->server.order, i) ||
        (l->members[i].stop_sent && !l->members[i].computing))
        return; /* a worker that knows that training is over may leave */
    if (i == 0 || lt__group_has_processes(l->group)) {
        if (i == 0)
            lt_fail(LT_EPEER, "rank 0 has computed for more than %g s", l->heartbeat_timeout);
        else if (silent)
            lt_fail(LT_EPEER, "rank %d was silent for more than %g s", i, l->heartbeat_timeout);
        else
            lt_fail(LT_EPEER, "rank %d has failed or ended", i);
        fail(l, LT_EPEER);
        if (silent)
            lt_group_fail(l->group);
    }
    lt_async_event event = {
        .kind = LT_ASYNC_EVENT_LOST, .worker = i, .n_returned = forget(l, i), .timed_out = silent};
    memcpy(event.host, l->members[i].host, sizeof event.host);
    if (!l->members[i].is_new) /* otherwise nobody has heard of it */
        report(l, &event);
}

/* A worker has joined an elastic job, with the rank of a lost one or of none. */
static void take_worker(lt_server_loop *l, const lt_message *m)
{
    lt_member *w = &l->members[m->from];
    *w = (lt_member){.last_message = now_of(l), .is_new = true};
    memcpy(w->host, m->data, LT_MIN(m->bytes, sizeof w->host - 1));
    lt__order_lose(l->server.order, m->from);
    lt__order_join(l->server.order, m->from);
}

/* A worker pulls for the first time: its script and settings agree with those of the server. */
static void report_joined(lt_server_loop *l, int i)
{
    lt_async_event event = {.kind = LT_ASYNC_EVENT_JOINED, .worker = i};
    memcpy(event.host, l->members[i].host, sizeof event.host);
    l->members[i].is_new = false;
    report(l, &event);
}

/* A message was invalid. If a worker of an elastic job has sent it, only that worker is lost. */
static lt_status blame(lt_server_loop *l, int worker, lt_status status)
{
    bool is_invalid = status == LT_EDESYNC || status == LT_EINVAL || status == LT_EUSAGE;
    if (!is_invalid || worker == 0 || !lt_group_is_elastic(l->group))
        return status;
    lt__mail_refuse(l->mail, worker, lt_errmsg());
    lose(l, worker, false);
    return LT_OK;
}

/* Makes l->gradient a view of a push. In an elastic job, checks its options, too: otherwise the
 * worker has done that. */
static lt_status view(lt_server_loop *l, const lt_message *m)
{
    LT_TRY(lt__gradient_view(&l->gradient, m));
    if (l->gradient.skip || !lt_group_is_elastic(l->group) ||
        lt__rule_check_push(l->server.rule, &l->gradient) == LT_OK)
        return LT_OK;
    return lt_fail_prefix("the gradient of rank %d", m->from);
}

static lt_status push(lt_server_loop *l, const lt_message *m)
{
    lt_push p;
    lt_member *w = &l->members[m->from];
    w->computing = false;
    if (l->stopped)
        return LT_OK; /* its ticket will be issued again if training is resumed */
    lt_status status = view(l, m);
    if (status == LT_OK)
        status = lt__order_check_push(l->server.order, m->from, m->as.push.number);
    if (status != LT_OK)
        return blame(l, m->from, status);
    LT_TRY(lt__server_push(&l->server, m->from, m->as.push.number, &l->gradient, &p));
    if (p.kind == LT_PUSH_FENCED)
        send(l, m->from, lt__message_new(LT_MSG_FENCED, 0));
    if (p.kind == LT_PUSH_FENCED || p.kind == LT_PUSH_DUPLICATE)
        return LT_OK;
    lt_async_event event = lt__server_event(&l->server, &p, m->from, w->read, &l->gradient);
    event.time = lt__seconds();
    report(l, &event);
    l->stopped |= l->last > 0 && lt__order_version(l->server.order) >= l->last;
    return LT_OK;
}

static lt_status pull(lt_server_loop *l, const lt_message *m)
{
    if (lt__order_is_lost(l->server.order, m->from)) {
        send(l, m->from, lt__message_new(LT_MSG_FENCED, 0));
        return LT_OK;
    }
    /* rank 0 may read values of the server, such as those of a finished epoch, before it pulls */
    bool compares = m->from > 0 && m->as.pull.number == 1 && !lt_group_is_elastic(l->group);
    if (compares && m->as.pull.digest != l->digest)
        return lt_fail(LT_EDESYNC,
                       "rank %d begins asynchronous training with other weights or buffers than "
                       "rank 0; initialise or load the same values on all ranks",
                       m->from);
    if (l->members[m->from].is_new)
        report_joined(l, m->from);
    l->members[m->from].pull = m->as.pull.number;
    l->members[m->from].pull_expected = false;
    if (l->stopped)
        return LT_OK;
    return blame(l, m->from, lt__order_pull(l->server.order, m->from));
}

/* Training continues until rank 0 stops it. */
static void report_request(lt_server_loop *l, const lt_message *m)
{
    if (!l->stopped)
        report(l, &(lt_async_event){
                      .kind = LT_ASYNC_EVENT_STOP, .worker = m->from, .code = m->as.stop.code});
}

/* Declares workers without a recent message lost. time: when the server sent LT_MSG_CHECK to
 * itself. All messages that arrived before this time have been handled. */
static void check_workers(lt_server_loop *l, double time)
{
    for (int i = 0; i < l->n && l->n > 1; i++) {
        bool expected = l->members[i].computing ||
                        (i > 0 && (l->members[i].pull_expected || l->closing));
        if (expected && time - l->members[i].last_message > l->heartbeat_timeout)
            lose(l, i, true);
    }
}

static lt_status handle(lt_server_loop *l, const lt_message *m)
{
    lt_member *w = &l->members[m->from];
    if (m->kind == LT_MSG_CHECK) {
        check_workers(l, m->as.check.time);
        return LT_OK;
    }
    w->last_message = now_of(l);
    l->wire_bytes += m->from != 0 ? (int64_t)m->bytes : 0;
    if (l->status != LT_OK && m->kind != LT_MAIL_LOST && m->kind != LT_MSG_LEAVE) {
        w->computing &= m->kind == LT_MSG_PULL || m->kind == LT_MSG_STOP_REQUEST;
        return LT_OK; /* the server has failed */
    }
    switch (m->kind) {
    case LT_MSG_PULL: return pull(l, m);
    case LT_MSG_PUSH: return push(l, m);
    case LT_MSG_RELEASE:
        lt__order_release(l->server.order, m->from);
        w->computing = w->pull_expected = false;
        return LT_OK;
    case LT_MSG_STOP_REQUEST: report_request(l, m); return LT_OK;
    case LT_MAIL_JOINED: take_worker(l, m); return LT_OK;
    case LT_MSG_ALIVE:
    case LT_MSG_HEARTBEAT: return LT_OK; /* a message is on its way */
    default: lose(l, m->from, false); return LT_OK;
    }
}

/* ==== The thread ============================================================================== */

/* Sends a heartbeat to each worker every heartbeat_timeout / 4 seconds. Also sends LT_MSG_CHECK to
 * this thread, which arrives after all messages so far. Skips messages for which there is no
 * memory. */
static void tick(lt_server_loop *l)
{
    double now = now_of(l);
    lt_message *m;
    if (now - l->last_check >= TICK_SECONDS && (m = lt__message_new(LT_MSG_CHECK, 0))) {
        l->last_check = now;
        m->as.check.time = now;
        lt__mail_send(l->mail, 0, m);
    }
    if (now - l->last_heartbeat < l->heartbeat_timeout / 4)
        return;
    l->last_heartbeat = now;
    for (int i = 1; i < l->n; i++)
        if (!lt__order_is_lost(l->server.order, i) && (m = lt__message_new(LT_MSG_HEARTBEAT, 0)))
            send(l, i, m);
}

static void stop_waiting(lt_server_loop *l)
{
    for (int i = 0; l->stopped && i < l->n; i++)
        if (!l->members[i].computing)
            stop_worker(l, i);
}

/* Whether all workers but rank 0 know that training is over, or are lost. */
static bool all_know(const lt_server_loop *l)
{
    bool all = true;
    for (int i = 1; i < l->n; i++)
        all &= l->members[i].stop_sent && !l->members[i].computing;
    return all;
}

/* Locks the loop when it is not paused. */
static void lock_running(lt_server_loop *l)
{
    pthread_mutex_lock(&l->lock);
    tick(l);
    while (l->paused) {
        struct timespec until = lt__after(TICK_SECONDS);
        pthread_cond_clockwait(&l->resumed, &l->lock, CLOCK_MONOTONIC, &until);
        tick(l);
    }
}

/* Handles a message, which may be NULL. Returns false at the end. */
static bool run_once(lt_server_loop *l, const lt_message *m)
{
    lock_running(l);
    double before = lt__seconds();
    lt_status status = m ? handle(l, m) : LT_OK;
    if (status == LT_OK)
        status = answer_pulls(l);
    l->busy += lt__seconds() - before;
    if (status != LT_OK)
        fail(l, status);
    stop_waiting(l);
    bool over = l->closing && (all_know(l) || l->status != LT_OK);
    pthread_mutex_unlock(&l->lock);
    return !over;
}

static void *run(void *ud)
{
    lt_server_loop *l = ud;
    for (int i = 0; i < l->n; i++)
        l->members[i].last_message = now_of(l);
    for (bool more = true; more;) {
        lt_message *m = lt__mail_take(l->mail, TICK_SECONDS);
        more = run_once(l, m);
        lt__message_free(m);
    }
    return NULL;
}

/* ==== Opening ================================================================================= */

static void free_loop(lt_server_loop *l)
{
    lt__gradient_close(&l->gradient);
    lt__server_close(&l->server);
    lt__replica_close(&l->replica);
    lt_ctx_free(l->ctx);
    lt__inbox_free(&l->to_root);
    pthread_cond_destroy(&l->resumed);
    pthread_mutex_destroy(&l->lock);
    free(l->members);
    free(l);
}

static lt_status open_loop(lt_server_loop *l, lt_ctx *ctx, const lt_image *of,
                           const lt_async_config *config)
{
    LT_TRY(LT_CALLOC(l->members, l->n, "for %d workers", l->n));
    LT_TRY(lt__replica_open(&l->replica, ctx, of));
    LT_TRY(lt__gradient_open(&l->gradient, &l->replica.image, true));
    LT_TRY(lt__server_open(&l->server, &l->replica.image, config));
    for (int i = 0; i < l->n; i++) {
        bool absent = i > 0 && lt_group_is_elastic(l->group);
        if (absent || (config->lost && config->lost[i]))
            forget(l, i);
    }
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int error = pthread_create(&l->thread, NULL, run, l);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return error == 0 ? LT_OK : lt_fail(LT_ENOMEM, "cannot start a thread for the server");
}

lt_server_loop *lt__server_loop_open(lt_mail *mail, lt_ctx *ctx, const lt_image *of,
                                     const lt_async_config *config, double heartbeat_timeout)
{
    lt_server_loop *l = lt__calloc(1, sizeof *l, "for the server");
    if (!l)
        return NULL;
    l->group = config->group;
    l->mail = mail;
    l->n = config->workers;
    l->heartbeat_timeout = heartbeat_timeout;
    /* until lt__server_loop_set_limit(), so that a state can be restored before */
    l->paused = true;
    lt__inbox_open(&l->to_root);
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->resumed, NULL);
    if (open_loop(l, ctx, of, config) == LT_OK) {
        l->ctx = ctx;
        return l;
    }
    free_loop(l);
    return NULL;
}

/* ==== Calls of rank 0 ========================================================================= */

/* Copies the initial values, buffers and slots from rank 0, once. The loop must be locked. */
static lt_status begin(lt_server_loop *l, const lt_image *from)
{
    if (l->begun)
        return LT_OK;
    LT_TRY(lt__image_copy(&l->replica.image, from));
    l->begun = true;
    l->began = lt__seconds();
    l->busy = 0;
    return lt__image_digest(from, &l->digest);
}

lt_status lt__server_loop_set_limit(lt_server_loop *l, int64_t tickets, const lt_image *from)
{
    pthread_mutex_lock(&l->lock);
    lt_status status = lt__order_set_limit(l->server.order, tickets);
    if (status == LT_OK)
        status = begin(l, from);
    if (status == LT_OK)
        l->paused = false;
    pthread_cond_broadcast(&l->resumed);
    pthread_mutex_unlock(&l->lock);
    return status;
}

void lt__server_loop_pause(lt_server_loop *l, bool on)
{
    pthread_mutex_lock(&l->lock);
    l->paused = on || !l->begun;
    pthread_cond_broadcast(&l->resumed);
    pthread_mutex_unlock(&l->lock);
}

void lt__server_loop_stop(lt_server_loop *l, int code)
{
    pthread_mutex_lock(&l->lock);
    l->stopped = true;
    l->code = code;
    pthread_mutex_unlock(&l->lock);
}

lt_status lt__server_loop_status(lt_server_loop *l)
{
    pthread_mutex_lock(&l->lock);
    lt_status status = l->status == LT_OK ? LT_OK : lt_fail(l->status, "%s", l->text);
    pthread_mutex_unlock(&l->lock);
    return status;
}

/* ==== Closing ================================================================================= */

/* Ends the thread. now: does not wait for the workers. */
static void end_thread(lt_server_loop *l, bool now)
{
    pthread_mutex_lock(&l->lock);
    l->closing = true;
    if (now && l->status == LT_OK)
        l->status = LT_EPEER;
    if (!l->stopped)
        l->code = LT_STOP_FINISHED;
    l->stopped = true;
    l->paused = false;
    pthread_cond_broadcast(&l->resumed);
    pthread_mutex_unlock(&l->lock);
    pthread_join(l->thread, NULL);
}

static lt_status send_final(lt_server_loop *l)
{
    for (int i = 1; i < l->n; i++) {
        if (lt__order_is_lost(l->server.order, i))
            continue;
        lt_message *m = pack(&l->replica.image, LT_MSG_FINISH, true);
        if (!m)
            return lt_errcode();
        m->as.finish.steps = lt__server_steps(&l->server);
        send(l, i, m);
    }
    return LT_OK;
}

/* Tells workers that joined after the thread's last message that training is over. */
static void end_joining(lt_server_loop *l)
{
    lt__mail_end(l->mail);
    for (lt_message *m; (m = lt__mail_take(l->mail, 0)); lt__message_free(m))
        run_once(l, m);
}

lt_status lt__server_loop_finish(lt_server_loop *l, const lt_image *from)
{
    if (l->finished)
        return LT_OK;
    pthread_mutex_lock(&l->lock);
    lt_status status = begin(l, from);
    pthread_mutex_unlock(&l->lock);
    LT_TRY(status);
    end_thread(l, false);
    if (lt_group_is_elastic(l->group))
        end_joining(l);
    l->finished = true;
    LT_TRY(lt__server_loop_status(l));
    return send_final(l);
}

void lt__server_loop_close(lt_server_loop *l)
{
    if (!l)
        return;
    if (!l->finished)
        end_thread(l, true);
    for (int i = 1; i < l->n && l->status != LT_OK; i++)
        send(l, i, lt__message_new(LT_MSG_LEAVE, 0));
    free_loop(l);
}
