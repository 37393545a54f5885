/* mail.c - messages between the threads of one process, and what all transports share; see mail.h.
 */
#define _GNU_SOURCE
#include <stdatomic.h>
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

void lt__mail_send(lt_mail *mail, int to, lt_message *message)
{
    message->run = mail->run;
    mail->send(mail, to, message);
}

void lt__mail_begin_run(lt_mail *mail) { mail->run++; }

/* Like lt__mail_take(), but takes messages of any run. */
static lt_message *take_any(lt_mail *mail, double seconds)
{
    lt_message *m = lt__inbox_take(mail->inbox, mail->waits ? 0 : seconds);
    if (m || !mail->waits || seconds <= 0)
        return m;
    mail->waits(mail, 1);
    m = lt__inbox_take(mail->inbox, seconds);
    mail->waits(mail, -1);
    return m;
}

lt_message *lt__mail_take(lt_mail *mail, double seconds)
{
    lt_message *m;
    while ((m = take_any(mail, seconds)) && m->kind != LT_MAIL_LOST && m->run != mail->run)
        lt__message_free(m);
    return m;
}

void lt__mail_close(lt_mail *mail, double seconds)
{
    if (mail)
        mail->close(mail, seconds);
}

/* ==== Inboxes ================================================================================= */

void lt__inbox_open(lt_inbox *inbox)
{
    pthread_mutex_init(&inbox->lock, NULL);
    pthread_cond_init(&inbox->arrived, NULL);
    inbox->first = NULL;
    inbox->end = &inbox->first;
    inbox->closed = false;
}

void lt__inbox_free(lt_inbox *inbox)
{
    for (lt_message *m; (m = inbox->first);) {
        inbox->first = m->next;
        lt__message_free(m);
    }
    pthread_cond_destroy(&inbox->arrived);
    pthread_mutex_destroy(&inbox->lock);
}

void lt__inbox_put(lt_inbox *inbox, lt_message *m)
{
    pthread_mutex_lock(&inbox->lock);
    bool closed = inbox->closed;
    if (!closed) {
        m->next = NULL;
        *inbox->end = m;
        inbox->end = &m->next;
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

lt_message *lt__inbox_take(lt_inbox *inbox, double seconds)
{
    struct timespec deadline = lt__after(seconds);
    int error = 0;
    pthread_mutex_lock(&inbox->lock);
    while (!inbox->first && !error && seconds > 0)
        error = pthread_cond_clockwait(&inbox->arrived, &inbox->lock, CLOCK_MONOTONIC, &deadline);
    lt_message *m = inbox->first;
    if (m && !(inbox->first = m->next))
        inbox->end = &inbox->first;
    pthread_mutex_unlock(&inbox->lock);
    return m;
}

void lt__inbox_close(lt_inbox *inbox)
{
    pthread_mutex_lock(&inbox->lock);
    inbox->closed = true;
    pthread_mutex_unlock(&inbox->lock);
}

/* ==== Threads of one process ================================================================== */

typedef struct mailboxes { /* the inboxes of all ranks */
    atomic_int refs;
    int n;
    lt_inbox inbox[];
} mailboxes;

typedef struct local { /* the mailbox of one rank */
    lt_mail mail;
    mailboxes *mailboxes;
    int rank;
    lt_message *lost; /* a message for each other rank, so that closing needs no memory */
} local;

static void local_send(lt_mail *mail, int to, lt_message *message)
{
    local *l = (local *)mail;
    message->from = l->rank;
    lt__inbox_put(&l->mailboxes->inbox[to], message);
}

static void release(mailboxes *b)
{
    if (atomic_fetch_sub(&b->refs, 1) != 1)
        return;
    for (int i = 0; i < b->n; i++)
        lt__inbox_free(&b->inbox[i]);
    free(b);
}

static void local_close(lt_mail *mail, double seconds)
{
    local *l = (local *)mail;
    (void)seconds; /* messages have left when they are sent */
    lt__inbox_close(mail->inbox);
    for (int i = 0; i < l->mailboxes->n; i++) {
        lt_message *lost = i != l->rank ? l->lost : NULL;
        if (!lost)
            continue;
        l->lost = lost->next;
        local_send(mail, i, lost);
    }
    release(l->mailboxes);
    free(l);
}

/* The mailbox of a rank; b is kept. New. NULL with LT_ENOMEM. */
static lt_mail *open_local(mailboxes *b, int rank)
{
    local *l = malloc(sizeof *l);
    if (!l) {
        lt_fail(LT_ENOMEM, "out of memory for the messages of %d ranks", b->n);
        return NULL;
    }
    *l = (local){
        {.send = local_send, .close = local_close, .inbox = &b->inbox[rank]}, b, rank, NULL};
    atomic_fetch_add(&b->refs, 1);
    for (int i = 1; i < b->n; i++) {
        lt_message *m = lt__message_new(LT_MAIL_LOST, 0);
        if (!m) {
            local_close(&l->mail, 0);
            return NULL;
        }
        m->next = l->lost;
        l->lost = m;
    }
    return &l->mail;
}

lt_status lt__mail_open_local(int n, lt_mail **mail)
{
    mailboxes *b = malloc(sizeof *b + (size_t)n * sizeof *b->inbox);
    int made = 0;
    lt_status status = LT_OK;
    if (!b)
        return lt_fail(LT_ENOMEM, "out of memory for the messages of %d ranks", n);
    atomic_init(&b->refs, 1);
    b->n = n;
    for (int i = 0; i < n; i++)
        lt__inbox_open(&b->inbox[i]);
    for (; status == LT_OK && made < n; made += status == LT_OK)
        status = (mail[made] = open_local(b, made)) ? LT_OK : LT_ENOMEM;
    while (status != LT_OK && made > 0)
        lt__mail_close(mail[--made], 0);
    release(b);
    return status;
}
