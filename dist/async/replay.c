/* replay.c - replays a trace of asynchronous training in one process; see async.h. The order of
 * pulls and pushes is the same as in the trace, under any rule. With the rule of the trace, the
 * weights are the same as in the run that wrote it.
 */
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/async/worker.h"

typedef struct entry { /* a push of the trace; entry i makes version i + 1 */
    int worker;
    int64_t ticket, read;
    int64_t place; /* place of the ticket among the sorted tickets of the trace */
    bool computed;
    lt_gradient *gradient; /* gradient of its worker */
} entry;

typedef struct replay {
    lt_async async;
    lt_server server;
    entry *entries; /* (n) */
    int64_t n, version, done;
    int64_t *tickets;       /* (n) ascending; the run that wrote the trace skipped the others */
    bool *is_done;          /* (n) whether each ticket is applied; the first `done` tickets are */
    lt_gradient *gradients; /* (workers) */
    int workers;
} replay;

/* The next entry that reads the current version; NULL if all of them are computed. */
static entry *next_to_compute(const replay *r)
{
    for (int64_t i = r->version; i < r->n; i++) {
        entry *e = &r->entries[i];
        if (!e->computed && e->read == r->version)
            return e;
    }
    return NULL;
}

static lt_status begin(replay *r, entry *e, lt_async_event *event)
{
    LT_TRY(lt__rule_pull(r->server.rule, e->worker));
    e->computed = true;
    lt__async_begin(&r->async, &(lt_grant){e->worker, e->read, 1, {e->ticket}}, e->gradient, event);
    return LT_OK;
}

/* Tickets that the run skipped count as done as soon as all lower ones are. */
static int64_t done_below(const replay *r)
{
    return r->done < r->n ? r->tickets[r->done] : r->n > 0 ? r->tickets[r->n - 1] + 1 : 0;
}

static lt_status apply(replay *r, lt_async_event *event)
{
    const entry *e = &r->entries[r->version];
    const lt_push push = {LT_PUSH_APPLIED, e->ticket, r->version - e->read, r->version + 1};
    if (e->gradient->skip)
        return lt_fail(LT_EUSAGE, "ticket %lld was applied in the trace, but is skipped now",
                       (long long)e->ticket);
    LT_TRY(lt__server_apply(&r->server, e->worker, e->gradient, r->version, push.delay));
    r->version++;
    r->server.base++;
    r->is_done[e->place] = true;
    while (r->done < r->n && r->is_done[r->done])
        r->done++;
    r->server.done_below = done_below(r);
    *event = lt__server_event(&r->server, &push, e->worker, e->read, e->gradient);
    return LT_OK;
}

static lt_status next(lt_async *async, lt_async_event *event)
{
    replay *r = (replay *)async;
    entry *e = next_to_compute(r);
    if (e)
        return begin(r, e, event);
    if (r->version < r->n)
        return apply(r, event);
    *event = (lt_async_event){.kind = LT_ASYNC_EVENT_DONE};
    return LT_OK;
}

/* ==== Other functions ========================================================================= */

static lt_status set_limit(lt_async *async, int64_t tickets)
{
    const replay *r = (const replay *)async;
    if (r->n == 0 || r->tickets[r->n - 1] < tickets)
        return LT_OK;
    return lt_fail(LT_EUSAGE, "the trace has ticket %lld, but the run has only %lld tickets",
                   (long long)r->tickets[r->n - 1], (long long)tickets);
}

static void close_replay(lt_async *async)
{
    replay *r = (replay *)async;
    for (int i = 0; r->gradients && i < r->workers; i++)
        lt__gradient_close(&r->gradients[i]);
    lt__server_close(&r->server);
    free(r->gradients);
    free(r->entries);
    free(r->tickets);
    free(r->is_done);
}

/* ==== Opening ================================================================================= */

static lt_status bad_trace(int64_t i, const char *why)
{
    return lt_fail(LT_EUSAGE, "step %lld of the trace %s", (long long)i + 1, why);
}

static int compare_tickets(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Sorts the tickets of the trace. */
static void sort_tickets(replay *r, const lt_async_step *trace)
{
    for (int64_t i = 0; i < r->n; i++)
        r->tickets[i] = trace[i].ticket;
    qsort(r->tickets, (size_t)r->n, sizeof *r->tickets, compare_tickets);
}

/* The first place of a ticket. */
static int64_t place_of(const replay *r, int64_t ticket)
{
    int64_t low = 0, high = r->n;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (r->tickets[middle] < ticket)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Checks that each worker pushes between two pulls, and that each ticket occurs once. */
static lt_status check_trace(replay *r, const lt_async_step *trace)
{
    sort_tickets(r, trace);
    int64_t *pushed; /* (workers) version of the last push */
    lt_status status = LT_CALLOC(pushed, r->workers, "for a trace");
    for (int64_t i = 0; status == LT_OK && i < r->n; i++) {
        const lt_async_step *s = &trace[i];
        int64_t place = place_of(r, s->ticket);
        if (s->worker < 0 || s->worker >= r->workers)
            status = bad_trace(i, "has an invalid worker");
        else if (s->read < pushed[s->worker] || s->read > i)
            status = bad_trace(i, "has an impossible delay");
        else if (s->ticket < 0 || s->ticket == INT64_MAX || r->is_done[place])
            status = bad_trace(i, "has an invalid ticket");
        if (status != LT_OK)
            break;
        pushed[s->worker] = i + 1;
        r->is_done[place] = true;
        r->entries[i] = (entry){.worker = s->worker,
                                .ticket = s->ticket,
                                .place = place,
                                .read = s->read,
                                .gradient = &r->gradients[s->worker]};
    }
    free(pushed);
    memset(r->is_done, 0, (size_t)r->n);
    return status;
}

static lt_status open_replay(lt_async *async, const lt_async_config *c)
{
    replay *r = (replay *)async;
    LT_TRY(lt__server_open(&r->server, &async->net, c));
    async->server = &r->server;
    r->workers = c->workers;
    r->n = c->n_trace;
    LT_TRY(LT_CALLOC(r->entries, r->n, "for a trace"));
    LT_TRY(LT_CALLOC(r->tickets, r->n, "for a trace"));
    LT_TRY(LT_CALLOC(r->is_done, r->n, "for a trace"));
    LT_TRY(LT_CALLOC(r->gradients, r->workers, "for a trace"));
    for (int i = 0; i < r->workers; i++)
        LT_TRY(lt__gradient_open(&r->gradients[i], &async->net, false));
    LT_TRY(check_trace(r, c->trace));
    r->server.done_below = done_below(r);
    return LT_OK;
}

const lt_async_mode lt__replay = {.bytes = sizeof(replay),
                                  .open = open_replay,
                                  .close = close_replay,
                                  .next = next,
                                  .set_limit = set_limit,
                                  .has_no_state = true};
