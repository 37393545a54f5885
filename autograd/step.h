/* step.h - the parts of a training step: what amp and dist do in backward and in optimizer steps.
 * Included by autograd.h.
 *
 * A context has at most one part of each kind: a schedule, which is a pipeline; a scale, which is
 * amp's loss scale; and an exchange, which is a reducer or asynchronous training. At each event of
 * a step, autograd (step.c) calls the function for the event in the parts that have it, in the
 * order of lt_part_kind. The functions of lt_step_part are in the order of the events.
 * docs/architecture.md shows what each part does.
 */
#ifndef LUATRAIN_STEP_H
#define LUATRAIN_STEP_H

#include "autograd/autograd.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lt_external_memory { /* memory from elsewhere; deleter(ud, data) frees it */
    void *data;
    void (*deleter)(void *ud, void *data);
    void *ud;
} lt_external_memory;

struct lt_optim;

typedef enum lt_part_kind {
    LT_PART_SCHEDULE = 0,
    LT_PART_SCALE = 1,
    LT_PART_EXCHANGE = 2,
    LT_PART_KINDS = 3
} lt_part_kind;

typedef bool (*lt_resolve_fn)(void *ud, const lt_grad_stats *stats);

/* A part. All functions get ud. Each may be NULL. */
typedef struct lt_step_part {
    void *ud;

    /* ---- Backward ---- */

    /* lt_backward() calls this instead of running a pass; lt_backward_from() always runs one. This
     * rank may lack the values of loss. */
    lt_status (*backward)(void *ud, lt_tensor *loss, lt_tensor *grad);
    /* Called when a pass begins: the uses of all leaves are counted, and no gradient has been
     * computed yet. grad is the gradient of the loss, which the function may scale. loss and grad
     * are NULL if the pass starts without a loss, from gradients that are scaled already. */
    lt_status (*begin)(void *ud, lt_ctx *ctx, lt_tensor *loss, lt_tensor *grad);
    /* Only in a schedule. Called when a pass begins: whether it is the last one of the step. See
     * lt_pass_is_last(). */
    bool (*is_last)(void *ud);
    /* Called before this pass adds to grad, the gradient of leaf x from earlier passes. */
    lt_grad_hook grad_begin;
    /* Called when the gradient of leaf x is complete in this pass, before the leaf's own hooks.
     * Sets grad to the unscaled gradient. from is the scaled gradient: grad itself, or an f16 or
     * bf16 tensor if grad is f32 and has no values yet. */
    lt_status (*grad_complete)(void *ud, lt_tensor *x, lt_tensor *grad, lt_tensor *from);
    /* Called after the leaf's own hooks, which may have changed grad; see lt_has_hooks(). */
    lt_grad_hook grad_ready;
    /* Called once after each begin, when the pass has ended with this status. The returned status
     * replaces it, and is the result of the backward. */
    lt_status (*end)(void *ud, lt_ctx *ctx, lt_status status);
    /* true: a new backward fails while an earlier one is split and has pending gradients, unless a
     * part has is_last. false: it may start. Backwards end in the order in which they began, unless
     * lt_deferred_wgrad_free() discards one. */
    bool is_exclusive;

    /* ---- Between backward and the optimizer step ---- */

    /* Called before lt_grad() and lt_zero_grad(), except in backward: waits until no other thread
     * writes gradients. Between the halves of a split backward, the function is only called in a
     * part that has `backward`; it then runs the second halves. */
    void (*synchronize)(void *ud);
    /* Called by lt_grad_set(x, true). This step has added to grad, so the next decide() must cover
     * grad. grad is unscaled. grad_complete() may have been called for grad before. */
    lt_grad_hook grad_set;

    /* ---- The optimizer step ---- */

    /* Called for each optimizer step, before anything else. Sets LT_ACCUMULATING if more passes of
     * the batch follow: the step then ends here, and lt_zero_grad() does nothing until the next
     * step. */
    lt_status (*prepare)(void *ud, lt_step_status *step_status);
    /* Called before the step reads gradients. Sets LT_ACCUMULATING if more backwards must follow
     * before the gradients are complete. */
    lt_status (*reduce)(void *ud, lt_ctx *ctx, lt_step_status *step_status);
    /* Called with complete gradients. May change LT_APPLIED to LT_SKIPPED; or to LT_PENDING, if the
     * accelerator writes the statistics of the gradients to lt_step_check_of(). */
    lt_status (*decide)(void *ud, lt_step_status *step_status);
    /* Called instead of the update op, with the complete options of each group. The gradients must
     * be multiplied by factor, which clips them. step_status is LT_APPLIED, LT_SKIPPED or
     * LT_ACCUMULATING. The pending batch-norm statistics belong to the step, and are discarded
     * afterwards. If no part has this function, the optimizer updates its parameters. */
    lt_status (*apply)(void *ud, struct lt_optim *optim, const lt_opt *const *options,
                       lt_step_status step_status, double factor);
    /* Called when the host learns the outcome of a pending step. stats are the statistics of its
     * gradients; they are NULL if its loss or norm was not finite, in which case the step does not
     * count. Returns whether the step was applied. The part may have been replaced since the
     * step. */
    lt_resolve_fn resolve;

    /* ---- Other functions ---- */

    /* Returns a sentence that says why loss is not finite, for the error of backward; or "".
     * Borrowed until the next call. */
    const char *(*explain)(void *ud, lt_tensor *loss);
    /* Replaces numbers (n) with their sums over the ranks among which the net is divided. A
     * collective of these ranks. If no part has this function, this rank has the whole net. */
    lt_status (*sum)(void *ud, double *numbers, int64_t n);
    /* Allocates zeroed memory for an arena of gradients, which may outlive the part. If it returns
     * false, the context allocates the arena. */
    bool (*alloc_arena)(void *ud, size_t bytes, lt_external_memory *memory);
} lt_step_part;

/* Sets a part of ctx, or removes it if part is NULL. part is copied. LT_EINVAL for an unknown kind;
 * for a schedule or a scale, in backward and in a dry run; and for a scale, while gradients are
 * pending (lt_backward_from()). An optimizer step fails with LT_EINVAL if an earlier scale, with
 * another ud, has scaled gradients that the step uses. */
LT_MUST lt_status lt_set_part(lt_ctx *ctx, lt_part_kind kind, const lt_step_part *part);
/* LT_EINVAL if ctx has a part of this kind. who is the name of the caller, for the message, or
 * NULL. */
LT_MUST lt_status lt_check_no_part(const lt_ctx *ctx, lt_part_kind kind, const char *who);
/* Whether nets in ctx are divided among ranks, which means that a part has `sum`. */
LT_API bool lt_net_is_divided(const lt_ctx *ctx);
/* Calls `sum` of the part that has it. Does nothing if no part has `sum`. */
LT_MUST lt_status lt_sum_over_net(lt_ctx *ctx, double *numbers, int64_t n);

/* ==== For parts =============================================================================== */

/* For the reducer: where the gradient of a placed parameter is stored. The arena is created if
 * needed. Its padding is zero. LT_GRAD_SPARE_BYTES bytes are allocated after its end, so that other
 * numbers can be sent with the gradients. */
enum { LT_GRAD_SPARE_BYTES = 2048 };
typedef struct lt_grad_place {
    void *arena;
    lt_dtype dtype;
    int64_t offset, end; /* in elements: start of the gradient, and end of the arena */
} lt_grad_place;
/* LT_EINVAL if param is not a placed parameter; LT_ENOMEM. */
LT_MUST lt_status lt_grad_find(lt_tensor *param, lt_grad_place *place);
/* How many contributions the gradient of x may still get: from nodes of the running backward, plus
 * 1 while x is a root, and from pending second halves of split backwards. */
LT_API int lt_grad_uses(const lt_tensor *x);
/* Whether the pass that begins is the last one of the step, if a part has is_last; `guess` if none
 * has. After the last pass of a step, only second halves of split backwards follow. */
LT_API bool lt_pass_is_last(const lt_ctx *ctx, bool guess);
/* Marks the gradient of x, a leaf, as present, after the caller has written it. `added` says
 * whether this step added to the gradient, on this rank or another one. Must not be called in
 * backward. Returns the status of lt_step_part.grad_set. */
LT_MUST lt_status lt_grad_set(lt_tensor *x, bool added);
/* Whether x has hooks of lt_on_grad(). */
LT_API bool lt_has_hooks(const lt_tensor *x);
/* Whether x has a gradient that the scale with this ud has unscaled. */
LT_API bool lt_grad_scaled_by(const lt_tensor *x, const void *ud);
/* Whether an optimizer has this parameter. */
LT_API bool lt_has_optim(const lt_tensor *x);
/* The number of optimizers that were made in ctx, including those that were freed. */
LT_API int lt_optims_made(const lt_ctx *ctx);
/* The step check of the accelerator of ctx. It is in the memory of the accelerator, for kernels in
 * the accelerator's stream. NULL before the first backward on the accelerator. Borrowed. */
LT_API lt_step_check *lt_step_check_of(lt_ctx *ctx);

#ifdef __cplusplus
}
#endif

#endif
