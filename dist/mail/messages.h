/* messages.h - what ranks say to each other in messages. Included by mail.h. Private to dist.
 *
 * A message has a kind, a body of that kind, and maybe data. The comment at a kind names its body.
 */
#ifndef LT_DIST_MAIL_MESSAGES_H
#define LT_DIST_MAIL_MESSAGES_H

#include "core/core.h"

typedef enum lt_message_kind {
    LT_MAIL_JOINED = -2, /* the mailbox reports that a worker has joined; data: name of its host */
    LT_MAIL_LOST = -1,   /* ... that a rank is lost; nothing more arrives from it until it joins */

    /* Between the stages of a pipeline: dist/pipeline/messages.c */
    LT_MSG_VALUES,  /* transfer; data: elements of a tensor */
    LT_MSG_GRAD,    /* transfer; data: the gradient of values; no data if they have none */
    LT_MSG_READ,    /* transfer: acknowledges values that have no gradient */
    LT_MSG_WAITING, /* waiting: the sender has waited for half of the timeout */

    /* From a worker of asynchronous training to the server: dist/async/server_loop.c */
    LT_MSG_PULL,         /* pull */
    LT_MSG_PUSH,         /* push; data: see dist/async/gradient.h */
    LT_MSG_RELEASE,      /* the worker gives its tickets back */
    LT_MSG_STOP_REQUEST, /* stop: the worker asks to stop training */
    LT_MSG_CHECK,        /* check: from the server to itself */

    /* From the server to a worker: dist/async/live.c */
    LT_MSG_GRANT,     /* grant; data: the values of the net, see lt__image_pack() */
    LT_MSG_FENCED,    /* the worker was declared lost */
    LT_MSG_STOP,      /* stop: training is stopped */
    LT_MSG_FINISH,    /* finish: the end of training; data: values and slots of the net */
    LT_MSG_HEARTBEAT, /* the server runs; or the mailbox reports that a message is arriving */
    LT_MSG_EVENT,     /* an event for rank 0; data: an lt_async_event */

    LT_MSG_LEAVE, /* to the server: the worker has failed; to a worker: the server has failed */
    LT_MSG_TIMED, /* measures a link: dist/pipeline/link.c; data: any */

    /* Between a server and a worker that joins it: dist/mail/mail_star.c */
    LT_MSG_JOIN,    /* to the server, the first message; data: version of luatrain, blank, host */
    LT_MSG_WELCOME, /* welcome: the first answer */
    LT_MSG_REFUSED, /* the other answer; or the worker has sent nonsense. data: the reason */
    LT_MSG_SAID,    /* said: what rank 0 has broadcast; data: its name, NUL, and then its bytes */
    LT_MSG_ALIVE    /* from the server: if it cannot be sent, the worker is lost. From a worker: a
                     * message of the server is arriving */
} lt_message_kind;

enum { LT_MSG_TICKETS = 4 };
enum { LT_STOP_FINISHED = -1 }; /* code of LT_MSG_STOP: rank 0 finishes */

typedef union lt_message_body { /* sent as raw bytes */
    struct {
        int64_t number;    /* number of the values among all values that the stage has sent */
        int64_t forwards;  /* number of forward passes that the sender has completed */
        bool acknowledged; /* the receiver must send LT_MSG_READ */
    } transfer;
    struct {
        int rank; /* the rank that the sender waits for */
    } waiting;
    struct {
        int64_t number; /* number of the pull among the worker's pulls, from 1 */
        int64_t digest; /* digest of the worker's initial values, in its first pull */
    } pull;
    struct {
        int64_t number; /* number of the push among the worker's pushes, from 0 */
        double loss, lr;
        bool skip; /* the worker skipped the step: there is no gradient */
        int n_groups, n_bn;
    } push;
    struct {
        int code;
    } stop;
    struct {
        double time; /* time of sending */
    } check;
    struct {
        int64_t pull;    /* number of the pull that it answers */
        int64_t version; /* version of the values */
        int n;           /* number of tickets; 0: every ticket is applied or skipped */
        int64_t ticket[LT_MSG_TICKETS];
    } grant;
    struct {
        int64_t steps; /* steps of the optimizer */
    } finish;
    struct {
        int rank, size; /* rank of the worker; number of ranks that the job may have */
    } welcome;
    struct {
        int64_t name_bytes; /* size of the broadcast's name, with the NUL */
    } said;
} lt_message_body;

#endif
