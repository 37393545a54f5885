/* trace.c - the clock, and traces in the format of chrome://tracing (Google, Trace Event Format): a
 * JSON array with one event per line. The closing bracket of the array may be missing, so several
 * contexts, even in different processes, can append whole lines to one file.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "core/locale.h"
#include "core/tensor.h"

double lt__seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

enum { ROOM = 1 << 16, LINE = 256 };

struct lt_trace {
    pthread_mutex_t lock;
    int file, rank;
    double base; /* add to lt__seconds() to get the time of day, which all ranks share */
    size_t used;
    char text[ROOM];
};

static lt_status cannot(const char *path)
{
    return lt_fail(LT_EENV, "%s: cannot write the trace: %s", path, strerror(errno));
}

/* Stores the descriptor in *file. Rejects FIFOs: opening one would block until there is a reader,
 * and writing would block until the reader catches up. */
static lt_status open_trace(const char *path, int flags, int *file)
{
    struct stat now;
    if (stat(path, &now) == 0 && S_ISFIFO(now.st_mode))
        return lt_fail(LT_EENV, "%s: cannot write the trace: it is a FIFO, not a file", path);
    *file = open(path, flags | O_WRONLY | O_NONBLOCK | O_CLOEXEC, 0666);
    return *file < 0 ? cannot(path) : LT_OK;
}

lt_status lt_trace_create(const char *path)
{
    int file;
    LT_TRY(open_trace(path, O_CREAT | O_TRUNC, &file));
    errno = ENOSPC; /* the cause of a short write, which sets no error */
    bool written = write(file, "[\n", 2) == 2;
    lt_status status = written ? LT_OK : cannot(path);
    close(file);
    return status;
}

/* Writes the buffered lines to the file. If the disk is full they are lost, but training
 * continues. */
static void flush(struct lt_trace *t)
{
    for (size_t done = 0; done < t->used;) {
        ssize_t n = write(t->file, t->text + done, t->used - done);
        if (n <= 0)
            break;
        done += (size_t)n;
    }
    t->used = 0;
}

static void add_line(struct lt_trace *t, const char *format, ...) LT_PRINTF(2, 3);

static void add_line(struct lt_trace *t, const char *format, ...)
{
    va_list args;
    pthread_mutex_lock(&t->lock);
    if (t->used + LINE > ROOM)
        flush(t);
    va_start(args, format);
    int n = lt__vformat(t->text + t->used, LINE, format, args);
    va_end(args);
    if (n > 0 && n < LINE)
        t->used += (size_t)n;
    pthread_mutex_unlock(&t->lock);
}

static void name_rank(struct lt_trace *t)
{
    static const char *const tracks[] = {"steps", "compute", "communication"};
    add_line(t,
             "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"rank "
             "%d\"}},\n",
             t->rank, t->rank);
    for (int i = 0; i < (int)(sizeof tracks / sizeof *tracks); i++)
        add_line(t,
                 "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name"
                 "\":\"%s\"}},\n",
                 t->rank, i, tracks[i]);
}

lt_status lt_trace_open(lt_ctx *ctx, const char *path, int rank)
{
    LT_NEED_CTX(ctx, LT_EINVAL);
    struct timespec now;
    struct lt_trace *t = lt__calloc(1, sizeof *t, "for a trace");
    if (!t)
        return LT_ENOMEM;
    lt_status status = open_trace(path, O_APPEND, &t->file);
    if (status != LT_OK) {
        free(t);
        return status;
    }
    lt__trace_close(ctx); /* closes the previous trace */
    pthread_mutex_init(&t->lock, NULL);
    clock_gettime(CLOCK_REALTIME, &now);
    t->base = (double)now.tv_sec + 1e-9 * (double)now.tv_nsec - lt__seconds();
    t->rank = rank;
    ctx->trace = t;
    name_rank(t);
    return LT_OK;
}

void lt_trace(lt_ctx *ctx, lt_track track, const char *name, double start, double seconds)
{
    LT_NEED_CTX(ctx, );
    struct lt_trace *t = ctx->trace;
    if (t)
        add_line(t,
                 "{\"name\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.1f,\"dur\":%.1f"
                 "},\n",
                 name, t->rank, (int)track, 1e6 * (t->base + start), 1e6 * seconds);
}

void lt__trace_close(lt_ctx *ctx)
{
    struct lt_trace *t = ctx->trace;
    if (!t)
        return;
    flush(t);
    close(t->file);
    pthread_mutex_destroy(&t->lock);
    free(t);
    ctx->trace = NULL;
}
