/* inbox.c - messages, lists of them, and inboxes; see mail.h and inbox.h. */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/mail/inbox.h"

lt_message *lt__message_new(lt_message_kind kind, size_t bytes)
{
    lt_message *m = aligned_alloc(64, (sizeof *m + bytes + 63) & ~(size_t)63);
    if (!m) {
        lt_fail(LT_ENOMEM, "out of memory for a message of %zu bytes", bytes);
        return NULL;
    }
    memset(m, 0, sizeof *m); /* the whole union, too */
    m->kind = kind;
    m->bytes = bytes;
    return m;
}

void lt__message_free(lt_message *m) { free(m); }

/* ==== Lists =================================================================================== */

void lt__messages_put(lt_messages *list, lt_message *m)
{
    m->next = NULL;
    *(list->first ? &list->last->next : &list->first) = m;
    list->last = m;
}

lt_message *lt__messages_take(lt_messages *list)
{
    lt_message *m = list->first;
    if (m)
        list->first = m->next;
    return m;
}

void lt__messages_free(lt_messages *list)
{
    while (list->first)
        lt__message_free(lt__messages_take(list));
}

/* ==== Inboxes ================================================================================= */

void lt__inbox_open(lt_inbox *inbox)
{
    pthread_mutex_init(&inbox->lock, NULL);
    pthread_cond_init(&inbox->arrived, NULL);
    inbox->messages = (lt_messages){0};
    inbox->closed = false;
}

void lt__inbox_free(lt_inbox *inbox)
{
    lt__messages_free(&inbox->messages);
    pthread_cond_destroy(&inbox->arrived);
    pthread_mutex_destroy(&inbox->lock);
}

void lt__inbox_put(lt_inbox *inbox, lt_message *m)
{
    pthread_mutex_lock(&inbox->lock);
    bool closed = inbox->closed;
    if (!closed) {
        lt__messages_put(&inbox->messages, m);
        pthread_cond_signal(&inbox->arrived);
    }
    pthread_mutex_unlock(&inbox->lock);
    if (closed)
        lt__message_free(m);
}

struct timespec lt__after(double seconds)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    double all = (double)at.tv_nsec * 1e-9 + seconds;
    at.tv_sec += (time_t)all;
    at.tv_nsec = (long)((all - (double)(time_t)all) * 1e9);
    return at;
}

/* Removes and returns the first message that is due. If no message is due, returns NULL and sets
 * *wait to the seconds until the next one. */
static lt_message *take_due(lt_messages *list, double *wait)
{
    double now = 0;
    *wait = INFINITY;
    for (lt_message *m = list->first, *before = NULL; m; before = m, m = m->next) {
        now = now == 0 && m->due > 0 ? lt__seconds() : now;
        if (m->due > now) {
            *wait = fmin(*wait, m->due - now);
            continue;
        }
        *(before ? &before->next : &list->first) = m->next;
        if (list->last == m)
            list->last = before;
        return m;
    }
    return NULL;
}

lt_message *lt__inbox_take(lt_inbox *inbox, double seconds)
{
    lt_message *m;
    double end = lt__seconds() + seconds, wait, left = seconds;
    pthread_mutex_lock(&inbox->lock);
    while (!(m = take_due(&inbox->messages, &wait)) && left > 0) {
        struct timespec until = lt__after(fmin(left, wait));
        pthread_cond_clockwait(&inbox->arrived, &inbox->lock, CLOCK_MONOTONIC, &until);
        left = end - lt__seconds();
    }
    pthread_mutex_unlock(&inbox->lock);
    return m;
}

void lt__inbox_close(lt_inbox *inbox)
{
    pthread_mutex_lock(&inbox->lock);
    inbox->closed = true;
    pthread_mutex_unlock(&inbox->lock);
}
