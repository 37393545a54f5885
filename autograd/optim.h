/* optim.h - optimizers, which run update ops over flat arenas. Part of the door of autograd. */
#ifndef LUATRAIN_OPTIM_H
#define LUATRAIN_OPTIM_H

#include "autograd/autograd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* An optimizer runs an update op such as "sgd(w, g, v; lr, ...)" over flat arenas. The inputs after
 * w and g are its slots: state in the layout of the parameters, initially zero. */
typedef struct lt_optim lt_optim;

/* An optimizer for n placed parameters, all in group 0. New. LT_EINVAL for a tensor that is not a
 * parameter, or a parameter given twice. */
LT_API lt_optim *lt_optim_new(lt_ctx *ctx, const char *update_op, lt_tensor *const *params, int n);
LT_API void lt_optim_free(lt_optim *optim); /* NULL is fine */
/* Moves a parameter to a group >= 0. LT_EINVAL if the optimizer does not hold it. */
LT_MUST lt_status lt_optim_set_group(lt_optim *optim, lt_tensor *param, int group);
/* One step. options[g] are the options of group g, complete; n_groups covers every group in use.
 * Parameters without a gradient stay as they are. LT_EINVAL if no parameter has one and no backward
 * has run since this optimizer's last step, unless all are frozen. Commits pending batch-norm
 * statistics, or drops them if the step is skipped. Discards the gradients and counts the step in
 * the context, except with LT_ACCUMULATING. step_status may be NULL. */
LT_MUST lt_status lt_optim_step(lt_optim *optim, const lt_opt *const *options, int n_groups,
                                lt_step_status *step_status);
/* As lt_optim_step(), but if the norm of the gradients (lt_optim_grad_norm()) exceeds `most`, they
 * are multiplied by most / norm; 0: no clipping. *squares: the norm squared, an f64 scalar on the
 * device of the gradients; new; squares may be NULL. LT_ENUMERIC if it is not finite; on an
 * accelerator this error is deferred, see lt_synchronize(). */
LT_MUST lt_status lt_optim_step_clipped(lt_optim *optim, const lt_opt *const *options, int n_groups,
                                        double most, lt_tensor **squares,
                                        lt_step_status *step_status);
/* The status of its last step, LT_ACCUMULATING before the first one. Blocks while it is pending;
 * never LT_PENDING. */
LT_API lt_step_status lt_optim_step_status(lt_optim *optim);
/* The 2-norm of all gradients that the next step would use, summed in double in a fixed order; 0 if
 * it would use none. LT_ENUMERIC if it is not finite. */
LT_MUST lt_status lt_optim_grad_norm(lt_optim *optim, double *norm);
/* A digest of the sequence of all steps and norms in ctx so far, and of the optimizers they use. */
LT_API uint32_t lt_steps_digest(const lt_ctx *ctx);
/* A digest of the settings of all these steps: options and clip limits, rounded to f32. Steps count
 * only while lt_grad_slots.update is set. */
LT_API uint32_t lt_settings_digest(lt_ctx *ctx);
/* The settings of the steps since the second-to-last call of lt_settings_digest(), one per line:
 * "optimizer 1: lr = 0.1". New; the caller frees it with free(). NULL with LT_ENOMEM. */
LT_API char *lt_settings_text(const lt_ctx *ctx);
/* Completes the gradients that the next step will use, as the step itself would. *step_status is
 * the status that the step will have; never LT_PENDING. */
LT_MUST lt_status lt_optim_complete(lt_optim *optim, lt_step_status *step_status);
/* Slot k of a parameter, as a view with the parameter's dims. New. NULL past the last slot, or for
 * a parameter that it does not hold. */
LT_API lt_tensor *lt_optim_slot(lt_optim *optim, int k, lt_tensor *param);
/* The name of slot k in the signature; NULL past the last one. Borrowed. */
LT_API const char *lt_optim_slot_name(const lt_optim *optim, int k);
LT_API const lt_def *lt_optim_def(const lt_optim *optim); /* its update op. Borrowed */

#ifdef __cplusplus
}
#endif
#endif
