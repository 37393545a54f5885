/* active_clock.h - a clock that does not count the time during which this process is suspended,
 * such as by SIGSTOP. Private to dist.
 */
#ifndef LT_DIST_ASYNC_ACTIVE_CLOCK_H
#define LT_DIST_ASYNC_ACTIVE_CLOCK_H

typedef struct lt_active_clock { /* all zeros: the clock starts with the first call */
    double now, cpu;             /* system's clock and CPU time of the thread at the last call */
    double suspended;            /* seconds of suspension so far */
} lt_active_clock;

/* Seconds since an arbitrary start. One thread calls it, several times a second: longer intervals
 * in which the thread uses no CPU count as suspended. */
double lt__active_seconds(lt_active_clock *clock);

#endif
