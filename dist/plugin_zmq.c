/* plugin_zmq.c - libluatrain-zmq.so: a network based on ZeroMQ. It calls no function of luatrain;
 * its interface is star.h.
 *
 * The server has a ROUTER socket, a worker a DEALER socket. ROUTER gives each connection an
 * identity of 5 bytes: 0 and a number. All traffic is encrypted by CURVE. The server and all
 * workers have the same key pair, which is made from the shared key; the server accepts only this
 * one. ZeroMQ asks whether to accept a key by the protocol ZAP (rfc.zeromq.org/spec/27). A worker
 * watches its connection by the events of a monitor socket, because ZeroMQ reconnects silently.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <zmq.h>

#include "core/core.h"
#include "dist/star.h"

enum { IDENTITY = 5, KEY_BYTES = 32, OVERHEAD = 1024 /* of CURVE, for a frame */ };

typedef struct zmq_star {
    void *ctx, *socket;
    void *side;                    /* server: the socket of ZAP; worker: of the monitor */
    int serves, woken;             /* woken: an eventfd */
    int connected;                 /* worker: the handshake has succeeded */
    uint8_t public_key[KEY_BYTES]; /* of the server and all workers */
    zmq_msg_t head, data;          /* of the last event */
} zmq_star;

/* ==== Sending ================================================================================= */

typedef struct owner { /* of sent data */
    void (*done)(void *owner);
    void *owner;
    atomic_int users; /* parts that ZeroMQ has not sent yet, and star_send() */
} owner;

static void release(void *data, void *hint)
{
    owner *o = hint;
    (void)data;
    if (atomic_fetch_sub(&o->users, 1) > 1)
        return;
    if (o->done)
        o->done(o->owner);
    free(o);
}

/* Sends bytes that are copied, as a frame. */
static int send_bytes(zmq_star *s, const void *data, size_t bytes, int more)
{
    int flags = ZMQ_DONTWAIT | (more ? ZMQ_SNDMORE : 0);
    return zmq_send(s->socket, data, bytes, flags) < 0 ? -1 : 0;
}

/* Sends data without a copy, as the last frame. */
static int send_data(zmq_star *s, void *data, size_t bytes, owner *o)
{
    zmq_msg_t frame;
    if (zmq_msg_init_data(&frame, data, bytes, release, o) != 0) {
        send_bytes(s, NULL, 0, 0); /* ends the part, which the receiver then refuses */
        return -1;
    }
    atomic_fetch_add(&o->users, 1);
    if (zmq_msg_send(&frame, s->socket, ZMQ_DONTWAIT) >= 0)
        return 0;
    zmq_msg_close(&frame); /* calls release() */
    return -1;
}

static int send_part(zmq_star *s, uint32_t to, const void *head, size_t head_bytes, void *data,
                     size_t bytes, owner *o)
{
    uint8_t id[IDENTITY] = {0};
    memcpy(id + 1, &to, sizeof to);
    int status = s->serves ? send_bytes(s, id, sizeof id, 1) : 0;
    if (status == 0)
        status = send_bytes(s, head, head_bytes, 1);
    if (status == 0)
        status = bytes > 0 ? send_data(s, data, bytes, o) : send_bytes(s, NULL, 0, 0);
    return status;
}

static int star_send(void *self, uint32_t to, const void *head, size_t head_bytes, void *data,
                     size_t bytes, void (*done)(void *owner), void *of)
{
    owner *o = malloc(sizeof *o);
    int status = -1;
    if (!o) {
        if (done)
            done(of);
        return status;
    }
    o->done = done;
    o->owner = of;
    atomic_init(&o->users, 1); /* ThreadSanitizer does not see the order that ZeroMQ ensures */
    size_t at = 0;
    do {
        size_t n = bytes - at < LT_STAR_PART ? bytes - at : LT_STAR_PART;
        status = send_part(self, to, head, head_bytes, n > 0 ? (char *)data + at : NULL, n, o);
        at += n;
    } while (status == 0 && at < bytes);
    release(data, o);
    return status;
}

/* ==== Receiving =============================================================================== */

/* Whether what is being received has another frame. */
static int has_more(void *socket)
{
    int more = 0;
    size_t bytes = sizeof more;
    return zmq_getsockopt(socket, ZMQ_RCVMORE, &more, &bytes) == 0 && more;
}

static void drop_rest(void *socket)
{
    zmq_msg_t frame;
    while (has_more(socket)) {
        zmq_msg_init(&frame);
        int status = zmq_msg_recv(&frame, socket, ZMQ_DONTWAIT);
        zmq_msg_close(&frame);
        if (status < 0)
            return;
    }
}

static int take_frame(zmq_msg_t *frame, void *socket)
{
    zmq_msg_close(frame);
    zmq_msg_init(frame);
    return zmq_msg_recv(frame, socket, ZMQ_DONTWAIT) >= 0;
}

/* Takes a part of a message. Returns 1, or 0 if none waits. Drops what does not have two frames, a
 * head and data, or whose sender has chosen its own identity: then event->kind is
 * LT_STAR_NOTHING. */
static int take_part(zmq_star *s, lt_star_event *event)
{
    uint8_t id[IDENTITY + 1];
    uint32_t from = 0;
    event->kind = LT_STAR_NOTHING;
    if (s->serves) {
        int n = zmq_recv(s->socket, id, sizeof id, ZMQ_DONTWAIT);
        if (n < 0)
            return 0;
        if (n != IDENTITY || id[0] != 0 || !has_more(s->socket)) {
            drop_rest(s->socket);
            return 1;
        }
        memcpy(&from, id + 1, sizeof from);
    }
    if (!take_frame(&s->head, s->socket))
        return s->serves;
    int whole = has_more(s->socket) && take_frame(&s->data, s->socket) && !has_more(s->socket);
    if (!whole) {
        drop_rest(s->socket);
        return 1;
    }
    *event = (lt_star_event){LT_STAR_MESSAGE,        from,
                             zmq_msg_data(&s->head), zmq_msg_data(&s->data),
                             zmq_msg_size(&s->head), zmq_msg_size(&s->data)};
    return 1;
}

/* ==== The server: who may connect ============================================================= */

/* Answers a request of ZAP: version, id, domain, address, identity, mechanism, public key. */
static void answer_zap(zmq_star *s)
{
    enum { VERSION, ID, MECHANISM = 5, KEY, PARTS };
    char part[PARTS][256];
    int bytes[PARTS] = {0}, n = 0;
    for (int more = 1; more; n++) {
        char *to = part[n < PARTS ? n : VERSION];
        int got = zmq_recv(s->side, to, sizeof part[0], n == 0 ? ZMQ_DONTWAIT : 0);
        if (got < 0)
            return;
        if (n < PARTS)
            bytes[n] = got;
        more = has_more(s->side);
    }
    int is_ours = n == PARTS && bytes[MECHANISM] == 5 && memcmp(part[MECHANISM], "CURVE", 5) == 0 &&
                  bytes[KEY] == KEY_BYTES && memcmp(part[KEY], s->public_key, KEY_BYTES) == 0;
    const char *code = is_ours ? "200" : "400", *text = is_ours ? "OK" : "another key";
    int id_bytes = n > ID && bytes[ID] <= (int)sizeof part[0] ? bytes[ID] : 0;
    zmq_send(s->side, "1.0", 3, ZMQ_SNDMORE);
    zmq_send(s->side, part[ID], (size_t)id_bytes, ZMQ_SNDMORE);
    zmq_send(s->side, code, 3, ZMQ_SNDMORE);
    zmq_send(s->side, text, strlen(text), ZMQ_SNDMORE);
    zmq_send(s->side, "", 0, ZMQ_SNDMORE); /* user */
    zmq_send(s->side, "", 0, 0);           /* metadata */
}

/* ==== A worker: its connection ================================================================ */

static void take_monitored(zmq_star *s, lt_star_event *event)
{
    uint16_t what = 0;
    uint8_t head[6] = {0};
    if (zmq_recv(s->side, head, sizeof head, ZMQ_DONTWAIT) < 0)
        return;
    drop_rest(s->side);
    memcpy(&what, head, sizeof what);
    if (what == ZMQ_EVENT_HANDSHAKE_SUCCEEDED)
        s->connected = 1;
    else /* the connection has ended, or never began */
        event->kind = s->connected ? LT_STAR_LOST : LT_STAR_REFUSED;
}

/* ==== Waiting ================================================================================= */

static void star_wait(void *self, double seconds, lt_star_event *event)
{
    zmq_star *s = self;
    uint64_t count;
    *event = (lt_star_event){LT_STAR_NOTHING, 0, NULL, NULL, 0, 0};
    if (s->serves) /* also while messages keep coming */
        answer_zap(s);
    if (take_part(s, event))
        return;
    zmq_pollitem_t items[] = {{s->socket, 0, ZMQ_POLLIN, 0},
                              {s->side, 0, ZMQ_POLLIN, 0},
                              {NULL, s->woken, ZMQ_POLLIN, 0}};
    if (zmq_poll(items, 3, (long)(seconds * 1000 + 0.5)) <= 0)
        return;
    if (items[2].revents && read(s->woken, &count, sizeof count) < 0)
        return; /* another call has read it */
    if (items[1].revents && s->serves)
        answer_zap(s);
    if (items[0].revents)
        take_part(s, event);
    else if (items[1].revents && !s->serves) /* after the messages that arrived before it */
        take_monitored(s, event);
}

static void star_wake(void *self)
{
    const zmq_star *s = self;
    uint64_t one = 1;
    ssize_t written = write(s->woken, &one, sizeof one);
    (void)written; /* if the counter is full, the wait ends anyway */
}

/* ==== Opening and closing ===================================================================== */

/* At most 6e6, a limit of ZeroMQ's heartbeats. */
static int milliseconds(double seconds) { return (int)(seconds < 6e3 ? seconds * 1000 : 6e6); }

static void star_close(void *self, double seconds)
{
    zmq_star *s = self;
    int linger = milliseconds(seconds);
    if (s->socket) {
        zmq_setsockopt(s->socket, ZMQ_LINGER, &linger, sizeof linger);
        zmq_socket_monitor(s->socket, NULL, 0);
        zmq_close(s->socket);
    }
    /* While messages leave, nobody answers ZAP, so new connections fail. */
    if (s->side)
        zmq_close(s->side);
    zmq_msg_close(&s->head);
    zmq_msg_close(&s->data);
    if (s->ctx)
        zmq_ctx_term(s->ctx);
    if (s->woken >= 0)
        close(s->woken);
    free(s);
}

static int set_int(zmq_star *s, int option, int value)
{
    return zmq_setsockopt(s->socket, option, &value, sizeof value);
}

/* Sets the key pair of CURVE, and heartbeats: a silent connection ends after `timeout`, and so does
 * one with a frame of more than a part, which a stranger may send before its key is checked. */
static int set_options(zmq_star *s, const lt_star_config *c)
{
    char secret[LT_STAR_KEY + 1], public[LT_STAR_KEY + 1];
    memcpy(secret, c->key, LT_STAR_KEY);
    secret[LT_STAR_KEY] = '\0';
    if (zmq_curve_public(public, secret) != 0 || !zmq_z85_decode(s->public_key, public))
        return -1;
    int ms = milliseconds(c->timeout);
    int64_t most = LT_STAR_PART + OVERHEAD;
    int status = set_int(s, ZMQ_SNDHWM, 0) | set_int(s, ZMQ_IPV6, 1) | set_int(s, ZMQ_LINGER, 0) |
                 set_int(s, ZMQ_HEARTBEAT_IVL, ms / 8 + 1) |
                 set_int(s, ZMQ_HEARTBEAT_TIMEOUT, ms + 1) |
                 set_int(s, ZMQ_HEARTBEAT_TTL, ms + 100) |
                 zmq_setsockopt(s->socket, ZMQ_MAXMSGSIZE, &most, sizeof most) |
                 zmq_setsockopt(s->socket, ZMQ_CURVE_SECRETKEY, secret, LT_STAR_KEY + 1);
    if (s->serves)
        return status | set_int(s, ZMQ_CURVE_SERVER, 1) | set_int(s, ZMQ_ROUTER_MANDATORY, 1) |
               zmq_setsockopt(s->socket, ZMQ_ZAP_DOMAIN, "luatrain", 8);
    return status | zmq_setsockopt(s->socket, ZMQ_CURVE_PUBLICKEY, public, LT_STAR_KEY + 1) |
           zmq_setsockopt(s->socket, ZMQ_CURVE_SERVERKEY, public, LT_STAR_KEY + 1);
}

static int open_side(zmq_star *s)
{
    static const char zap[] = "inproc://zeromq.zap.01", monitor[] = "inproc://monitor";
    int events = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                 ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH |
                 ZMQ_EVENT_DISCONNECTED;
    s->side = zmq_socket(s->ctx, s->serves ? ZMQ_REP : ZMQ_PAIR);
    if (!s->side)
        return -1;
    if (s->serves)
        return zmq_bind(s->side, zap);
    return zmq_socket_monitor(s->socket, monitor, events) | zmq_connect(s->side, monitor);
}

/* Frees s and writes why it could not be opened. */
static int fail(zmq_star *s, int code, char *text, size_t bytes, const char *what)
{
    int why = errno;
    snprintf(text, bytes, "%s: %s", what, zmq_strerror(why));
    star_close(s, 0);
    return code;
}

static void write_address(zmq_star *s, const lt_star_config *c, lt_star *star)
{
    char endpoint[sizeof star->address] = "";
    size_t bytes = sizeof endpoint;
    if (!s->serves || zmq_getsockopt(s->socket, ZMQ_LAST_ENDPOINT, endpoint, &bytes) != 0)
        snprintf(endpoint, sizeof endpoint, "tcp://%s", c->address);
    snprintf(star->address, sizeof star->address, "%s",
             strncmp(endpoint, "tcp://", 6) == 0 ? endpoint + 6 : endpoint);
}

LT_API int lt_star_open(const char *version, const lt_star_config *config, lt_star *star,
                        char *text, size_t text_bytes)
{
    char endpoint[300];
    if (strcmp(version, LT_VERSION) != 0) {
        snprintf(text, text_bytes,
                 "the ZeroMQ plugin is from luatrain %s, but this is luatrain %s; install both "
                 "from one build",
                 LT_VERSION, version);
        return 2;
    }
    zmq_star *s = calloc(1, sizeof *s);
    if (!s) {
        snprintf(text, text_bytes, "out of memory for ZeroMQ");
        return 2;
    }
    s->serves = config->serves;
    zmq_msg_init(&s->head);
    zmq_msg_init(&s->data);
    s->woken = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    s->ctx = s->woken < 0 ? NULL : zmq_ctx_new();
    s->socket = s->ctx ? zmq_socket(s->ctx, s->serves ? ZMQ_ROUTER : ZMQ_DEALER) : NULL;
    if (!s->socket || set_options(s, config) != 0 || open_side(s) != 0)
        return fail(s, 2, text, text_bytes, "ZeroMQ cannot be set up with encryption");
    int n = snprintf(endpoint, sizeof endpoint, "tcp://%s", config->address);
    if (n >= (int)sizeof endpoint || (s->serves ? zmq_bind : zmq_connect)(s->socket, endpoint) != 0)
        return fail(s, 1, text, text_bytes, config->address);
    *star = (lt_star){
        .self = s, .send = star_send, .wait = star_wait, .wake = star_wake, .close = star_close};
    write_address(s, config, star);
    return 0;
}

LT_API int lt_star_new_key(char key[LT_STAR_KEY], char *text, size_t text_bytes)
{
    char public[LT_STAR_KEY + 1], secret[LT_STAR_KEY + 1];
    if (zmq_curve_keypair(public, secret) != 0) {
        snprintf(text, text_bytes, "ZeroMQ cannot make a key: %s", zmq_strerror(errno));
        return 2;
    }
    memcpy(key, secret, LT_STAR_KEY);
    return 0;
}
