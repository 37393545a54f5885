/* relay.h - copies a child's output to this process's stdout or stderr, in a thread, so that the
 * child itself never gets SIGPIPE or EPIPE, which crash mpirun. Can also read the output. */
#ifndef LT_TOOLS_RELAY_H
#define LT_TOOLS_RELAY_H

#include <pthread.h>
#include <stdatomic.h>

#include "lua/luatrain.h"

/* The first character of a note: a line that a rank writes to stderr for luatrain launch, because
 * mpirun carries stderr from any host. The user does not see it. */
#define RELAY_NOTE '\036'

typedef struct relay {
    int from, to;      /* descriptors: the pipe's read end, and the destination */
    atomic_bool ended; /* the child has ended */
    pthread_t thread;
    void (*take)(void *ud, const char *line);
    void *ud;
    char line[4096]; /* the current line, or its first bytes */
    size_t length;
} relay;

/* Creates a pipe and starts a thread that copies its contents to the descriptor `to`. *end is the
 * pipe's write end, new, with FD_CLOEXEC; the caller closes it after the child has inherited it. If
 * `to` is a pipe whose reader is gone, this process gets SIGPIPE once, and the rest of the output
 * is dropped. Unless take is NULL, the thread calls take(ud, line) with each line of the output,
 * without the line's end, and does not copy notes. A line may be cut to 4095 bytes. ud is borrowed.
 * LT_ENOMEM. */
LT_MUST lt_status relay_start(relay *r, int to, void (*take)(void *ud, const char *line), void *ud,
                              int *end);
/* Starts relays for the stdout and stderr of children. take(ud, line) gets the lines of stderr.
 * Free both with relay_finish(). LT_ENOMEM. */
LT_MUST lt_status relay_start_both(relay output[2], void (*take)(void *ud, const char *line),
                                   void *ud, int ends[2]);
/* Copies the remaining output and ends the thread. Call this after the child has ended. Does not
 * wait for other processes that inherited *end. */
void relay_finish(relay *r);

#endif
