/* awake.h - a clock that does not count the time during which this process is suspended, such as by
 * SIGSTOP. Private to dist.
 */
#ifndef LT_DIST_ASYNC_AWAKE_H
#define LT_DIST_ASYNC_AWAKE_H

typedef struct lt_awake { /* all zeros: the clock starts with the first call */
    double now, cpu;      /* at the last call: the system's clock, and CPU time of the thread */
    double suspended;     /* seconds so far */
} lt_awake;

/* Seconds since an arbitrary start. One thread calls it, several times a second: longer intervals
 * in which the thread uses no CPU count as suspended. */
double lt__awake_seconds(lt_awake *clock);

#endif
