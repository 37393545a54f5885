/* host.c - the server thread of live asynchronous training; see host.h. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/async/host_internal.h"
#include "dist/group.h"

static const double TICK_SECONDS = 0.1; /* between two looks for silent workers */

/* ==== Answers ================================================================================= */

static double now_of(lt_host *h) { return lt__awake_seconds(&h->clock); }

/* After a failure, all workers are told to stop, and rank 0 gets the failure. */
static void fail(lt_host *h, lt_status status)
{
    if (h->status == LT_OK) {
        h->status = status;
        strncpy(h->text, lt_errmsg(), sizeof h->text - 1);
    }
    h->stopped = true;
}

/* m is taken. NULL: there was no memory for it. Its receiver waits for it, so the job fails. */
static void send(lt_host *h, int to, lt_message *m)
{
    if (!m) {
        fail(h, LT_ENOMEM);
        lt_group_fail(h->group);
        return;
    }
    m->number[LT_HOST_RUN] = h->run;
    if (to != 0) {
        h->wire_bytes += (int64_t)m->bytes;
        lt__mail_send(h->mail, to, m);
    } else {
        m->from = 0;
        lt__inbox_put(&h->to_root, m);
    }
}

static void report(lt_host *h, const lt_async_event *event)
{
    lt_message *m = lt__message_new(LT_HOST_EVENT, sizeof *event);
    if (m)
        memcpy(m->data, event, sizeof *event);
    send(h, 0, m);
}

/* Tells a worker to stop, once. */
static void stop_worker(lt_host *h, int i)
{
    if (h->members[i].told)
        return;
    h->members[i].told = true;
    lt_message *m = lt__message_new(LT_HOST_STOP, 0);
    if (m)
        m->number[0] = h->code;
    send(h, i, m);
}

static lt_status grant(lt_host *h, const lt_grant *g)
{
    bool any = g->n > 0;
    member *w = &h->members[g->worker];
    lt_message *m = lt__message_new(LT_HOST_GRANT, any ? h->mirror.layout.bytes : 0);
    if (!m)
        return LT_ENOMEM;
    m->number[0] = g->version;
    m->number[1] = g->n;
    memcpy(m->number + 2, g->ticket, sizeof g->ticket);
    m->number[LT_GRANT_PULL] = w->pull;
    lt_status status = any ? lt__layout_pack(&h->mirror.layout, m->data) : LT_OK;
    if (status != LT_OK) {
        lt__message_free(m);
        return status;
    }
    w->heard = now_of(h);
    w->computing = w->owes = any;
    w->told = !any;
    w->read = g->version;
    send(h, g->worker, m);
    return LT_OK;
}

static lt_status answer_pulls(lt_host *h)
{
    lt_grant g;
    for (bool any = !h->stopped; any;) {
        LT_TRY(lt__server_grant(&h->server, &g, &any));
        if (any)
            LT_TRY(grant(h, &g));
    }
    return LT_OK;
}

/* ==== Messages ================================================================================ */

static double number_of(const lt_message *m, int i)
{
    double value;
    memcpy(&value, &m->number[i], sizeof value);
    return value;
}

static lt_status push(lt_host *h, const lt_message *m)
{
    lt_push p;
    member *w = &h->members[m->from];
    w->computing = false;
    if (h->stopped)
        return LT_OK; /* its ticket will be issued again if training is resumed */
    LT_TRY(lt__gradient_unpack(&h->gradient, &h->mirror.layout, m));
    LT_TRY(lt__server_push(&h->server, m->from, m->number[LT_PUSH_NUMBER], &h->gradient, &p));
    if (p.kind == LT_PUSH_FENCED)
        send(h, m->from, lt__message_new(LT_HOST_FENCED, 0));
    if (p.kind == LT_PUSH_FENCED || p.kind == LT_PUSH_DUPLICATE)
        return LT_OK;
    lt_async_event event = {
        .kind = LT_ASYNC_PUSH,
        .worker = m->from,
        .ticket = p.ticket,
        .read = w->read,
        .applied = p.kind == LT_PUSH_APPLIED ? lt__order_version(h->server.order) : 0,
        .delay = p.delay,
        .dropped = p.kind == LT_PUSH_DROPPED,
        .done_below = lt__order_done_below(h->server.order),
        .loss = number_of(m, LT_PUSH_LOSS),
        .lr = number_of(m, LT_PUSH_LR),
        .time = lt__seconds()};
    LT_TRY(lt__host_take_snapshots(h));
    report(h, &event);
    h->stopped |= h->last > 0 && lt__order_version(h->server.order) >= h->last;
    return LT_OK;
}

/* Issues the tickets of a worker to others, and expects nothing from it. Returns their number. */
static int forget(lt_host *h, int i)
{
    h->members[i].computing = h->members[i].owes = false;
    h->members[i].told = h->members[i].lost = true;
    return lt__order_lose(h->server.order, i);
}

/* Declares a worker lost, and reports it to rank 0. */
static void lose(lt_host *h, int i, bool silent)
{
    if (lt__order_is_lost(h->server.order, i) || (h->members[i].told && !h->members[i].computing))
        return; /* a worker that knows that training is over may leave */
    if (i == 0 || lt__group_has_processes(h->group)) {
        if (i == 0)
            lt_fail(LT_EPEER, "rank 0 has computed for more than %g s", h->silence);
        else if (silent)
            lt_fail(LT_EPEER, "rank %d was silent for more than %g s", i, h->silence);
        else
            lt_fail(LT_EPEER, "rank %d has failed or ended", i);
        fail(h, LT_EPEER);
        if (silent)
            lt_group_fail(h->group);
    }
    int held = forget(h, i);
    report(h, &(lt_async_event){
                  .kind = LT_ASYNC_LOST, .worker = i, .ticket = held, .dropped = silent});
}

static lt_status pull(lt_host *h, const lt_message *m)
{
    if (lt__order_is_lost(h->server.order, m->from)) {
        send(h, m->from, lt__message_new(LT_HOST_FENCED, 0));
        return LT_OK;
    }
    /* rank 0 may read values of the server, such as those of a finished epoch, before it pulls */
    if (m->from > 0 && m->number[0] == 1 && m->number[LT_PULL_DIGEST] != h->digest)
        return lt_fail(LT_EDESYNC,
                       "rank %d begins asynchronous training with other weights or buffers than "
                       "rank 0; initialise or load the same values on all ranks",
                       m->from);
    h->members[m->from].pull = m->number[0];
    h->members[m->from].owes = false;
    return h->stopped ? LT_OK : lt__order_pull(h->server.order, m->from);
}

/* Training continues until rank 0 stops it. */
static void report_request(lt_host *h, const lt_message *m)
{
    if (!h->stopped)
        report(h,
               &(lt_async_event){.kind = LT_ASYNC_STOP, .worker = m->from, .ticket = m->number[0]});
}

/* Looks for workers from which nothing has arrived until `time`, when the host sent LT_HOST_LOOK to
 * itself. What had arrived before that has been handled. */
static void look_for_silent_workers(lt_host *h, double time)
{
    for (int i = 0; i < h->n && h->n > 1; i++) {
        bool expected = h->members[i].computing || (i > 0 && (h->members[i].owes || h->closing));
        if (expected && time - h->members[i].heard > h->silence)
            lose(h, i, true);
    }
}

static lt_status handle(lt_host *h, const lt_message *m)
{
    member *w = &h->members[m->from];
    if (m->kind != LT_MAIL_LOST && m->number[LT_HOST_RUN] != h->run)
        return LT_OK;
    if (m->kind == LT_HOST_LOOK) {
        look_for_silent_workers(h, number_of(m, 0));
        return LT_OK;
    }
    w->heard = now_of(h);
    h->wire_bytes += m->from != 0 ? (int64_t)m->bytes : 0;
    if (h->status != LT_OK && m->kind != LT_MAIL_LOST && m->kind != LT_HOST_LEAVE) {
        w->computing &= m->kind == LT_HOST_PULL || m->kind == LT_HOST_STOP_REQUEST;
        return LT_OK; /* the server has failed */
    }
    switch (m->kind) {
    case LT_HOST_PULL: return pull(h, m);
    case LT_HOST_PUSH: return push(h, m);
    case LT_HOST_RELEASE:
        lt__order_release(h->server.order, m->from);
        w->computing = w->owes = false;
        return LT_OK;
    case LT_HOST_STOP_REQUEST: report_request(h, m); return LT_OK;
    default: lose(h, m->from, false); return LT_OK;
    }
}

/* ==== The thread ============================================================================== */

/* Lets the workers know, four times in the time of silence, that rank 0 is alive; and lets this
 * thread look for silent workers as soon as it has handled what has arrived so far. If there is
 * no memory for a message, it is left out. */
static void tick(lt_host *h)
{
    double now = now_of(h);
    lt_message *m;
    if (now - h->looked >= TICK_SECONDS && (m = lt__message_new(LT_HOST_LOOK, 0))) {
        h->looked = now;
        memcpy(&m->number[0], &now, sizeof now);
        m->number[LT_HOST_RUN] = h->run;
        lt__mail_send(h->mail, 0, m);
    }
    if (now - h->greeted < h->silence / 4)
        return;
    h->greeted = now;
    for (int i = 1; i < h->n; i++)
        if (!lt__order_is_lost(h->server.order, i) && (m = lt__message_new(LT_HOST_ALIVE, 0)))
            send(h, i, m);
}

static void stop_waiting(lt_host *h)
{
    for (int i = 0; h->stopped && i < h->n; i++)
        if (!h->members[i].computing)
            stop_worker(h, i);
}

/* Whether all workers but rank 0 know that training is over, or are lost. */
static bool all_told(const lt_host *h)
{
    bool all = true;
    for (int i = 1; i < h->n; i++)
        all &= h->members[i].told && !h->members[i].computing;
    return all;
}

/* Locks the host when it is not paused. */
static void lock_running(lt_host *h)
{
    pthread_mutex_lock(&h->lock);
    tick(h);
    while (h->paused) {
        struct timespec until = lt__after(TICK_SECONDS);
        pthread_cond_clockwait(&h->resumed, &h->lock, CLOCK_MONOTONIC, &until);
        tick(h);
    }
}

/* Handles a message, or none. Returns false at the end. */
static bool run_once(lt_host *h, const lt_message *m)
{
    lock_running(h);
    if (m) {
        lt_status status = handle(h, m);
        if (status != LT_OK)
            fail(h, status);
    }
    if (!h->stopped) {
        lt_status status = answer_pulls(h);
        if (status != LT_OK)
            fail(h, status);
    }
    stop_waiting(h);
    bool over = h->closing && (all_told(h) || h->status != LT_OK);
    pthread_mutex_unlock(&h->lock);
    return !over;
}

static void *run(void *ud)
{
    lt_host *h = ud;
    for (int i = 0; i < h->n; i++)
        h->members[i].heard = now_of(h);
    for (bool more = true; more;) {
        lt_message *m = lt__mail_take(h->mail, TICK_SECONDS);
        more = run_once(h, m);
        lt__message_free(m);
    }
    return NULL;
}

/* ==== Opening ================================================================================= */

static void free_host(lt_host *h)
{
    lt__gradient_free(&h->gradient);
    lt__server_close(&h->server);
    lt__mirror_close(&h->mirror);
    lt_ctx_free(h->ctx);
    lt__inbox_free(&h->to_root);
    pthread_cond_destroy(&h->resumed);
    pthread_mutex_destroy(&h->lock);
    free(h->members);
    lt__snapshots_free(&h->snapshots);
    free(h);
}

static lt_status open_host(lt_host *h, const lt_layout *of, const lt_async_config *config)
{
    h->members = calloc((size_t)h->n, sizeof *h->members);
    if (!h->members)
        return lt_fail(LT_ENOMEM, "out of memory for %d workers", h->n);
    LT_TRY(lt__mirror_open(&h->mirror, h->ctx, of));
    LT_TRY(lt__server_open(&h->server, h->ctx, h->mirror.optim, config));
    for (int i = 0; i < h->n; i++) {
        if (config->lost && config->lost[i])
            forget(h, i);
    }
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int error = pthread_create(&h->thread, NULL, run, h);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return error == 0 ? LT_OK : lt_fail(LT_ENOMEM, "cannot start a thread for the server");
}

lt_host *lt__host_open(lt_mail *mail, lt_ctx *ctx, const lt_layout *of,
                       const lt_async_config *config, int64_t run, double silence)
{
    lt_host *h = calloc(1, sizeof *h);
    if (!h) {
        lt_ctx_free(ctx);
        lt_fail(LT_ENOMEM, "out of memory for the server");
        return NULL;
    }
    h->group = config->group;
    h->mail = mail;
    h->run = run;
    h->ctx = ctx;
    h->n = config->workers;
    h->silence = silence;
    h->paused = true; /* until lt__host_set_limit(), so that a state can be restored before */
    lt__inbox_open(&h->to_root);
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->resumed, NULL);
    if (open_host(h, of, config) == LT_OK)
        return h;
    free_host(h);
    return NULL;
}

/* Ends the thread. If `now`, it does not wait for the workers. */
static void end_thread(lt_host *h, bool now)
{
    pthread_mutex_lock(&h->lock);
    h->closing = true;
    if (now && h->status == LT_OK)
        h->status = LT_EPEER;
    if (!h->stopped)
        h->code = LT_HOST_FINISHED;
    h->stopped = true;
    h->paused = false;
    pthread_cond_broadcast(&h->resumed);
    pthread_mutex_unlock(&h->lock);
    pthread_join(h->thread, NULL);
}

static lt_status send_final(lt_host *h)
{
    const lt_layout *layout = &h->mirror.layout;
    for (int i = 1; i < h->n; i++) {
        if (lt__order_is_lost(h->server.order, i))
            continue;
        lt_message *m = lt__message_new(LT_HOST_FINISH, layout->bytes + layout->slot_bytes);
        if (!m)
            return LT_ENOMEM;
        m->number[0] = lt__server_steps(&h->server);
        lt_status status = lt__layout_pack(layout, m->data);
        if (status == LT_OK)
            status = lt__layout_pack_slots(layout, m->data + layout->bytes);
        if (status != LT_OK) {
            lt__message_free(m);
            return status;
        }
        send(h, i, m);
    }
    return LT_OK;
}

lt_status lt__host_finish(lt_host *h, const lt_layout *from)
{
    if (h->finished)
        return LT_OK;
    pthread_mutex_lock(&h->lock);
    lt_status status = lt__host_begin(h, from);
    pthread_mutex_unlock(&h->lock);
    LT_TRY(status);
    end_thread(h, false);
    h->finished = true;
    LT_TRY(lt__host_status(h));
    return send_final(h);
}

void lt__host_close(lt_host *h)
{
    if (!h)
        return;
    if (!h->finished)
        end_thread(h, true);
    for (int i = 1; i < h->n && h->status != LT_OK; i++)
        send(h, i, lt__message_new(LT_HOST_LEAVE, 0));
    free_host(h);
}
