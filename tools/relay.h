/* relay.h - copies a child's output to this process's stdout or stderr, in a thread. The child
 * itself never gets SIGPIPE or EPIPE, which crash mpirun. */
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

/* Copies what the child writes into *end to the descriptor `to`. *end is new, has FD_CLOEXEC, and
 * is closed by the caller once the child has a copy. If `to` is a pipe whose reader is gone, this
 * process gets SIGPIPE once, and the rest is dropped. LT_ENOMEM. */
LT_MUST lt_status relay_start(relay *r, int to, int *end);
/* Call it after the child has ended. Copies what is left, and stops. Does not wait for other
 * processes that have inherited *end. */
void relay_finish(relay *r);

#endif
