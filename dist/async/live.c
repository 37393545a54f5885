/* live.c - asynchronous training on the ranks of a group; see async.h. Every rank is a worker. Rank
 * 0 also runs the server, in a thread of its own. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/async/worker.h"
#include "dist/fault.h"
#include "dist/group.h"

typedef struct live {
    lt_async async;
    lt_group *group; /* borrowed */
    lt_mail *mail;   /* mailbox of the group; borrowed */
    lt_gradient gradient;
    lt_message *early; /* a grant that arrived while rank 0 polled for events, or NULL */
    bool pulled;       /* the answer to a pull has not arrived yet */
    bool answered;     /* a message of rank 0 has arrived */
    bool over;         /* all tickets are done, or training is stopped */
    bool finished;     /* all ranks have the final values */
    int64_t pulls, pushes;
    lt_active_clock clock;
    double last_message; /* time of the last message of rank 0, or of the begin of the wait */
} live;

static int rank_of(const live *l) { return lt_group_rank(l->group); }

/* Sends a message, taken, to the server. NULL means that its allocation has failed. */
static lt_status send(live *l, lt_message *m)
{
    if (!m)
        return LT_ENOMEM;
    lt__mail_send(l->mail, 0, m);
    return LT_OK;
}

static lt_status push(lt_async *async, lt_gradient *g)
{
    live *l = (live *)async;
    lt_message *m = g->message;
    g->message = NULL;
    m->as.push.number = l->pushes++;
    m->as.push.loss = g->loss;
    m->as.push.lr = g->lr;
    return send(l, m);
}

static lt_status pull(live *l)
{
    int64_t digest = 0;
    if (l->pulled || l->over)
        return LT_OK;
    if (l->pulls == 0)
        LT_TRY(lt__image_digest(&l->async.net, &digest));
    lt_message *m = lt__message_new(LT_MSG_PULL, 0);
    if (!m)
        return LT_ENOMEM;
    m->as.pull.number = ++l->pulls;
    m->as.pull.digest = digest;
    l->pulled = true;
    return send(l, m);
}

static lt_status release(lt_async *async)
{
    live *l = (live *)async;
    async->gradient = NULL;
    l->pulled = false; /* an answer that is on its way is ignored: see `pulls` */
    lt__message_free(l->early);
    l->early = NULL;
    return l->over ? LT_OK : send(l, lt__message_new(LT_MSG_RELEASE, 0));
}

static lt_status does_not_fit(const live *l)
{
    return lt_fail(LT_EDESYNC, "the net of rank %d differs from that of rank 0", rank_of(l));
}

static lt_status begin(live *l, const lt_message *m, lt_async_event *event)
{
    const lt_image *net = &l->async.net;
    int n = m->as.grant.n;
    l->pulled = false;
    if (n == 0) {
        l->over = true;
        *event = (lt_async_event){.kind = LT_ASYNC_EVENT_DONE};
        return LT_OK;
    }
    if (m->bytes != net->bytes || n > LT_ASYNC_MAX_PREFETCH)
        return does_not_fit(l);
    LT_TRY(lt__image_unpack(net, false, m->data));
    lt_grant grant = {.worker = rank_of(l), .version = m->as.grant.version, .n = n};
    memcpy(grant.ticket, m->as.grant.ticket, sizeof grant.ticket);
    lt__async_begin(&l->async, &grant, &l->gradient, event);
    return LT_OK;
}

static lt_status take_final(live *l, const lt_message *m)
{
    const lt_image *net = &l->async.net;
    if (m->bytes != net->bytes + net->slot_bytes)
        return does_not_fit(l);
    LT_TRY(lt__image_unpack(net, true, m->data));
    l->async.steps = m->as.finish.steps;
    l->finished = l->over = true;
    return LT_OK;
}

/* Rank 0 was lost, or its network was cut. */
static lt_status lose_root(const live *l, const char *what)
{
    return lt_fail(LT_EPEER, "rank 0 %s%s", what,
                   lt_group_is_elastic(l->group)
                       ? "; if it still runs, start this worker again to come back"
                       : "");
}

/* The mailbox of a rank was closed. If rank 0 ended before this training began, the job fails: rank
 * 0 has left it, and this rank has done nothing wrong. */
static lt_status lose(const live *l, int rank)
{
    if (rank != 0 || rank_of(l) == 0 || l->finished)
        return LT_OK;
    if (l->answered)
        return lose_root(l, "was lost");
    lt_fail(LT_EPEER, "rank 0 has ended, but rank %d begins asynchronous training", rank_of(l));
    lt_group_fail(l->group);
    return LT_EPEER;
}

/* Handles a message. *any is false if it is not an event for the caller. */
static lt_status handle(live *l, const lt_message *m, lt_async_event *event, bool *any)
{
    *any = m->kind != LT_MSG_GRANT || (l->pulled && m->as.grant.pull == l->pulls);
    if (!*any)
        return LT_OK;
    l->answered |= m->kind != LT_MAIL_LOST;
    switch (m->kind) {
    case LT_MSG_GRANT: return begin(l, m, event);
    case LT_MSG_EVENT: memcpy(event, m->data, sizeof *event); return LT_OK;
    case LT_MSG_STOP:
        l->over = true;
        *event = (lt_async_event){.kind = m->as.stop.code == LT_STOP_FINISHED ? LT_ASYNC_EVENT_DONE
                                                                              : LT_ASYNC_EVENT_STOP,
                                  .code = m->as.stop.code};
        return l->async.loop ? lt__server_loop_status(l->async.loop) : LT_OK;
    case LT_MSG_HEARTBEAT: *any = false; return LT_OK;
    case LT_MSG_FINISH: *any = false; return take_final(l, m);
    case LT_MSG_LEAVE: return lt_fail(LT_EPEER, "rank 0 has failed");
    case LT_MSG_FENCED:
        return lt_fail(LT_EPEER, "rank %d was silent for %g s, so rank 0 has declared it lost%s",
                       rank_of(l), lt__group_timeout(l->group),
                       lt_group_is_elastic(l->group) ? "; start it again to come back" : "");
    default: /* LT_MAIL_LOST */ *any = false; return lose(l, m->from);
    }
}

/* Begins to wait for messages of rank 0. */
static void listen(live *l) { l->last_message = lt__active_seconds(&l->clock); }

/* The next message; waits for it at most `seconds`. New. */
static lt_message *take(live *l, double seconds)
{
    lt_message *m = l->early;
    l->early = NULL;
    if (!m)
        m = l->async.loop ? lt__inbox_take(&l->async.loop->to_root, seconds)
                          : lt__mail_take(l->mail, seconds);
    if (m)
        listen(l);
    return m;
}

/* LT_EPEER if the job has failed, or if rank 0 is silent. */
static lt_status check_job(live *l)
{
    char text[512];
    int rank;
    lt_status code;
    double timeout = lt__group_timeout(l->group);
    if (lt_group_failure(l->group, &rank, &code, text, sizeof text) && rank != rank_of(l))
        return lt_fail(LT_EPEER, "rank %d has failed: %s", rank, text);
    if (l->async.loop || lt__active_seconds(&l->clock) - l->last_message <= timeout)
        return LT_OK;
    snprintf(text, sizeof text, "was silent for more than %g s", timeout);
    return lose_root(l, text);
}

static lt_status next(lt_async *async, lt_async_event *event)
{
    live *l = (live *)async;
    LT_TRY(pull(l));
    listen(l);
    for (bool any = false; !any;) {
        LT_TRY(check_job(l));
        if (async->loop)
            LT_TRY(lt__server_loop_status(async->loop));
        lt_message *m = take(l, l->over ? 0 : LT_CHECK_SECONDS);
        lt_status status = m ? handle(l, m, event, &any) : LT_OK;
        lt__message_free(m);
        LT_TRY(status);
        if (!m && l->over) {
            *event = (lt_async_event){.kind = LT_ASYNC_EVENT_DONE};
            return LT_OK;
        }
    }
    return LT_OK;
}

/* ==== Other functions ========================================================================= */

static lt_status set_limit(lt_async *async, int64_t tickets)
{
    lt_server_loop *loop = async->loop;
    return loop ? lt__server_loop_set_limit(loop, tickets, &async->net) : LT_OK;
}

static bool poll(lt_async *async, lt_async_event *event)
{
    live *l = (live *)async;
    for (lt_message *m; async->loop && (m = lt__inbox_take(&async->loop->to_root, 0));) {
        if (m->kind == LT_MSG_EVENT) {
            memcpy(event, m->data, sizeof *event);
            lt__message_free(m);
            return true;
        }
        lt__message_free(l->early);
        l->early = m; /* an earlier one answered a pull that was withdrawn */
    }
    return false;
}

static void stop(lt_async *async, int code)
{
    live *l = (live *)async;
    lt_message *m = async->loop || l->over ? NULL : lt__message_new(LT_MSG_STOP_REQUEST, 0);
    if (async->loop)
        lt__server_loop_stop(async->loop, code);
    if (!m)
        return;
    m->as.stop.code = code;
    lt__mail_send(l->mail, 0, m);
}

/* A worker waits for the final values. */
static lt_status wait_for_finish(live *l)
{
    listen(l);
    while (!l->finished) {
        lt_message *m = take(l, LT_CHECK_SECONDS);
        lt_async_event event;
        bool any;
        lt_status status = m ? handle(l, m, &event, &any) : check_job(l);
        lt__message_free(m);
        LT_TRY(status);
    }
    return LT_OK;
}

static lt_status finish(lt_async *async)
{
    live *l = (live *)async;
    if (l->finished)
        return LT_OK;
    if (!l->over)
        LT_TRY(release(async));
    if (async->loop) {
        LT_TRY(lt__server_loop_finish(async->loop, &async->net));
        LT_TRY(lt__image_copy(&async->net, async->server->net));
    } else {
        LT_TRY(wait_for_finish(l));
    }
    l->finished = l->over = true;
    return LT_OK;
}

static void add_stats(const lt_async *async, lt_async_stats *stats)
{
    const lt_server_loop *l = async->loop;
    if (l && l->begun)
        stats->server_busy = l->busy / (lt__seconds() - l->began);
}

static void close_live(lt_async *async)
{
    live *l = (live *)async;
    bool leaves = l->mail && !l->finished && !async->loop;
    lt_message *m = leaves ? lt__message_new(LT_MSG_LEAVE, 0) : NULL;
    if (m)
        lt__mail_send(l->mail, 0, m); /* otherwise the server notices that this rank is silent */
    lt__server_loop_close(async->loop);
    lt__message_free(l->early);
    lt__gradient_close(&l->gradient);
}

static lt_status open_live(lt_async *async, const lt_async_config *config)
{
    live *l = (live *)async;
    lt_async_config own = *config;
    l->group = config->group;
    async->rank = lt_group_rank(l->group);
    own.workers = lt_group_size(l->group);
    LT_TRY(lt__fault_check(async->ctx, own.workers));
    LT_TRY(lt__gradient_open(&l->gradient, &async->net, true));
    if (!(l->mail = lt__group_mail(l->group)))
        return lt_errcode();
    lt__mail_begin_run(l->mail);
    lt__fault_add_latency(async->ctx, l->mail);
    if (async->rank > 0)
        return LT_OK;
    async->loop = lt__server_loop_open(l->mail, config->server, &async->net, &own,
                                       lt__group_timeout(l->group));
    if (!async->loop)
        return lt_errcode();
    async->server = &async->loop->server;
    return LT_OK;
}

const lt_async_mode lt__live = {.bytes = sizeof(live),
                                .open = open_live,
                                .close = close_live,
                                .next = next,
                                .push = push,
                                .set_limit = set_limit,
                                .release = release,
                                .finish = finish,
                                .stop = stop,
                                .poll = poll,
                                .add_stats = add_stats};
