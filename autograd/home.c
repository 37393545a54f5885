/* home.c - the homes of tensors: which stage of a pipeline has their values; see stages.h. */
#include "autograd/tape.h"

int lt_stage_of(const lt_tensor *x) { return x->home ? x->home->stage : LT_NO_STAGE; }

lt_status lt_set_stage(lt_tensor *x, int stage)
{
    if (!x->home && !(x->home = lt__alloc_zero(x->ctx, sizeof *x->home)))
        return LT_ENOMEM;
    *x->home = (struct lt_home){.stage = stage};
    return LT_OK;
}

bool lt_is_meta(const lt_tensor *x) { return x->meta; }
bool lt__requires_grad_elsewhere(const lt_tensor *x)
{
    return x->meta && x->home && x->home->requires_grad;
}

void lt__home_forget(lt_tensor *x, bool gone)
{
    if (!x->home)
        return;
    x->home->requires_grad = false;
    if (!gone)
        return;
    lt__free(x->ctx, x->home, sizeof *x->home);
    x->home = NULL;
}

lt_status lt__home_inherit(lt_tensor *y, const lt_tensor *x)
{
    LT_TRY(lt_set_stage(y, x->home->stage));
    y->home->sent_to = x->home->sent_to;
    return LT_OK;
}

lt_status lt__home_refuse(const lt_tensor *x)
{
    return lt_fail(LT_EINVAL, "only stage %d of the pipeline has the values of this tensor",
                   x->home->stage);
}
