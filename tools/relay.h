/* relay.h - copies a child's output to this process's stdout or stderr, in a thread, so that the
 * child itself never gets SIGPIPE or EPIPE, which crash mpirun. */
#ifndef LT_TOOLS_RELAY_H
#define LT_TOOLS_RELAY_H

#include <pthread.h>
#include <stdatomic.h>

#include "lua/luatrain.h"

typedef struct relay {
    int from, to;      /* descriptors: the pipe's read end, and the destination */
    atomic_bool ended; /* the child has ended */
    pthread_t thread;
    const char *phrase; /* text to look for in the output, or NULL */
    size_t matched;     /* the output so far ends with this many bytes of the phrase */
    bool is_found;      /* whether the phrase occurred; valid when the thread has ended */
} relay;

/* Creates a pipe and starts a thread that copies its contents to the descriptor `to`. *end is the
 * pipe's write end, new, with FD_CLOEXEC; the caller closes it after the child has inherited it. If
 * `to` is a pipe whose reader is gone, this process gets SIGPIPE once, and the rest of the output
 * is dropped. phrase is borrowed; its first character must not occur in it again. LT_ENOMEM. */
LT_MUST lt_status relay_start(relay *r, int to, const char *phrase, int *end);
/* Copies the remaining output and ends the thread. Call this after the child has ended. Does not
 * wait for other processes that inherited *end. */
void relay_finish(relay *r);

#endif
