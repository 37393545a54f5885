/* watchdog.h - ends this process, a rank, when MPI_Init or MPI_Finalize takes too long. They return
 * only after all ranks have called them, and have no timeout. */
#ifndef LT_TOOLS_WATCHDOG_H
#define LT_TOOLS_WATCHDOG_H

#include <pthread.h>
#include <stdbool.h>

#include "lua/luatrain.h"

typedef struct watchdog {
    double seconds;        /* the most that a call may take */
    int rank;              /* as numbered by the launcher */
    pthread_t thread;
    pthread_mutex_t lock;  /* guards call and stopped */
    pthread_cond_t changed;
    const char *call;      /* NULL: the process is not in MPI */
    bool stopped;
} watchdog;

/* Starts the thread. LT_ENOMEM. */
LT_MUST lt_status watchdog_start(watchdog *w, double seconds);
/* in_mpi of lt_group_config. */
void watchdog_see(void *w, const char *call);
void watchdog_stop(watchdog *w);

#endif
