/* relay.h - passes what a child prints on to this process's own stdout or stderr, in a thread. The
 * child itself never meets a pipe that nobody reads: mpirun crashes there. */
#ifndef LT_TOOLS_RELAY_H
#define LT_TOOLS_RELAY_H

#include <pthread.h>
#include <stdatomic.h>

#include "lua/luatrain.h"

typedef struct relay {
    int from, to;
    atomic_bool ended; /* the child */
    pthread_t thread;
} relay;

/* Passes on to the descriptor `to` what the child writes into *end: new, closed on exec, and closed
 * by the caller once the child has a copy. When nobody reads `to` any more, this process gets
 * SIGPIPE, once, and the rest is dropped. LT_ENOMEM. */
LT_MUST lt_status relay_start(relay *r, int to, int *end);
/* The child has ended: passes on what is left, and stops. Others that have inherited *end are not
 * waited for. */
void relay_finish(relay *r);

#endif
