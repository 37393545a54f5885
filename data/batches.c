/* batches.c - one pass over a source: worker threads prepare batches ahead, in the order of the
 * epoch or of the caller's requests.
 *
 * The owner's thread does everything except the images. It determines the order, allocates the
 * tensors of the next few batches, cuts each batch into chunks and puts them into a queue. Workers
 * fill the chunks and put them into a second queue, from which the owner takes chunks until the
 * next batch is complete. Nothing else is shared, and an image depends only on its index. The bytes
 * therefore do not depend on which thread prepares them, or when. Without workers the owner fills
 * the chunks itself.
 *
 * Both queues have room for all chunks, so only taking can block. Tensors of batches in preparation
 * are outside any scope; the caller gets a view in its innermost scope.
 *
 * If the context has an accelerator, batches are prepared in pinned memory and uploaded while it
 * computes: when a batch is returned, the next two are uploaded if they are complete. Byte images
 * are uploaded as bytes and normalised on the accelerator.
 */
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/queue.h"
#include "data/sample.h"

enum {
    AHEAD = 4, /* batches in preparation */
    SENT = 2,  /* batches of AHEAD that are uploaded ahead to an accelerator */
    CHUNK = 16 /* images; small, so that an abandoned pass ends soon */
};

typedef struct chunk { /* part of a batch; a unit of work */
    int64_t first;     /* position in the order */
    int64_t count;
    char *x; /* output: images, NULL without memory; and labels */
    int64_t *y;
    struct slot *slot;
    double seconds; /* time spent */
    lt_status status;
    char message[1024];
} chunk;

typedef struct slot { /* a batch in preparation */
    lt_tensor *x, *y;
    lt_storage *stage[2];         /* pinned memory for x and y, reused by each batch of the slot */
    lt_tensor *there_x, *there_y; /* copies on the accelerator, once uploaded */
    /* mark after the upload of this batch, or of the slot's previous batch until it has finished */
    uint64_t mark;
    chunk *chunks;
    int n_chunks, n_open; /* all chunks, and those not completed yet */
} slot;

typedef struct worker {
    struct lt_batches *batches;
    pthread_t thread;
    lt_sample_buffers buffers;
} worker;

struct lt_batches {
    lt_ctx *ctx;
    lt_sample_spec spec;
    lt_tensor *table; /* the memory of spec.table */
    lt_tensor *there; /* (c, 256) lookup table on the accelerator, if bytes are uploaded; or NULL */
    lt_tensor *order; /* (n) i64, or NULL for source order */
    int64_t n, batch; /* images in the source; images per batch */
    int64_t planned;  /* position of the first image not in a slot yet */
    int shard;        /* number of shards of that image's batch that are in slots */
    int micro;        /* number of micro-batches of the next shard that are in slots */
    /* with on_request: positions of requested batches that are not in a slot yet, oldest first */
    int64_t requests[LT_MAX_REQUESTS];
    int n_requests;

    slot slots[AHEAD]; /* a ring buffer of n_slots */
    int n_slots, head, busy;
    chunk *chunks; /* chunks of all slots */
    lt_queue *to_do, *done;
    worker *workers;          /* without threads, one entry for the owner */
    int n_workers, n_started; /* threads */
    lt_batch_stats stats;
};

static int n_buffers(const lt_batches *b) { return b->n_workers > 0 ? b->n_workers : 1; }

/* ==== Workers ================================================================================= */

/* Fills a chunk; stops at the first image that fails. */
static void make_chunk(const lt_batches *b, chunk *p, lt_sample_buffers *buffers)
{
    const lt_source *source = b->spec.source;
    const int64_t *order = b->order ? b->order->data : NULL;
    size_t image_bytes = (size_t)(source->h * source->w * source->c) *
                         lt_dtype_bytes(b->spec.options.dtype);
    double start = lt__seconds();
    p->status = LT_OK;
    for (int64_t i = 0; i < p->count && p->status == LT_OK; i++) {
        int64_t sample = order ? order[p->first + i] : p->first + i;
        char *x = p->x ? p->x + (size_t)i * image_bytes : NULL;
        p->status = lt__sample_make(&b->spec, sample, buffers, x, &p->y[i]);
    }
    if (p->status != LT_OK)
        snprintf(p->message, sizeof p->message, "%s", lt_errmsg());
    p->seconds = lt__seconds() - start;
}

static void *work(void *ud)
{
    worker *w = ud;
    for (chunk *p; (p = lt__queue_take(w->batches->to_do));) {
        make_chunk(w->batches, p, &w->buffers);
        lt__queue_put(w->batches->done, p);
    }
    return NULL;
}

/* Starts the workers, with all signals blocked: those belong to the program's own threads. If the
 * system limits the number of threads, the pass uses the workers that could be started, or none. */
static void start_workers(lt_batches *b)
{
    sigset_t all, old;
    int error = 0;
    if (b->n_started == b->n_workers)
        return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (; b->n_started < b->n_workers && !error; b->n_started += !error)
        error =
            pthread_create(&b->workers[b->n_started].thread, NULL, work, &b->workers[b->n_started]);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (!error)
        return;
    lt_log(b->ctx, LT_LOG_WARN, "batches: cannot start worker %d of %d (%s); continues with %d",
           b->n_started + 1, b->n_workers, strerror(error), b->n_started);
    b->n_workers = b->stats.workers = b->n_started;
    if (b->n_workers == 0)
        b->n_slots = 1;
}

static void stop_workers(lt_batches *b)
{
    lt__queue_close(b->to_do);
    while (lt__queue_take(b->to_do))
        ;
    for (int i = 0; i < b->n_started; i++)
        pthread_join(b->workers[i].thread, NULL);
}

/* ==== Batches ================================================================================= */

/* Creates a tensor on the CPU, where batches are prepared. New. */
static lt_tensor *new_here(const lt_batches *b, lt_dtype dtype, int ndim, const int64_t *dims)
{
    return lt__tensor_new(b->ctx, b->ctx->devices[0], dtype, ndim, dims, true);
}

static void give_back(slot *s)
{
    lt_release(s->x);
    lt_release(s->y);
    lt_release(s->there_x);
    lt_release(s->there_y);
    s->x = s->y = s->there_x = s->there_y = NULL;
}

/* ==== Uploads ================================================================================= */

static void give_stage(void *device, void *data) { ((lt_device *)device)->free_host(device, data); }

/* Allocates pinned memory for uploads. New. NULL if out of memory. */
static lt_storage *new_stage(const lt_batches *b, size_t bytes)
{
    lt_device *device = b->ctx->device;
    void *data = device->alloc_host(device, bytes > 0 ? bytes : 1);
    if (!data)
        return NULL;
    lt_storage *stage = lt__storage_over(b->ctx, data, bytes, give_stage, device);
    if (!stage)
        device->free_host(device, data);
    return stage;
}

/* Creates a tensor on the CPU. For an accelerator its memory is *stage: pinned, large enough for
 * the largest batch, and allocated on first use. If that fails, the memory is not pinned. New. */
static lt_tensor *new_staged(const lt_batches *b, lt_storage **stage, lt_dtype dtype, int ndim,
                             const int64_t *dims)
{
    int64_t row = 1;
    for (int i = 1; i < ndim; i++)
        row *= dims[i];
    if (b->ctx->device->is_host)
        return new_here(b, dtype, ndim, dims);
    if (!*stage)
        *stage = new_stage(b, (size_t)(b->batch * row) * lt_dtype_bytes(dtype));
    return *stage ? lt__tensor_over(*stage, dtype, ndim, dims, 0, true)
                  : new_here(b, dtype, ndim, dims);
}

/* Waits until the slot's previous batch is uploaded, so that its memory can be reused. */
static lt_status await_sent(const lt_batches *b, slot *s)
{
    lt_device *device = b->ctx->device;
    uint64_t mark = s->mark;
    s->mark = 0;
    return mark > 0 ? device->wait(device, mark) : LT_OK;
}

static lt_status upload(lt_tensor *x, lt_device *device, lt_tensor **there, uint64_t *mark)
{
    *there = lt__tensor_like(x, device, (lt_dtype)x->dtype);
    if (!*there)
        return lt_errcode();
    lt_status status = device->upload(device, (*there)->data, x->data, lt__tensor_bytes(x),
                                      device->mark(device), mark); /* dst may have been in use */
    *there = lt__tensor_if(status, *there);
    return status;
}

/* Starts to upload what is in pinned memory and not uploaded yet, of a complete batch. */
static lt_status send(const lt_batches *b, slot *s)
{
    lt_device *device = b->ctx->device;
    if (s->stage[0] && !s->there_x)
        LT_TRY(upload(s->x, device, &s->there_x, &s->mark));
    if (s->stage[1] && !s->there_y)
        LT_TRY(upload(s->y, device, &s->there_y, &s->mark));
    return LT_OK;
}

/* Makes work submitted from now on wait for the upload of s. */
static lt_status arrive(const lt_batches *b, slot *s)
{
    lt_device *device = b->ctx->device;
    return s->there_x || s->there_y ? device->stream_wait(device, s->mark) : LT_OK;
}

/* ==== Preparation ============================================================================= */

/* Cuts a batch into chunks; first is the position of its first image in the order. */
static void cut(const lt_batches *b, slot *s, int64_t first, int64_t count)
{
    size_t image_bytes = (size_t)(lt_count(s->x) / count) * lt_dtype_bytes(b->spec.options.dtype);
    char *x = s->x->data; /* NULL without memory */
    s->n_chunks = 0;
    for (int64_t done = 0; done < count; done += CHUNK)
        s->chunks[s->n_chunks++] = (chunk){.first = first + done,
                                           .count = count - done < CHUNK ? count - done : CHUNK,
                                           .x = x ? x + (size_t)done * image_bytes : NULL,
                                           .y = (int64_t *)s->y->data + done,
                                           .slot = s};
    s->n_open = s->n_chunks;
}

/* The position of the first image of the next batch to prepare. n if there is none. */
static int64_t next_position(const lt_batches *b)
{
    if (!b->spec.options.on_request)
        return b->planned;
    return b->n_requests > 0 ? b->requests[0] : b->n;
}

/* Finds the rows of the next batch to prepare, of a batch of `all` rows. Returns the number of
 * micro-batches of its shard. */
static int find_rows(const lt_batches *b, int64_t all, int64_t *first, int64_t *count)
{
    const lt_batch_options *o = &b->spec.options;
    int64_t before;
    lt_shard_parts(all, o->grain, o->rank + b->shard * o->parts, o->parts, o->ranks, &before,
                   count);
    int n = lt_micro_batches(all, o->grain, o->ranks, o->micro);
    lt_shard(*count, o->grain, b->micro, n, first, count);
    *first = *count > 0 ? before + *first : 0; /* an empty shard returns the first row */
    *count = *count > 0 ? *count : 1;
    return n;
}

/* Advances next_position() by a batch of `rows` images, or by a part of it: one of the n
 * micro-batches of a shard. */
static void advance(lt_batches *b, int64_t rows, int n)
{
    if (b->spec.options.on_request) {
        b->n_requests--;
        memmove(b->requests, b->requests + 1, (size_t)b->n_requests * sizeof *b->requests);
        return;
    }
    b->micro = (b->micro + 1) % n;
    b->shard = (b->shard + (b->micro == 0)) % b->spec.options.shards;
    b->planned += b->shard == 0 && b->micro == 0 ? rows : 0;
}

/* Creates the tensor for the images of a batch: on the CPU, or without memory. New. */
static lt_tensor *new_images(const lt_batches *b, slot *s, int64_t count)
{
    const lt_source *source = b->spec.source;
    int64_t dims[] = {count, source->h, source->w, source->c};
    lt_dtype dtype = b->spec.options.dtype;
    return b->spec.options.labels_only ? lt__tensor_meta(b->ctx, dtype, 4, dims, true)
                                       : new_staged(b, &s->stage[0], dtype, 4, dims);
}

/* Starts the preparation of the next batch. */
static lt_status plan(lt_batches *b)
{
    slot *s = &b->slots[(b->head + b->busy) % b->n_slots];
    int64_t start = next_position(b), left = b->n - start;
    int64_t all = left < b->batch ? left : b->batch, first, count;
    int n = find_rows(b, all, &first, &count);
    start_workers(b);
    LT_TRY(await_sent(b, s));
    s->x = new_images(b, s, count);
    s->y = new_staged(b, &s->stage[1], LT_I64, 1, &count);
    if (!s->x || !s->y) {
        give_back(s);
        return lt_errcode();
    }
    cut(b, s, start + first, count);
    for (int i = 0; i < s->n_chunks && b->n_workers > 0; i++)
        lt__queue_put(b->to_do, &s->chunks[i]);
    advance(b, all, n);
    b->busy++;
    return LT_OK;
}

/* Starts the preparation of batches, as long as there are free slots. */
static lt_status plan_ahead(lt_batches *b)
{
    while (b->busy < b->n_slots && next_position(b) < b->n)
        LT_TRY(plan(b));
    return LT_OK;
}

static void take_chunk(lt_batches *b, const chunk *p)
{
    p->slot->n_open--;
    b->stats.work_s += p->seconds;
    b->stats.images += p->count;
}

static void complete(lt_batches *b, slot *s)
{
    double start = lt__seconds();
    while (s->n_open > 0) {
        chunk *p;
        if (b->n_workers > 0)
            p = lt__queue_take(b->done); /* a chunk of this batch or of a later one */
        else
            make_chunk(b, p = &s->chunks[s->n_chunks - s->n_open], &b->workers->buffers);
        take_chunk(b, p);
    }
    b->stats.wait_s += lt__seconds() - start;
}

/* Returns the failure of the first image that failed, in the order of the batch. */
static lt_status outcome(const slot *s)
{
    for (int i = 0; i < s->n_chunks; i++)
        if (s->chunks[i].status != LT_OK)
            return lt_fail(s->chunks[i].status, "%s", s->chunks[i].message);
    return LT_OK;
}

/* Uploads the next batches that are complete and without failure. If an upload cannot be started
 * now, give_out() retries it and reports the error. */
static void send_ahead(lt_batches *b)
{
    lt_status status = LT_OK;
    chunk *p;
    if (b->ctx->device->is_host || b->n_workers == 0)
        return;
    while ((p = lt__queue_poll(b->done)))
        take_chunk(b, p);
    for (int i = 0; i < SENT && i < b->busy; i++) {
        slot *s = &b->slots[(b->head + i) % b->n_slots];
        if (status == LT_OK && s->n_open == 0 && outcome(s) == LT_OK)
            status = send(b, s);
    }
}

/* Normalises bytes on the accelerator. bytes: taken. New. */
static lt_tensor *normalised(const lt_batches *b, lt_tensor *bytes)
{
    lt_device *device = b->ctx->device;
    size_t each = lt_dtype_bytes((lt_dtype)b->there->dtype);
    lt_tensor *x = bytes ? lt__tensor_new(b->ctx, device, (lt_dtype)b->there->dtype, bytes->ndim,
                                          bytes->dims, false)
                         : NULL;
    if (x)
        x = lt__tensor_if(device->look_up(device, x->data, bytes->data, b->there->data, each,
                                          x->count, x->dims[3]),
                          x);
    lt_release(bytes);
    return x;
}

/* Creates the tensors for the caller, on the context's device. Both new. */
static lt_status give_out(const lt_batches *b, slot *s, lt_tensor **x, lt_tensor **y)
{
    LT_TRY(send(b, s));
    LT_TRY(arrive(b, s));
    *x = lt_to(s->there_x ? s->there_x : s->x, lt_device_name(b->ctx));
    if (b->there)
        *x = normalised(b, *x);
    *y = lt_to(s->there_y ? s->there_y : s->y, lt_device_name(b->ctx));
    if (*x && *y)
        return LT_OK;
    lt_release(*x);
    lt_release(*y);
    *x = *y = NULL;
    return lt_errcode();
}

lt_status lt_batches_next(lt_batches *b, lt_tensor **x, lt_tensor **y)
{
    *x = *y = NULL;
    LT_TRY(plan_ahead(b));
    if (b->busy == 0)
        return LT_OK;
    slot *s = &b->slots[b->head];
    complete(b, s);
    LT_TRY(outcome(s)); /* the batch stays at the head, so every later call fails too */
    LT_TRY(give_out(b, s, x, y));
    give_back(s);
    b->head = (b->head + 1) % b->n_slots;
    b->busy--;
    send_ahead(b);
    return LT_OK;
}

lt_status lt_batches_request(lt_batches *b, int64_t first)
{
    if (!b->spec.options.on_request)
        return lt_fail(LT_EINVAL, "batches: only a pass with on_request accepts requests");
    if (first < 0 || first >= b->n)
        return lt_fail(LT_EINVAL,
                       "batches: position %lld was requested, but the source has %lld images, "
                       "counted from 0",
                       (long long)first, (long long)b->n);
    if (b->busy + b->n_requests == LT_MAX_REQUESTS)
        return lt_fail(LT_EINVAL,
                       "batches: %d requests are outstanding, the maximum; take a batch before the "
                       "next request",
                       LT_MAX_REQUESTS);
    b->requests[b->n_requests++] = first;
    lt_status status = plan_ahead(b);
    if (status != LT_OK)
        b->n_requests--; /* this request is still the last: plan() takes the oldest */
    else
        send_ahead(b);
    return status;
}

/* The number of batches that the pass returns for one batch of `rows` rows. */
static int64_t parts_of(const lt_batches *b, int64_t rows)
{
    const lt_batch_options *o = &b->spec.options;
    return rows > 0 ? (int64_t)o->shards * lt_micro_batches(rows, o->grain, o->ranks, o->micro) : 0;
}

int64_t lt_batches_count(const lt_batches *b)
{
    int64_t left = b->n - b->spec.options.first, count;
    if (__builtin_mul_overflow(left / b->batch, parts_of(b, b->batch), &count) ||
        __builtin_add_overflow(count, parts_of(b, left % b->batch), &count))
        return INT64_MAX;
    return count;
}

lt_batch_stats lt_batches_stats(const lt_batches *b) { return b->stats; }

/* ==== Opening and closing ===================================================================== */

/* Sizes the pass by its options. */
static void set_sizes(lt_batches *b)
{
    const lt_batch_options *o = &b->spec.options;
    b->n = b->spec.source->count;
    b->batch = o->batch < b->n ? o->batch : b->n > 0 ? b->n : 1;
    b->planned = o->first;
    b->n_workers = b->stats.workers = o->workers;
    b->n_slots = b->n_workers > 0 ? AHEAD : 1;
    if (!o->on_request && b->n_slots > lt_batches_count(b))
        b->n_slots = (int)lt_batches_count(b);
}

/* Makes the table that maps bytes to values, here and on an accelerator. */
static lt_status make_table(lt_batches *b)
{
    lt_dtype *dtype = &b->spec.options.dtype;
    lt_device *device = b->ctx->device;
    int64_t dims[] = {b->spec.source->c, 256};
    if (b->spec.options.labels_only)
        return LT_OK;
    b->table = new_here(b, *dtype, 2, dims);
    if (!b->table)
        return lt_errcode();
    lt__sample_table(&b->spec, b->table->data);
    b->spec.table = b->table->data;
    if (device->is_host || b->spec.source->dtype != LT_U8 || *dtype == LT_U8)
        return LT_OK;
    if (!(b->there = lt__tensor_new(b->ctx, device, *dtype, 2, dims, true)))
        return lt_errcode();
    LT_TRY(lt_write(b->there, b->table->data));
    *dtype = LT_U8; /* spec.table then maps each byte to itself */
    lt__sample_table(&b->spec, b->table->data);
    return LT_OK;
}

static lt_status make_order(lt_batches *b)
{
    if (!b->spec.options.shuffle)
        return LT_OK;
    if (!(b->order = new_here(b, LT_I64, 1, &b->n)))
        return lt_errcode();
    lt_shuffle(b->spec.seed, b->spec.options.epoch, b->order->data, b->n);
    return LT_OK;
}

static lt_status make_buffers(lt_batches *b)
{
    enum { MOST = (INT_MAX - 1) / AHEAD }; /* queues count in int */
    int64_t wanted = b->batch / CHUNK + (b->batch % CHUNK != 0);
    size_t each = (size_t)wanted, all = each * (size_t)b->n_slots + 1;
    if (wanted > MOST)
        return lt_fail(LT_EINVAL, "batches: batch must be at most %lld, but is %lld",
                       (long long)MOST * CHUNK, (long long)b->batch);
    LT_TRY(LT_CALLOC(b->chunks, all, "for batches"));
    LT_TRY(LT_CALLOC(b->workers, n_buffers(b), "for batches"));
    for (int i = 0; i < b->n_slots; i++)
        b->slots[i].chunks = b->chunks + (size_t)i * each;
    for (int i = 0; i < n_buffers(b); i++)
        b->workers[i].batches = b;
    b->to_do = lt__queue_new((int)all);
    b->done = b->to_do ? lt__queue_new((int)all) : NULL;
    return b->done ? LT_OK : LT_ENOMEM;
}

lt_batches *lt_batches_new(lt_ctx *ctx, lt_source *source, const lt_batch_options *options)
{
    LT_NEED_CTX(ctx, NULL);
    lt_batch_options checked;
    if (lt__batch_options_read(source, options, &checked) != LT_OK)
        return NULL;
    lt_batches *b = lt__calloc(1, sizeof *b, "for batches");
    if (!b)
        return NULL;
    b->ctx = lt__ctx_retain(ctx);
    b->spec.source = lt_source_retain(source);
    b->spec.seed = lt_seed(ctx);
    b->spec.options = checked;
    set_sizes(b);
    if (make_table(b) != LT_OK || make_order(b) != LT_OK || make_buffers(b) != LT_OK) {
        lt_batches_free(b);
        return NULL;
    }
    return b;
}

/* Frees a slot. Memory with an upload in progress is not reused before the upload has finished. */
static void close_slot(const lt_batches *b, slot *s)
{
    lt_status status = arrive(b, s);
    (void)status; /* fails only if the device has failed */
    give_back(s);
    lt__storage_release(s->stage[0]);
    lt__storage_release(s->stage[1]);
}

void lt_batches_free(lt_batches *b)
{
    if (!b)
        return;
    if (b->n_started > 0)
        stop_workers(b);
    for (int i = 0; i < b->n_slots; i++)
        close_slot(b, &b->slots[i]);
    for (int i = 0; b->workers && i < n_buffers(b); i++)
        lt__sample_buffers_free(&b->workers[i].buffers);
    lt__queue_free(b->to_do);
    lt__queue_free(b->done);
    free(b->workers);
    free(b->chunks);
    lt_release(b->table);
    lt_release(b->there);
    lt_release(b->order);
    lt_source_release(b->spec.source);
    lt__ctx_release(b->ctx);
    free(b);
}
