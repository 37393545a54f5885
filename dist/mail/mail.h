/* mail.h - messages between ranks, sent without blocking. Private to dist.
 *
 * A rank sends without blocking, and takes arrived messages when it wants. Messages from one rank
 * to another arrive in the order of sending. Unlike collectives, they are independent of the
 * group's communication thread, and the failure of one rank does not affect the others: they
 * receive a message of the kind LT_MAIL_LOST.
 *
 * Between threads of one process, a message is handed over. Between processes, a thread of the
 * mailbox carries messages through the network. Any thread of the rank may send and take.
 */
#ifndef LT_DIST_MAIL_H
#define LT_DIST_MAIL_H

#include "dist/mail/messages.h"
#include "dist/net.h"

typedef struct lt_mail lt_mail; /* the mailbox of a rank */

typedef struct lt_message {
    struct lt_message *next; /* next in a list of the current owner */
    int from;                /* rank of the sender; set on arrival */
    lt_message_kind kind;
    int64_t run; /* number of the run; lt__mail_send() sets it */
    lt_message_body as;
    size_t bytes;
    double due; /* time at which it can be taken, or 0: at once. See lt__mail_add_latency() */
    _Alignas(64) char data[]; /* (bytes) */
} lt_message;

typedef struct lt_messages {  /* a list, the oldest one first. All zeros: empty */
    lt_message *first, *last; /* last: undefined if the list is empty */
} lt_messages;

/* A message with a zero body and uninitialized data. New. NULL with LT_ENOMEM. */
lt_message *lt__message_new(lt_message_kind kind, size_t bytes);
void lt__message_free(lt_message *message);                    /* NULL is allowed */
void lt__messages_put(lt_messages *list, lt_message *message); /* message is taken */
lt_message *lt__messages_take(lt_messages *list); /* the oldest one, new; NULL if there is none */
void lt__messages_free(lt_messages *list);        /* frees the messages */

/* Opens the mailboxes of n ranks that are threads of this process: mail (n), all new. LT_ENOMEM; no
 * mailbox is open then. */
LT_NODISCARD lt_status lt__mail_open_local(int n, lt_mail **mail);
/* Opens the mailbox of a process. net is borrowed until the mailbox is closed. New. NULL with
 * LT_ENOMEM. */
lt_mail *lt__mail_open_net(const lt_net *net);
/* Closes a mailbox. Waits at most `seconds` until sent messages have left. The mailbox of a thread
 * is freed, and the other ranks receive LT_MAIL_LOST. The mailbox of a process remains until
 * lt__mail_free_net(). NULL is allowed. */
void lt__mail_close(lt_mail *mail, double seconds);
/* Frees a closed mailbox of a process. Its network must be closed as well, because pending receives
 * point into the mailbox. NULL is allowed. */
void lt__mail_free_net(lt_mail *mail);

/* Begins a run: a pipeline, asynchronous training, or a measurement. All ranks begin the same runs
 * in the same order. A run only takes messages that were sent in it. */
void lt__mail_begin_run(lt_mail *mail);

/* For tests: messages between `rank` and other ranks arrive `seconds` later from now on. All ranks
 * must call it, before they send anything. A further call changes only the seconds. */
void lt__mail_add_latency(lt_mail *mail, int rank, double seconds);

/* Sends a message to rank `to`, which may be this rank. message is taken. It is dropped if the
 * receiver is lost or has closed its mailbox. */
void lt__mail_send(lt_mail *mail, int to, lt_message *message);
/* Seconds between checks whether the job has failed, while a rank waits for a message. */
static const double LT_CHECK_SECONDS = 0.2;
/* Removes and returns the message of this run, or the report that a rank is lost or has joined,
 * that arrived first. Waits for at most `seconds`. New; NULL if no message arrives. */
lt_message *lt__mail_take(lt_mail *mail, double seconds);

#endif
