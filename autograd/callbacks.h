/* callbacks.h - what dist, amp and profilers set in a context: gradient callbacks, loss scaling,
 * the cast policy, op hooks; and dry runs, which replace some of these. Included by autograd.h.
 */
#ifndef LUATRAIN_CALLBACKS_H
#define LUATRAIN_CALLBACKS_H

#include "autograd/autograd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ==== Gradients and steps ===================================================================== */

typedef struct lt_external_memory { /* memory from elsewhere; deleter(ud, data) frees it */
    void *data;
    void (*deleter)(void *ud, void *data);
    void *ud;
} lt_external_memory;

struct lt_optim;

/* Callbacks of dist around backward and steps, called with ud. Each may be NULL. */
typedef struct lt_grad_callbacks {
    void *ud;
    /* Backwards may overlap: begin 1, begin 2, end 1, end 2; in another order only if
     * lt_weights_free() discards one. Otherwise a backward fails while one is split. */
    bool overlaps;
    /* Backward starts: the uses of all leaves are counted; no gradient has been computed. loss is
     * NULL if this backward starts without a loss: see lt_backward_from(). */
    lt_status (*begin)(void *ud, lt_ctx *ctx, lt_tensor *loss);
    lt_grad_hook ready; /* after the leaf's own hooks */
    /* Called once after each begin, when backward has ended with status. lt_backward() or
     * lt_backward_weights() returns the result. */
    lt_status (*end)(void *ud, lt_ctx *ctx, lt_status status);
    /* Called before an optimizer step reads gradients. */
    lt_status (*update)(void *ud, lt_ctx *ctx, lt_step_status *step_status);
    /* Called instead of the update op, with the complete options of each group, and the factor by
     * which gradients are to be multiplied (clipping). step_status is LT_APPLIED, LT_SKIPPED or
     * LT_ACCUMULATING. The pending batch-norm statistics are those of the step, and are discarded
     * afterwards. If NULL, the optimizer updates its parameters. */
    lt_status (*apply)(void *ud, struct lt_optim *optim, const lt_opt *const *options,
                       lt_step_status step_status, double factor);
    /* Called before lt_grad() and lt_zero_grad(), except in backward and between the halves of a
     * split one: waits until no other thread writes gradients. */
    void (*synchronize)(void *ud);
    /* Zeroed memory for an arena of gradients, which may outlive the reducer. If it returns false,
     * the context allocates the arena. */
    bool (*alloc_arena)(void *ud, size_t bytes, lt_external_memory *memory);
} lt_grad_callbacks;
/* callbacks is copied; NULL removes the current ones. */
LT_API void lt_set_grad_callbacks(lt_ctx *ctx, const lt_grad_callbacks *callbacks);
/* LT_EINVAL if callbacks are set. who: the caller, which is about to set some, for the message. */
LT_MUST lt_status lt_check_no_grad_callbacks(const lt_ctx *ctx, const char *who);

/* For the reducer: where the gradient of a placed parameter is stored. The arena is created if
 * needed. Its padding is zero. LT_GRAD_SPARE_BYTES bytes are allocated after its end, so that other
 * numbers can be sent with the gradients. */
enum { LT_GRAD_SPARE_BYTES = 2048 };
typedef struct lt_grad_place {
    void *arena;
    lt_dtype dtype;
    int64_t offset, end; /* in elements: where the gradient starts, and the arena ends */
} lt_grad_place;
/* LT_EINVAL if param is not a placed parameter; LT_ENOMEM. */
LT_MUST lt_status lt_grad_find(lt_tensor *param, lt_grad_place *place);
/* How many nodes may still add to the gradient of x in the running backward, plus 1 while x is a
 * root. Excludes nodes that a split backward leaves to lt_backward_weights(). */
LT_API int lt_grad_uses(const lt_tensor *x);
/* Marks the gradient of x, a leaf, as present, after the caller has written it. added: whether this
 * step added to it, on this rank or another one. Must not be called in backward. Returns the status
 * of lt_scaling.added(). */
LT_MUST lt_status lt_grad_set(lt_tensor *x, bool added);

/* ==== Loss scaling ============================================================================ */

/* Callbacks of amp's loss scaling, called with ud. Backward runs on scaled gradients, so that they
 * fit f16; hooks of leaves and all later code see unscaled ones. Training sets all of them; a dry
 * run may set only some. */
typedef struct lt_scaling {
    void *ud;
    /* A backward starts: scales the gradient of its loss. NULL if it has none; then its gradients
     * are scaled already. */
    lt_status (*seed)(void *ud, lt_tensor *grad);
    /* This backward will add to grad, which earlier ones left for leaf x: scales it again. */
    lt_grad_hook rescale;
    /* The gradient of x is complete in this backward: sets grad to the unscaled gradient. Called
     * before the leaf's own hooks. from: the scaled gradient, which is grad itself, or an f16 or
     * bf16 tensor while grad is f32 and has no values yet. */
    lt_status (*complete)(void *ud, lt_tensor *x, lt_tensor *grad, lt_tensor *from);
    /* After the leaf's own hooks, if it has any: they may have changed grad. */
    lt_grad_hook changed;
    /* lt_grad_set(x, true) was called: this step added to grad, so the next decide() must cover it.
     * grad is unscaled. complete() may have been called for it before. */
    lt_grad_hook added;
    /* Called before an optimizer step reads gradients, after lt_grad_callbacks.update, unless that
     * has set LT_ACCUMULATING. May change LT_APPLIED to LT_SKIPPED; or to LT_PENDING, if the
     * accelerator writes the statistics of the gradients to lt_step_check_of(). */
    lt_status (*decide)(void *ud, lt_step_status *step_status);
    /* Receives the statistics of a pending step; NULL if its loss or norm was not finite; then the
     * step does not count. Returns whether it was applied. Another scaling may be set by then. */
    bool (*resolve)(void *ud, const lt_grad_stats *stats);
    /* Why the loss is not finite, for the error of backward: a sentence, or "". Borrowed until the
     * next call. */
    const char *(*explain)(void *ud, lt_tensor *loss);
} lt_scaling;
/* Copied; NULL: gradients are not scaled. LT_EINVAL in backward and in a dry run. Afterwards an
 * optimizer step fails with LT_EINVAL if its gradients were scaled under another ud. */
LT_MUST lt_status lt_set_scaling(lt_ctx *ctx, const lt_scaling *scaling);
/* The step check of the accelerator of ctx, in its memory, for kernels in its stream. NULL before
 * the first backward on the accelerator. Borrowed. */
LT_API lt_step_check *lt_step_check_of(lt_ctx *ctx);
/* Whether x has a gradient that the scaling with this ud has scaled. */
LT_API bool lt_grad_scaled_by(const lt_tensor *x, const void *ud);
/* Whether an optimizer has this parameter. */
LT_API bool lt_has_optim(const lt_tensor *x);

/* ==== Ops ===================================================================================== */

/* The cast policy, called before each op. It may replace in[i], which may be NULL, with a new
 * tensor; it must then release the old one. Ops that it runs are recorded. */
typedef lt_status (*lt_cast_fn)(void *ud, const lt_def *def, lt_tensor **in, int n_in);
LT_API void lt_set_cast(lt_ctx *ctx, lt_cast_fn fn, void *ud); /* NULL removes it */
/* The current cast policy, or NULL. */
LT_API lt_cast_fn lt_get_cast(const lt_ctx *ctx, void **ud);

/* Replaces numbers[0..n) with their sums over all ranks, for training ops whose result depends on
 * the whole batch. lt_reducer_allreduce() of dist is such a function. numbers[0] counts rows. In
 * backward the others are gradients of this rank's loss: fn multiplies them by the rank's share
 * before the sum, and divides the sums by it. NULL: there is only one rank. */
typedef lt_status (*lt_allreduce_fn)(void *ud, double *numbers, int64_t n, bool backward);
LT_API void lt_set_allreduce(lt_ctx *ctx, lt_allreduce_fn fn, void *ud);

/* Called after each kernel with its call and duration in seconds, for profiling. NULL removes it.
 * While a timer is set, each kernel of an accelerator is synchronous. */
typedef void (*lt_timer_fn)(void *ud, const lt_call *call, bool backward, double seconds);
LT_API void lt_set_timer(lt_ctx *ctx, lt_timer_fn fn, void *ud);

/* Observes the results of ops: called after each forward, recorded or not, and after each backward,
 * with the call and its place in the user's code (see lt_where_fn). Views and gradients passed on
 * unchanged are left out. It must not change anything. While a hook is set, backward does not write
 * a gradient over another one. NULL removes it. */
typedef void (*lt_op_hook_fn)(void *ud, const lt_call *call, bool backward, const char *where);
LT_API void lt_set_op_hook(lt_ctx *ctx, lt_op_hook_fn fn, void *ud);
/* Calls fn for the ops that loss was computed from, except views, in order of execution. Call it
 * before backward, which frees the graph. lt_call has the tensors saved for backward, and outputs
 * that can be recomputed from them; other tensors are NULL. */
LT_API void lt_replay_ops(lt_tensor *loss, lt_op_hook_fn fn, void *ud);
/* For op hooks: runs the kernel of call again with f32 instead of f16 and bf16. *value = element
 * `index` of the new out[i]; with `backward`, of d_in[i] without the earlier value that the kernel
 * adds to. LT_EUNSUPPORTED for in-place ops, and if other ranks would have to take part. */
LT_MUST lt_status lt_recompute_f32(const lt_call *call, bool backward, int i, int64_t index,
                                   double *value);

/* ==== Dry runs ================================================================================ */

/* A dry run is a forward and backward pass without side effects, to inspect the computation before
 * the training pass. It draws the same random numbers as the next pass. Until it ends, backward
 * calls neither hooks nor lt_grad_callbacks, discards each gradient of a leaf once it is complete,
 * and accepts a loss that is not finite; existing gradients stay; lt_bn_stats_add() and
 * lt_zero_grad() do nothing; this rank computes alone. An optimizer step or norm fails with
 * LT_EINVAL, and so does backward through nodes recorded before the dry run. Meanwhile `scaling`
 * (NULL: none) replaces the current scaling; only its seed and complete are called, if set. op_hook
 * replaces the current op hook. LT_EINVAL in backward and in another dry run; LT_ENOMEM. */
LT_MUST lt_status lt_dry_run_begin(lt_ctx *ctx, const lt_scaling *scaling, lt_op_hook_fn op_hook,
                                   void *ud);
/* Frees what was recorded, and restores the tape, the scaling and the op hook. Does nothing without
 * a dry run. */
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
