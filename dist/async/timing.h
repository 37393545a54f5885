/* timing.h - how long the parts of simulated training take: computing, the messages on the link of
 * each worker and of the server, and the server. Private to dist.
 *
 * A message takes its bytes divided by the rate of the slower link, plus the latency of the
 * worker's link. A link carries both directions at the same time. The messages of all workers share
 * the server's link: in each direction, they pass it one after the other, in the order of sending.
 * A worker whose link has no limit is on the server's host, so its messages do not pass that link.
 */
#ifndef LT_DIST_ASYNC_TIMING_H
#define LT_DIST_ASYNC_TIMING_H

#include "dist/async.h"

typedef struct lt_timing { /* all zeros: not open. The arrays are repeated for further workers */
    double *time;          /* (n_times) seconds of a batch */
    double *rate;          /* (n_rates) bytes per second; INFINITY for no limit */
    double *latency;       /* (n_latencies) seconds */
    int n_times, n_rates, n_latencies;
    double sigma;             /* spread of the times */
    double server_rate;       /* bytes per second of the server's link; or INFINITY */
    double service;           /* seconds that the server takes for a push and for its answer */
    double in_free, out_free; /* times at which the server's link is free for the next message */
    /* For statistics: seconds of all workers on links and in the server's queue, and seconds in
     * which the server is busy */
    double on_links, in_queue, busy;
} lt_timing;

/* Copies the times and links of config. LT_EUSAGE for a number that is out of range; LT_ENOMEM. */
LT_NODISCARD lt_status lt__timing_open(lt_timing *timing, const lt_async_config *config);
void lt__timing_close(lt_timing *timing); /* does nothing if timing is not open */
/* Seconds in which a worker computes. They depend on the seed and on number, which is different for
 * each batch. */
double lt__timing_compute(const lt_timing *timing, uint64_t seed, int worker, int64_t number);
/* The time at which a message of `bytes` bytes arrives if it is sent at `time`: by a worker to the
 * server, or by the server to a worker. Calls for one direction must be in the order of time. */
double lt__timing_push(lt_timing *timing, int worker, double time, size_t bytes);
double lt__timing_pull(lt_timing *timing, int worker, double time, size_t bytes);
/* The time at which the server has handled a push that arrived, if it is free from `free` on. */
double lt__timing_serve(lt_timing *timing, double free, double arrived);
/* Adds the shares of `seconds` of `workers` workers and of the server to *stats. */
void lt__timing_stats(const lt_timing *timing, double seconds, int workers, lt_async_stats *stats);

#endif
