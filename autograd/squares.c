/* squares.c - the sum of squares of an optimizer's gradients, for their norm. */
#include "autograd/ranges.h"

/* Adds the sum of squares of a range of gradients to total. */
static lt_status add_range(lt_optim *o, const lt_optim_range *r, lt_tensor *total)
{
    const lt_def *squares = lt_op_find(o->ctx, "add_squares");
    lt_segment *s = o->arenas[r->arena].segment;
    lt_tensor *grads = squares ? lt__tensor_over(s->grads, s->dtype, 1, &r->count, r->offset, true)
                               : NULL;
    lt_status status = grads
                           ? lt_apply(o->ctx, squares, (lt_tensor *[]){total, grads}, 2, NULL, NULL)
                           : lt_errcode();
    lt_release(grads);
    return status;
}

/* Sets squares (n) to the sum of squares of each parameter's gradient. */
static lt_status add_each(lt_optim *o, lt_tensor *squares)
{
    lt_optim_range r = {0};
    LT_TRY(lt_fill(squares, 0));
    while (lt_optim_next_range(o, NULL, NULL, true, &r)) {
        lt_tensor *one =
            lt__tensor_over(squares->storage, LT_F64, 0, NULL, o->items[r.first].index, true);
        lt_status status = one ? add_range(o, &r, one) : LT_ENOMEM;
        lt_release(one);
        LT_TRY(status);
    }
    return LT_OK;
}

/* Adds the parameters' sums of squares, of the whole net, in the order of lt_optim_new(). So the
 * total has the same bits however the net is divided. */
static lt_status add_in_order(lt_optim *o, lt_tensor *total)
{
    int64_t n = o->capacity;
    double sum = 0;
    if (!o->squares)
        o->squares = lt__tensor_new(o->ctx, total->storage->device, LT_F64, 1, &n, true);
    if (!o->numbers)
        o->numbers = lt__alloc(o->ctx, (size_t)n * sizeof *o->numbers);
    if (!o->squares || !o->numbers)
        return LT_ENOMEM;
    LT_TRY(add_each(o, o->squares));
    LT_TRY(lt_read(o->squares, o->numbers));
    LT_TRY(lt_sum_over_net(o->ctx, o->numbers, n));
    for (int64_t i = 0; i < n; i++)
        sum += o->numbers[i];
    return lt_fill(total, sum);
}

/* The same in the stream of an accelerator, with one kernel call for each range. */
static lt_status add_ranges(lt_optim *o, lt_tensor *total)
{
    lt_optim_range r = {0};
    while (lt_optim_next_range(o, NULL, NULL, o->def->op->whole_params, &r))
        LT_TRY(add_range(o, &r, total));
    return LT_OK;
}

lt_status lt__optim_add_squares(lt_optim *o, lt_tensor *total)
{
    bool in_order = total->storage->device->is_host || lt_net_is_divided(o->ctx);
    return in_order ? add_in_order(o, total) : add_ranges(o, total);
}
