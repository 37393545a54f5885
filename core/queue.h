/* queue.h - a bounded queue of pointers for any number of producer and consumer threads. Used by
 * other modules too; not installed.
 */
#ifndef LT_CORE_QUEUE_H
#define LT_CORE_QUEUE_H

#include "core/core.h"

typedef struct lt_queue lt_queue;

/* Creates a queue for at most `capacity` items; capacity must be at least 1. New. NULL with
 * LT_ENOMEM. */
lt_queue *lt__queue_new(int capacity);
/* Frees the queue, but not its items. No thread may still be using it. NULL is allowed. */
void lt__queue_free(lt_queue *queue);
/* Appends an item, which must not be NULL; blocks while the queue is full. If the queue is closed,
 * returns false and the caller still owns the item. */
bool lt__queue_put(lt_queue *queue, void *item);
/* Removes and returns the oldest item; blocks while the queue is empty. NULL if it is closed and
 * empty. */
void *lt__queue_take(lt_queue *queue);
/* Removes and returns the oldest item, or NULL if the queue is empty. Does not block. */
void *lt__queue_poll(lt_queue *queue);
/* Closes the queue and wakes all waiting threads. No more items can be added; remaining items can
 * still be taken. */
void lt__queue_close(lt_queue *queue);

#endif
