/* ranks.h - luatrain --ranks N: ranks as threads of this process; or one rank, whose others are
 * processes that mpirun has started. */
#ifndef LT_TOOLS_RANKS_H
#define LT_TOOLS_RANKS_H

#include "lua/luatrain.h"

typedef struct ranks {
    int n;
    lt_group_config group;
    lt_group *mpi_group;   /* of processes, taken; n is 1. NULL: ranks are threads */
    /* What a rank does, in a thread of its own. */
    lt_status (*run)(void *ud, lt_group *group);
    void *ud;
} ranks;

/* Runs all ranks. Returns how rank 0 ended or, if one failed, how the first one did, with its
 * message; under MPI the message is empty, and the user has been told already. Does not return
 * but ends the process when another one goes on for seconds after that, and after a failure in a
 * MPI job, which one of its processes tells the user. */
LT_MUST lt_status run_ranks(const ranks *r);

/* Whether this is the end of a run that did not do what it was to do. */
bool is_failure(lt_status status);

#endif
