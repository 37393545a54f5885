/* host.h - the thread on rank 0 that runs the server of live asynchronous training. Private to
 * dist.
 *
 * Workers send it pulls and pushes, and it answers pulls with tickets and the current values. Rank
 * 0 itself is a worker, too; what the host sends to it, including a report of each push, goes into
 * an inbox of its own.
 */
#ifndef LT_DIST_ASYNC_HOST_H
#define LT_DIST_ASYNC_HOST_H

#include "dist/async.h"
#include "dist/async/layout.h"
#include "dist/mail/inbox.h"

/* Kinds of messages, with their numbers. */
enum {
    LT_HOST_PULL, /* to the host: the number of the pull, from 1; the first has a digest, too */
    LT_HOST_PUSH, /* to the host, with a gradient: see lt__gradient_pack(), and the numbers below */
    LT_HOST_RELEASE,      /* to the host: the worker gives its tickets back */
    LT_HOST_LEAVE,        /* to the host: the worker has failed. To a worker: rank 0 has failed */
    LT_HOST_STOP_REQUEST, /* to the host: the worker asks to stop training; a code */
    LT_HOST_LOOK,         /* from the host to itself: look for workers that were silent until now */
    LT_HOST_GRANT,  /* to a worker: version, number of tickets, tickets; data: values, buffers */
    LT_HOST_FENCED, /* to a worker: it was declared lost */
    LT_HOST_STOP,   /* to a worker: training is stopped; a code */
    LT_HOST_FINISH, /* to a worker: the end; steps of the optimizer; data: final values, buffers,
                     * slots */
    LT_HOST_ALIVE,  /* to a worker: nothing, but rank 0 is not silent */
    LT_HOST_EVENT   /* to rank 0, with an lt_async_event */
};
enum { LT_HOST_FINISHED = -1 }; /* code of LT_HOST_STOP: rank 0 finishes */
/* The numbers of a push, after those of the gradient. LOSS and LR are doubles. */
enum { LT_PUSH_NUMBER = 4, LT_PUSH_LOSS, LT_PUSH_LR };
enum { LT_PULL_DIGEST = 1 }; /* number of the first pull: see lt__layout_digest() */
enum {
    LT_GRANT_PULL = 6, /* number of a grant: the number of the pull that it answers */
    LT_HOST_RUN = 7    /* number of all messages: the run. Messages of other runs are ignored */
};

typedef struct lt_host lt_host;

/* Starts the host. mail: of rank 0; borrowed. ctx: of the server, with all ops; taken, also on
 * failure. of: the layout of rank 0, with the initial values. config->group: borrowed. run: see
 * lt__mail_next_run(). silence: seconds without a message after which a worker that computes is
 * declared lost. The job fails if that worker is rank 0 or a process. New. NULL with LT_EUSAGE for
 * a wrong setting, or LT_ENOMEM. */
lt_host *lt__host_open(lt_mail *mail, lt_ctx *ctx, const lt_layout *of,
                       const lt_async_config *config, int64_t run, double silence);
/* Stops all workers, ends the thread, and sends the final values to the workers that are not lost.
 * If training has not begun, these are the values of `from`, the layout of rank 0. The server's
 * failure; LT_ENOMEM. */
LT_MUST lt_status lt__host_finish(lt_host *host, const lt_layout *from);
/* Frees the host. If it has not finished, all workers fail. NULL is allowed. */
void lt__host_close(lt_host *host);
/* The messages for rank 0. */
lt_inbox *lt__host_inbox(lt_host *host);

/* Any thread of rank 0 may call the functions below. */

/* The first failure of the server, with its message; or LT_OK. */
LT_MUST lt_status lt__host_status(lt_host *host);
/* The host handles no message before the first call, which copies the values, buffers and slots of
 * `from`, the layout of rank 0. */
LT_MUST lt_status lt__host_set_limit(lt_host *host, int64_t tickets, const lt_layout *from);
int64_t lt__host_done_below(lt_host *host);
int64_t lt__host_steps(lt_host *host); /* see lt_async_steps() */
/* Stops training: pulls are answered by LT_HOST_STOP, and pushes are ignored. */
void lt__host_stop(lt_host *host, int code);
/* Stops as soon as this version is made: later pushes are ignored. */
void lt__host_stop_at(lt_host *host, int64_t version, int code);
/* Suspends the server, or continues it. */
void lt__host_pause(lt_host *host, bool on);
/* Copies the server's values, buffers and optimizer slots to a layout. The device's error. */
LT_MUST lt_status lt__host_read(lt_host *host, const lt_layout *to);
/* Plans a snapshot of the values and buffers when all tickets below `ticket` are done.
 * LT_ENOMEM. */
LT_MUST lt_status lt__host_keep_at(lt_host *host, int64_t ticket);
/* Writes the snapshot for `ticket` to a layout. LT_EINVAL if it has not been taken yet, or was not
 * planned. */
LT_MUST lt_status lt__host_read_kept(lt_host *host, int64_t ticket, const lt_layout *to);
void lt__host_forget(lt_host *host, int64_t ticket); /* see lt_async_forget() */
/* See lt_async_read_stats(). */
LT_MUST lt_status lt__host_read_stats(lt_host *host, int group, lt_async_stats *stats);
/* A copy of tensor i of the state in ctx; see lt_async_state(). */
lt_tensor *lt__host_state(lt_host *host, lt_ctx *ctx, int i, char name[LT_ASYNC_NAME]);
/* Restores a state; see lt_async_restore(). */
LT_MUST lt_status lt__host_restore(lt_host *host, const char *const *names,
                                   lt_tensor *const *tensors, int n, int *fresh);

#endif
