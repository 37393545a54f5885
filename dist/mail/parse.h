/* parse.h - the bytes of messages that processes exchange. Private to dist/mail.
 *
 * A message travels as a head and its data. Both are raw bytes, so all processes must run the same
 * version of luatrain on machines of one kind.
 */
#ifndef LT_DIST_MAIL_PARSE_H
#define LT_DIST_MAIL_PARSE_H

#include "dist/mail/mail.h"

typedef struct lt_message_head {
    int64_t kind, bytes, run;
    lt_message_body body;
} lt_message_head;

lt_message_head lt__message_head(const lt_message *message);
/* The message that these bytes are. from_server: its sender is the server, else a worker that has
 * joined. Checks that the sender may send this kind, and every number and size that can be checked
 * without the net. Sizes that depend on the net are checked where the message is used:
 * lt__gradient_view() and live.c. New. NULL with LT_EDESYNC and the reason, or with LT_ENOMEM. */
lt_message *lt__message_parse(bool from_server, const void *head, size_t head_bytes,
                              const void *data, size_t bytes);

typedef struct lt_parts { /* a message that arrives in parts. All zeros: none */
    lt_message *message;
    size_t arrived; /* bytes of its data so far */
} lt_parts;

/* Adds a part, which has the head of the message and a piece of its data. *whole is the message
 * after its last part, new, and else NULL. The same errors; then free parts->message. */
LT_NODISCARD lt_status lt__message_add(lt_parts *parts, bool from_server, const void *head,
                                       size_t head_bytes, const void *data, size_t bytes,
                                       lt_message **whole);

#endif
