/* callbacks.h - callbacks that dist, amp and profilers set in a context: the cast policy, sums over
 * ranks, timers and op hooks. Also declares dry runs, which replace some of these callbacks.
 * Included by autograd.h.
 */
#ifndef LUATRAIN_CALLBACKS_H
#define LUATRAIN_CALLBACKS_H

#include "autograd/autograd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ==== Ops ===================================================================================== */

/* The cast policy, called before each op. It may replace in[i], which may be NULL, with a new
 * tensor, and must then release the old tensor. The ops that it runs are recorded. */
typedef lt_status (*lt_cast_fn)(void *ud, const lt_def *def, lt_tensor **in, int n_in);
LT_API void lt_set_cast(lt_ctx *ctx, lt_cast_fn fn, void *ud); /* NULL removes it */
/* The current cast policy, or NULL. */
LT_API lt_cast_fn lt_get_cast(const lt_ctx *ctx, void **ud);

/* Replaces numbers[0..n) with their sums over all ranks, for training ops whose result depends on
 * the whole batch. lt_reducer_allreduce() of dist is such a function. numbers[0] counts rows. In
 * backward the other numbers are gradients of this rank's loss: fn multiplies them by the rank's
 * share before the sum, and divides the sums by the share. If fn is NULL, there is only one
 * rank. */
typedef lt_status (*lt_allreduce_fn)(void *ud, double *numbers, int64_t n, bool backward);
LT_API void lt_set_allreduce(lt_ctx *ctx, lt_allreduce_fn fn, void *ud);

/* Called after each kernel with its call and duration in seconds, for profiling. NULL removes it.
 * While a timer is set, each kernel of an accelerator is synchronous. */
typedef void (*lt_timer_fn)(void *ud, const lt_call *call, bool backward, double seconds);
LT_API void lt_set_timer(lt_ctx *ctx, lt_timer_fn fn, void *ud);

/* Observes the results of ops. Called after each forward, recorded or not, and after each backward,
 * with the call and its place in the user's code (see lt_where_fn). Not called for views, nor for
 * gradients that an op passes on unchanged. A hook must not change anything. While a hook is set,
 * backward does not write a gradient over another one. NULL removes it. */
typedef void (*lt_op_hook_fn)(void *ud, const lt_call *call, bool backward, const char *where);
LT_API void lt_set_op_hook(lt_ctx *ctx, lt_op_hook_fn fn, void *ud);
/* Calls fn for the ops that loss was computed from, except views, in order of execution. Call it
 * before backward, which frees the graph. lt_call has the tensors saved for backward, and outputs
 * that can be recomputed from them; other tensors are NULL. */
LT_API void lt_replay_ops(lt_tensor *loss, lt_op_hook_fn fn, void *ud);
/* For op hooks: runs the kernel of call again with f32 instead of f16 and bf16. Sets *value to
 * element `index` of the new out[i]. If `backward` is true, sets it to element `index` of the new
 * d_in[i], without the value that the original call added to. LT_EUNSUPPORTED for in-place ops, and
 * if other ranks would have to take part. */
LT_MUST lt_status lt_recompute_f32(const lt_call *call, bool backward, int i, int64_t index,
                                   double *value);

/* ==== Dry runs ================================================================================ */

struct lt_step_part; /* in step.h */

/* A dry run is a forward and backward pass without side effects, to inspect the computation before
 * the training pass. It draws the same random numbers as the next pass. Until the dry run ends,
 * backward calls no hooks, accepts a loss that is not finite, and discards the gradient of each
 * leaf when it is complete. Existing gradients stay, lt_bn_stats_add() and lt_zero_grad() do
 * nothing, and this rank does not communicate with other ranks. An optimizer step or norm fails
 * with LT_EINVAL. Backward through nodes recorded before the dry run fails, too. scale, which may
 * be NULL, replaces all parts of the step; only its begin and grad_complete are called, if set.
 * op_hook replaces the current op hook. LT_EINVAL in backward and in another dry run; LT_ENOMEM. */
LT_MUST lt_status lt_dry_run_begin(lt_ctx *ctx, const struct lt_step_part *scale,
                                   lt_op_hook_fn op_hook, void *ud);
/* Ends the dry run: frees its nodes, and restores the tape, the parts and the op hook. Does nothing
 * if there is no dry run. */
LT_API void lt_dry_run_end(lt_ctx *ctx);

/* ==== The user's code ========================================================================= */

/* Writes the current place in the user's code, such as "train.lua:9: net.4 ", or "". Nodes store
 * it, and errors of backward start with it. */
typedef void (*lt_where_fn)(void *ud, char *where, size_t bytes);
LT_API void lt_set_where(lt_ctx *ctx, lt_where_fn fn, void *ud);
/* The current place in the user's code, or "". */
enum { LT_WHERE_BYTES = 200 };
LT_API void lt_where(lt_ctx *ctx, char where[LT_WHERE_BYTES]);

#ifdef __cplusplus
}
#endif

#endif
