/* worker.c - the part of a step that asynchronous training takes; see worker.h. */
#include <string.h>

#include "core/tensor.h"
#include "dist/async/worker.h"
#include "dist/fault.h"

static lt_status add_loss(void *ud, lt_ctx *ctx, lt_tensor *loss, lt_tensor *grad)
{
    lt_async *a = ud;
    (void)grad;
    double value;
    if (!a->gradient)
        return LT_OK;
    if (!a->has_backward)
        LT_TRY(lt__fault_trigger(ctx, a->rank, a->computed));
    a->has_backward = true;
    if (!loss || loss->count != 1)
        return LT_OK;
    LT_TRY(lt_item(loss, 0, &value));
    a->gradient->loss += value;
    return LT_OK;
}

/* The learning rate of the first group, or 0. */
static double lr_of(const lt_optim *optim, const lt_gradient *g)
{
    int k = lt_schema_index(&lt_optim_def(optim)->schema, "lr");
    return k >= 0 && g->n_groups > 0 ? g->options[0][k].f : 0;
}

static lt_status store(void *ud, lt_optim *optim, const lt_opt *const *options,
                       lt_step_status step_status, double factor)
{
    lt_async *a = ud;
    if (!a->gradient)
        return lt_fail(LT_EINVAL, "this optimizer step belongs to no batch of the asynchronous "
                                  "training; while a run is open, loop over run:batches()");
    if (a->stepped)
        return lt_fail(LT_EINVAL,
                       "in asynchronous training, each batch has exactly one optimizer step, "
                       "but this is another");
    if (optim != a->net.optim)
        return lt_fail(LT_EINVAL, "asynchronous training supports one optimizer; this is another");
    LT_TRY(lt__gradient_store(a->gradient, options, step_status, factor));
    LT_TRY(
        lt__rule_check(a->rule, lt_optim_def(optim), a->gradient->options, a->gradient->n_groups));
    a->gradient->lr = lr_of(optim, a->gradient);
    a->stepped = true;
    return LT_OK;
}

lt_status lt__async_set_part(lt_async *a)
{
    return lt_set_part(a->ctx, LT_PART_EXCHANGE,
                       &(lt_step_part){.ud = a, .begin = add_loss, .apply = store});
}

void lt__async_begin(lt_async *a, const lt_grant *g, lt_gradient *gradient, lt_async_event *event)
{
    a->ticket = g->ticket[0];
    a->gradient = gradient;
    gradient->loss = gradient->lr = 0;
    a->stepped = a->has_backward = false;
    a->computed++;
    lt_set_step(a->ctx, a->ticket);
    *event = (lt_async_event){.kind = LT_ASYNC_EVENT_COMPUTE,
                              .worker = g->worker,
                              .ticket = a->ticket,
                              .read = g->version,
                              .n_prefetched = g->n - 1};
    memcpy(event->prefetched, g->ticket + 1,
           (size_t)event->n_prefetched * sizeof *event->prefetched);
}
