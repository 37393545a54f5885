/* mail_star.c - messages between a server and workers that come and go; see star_mail.h. A thread
 * of the mailbox makes all calls of the network. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/tensor.h"
#include "dist/mail/inbox.h"
#include "dist/mail/parse.h"
#include "dist/mail/star_mail.h"

/* Seconds between two messages LT_MSG_ALIVE, by which the server notices that a worker is gone. */
static const double ALIVE_SECONDS = 0.25;
enum { MAX_HOST = 64 };

typedef struct member { /* another rank */
    bool connected;
    bool is_lost; /* on the server, under the lock: the report of its loss is still in the inbox */
    uint32_t connection;
    lt_message *notice;  /* message that it is lost, allocated in advance */
    lt_messages to_send; /* under the lock */
    size_t said;         /* number of broadcasts that were sent to it */
    lt_parts coming;     /* the message that arrives from it */
    bool refused;        /* under the lock: it is lost as soon as `to_send` is empty */
} member;

typedef struct star_mail {
    lt_mail mail;
    lt_inbox inbox;
    lt_inbox heard; /* on a worker: what rank 0 has broadcast */
    lt_star star;
    int rank, size; /* size: of `member` */
    pthread_t thread;
    double last_alive; /* when the server sent the last LT_MSG_ALIVE */
    pthread_mutex_t lock;
    bool closing;      /* guarded by the lock, like all below */
    bool over;         /* on the server: nobody can join anymore */
    lt_message **said; /* (n_said) on the server: its broadcasts */
    size_t n_said, max_said;
    char refused[256]; /* on a worker: why the server has refused it, or "" */
    member member[];   /* (size); on a worker, only the server */
} star_mail;

static bool serves(const star_mail *m) { return m->rank == 0; }

/* ==== Sending ================================================================================= */

static void free_message(void *m) { lt__message_free(m); }

/* Sends a message, taken. False if the connection is lost. */
static bool send_now(star_mail *m, uint32_t connection, lt_message *message)
{
    lt_message_head head = lt__message_head(message);
    return m->star.send(m->star.self, connection, &head, sizeof head, message->data, message->bytes,
                        free_message, message) == 0;
}

static void lose(star_mail *m, int i)
{
    member *p = &m->member[i];
    pthread_mutex_lock(&m->lock);
    p->connected = false;
    p->is_lost = true;
    lt__messages_free(&p->to_send);
    pthread_mutex_unlock(&m->lock);
    lt__message_free(p->coming.message);
    p->coming.message = NULL;
    p->notice->from = i;
    lt__inbox_put(&m->inbox, p->notice);
    p->notice = NULL;
}

static lt_message *copy_of(const lt_message *from)
{
    lt_message *m = lt__message_new(from->kind, from->bytes);
    if (m) {
        m->as = from->as;
        memcpy(m->data, from->data, from->bytes);
    }
    return m;
}

/* Returns the next message for rank i; broadcasts come first. NULL if no message waits, or memory
 * runs out. */
static lt_message *next_for(star_mail *m, int i)
{
    member *p = &m->member[i];
    lt_message *message = NULL;
    pthread_mutex_lock(&m->lock);
    if (p->said < m->n_said) {
        if ((message = copy_of(m->said[p->said])))
            p->said++;
    } else {
        message = lt__messages_take(&p->to_send);
    }
    pthread_mutex_unlock(&m->lock);
    return message;
}

static bool is_refused(star_mail *m, int i)
{
    pthread_mutex_lock(&m->lock);
    bool is = m->member[i].refused && !m->member[i].to_send.first;
    pthread_mutex_unlock(&m->lock);
    return is;
}

static void send_all(star_mail *m)
{
    lt_message *message;
    double now = lt__seconds();
    bool alive = serves(m) && now - m->last_alive >= ALIVE_SECONDS;
    if (alive)
        m->last_alive = now;
    for (int i = 0; i < m->size; i++) {
        member *p = &m->member[i];
        bool ok = true;
        while (p->connected && ok && (message = next_for(m, i)))
            ok = send_now(m, p->connection, message);
        if (p->connected && ok && alive && (message = lt__message_new(LT_MSG_ALIVE, 0)))
            ok = send_now(m, p->connection, message);
        if (!ok || (p->connected && is_refused(m, i)))
            lose(m, i);
    }
}

/* ==== The server: workers ===================================================================== */

/* New. NULL with LT_ENOMEM. */
static lt_message *new_refusal(const char *text)
{
    lt_message *message = lt__message_new(LT_MSG_REFUSED, strlen(text));
    if (message)
        memcpy(message->data, text, message->bytes);
    return message;
}

/* Without memory, the worker gets no answer and waits until its timeout. */
static void refuse(star_mail *m, uint32_t connection, const char *text)
{
    lt_message *message = new_refusal(text);
    if (message)
        send_now(m, connection, message);
}

void lt__mail_refuse(lt_mail *mail, int rank, const char *text)
{
    star_mail *m = (star_mail *)mail;
    lt_message *message = new_refusal(text);
    if (message)
        mail->send(mail, rank, message);
    pthread_mutex_lock(&m->lock);
    m->member[rank].refused = true;
    pthread_mutex_unlock(&m->lock);
    m->star.wake(m->star.self);
}

static int find_connection(const star_mail *m, uint32_t connection)
{
    for (int i = 1; i < m->size; i++)
        if (m->member[i].connected && m->member[i].connection == connection)
            return i;
    return 0;
}

/* The lowest free rank, or 0. */
static int find_free(star_mail *m)
{
    int i = 1;
    pthread_mutex_lock(&m->lock);
    while (i < m->size && (m->member[i].connected || m->member[i].is_lost))
        i++;
    pthread_mutex_unlock(&m->lock);
    return i < m->size ? i : 0;
}

static void free_rank(lt_mail *mail, int lost)
{
    star_mail *m = (star_mail *)mail;
    pthread_mutex_lock(&m->lock);
    m->member[lost].is_lost = false;
    pthread_mutex_unlock(&m->lock);
}

void lt__mail_end(lt_mail *mail)
{
    star_mail *m = (star_mail *)mail;
    pthread_mutex_lock(&m->lock);
    m->over = true;
    pthread_mutex_unlock(&m->lock);
}

/* Makes a connection member i, and reports it; join and notice are taken. False if the job is
 * over. */
static bool let_in(star_mail *m, int i, uint32_t connection, lt_message *join, lt_message *notice)
{
    pthread_mutex_lock(&m->lock);
    bool over = m->over;
    if (!over) {
        m->member[i] = (member){.connected = true, .connection = connection, .notice = notice};
        lt__inbox_put(&m->inbox, join); /* before lt__mail_end() returns */
    }
    pthread_mutex_unlock(&m->lock);
    if (over) {
        lt__message_free(notice);
        lt__message_free(join);
    }
    return !over;
}

/* Gives the sender of `join`, which is taken, a rank; or tells it that the job is over. */
static void admit(star_mail *m, uint32_t connection, lt_message *join)
{
    static const char version[] = LT_VERSION " ";
    char text[160];
    int i = find_free(m);
    size_t skip = sizeof version - 1;
    bool fits = join->bytes > skip && memcmp(join->data, version, skip) == 0;
    lt_message *notice = lt__message_new(LT_MAIL_LOST, 0);
    lt_message *answer = lt__message_new(LT_MSG_WELCOME, 0);
    if (!fits || i == 0 || !notice || !answer) {
        snprintf(text, sizeof text,
                 fits ? "the job already has %d workers, the most that are possible"
                      : "the server is luatrain " LT_VERSION "; install that version to join",
                 m->size - 1);
        refuse(m, connection, text);
        lt__message_free(notice);
        lt__message_free(answer);
        lt__message_free(join);
        return;
    }
    join->kind = LT_MAIL_JOINED;
    join->from = i;
    join->bytes = LT_MIN(join->bytes - skip, (size_t)MAX_HOST - 1);
    memmove(join->data, join->data + skip, join->bytes);
    bool is_in = let_in(m, i, connection, join, notice);
    if (is_in) {
        answer->as.welcome.rank = i;
        answer->as.welcome.size = m->size;
    } else {
        answer->kind = LT_MSG_STOP;
        answer->as.stop.code = LT_STOP_FINISHED;
    }
    if (!send_now(m, connection, answer) && is_in)
        lose(m, i);
}

/* Adds a part to the message that arrives from a member. Until it is whole, heartbeats tell those
 * who wait for it that the member is not silent. *whole is NULL then. */
static lt_status take_part(star_mail *m, int from, const lt_star_event *e, lt_message **whole)
{
    lt_parts *p = &m->member[from].coming;
    LT_TRY(lt__message_add(p, !serves(m), e->head, e->head_bytes, e->data, e->bytes, whole));
    lt_message *alive = *whole ? NULL : lt__message_new(LT_MSG_HEARTBEAT, 0);
    if (!alive) /* or there is no memory for a heartbeat */
        return LT_OK;
    alive->from = from;
    alive->run = p->message->run;
    lt__inbox_put(&m->inbox, alive);
    return LT_OK;
}

/* A part of a message has arrived at the server. After an invalid one, the worker is lost. */
static void take_from_worker(star_mail *m, int from, const lt_star_event *e)
{
    lt_message *message = NULL;
    lt_status status = take_part(m, from, e, &message);
    if (status == LT_OK && message && message->kind == LT_MSG_JOIN)
        status = lt_fail(LT_EDESYNC, "the worker is in the job already");
    if (status != LT_OK) {
        refuse(m, m->member[from].connection, lt_errmsg());
        lt__message_free(message);
        lose(m, from);
    } else if (message) {
        message->from = from;
        lt__inbox_put(&m->inbox, message);
    }
}

/* The same, of a connection that is not a worker yet. */
static void take_from_stranger(star_mail *m, const lt_star_event *e)
{
    lt_message *message = lt__message_parse(false, e->head, e->head_bytes, e->data, e->bytes);
    if (message && message->kind == LT_MSG_JOIN) {
        admit(m, e->from, message);
        return;
    }
    refuse(m, e->from, message ? "the worker is not in the job" : lt_errmsg());
    lt__message_free(message);
}

/* ==== A worker ================================================================================ */

static void set_refused(star_mail *m, const char *text, size_t bytes)
{
    pthread_mutex_lock(&m->lock);
    if (!m->refused[0])
        snprintf(m->refused, sizeof m->refused, "%.*s", (int)LT_MIN(bytes, sizeof m->refused),
                 text);
    pthread_mutex_unlock(&m->lock);
}

bool lt__mail_is_refused(lt_mail *mail, char *text, size_t bytes)
{
    star_mail *m = (star_mail *)mail;
    pthread_mutex_lock(&m->lock);
    bool is = m->refused[0] != '\0';
    if (is)
        snprintf(text, bytes, "%s", m->refused);
    pthread_mutex_unlock(&m->lock);
    return is;
}

/* Tells the server that its message is arriving, so that it does not take that time for silence. */
static void confirm(star_mail *m)
{
    lt_message *alive = lt__message_new(LT_MSG_ALIVE, 0);
    if (!alive)
        return;
    alive->run = m->member[0].coming.message->run;
    send_now(m, 0, alive);
}

/* A part of a message of the server has arrived. */
static void take_at_worker(star_mail *m, const lt_star_event *e)
{
    lt_message *message = NULL;
    if (take_part(m, 0, e, &message) != LT_OK)
        set_refused(m, lt_errmsg(), strlen(lt_errmsg()));
    else if (!message)
        confirm(m);
    if (!message)
        return;
    switch (message->kind) {
    case LT_MSG_SAID: lt__inbox_put(&m->heard, message); return;
    case LT_MSG_REFUSED: set_refused(m, message->data, message->bytes); break;
    case LT_MSG_ALIVE:
    case LT_MSG_WELCOME: break;
    default: lt__inbox_put(&m->inbox, message); return;
    }
    lt__message_free(message);
}

/* ==== The thread ============================================================================== */

static void handle(star_mail *m, const lt_star_event *e)
{
    int from = serves(m) ? find_connection(m, e->from) : 0;
    if (e->kind == LT_STAR_MESSAGE && from > 0)
        take_from_worker(m, from, e);
    else if (e->kind == LT_STAR_MESSAGE && serves(m))
        take_from_stranger(m, e);
    else if (e->kind == LT_STAR_MESSAGE)
        take_at_worker(m, e);
    else if (e->kind != LT_STAR_NOTHING && m->member[0].connected)
        lose(m, 0);
}

static bool is_over(star_mail *m)
{
    pthread_mutex_lock(&m->lock);
    bool over = m->closing;
    for (int i = 0; over && i < m->size; i++)
        over = !m->member[i].connected || !m->member[i].to_send.first;
    pthread_mutex_unlock(&m->lock);
    return over;
}

static void *carry(void *ud)
{
    star_mail *m = ud;
    while (!is_over(m)) {
        lt_star_event e;
        m->star.wait(m->star.self, ALIVE_SECONDS, &e);
        handle(m, &e);
        send_all(m);
    }
    return NULL;
}

/* ==== The mailbox ============================================================================= */

static void star_send(lt_mail *mail, int to, lt_message *message)
{
    star_mail *m = (star_mail *)mail;
    message->from = m->rank;
    if (to == m->rank) {
        lt__inbox_put(&m->inbox, message);
        return;
    }
    pthread_mutex_lock(&m->lock);
    bool goes = to < m->size && m->member[to].connected;
    if (goes)
        lt__messages_put(&m->member[to].to_send, message);
    pthread_mutex_unlock(&m->lock);
    if (goes)
        m->star.wake(m->star.self);
    else
        lt__message_free(message);
}

static void free_mail(star_mail *m, double seconds)
{
    m->star.close(m->star.self, seconds);
    for (int i = 0; i < m->size; i++) {
        lt__message_free(m->member[i].notice);
        lt__message_free(m->member[i].coming.message);
        lt__messages_free(&m->member[i].to_send);
    }
    for (size_t i = 0; i < m->n_said; i++)
        lt__message_free(m->said[i]);
    free(m->said);
    pthread_mutex_destroy(&m->lock);
    lt__inbox_free(&m->inbox);
    lt__inbox_free(&m->heard);
    free(m);
}

static void star_close(lt_mail *mail, double seconds)
{
    star_mail *m = (star_mail *)mail;
    pthread_mutex_lock(&m->lock);
    m->closing = true;
    pthread_mutex_unlock(&m->lock);
    m->star.wake(m->star.self);
    pthread_join(m->thread, NULL);
    free_mail(m, seconds);
}

/* star is taken. New. NULL with LT_ENOMEM. */
static star_mail *new_mail(const lt_star *star, int members)
{
    star_mail *m = lt__calloc(1, sizeof *m + (size_t)members * sizeof *m->member,
                              "for the messages of %d workers", members);
    if (!m) {
        star->close(star->self, 0);
        return NULL;
    }
    m->mail =
        (lt_mail){.send = star_send, .close = star_close, .taken = free_rank, .inbox = &m->inbox};
    m->star = *star;
    m->size = members;
    lt__inbox_open(&m->inbox);
    lt__inbox_open(&m->heard);
    pthread_mutex_init(&m->lock, NULL);
    return m;
}

/* m is taken. */
static lt_mail *begin(star_mail *m)
{
    if (pthread_create(&m->thread, NULL, carry, m) == 0)
        return &m->mail;
    lt_fail(LT_ENOMEM, "the system cannot start a thread for messages");
    free_mail(m, 0);
    return NULL;
}

lt_mail *lt__mail_serve(const lt_star *star, int size)
{
    star_mail *m = new_mail(star, size);
    return m ? begin(m) : NULL;
}

/* ==== Joining ================================================================================= */

static bool ask(star_mail *m)
{
    char text[sizeof LT_VERSION + MAX_HOST] = LT_VERSION " ";
    char *host = text + strlen(text);
    gethostname(host, MAX_HOST - 1);
    for (char *at = host; *at; at++)
        *at = *at > ' ' && *at <= '~' ? *at : '?';
    lt_message *join = lt__message_new(LT_MSG_JOIN, strlen(text));
    if (join)
        memcpy(join->data, text, join->bytes);
    return join && send_now(m, 0, join);
}

static lt_status take_answer(star_mail *m, const lt_star_event *e, int *rank, int *size)
{
    const char *address = m->star.address;
    if (e->kind == LT_STAR_REFUSED)
        return lt_fail(LT_EENV,
                       "%s has closed the connection; it has another key, or it is not a server of "
                       "luatrain",
                       address);
    if (e->kind == LT_STAR_LOST)
        return lt_fail(LT_EPEER, "the server at %s was lost", address);
    lt_message *answer = lt__message_parse(true, e->head, e->head_bytes, e->data, e->bytes);
    if (!answer)
        return lt_fail_prefix("%s", address);
    lt_status status = LT_OK;
    if (answer->kind == LT_MSG_REFUSED) {
        status = lt_fail(LT_EUSAGE, "%s: %.*s", address, (int)answer->bytes, answer->data);
    } else if (answer->kind == LT_MSG_WELCOME) {
        *rank = answer->as.welcome.rank;
        *size = answer->as.welcome.size;
    } else if (answer->kind == LT_MSG_STOP) {
        status = lt_fail(LT_EDONE, "the job at %s is over", address);
    }
    lt__message_free(answer);
    return status;
}

/* Waits for the answer to the request to join. */
static lt_status wait_for_answer(star_mail *m, double seconds, int *rank, int *size)
{
    double end = lt__seconds() + seconds;
    *rank = 0;
    while (*rank == 0) {
        lt_star_event e;
        m->star.wait(m->star.self, LT_CHECK_SECONDS, &e);
        if (e.kind != LT_STAR_NOTHING)
            LT_TRY(take_answer(m, &e, rank, size));
        if (*rank == 0 && lt__seconds() > end)
            return lt_fail(LT_EPEER,
                           "no server of luatrain has answered at %s within %g s; start it with "
                           "luatrain --serve",
                           m->star.address, seconds);
    }
    return LT_OK;
}

lt_mail *lt__mail_join(const lt_star *star, double seconds, int *rank, int *size)
{
    star_mail *m = new_mail(star, 1);
    if (!m)
        return NULL;
    m->member[0] = (member){.connected = true, .notice = lt__message_new(LT_MAIL_LOST, 0)};
    lt_status status = m->member[0].notice && ask(m) ? wait_for_answer(m, seconds, rank, size)
                                                     : LT_ENOMEM;
    if (status != LT_OK) {
        free_mail(m, 0);
        return NULL;
    }
    m->rank = *rank;
    return begin(m);
}

/* ==== Broadcasts ============================================================================== */

lt_status lt__mail_say(lt_mail *mail, const char *what, const void *data, size_t bytes)
{
    star_mail *m = (star_mail *)mail;
    size_t name = strlen(what) + 1;
    lt_message *message = lt__message_new(LT_MSG_SAID, name + bytes);
    if (!message)
        return LT_ENOMEM;
    message->as.said.name_bytes = (int64_t)name;
    memcpy(message->data, what, name);
    memcpy(message->data + name, data, bytes);
    pthread_mutex_lock(&m->lock);
    lt_status status = LT_RESERVE(m->said, m->n_said + 1, &m->max_said, "for the workers");
    if (status == LT_OK)
        m->said[m->n_said++] = message;
    pthread_mutex_unlock(&m->lock);
    if (status != LT_OK)
        lt__message_free(message);
    m->star.wake(m->star.self);
    return status;
}

/* LT_EPEER if the server is lost or has refused this worker. */
static lt_status check_server(star_mail *m)
{
    char text[sizeof m->refused];
    if (lt__mail_is_refused(&m->mail, text, sizeof text))
        return lt_fail(LT_EPEER, "%s: %s", m->star.address, text);
    pthread_mutex_lock(&m->lock);
    bool connected = m->member[0].connected;
    pthread_mutex_unlock(&m->lock);
    return connected ? LT_OK : lt_fail(LT_EPEER, "the server at %s was lost", m->star.address);
}

lt_status lt__mail_hear(lt_mail *mail, const char *what, void *data, size_t bytes)
{
    star_mail *m = (star_mail *)mail;
    lt_message *message = lt__inbox_take(&m->heard, 0);
    while (!message) {
        LT_TRY(check_server(m));
        message = lt__inbox_take(&m->heard, LT_CHECK_SECONDS);
    }
    size_t name = (size_t)message->as.said.name_bytes;
    lt_status status = LT_OK;
    if (strcmp(message->data, what) != 0)
        status = lt_fail(LT_EDESYNC,
                         "the script of this worker is at '%s', but the server's was at '%s'; both "
                         "must run the same script with the same options",
                         what, message->data);
    else if (message->bytes - name != bytes)
        status = lt_fail(LT_EDESYNC, "%s: the server has sent %zu bytes, not %zu", what,
                         message->bytes - name, bytes);
    else
        memcpy(data, message->data + name, bytes);
    lt__message_free(message);
    return status;
}
