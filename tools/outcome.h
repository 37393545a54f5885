/* outcome.h - what the output of mpirun says about a job: its ranks, its run, and why it failed. */
#ifndef LT_TOOLS_OUTCOME_H
#define LT_TOOLS_OUTCOME_H

#include <limits.h>

#include "lua/luatrain.h"

enum { HOST_BYTES = 65 }; /* HOST_NAME_MAX and the final 0 */

typedef struct outcome {
    int n; /* ranks */
    /* (n) the host of each rank; "" if the rank has never reported it. A start with the same number
     * of ranks runs them on the same hosts */
    char (*hosts)[HOST_BYTES];
    char run[PATH_MAX];  /* folder of the script's last run that has begun, or "" */
    char out[PATH_MAX];  /* the --out of that run; "" if the script sets its folder */
    char from[PATH_MAX]; /* the checkpoint or folder from which that run began, or "" */
    int begun, runs;     /* runs that have begun in this start; the most in any start */
    bool is_mixed;       /* the script sets the folders of some of its runs, but not of all */
    char failure[1024];  /* the last line of luatrain that is not a warning, or "" */
    int killed, signal;  /* the rank that a signal has killed, and the signal; 0 if none */
    bool has_begun;      /* a rank has reported its host in this start */
    bool no_daemon;      /* mpirun could not start processes on another host */
    bool lost_daemon;    /* mpirun has lost the connection to another host */
    int64_t oom_kills;   /* see oom_kills(), before the job started */
} outcome;

/* Prepares *o for a start of n ranks. *o is zero or has an earlier start; then what it says about
 * the run stays, as do the hosts if n is the same. LT_ENOMEM. */
LT_MUST lt_status outcome_begin(outcome *o, int n);
void outcome_free(outcome *o);
/* Reads a line of the job's stderr. For relay_start(); ud is the outcome. */
void outcome_take(void *ud, const char *line);
/* Writes why the job failed as a sentence without a full stop, such as "rank 1 on alpha was killed
 * by SIGKILL". code: its exit code. error: this process's own message, or "". */
void outcome_cause(const outcome *o, int code, const char *error, char *text, size_t bytes);

/* On a rank, once it has joined its group: tells luatrain launch --restarts where it runs. */
void outcome_note_rank(int rank);

#endif
