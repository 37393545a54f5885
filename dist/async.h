/* async.h - asynchronous training. Included by dist.h.
 *
 * Workers compute gradients of different batches at the same time, each from the newest weights
 * when it begins. A server applies each gradient when it arrives, although the weights have changed
 * since. A rule says how. Batches are numbered by tickets, in the order of the data; each ticket is
 * applied once. A step is one applied gradient.
 */
#ifndef LUATRAIN_ASYNC_H
#define LUATRAIN_ASYNC_H

#include "autograd/autograd.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lt_async lt_async;
struct lt_group;

enum { LT_ASYNC_UNBOUNDED = -1, LT_ASYNC_HELD = 4 };

typedef struct lt_async_step { /* a step of a trace; step i makes version i + 1 */
    int worker;
    int64_t ticket;
    int64_t read; /* version of the weights from which its gradient was computed */
} lt_async_step;

typedef struct lt_async_config { /* zero means default, except for staleness and drop */
    const char *rule;            /* such as "ddc"; borrowed for the call. Required */
    double lam;        /* strength of delay compensation; the default depends on the rule */
    int64_t staleness; /* no applied gradient is older than this; LT_ASYNC_UNBOUNDED */
    int64_t drop;      /* from 1: gradients of this delay or more are dropped; LT_ASYNC_UNBOUNDED */
    int held;          /* tickets that a worker holds at a time, 1 to LT_ASYNC_HELD; default 1 */
    int64_t window;    /* no ticket is issued that is this far above the lowest one that is not
                        * done: workers wait. 0: unbounded */
    int64_t steps;     /* that the optimizer took before this call, including those of the
                        * training that lt_async_restore() continues */

    lt_tensor *const *buffers; /* (n_buffers) of the net, such as running statistics; the same on
                                * all ranks. Kept, but the list is borrowed for the call */
    int n_buffers;

    /* Live: the ranks of a group are the workers. */
    struct lt_group *group; /* borrowed; NULL: a simulation */
    const bool *lost;       /* (ranks) on rank 0: which ones were lost in an earlier run; borrowed
                             * for the call. NULL: none */
    lt_ctx *server;         /* on rank 0: an unused context on the CPU with the same ops. Taken */

    /* Replay: this process computes the steps of a trace, in their order. */
    const lt_async_step *trace; /* (n_trace) borrowed for the call; NULL: a simulation */
    int64_t n_trace;

    /* Simulation: this process computes for all workers, one after the other, under a virtual
     * clock. Worker i takes times[i % n_times] * exp(sigma * N(0, 1)) seconds for a batch. */
    int workers;         /* at least 1 */
    double sigma;        /* 0 to 10 */
    const double *times; /* (n_times) positive; borrowed for the call. NULL: 1 s for each worker */
    int n_times;
} lt_async_config;

typedef enum lt_async_kind {
    LT_ASYNC_COMPUTE, /* compute the gradient of a batch, and take an optimizer step */
    LT_ASYNC_PUSH,    /* a gradient has arrived and was applied, skipped or dropped */
    LT_ASYNC_LOST,    /* a worker has failed, or was silent for too long (`dropped`); its tickets,
                       * as many as `ticket` says, are issued again */
    LT_ASYNC_STOP,    /* training is stopped; ticket: the code of lt_async_stop(). On rank 0, with
                       * worker > 0: that rank has called lt_async_stop(); training continues */
    LT_ASYNC_DONE     /* every ticket is applied or skipped, or rank 0 has finished */
} lt_async_kind;

typedef struct lt_async_event {
    lt_async_kind kind;
    int worker;
    int64_t ticket;
    int64_t read; /* version of the weights that the worker reads or has read */
    /* COMPUTE: tickets that the worker will compute after this one */
    int64_t reserved[LT_ASYNC_HELD - 1];
    int n_reserved;
    /* PUSH: */
    int64_t applied;    /* version that the push made; 0 if it was skipped or dropped */
    int64_t delay;      /* versions made between the worker's pull and this push */
    bool dropped;       /* its ticket is issued again */
    int64_t done_below; /* every ticket below this one is applied or skipped */
    double loss, lr;    /* loss: sum over the batch's backward passes; lr: see
                         * lt_async_set_lr() */
    double time;        /* in seconds: virtual; live: of a clock with an arbitrary zero */
} lt_async_event;

/* LT_EUSAGE if this is not the name of a rule; the message lists all names. */
LT_MUST lt_status lt_async_check_rule(const char *rule);
/* Starts asynchronous training in ctx, whose exchange it becomes (lt_set_part()). Steps of optim
 * are applied by the rule; other optimizers cannot take steps meanwhile. ctx is kept; optim is
 * borrowed. New. NULL with LT_EUSAGE for a wrong rule or number, or an optimizer that the rule does
 * not support; LT_EINVAL for NULL, an invalid list or number of steps, or a context that has an
 * exchange; LT_ENOMEM. */
LT_API lt_async *lt_async_new(lt_ctx *ctx, lt_optim *optim, const lt_async_config *config);
/* Ends live training on all ranks: each one calls it, and then has the final values, buffers and
 * optimizer slots of the server. Rank 0 stops the workers that are still training. The other ranks
 * block until rank 0 calls it; the tickets that they hold are issued again. LT_EPEER if rank 0 is
 * lost; the server's error. LT_EINVAL if the caller has written to the net, but training has ended
 * then too. In a simulation it only checks for such writes. */
LT_MUST lt_status lt_async_finish(lt_async *async);
/* Removes it from ctx. A live rank that has not finished is lost to the others; if it is rank 0,
 * all of them fail. NULL is allowed. */
LT_API void lt_async_free(lt_async *async);
/* Sets the number of tickets; it must not decrease. On rank 0 of a live run, the first call begins
 * the training, from the values that the net has then. The net must have the same values on all
 * ranks, or rank 0 gets LT_EDESYNC. Until lt_async_finish(), the caller must not write to the
 * parameters and buffers: the next function of async.h that uses or overwrites them would fail with
 * LT_EINVAL. LT_EINVAL if the number decreases; the device's error. */
LT_MUST lt_status lt_async_set_limit(lt_async *async, int64_t tickets);
/* Continues until the next event. After COMPUTE, the caller runs forward and backward on the batch
 * of the ticket and calls lt_optim_step() once before it calls this again. lt_step() is the ticket,
 * so random numbers depend on it. The net has the weights of version `read` then. After PUSH, the
 * net has the weights that the server has now. LT_EINVAL if the optimizer step is missing; the
 * errors of kernels; LT_ENOMEM. */
LT_MUST lt_status lt_async_next(lt_async *async, lt_async_event *event);
/* Sets the learning rate that the PUSH event of the current ticket reports. Call it after the
 * optimizer step. The default is the lr of group 0, which may differ from the optimizer's. */
LT_API void lt_async_set_lr(lt_async *async, double lr);
/* Ends the computation of a ticket: pushes its gradient. lt_async_next() does so, too, but that may
 * be much later if the caller evaluates first. The errors of lt_async_next(). */
LT_MUST lt_status lt_async_push(lt_async *async);
/* Live: gives the tickets back that this rank holds, to be issued again. Call it before a
 * long operation, such as an evaluation, and when a batch is abandoned. The next call of
 * lt_async_next() gets others. In a simulation it does nothing. LT_ENOMEM. */
LT_MUST lt_status lt_async_release(lt_async *async);
/* Rank 0, live: plans a snapshot of the server's values, to evaluate them. It is taken when all
 * tickets below `ticket` are done. lt_async_read_kept() writes it to the net. It is part of the
 * state for a checkpoint until lt_async_forget() frees it. In a simulation all three do nothing.
 * LT_EINVAL if the snapshot was not planned or has not been taken yet; LT_ENOMEM. */
LT_MUST lt_status lt_async_keep_at(lt_async *async, int64_t ticket);
LT_MUST lt_status lt_async_read_kept(lt_async *async, int64_t ticket);
LT_API void lt_async_forget(lt_async *async, int64_t ticket);
/* Whether the caller has written to the net since training began. If so, the next function of
 * async.h that uses the net fails, unless lt_async_accept_writes() is called first. Call that only
 * after the writes have restored the values of the net. */
LT_API bool lt_async_is_written(const lt_async *async);
LT_API void lt_async_accept_writes(lt_async *async);
/* Rank 0, live: writes the server's current values and slots to the net and the optimizer, to save
 * them. In a simulation, or before the training begins, it does nothing. */
LT_MUST lt_status lt_async_read(lt_async *async);
/* Rank 0, live: suspends the server, or continues it. While it is suspended, lt_async_poll()
 * returns the pushes and lost workers that were not reported yet, without waiting. False if there
 * are none; then the server's state is that after all events so far, and can be saved. In a
 * simulation both do nothing. */
LT_API void lt_async_pause(lt_async *async, bool on);
LT_API bool lt_async_poll(lt_async *async, lt_async_event *event);
/* Rank 0, live: stops training as soon as this version is made, as lt_async_stop() does. Gradients
 * that arrive later are ignored. */
LT_API void lt_async_stop_at(lt_async *async, int64_t version, int code);
/* Rank 0: stops training. Each worker gets LT_ASYNC_STOP, with this code as its ticket, when it has
 * pushed. Another rank: rank 0 gets LT_ASYNC_STOP with this code, and decides. */
LT_API void lt_async_stop(lt_async *async, int code);
/* Every ticket below this one is applied or skipped. On rank 0. */
LT_API int64_t lt_async_done_below(const lt_async *async);
/* Number of steps that the optimizer has taken: config->steps, and one for each gradient that was
 * applied since. On ranks other than 0, lt_async_finish() adds the latter. */
LT_API int64_t lt_async_steps(const lt_async *async);

typedef struct lt_async_stats { /* of rank 0, or of a simulation */
    size_t worker_bytes;        /* memory that the rule takes on the server, per worker */
    int64_t wire_bytes;         /* of messages between rank 0 and the other ranks */
    double strength;            /* of ddc's compensation, |c| / |g|: mean over steps and tensors */
    double capped;              /* share of them whose compensation was limited */
} lt_async_stats;
/* Reads statistics. strength and capped are those of a group of the optimizer since the last call
 * for that group, and 0 for other rules. LT_EINVAL for a negative group; the device's error. */
LT_MUST lt_status lt_async_read_stats(lt_async *async, int group, lt_async_stats *stats);

/* Tensor i of the state, for a checkpoint, and its name. New. NULL past the last one, with an empty
 * name, or with LT_ENOMEM, or LT_EINVAL as in lt_async_set_limit(). With the parameters and the
 * optimizer's slots, these tensors are the state of the server. Only rank 0 has one. A replay has
 * none. */
enum { LT_ASYNC_NAME = 48 };
LT_API lt_tensor *lt_async_state(const lt_async *async, int i, char name[LT_ASYNC_NAME]);
/* Restores a state from the tensors (n) of a checkpoint. Call it before the first event. All
 * workers start anew: the tickets that they held are issued again. Their number, rule and bounds
 * may differ from those of the checkpoint. The number of tickets becomes at least that of the
 * tickets issued so far. *fresh: the number of tensors that it does not have; they start at zero.
 * LT_EFILE if the state is damaged or does not fit the optimizer; LT_EUSAGE for a replay;
 * LT_ENOMEM. */
LT_MUST lt_status lt_async_restore(lt_async *async, const char *const *names,
                                   lt_tensor *const *tensors, int n, int *fresh);

#ifdef __cplusplus
}
#endif
#endif
