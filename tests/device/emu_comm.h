/* emu_comm.h - the communicator of emulators whose ranks are threads: a part of emu.c. For a sum,
 * each rank posts its part to a shared table. When all have posted, the first rank that polls adds
 * the parts in the order of a tree, as ranks on the CPU do. Every operation is still in progress at
 * the first poll.
 *
 * The environment variable EMU can be no-comm (no communicator), versions (each device has another
 * version of the communication library), one-refuses (rank 1 does not connect) or one-hangs (the
 * second sum of rank 1 never completes).
 */
#ifndef TESTS_DEVICE_EMU_COMM_H
#define TESTS_DEVICE_EMU_COMM_H

#include <math.h>

#include "tests/device/emu_stream.h"

enum { RANKS = 8 };

typedef struct table { /* of one job */
    char id[LT_COMM_ID_BYTES];
    int size, refs, joined;
    int posts, taken; /* number of parts posted and of sums taken, by all ranks */
    bool broken;      /* a rank left during a sum */
    /* The parts and tails that the ranks posted, for even and odd sums: a rank may post the next
     * part before the others have taken this sum. */
    void *part[2][RANKS];
    float tail[2][RANKS][LT_COMM_TAIL];
    struct table *next;
} table;

typedef struct comm {
    lt_device_comm base;
    emu *e;
    table *t;
    int rank, sums;       /* sums: number of sums so far */
    bool polled, summing; /* polled at least once; a sum is in progress */
    lt_device_sum sum;
    float tail[LT_COMM_TAIL];
} comm;

static pthread_mutex_t comm_lock = PTHREAD_MUTEX_INITIALIZER;
static table *tables;
static int ids;

static lt_status comm_identify(lt_device *device, char name[LT_COMM_NAME_BYTES],
                               char library[LT_COMM_NAME_BYTES])
{
    snprintf(name, LT_COMM_NAME_BYTES, "emulator %s", device->name);
    if (lacks("no-comm"))
        return emu_of(device)->host->fail(LT_EENV, "emulators cannot communicate");
    snprintf(library, LT_COMM_NAME_BYTES, "emulator 1.%s",
             lacks("versions") ? strchr(device->name, ':') + 1 : "0");
    return LT_OK;
}

static lt_status comm_make_id(lt_device *device, char id[LT_COMM_ID_BYTES])
{
    (void)device;
    pthread_mutex_lock(&comm_lock);
    memset(id, 0, LT_COMM_ID_BYTES);
    snprintf(id, LT_COMM_ID_BYTES, "job %d", ++ids);
    pthread_mutex_unlock(&comm_lock);
    return LT_OK;
}

static table *table_of(const char *id, int size)
{
    table *t = tables;
    while (t && memcmp(t->id, id, LT_COMM_ID_BYTES) != 0)
        t = t->next;
    if (!t && (t = calloc(1, sizeof *t))) {
        t->size = size;
        t->next = tables;
        memcpy(t->id, id, LT_COMM_ID_BYTES);
        tables = t;
    }
    return t;
}

static const lt_device_comm_calls comm_calls;

static lt_status comm_open(lt_device *device, const char id[LT_COMM_ID_BYTES], int rank, int size,
                           lt_device_comm **out)
{
    comm *p = calloc(1, sizeof *p);
    if (!p)
        abort();
    pthread_mutex_lock(&comm_lock);
    *p = (comm){
        .base = {.calls = &comm_calls}, .e = emu_of(device), .t = table_of(id, size), .rank = rank};
    p->base.tail = p->tail;
    p->t->refs++;
    p->t->joined += !(rank == 1 && lacks("one-refuses"));
    pthread_mutex_unlock(&comm_lock);
    *out = &p->base;
    return LT_OK;
}

/* x += y, in the dtype of the wire. */
static void add_part(lt_dtype dtype, void *x, const void *y, int64_t count)
{
    size_t each = lt_dtype_bytes(dtype);
    for (int64_t i = 0; i < count; i++) {
        char *at = (char *)x + (size_t)i * each;
        double a, b;
        lt_convert(&a, LT_F64, at, dtype, 1);
        lt_convert(&b, LT_F64, (const char *)y + (size_t)i * each, dtype, 1);
        a += b;
        lt_convert(at, dtype, &a, LT_F64, 1);
    }
}

static lt_dtype on_wire(const lt_device_sum *s) { return s->on_wire ? s->wire : s->dtype; }

/* Adds the parts of all ranks. Called once for each sum, with the lock held. */
static void add_parts(table *t, int turn, const lt_device_sum *s)
{
    for (int step = 1; step < t->size; step *= 2)
        for (int r = 0; r + step < t->size; r += 2 * step) {
            add_part(on_wire(s), t->part[turn][r], t->part[turn][r + step], s->count);
            for (int i = 0; i < LT_COMM_TAIL; i++)
                t->tail[turn][r][i] += t->tail[turn][r + step][i];
        }
}

static lt_status store_sum(emu *e, const lt_device_sum *s, const void *from)
{
    WITH_MEMORY(e, (memcpy(s->on_wire ? s->on_wire : s->data, from,
                           (size_t)s->count * lt_dtype_bytes(on_wire(s))),
                    LT_OK));
}

/* Takes the sum of p if it is complete. Called with the lock held. */
static bool take_sum(comm *p)
{
    table *t = p->t;
    int turn = p->sums % 2;
    if (t->broken || t->posts < p->sums * t->size ||
        (p->rank == 1 && p->sums == 2 && lacks("one-hangs")))
        return false;
    if (t->taken % t->size == 0)
        add_parts(t, turn, &p->sum);
    lt_status status = store_sum(p->e, &p->sum, t->part[turn][0]);
    memcpy(p->tail, t->tail[turn][0], sizeof p->tail);
    if (++t->taken % t->size == 0)
        for (int r = 0; r < t->size; r++) {
            free(t->part[turn][r]);
            t->part[turn][r] = NULL;
        }
    return status == LT_OK;
}

static lt_status comm_poll(lt_device_comm *given, bool *done)
{
    comm *p = (comm *)given;
    pthread_mutex_lock(&comm_lock);
    *done = p->polled && p->t->joined == p->t->size;
    p->polled = true;
    if (*done && p->summing) {
        *done = take_sum(p);
        p->summing = !*done;
    }
    pthread_mutex_unlock(&comm_lock);
    if (p->rank == 1 && lacks("one-refuses"))
        return p->e->host->fail(LT_EPEER, "%s refuses to connect", p->e->name);
    return LT_OK;
}

/* Zeroes the given ranges and measures the bucket. This runs at once, like all work in the stream;
 * the caller learns of it by polling. */
static lt_status measure_bucket(comm *p, char *data, int64_t count, lt_dtype dtype,
                                const lt_bucket_range *zeros, int n)
{
    size_t each = lt_dtype_bytes(dtype);
    for (int i = 0; i < n; i++)
        memset(data + (size_t)zeros[i].at * each, 0, (size_t)zeros[i].count * each);
    p->base.largest = 0;
    p->base.not_finite = 0;
    for (int64_t i = 0; i < count; i++) {
        double value;
        lt_convert(&value, LT_F64, data + (size_t)i * each, dtype, 1);
        if (!isfinite(value))
            p->base.not_finite++;
        else
            p->base.largest = fmax(p->base.largest, fabs(value));
    }
    return LT_OK;
}

static lt_status comm_prepare(lt_device_comm *given, void *data, int64_t count, lt_dtype dtype,
                              const lt_bucket_range *zeros, int n, bool finds, uint64_t after)
{
    comm *p = (comm *)given;
    (void)finds;
    p->polled = false;
    pthread_mutex_lock(&p->e->lock);
    (void)is_old(p->e, after); /* aborts if it is not a mark */
    pthread_mutex_unlock(&p->e->lock);
    WITH_MEMORY(p->e, measure_bucket(p, data, count, dtype, zeros, n));
}

static lt_status multiply(void *to, lt_dtype to_dtype, const void *from, lt_dtype dtype,
                          int64_t count, double by)
{
    for (int64_t i = 0; i < count; i++) {
        double value;
        float narrow;
        lt_convert(&value, LT_F64, (const char *)from + (size_t)i * lt_dtype_bytes(dtype), dtype,
                   1);
        narrow = (float)value * (float)by;
        value = dtype == LT_F64 ? value * by : (double)narrow;
        lt_convert((char *)to + (size_t)i * lt_dtype_bytes(to_dtype), to_dtype, &value, LT_F64, 1);
    }
    return LT_OK;
}

static lt_status scale_part(const comm *p, void *part)
{
    const lt_device_sum *s = &p->sum;
    if (!is_on_device(p->e, s->data) || (s->on_wire && !is_on_device(p->e, s->on_wire)))
        abort();
    return multiply(part, on_wire(s), s->data, s->dtype, s->count, s->scale);
}

static lt_status post(comm *p, void *part) { WITH_MEMORY(p->e, scale_part(p, part)); }

static lt_status comm_allreduce(lt_device_comm *given, const lt_device_sum *s)
{
    comm *p = (comm *)given;
    void *part = malloc((size_t)s->count * sizeof(double));
    if (!part)
        abort();
    p->sum = *s;
    p->polled = false;
    p->summing = true;
    lt_status status = post(p, part);
    pthread_mutex_lock(&comm_lock);
    int turn = ++p->sums % 2;
    memset(p->t->tail[turn][p->rank], 0, sizeof p->tail);
    memcpy(p->t->tail[turn][p->rank], p->tail, (size_t)s->n_tail * sizeof(float));
    p->t->part[turn][p->rank] = part;
    p->t->posts++;
    pthread_mutex_unlock(&comm_lock);
    return status;
}

static lt_status comm_unpack(lt_device_comm *given, const lt_device_sum *s, double factor)
{
    comm *p = (comm *)given;
    p->polled = false;
    WITH_MEMORY(p->e, multiply(s->data, s->dtype, s->on_wire, s->wire, s->count, factor));
}

static lt_status comm_finalize(lt_device_comm *given)
{
    ((comm *)given)->polled = false;
    return LT_OK;
}

static void comm_close(lt_device_comm *given)
{
    comm *p = (comm *)given;
    pthread_mutex_lock(&comm_lock);
    table **at = &tables, *t = p->t;
    t->broken |= p->summing;
    for (int turn = 0; turn < 2 && p->summing; turn++) {
        free(t->part[turn][p->rank]);
        t->part[turn][p->rank] = NULL;
    }
    if (--t->refs == 0) {
        while (*at != t)
            at = &(*at)->next;
        *at = t->next;
        free(t);
    }
    free(p);
    pthread_mutex_unlock(&comm_lock);
}

static const lt_device_comm_calls comm_calls = {
    comm_identify,  comm_make_id, comm_open,     comm_poll,  comm_prepare,
    comm_allreduce, comm_unpack,  comm_finalize, comm_close, NULL};

#endif
