/* watchdog.c - see watchdog.h. The MPI call cannot be interrupted, so a separate thread watches the
 * time. At the limit it prints a message and calls _exit(), because exit() would run exit handlers
 * of the MPI library in the middle of the call.
 *
 * Each rank knows only that some other rank is missing. To print the message once instead of once
 * per rank, the ranks end at different times: rank 0 first, then 1, then 2 and 3, then 4 to 7.
 * mpirun kills the others when the first one has ended.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "tools/clock.h"
#include "tools/thread.h"
#include "tools/watchdog.h"

enum { PARTS = 10 };             /* checks per second */
static const double STAGGER = 2; /* seconds between the groups; mpirun takes 1 s to kill all */

/* Reads the rank from the launcher's variables, because MPI reports it only after MPI_Init. */
static int rank_of_launcher(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK",
                                        "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value && *value)
            return atoi(value);
    }
    return 0;
}

static double limit_of(const watchdog *w)
{
    double seconds = w->seconds;
    for (int rank = w->rank; rank > 0; rank /= 2)
        seconds += STAGGER;
    return seconds;
}

static _Noreturn void give_up(const char *call, int rank, double seconds)
{
    char host[64] = "";
    gethostname(host, sizeof host - 1);
    dprintf(STDERR_FILENO,
            "luatrain: rank %d on %s is still in %s after %g s: another rank is "
            "stopped, stuck or not yet started; --timeout S waits longer\n",
            rank, host, call, seconds);
    _exit(lt_exit_code(LT_EPEER));
}

/* The thread. Counts checks instead of reading a clock, so that time in which the whole job is
 * stopped, for example by Ctrl-Z, does not count. */
static void *watch(void *ud)
{
    watchdog *w = ud;
    int looks = 0;
    pthread_mutex_lock(&w->lock);
    while (!w->stopped) {
        if (!w->call) {
            pthread_cond_wait(&w->changed, &w->lock);
            looks = 0;
        } else if (clock_wait(&w->changed, &w->lock, 1000000000 / PARTS) &&
                   ++looks >= PARTS * limit_of(w)) {
            give_up(w->call, w->rank, limit_of(w));
        }
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

lt_status watchdog_start(watchdog *w, double seconds)
{
    *w = (watchdog){.seconds = seconds,
                    .rank = rank_of_launcher(),
                    .lock = PTHREAD_MUTEX_INITIALIZER,
                    .changed = PTHREAD_COND_INITIALIZER};
    return thread_start(&w->thread, watch, w);
}

static void change(watchdog *w, const char *call, bool stopped)
{
    pthread_mutex_lock(&w->lock);
    w->call = call;
    w->stopped = stopped;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

void watchdog_on_mpi_call(void *w, const char *call) { change(w, call, false); }

void watchdog_stop(watchdog *w)
{
    change(w, NULL, true);
    pthread_join(w->thread, NULL);
}
