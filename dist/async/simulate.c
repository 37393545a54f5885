/* simulate.c - asynchronous training simulated in one process; see async.h.
 *
 * A gradient is computed when its worker pulls, and stored. It is applied when the virtual clock
 * reaches the end of that worker's computation. The net's own arenas are the server's: at both
 * moments they contain the right weights, and nothing is exchanged.
 *
 * All times depend only on the seed and the number of the pull, so a simulation is deterministic.
 */
#include <math.h>
#include <stdlib.h>

#include "core/tensor.h"
#include "dist/async/worker.h"

typedef struct worker {
    bool idle;    /* it has pushed, or found no ticket, and pulls next */
    double end;   /* virtual time at which it pushes; infinity if it does not compute */
    int64_t pull; /* number of its last pull; orders equal times */
    int64_t read, pushes;
    lt_gradient gradient;
} worker;

typedef struct simulation {
    lt_async async;
    lt_server server;
    worker *workers;
    int n_workers;
    double sigma, *times;
    int n_times;
    int64_t pulls;
} simulation;

/* ==== Time ==================================================================================== */

/* A standard normal number; Box-Muller, in double. */
static double normal(uint64_t seed, int64_t pull)
{
    uint32_t words[4];
    lt_random(seed, LT_RNG_DELAY, 0, (uint64_t)pull, words);
    double u = (words[0] + 1.0) / 4294967296.0, v = words[1] / 4294967296.0;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

static double seconds_of(const simulation *a, int i)
{
    double mean = a->n_times > 0 ? a->times[i % a->n_times] : 1;
    return mean * exp(a->sigma * normal(a->async.ctx->config.seed, a->workers[i].pull));
}

/* The worker that pushes next, or NULL if none computes. */
static worker *next_push(const simulation *a)
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

static lt_status check_times(const lt_async_config *c)
{
    if (!(c->sigma >= 0 && c->sigma <= 10))
        return lt_fail(LT_EUSAGE, "sigma must be from 0 to 10, but is %g", c->sigma);
    for (int i = 0; i < c->n_times; i++)
        if (!(c->times[i] > 0 && isfinite(c->times[i])))
            return lt_fail(LT_EUSAGE, "the time of a batch must be positive, but is %g",
                           c->times[i]);
    return LT_OK;
}

static void close_simulation(lt_async *async)
{
    simulation *a = (simulation *)async;
    for (int i = 0; i < a->n_workers; i++)
        lt__gradient_close(&a->workers[i].gradient);
    lt__server_close(&a->server);
    free(a->workers);
    free(a->times);
}

static lt_status open_simulation(lt_async *async, const lt_async_config *c)
{
    simulation *a = (simulation *)async;
    LT_TRY(check_times(c));
    LT_TRY(lt__server_open(&a->server, &async->net, c));
    async->server = &a->server;
    a->sigma = c->sigma;
    a->n_times = c->n_times;
    LT_TRY(LT_CALLOC(a->times, c->n_times, "for asynchronous training"));
    LT_TRY(LT_CALLOC(a->workers, c->workers, "for asynchronous training"));
    for (int i = 0; i < c->n_times; i++)
        a->times[i] = c->times[i];
    for (; a->n_workers < c->workers; a->n_workers++) {
        worker *w = &a->workers[a->n_workers];
        *w = (worker){.end = INFINITY, .idle = true};
        LT_TRY(lt__gradient_open(&w->gradient, &async->net, false));
    }
    return LT_OK;
}

/* ==== Events ================================================================================== */

/* Moves the clock to the end of a worker's computation, and takes its push. */
static lt_status take_push(simulation *a, worker *w, lt_async_event *event)
{
    lt_push p;
    int i = (int)(w - a->workers);
    a->server.time = w->end;
    w->end = INFINITY;
    LT_TRY(lt__server_push(&a->server, i, w->pushes++, &w->gradient, &p));
    *event = lt__server_event(&a->server, &p, i, w->read, &w->gradient);
    event->time = a->server.time;
    w->idle = true;
    return LT_OK;
}

/* Starts the computation of a granted ticket. Its worker pushes the gradient at w->end. */
static void begin_computing(simulation *a, const lt_grant *g, lt_async_event *event)
{
    worker *w = &a->workers[g->worker];
    w->read = g->version;
    w->pull = a->pulls++;
    w->end = a->server.time + seconds_of(a, g->worker);
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
    worker *w = next_push(a);
    if (w)
        return take_push(a, w, event);
    *event = (lt_async_event){.kind = LT_ASYNC_EVENT_DONE, .time = a->server.time};
    return LT_OK;
}

static lt_status set_limit(lt_async *async, int64_t tickets)
{
    return lt__order_set_limit(async->server->order, tickets);
}

const lt_async_mode lt__simulation = {.bytes = sizeof(simulation),
                                      .open = open_simulation,
                                      .close = close_simulation,
                                      .next = next,
                                      .set_limit = set_limit};
