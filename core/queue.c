/* queue.c - a ring buffer of pointers with a mutex and two condition variables, not_full and
 * not_empty. */
#include <pthread.h>
#include <stdlib.h>

#include "core/alloc.h"
#include "core/queue.h"

struct lt_queue {
    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t not_full, not_empty;
    bool closed;
    int capacity, first, count;
    void *items[];
};

lt_queue *lt__queue_new(int capacity)
{
    lt_queue *q = lt__calloc(1, sizeof *q + (size_t)capacity * sizeof q->items[0], "for a queue");
    if (!q)
        return NULL;
    q->capacity = capacity;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->not_full, NULL);
    pthread_cond_init(&q->not_empty, NULL);
    return q;
}

void lt__queue_free(lt_queue *q)
{
    if (!q)
        return;
    pthread_cond_destroy(&q->not_empty);
    pthread_cond_destroy(&q->not_full);
    pthread_mutex_destroy(&q->lock);
    free(q);
}

bool lt__queue_put(lt_queue *q, void *item)
{
    pthread_mutex_lock(&q->lock);
    while (q->count == q->capacity && !q->closed)
        pthread_cond_wait(&q->not_full, &q->lock);
    bool open = !q->closed;
    if (open) {
        q->items[(q->first + q->count++) % q->capacity] = item;
        pthread_cond_signal(&q->not_empty);
    }
    pthread_mutex_unlock(&q->lock);
    return open;
}

static void *take(lt_queue *q, bool wait)
{
    pthread_mutex_lock(&q->lock);
    while (wait && q->count == 0 && !q->closed)
        pthread_cond_wait(&q->not_empty, &q->lock);
    void *item = NULL;
    if (q->count > 0) {
        item = q->items[q->first];
        q->first = (q->first + 1) % q->capacity;
        q->count--;
        pthread_cond_signal(&q->not_full);
    }
    pthread_mutex_unlock(&q->lock);
    return item;
}

void *lt__queue_take(lt_queue *q) { return take(q, true); }
void *lt__queue_poll(lt_queue *q) { return take(q, false); }

void lt__queue_close(lt_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->closed = true;
    pthread_cond_broadcast(&q->not_full);
    pthread_cond_broadcast(&q->not_empty);
    pthread_mutex_unlock(&q->lock);
}
