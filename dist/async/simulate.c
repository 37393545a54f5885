/* simulate.c - asynchronous training simulated in one process; see async.h.
 *
 * A gradient is computed when the server answers its worker's pull, and stored. It is applied when
 * the virtual clock reaches the moment at which the server has handled the push. The net's own
 * arenas are the server's: at both moments they contain the right weights, and nothing is
 * exchanged.
 *
 * Between these moments a worker has two events: it ends its computation, and its push arrives. The
 * server handles pushes in the order in which they arrive, one at a time. Without links, both
 * events are at the same time, and the server takes no time.
 *
 * All times depend only on the seed, the bytes of messages and the number of the pull, so a
 * simulation is deterministic.
 */
#include <math.h>
#include <stdlib.h>

#include "core/tensor.h"
#include "dist/async/timing.h"
#include "dist/async/worker.h"

typedef struct worker {
    bool idle;    /* it has pushed, or found no ticket, and pulls next */
    bool pushes;  /* its computation has ended, and its push is on the link */
    double end;   /* virtual time at which its computation ends or its push arrives; infinity if it
                   * does not compute */
    int64_t pull; /* number of its last pull; orders equal times */
    int64_t read, pushed;
    lt_gradient gradient;
} worker;

typedef struct simulation {
    lt_async async;
    lt_server server;
    worker *workers;
    int n_workers;
    int64_t pulls;
    lt_timing timing;
    double began; /* virtual time of the first event; negative before it */
} simulation;

/* The worker with the next event, or NULL if none computes. */
static worker *next_worker(const simulation *a)
{
    worker *first = NULL;
    for (int i = 0; i < a->n_workers; i++) {
        worker *w = &a->workers[i];
        if (w->end < INFINITY &&
            (!first || w->end < first->end || (w->end == first->end && w->pull < first->pull)))
            first = w;
    }
    return first;
}

/* ==== Opening ================================================================================= */

static void close_simulation(lt_async *async)
{
    simulation *a = (simulation *)async;
    for (int i = 0; i < a->n_workers; i++)
        lt__gradient_close(&a->workers[i].gradient);
    lt__server_close(&a->server);
    lt__timing_close(&a->timing);
    free(a->workers);
}

static lt_status open_simulation(lt_async *async, const lt_async_config *c)
{
    simulation *a = (simulation *)async;
    LT_TRY(lt__timing_open(&a->timing, c));
    LT_TRY(lt__server_open(&a->server, &async->net, c));
    async->server = &a->server;
    a->began = -1;
    LT_TRY(LT_CALLOC(a->workers, c->workers, "for asynchronous training"));
    for (; a->n_workers < c->workers; a->n_workers++) {
        worker *w = &a->workers[a->n_workers];
        *w = (worker){.end = INFINITY, .idle = true};
        LT_TRY(lt__gradient_open(&w->gradient, &async->net, false));
    }
    return LT_OK;
}

/* ==== Events ================================================================================== */

/* A worker's computation has ended: sends its gradient. */
static void send_push(simulation *a, worker *w)
{
    w->end = lt__timing_push(&a->timing, (int)(w - a->workers), w->end,
                             lt__gradient_message_bytes(&w->gradient));
    w->pushes = true;
}

/* Moves the clock to the moment at which the server has handled a push, and applies it. */
static lt_status take_push(simulation *a, worker *w, lt_async_event *event)
{
    lt_push p;
    int i = (int)(w - a->workers);
    a->server.time = lt__timing_serve(&a->timing, a->server.time, w->end);
    w->pushes = false;
    w->end = INFINITY;
    LT_TRY(lt__server_push(&a->server, i, w->pushed++, &w->gradient, &p));
    *event = lt__server_event(&a->server, &p, i, w->read, &w->gradient);
    event->time = a->server.time;
    w->idle = true;
    return LT_OK;
}

/* Sends the values of a granted ticket, and starts its computation, which ends at w->end. */
static void begin_computing(simulation *a, const lt_grant *g, lt_async_event *event)
{
    worker *w = &a->workers[g->worker];
    w->read = g->version;
    w->pull = a->pulls++;
    a->began = a->began < 0 ? a->server.time : a->began;
    w->end = lt__timing_pull(&a->timing, g->worker, a->server.time, a->async.net.bytes) +
             lt__timing_compute(&a->timing, a->async.ctx->config.seed, g->worker, w->pull);
    lt__async_begin(&a->async, g, &w->gradient, event);
    event->time = a->server.time;
}

/* Lets all idle workers pull, as long as there are tickets. */
static lt_status pull(simulation *a)
{
    bool any = a->server.done_below < lt__order_limit(a->server.order);
    for (int i = 0; any && i < a->n_workers; i++)
        if (a->workers[i].idle) {
            LT_TRY(lt__order_pull(a->server.order, i));
            a->workers[i].idle = false;
        }
    return LT_OK;
}

static lt_status next(lt_async *async, lt_async_event *event)
{
    simulation *a = (simulation *)async;
    lt_grant g;
    bool any;
    LT_TRY(pull(a));
    for (;;) {
        LT_TRY(lt__server_grant(&a->server, &g, &any));
        if (!any)
            break;
        if (g.n > 0) {
            begin_computing(a, &g, event);
            return LT_OK;
        }
        a->workers[g.worker].idle = true;
    }
    worker *w;
    while ((w = next_worker(a)) && !w->pushes)
        send_push(a, w);
    if (w)
        return take_push(a, w, event);
    *event = (lt_async_event){.kind = LT_ASYNC_EVENT_DONE, .time = a->server.time};
    return LT_OK;
}

static lt_status set_limit(lt_async *async, int64_t tickets)
{
    return lt__order_set_limit(async->server->order, tickets);
}

static void add_stats(const lt_async *async, lt_async_stats *stats)
{
    const simulation *a = (const simulation *)async;
    lt__timing_stats(&a->timing, a->began < 0 ? 0 : a->server.time - a->began, a->n_workers, stats);
}

const lt_async_mode lt__simulation = {.bytes = sizeof(simulation),
                                      .open = open_simulation,
                                      .close = close_simulation,
                                      .next = next,
                                      .set_limit = set_limit,
                                      .add_stats = add_stats};
