/* timing.c - how long the parts of simulated training take; see timing.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/async/timing.h"

/* ==== Opening ================================================================================= */

/* LT_EUSAGE unless value is a number of at least 0, or above 0, but not infinite. */
static lt_status check_seconds(const char *what, double value, bool may_be_zero)
{
    if (isfinite(value) && (value > 0 || (may_be_zero && value == 0)))
        return LT_OK;
    return lt_fail(LT_EUSAGE, "%s must be %s, but is %g", what,
                   may_be_zero ? "at least 0" : "positive", value);
}

static lt_status check_rate(const char *what, double rate)
{
    return rate > 0 ? LT_OK
                    : lt_fail(LT_EUSAGE, "the rate of %s must be positive, but is %g", what, rate);
}

static lt_status check(const lt_async_config *c)
{
    if (!(c->sigma >= 0 && c->sigma <= 10))
        return lt_fail(LT_EUSAGE, "sigma must be from 0 to 10, but is %g", c->sigma);
    for (int i = 0; i < c->n_times; i++)
        LT_TRY(check_seconds("the time of a batch", c->times[i], false));
    for (int i = 0; i < c->n_rates; i++)
        LT_TRY(check_rate("a link", c->rates[i]));
    for (int i = 0; i < c->n_latencies; i++)
        LT_TRY(check_seconds("the latency of a link", c->latencies[i], true));
    LT_TRY(check_seconds("the time of the server", c->service, true));
    return c->server_rate == 0 ? LT_OK : check_rate("the server's link", c->server_rate);
}

/* *to = a copy of from (n). New. */
static lt_status copy(double **to, const double *from, int n)
{
    LT_TRY(LT_CALLOC(*to, n, "for simulated training"));
    if (n > 0)
        memcpy(*to, from, (size_t)n * sizeof **to);
    return LT_OK;
}

lt_status lt__timing_open(lt_timing *t, const lt_async_config *c)
{
    *t = (lt_timing){.n_times = c->n_times,
                     .n_rates = c->n_rates,
                     .n_latencies = c->n_latencies,
                     .sigma = c->sigma,
                     .server_rate = c->server_rate == 0 ? INFINITY : c->server_rate,
                     .service = c->service};
    LT_TRY(check(c));
    LT_TRY(copy(&t->time, c->times, c->n_times));
    LT_TRY(copy(&t->rate, c->rates, c->n_rates));
    return copy(&t->latency, c->latencies, c->n_latencies);
}

void lt__timing_close(lt_timing *t)
{
    free(t->time);
    free(t->rate);
    free(t->latency);
    *t = (lt_timing){0};
}

/* ==== Computing =============================================================================== */

/* A standard normal number; Box-Muller, in double. */
static double normal(uint64_t seed, int64_t number)
{
    uint32_t words[4];
    lt_random(seed, LT_RNG_DELAY, 0, (uint64_t)number, words);
    double u = (words[0] + 1.0) / 4294967296.0, v = words[1] / 4294967296.0;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

double lt__timing_compute(const lt_timing *t, uint64_t seed, int worker, int64_t number)
{
    double mean = t->n_times > 0 ? t->time[worker % t->n_times] : 1;
    return mean * exp(t->sigma * normal(seed, number));
}

/* ==== Messages ================================================================================ */

/* free: in_free or out_free. */
static double carry(lt_timing *t, int worker, double *free, double time, size_t bytes)
{
    double rate = t->n_rates > 0 ? t->rate[worker % t->n_rates] : INFINITY;
    double latency = t->n_latencies > 0 ? t->latency[worker % t->n_latencies] : 0;
    double end = time + (double)bytes / rate;
    if (isfinite(rate) && isfinite(t->server_rate)) {
        *free = fmax(*free, time) + (double)bytes / t->server_rate;
        end = fmax(end, *free);
    }
    t->on_links += end + latency - time;
    return end + latency;
}

double lt__timing_push(lt_timing *t, int worker, double time, size_t bytes)
{
    return carry(t, worker, &t->in_free, time, bytes);
}

double lt__timing_pull(lt_timing *t, int worker, double time, size_t bytes)
{
    return carry(t, worker, &t->out_free, time, bytes);
}

double lt__timing_serve(lt_timing *t, double free, double arrived)
{
    double done = fmax(free, arrived) + t->service;
    t->busy += t->service;
    t->in_queue += done - arrived;
    return done;
}

void lt__timing_stats(const lt_timing *t, double seconds, int workers, lt_async_stats *stats)
{
    if (!(seconds > 0))
        return;
    stats->server_busy = fmin(t->busy / seconds, 1);
    stats->link_share = fmin(t->on_links / (seconds * workers), 1);
    stats->queue_share = fmin(t->in_queue / (seconds * workers), 1);
}
