/* scaling.c - gradients under a loss scale: they go backward multiplied by it, and are true again
 * as soon as they are complete.
 *
 * Everybody behind autograd's slot, hooks and the reducer and optimizers, sees true gradients only;
 * so nothing has to be undone by whoever reads them, and nothing can be forgotten. A gradient to
 * which a further backward is to add is brought up to the scale first. With a power of two none of
 * this rounds.
 */
#include <math.h>
#include <string.h>

#include "amp/watch.h"
#include "core/tensor.h"
#include "ops/ops.h"

enum { MOST_AT_FLOOR = 10 }; /* skipped steps whose scale could not have been lower */

int lt__exponent_of(double magnitude)
{
    if (magnitude == 0)
        return LT_NO_EXPONENT;
    int exponent = ilogb(magnitude);
    return exponent < LT_EXPONENT_LOW ? LT_EXPONENT_LOW
           : exponent > LT_EXPONENT_HIGH ? LT_EXPONENT_HIGH : exponent;
}

lt_loss_scale *lt_loss_scale_new(lt_ctx *ctx, const lt_scaler *scaler)
{
    lt_loss_scale *s = lt__alloc_zero(ctx, sizeof *s);
    if (!s)
        return NULL;
    s->ctx = lt__ctx_retain(ctx);
    s->scaler = *scaler;
    for (int i = 0; i < LT_SCALE_WIRES; i++)
        s->wire[i] = scaler->k;
    s->step = (lt_scaled_step){.k = scaler->k, .exponent = LT_NO_EXPONENT, .finite = true};
    return s;
}

/* The step is over. */
static void forget(lt_loss_scale *s)
{
    while (s->n_findings > 0)
        lt_release(s->findings[--s->n_findings].x);
    s->heard = (lt_found){0};
    s->agreed = s->fresh = s->here = s->elsewhere = false;
}

void lt_loss_scale_free(lt_loss_scale *s)
{
    if (!s)
        return;
    lt_ctx *ctx = s->ctx;
    forget(s);
    lt__free(ctx, s->findings, (size_t)s->room * sizeof *s->findings);
    lt__free(ctx, s, sizeof *s);
    lt__ctx_release(ctx);
}

lt_scaler *lt_loss_scale_scaler(lt_loss_scale *s) { return &s->scaler; }
lt_scaled_step lt_loss_scale_step(const lt_loss_scale *s) { return s->step; }
lt_found lt_loss_scale_last(const lt_loss_scale *s) { return s->last; }

/* ==== Findings ================================================================================ */

lt_found lt__found_in(const lt_loss_scale *s)
{
    lt_found all = {0};
    for (int i = 0; i < s->n_findings; i++) {
        const lt_finding *f = &s->findings[i];
        if (!lt_grad(f->x))
            continue;
        all.largest = fmax(all.largest, f->found.largest);
        all.not_finite += f->found.not_finite;
    }
    return all;
}

/* There is room for one more. */
static lt_status make_room(lt_loss_scale *s)
{
    if (s->n_findings < s->room)
        return LT_OK;
    int room = s->room ? 2 * s->room : 64;
    lt_finding *more = lt__alloc(s->ctx, (size_t)room * sizeof *more);
    if (!more)
        return LT_ENOMEM;
    if (s->n_findings > 0)
        memcpy(more, s->findings, (size_t)s->n_findings * sizeof *more);
    lt__free(s->ctx, s->findings, (size_t)s->room * sizeof *more);
    s->findings = more;
    s->room = room;
    return LT_OK;
}

/* In place of what was found in x's gradient before, which is part of it. Backwards complete
 * gradients in the same order, so a finding is most often the one after the last. */
static lt_status note(lt_loss_scale *s, lt_tensor *x, lt_found found)
{
    int n = s->n_findings, i = 0;
    while (i < n && s->findings[(s->at + i) % n].x != x)
        i++;
    if (i < n) {
        s->at = (s->at + i) % n;
    } else {
        LT_TRY(make_room(s));
        s->findings[s->at = s->n_findings++].x = lt_retain(x);
    }
    s->findings[s->at++].found = found;
    return LT_OK;
}

/* ==== The slot ================================================================================ */

static double scale_of(const lt_loss_scale *s) { return ldexp(1, s->scaler.k); }

static lt_status seed(void *ud, lt_tensor *grad)
{
    lt_loss_scale *s = ud;
    lt_found ignored = {0};
    s->fresh = true;
    return lt_rescale(grad, scale_of(s), &ignored);
}

/* What is not finite, when all gradients of this step are so far, was left by one that was skipped:
 * of a leaf that no optimizer has, to forget it. It would make all further steps skipped. */
static lt_status join(void *ud, lt_tensor *x, lt_tensor *grad)
{
    lt_loss_scale *s = ud;
    lt_found left = {0};
    (void)x;
    LT_TRY(lt_rescale(grad, scale_of(s), &left));
    return left.not_finite > 0 && lt__found_in(s).not_finite == 0 ? lt_fill(grad, 0) : LT_OK;
}

static lt_status complete(void *ud, lt_tensor *x, lt_tensor *grad)
{
    lt_loss_scale *s = ud;
    s->last = (lt_found){0};
    LT_TRY(lt_rescale(grad, 1 / scale_of(s), &s->last));
    s->here |= s->last.not_finite > 0;
    return lt_has_optim(x) ? note(s, x, s->last) : LT_OK;
}

/* Fails when no scale helps, and only after a step that was watched: a training that goes on from a
 * checkpoint begins without. */
static lt_status give_up(lt_loss_scale *s)
{
    long long skipped = s->scaler.in_a_row;
    lt_status status = LT_OK;
    if (s->watched && s->scaler.at_floor >= MOST_AT_FLOOR && !s->elsewhere)
        status = s->first[0]
            ? lt_fail(LT_ENUMERIC, "%s (%lld steps in a row were skipped)", s->first, skipped)
            : lt_fail(LT_ENUMERIC, "the gradients were not finite in %lld steps in a row, in the "
                      "last with a loss scale of 2^%d, although no op has made them so; look at "
                      "the learning rate and at the data", skipped, s->step.k);
    lt__watch(s, s->scaler.at_floor >= MOST_AT_FLOOR - 1);
    return status;
}

/* All optimizers that come without a backward in between belong to one step. */
static lt_status judge(void *ud, lt_outcome *outcome)
{
    lt_loss_scale *s = ud;
    if (s->fresh) {
        lt_found found = s->agreed ? s->heard : lt__found_in(s);
        s->step = (lt_scaled_step){.k = s->scaler.k, .exponent = lt__exponent_of(found.largest),
                                   .finite = found.not_finite == 0};
        bool applied = lt_scaler_see(&s->scaler, s->step.exponent, s->step.finite);
        s->outcome = applied ? LT_APPLY : LT_SKIP;
        lt_status status = give_up(s);
        forget(s);
        LT_TRY(status);
    }
    if (*outcome == LT_APPLY)
        *outcome = s->outcome;
    return LT_OK;
}

static const char *explain(void *ud, lt_tensor *loss) { return lt__first_in(ud, loss); }

lt_status lt_use_loss_scale(lt_ctx *ctx, lt_loss_scale *s)
{
    LT_TRY(lt_set_scaling(ctx, s ? &(lt_scaling){s, seed, join, complete, judge, explain} : NULL));
    lt__use_watch(ctx, s);
    return LT_OK;
}
