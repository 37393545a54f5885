/* server.h - the server of asynchronous training: the order of events, and the rule by which it
 * updates the parameters of an optimizer. It has no thread of its own. Private to dist.
 */
#ifndef LT_DIST_ASYNC_SERVER_H
#define LT_DIST_ASYNC_SERVER_H

#include "dist/async.h"
#include "dist/async/gradient.h"
#include "dist/async/order.h"
#include "dist/async/rule.h"

typedef struct lt_server {
    lt_ctx *ctx;     /* of the optimizer; borrowed */
    lt_optim *optim; /* whose parameters it updates; borrowed */
    lt_order *order;
    lt_rule_state *rule;
    int64_t base; /* steps that the optimizer took before version 0 */
} lt_server;

/* Opens *server for config->workers workers. LT_EUSAGE for a wrong setting; LT_ENOMEM. On failure
 * nothing is open. */
LT_MUST lt_status lt__server_open(lt_server *server, lt_ctx *ctx, lt_optim *optim,
                                  const lt_async_config *config);
void lt__server_close(lt_server *server); /* may be not open */

/* Answers the oldest pull that can be answered; *any is false if there is none. The worker must
 * read the values of the parameters before the next push. */
LT_MUST lt_status lt__server_grant(lt_server *server, lt_grant *grant, bool *any);
/* Takes push `number` of a worker, and applies its gradient unless it is skipped or dropped. */
LT_MUST lt_status lt__server_push(lt_server *server, int worker, int64_t number,
                                  const lt_gradient *gradient, lt_push *push);

/* Applies a gradient. version: number of versions made before; delay: how many of them were made
 * since its worker's pull. For callers that do not use the order. */
LT_MUST lt_status lt__server_apply(lt_server *server, int worker, const lt_gradient *gradient,
                                   int64_t version, int64_t delay);

/* Number of steps of the optimizer: see lt_async_steps(). */
int64_t lt__server_steps(const lt_server *server);
/* Adds the statistics of the rule to *stats; see lt_async_read_stats(). */
LT_MUST lt_status lt__server_stats(lt_server *server, int group, lt_async_stats *stats);

/* Number of tensors of the state. */
int lt__server_state_count(const lt_server *server);
/* Tensor i of the state; see lt_async_state(). numbers (n_numbers): further numbers to save. */
lt_tensor *lt__server_state(const lt_server *server, int i, const double *numbers, int n_numbers,
                            char name[LT_ASYNC_NAME]);
/* LT_EFILE: a checkpoint has no valid tensor `name`. */
lt_status lt__server_damaged(const char *name);
/* Restores a state; see lt_async_restore(). */
LT_MUST lt_status lt__server_restore(lt_server *server, const char *const *names,
                                     lt_tensor *const *tensors, int n, double *numbers,
                                     int n_numbers, int *fresh);

#endif
