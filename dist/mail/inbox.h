/* inbox.h - a list of arrived messages that a thread can wait for. Private to dist/mail. */
#ifndef LT_DIST_MAIL_INBOX_H
#define LT_DIST_MAIL_INBOX_H

#include <pthread.h>
#include <time.h>

#include "dist/mail/mail.h"

typedef struct lt_inbox {
    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t arrived;
    lt_messages messages;
    bool closed;
} lt_inbox;

void lt__inbox_open(lt_inbox *inbox);
void lt__inbox_free(lt_inbox *inbox); /* frees its messages, too */
/* Appends a message, which is taken; frees it if the inbox is closed. */
void lt__inbox_put(lt_inbox *inbox, lt_message *message);
/* Like lt__mail_take(), but takes messages of any run. */
lt_message *lt__inbox_take(lt_inbox *inbox, double seconds);
void lt__inbox_close(lt_inbox *inbox);
/* The time `seconds` from now on the monotonic clock. */
struct timespec lt__after(double seconds);

/* The functions of a transport of messages. */
struct lt_mail {
    void (*send)(lt_mail *mail, int to, lt_message *message);
    void (*close)(lt_mail *mail, double seconds);
    /* Adds change, 1 or -1, to the number of threads that wait for a message. May be NULL */
    void (*waits)(lt_mail *mail, int change);
    /* Called when a thread has taken the report that a rank is lost. May be NULL */
    void (*taken)(lt_mail *mail, int lost);
    lt_inbox *inbox;
    int64_t run; /* number of the current run; see lt__mail_begin_run() */
    /* rank and seconds of lt__mail_add_latency(). slow does not change once latency is above 0, so
     * the thread of a mailbox can read it */
    int slow;
    _Atomic double latency;
};

/* The time at which a message between ranks `self` and `other` is due if it arrives now. */
double lt__mail_due(const lt_mail *mail, int self, int other);

#endif
