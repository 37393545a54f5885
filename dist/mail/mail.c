/* mail.c - messages between the threads of one process, and what all transports share; see mail.h.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "core/tensor.h"
#include "dist/mail/inbox.h"

void lt__mail_send(lt_mail *mail, int to, lt_message *message)
{
    message->run = mail->run;
    mail->send(mail, to, message);
}

void lt__mail_begin_run(lt_mail *mail) { mail->run++; }

void lt__mail_add_latency(lt_mail *mail, int rank, double seconds)
{
    if (mail->latency == 0)
        mail->slow = rank;
    mail->latency = seconds;
}

double lt__mail_due(const lt_mail *mail, int self, int other)
{
    bool is_slow = mail->latency > 0 && self != other &&
                   (self == mail->slow || other == mail->slow);
    return is_slow ? lt__seconds() + mail->latency : 0;
}

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

/* Whether the mailbox itself has made a message, which then belongs to no run. */
static bool is_report(const lt_message *m)
{
    return m->kind == LT_MAIL_LOST || m->kind == LT_MAIL_JOINED;
}

lt_message *lt__mail_take(lt_mail *mail, double seconds)
{
    lt_message *m;
    while ((m = take_any(mail, seconds)) && !is_report(m) && m->run != mail->run)
        lt__message_free(m);
    if (m && m->kind == LT_MAIL_LOST && mail->taken)
        mail->taken(mail, m->from);
    return m;
}

void lt__mail_close(lt_mail *mail, double seconds)
{
    if (mail)
        mail->close(mail, seconds);
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
    lt_messages lost; /* a message for each other rank, so that closing needs no memory */
} local;

static void local_send(lt_mail *mail, int to, lt_message *message)
{
    local *l = (local *)mail;
    message->from = l->rank;
    message->due = lt__mail_due(mail, l->rank, to);
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
    for (int i = 0; i < l->mailboxes->n && l->lost.first; i++)
        if (i != l->rank)
            local_send(mail, i, lt__messages_take(&l->lost));
    release(l->mailboxes);
    free(l);
}

/* The mailbox of a rank; b is kept. New. NULL with LT_ENOMEM. */
static lt_mail *open_local(mailboxes *b, int rank)
{
    local *l = lt__calloc(1, sizeof *l, "for the messages of %d ranks", b->n);
    if (!l)
        return NULL;
    *l = (local){.mail = {.send = local_send, .close = local_close, .inbox = &b->inbox[rank]},
                 .mailboxes = b,
                 .rank = rank};
    atomic_fetch_add(&b->refs, 1);
    for (int i = 1; i < b->n; i++) {
        lt_message *m = lt__message_new(LT_MAIL_LOST, 0);
        if (!m) {
            local_close(&l->mail, 0);
            return NULL;
        }
        lt__messages_put(&l->lost, m);
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
