/* restart.h - luatrain launch --restarts N: starts a job again if it has lost a rank or run out of
 * memory. Training resumes from the newest checkpoint; see overrides.lua. */
#ifndef LT_TOOLS_RESTART_H
#define LT_TOOLS_RESTART_H

#include "tools/options.h"
#include "tools/outcome.h"

typedef struct restarts {
    settings job;    /* settings of the next start, without the hosts that are lost */
    char *hosts;     /* owns job.hosts after a host was lost */
    int done;        /* restarts so far */
    int64_t step;    /* the step in which the job last failed; -1 if unknown */
    int times;       /* how often in a row it has failed there */
    outcome outcome; /* how the latest start ended */
} restarts;

/* Prepares for a start of r->job: r->outcome, and the ranks' environment. LT_ENOMEM. */
LT_MUST lt_status restart_begin(restarts *r);
/* Decides whether to start the job again after it has ended. status: LT_OK if mpirun ended with
 * `code`. If the job starts again, prints why and returns true. If it would, but must not because
 * it has no restarts left or fails again and again, sets *status to a failure that says so. Without
 * --restarts, returns false. */
bool restart_next(restarts *r, lt_status *status, int code);
void restart_free(restarts *r);

#endif
