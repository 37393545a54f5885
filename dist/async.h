/* async.h - asynchronous training. Included by dist.h.
 *
 * Workers compute gradients of different batches at the same time. A worker reads the newest
 * weights when it begins a batch. Other workers may change the weights before its gradient arrives;
 * a rule defines how the server applies such a gradient. Batches are numbered by tickets, in the
 * order of the data. Each ticket is applied or skipped once. A step is one applied gradient.
 */
#ifndef LUATRAIN_ASYNC_H
#define LUATRAIN_ASYNC_H

#include "autograd/autograd.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lt_async lt_async;
struct lt_group;

enum { LT_ASYNC_UNBOUNDED = -1, LT_ASYNC_MAX_PREFETCH = 4, LT_ASYNC_HOST = 64 };

typedef struct lt_async_step { /* a step of a trace; step i makes version i + 1 */
    int worker;
    int64_t ticket;
    int64_t read; /* version of the weights from which its gradient was computed */
} lt_async_step;

typedef struct lt_async_config {
    const char *rule;  /* name of a rule, such as "ddc"; borrowed for the call. Required */
    double lam;        /* strength of delay compensation; 0 means the default of the rule */
    int64_t staleness; /* largest allowed delay of an applied gradient, at least 0; or
                        * LT_ASYNC_UNBOUNDED. Workers wait if they might exceed it */
    int64_t drop;      /* smallest delay at which gradients are dropped, at least 1; or
                        * LT_ASYNC_UNBOUNDED */
    int prefetch; /* tickets that a worker holds at a time, 1 to LT_ASYNC_MAX_PREFETCH; 0 means 1 */
    int64_t max_lead; /* a worker waits instead of getting a ticket that is this far above the
                        * lowest unfinished ticket; 0 means no limit */
    int64_t steps;    /* optimizer steps before this call, including steps of the training that
                        * lt_async_restore() continues */

    lt_tensor *const *buffers; /* (n_buffers) the net's buffers, such as running statistics; the
                                * same on all ranks. Kept; the list is borrowed for the call */
    int n_buffers;

    /* Live: the ranks of a group are the workers. In an elastic job, they are the ranks that have
     * joined, and one of them may join, be lost and come back at any time. */
    struct lt_group *group; /* borrowed; NULL: no live training */
    const bool *lost;       /* (ranks) on rank 0: whether each rank was lost in an earlier run;
                             * borrowed for the call. NULL: no rank was lost */
    lt_ctx *server;         /* required on rank 0: an unused CPU context with the same ops. Taken */

    /* Replay: this process computes the steps of a trace, in their order. */
    const lt_async_step *trace; /* (n_trace) borrowed for the call; NULL: a simulation */
    int64_t n_trace;

    /* Simulation: this process computes for all workers, one after the other, under a virtual
     * clock. Worker i takes times[i % n_times] * exp(sigma * N(0, 1)) seconds for a batch. */
    int workers;         /* number of workers, at least 1; also for a replay */
    double sigma;        /* spread of the times, 0 to 10 */
    const double *times; /* (n_times) positive; borrowed for the call. NULL: 1 s for each worker */
    int n_times;
    /* Simulation: the messages. Worker i has the link rates[i % n_rates] bytes per second, in each
     * direction, with latencies[i % n_latencies] seconds. Without them, messages take no time */
    const double *rates; /* (n_rates) positive; INFINITY: the worker is on the server's host.
                          * Borrowed for the call, like latencies. NULL: INFINITY for each worker */
    int n_rates;
    const double *latencies; /* (n_latencies) at least 0. NULL: 0 for each worker */
    int n_latencies;
    double service;     /* seconds in which the server applies a gradient and answers the pull that
                         * follows. It does so for one worker at a time. At least 0 */
    double server_rate; /* bytes per second, in each direction, of the link that the messages of all
                         * workers share; 0: no limit */
} lt_async_config;

typedef enum lt_async_kind {
    LT_ASYNC_EVENT_COMPUTE, /* compute the gradient of a batch, and take an optimizer step */
    LT_ASYNC_EVENT_PUSH,    /* a gradient has arrived and was applied, skipped or dropped */
    LT_ASYNC_EVENT_LOST,    /* a worker has failed; its tickets are issued again */
    LT_ASYNC_EVENT_JOINED,  /* a worker has joined an elastic job: see lt_serve_open() */
    LT_ASYNC_EVENT_STOP,    /* training is stopped. On rank 0, if worker > 0, rank `worker` has
                             * called lt_async_stop(), and training continues */
    LT_ASYNC_EVENT_DONE     /* every ticket is applied or skipped, or rank 0 has finished */
} lt_async_kind;

typedef struct lt_async_event {
    lt_async_kind kind;
    int worker;
    int64_t ticket; /* COMPUTE and PUSH */
    int64_t read;   /* version of the weights that the worker reads or has read */
    /* COMPUTE: tickets that the worker will compute after this one */
    int64_t prefetched[LT_ASYNC_MAX_PREFETCH - 1];
    int n_prefetched;
    /* PUSH: */
    int64_t applied;    /* version that the push made; 0 if it was skipped or dropped */
    int64_t delay;      /* versions made between the worker's pull and this push */
    bool dropped;       /* the gradient was too old, and its ticket is issued again */
    int64_t done_below; /* every ticket below this one is applied or skipped */
    double loss, lr;    /* loss: sum over the batch's backward passes; lr: see
                         * lt_async_set_lr() */
    double time;        /* seconds since an arbitrary start; virtual in a simulation */
    /* LOST: */
    int n_returned; /* number of tickets that the worker held */
    bool timed_out; /* rank 0 heard nothing from it for too long */
    /* JOINED and LOST: */
    char host[LT_ASYNC_HOST]; /* the machine of a worker of an elastic job, else "" */
    /* STOP: */
    int code; /* see lt_async_stop() */
} lt_async_event;

/* LT_EUSAGE if no rule has this name; the message lists all names. */
LT_MUST lt_status lt_async_check_rule(const char *rule);
/* Starts asynchronous training, which sets the exchange of ctx (lt_set_part()). The rule applies
 * the steps of optim; meanwhile, other optimizers cannot take steps. ctx is kept; optim is
 * borrowed. New. NULL with LT_EUSAGE for a wrong rule or number, or an optimizer that the rule does
 * not support; LT_EINVAL for NULL, an invalid list or number of steps, or a context that has an
 * exchange; LT_ENOMEM. */
LT_API lt_async *lt_async_new(lt_ctx *ctx, lt_optim *optim, const lt_async_config *config);
/* Ends live training. Every rank calls it, and gets the final values, buffers and optimizer slots
 * of the server. Rank 0 stops the workers that are still training. The other ranks block until rank
 * 0 calls it; the tickets that they hold are issued again. LT_EPEER if rank 0 is lost; or the
 * server's error. LT_EINVAL if the caller has written to the net; training ends in this case, too.
 * In a simulation, the function only checks for such writes. */
LT_MUST lt_status lt_async_finish(lt_async *async);
/* Removes async from ctx and frees it. If a live rank has not finished, the others lose it; if this
 * is rank 0, all of them fail. NULL is allowed. */
LT_API void lt_async_free(lt_async *async);
/* Sets the number of tickets, which must not decrease. On rank 0 of a live run, the first call
 * begins the training, from the current values of the net. The net must have the same values on all
 * ranks; otherwise rank 0 gets LT_EDESYNC. Until lt_async_finish(), the caller must not write to
 * the parameters and buffers; otherwise the next function of async.h that uses or overwrites them
 * fails with LT_EINVAL. LT_EINVAL if the number decreases; the device's error. */
LT_MUST lt_status lt_async_set_limit(lt_async *async, int64_t tickets);
/* Continues until the next event. After COMPUTE, the net has the weights of version `read`. The
 * caller runs forward and backward on the batch of the ticket, and calls lt_optim_step() once
 * before the next call. lt_step() is the ticket, so random numbers depend on it. After PUSH, in a
 * simulation or a replay, the net has the updated weights. LT_EINVAL if the optimizer step is
 * missing; the errors of kernels; LT_ENOMEM. */
LT_MUST lt_status lt_async_next(lt_async *async, lt_async_event *event);
/* Sets the learning rate that the PUSH event of the current ticket reports. Call it after the
 * optimizer step, which sets this rate to the lr of group 0. */
LT_API void lt_async_set_lr(lt_async *async, double lr);
/* Pushes the gradient of the current ticket now. Without this call, lt_async_next() pushes it,
 * which is much later if the caller evaluates first. Fails with the errors of lt_async_next(). */
LT_MUST lt_status lt_async_push(lt_async *async);
/* Live: gives back the tickets that this rank holds, so that they are issued again. Call it before
 * a long operation, such as an evaluation, and when the caller abandons a batch. The next
 * lt_async_next() gets new tickets. Does nothing in a simulation. LT_ENOMEM. */
LT_MUST lt_status lt_async_release(lt_async *async);
/* Rank 0, live: plans a snapshot of the server's values, for an evaluation. The server takes it
 * when all tickets below `ticket` are done. lt_async_load_snapshot() writes the snapshot to the
 * net. Checkpoints include it until lt_async_free_snapshot() frees it. All three functions do
 * nothing in a simulation. LT_EINVAL if the snapshot was not planned or has not been taken yet;
 * LT_ENOMEM. */
LT_MUST lt_status lt_async_snapshot_at(lt_async *async, int64_t ticket);
LT_MUST lt_status lt_async_load_snapshot(lt_async *async, int64_t ticket);
LT_API void lt_async_free_snapshot(lt_async *async, int64_t ticket);
/* Whether the caller has written to the net since training began. If so, the next function of
 * async.h that uses the net fails, unless lt_async_accept_writes() is called first. Call
 * lt_async_accept_writes() only if the writes have restored the values of the net. */
LT_API bool lt_async_is_written(const lt_async *async);
LT_API void lt_async_accept_writes(lt_async *async);
/* Rank 0, live: copies the server's current values and slots to the net and the optimizer, so that
 * they can be saved. Does nothing in a simulation, and before the training begins. */
LT_MUST lt_status lt_async_read(lt_async *async);
/* Rank 0, live: suspends the server, or continues it. While the server is suspended, each call of
 * lt_async_poll() gets, without waiting, one event that lt_async_next() has not reported: a push, a
 * worker that was lost or has joined, or a request to stop. After the last event it returns false.
 * The server's state then includes all reported events, and can be saved. Both functions do nothing
 * in a simulation. */
LT_API void lt_async_pause(lt_async *async, bool on);
LT_API bool lt_async_poll(lt_async *async, lt_async_event *event);
/* Rank 0, live: stops training with this code, like lt_async_stop(), as soon as the server has made
 * this version of the weights. The server ignores gradients that arrive later. */
LT_API void lt_async_stop_at(lt_async *async, int64_t version, int code);
/* On rank 0, stops training: each worker gets LT_ASYNC_EVENT_STOP with this code after its push. If
 * another rank calls the function, rank 0 gets LT_ASYNC_EVENT_STOP with this code and worker > 0,
 * and decides whether to stop. */
LT_API void lt_async_stop(lt_async *async, int code);
/* Returns a ticket: every ticket below it is applied or skipped. 0 on ranks other than 0. */
LT_API int64_t lt_async_done_below(const lt_async *async);
/* Number of steps that the optimizer has taken: config->steps, plus one for each gradient applied
 * since. On ranks other than 0, the number does not change before lt_async_finish(). */
LT_API int64_t lt_async_steps(const lt_async *async);

typedef struct lt_async_stats { /* statistics of the server; zeros on ranks without one */
    size_t worker_bytes;        /* memory that the rule takes on the server, per worker */
    int64_t wire_bytes;         /* bytes of the messages between rank 0 and the other ranks */
    double strength;            /* ddc: strength |c| / |g| of the compensation, as the mean over
                                 * steps and parameters */
    double capped;              /* ddc: fraction of the compensations that were limited */
    /* Since training began in this process: */
    double server_busy; /* fraction of the time in which the server handles messages */
    /* Simulation: fractions of the time of all workers, up to their last push */
    double link_share;  /* in which messages are on links */
    double queue_share; /* in which gradients wait for the server, or the server applies them */
} lt_async_stats;
/* Reads statistics. strength and capped cover the parameters of one group since the last call for
 * this group; they are 0 for rules other than ddc. LT_EINVAL for a negative group; the device's
 * error. */
LT_MUST lt_status lt_async_read_stats(lt_async *async, int group, lt_async_stats *stats);

/* Tensor i of the state, for a checkpoint, and its name. New. Past the last one, NULL with an empty
 * name. On failure, NULL with a name and LT_ENOMEM, or LT_EINVAL as in lt_async_set_limit(). These
 * tensors, the parameters and the optimizer's slots are the state of the server. Ranks other than 0
 * and replays have no state. */
enum { LT_ASYNC_NAME = 48 };
LT_API lt_tensor *lt_async_state(const lt_async *async, int i, char name[LT_ASYNC_NAME]);
/* The number of tickets that were issued before a state was saved, from its tensor "order". -1 if
 * this tensor is damaged. */
LT_API int64_t lt_async_issued(lt_tensor *order);
/* Restores a state from the tensors (n) of a checkpoint. Call it before the first event. All
 * workers start anew, and the tickets that they held are issued again. The number of workers, the
 * rule and the bounds may differ from the checkpoint. If the number of tickets is less than the
 * number issued so far, it is raised to the number issued. *fresh is the number of arrays of the
 * rule's state that the checkpoint lacks; these arrays start at zero. LT_EFILE if the state is
 * damaged or does not fit the optimizer; LT_EUSAGE for a replay; LT_ENOMEM. */
LT_MUST lt_status lt_async_restore(lt_async *async, const char *const *names,
                                   lt_tensor *const *tensors, int n, int *fresh);

/* ==== A simulated synchronous parameter server ================================================ */

/* The virtual clock of synchronous training with a parameter server, see lt_reducer_config.server:
 * in each step, all workers get `bytes` bytes from the server, compute, and send `bytes` bytes to
 * it. Computing and messages do not overlap. The clock only keeps the time; the caller trains. */
typedef struct lt_server_clock lt_server_clock;
/* Uses the seed of ctx, and the workers, times and links of config; times[i] is the time of worker
 * i for its part of a batch. time: seconds at which it starts. New. NULL with LT_EUSAGE for a
 * number that is out of range; LT_ENOMEM. */
LT_API lt_server_clock *lt_server_clock_new(const lt_ctx *ctx, const lt_async_config *config,
                                            size_t bytes, double time);
LT_API void lt_server_clock_free(lt_server_clock *clock); /* NULL is allowed */
/* The time in seconds at which the server has handled the last gradient of a step. step is its
 * number: random times depend on it. */
LT_API double lt_server_clock_step(lt_server_clock *clock, int64_t step);
/* Sets server_busy, link_share and queue_share of *stats, and all other members to zero. */
LT_API void lt_server_clock_stats(const lt_server_clock *clock, lt_async_stats *stats);

#ifdef __cplusplus
}
#endif
#endif
