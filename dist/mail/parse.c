/* parse.c - checks the bytes of messages from other processes; see parse.h. */
#include <stddef.h>
#include <string.h>

#include "dist/mail/parse.h"

enum { MAX_TEXT = 1024, MAX_CODE = 255, MAX_ITEMS = 1 << 20 };
static const int64_t MAX_BYTES = (int64_t)1 << 40; /* of data */

lt_message_head lt__message_head(const lt_message *m)
{
    return (lt_message_head){m->kind, (int64_t)m->bytes, m->run, m->as};
}

/* ==== Bodies and data: what is valid for each kind ============================================ */

/* The bytes of a bool: reading another value than 0 or 1 as a bool is undefined. */
static bool is_bool(const bool *b)
{
    unsigned char byte;
    memcpy(&byte, b, sizeof byte);
    return byte <= 1;
}

/* Whether data is printable ASCII. */
static bool is_text(const char *data, size_t bytes)
{
    bool ok = bytes > 0 && bytes <= MAX_TEXT;
    for (size_t i = 0; ok && i < bytes; i++)
        ok = data[i] >= ' ' && data[i] <= '~';
    return ok;
}

static bool is_push(const lt_message_body *b, size_t bytes)
{
    return b->push.number >= 0 && is_bool(&b->push.skip) && b->push.n_groups >= 0 &&
           b->push.n_groups <= MAX_ITEMS && b->push.n_bn >= 0 && b->push.n_bn <= MAX_ITEMS &&
           (bytes == 0) == b->push.skip;
}

static bool is_grant(const lt_message_body *b, size_t bytes)
{
    int n = b->grant.n;
    bool ok = b->grant.pull > 0 && b->grant.version >= 0 && n >= 0 && n <= LT_MSG_TICKETS &&
              (bytes > 0) == (n > 0);
    for (int i = 0; ok && i < n; i++)
        ok = b->grant.ticket[i] >= 0;
    return ok;
}

static bool is_said(const lt_message_body *b, const char *data, size_t bytes)
{
    int64_t n = b->said.name_bytes;
    return n > 0 && n <= MAX_TEXT && (size_t)n <= bytes &&
           memchr(data, '\0', (size_t)n) == data + n - 1;
}

static bool is_valid(int64_t kind, const lt_message_body *b, const char *data, size_t bytes)
{
    switch (kind) {
    case LT_MSG_PULL: return b->pull.number > 0 && bytes == 0;
    case LT_MSG_PUSH: return is_push(b, bytes);
    case LT_MSG_STOP_REQUEST: return b->stop.code >= 0 && b->stop.code <= MAX_CODE && bytes == 0;
    case LT_MSG_STOP:
        return b->stop.code >= LT_STOP_FINISHED && b->stop.code <= MAX_CODE && bytes == 0;
    case LT_MSG_GRANT: return is_grant(b, bytes);
    case LT_MSG_FINISH: return b->finish.steps >= 0;
    case LT_MSG_WELCOME:
        return b->welcome.rank > 0 && b->welcome.rank < b->welcome.size && bytes == 0;
    case LT_MSG_JOIN:
    case LT_MSG_REFUSED: return is_text(data, bytes);
    case LT_MSG_SAID: return is_said(b, data, bytes);
    default: return bytes == 0;
    }
}

/* ==== Messages ================================================================================ */

static bool may_send(bool from_server, int64_t kind)
{
    switch (kind) {
    case LT_MSG_LEAVE:
    case LT_MSG_ALIVE: return true;
    case LT_MSG_JOIN:
    case LT_MSG_PULL:
    case LT_MSG_PUSH:
    case LT_MSG_RELEASE:
    case LT_MSG_STOP_REQUEST: return !from_server;
    case LT_MSG_GRANT:
    case LT_MSG_FENCED:
    case LT_MSG_STOP:
    case LT_MSG_FINISH:
    case LT_MSG_HEARTBEAT:
    case LT_MSG_WELCOME:
    case LT_MSG_REFUSED:
    case LT_MSG_SAID: return from_server;
    default: return false;
    }
}

static lt_status refuse(size_t head_bytes, size_t bytes)
{
    return lt_fail(LT_EDESYNC,
                   "a message of %zu + %zu bytes is invalid; the server and all workers "
                   "must run the same version of luatrain",
                   head_bytes, bytes);
}

/* Reads the head of a part with `bytes` bytes. False if it is invalid. */
static bool read_head(bool from_server, const void *head, size_t head_bytes, size_t bytes,
                      lt_message_head *h)
{
    if (head_bytes != sizeof *h)
        return false;
    memcpy(h, head, sizeof *h);
    return h->bytes >= 0 && h->bytes <= MAX_BYTES && (size_t)h->bytes >= bytes &&
           (bytes > 0 || h->bytes == 0) && h->run >= 0 && may_send(from_server, h->kind);
}

lt_status lt__message_add(lt_parts *p, bool from_server, const void *head, size_t head_bytes,
                          const void *data, size_t bytes, lt_message **whole)
{
    lt_message_head h;
    lt_message *m = p->message;
    *whole = NULL;
    if (!read_head(from_server, head, head_bytes, bytes, &h) ||
        (m && (h.kind != m->kind || (size_t)h.bytes != m->bytes || bytes > m->bytes - p->arrived)))
        return refuse(head_bytes, bytes);
    if (!m) {
        if (!(m = lt__message_new((lt_message_kind)h.kind, (size_t)h.bytes)))
            return LT_ENOMEM;
        m->run = h.run;
        m->as = h.body;
        *p = (lt_parts){m, 0};
    }
    if (bytes > 0)
        memcpy(m->data + p->arrived, data, bytes);
    p->arrived += bytes;
    if (p->arrived < m->bytes)
        return LT_OK;
    if (!is_valid(m->kind, &m->as, m->data, m->bytes))
        return refuse(head_bytes, m->bytes);
    p->message = NULL;
    *whole = m;
    return LT_OK;
}

lt_message *lt__message_parse(bool from_server, const void *head, size_t head_bytes,
                              const void *data, size_t bytes)
{
    lt_message_head h;
    lt_parts parts = {0};
    lt_message *whole = NULL;
    if (!read_head(from_server, head, head_bytes, bytes, &h) || (size_t)h.bytes != bytes)
        refuse(head_bytes, bytes);
    else if (lt__message_add(&parts, from_server, head, head_bytes, data, bytes, &whole) != LT_OK)
        lt__message_free(parts.message);
    return whole;
}
