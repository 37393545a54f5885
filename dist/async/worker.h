/* worker.h - what simulated, replayed and live asynchronous training have in common, such as the
 * part of a step (autograd/step.h) of the context that computes. Private to dist.
 */
#ifndef LT_DIST_ASYNC_WORKER_H
#define LT_DIST_ASYNC_WORKER_H

#include "dist/async.h"
#include "dist/async/server_loop.h"

typedef struct lt_async_mode { /* a simulation, a replay or live training */
    size_t bytes;              /* size of its struct, which begins with an lt_async */
    /* Opens it; the common members are set, the others are zero. The errors of lt_async_new() */
    lt_status (*open)(lt_async *async, const lt_async_config *config);
    void (*close)(lt_async *async);                            /* async may be only partly open */
    lt_status (*next)(lt_async *async, lt_async_event *event); /* see async.h */
    lt_status (*set_limit)(lt_async *async, int64_t tickets);
    /* Sends the gradient of a batch that has ended. This and the functions below may be NULL */
    lt_status (*push)(lt_async *async, lt_gradient *gradient);
    lt_status (*release)(lt_async *async);
    lt_status (*finish)(lt_async *async);
    void (*stop)(lt_async *async, int code);
    bool (*poll)(lt_async *async, lt_async_event *event);
    /* Adds the shares of time; the server is locked */
    void (*add_stats)(const lt_async *async, lt_async_stats *stats);
    bool has_no_state; /* there is nothing to save */
} lt_async_mode;

extern const lt_async_mode lt__simulation, lt__replay, lt__live;

struct lt_async {
    const lt_async_mode *mode;
    lt_ctx *ctx;
    lt_image net; /* net of the caller */
    lt_rule rule;
    lt_status status;     /* the first failure, or LT_OK */
    lt_server *server;    /* NULL on ranks other than 0 of a live run */
    lt_server_loop *loop; /* owner of the server on rank 0 of a live run; or NULL */
    int64_t steps;        /* steps of the optimizer, if there is no server */
    /* The batch that the caller computes: */
    lt_gradient *gradient; /* where to store its gradient; NULL if the caller computes none */
    int64_t ticket;
    bool has_backward, stepped; /* a backward has begun; it has taken the optimizer step */
    int rank;                   /* rank for injected faults; -1 without faults */
    int64_t computed;           /* batches that the caller has begun */
    /* To detect writes of the caller to the net, which are errors once training has begun: */
    bool has_begun;
    uint32_t written; /* number of writes to the net that were ours or were accepted */
};

/* Sets the exchange of async->ctx. */
LT_NODISCARD lt_status lt__async_set_part(lt_async *async);
/* Starts the computation of ticket[0], and makes the event. grant: the worker, the version that it
 * reads and its tickets. The gradient will be stored in *gradient. */
void lt__async_begin(lt_async *async, const lt_grant *grant, lt_gradient *gradient,
                     lt_async_event *event);

#endif
