/* emu_stream.h - the emulator's memory, its stream, and its queues of uploads and downloads. A part
 * of emu.c, which describes the emulator.
 */
#ifndef TESTS_DEVICE_EMU_STREAM_H
#define TESTS_DEVICE_EMU_STREAM_H

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "ops/backend/plugin.h"
#include "tests/device/emu_counts.h"

#define MEMORY ((size_t)1 << 36)
enum { PAGE = 4096, MAX_PENDING = 4096, BLOCKS = 64 };

typedef enum queue { STREAM, UPLOADS, DOWNLOADS } queue;

/* A copy that has not run yet. */
typedef struct pending {
    queue queue;
    uint64_t at;     /* its position in the stream, or among the uploads and downloads */
    char *dst, *src; /* src of a copy in the stream is a private buffer */
    size_t bytes;
    bool is_done;
} pending;

typedef struct point { /* a position in the stream, and one in another queue */
    uint64_t at;
    queue queue;
    uint64_t copies;
} point;

typedef struct emu {
    lt_device base;
    lt_device *cpu; /* runs memory operations, on the emulator's memory */
    const lt_host *host;
    char *start;
    size_t used;
    char name[24];
    pthread_mutex_t lock;     /* guards the fields below, and the memory while it is open */
    uint64_t queued, done;    /* stream positions: the end; the last that the host waited for */
    uint64_t copies;          /* number of uploads and downloads so far */
    uint64_t marks;           /* number of marks so far */
    point mark[LT_MAX_MARKS]; /* the latest ones */
    pending pending[MAX_PENDING];
    int n_pending;
    lt_range block[BLOCKS]; /* host memory of alloc_host() */
} emu;

static _Thread_local long counts[EMU_COUNTS];

LT_API long emu_count(int what) { return counts[what]; }

static bool lacks(const char *what)
{
    const char *missing = getenv("EMU");
    return missing && strcmp(missing, what) == 0;
}

static emu *emu_of(lt_device *device) { return (emu *)device; }

static void allow(const emu *e, int access)
{
    if (e->used > 0 && mprotect(e->start, e->used, access) != 0)
        abort();
}

/* Evaluates `status` with the device memory open, and returns it. */
#define WITH_MEMORY(e, status)                                                                     \
    pthread_mutex_lock(&(e)->lock);                                                                \
    (e)->queued++;                                                                                 \
    allow((e), PROT_READ | PROT_WRITE);                                                            \
    lt_status result = (status);                                                                   \
    allow((e), PROT_NONE);                                                                         \
    pthread_mutex_unlock(&(e)->lock);                                                              \
    return result

/* ==== Memory ================================================================================== */

/* Addresses are never reused. Large blocks start at a page. */
static void *emu_alloc(lt_device *device, size_t bytes)
{
    emu *e = emu_of(device);
    pthread_mutex_lock(&e->lock);
    size_t step = bytes < PAGE ? 64 : PAGE, start = (e->used + step - 1) & ~(step - 1);
    bool fits = bytes <= MEMORY - start;
    e->used = fits ? start + bytes : e->used;
    pthread_mutex_unlock(&e->lock);
    return fits ? e->start + start : NULL;
}

static void emu_free(lt_device *device, void *p, size_t bytes)
{
    (void)device;
    if (bytes >= PAGE)
        (void)madvise(p, bytes & ~(size_t)(PAGE - 1), MADV_DONTNEED);
}

/* Whether p is in the device memory. A GPU cannot access other addresses. */
static bool is_on_device(const emu *e, const void *p)
{
    return (const char *)p >= e->start && (const char *)p <= e->start + e->used;
}

static bool is_block(const emu *e, const void *p, size_t bytes)
{
    for (int i = 0; i < BLOCKS; i++) {
        const lt_range *b = &e->block[i];
        if ((const char *)p >= b->start && (const char *)p + bytes <= b->start + b->bytes)
            return true;
    }
    return false;
}

/* ==== Pending copies ========================================================================== */

static void add_pending(emu *e, queue q, uint64_t at, void *dst, const void *src, size_t bytes)
{
    if (e->n_pending == MAX_PENDING)
        abort();
    e->pending[e->n_pending++] = (pending){q, at, dst, (char *)src, bytes, false};
}

static void run_copy(emu *e, pending *l)
{
    if (l->is_done)
        return;
    l->is_done = true;
    allow(e, PROT_READ | PROT_WRITE);
    memcpy(l->dst, l->src, l->bytes);
    allow(e, PROT_NONE);
    if (l->queue == STREAM)
        free(l->src);
}

static bool is_within(const pending *l, const point *m)
{
    return l->queue == STREAM ? l->at <= m->at : l->queue == m->queue && l->at <= m->copies;
}

/* The host waits until all work up to a position has completed. */
static void wait_until(emu *e, point m)
{
    int n = 0;
    if (m.at > e->done) {
        counts[EMU_WAITS]++;
        counts[EMU_DRAINS] += m.at == e->queued;
        e->done = m.at;
    }
    for (int i = 0; i < e->n_pending; i++)
        if (is_within(&e->pending[i], &m))
            run_copy(e, &e->pending[i]);
    for (int i = 0; i < e->n_pending; i++)
        if (!is_within(&e->pending[i], &m))
            e->pending[n++] = e->pending[i];
    e->n_pending = n;
}

static point end_of_stream(const emu *e) { return (point){.at = e->queued}; }

/* Waits for everything, in all queues. */
static void wait_for_all(emu *e)
{
    for (queue q = STREAM; q <= DOWNLOADS; q++)
        wait_until(e, (point){e->queued, q, e->copies});
}

static uint64_t add_mark(emu *e, point m)
{
    e->mark[++e->marks % LT_MAX_MARKS] = m;
    return e->marks;
}

static bool is_old(const emu *e, uint64_t mark)
{
    if (mark == 0 || mark > e->marks)
        abort();
    return mark + LT_MAX_MARKS <= e->marks;
}

static uint64_t emu_mark(lt_device *device)
{
    emu *e = emu_of(device);
    pthread_mutex_lock(&e->lock);
    uint64_t mark = add_mark(e, end_of_stream(e));
    pthread_mutex_unlock(&e->lock);
    return mark;
}

static lt_status emu_wait(lt_device *device, uint64_t mark)
{
    emu *e = emu_of(device);
    pthread_mutex_lock(&e->lock);
    if (is_old(e, mark))
        wait_for_all(e);
    else
        wait_until(e, e->mark[mark % LT_MAX_MARKS]);
    pthread_mutex_unlock(&e->lock);
    return LT_OK;
}

static lt_status emu_sync(lt_device *device)
{
    emu *e = emu_of(device);
    pthread_mutex_lock(&e->lock);
    wait_until(e, end_of_stream(e));
    pthread_mutex_unlock(&e->lock);
    return LT_OK;
}

static void *emu_alloc_host(lt_device *device, size_t bytes)
{
    emu *e = emu_of(device);
    void *p = NULL;
    int i = 0;
    pthread_mutex_lock(&e->lock);
    while (i < BLOCKS && e->block[i].start)
        i++;
    if (i < BLOCKS && !lacks("no-memory")) {
        e->block[i] = (lt_range){p = malloc(bytes), bytes};
        memset(p, 0xff, bytes);
    }
    pthread_mutex_unlock(&e->lock);
    return p;
}

static void emu_free_host(lt_device *device, void *p)
{
    emu *e = emu_of(device);
    pthread_mutex_lock(&e->lock);
    wait_for_all(e);
    for (int i = 0; i < BLOCKS; i++)
        if (e->block[i].start == p)
            e->block[i] = (lt_range){0};
    pthread_mutex_unlock(&e->lock);
    free(p);
}

/* Queues a copy that starts after the work before mark `after` of the stream. It runs when the host
 * or the stream waits for it. */
static lt_status queue_copy(emu *e, queue q, void *dst, const void *src, size_t bytes,
                            uint64_t after, uint64_t *mark)
{
    const char *here = q == UPLOADS ? src : dst;
    pthread_mutex_lock(&e->lock);
    if (!is_on_device(e, q == UPLOADS ? dst : src) || !is_block(e, here, bytes))
        abort();
    for (int i = 0; i < e->n_pending; i++) {
        const pending *l = &e->pending[i];
        const char *other = l->queue == UPLOADS ? l->src : l->dst;
        if (l->queue != STREAM && other < here + bytes && here < other + l->bytes)
            abort();
    }
    uint64_t at = is_old(e, after) ? e->queued : e->mark[after % LT_MAX_MARKS].at;
    add_pending(e, q, ++e->copies, dst, src, bytes);
    if (q == DOWNLOADS)
        memset(dst, 0xff, bytes);
    if (mark)
        *mark = add_mark(e, (point){at, q, e->copies});
    pthread_mutex_unlock(&e->lock);
    return LT_OK;
}

static lt_status emu_upload(lt_device *device, void *dst, const void *src, size_t bytes,
                            uint64_t after, uint64_t *mark)
{
    return queue_copy(emu_of(device), UPLOADS, dst, src, bytes, after, mark);
}

static lt_status emu_download(lt_device *device, void *dst, const void *src, size_t bytes,
                              uint64_t after, uint64_t *mark)
{
    return queue_copy(emu_of(device), DOWNLOADS, dst, src, bytes, after, mark);
}

static lt_status emu_stream_wait(lt_device *device, uint64_t mark)
{
    emu *e = emu_of(device);
    pthread_mutex_lock(&e->lock);
    uint64_t copies = is_old(e, mark) ? e->copies : e->mark[mark % LT_MAX_MARKS].copies;
    for (int i = 0; i < e->n_pending; i++)
        if (e->pending[i].queue == UPLOADS && e->pending[i].at <= copies)
            run_copy(e, &e->pending[i]);
    pthread_mutex_unlock(&e->lock);
    return LT_OK;
}

#endif
