/* optim.h - optimizers, which run update ops over flat arenas. Included by autograd.h. */
#ifndef LUATRAIN_OPTIM_H
#define LUATRAIN_OPTIM_H

#include "autograd/autograd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An optimizer runs an update op such as "momentum_step(w, g, v; lr#, ...)" over flat arenas. The
 * inputs after w and g are its slots: state in the layout of the parameters, initially zero. The
 * optimizer counts the steps applied to each parameter. If the op has an option `step`, as Adam
 * does, it sets this option to the number of the step for the parameter, counted from 1. */
typedef struct lt_optim lt_optim;

/* Creates an optimizer for n placed parameters, all in group 0. The parameters are kept. New. NULL
 * with LT_EINVAL if update_op is not an update op, or if a tensor is not a placed parameter of ctx
 * or is given twice; or with LT_ENOMEM. */
LT_API lt_optim *lt_optim_new(lt_ctx *ctx, const char *update_op, lt_tensor *const *params, int n);
LT_API void lt_optim_free(lt_optim *optim); /* NULL is allowed */
/* Moves a parameter to a group >= 0. LT_EINVAL if the group is negative or the optimizer does not
 * have the parameter. */
LT_MUST lt_status lt_optim_set_group(lt_optim *optim, lt_tensor *param, int group);
/* Takes one step. options[g] are the options of group g from lt_opts_parse(), without `step`.
 * LT_EINVAL if a parameter is in a group >= n_groups. Parameters without a gradient do not change.
 * LT_EINVAL also in backward, in a dry run, and if no parameter has a gradient and no backward has
 * run since this optimizer's last step, unless all parameters are frozen. Also the errors of the
 * parts of the step (step.h), such as LT_EPEER and LT_ENUMERIC. Commits pending batch-norm
 * statistics, or discards them if the step is skipped. Discards the gradients of the optimizer's
 * parameters and counts the step in the context, unless the status is LT_ACCUMULATING. step_status
 * may be NULL. */
LT_MUST lt_status lt_optim_step(lt_optim *optim, const lt_opt *const *options, int n_groups,
                                lt_step_status *step_status);
/* Like lt_optim_step(), with clipping: if the norm of the gradients (lt_optim_grad_norm()) exceeds
 * max_norm, they are multiplied by max_norm / norm. If max_norm is 0, they are not clipped. If
 * max_norm > 0, *squares is set to the square of the norm: an f64 scalar on the device of the
 * gradients, new. If max_norm is 0 or the step fails, *squares is not set. squares may be NULL.
 * LT_EINVAL if max_norm is negative or NaN. LT_ENUMERIC if the norm is not finite; on an
 * accelerator this error is deferred, see lt_synchronize(). */
LT_MUST lt_status lt_optim_step_clipped(lt_optim *optim, const lt_opt *const *options, int n_groups,
                                        double max_norm, lt_tensor **squares,
                                        lt_step_status *step_status);
/* The status of the last step of optim; LT_ACCUMULATING before the first step. Blocks while the
 * status is pending, so the result is never LT_PENDING. LT_SKIPPED if the device has failed. */
LT_API lt_step_status lt_optim_step_status(lt_optim *optim);
/* Returns a parameter with leftover gradients if the last step of optim used such gradients along
 * with new ones; else NULL. Borrowed. The backward of a loss adds to the gradients of all
 * parameters that it reaches, but an optimizer's step discards only those of its own parameters.
 * The rest are left over: call lt_zero_grad() on them after that step, unless they are meant to be
 * used. A step that uses no new gradients, such as the second of two steps after one backward, is
 * not reported. */
LT_API lt_tensor *lt_optim_mixed(const lt_optim *optim);
/* The 2-norm of all gradients that the next step would use; 0 if it would use none. The squares are
 * summed in double in a fixed order. On the CPU this is done parameter by parameter, so the norm
 * has the same bits in a pipeline. LT_ENUMERIC if the norm is not finite. */
LT_MUST lt_status lt_optim_grad_norm(lt_optim *optim, double *norm);
/* A digest of the sequence of all steps and norms in ctx so far, and of the optimizers they use. */
LT_API uint32_t lt_steps_digest(const lt_ctx *ctx);
/* A digest of the settings of all these steps: options and clip limits, with numbers rounded to
 * f32. A step is only included if its context trains with other ranks, which means that a part of
 * the step has `reduce` or `sum`. */
LT_API uint32_t lt_settings_digest(lt_ctx *ctx);
/* The settings of the steps between the last two calls of lt_settings_digest(), one per line:
 * "optimizer 1: lr = 0.1". Call it before the next step, which discards them. New; release it with
 * free(). NULL with LT_ENOMEM. */
LT_API char *lt_settings_text(const lt_ctx *ctx);
/* Completes the gradients that the next step will use, as the step itself would. *step_status is
 * the status that the step will have. Blocks while that status is pending, so *step_status is never
 * LT_PENDING. */
LT_MUST lt_status lt_optim_complete_grads(lt_optim *optim, lt_step_status *step_status);
/* Slot k of a parameter, as a view with the parameter's dims. New. NULL past the last slot, for a
 * parameter that the optimizer does not have, or with LT_ENOMEM. */
LT_API lt_tensor *lt_optim_slot(lt_optim *optim, int k, lt_tensor *param);
/* The name of slot k in the signature; NULL past the last one. Borrowed. */
LT_API const char *lt_optim_slot_name(const lt_optim *optim, int k);
/* The number of steps applied to a parameter. Blocks while the last step is pending, like
 * lt_optim_step_status(). -1 for a parameter that the optimizer does not have; in a pipeline, 0 for
 * a parameter of another stage. */
LT_API int64_t lt_optim_steps(lt_optim *optim, const lt_tensor *param);
/* Sets the number of steps applied to a parameter, to resume from a checkpoint. Does nothing for a
 * parameter of another stage. LT_EINVAL if steps is not from 0 to 2^62, or if the optimizer does
 * not have the parameter. */
LT_MUST lt_status lt_optim_set_steps(lt_optim *optim, const lt_tensor *param, int64_t steps);
LT_API const lt_def *lt_optim_def(const lt_optim *optim); /* the update op; borrowed */

/* ==== For code that applies steps itself: lt_step_part.apply ================================== */

LT_API int lt_optim_count(const lt_optim *optim); /* number of parameters */
/* Parameter i in layout order; NULL past the end. Borrowed. */
LT_API lt_tensor *lt_optim_param(const lt_optim *optim, int i);
/* Whether the next step would update parameter i: it has a gradient and is not frozen. */
LT_API bool lt_optim_has_grad(const lt_optim *optim, int i);

/* A range of adjacent parameters in one arena, which are in one group or in groups with the same
 * options. If the op has an option `step`, the parameters have equal counts of steps. Set the
 * struct to zeros before the first call of lt_optim_next_range(). */
typedef struct lt_optim_range {
    int first, end; /* parameters [first, end) */
    int arena;
    int group;             /* group of the first parameter */
    int64_t offset, count; /* elements of the arena, including padding between parameters */
    int64_t steps;         /* steps applied so far to the first parameter */
} lt_optim_range;
/* Replaces *range with the next one; false after the last one. options[g] are the options of group
 * g: groups with bit-identical options can share a range. With options = NULL, groups never share a
 * range. present (lt_optim_count()) selects parameters; NULL selects those with
 * lt_optim_has_grad(). If whole_params is true, each parameter is a range of its own. */
LT_API bool lt_optim_next_range(const lt_optim *optim, const lt_opt *const *options,
                                const bool *present, bool whole_params, lt_optim_range *range);
LT_API int lt_optim_arenas(const lt_optim *optim); /* number of arenas */
/* Returns a tensor (count) of all elements of one part of an arena: LT_OPTIM_VALUES,
 * LT_OPTIM_GRADS, or LT_OPTIM_FIRST_SLOT + k for slot k of the optimizer. The tensor belongs to no
 * scope. New. NULL if there is no such part, or with LT_ENOMEM. */
enum { LT_OPTIM_VALUES, LT_OPTIM_GRADS, LT_OPTIM_FIRST_SLOT };
LT_API lt_tensor *lt_optim_arena(lt_optim *optim, int arena, int part);
/* Must be called after the values of a range were written through lt_optim_arena(). */
LT_API void lt_optim_updated(lt_optim *optim, const lt_optim_range *range);
/* Must be called after the update op was applied to a range. Counts a step for its parameters. */
LT_API void lt_optim_count_step(lt_optim *optim, const lt_optim_range *range);

#ifdef __cplusplus
}
#endif
#endif
