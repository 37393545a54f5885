/* threads.h - runs the ranks of a test as threads. Include it in one file of a test. */
#ifndef LT_TESTS_DIST_THREADS_H
#define LT_TESTS_DIST_THREADS_H

#include <pthread.h>
#include <time.h>

#include "dist/dist.h"
#include "tests/lt_test.h"

enum { MOST_THREADS = 16 };

static inline void pause_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* Calls fn in a thread for each of n items of `size` bytes, and waits for the threads. */
static inline void run_threads(int n, void *(*fn)(void *item), void *items, size_t size)
{
    pthread_t thread[MOST_THREADS];
    for (int i = 0; i < n; i++)
        CHECK(pthread_create(&thread[i], NULL, fn, (char *)items + (size_t)i * size) == 0);
    for (int i = 0; i < n; i++)
        pthread_join(thread[i], NULL);
}

/* The code of the group's failure; LT_OK if there is none. */
static inline lt_status failure_of(const lt_group *group)
{
    char text[512];
    lt_status code;
    int rank;
    return lt_group_failure(group, &rank, &code, text, sizeof text) ? code : LT_OK;
}

#endif
