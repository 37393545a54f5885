/* transfer.c - tensors of an accelerator in messages; see transfer.h. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/queue.h"
#include "dist/pipeline/transfer.h"
#include "dist/staging.h"

enum { SENDS = 8, RECEIVES = 4 }; /* buffers */

typedef struct buffer {
    void *at; /* (capacity) bytes of pinned memory */
    size_t capacity;
    uint64_t mark; /* mark of the last copy; 0 if it is done */
    /* only if the copy is for a message: */
    lt_message *message;
    int to;
} buffer;

struct lt_transfer {
    lt_device *device;
    lt_mail *mail;
    buffer send[SENDS], receive[RECEIVES];
    int turn;                 /* the last buffer of receive that was used */
    lt_queue *free, *to_send; /* buffers of send */
    bool started;
    pthread_t thread;
    pthread_mutex_t lock; /* guards the fields below */
    lt_status status;     /* the first error of the thread */
    char text[512];
};

/* Waits for the last copy of a buffer. */
static lt_status finish(lt_transfer *t, buffer *b)
{
    uint64_t mark = b->mark;
    b->mark = 0;
    return mark > 0 ? t->device->wait(t->device, mark) : LT_OK;
}

/* ==== Sending ================================================================================= */

static void store_error(lt_transfer *t, lt_status status)
{
    pthread_mutex_lock(&t->lock);
    if (t->status == LT_OK) {
        t->status = status;
        snprintf(t->text, sizeof t->text, "%s", lt_errmsg());
    }
    pthread_mutex_unlock(&t->lock);
}

static void send_one(lt_transfer *t, buffer *b)
{
    bool is_copied = b->mark > 0;
    lt_status status = finish(t, b);
    if (status != LT_OK) {
        store_error(t, status);
        lt__message_free(b->message);
        return;
    }
    if (is_copied)
        memcpy(b->message->data, b->at, b->message->bytes);
    lt__mail_send(t->mail, b->to, b->message);
}

static void *send_all(void *ud)
{
    lt_transfer *t = ud;
    for (buffer *b; (b = lt__queue_take(t->to_send));) {
        send_one(t, b);
        lt__queue_put(t->free, b);
    }
    return NULL;
}

/* Starts to copy x to a buffer, or copies it at once if it is on the CPU. */
static lt_status copy_out(lt_transfer *t, buffer *b, lt_message *m, lt_tensor *x)
{
    if (x->storage->device->is_host)
        return lt_read(x, m->data);
    LT_TRY(lt__staging_grow(t->device, &b->at, &b->capacity, m->bytes));
    LT_TRY(t->device->copy(t->device, b->at, x->data, m->bytes));
    b->mark = t->device->mark(t->device);
    return LT_OK;
}

lt_status lt__transfer_send(lt_transfer *t, int to, lt_message *m, lt_tensor *x)
{
    buffer *b = lt__queue_take(t->free);
    lt_status status = x ? lt__check_alive(x) : LT_OK;
    if (status == LT_OK && m->bytes > 0)
        status = copy_out(t, b, m, x);
    if (status != LT_OK) {
        lt__message_free(m);
        lt__queue_put(t->free, b);
        return status;
    }
    b->message = m;
    b->to = to;
    lt__queue_put(t->to_send, b);
    return LT_OK;
}

lt_status lt__transfer_check(lt_transfer *t)
{
    pthread_mutex_lock(&t->lock);
    lt_status status = t->status == LT_OK ? LT_OK : lt_fail(t->status, "%s", t->text);
    pthread_mutex_unlock(&t->lock);
    return status;
}

/* ==== Receiving =============================================================================== */

lt_status lt__transfer_receive(lt_transfer *t, lt_tensor *x, const lt_message *m)
{
    buffer *b = &t->receive[t->turn = (t->turn + 1) % RECEIVES];
    lt__bump_version(x);
    if (m->bytes == 0)
        return LT_OK;
    LT_TRY(finish(t, b));
    LT_TRY(lt__staging_grow(t->device, &b->at, &b->capacity, m->bytes));
    memcpy(b->at, m->data, m->bytes);
    LT_TRY(t->device->copy(t->device, x->data, b->at, m->bytes));
    b->mark = t->device->mark(t->device);
    return LT_OK;
}

/* ==== Opening and closing ===================================================================== */

static void free_buffers(lt_transfer *t, buffer *buffers, int n)
{
    for (int i = 0; i < n; i++)
        if (buffers[i].at)
            t->device->free_host(t->device, buffers[i].at);
}

void lt__transfer_close(lt_transfer *t)
{
    if (!t)
        return;
    if (t->started) {
        lt__queue_close(t->to_send);
        pthread_join(t->thread, NULL);
    }
    free_buffers(t, t->send, SENDS);
    free_buffers(t, t->receive, RECEIVES);
    lt__queue_free(t->free);
    lt__queue_free(t->to_send);
    pthread_mutex_destroy(&t->lock);
    free(t);
}

static lt_status start(lt_transfer *t)
{
    t->free = lt__queue_new(SENDS);
    t->to_send = t->free ? lt__queue_new(SENDS) : NULL;
    if (!t->to_send)
        return LT_ENOMEM;
    for (int i = 0; i < SENDS; i++)
        lt__queue_put(t->free, &t->send[i]);
    t->started = pthread_create(&t->thread, NULL, send_all, t) == 0;
    return t->started ? LT_OK : lt_fail(LT_ENOMEM, "the system cannot start a thread for messages");
}

lt_transfer *lt__transfer_open(lt_device *device, lt_mail *mail)
{
    lt_transfer *t = lt__calloc(1, sizeof *t, "for the messages of %s", device->name);
    if (!t)
        return NULL;
    t->device = device;
    t->mail = mail;
    pthread_mutex_init(&t->lock, NULL);
    if (start(t) == LT_OK)
        return t;
    lt__transfer_close(t);
    return NULL;
}
