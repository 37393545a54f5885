/* server_loop.h - the thread on rank 0 that runs the server of live asynchronous training. Private
 * to dist.
 *
 * Workers send it pulls and pushes, and it answers pulls with tickets and the current values. Rank
 * 0 is a worker, too. What the loop sends to rank 0, including a report of each push, goes into the
 * inbox to_root.
 */
#ifndef LT_DIST_ASYNC_SERVER_LOOP_H
#define LT_DIST_ASYNC_SERVER_LOOP_H

#include "dist/async/active_clock.h"
#include "dist/async/server.h"
#include "dist/mail/inbox.h"

typedef struct lt_member { /* a worker */
    double last_message;   /* time of its last message, or of the answer to its pull */
    int64_t pull;          /* number of its last pull */
    int64_t read;          /* version that it computes with */
    bool computing, lost;
    bool pull_expected;       /* it computes, or has pushed and pulls next */
    bool stop_sent;           /* it knows that training is over, or it is lost */
    char host[LT_ASYNC_HOST]; /* its machine, in an elastic job */
    bool is_new;              /* it has joined, but has not pulled yet */
} lt_member;

typedef struct lt_server_loop {
    struct lt_group *group; /* borrowed, like mail */
    lt_mail *mail;
    lt_inbox to_root; /* the messages for rank 0 */
    bool finished;
    double heartbeat_timeout;          /* seconds until a silent worker is declared lost */
    lt_active_clock clock;             /* clock of the thread, for the times below */
    double last_check, last_heartbeat; /* times of the last LT_MSG_CHECK and LT_MSG_HEARTBEAT */
    pthread_t thread;
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t resumed;
    bool paused;    /* handles no message */
    bool begun;     /* the replica has the initial values */
    int64_t digest; /* digest of the initial values */
    lt_ctx *ctx;    /* owned */
    lt_replica replica;
    lt_server server;
    lt_gradient gradient; /* gradient of the current push */
    lt_member *members;
    int n;
    bool stopped, closing;
    int code;           /* code of the stop */
    int64_t last;       /* version at which training stops; 0: none */
    int64_t wire_bytes; /* bytes of the messages between rank 0 and the other ranks */
    double began, busy; /* time at which training began; seconds spent on messages since */
    lt_status status;   /* the first failure of the server, or LT_OK */
    char text[512];     /* message of the failure */
} lt_server_loop;

/* Starts the loop. mail: the mailbox of rank 0; borrowed. ctx: the server's context, with all ops;
 * taken, except on failure. of: the net of rank 0. config->group: borrowed. heartbeat_timeout:
 * seconds without a message after which a worker that computes is declared lost. The job fails if
 * that worker is rank 0, or a process of a job that is not elastic. New. NULL with LT_EUSAGE for a
 * wrong setting, or LT_ENOMEM. */
lt_server_loop *lt__server_loop_open(lt_mail *mail, lt_ctx *ctx, const lt_image *of,
                                     const lt_async_config *config, double heartbeat_timeout);
/* Stops all workers, ends the thread, and sends the final values to the workers that are not lost.
 * If training has not begun, these are the values of `from`, the net of rank 0. The server's
 * failure; LT_ENOMEM. */
LT_NODISCARD lt_status lt__server_loop_finish(lt_server_loop *loop, const lt_image *from);
/* Frees the loop. If it has not finished, all workers fail. NULL is allowed. */
void lt__server_loop_close(lt_server_loop *loop);

/* Any thread of rank 0 may call the functions below, unless it has locked the loop. */
/* The first failure of the server, with its message; or LT_OK. */
LT_NODISCARD lt_status lt__server_loop_status(lt_server_loop *loop);
/* The loop handles no message before the first call, which copies the values, buffers and slots of
 * `from`, the net of rank 0. */
LT_NODISCARD lt_status lt__server_loop_set_limit(lt_server_loop *loop, int64_t tickets,
                                                 const lt_image *from);
/* Stops training: pulls are answered by LT_MSG_STOP, and pushes are ignored. */
void lt__server_loop_stop(lt_server_loop *loop, int code);
void lt__server_loop_pause(lt_server_loop *loop, bool on); /* suspends it, or continues it */

#endif
