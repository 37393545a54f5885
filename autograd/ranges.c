/* ranges.c - ranges of an optimizer's parameters, and the number of steps of each parameter.
 *
 * Parameters that are adjacent in an arena, have the same options and all have a gradient form one
 * range, which takes one kernel call, unless an op must run on whole parameters. If the op has an
 * option `step`, they must also have had the same number of steps. The zero padding
 * between them is updated too: every update op maps zeros to zeros.
 */
#include <string.h>

#include "autograd/ranges.h"

bool lt_optim_has_grad(const lt_optim *o, int i)
{
    const lt_leaf *leaf = o->items[i].x->leaf;
    return leaf->requires_grad && leaf->has_grad;
}

static bool is_present(const lt_optim *o, const bool *present, int i)
{
    return present ? present[i] : lt_optim_has_grad(o, i);
}

/* Whether two options of one kind have the same bits. */
static bool same_option(const lt_opt *a, const lt_opt *b)
{
    size_t bytes = a->kind == LT_KIND_NUMBER ? sizeof a->f : a->n * sizeof *a->i;
    return a->n == b->n && (a->n == 0 || memcmp(a->i, b->i, bytes) == 0);
}

/* Whether the options of groups a and b are the same, so that one call can update both. */
static bool same_options(const lt_optim *o, const lt_opt *const *options, int a, int b)
{
    bool same = a == b || options;
    for (int k = 0; a != b && same && k < o->def->schema.n_opt; k++)
        same = same_option(&options[a][k], &options[b][k]);
    return same;
}

/* Whether two parameters may be in one range. An op with `step` needs equal counts of steps. */
static bool fits(const lt_optim *o, const lt_opt *const *options, const lt_optim_item *a,
                 const lt_optim_item *b)
{
    return a->arena == b->arena && (o->step < 0 || a->steps == b->steps) &&
           same_options(o, options, a->group, b->group);
}

/* The first parameter after i that does not continue its range. */
static int end_of_range(const lt_optim *o, const lt_opt *const *options, const bool *present, int i)
{
    const lt_optim_item *last = &o->items[i];
    int64_t step = 64 / (int64_t)lt_dtype_bytes((lt_dtype)last->x->dtype);
    int j = i + 1;
    for (; j < o->n_items; j++) {
        const lt_optim_item *it = &o->items[j];
        int64_t next = last->x->leaf->offset + (last->x->count + step - 1) / step * step;
        if (!fits(o, options, it, last) || !is_present(o, present, j) ||
            it->x->leaf->offset != next)
            break;
        last = it;
    }
    return j;
}

bool lt_optim_next_range(const lt_optim *o, const lt_opt *const *options, const bool *present,
                         bool whole_params, lt_optim_range *r)
{
    int i = r->end;
    while (i < o->n_items && !is_present(o, present, i))
        i++;
    if (i == o->n_items)
        return false;
    int end = whole_params ? i + 1 : end_of_range(o, options, present, i);
    const lt_optim_item *first = &o->items[i];
    const lt_tensor *last = o->items[end - 1].x;
    *r = (lt_optim_range){.first = i,
                          .end = end,
                          .arena = first->arena,
                          .group = first->group,
                          .steps = first->steps,
                          .offset = first->x->leaf->offset,
                          .count = last->leaf->offset + last->count - first->x->leaf->offset};
    return true;
}

void lt__optim_use_grads(lt_optim *o)
{
    struct lt_autograd *ag = o->ctx->slots.autograd;
    const lt_leaf *newest = NULL;
    lt_tensor *left = NULL; /* the first parameter with gradients of a used backward */
    for (int i = 0; i < o->n_items; i++) {
        const lt_leaf *leaf = o->items[i].x->leaf;
        if (!lt_optim_has_grad(o, i))
            continue;
        if (!newest || leaf->last > newest->last)
            newest = leaf;
        if (!left && (leaf->is_mixed || lt__backward_is_used(ag, leaf->last)))
            left = o->items[i].x;
    }
    o->mixed = newest && !lt__backward_is_used(ag, newest->last) ? left : NULL;
    if (newest && ag->backwards - newest->last < 64)
        ag->used |= UINT64_C(1) << newest->last % 64;
}

lt_tensor *lt_optim_mixed(const lt_optim *o) { return o->mixed; }

int lt_optim_count(const lt_optim *o) { return o->n_items; }

lt_tensor *lt_optim_param(const lt_optim *o, int i)
{
    return i >= 0 && i < o->n_items ? o->items[i].x : NULL;
}

int lt_optim_arenas(const lt_optim *o) { return o->n_arenas; }

lt_tensor *lt_optim_arena(lt_optim *o, int a, int part)
{
    if (a < 0 || a >= o->n_arenas || part < 0 || part >= LT_OPTIM_FIRST_SLOT + o->n_slots)
        return NULL;
    const lt_optim_slots *arena = &o->arenas[a];
    lt_storage *storage = part == LT_OPTIM_VALUES  ? arena->segment->values
                          : part == LT_OPTIM_GRADS ? arena->segment->grads
                                                   : arena->slot[part - LT_OPTIM_FIRST_SLOT];
    return lt__tensor_over(storage, arena->segment->dtype, 1, &arena->segment->count, 0, true);
}

void lt_optim_updated(lt_optim *o, const lt_optim_range *r)
{
    o->arenas[r->arena].segment->updates++;
    for (int i = r->first; i < r->end; i++)
        o->items[i].x->leaf->version++;
}

/* ==== Counts of steps ========================================================================= */

lt_optim_item *lt__optim_item(lt_optim *o, const lt_tensor *x)
{
    for (int i = 0; i < o->n_items; i++)
        if (o->items[i].x == x)
            return &o->items[i];
    lt_fail(LT_EINVAL, "this parameter does not belong to the optimizer");
    return NULL;
}

void lt_optim_count_step(lt_optim *o, const lt_optim_range *r)
{
    for (int i = r->first; i < r->end; i++)
        o->items[i].steps++;
}

lt_step_status lt_optim_step_status(lt_optim *o)
{
    if (o->last.status == LT_PENDING)
        lt_synchronize_quiet(o->ctx);
    return o->last.status == LT_PENDING ? LT_SKIPPED
                                        : o->last.status; /* LT_SKIPPED if the device has failed */
}

void lt__optim_count_pending(lt_optim *o)
{
    bool is_applied = lt_optim_step_status(o) == LT_APPLIED;
    for (int i = 0; i < o->n_items; i++) {
        o->items[i].steps += o->items[i].is_pending && is_applied;
        o->items[i].is_pending = false;
    }
}

int64_t lt_optim_steps(lt_optim *o, const lt_tensor *param)
{
    if (param->meta)
        return 0;
    lt__optim_count_pending(o);
    const lt_optim_item *it = lt__optim_item(o, param);
    return it ? it->steps : -1;
}

lt_status lt_optim_set_steps(lt_optim *o, const lt_tensor *param, int64_t steps)
{
    if (param->meta)
        return LT_OK;
    lt__optim_count_pending(o);
    lt_optim_item *it = lt__optim_item(o, param);
    if (!it)
        return LT_EINVAL;
    if (steps < 0 || steps > INT64_C(1) << 62) /* the next steps must not overflow */
        return lt_fail(LT_EINVAL, "the number of steps must be from 0 to 2^62, but is %lld",
                       (long long)steps);
    it->steps = steps;
    return LT_OK;
}
