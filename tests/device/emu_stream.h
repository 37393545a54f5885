/* emu_stream.h - memory and stream of the emulator, and the ways beside it: the first part of
 * emu.c, which says what it is.
 */
#ifndef TESTS_DEVICE_EMU_STREAM_H
#define TESTS_DEVICE_EMU_STREAM_H

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "ops/plugin.h"
#include "tests/device/emu_counts.h"

#define ROOM ((size_t)1 << 36)
enum { PAGE = 4096, MAX_PENDING = 4096, BLOCKS = 64 };

typedef enum lane { IN_STREAM, UP, DOWN } lane;

/* A copy that is still to come. */
typedef struct pending {
    lane way;
    uint64_t at;     /* its place in the stream, or on its way */
    char *dst, *src; /* src: of a copy in the stream its own memory */
    size_t bytes;
    bool is_done;
} pending;

typedef struct spot { /* behind so much in the stream, and on one of the other ways */
    uint64_t at;
    lane way;
    uint64_t on_way;
} spot;

typedef struct emu {
    lt_device base;
    lt_device *cpu; /* its functions do the work, on this memory */
    const lt_host *host;
    char *start;
    size_t used;
    char name[24];
    pthread_mutex_t lock;  /* guards what follows, and the memory while it is open */
    uint64_t queued, done; /* so much is in the stream; so far somebody has waited */
    uint64_t copies;       /* on the other ways */
    uint64_t marks;
    spot mark[LT_MARKS]; /* the last ones */
    pending pending[MAX_PENDING];
    int n_pending;
    lt_range block[BLOCKS]; /* memory on the host that it copies to */
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

/* status is what comes of it while the memory is open. */
#define WITH_MEMORY(e, status)                                                                     \
    pthread_mutex_lock(&(e)->lock);                                                                \
    (e)->queued++;                                                                                 \
    allow((e), PROT_READ | PROT_WRITE);                                                            \
    lt_status result = (status);                                                                   \
    allow((e), PROT_NONE);                                                                         \
    pthread_mutex_unlock(&(e)->lock);                                                              \
    return result

/* ==== Memory ================================================================================== */

/* Addresses are not used twice. Large blocks begin at a page. */
static void *emu_alloc(lt_device *device, size_t bytes)
{
    emu *e = emu_of(device);
    pthread_mutex_lock(&e->lock);
    size_t step = bytes < PAGE ? 64 : PAGE, start = (e->used + step - 1) & ~(step - 1);
    bool fits = bytes <= ROOM - start;
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

/* A GPU could not reach what lies elsewhere. */
static bool is_mine(const emu *e, const void *p)
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

/* ==== What comes late ========================================================================= */

static void add_pending(emu *e, lane way, uint64_t at, void *dst, const void *src, size_t bytes)
{
    if (e->n_pending == MAX_PENDING)
        abort();
    e->pending[e->n_pending++] = (pending){way, at, dst, (char *)src, bytes, false};
}

static void run_copy(emu *e, pending *l)
{
    if (l->is_done)
        return;
    l->is_done = true;
    allow(e, PROT_READ | PROT_WRITE);
    memcpy(l->dst, l->src, l->bytes);
    allow(e, PROT_NONE);
    if (l->way == IN_STREAM)
        free(l->src);
}

static bool is_within(const pending *l, const spot *m)
{
    return l->way == IN_STREAM ? l->at <= m->at : l->way == m->way && l->at <= m->on_way;
}

/* All up to a mark is done, and the host has waited for it. */
static void come_to(emu *e, spot m)
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

static spot end_of_stream(const emu *e) { return (spot){.at = e->queued}; }

/* All that there is, on the other ways too. */
static void come_to_end(emu *e)
{
    for (lane way = IN_STREAM; way <= DOWN; way++)
        come_to(e, (spot){e->queued, way, e->copies});
}

static uint64_t add_mark(emu *e, spot m)
{
    e->mark[++e->marks % LT_MARKS] = m;
    return e->marks;
}

static bool is_old(const emu *e, uint64_t mark)
{
    if (mark == 0 || mark > e->marks)
        abort();
    return mark + LT_MARKS <= e->marks;
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
        come_to_end(e);
    else
        come_to(e, e->mark[mark % LT_MARKS]);
    pthread_mutex_unlock(&e->lock);
    return LT_OK;
}

static lt_status emu_sync(lt_device *device)
{
    emu *e = emu_of(device);
    pthread_mutex_lock(&e->lock);
    come_to(e, end_of_stream(e));
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
    come_to_end(e);
    for (int i = 0; i < BLOCKS; i++)
        if (e->block[i].start == p)
            e->block[i] = (lt_range){0};
    pthread_mutex_unlock(&e->lock);
    free(p);
}

/* What lies behind `after` in the stream comes before the copy, which is done when somebody waits
 * for it, or follows. */
static lt_status copy_beside(emu *e, lane way, void *dst, const void *src, size_t bytes,
                             uint64_t after, uint64_t *behind)
{
    const char *here = way == UP ? src : dst;
    pthread_mutex_lock(&e->lock);
    if (!is_mine(e, way == UP ? dst : src) || !is_block(e, here, bytes))
        abort();
    for (int i = 0; i < e->n_pending; i++) {
        const pending *l = &e->pending[i];
        const char *its = l->way == UP ? l->src : l->dst;
        if (l->way != IN_STREAM && its < here + bytes && here < its + l->bytes)
            abort();
    }
    uint64_t at = is_old(e, after) ? e->queued : e->mark[after % LT_MARKS].at;
    add_pending(e, way, ++e->copies, dst, src, bytes);
    if (way == DOWN)
        memset(dst, 0xff, bytes);
    if (behind)
        *behind = add_mark(e, (spot){at, way, e->copies});
    pthread_mutex_unlock(&e->lock);
    return LT_OK;
}

static lt_status emu_upload(lt_device *device, void *dst, const void *src, size_t bytes,
                            uint64_t after, uint64_t *mark)
{
    return copy_beside(emu_of(device), UP, dst, src, bytes, after, mark);
}

static lt_status emu_download(lt_device *device, void *dst, const void *src, size_t bytes,
                              uint64_t after, uint64_t *mark)
{
    return copy_beside(emu_of(device), DOWN, dst, src, bytes, after, mark);
}

static lt_status emu_stream_wait(lt_device *device, uint64_t mark)
{
    emu *e = emu_of(device);
    pthread_mutex_lock(&e->lock);
    uint64_t on_way = is_old(e, mark) ? e->copies : e->mark[mark % LT_MARKS].on_way;
    for (int i = 0; i < e->n_pending; i++)
        if (e->pending[i].way == UP && e->pending[i].at <= on_way)
            run_copy(e, &e->pending[i]);
    pthread_mutex_unlock(&e->lock);
    return LT_OK;
}

#endif
