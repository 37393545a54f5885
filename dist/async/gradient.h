/* gradient.h - a stored gradient: what one optimizer step of a worker passes to the server. Private
 * to dist.
 */
#ifndef LT_DIST_ASYNC_GRADIENT_H
#define LT_DIST_ASYNC_GRADIENT_H

#include "dist/async/flat.h"

typedef struct lt_gradient { /* all zeros: empty */
    lt_flat flat;
    bool *present;          /* (parameters) whether each one has a gradient */
    int n_groups, capacity; /* groups whose options are stored, */
    lt_opt *opt;            /* (n_groups, LT_MAX_OPT) */
    const lt_opt **options; /* (n_groups) pointers into opt */
    lt_bn_stats *bn;        /* (n_bn) batch-norm statistics; the tensors are kept */
    int n_bn, bn_capacity;
    bool skip; /* the worker skipped the step: there is no gradient */
} lt_gradient;

/* Stores the gradient of a step, for lt_step_part.apply: copies the gradients of optim times
 * factor, the options and the pending batch-norm statistics of ctx. Reuses memory of an earlier
 * call. LT_ENOMEM, or the device's error. */
LT_MUST lt_status lt__gradient_store(lt_gradient *g, lt_ctx *ctx, lt_optim *optim,
                                     const lt_opt *const *options, lt_step_status step_status,
                                     double factor);
/* Allocates memory for a gradient of optim with options of n_groups groups; or for the batch-norm
 * statistics of n layers, of which it then has none. LT_ENOMEM. */
LT_MUST lt_status lt__gradient_reserve(lt_gradient *g, lt_optim *optim, int n_groups);
LT_MUST lt_status lt__gradient_reserve_bn(lt_gradient *g, int n);
/* Copies the gradient back to the gradient arenas of optim. */
LT_MUST lt_status lt__gradient_load(const lt_gradient *g, lt_optim *optim);
/* Updates the running statistics of batch norm. */
LT_MUST lt_status lt__gradient_commit_bn(const lt_gradient *g, lt_ctx *ctx);
void lt__gradient_free(lt_gradient *g);

#endif
