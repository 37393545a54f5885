/* mail_net.c - messages between processes; see mail.h.
 *
 * A thread of the mailbox makes all calls of the network. A receive for the head of the next
 * message from each rank is always pending; the head says how many bytes of data follow. Messages
 * to one rank are sent one after the other.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/tensor.h"
#include "dist/mail/inbox.h"

/* Nanoseconds between polls of the network. FIRST_NS: for the first FIRST_POLLS polls of a wait for
 * a message, and again after each progress. WAITING_NS: after these, and while data is in transit.
 * IDLE_NS: otherwise, when polls only slow down the rank. */
enum { FIRST_NS = 20 * 1000, WAITING_NS = 500 * 1000, IDLE_NS = 2000 * 1000, FIRST_POLLS = 200 };

typedef struct head { /* sent as raw bytes */
    int64_t kind, bytes, run;
    lt_message_body body;
} head;

typedef struct peer { /* another rank */
    bool lost;
    lt_message *notice;   /* message that it is lost, allocated in advance */
    head in;              /* head of the message that arrives */
    lt_message *arriving; /* message whose data arrives; NULL: a head arrives */
    lt_request receiving;
    lt_messages to_send; /* under the lock */
    lt_message *leaving; /* message that is being sent, or NULL */
    head out;
    bool head_left; /* the head has been sent */
    lt_request sending;
} peer;

typedef struct net_mail {
    lt_mail mail;
    lt_inbox inbox;
    const lt_net *net;
    int size; /* number of ranks */
    pthread_t thread;
    pthread_mutex_t lock; /* guards the lists of messages to be sent, and the fields below */
    pthread_cond_t wake;  /* signaled when the thread must poll at once */
    bool woken;
    int waiting;     /* threads of the rank that wait for a message */
    int idle;        /* polls since the last progress, or since a wait began; up to FIRST_POLLS */
    bool closing;    /* the thread ends when nothing is left to send */
    double deadline; /* time at which a closing thread ends anyway */
    peer peer[];
} net_mail;

/* ==== Receiving =============================================================================== */

static void lose(net_mail *m, int i)
{
    peer *p = &m->peer[i];
    p->lost = true;
    lt__message_free(p->arriving);
    p->arriving = NULL;
    p->notice->from = i;
    p->notice->due = lt__mail_due(&m->mail, m->net->rank, i);
    lt__inbox_put(&m->inbox, p->notice);
    p->notice = NULL;
}

static void receive_head(net_mail *m, int i)
{
    peer *p = &m->peer[i];
    if (m->net->receive(m->net->self, i, LT_NET_MAIL, &p->in, sizeof p->in, &p->receiving) != 0)
        lose(m, i);
}

static void deliver(net_mail *m, int i)
{
    m->peer[i].arriving->due = lt__mail_due(&m->mail, m->net->rank, i);
    lt__inbox_put(&m->inbox, m->peer[i].arriving);
    m->peer[i].arriving = NULL;
    receive_head(m, i);
}

/* A head has arrived: receives the data, if there is any. Without memory for it, nothing more can
 * be received from this rank. */
static void begin_data(net_mail *m, int i)
{
    peer *p = &m->peer[i];
    if (!(p->arriving = lt__message_new((lt_message_kind)p->in.kind, (size_t)p->in.bytes))) {
        lose(m, i);
        return;
    }
    p->arriving->from = i;
    p->arriving->run = p->in.run;
    p->arriving->as = p->in.body;
    if (p->in.bytes == 0)
        deliver(m, i);
    else if (m->net->receive(m->net->self, i, LT_NET_MAIL, p->arriving->data, p->arriving->bytes,
                             &p->receiving) != 0)
        lose(m, i);
}

/* Whether something arrived from rank i. */
static bool receive_some(net_mail *m, int i)
{
    peer *p = &m->peer[i];
    int done = p->lost ? 0 : m->net->test(m->net->self, &p->receiving);
    if (done < 0)
        lose(m, i);
    else if (done > 0 && p->arriving)
        deliver(m, i);
    else if (done > 0)
        begin_data(m, i);
    return done != 0;
}

/* ==== Sending ================================================================================= */

static lt_message *next_to_send(net_mail *m, peer *p)
{
    pthread_mutex_lock(&m->lock);
    lt_message *message = lt__messages_take(&p->to_send);
    pthread_mutex_unlock(&m->lock);
    return message;
}

static void end_sending(peer *p)
{
    lt__message_free(p->leaving);
    p->leaving = NULL;
}

static void begin_sending(net_mail *m, int i)
{
    peer *p = &m->peer[i];
    const lt_message *message = p->leaving;
    p->out = (head){message->kind, (int64_t)message->bytes, message->run, message->as};
    p->head_left = false;
    if (m->net->send(m->net->self, i, LT_NET_MAIL, &p->out, sizeof p->out, &p->sending) != 0)
        end_sending(p);
}

/* Whether something was sent to rank i, or is ready to be sent. */
static bool send_some(net_mail *m, int i)
{
    peer *p = &m->peer[i];
    if (!p->leaving) {
        if (!(p->leaving = next_to_send(m, p)))
            return false;
        if (p->lost)
            end_sending(p);
        else
            begin_sending(m, i);
        return true;
    }
    int done = m->net->test(m->net->self, &p->sending);
    if (done == 0)
        return false;
    bool has_data = done > 0 && !p->head_left && p->leaving->bytes > 0;
    p->head_left = true;
    if (!has_data || m->net->send(m->net->self, i, LT_NET_MAIL, p->leaving->data, p->leaving->bytes,
                                  &p->sending) != 0)
        end_sending(p);
    return true;
}

static bool is_sending(net_mail *m)
{
    bool any = false;
    for (int i = 0; i < m->size; i++)
        any |= m->peer[i].leaving || m->peer[i].to_send.first;
    return any;
}

/* ==== The thread ============================================================================== */

static bool is_over(net_mail *m)
{
    pthread_mutex_lock(&m->lock);
    bool over = m->closing && (!is_sending(m) || lt__seconds() > m->deadline);
    pthread_mutex_unlock(&m->lock);
    return over;
}

static bool is_moving(const net_mail *m)
{
    bool any = false;
    for (int i = 0; i < m->size; i++)
        any |= m->peer[i].leaving || m->peer[i].arriving;
    return any;
}

/* Sleeps until the next poll, unless the last one made progress. */
static void sleep_between_polls(net_mail *m, bool progress)
{
    pthread_mutex_lock(&m->lock);
    bool is_first = m->idle < FIRST_POLLS;
    int ns = !m->waiting && !is_moving(m) ? IDLE_NS
             : m->waiting && is_first     ? FIRST_NS
                                          : WAITING_NS;
    struct timespec deadline = lt__after(ns * 1e-9);
    m->idle = progress ? 0 : m->idle + is_first;
    if (!progress && !m->woken)
        pthread_cond_clockwait(&m->wake, &m->lock, CLOCK_MONOTONIC, &deadline);
    m->woken = false;
    pthread_mutex_unlock(&m->lock);
}

/* Wakes the thread. The lock must be held. */
static void wake(net_mail *m)
{
    m->woken = true;
    pthread_cond_signal(&m->wake);
}

static void *carry(void *ud)
{
    net_mail *m = ud;
    while (!is_over(m)) {
        bool any = false;
        for (int i = 0; i < m->size; i++)
            if (i != m->net->rank) {
                any |= receive_some(m, i);
                any |= send_some(m, i);
            }
        sleep_between_polls(m, any);
    }
    return NULL;
}

/* ==== The mailbox ============================================================================= */

static void net_send(lt_mail *mail, int to, lt_message *message)
{
    net_mail *m = (net_mail *)mail;
    if (to == m->net->rank) {
        message->from = to;
        lt__inbox_put(&m->inbox, message);
        return;
    }
    pthread_mutex_lock(&m->lock);
    lt__messages_put(&m->peer[to].to_send, message);
    wake(m);
    pthread_mutex_unlock(&m->lock);
}

static void net_waits(lt_mail *mail, int change)
{
    net_mail *m = (net_mail *)mail;
    pthread_mutex_lock(&m->lock);
    if (m->waiting == 0) { /* a wait begins */
        m->idle = 0;
        wake(m);
    }
    m->waiting += change;
    pthread_mutex_unlock(&m->lock);
}

/* Pending requests of the network point into the peers, so the mailbox is not freed. */
static void net_close(lt_mail *mail, double seconds)
{
    net_mail *m = (net_mail *)mail;
    pthread_mutex_lock(&m->lock);
    m->closing = true;
    m->deadline = lt__seconds() + seconds;
    wake(m);
    pthread_mutex_unlock(&m->lock);
    pthread_join(m->thread, NULL);
    lt__inbox_close(&m->inbox);
}

static void free_peer(peer *p)
{
    lt__messages_free(&p->to_send);
    lt__message_free(p->notice);
    lt__message_free(p->arriving);
    lt__message_free(p->leaving);
}

void lt__mail_free_net(lt_mail *mail)
{
    net_mail *m = (net_mail *)mail;
    if (!m)
        return;
    for (int i = 0; i < m->size; i++)
        free_peer(&m->peer[i]);
    pthread_cond_destroy(&m->wake);
    pthread_mutex_destroy(&m->lock);
    lt__inbox_free(&m->inbox);
    free(m);
}

static void receive_heads(net_mail *m)
{
    for (int i = 0; i < m->size; i++)
        if (i != m->net->rank)
            receive_head(m, i);
}

/* Allocates the notices that a rank is lost. */
static lt_status open_notices(net_mail *m)
{
    for (int i = 0; i < m->size; i++)
        if (i != m->net->rank && !(m->peer[i].notice = lt__message_new(LT_MAIL_LOST, 0)))
            return LT_ENOMEM;
    return LT_OK;
}

lt_mail *lt__mail_open_net(const lt_net *net)
{
    net_mail *m = lt__calloc(1, sizeof *m + (size_t)net->size * sizeof *m->peer,
                             "for the messages of %d ranks", net->size);
    if (!m)
        return NULL;
    m->mail =
        (lt_mail){.send = net_send, .close = net_close, .waits = net_waits, .inbox = &m->inbox};
    m->net = net;
    m->size = net->size;
    lt__inbox_open(&m->inbox);
    pthread_mutex_init(&m->lock, NULL);
    pthread_cond_init(&m->wake, NULL);
    if (open_notices(m) != LT_OK) {
        lt__mail_free_net(&m->mail);
        return NULL;
    }
    receive_heads(m);
    if (pthread_create(&m->thread, NULL, carry, m) == 0)
        return &m->mail;
    lt_fail(LT_ENOMEM, "the system cannot start a thread for messages");
    return NULL; /* m is not freed, because pending requests point into it */
}
