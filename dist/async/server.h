/* server.h - the server of asynchronous training: the order of events, and the rule by which it
 * updates the parameters of an optimizer. It has no thread of its own. Private to dist.
 */
#ifndef LT_DIST_ASYNC_SERVER_H
#define LT_DIST_ASYNC_SERVER_H

#include "dist/async.h"
#include "dist/async/gradient.h"
#include "dist/async/order.h"
#include "dist/async/rule.h"
#include "dist/async/snapshots.h"

typedef struct lt_server { /* all zeros: not open */
    const lt_image *net;   /* the net that it updates; borrowed */
    lt_order *order;
    lt_rule_state *rule;
    lt_snapshots snapshots;
    int64_t base;       /* steps that the optimizer took before version 0 */
    int64_t done_below; /* every ticket below this one is applied or skipped */
    double time;        /* virtual seconds of a simulation; otherwise 0 */
} lt_server;

/* Opens *server for config->workers workers. LT_EUSAGE for a wrong setting; LT_ENOMEM. On failure
 * nothing is open. */
LT_NODISCARD lt_status lt__server_open(lt_server *server, const lt_image *net,
                                       const lt_async_config *config);
void lt__server_close(lt_server *server); /* does nothing if server is not open */

/* Answers the oldest pull that can be answered; *any is false if there is none. The worker must
 * read the values of the parameters before the next push. */
LT_NODISCARD lt_status lt__server_grant(lt_server *server, lt_grant *grant, bool *any);
/* Takes push `number` of a worker, applies its gradient unless it is skipped or dropped, and takes
 * the snapshots whose moment has come. */
LT_NODISCARD lt_status lt__server_push(lt_server *server, int worker, int64_t number,
                                       const lt_gradient *gradient, lt_push *push);
/* The event of this push, right after it. read: the version that the worker has read. The caller
 * sets the time. */
lt_async_event lt__server_event(const lt_server *server, const lt_push *push, int worker,
                                int64_t read, const lt_gradient *gradient);

/* Applies a gradient. version: number of versions made before; delay: number of versions made since
 * its worker's pull. For callers that do not use the order. */
LT_NODISCARD lt_status lt__server_apply(lt_server *server, int worker, const lt_gradient *gradient,
                                        int64_t version, int64_t delay);

/* Number of steps of the optimizer: see lt_async_steps(). */
int64_t lt__server_steps(const lt_server *server);
/* Adds the statistics of the rule to *stats; see lt_async_read_stats(). */
LT_NODISCARD lt_status lt__server_stats(lt_server *server, int group, lt_async_stats *stats);

/* Tensor i of the state; see lt_async_state(). */
lt_tensor *lt__server_state(const lt_server *server, int i, char name[LT_ASYNC_NAME]);
/* Restores a state; see lt_async_restore(). with_snapshots: also the snapshots that it has. */
LT_NODISCARD lt_status lt__server_restore(lt_server *server, const char *const *names,
                                          lt_tensor *const *tensors, int n, bool with_snapshots,
                                          int *fresh);

#endif
