/* worker.h - what simulated and live asynchronous training have in common: the part of a
 * step (autograd/step.h) of the context that computes. Private to dist.
 */
#ifndef LT_DIST_ASYNC_WORKER_H
#define LT_DIST_ASYNC_WORKER_H

#include "dist/async.h"
#include "dist/async/gradient.h"
#include "dist/async/rule.h"

/* The functions of simulated or live training; see async.h. */
typedef struct lt_async_kind_of {
    lt_status (*next)(lt_async *async, lt_async_event *event);
    lt_status (*push)(lt_async *async);
    lt_status (*set_limit)(lt_async *async, int64_t tickets);
    int64_t (*done_below)(const lt_async *async);
    int64_t (*steps)(const lt_async *async);
    lt_tensor *(*state)(const lt_async *async, int i, char name[LT_ASYNC_NAME]);
    lt_status (*restore)(lt_async *async, const char *const *names, lt_tensor *const *tensors,
                         int n, int *fresh);
    lt_status (*read_stats)(lt_async *async, int group, lt_async_stats *stats);
    void (*free)(lt_async *async);
    lt_status (*keep_at)(lt_async *async, int64_t ticket); /* or NULL, like all below */
    lt_status (*read_kept)(lt_async *async, int64_t ticket);
    void (*forget)(lt_async *async, int64_t ticket);
    lt_status (*read)(lt_async *async);
    void (*stop)(lt_async *async, int code);
    void (*stop_at)(lt_async *async, int64_t version, int code);
    void (*pause)(lt_async *async, bool on);
    bool (*poll)(lt_async *async, lt_async_event *event);
    lt_status (*release)(lt_async *async);
    lt_status (*finish)(lt_async *async);
} lt_async_kind_of;

struct lt_async { /* the first member of a simulation, a replay or a live run */
    const lt_async_kind_of *of;
    lt_ctx *ctx;
    lt_optim *optim; /* borrowed */
    lt_rule rule;
    lt_status status; /* of an earlier failure */
    /* The batch that the caller computes: */
    lt_gradient *gradient; /* to be stored; NULL if the caller computes nothing */
    int64_t ticket;
    double loss, lr;
    bool has_backward, stepped; /* a backward has begun; it has taken the optimizer step */
    int rank;                   /* for injected faults; -1: none */
    int64_t computed;           /* batches that the caller has begun */
    /* To detect writes of the caller to the net, which are errors once training has begun: */
    lt_tensor **buffers; /* (n_buffers) of the net; kept */
    int n_buffers;
    bool has_begun;
    uint32_t written; /* number of writes to the net that were ours or were accepted */
};

/* Sets the exchange of async->ctx. */
LT_MUST lt_status lt__async_set_part(lt_async *async);
/* Starts the computation of a ticket, whose gradient will be stored in *gradient. */
void lt__async_begin(lt_async *async, int64_t ticket, lt_gradient *gradient);
/* Ends it. LT_EUSAGE if there was no optimizer step. */
LT_MUST lt_status lt__async_end(lt_async *async);

/* Starts a simulation. New. NULL with the errors of lt_async_new(). The caller sets the common
 * members afterwards. */
lt_async *lt__simulation_new(lt_ctx *ctx, lt_optim *optim, const lt_async_config *config);
/* The same for a replay and for live training. */
lt_async *lt__replay_new(lt_ctx *ctx, lt_optim *optim, const lt_async_config *config);
lt_async *lt__live_new(lt_ctx *ctx, lt_optim *optim, const lt_async_config *config);

#endif
