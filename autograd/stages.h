/* stages.h - each op runs on the stage of a pipeline that has its parameters. For dist. Not
 * installed.
 *
 * Every rank of a pipeline runs the whole program. A parameter belongs to one stage, and a value to
 * the stage that computed it. An op with parameters runs on the latest stage to which one of its
 * inputs belongs, so values only move to later stages. An op without parameters, such as a cast,
 * runs on the latest stage that has or has received one of its inputs, so that a value is used in
 * the order of the stages. On the other ranks only the shape rule runs, and the results are meta
 * tensors: they have a dtype and dims, but no memory. Tensors that are made from data alone have no
 * stage: all ranks have them.
 *
 * The stage that has a value sends it when the program first uses it on another stage, and that
 * stage receives it at the same place in the program. So all ranks know which values are sent
 * between which stages, and in which order. A received value is a leaf here, and its gradient is
 * returned. If several stages use a value, the last one returns its gradient to the one before,
 * which adds its own gradient and returns the sum, and so on to the stage that has the value. So
 * gradients are added in the same order as in one process, unless an op with parameters uses a
 * value after a later stage has used it.
 */
#ifndef LT_AUTOGRAD_STAGES_H
#define LT_AUTOGRAD_STAGES_H

#include "autograd/autograd.h"

enum { LT_MAX_STAGES = 64 };

typedef struct lt_stage_hooks {
    void *ud;        /* borrowed */
    int own, stages; /* the stage of this rank, from 0; the number of stages */
    /* Returns the stage of a parameter or buffer, from 0. name: as in lt_params_add(). Called once
     * for each of them when its tree is placed, which fails with LT_EINVAL if the stage does not
     * exist. Parameters of other stages get no memory here. */
    int (*stage_of)(void *ud, const char *name, const lt_tensor *x);
    /* Sends the values of x to stage `to`; not called if there is only one stage. requires_grad: x
     * needs a gradient. returns: stage `to` will return the gradient to this stage, and not to
     * another one. x is borrowed. */
    lt_status (*send)(void *ud, lt_tensor *x, int to, bool requires_grad, bool returns);
    /* Receives the values of x, which has memory, from stage `from`. returns_to: the stage to which
     * the gradient of x is returned; until then, the callee must retain x. -1 if x has no
     * gradient. */
    lt_status (*receive)(void *ud, lt_tensor *x, int from, int returns_to);
    /* x, which this stage has received, is also used by stage `from`, which will return its
     * gradient here. x is borrowed. */
    lt_status (*expect)(void *ud, lt_tensor *x, int from);
    /* The gradient of a received x is complete; it may still change afterwards. Both are
     * borrowed. */
    lt_status (*return_grad)(void *ud, lt_tensor *x, lt_tensor *grad);
    /* Called after each op of any stage, with its inputs and outputs. May be NULL. */
    void (*note)(void *ud, const lt_def *def, lt_tensor *const *in, int n_in,
                 lt_tensor *const *out);
} lt_stage_hooks;

/* Splits the program of ctx into stages. Call it before parameters are placed. NULL ends the split;
 * the parameters keep their stages. LT_EINVAL within backward or in a dry run; LT_ENOMEM. */
LT_MUST lt_status lt_set_stage_hooks(lt_ctx *ctx, const lt_stage_hooks *stages);
bool lt_has_stages(const lt_ctx *ctx);
/* The stage that has the values of x, from 0; LT_NO_STAGE if all ranks have them. */
enum { LT_NO_STAGE = -1 };
int lt_stage_of(const lt_tensor *x);
/* Sets the stage of a tensor that no op has made, and that is a meta tensor on the other stages.
 * LT_ENOMEM. */
LT_MUST lt_status lt_set_stage(lt_tensor *x, int stage);
/* Whether x has no values here. */
bool lt_is_meta(const lt_tensor *x);
/* Whether an op with these inputs (n; NULL for a missing one) would move a value to another stage,
 * which all ranks must do. False without stages, and if lt_apply() would fail. */
bool lt_moves_values(lt_ctx *ctx, lt_tensor *const *in, int n);
/* A meta tensor that belongs to the stage of x; outside any scope if kept. New. NULL with
 * LT_ENOMEM. */
lt_tensor *lt__tensor_remote(const lt_tensor *x, lt_dtype dtype, int ndim, const int64_t *dims,
                             bool kept);
/* Makes the values of x available on all ranks. Returns x itself on a rank that has them, otherwise
 * a tensor with the values that the stage of x sends. A collective of the stages. New. NULL with
 * LT_ENOMEM or the errors of lt_stage_hooks. */
lt_tensor *lt_fetch(lt_tensor *x);
/* A tensor with the values and the history of x that outlives the scope of x. New. NULL with
 * LT_ENOMEM. */
lt_tensor *lt__tensor_with_history(lt_tensor *x);

#endif
