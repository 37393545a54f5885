/* clock.h - time of the monotonic clock, which neither an administrator nor NTP can set. Define
 * _GNU_SOURCE before including it. */
#ifndef LT_TOOLS_CLOCK_H
#define LT_TOOLS_CLOCK_H

#include <pthread.h>
#include <stdbool.h>
#include <time.h>

static inline double clock_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Waits until the condition is signalled, for at most ns nanoseconds; ns is below one second. The
 * caller holds the lock. Returns whether the wait timed out. */
static inline bool clock_wait(pthread_cond_t *cond, pthread_mutex_t *lock, long ns)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += ns;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return pthread_cond_clockwait(cond, lock, CLOCK_MONOTONIC, &until) != 0;
}

#endif
