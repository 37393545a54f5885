/* server_clock.c - the virtual clock of a simulated synchronous parameter server; see async.h.
 *
 * A step begins with a pull of every worker, all at the same time. Each worker computes when the
 * message has arrived and then pushes, and the server handles the pushes in the order in which they
 * arrive. The step ends when it has handled the last one. So the state between steps is one time.
 */
#include <stdlib.h>

#include "core/tensor.h"
#include "dist/async/order.h"
#include "dist/async/timing.h"

typedef struct arrival {
    double time;
    int worker;
} arrival;

struct lt_server_clock {
    lt_timing timing;
    uint64_t seed;
    size_t bytes;
    int workers;
    arrival *arrival; /* (workers) */
    double began, time;
};

lt_server_clock *lt_server_clock_new(const lt_ctx *ctx, const lt_async_config *config, size_t bytes,
                                     double time)
{
    LT_NEED_CTX(ctx, NULL);
    if (config->workers < 1 || config->workers > LT_MAX_WORKERS) {
        lt_fail(LT_EUSAGE, "the number of workers must be from 1 to %d, but is %d", LT_MAX_WORKERS,
                config->workers);
        return NULL;
    }
    lt_server_clock *c = lt__calloc(1, sizeof *c, "for simulated training");
    if (!c)
        return NULL;
    c->seed = ctx->config.seed;
    c->bytes = bytes;
    c->workers = config->workers;
    c->began = c->time = time;
    if (lt__timing_open(&c->timing, config) == LT_OK &&
        LT_CALLOC(c->arrival, c->workers, "for %d workers", c->workers) == LT_OK)
        return c;
    lt_server_clock_free(c);
    return NULL;
}

void lt_server_clock_free(lt_server_clock *c)
{
    if (!c)
        return;
    lt__timing_close(&c->timing);
    free(c->arrival);
    free(c);
}

static int compare_times(const void *a, const void *b)
{
    const arrival *x = a, *y = b;
    return x->time != y->time ? (x->time > y->time) - (x->time < y->time) : x->worker - y->worker;
}

static void sort(const lt_server_clock *c)
{
    qsort(c->arrival, (size_t)c->workers, sizeof *c->arrival, compare_times);
}

double lt_server_clock_step(lt_server_clock *c, int64_t step)
{
    for (int i = 0; i < c->workers; i++) {
        double begin = lt__timing_pull(&c->timing, i, c->time, c->bytes);
        c->arrival[i] =
            (arrival){begin + lt__timing_compute(&c->timing, c->seed, i, step * c->workers + i), i};
    }
    sort(c); /* the server's link carries the pushes in the order in which they begin */
    for (int i = 0; i < c->workers; i++)
        c->arrival[i].time =
            lt__timing_push(&c->timing, c->arrival[i].worker, c->arrival[i].time, c->bytes);
    sort(c);
    for (int i = 0; i < c->workers; i++)
        c->time = lt__timing_serve(&c->timing, c->time, c->arrival[i].time);
    return c->time;
}

void lt_server_clock_stats(const lt_server_clock *c, lt_async_stats *stats)
{
    *stats = (lt_async_stats){0};
    lt__timing_stats(&c->timing, c->time - c->began, c->workers, stats);
}
