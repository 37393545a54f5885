/* ranks.h - runs the ranks of a job: all as threads of this process (luatrain --ranks N), or one
 * rank of an MPI job, whose other ranks are processes. */
#ifndef LT_TOOLS_RANKS_H
#define LT_TOOLS_RANKS_H

#include "lua/luatrain.h"

typedef struct ranks {
    int n; /* ranks in this process */
    lt_group_config group;
    /* The group of a job of processes, taken; then n is 1. NULL if ranks are threads */
    lt_group *own_group;
    /* For threads: the job ends with the status of rank 0, even if other ranks have failed before
     * or still run a few seconds later. A failure for which is_of_all() is true always ends it. */
    bool first_decides;
    /* Runs one rank, in its own thread. group is borrowed. */
    lt_status (*run)(void *ud, lt_group *group);
    void *ud;
} ranks;

/* Runs all ranks. Returns the status and the message of the first rank that failed. If no rank
 * failed, returns rank 0's status and message. In an MPI job, it returns the status of this
 * process's rank and an empty message, because rank 0 has already printed its message. Ends the
 * process instead of returning if a rank still runs a few seconds after a failure, and after any
 * failure in an MPI job; then one process of each node prints the message. LT_ENOMEM. */
LT_MUST lt_status run_ranks(const ranks *r);

/* Whether a rank with this status failed: not LT_OK, LT_EDONE or LT_ESTOPPED. */
bool is_failure(lt_status status);

/* Whether this failure of one rank ends the whole job, even in asynchronous training: a usage
 * error, or os.exit() with a code other than 0. */
bool is_of_all(lt_status status);

#endif
