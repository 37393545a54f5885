/* relay.c - see relay.h. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "tools/relay.h"
#include "tools/thread.h"

enum { BYTES = 1 << 16, LOOK_MS = 50 };

/* Writes all bytes. Returns false on an error. SIGPIPE is blocked in this thread, so writing to a
 * closed pipe fails with EPIPE. */
static bool write_all(int to, const char *data, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = write(to, data, bytes);
        if (n < 0 && errno == EAGAIN)
            poll(&(struct pollfd){.fd = to, .events = POLLOUT}, 1, -1);
        else if (n < 0 && errno != EINTR)
            return false;
        data += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
    return true;
}

/* Passes each line in the next n bytes of the output to r->take, and removes notes. Returns the
 * number of bytes that remain. A note may begin in the middle of another rank's line. */
static size_t read_lines(relay *r, char *data, size_t n)
{
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        bool ends = data[i] == '\n';
        if (data[i] == RELAY_NOTE)
            r->length = 0;
        bool is_note = data[i] == RELAY_NOTE || (r->length > 0 && r->line[0] == RELAY_NOTE);
        if (!ends && r->length < sizeof r->line - 1)
            r->line[r->length++] = data[i];
        if (!is_note)
            data[kept++] = data[i];
        if (ends) {
            r->line[r->length] = '\0';
            r->take(r->ud, r->line);
            r->length = 0;
        }
    }
    return kept;
}

static void *pass_on(void *ud)
{
    relay *r = ud;
    char data[BYTES];
    bool writes = true;
    for (;;) {
        struct pollfd in = {.fd = r->from, .events = POLLIN};
        bool ended = atomic_load(&r->ended); /* then all output of the child is in the pipe */
        int ready = poll(&in, 1, LOOK_MS);
        if (ready == 0 && ended)
            return NULL;
        ssize_t n = ready > 0 ? read(r->from, data, sizeof data) : -1;
        if (n == 0)
            return NULL;
        size_t bytes = n > 0 ? (size_t)n : 0;
        if (r->take)
            bytes = read_lines(r, data, bytes);
        if (writes && !write_all(r->to, data, bytes)) {
            writes = false;
            if (errno == EPIPE)
                kill(getpid(), SIGPIPE);
        }
    }
}

lt_status relay_start(relay *r, int to, void (*take)(void *ud, const char *line), void *ud,
                      int *end)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return lt_fail(LT_ENOMEM, "cannot create a pipe: %s", strerror(errno));
    r->from = ends[0];
    r->to = to;
    r->take = take;
    r->ud = ud;
    r->length = 0;
    atomic_init(&r->ended, false);
    *end = ends[1];
    lt_status status = thread_start(&r->thread, pass_on, r);
    if (status != LT_OK) {
        close(ends[0]);
        close(ends[1]);
    }
    return status;
}

lt_status relay_start_both(relay output[2], void (*take)(void *ud, const char *line), void *ud,
                           int ends[2])
{
    LT_TRY(relay_start(&output[0], STDOUT_FILENO, NULL, NULL, &ends[0]));
    lt_status status = relay_start(&output[1], STDERR_FILENO, take, ud, &ends[1]);
    if (status == LT_OK)
        return LT_OK;
    close(ends[0]);
    relay_finish(&output[0]);
    return status;
}

void relay_finish(relay *r)
{
    atomic_store(&r->ended, true);
    pthread_join(r->thread, NULL);
    close(r->from);
}
