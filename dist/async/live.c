/* live.c - asynchronous training on the ranks of a group; see async.h. Every rank is a worker. Rank
 * 0 also runs the server, in a thread of its own. */
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/async/awake.h"
#include "dist/async/host.h"
#include "dist/async/worker.h"
#include "dist/fault.h"
#include "dist/group.h"

typedef struct live {
    lt_async async;
    lt_group *group; /* borrowed */
    lt_mail *mail;   /* of the group; borrowed */
    int64_t run;     /* number of the run; the same on all ranks */
    lt_layout layout;
    lt_gradient gradient;
    lt_host *host;     /* on rank 0 */
    lt_message *early; /* a grant that arrived while rank 0 looked for events only; or NULL */
    bool pulled;       /* the answer to a pull has not arrived yet */
    bool answered;     /* a message of rank 0 has arrived */
    bool over;         /* all tickets are done, or training is stopped */
    bool finished;     /* all ranks have the final values */
    int64_t pulls, pushes;
    int64_t steps; /* of the optimizer; on ranks other than 0 */
    lt_awake clock;
    double heard; /* when the last message of rank 0 arrived, or this rank began to wait */
} live;

static int rank_of(const live *l) { return lt_group_rank(l->group); }

/* Sends a message, taken, to the host. */
static void deliver(live *l, lt_message *m)
{
    m->number[LT_HOST_RUN] = l->run;
    lt__mail_send(l->mail, 0, m);
}

/* The same. NULL: there was no memory for it. */
static lt_status send(live *l, lt_message *m)
{
    if (!m)
        return LT_ENOMEM;
    deliver(l, m);
    return LT_OK;
}

static lt_status send_kind(live *l, int kind) { return send(l, lt__message_new(kind, 0)); }

/* Pushes the gradient that the caller has computed, if there is one. */
static lt_status push(lt_async *async)
{
    live *l = (live *)async;
    bool any = l->async.gradient != NULL;
    LT_TRY(lt__async_end(&l->async));
    if (!any)
        return LT_OK;
    lt_message *m = lt__gradient_pack(&l->gradient, &l->layout, LT_HOST_PUSH);
    if (!m)
        return lt_errcode();
    m->number[LT_PUSH_NUMBER] = l->pushes++;
    memcpy(&m->number[LT_PUSH_LOSS], &l->async.loss, sizeof(double));
    memcpy(&m->number[LT_PUSH_LR], &l->async.lr, sizeof(double));
    return send(l, m);
}

static lt_status pull(live *l)
{
    if (l->pulled || l->over)
        return LT_OK;
    lt_message *m = lt__message_new(LT_HOST_PULL, 0);
    if (!m)
        return LT_ENOMEM;
    m->number[0] = ++l->pulls;
    if (l->pulls == 1) {
        lt_status status = lt__layout_digest(&l->layout, &m->number[LT_PULL_DIGEST]);
        if (status != LT_OK) {
            lt__message_free(m);
            return status;
        }
    }
    l->pulled = true;
    deliver(l, m);
    return LT_OK;
}

static lt_status release(lt_async *async)
{
    live *l = (live *)async;
    l->async.gradient = NULL;
    l->pulled = false; /* an answer that is on its way is ignored: see `pulls` */
    lt__message_free(l->early);
    l->early = NULL;
    return l->over ? LT_OK : send_kind(l, LT_HOST_RELEASE);
}

static lt_status does_not_fit(const live *l)
{
    return lt_fail(LT_EDESYNC, "the net of rank %d differs from that of rank 0", rank_of(l));
}

static lt_status begin(live *l, const lt_message *m, lt_async_event *event)
{
    int n = (int)m->number[1];
    l->pulled = false;
    if (n == 0) {
        l->over = true;
        *event = (lt_async_event){.kind = LT_ASYNC_DONE};
        return LT_OK;
    }
    if (m->bytes != l->layout.bytes || n > LT_ASYNC_HELD)
        return does_not_fit(l);
    LT_TRY(lt__layout_unpack(&l->layout, m->data));
    *event = (lt_async_event){.kind = LT_ASYNC_COMPUTE,
                              .worker = rank_of(l),
                              .ticket = m->number[2],
                              .read = m->number[0],
                              .n_reserved = n - 1};
    memcpy(event->reserved, m->number + 3, (size_t)(n - 1) * sizeof *event->reserved);
    lt__async_begin(&l->async, event->ticket, &l->gradient);
    return LT_OK;
}

static lt_status take_final(live *l, const lt_message *m)
{
    const lt_layout *layout = &l->layout;
    if (m->bytes != layout->bytes + layout->slot_bytes)
        return does_not_fit(l);
    LT_TRY(lt__layout_unpack(layout, m->data));
    LT_TRY(lt__layout_unpack_slots(layout, m->data + layout->bytes));
    l->steps = m->number[0];
    l->finished = l->over = true;
    return LT_OK;
}

/* The mailbox of a rank was closed. If rank 0 ended before this training began, the job fails: rank
 * 0 has left it, and this rank has done nothing wrong. */
static lt_status lose(const live *l, int rank)
{
    if (rank != 0 || rank_of(l) == 0)
        return LT_OK;
    if (l->answered)
        return lt_fail(LT_EPEER, "rank 0 was lost");
    lt_fail(LT_EPEER, "rank 0 has ended, but rank %d begins asynchronous training", rank_of(l));
    lt_group_fail(l->group);
    return LT_EPEER;
}

/* Handles a message. *any is false if it is not an event for the caller. */
static lt_status handle(live *l, const lt_message *m, lt_async_event *event, bool *any)
{
    *any = m->kind == LT_MAIL_LOST || m->number[LT_HOST_RUN] == l->run;
    if (m->kind == LT_HOST_GRANT)
        *any &= l->pulled && m->number[LT_GRANT_PULL] == l->pulls;
    if (!*any)
        return LT_OK;
    l->answered |= m->kind != LT_MAIL_LOST;
    switch (m->kind) {
    case LT_HOST_GRANT: return begin(l, m, event);
    case LT_HOST_EVENT: memcpy(event, m->data, sizeof *event); return LT_OK;
    case LT_HOST_STOP:
        l->over = true;
        *event = (lt_async_event){.kind = m->number[0] == LT_HOST_FINISHED ? LT_ASYNC_DONE
                                                                           : LT_ASYNC_STOP,
                                  .ticket = m->number[0]};
        return l->host ? lt__host_status(l->host) : LT_OK;
    case LT_HOST_ALIVE: *any = false; return LT_OK;
    case LT_HOST_FINISH: *any = false; return take_final(l, m);
    case LT_HOST_LEAVE: return lt_fail(LT_EPEER, "rank 0 has failed");
    case LT_HOST_FENCED:
        return lt_fail(LT_EPEER, "rank %d was silent for %g s, so rank 0 has declared it lost",
                       rank_of(l), lt__group_timeout(l->group));
    default: /* LT_MAIL_LOST */ *any = false; return lose(l, m->from);
    }
}

/* Begins to wait for messages of rank 0. */
static void listen(live *l) { l->heard = lt__awake_seconds(&l->clock); }

/* The next message; waits for it at most `seconds`. New. */
static lt_message *take(live *l, double seconds)
{
    lt_message *m = l->early;
    l->early = NULL;
    if (!m)
        m = l->host ? lt__inbox_take(lt__host_inbox(l->host), seconds)
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
    double silence = lt__group_timeout(l->group);
    if (lt_group_failure(l->group, &rank, &code, text, sizeof text) && rank != rank_of(l))
        return lt_fail(LT_EPEER, "rank %d has failed: %s", rank, text);
    if (!l->host && lt__awake_seconds(&l->clock) - l->heard > silence)
        return lt_fail(LT_EPEER, "rank 0 was silent for more than %g s", silence);
    return LT_OK;
}

static lt_status next(lt_async *async, lt_async_event *event)
{
    live *l = (live *)async;
    LT_TRY(push(async));
    LT_TRY(pull(l));
    listen(l);
    for (bool any = false; !any;) {
        LT_TRY(check_job(l));
        if (l->host)
            LT_TRY(lt__host_status(l->host));
        lt_message *m = take(l, l->over ? 0 : LT_CHECK_SECONDS);
        lt_status status = m ? handle(l, m, event, &any) : LT_OK;
        lt__message_free(m);
        LT_TRY(status);
        if (!m && l->over) {
            *event = (lt_async_event){.kind = LT_ASYNC_DONE};
            return LT_OK;
        }
    }
    return LT_OK;
}

/* ==== Other functions ========================================================================= */

static lt_status set_limit(lt_async *async, int64_t tickets)
{
    const live *l = (const live *)async;
    return l->host ? lt__host_set_limit(l->host, tickets, &l->layout) : LT_OK;
}

static int64_t done_below(const lt_async *async)
{
    const live *l = (const live *)async;
    return l->host ? lt__host_done_below(l->host) : 0;
}

static int64_t steps(const lt_async *async)
{
    const live *l = (const live *)async;
    return l->host ? lt__host_steps(l->host) : l->steps;
}

static lt_tensor *state(const lt_async *async, int i, char name[LT_ASYNC_NAME])
{
    const live *l = (const live *)async;
    return l->host ? lt__host_state(l->host, l->async.ctx, i, name) : NULL;
}

static lt_status restore(lt_async *async, const char *const *names, lt_tensor *const *tensors,
                         int n, int *fresh)
{
    const live *l = (const live *)async;
    *fresh = 0;
    return l->host ? lt__host_restore(l->host, names, tensors, n, fresh) : LT_OK;
}

static lt_status keep_at(lt_async *async, int64_t ticket)
{
    const live *l = (const live *)async;
    return l->host ? lt__host_keep_at(l->host, ticket) : LT_OK;
}

static lt_status read_kept(lt_async *async, int64_t ticket)
{
    const live *l = (const live *)async;
    return l->host ? lt__host_read_kept(l->host, ticket, &l->layout) : LT_OK;
}

static void forget(lt_async *async, int64_t ticket)
{
    const live *l = (const live *)async;
    if (l->host)
        lt__host_forget(l->host, ticket);
}

static void pause_server(lt_async *async, bool on)
{
    const live *l = (const live *)async;
    if (l->host)
        lt__host_pause(l->host, on);
}

static bool poll(lt_async *async, lt_async_event *event)
{
    live *l = (live *)async;
    for (lt_message *m; l->host && (m = lt__inbox_take(lt__host_inbox(l->host), 0));) {
        if (m->kind == LT_HOST_EVENT) {
            memcpy(event, m->data, sizeof *event);
            lt__message_free(m);
            return true;
        }
        lt__message_free(l->early);
        l->early = m; /* an earlier one answered a pull that was withdrawn */
    }
    return false;
}

static void stop_at(lt_async *async, int64_t version, int code)
{
    const live *l = (const live *)async;
    if (l->host)
        lt__host_stop_at(l->host, version, code);
}

static lt_status read_server(lt_async *async)
{
    const live *l = (const live *)async;
    return l->host ? lt__host_read(l->host, &l->layout) : LT_OK;
}

static void stop(lt_async *async, int code)
{
    live *l = (live *)async;
    lt_message *m = NULL;
    if (l->host)
        lt__host_stop(l->host, code);
    else if (!l->over && (m = lt__message_new(LT_HOST_STOP_REQUEST, 0)))
        m->number[0] = code;
    if (m)
        deliver(l, m);
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
    if (l->host) {
        LT_TRY(lt__host_finish(l->host, &l->layout));
        LT_TRY(lt__host_read(l->host, &l->layout));
    } else {
        LT_TRY(wait_for_finish(l));
    }
    l->finished = l->over = true;
    return LT_OK;
}

static lt_status read_stats(lt_async *async, int group, lt_async_stats *stats)
{
    const live *l = (const live *)async;
    return l->host ? lt__host_read_stats(l->host, group, stats) : LT_OK;
}

static void free_live(lt_async *async)
{
    live *l = (live *)async;
    lt_message *m = l->mail && !l->finished && !l->host ? lt__message_new(LT_HOST_LEAVE, 0) : NULL;
    if (m)
        deliver(l, m); /* otherwise the host notices that this rank is silent */
    lt__host_close(l->host);
    lt__message_free(l->early);
    lt__gradient_free(&l->gradient);
    lt__layout_close(&l->layout);
    free(l);
}

static lt_status open_live(live *l, lt_ctx *ctx, lt_optim *optim, const lt_async_config *config)
{
    lt_status status = lt__fault_check(ctx, lt_group_size(l->group));
    if (status == LT_OK)
        status = lt__layout_open(&l->layout, ctx, optim, config->buffers, config->n_buffers);
    if (status == LT_OK && !(l->mail = lt__group_mail(l->group)))
        status = lt_errcode();
    l->run = status == LT_OK ? lt__mail_next_run(l->mail) : 0;
    if (status != LT_OK || rank_of(l) > 0) {
        lt_ctx_free(config->server);
        return status;
    }
    lt_async_config own = *config;
    own.workers = lt_group_size(l->group);
    l->host = lt__host_open(l->mail, config->server, &l->layout, &own, l->run,
                            lt__group_timeout(l->group));
    return l->host ? LT_OK : lt_errcode();
}

lt_async *lt__live_new(lt_ctx *ctx, lt_optim *optim, const lt_async_config *config)
{
    static const lt_async_kind_of functions = {.next = next,
                                               .push = push,
                                               .set_limit = set_limit,
                                               .done_below = done_below,
                                               .steps = steps,
                                               .state = state,
                                               .restore = restore,
                                               .read_stats = read_stats,
                                               .free = free_live,
                                               .keep_at = keep_at,
                                               .read_kept = read_kept,
                                               .forget = forget,
                                               .read = read_server,
                                               .stop = stop,
                                               .stop_at = stop_at,
                                               .pause = pause_server,
                                               .poll = poll,
                                               .release = release,
                                               .finish = finish};
    live *l = calloc(1, sizeof *l);
    if (!l) {
        lt_ctx_free(config->server);
        lt_fail(LT_ENOMEM, "out of memory for asynchronous training");
        return NULL;
    }
    l->async.of = &functions;
    l->group = config->group;
    l->async.rank = lt_group_rank(config->group);
    l->steps = config->steps;
    if (open_live(l, ctx, optim, config) == LT_OK)
        return &l->async;
    free_live(&l->async);
    return NULL;
}
