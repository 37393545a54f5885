/* threads.c - starts the OpenMP threads. It first checks that the system has room for them:
 * otherwise the OpenMP runtime would print an error and call exit().
 */
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/pool.h"

static void *pass(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* The stack size of OpenMP's threads: OMP_STACKSIZE, or GOMP_STACKSIZE if that is not set, in KiB
 * or in the unit it names. 0 if neither is set, or if the OpenMP runtime would not accept the value
 * either. */
static size_t stack_bytes(void)
{
    static const char units[] = "BKMG";
    const char *text = getenv("OMP_STACKSIZE"), *unit = units + 1;
    char *end;
    if (!text && !(text = getenv("GOMP_STACKSIZE")))
        return 0;
    unsigned long long n = strtoull(text, &end, 10);
    end += strspn(end, " \t");
    if (*end)
        unit = strchr(units, *end >= 'a' && *end <= 'z' ? *end - 'a' + 'A' : *end);
    int shift = unit ? 10 * (int)(unit - units) : 0;
    return unit && n <= SIZE_MAX >> shift ? (size_t)n << shift : 0;
}

/* Fails unless n more threads can exist at the same time. The threads block all signals. */
static lt_status try_threads(int n)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER; /* locked until all have started */
    pthread_t *threads = lt__calloc((size_t)n, sizeof *threads, "for a context");
    size_t stack = stack_bytes();
    pthread_attr_t attr;
    sigset_t all, before;
    int made = 0, error = 0;
    if (!threads)
        return LT_ENOMEM;
    pthread_attr_init(&attr);
    if (stack > 0)
        /* fails if it is too small, which leaves the default, as in OpenMP */
        (void)pthread_attr_setstacksize(&attr, stack);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_mutex_lock(&gate);
    while (made < n && (error = pthread_create(&threads[made], &attr, pass, &gate)) == 0)
        made++;
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < made; i++)
        pthread_join(threads[i], NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    free(threads);
    if (made == n)
        return LT_OK;
    return lt_fail(LT_ENOMEM,
                   "the system cannot start the %d threads of a context: %s; use fewer threads",
                   n + 1, strerror(error));
}

lt_status lt__start_threads(int n)
{
    if (n == 1)
        return LT_OK;
    LT_TRY(try_threads(n - 1));
#pragma omp parallel num_threads(n)
    {
        __asm__ volatile(""); /* keeps the compiler from removing the region */
    }
    return LT_OK;
}
