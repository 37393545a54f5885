/* watchdog.h - ends this process, one rank of an MPI job, if MPI_Init or MPI_Finalize takes too
 * long. These calls return only after all ranks have called them, and have no timeout. */
#ifndef LT_TOOLS_WATCHDOG_H
#define LT_TOOLS_WATCHDOG_H

#include <pthread.h>
#include <stdbool.h>

#include "lua/luatrain.h"

typedef struct watchdog {
    double seconds; /* time limit of a call on rank 0; others have more, see watchdog.c */
    int rank;       /* the rank that the launcher gave this process */
    pthread_t thread;
    pthread_mutex_t lock; /* guards call and stopped */
    pthread_cond_t changed;
    const char *call; /* name of the MPI call in progress, or NULL */
    bool stopped;     /* the thread must end */
} watchdog;

/* Starts the thread. *w must not be moved or freed until watchdog_stop(). LT_ENOMEM. */
LT_MUST lt_status watchdog_start(watchdog *w, double seconds);
/* The in_mpi callback of lt_group_config; w is the watchdog. call is NULL after an MPI call. */
void watchdog_on_mpi_call(void *w, const char *call);
/* Ends the thread and waits for it. */
void watchdog_stop(watchdog *w);

#endif
