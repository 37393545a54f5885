/* watchdog.h - ends this process, a rank, when it waits too long inside MPI: MPI_Init and
 * MPI_Finalize return only after all ranks have called them, and have no timeout of their own. */
#ifndef LT_TOOLS_WATCHDOG_H
#define LT_TOOLS_WATCHDOG_H

#include <pthread.h>
#include <stdbool.h>

#include "lua/luatrain.h"

typedef struct watchdog {
    double seconds;        /* that a call may take */
    int rank;              /* as the launcher counts */
    pthread_t thread;
    pthread_mutex_t lock;  /* guards what follows */
    pthread_cond_t changed;
    const char *call;      /* NULL: the process is not in MPI */
    bool stopped;
} watchdog;

/* Starts the thread that watches. LT_ENOMEM when there is no thread left. */
LT_MUST lt_status watchdog_start(watchdog *w, double seconds);
/* An lt_group_config's in_mpi: the process enters this call; NULL: it is back. */
void watchdog_see(void *w, const char *call);
void watchdog_stop(watchdog *w);

#endif
