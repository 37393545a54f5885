/* host_internal.h - the state of the host. Private to host.c and host_calls.c. */
#ifndef LT_DIST_ASYNC_HOST_INTERNAL_H
#define LT_DIST_ASYNC_HOST_INTERNAL_H

#include <pthread.h>

#include "dist/async/awake.h"
#include "dist/async/host.h"
#include "dist/async/mirror.h"
#include "dist/async/server.h"
#include "dist/async/snapshots.h"

typedef struct member { /* a worker */
    double heard;       /* when its last message was handled, or its pull was answered */
    int64_t pull;       /* number of its last pull */
    int64_t read;       /* version that it computes with */
    bool computing, lost;
    bool owes; /* it computes, or has pushed and pulls next */
    bool told; /* it got LT_HOST_STOP, or that all tickets are done; or it is lost */
} member;

struct lt_host {
    struct lt_group *group; /* borrowed, like mail */
    lt_mail *mail;
    int64_t run;
    bool finished;
    lt_inbox to_root;
    double silence;         /* seconds until a worker is declared lost */
    lt_awake clock;         /* of the thread */
    double looked, greeted; /* when it last looked for silent workers, and sent LT_HOST_ALIVE */
    pthread_t thread;
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t resumed;
    bool paused;    /* handles no message */
    bool begun;     /* lt__host_begin() has copied the initial values */
    int64_t digest; /* of the initial values */
    lt_ctx *ctx;
    lt_mirror mirror;
    lt_server server;
    lt_gradient gradient; /* of the push that is applied */
    member *members;
    int n;
    bool stopped, closing;
    int code;           /* of the stop */
    int64_t last;       /* training stops at this version; 0: at none */
    int64_t wire_bytes; /* of messages between rank 0 and the other ranks */
    lt_snapshots snapshots;
    lt_status status; /* of the first failure of the server, */
    char text[512];   /* and its message */
};

/* The first call copies the values, buffers and slots of rank 0, with which training begins; later
 * calls do nothing. The host must be locked. */
LT_MUST lt_status lt__host_begin(lt_host *host, const lt_layout *from);
/* Takes the planned snapshots whose moment has come. The host must be locked. */
lt_status lt__host_take_snapshots(lt_host *host);

#endif
