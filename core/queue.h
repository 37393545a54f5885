/* queue.h - where threads meet: a queue of pointers with a limit, for any number of threads on both
 * sides. A door of core for the rooms above. Not installed.
 */
#ifndef LT_CORE_QUEUE_H
#define LT_CORE_QUEUE_H

#include "core/core.h"

typedef struct lt_queue lt_queue;

/* room: how many items may wait, at least 1. New. NULL with LT_ENOMEM. */
lt_queue *lt__queue_new(int room);
/* No thread may be inside any more. NULL is fine. */
void lt__queue_free(lt_queue *queue);
/* Puts an item, which is not NULL, at the end; waits while the queue is full. False, and the item
 * stays the caller's, when it is closed. */
bool lt__queue_put(lt_queue *queue, void *item);
/* The oldest item; waits while there is none. NULL when the queue is closed and empty. */
void *lt__queue_take(lt_queue *queue);
/* The oldest item, or NULL: there is none by now. */
void *lt__queue_poll(lt_queue *queue);
/* Wakes all that wait; nothing can be put any more. What is in it can still be taken. */
void lt__queue_close(lt_queue *queue);

#endif
