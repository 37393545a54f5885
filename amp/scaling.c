/* scaling.c - loss scaling: gradients are scaled during backward and unscaled as soon as they are
 * complete.
 *
 * Everything after grad_complete() of lt_step_part, such as hooks, the reducer and optimizers, only
 * sees unscaled gradients, so that no reader has to unscale them, and none can forget to. A
 * gradient is scaled again before another backward adds to it. The scale is a power of two, so
 * nothing rounds.
 */
#include <math.h>

#include "amp/anomaly.h"
#include "core/tensor.h"
#include "ops/ops.h"

enum { MAX_AT_FLOOR = 10 }; /* skipped steps in a row at the lowest possible scale */

lt_loss_scale *lt_loss_scale_new(lt_ctx *ctx, const lt_scaler *scaler)
{
    LT_NEED_CTX(ctx, NULL);
    lt_loss_scale *s = lt__alloc_zero(ctx, sizeof *s);
    if (!s)
        return NULL;
    if (!(s->table = lt_grad_table_new(ctx))) {
        lt__free(ctx, s, sizeof *s);
        return NULL;
    }
    s->ctx = lt__ctx_retain(ctx);
    s->scaler = *scaler;
    s->step = (lt_scaled_step){
        .k = scaler->k, .exponent = LT_NO_EXPONENT, .finite = true, .skipped = scaler->skipped};
    return s;
}

static void release_measured(lt_loss_scale *s)
{
    while (s->n_measured > 0)
        lt_release(s->measured[--s->n_measured]);
}

/* Resets the state of the step after its decision. */
static void end_step(lt_loss_scale *s)
{
    s->reduced = (lt_grad_stats){0};
    s->is_reduced = s->has_backward = s->found_inf_here = false;
}

/* Starts a step with its first backward. If the last step was skipped, discards the gradients whose
 * optimizers have not stepped since: such a step would have discarded them too. */
static void begin_step(lt_loss_scale *s)
{
    for (int i = 0; i < s->n_measured && s->step_status == LT_SKIPPED; i++)
        if (lt_grad_scaled_by(s->measured[i], s))
            lt_zero_grad(s->measured[i]);
    release_measured(s);
    s->has_backward = true;
}

/* Blocks while the decision is pending. */
static void synchronize(lt_loss_scale *s)
{
    if (s->step_status == LT_PENDING)
        lt_synchronize_quiet(s->ctx);
}

void lt_loss_scale_free(lt_loss_scale *s)
{
    if (!s)
        return;
    lt_ctx *ctx = s->ctx;
    synchronize(s);
    release_measured(s);
    lt_grad_table_free(s->table);
    lt__free(ctx, s->measured, (size_t)s->capacity * sizeof *s->measured);
    lt__free(ctx, s, sizeof *s);
    lt__ctx_release(ctx);
}

lt_scaler *lt_loss_scale_scaler(lt_loss_scale *s)
{
    synchronize(s);
    return &s->scaler;
}

lt_scaled_step lt_loss_scale_step(lt_loss_scale *s)
{
    synchronize(s);
    return s->step;
}

int64_t lt_loss_scale_latest_number(const lt_loss_scale *s)
{
    return s->scaler.steps + (s->step_status == LT_PENDING);
}

lt_scaled_step lt_loss_scale_step_at(lt_loss_scale *s, int64_t number)
{
    if (number > s->scaler.steps)
        synchronize(s);
    if (number > 0 && s->recent[number % LT_STEPS_KEPT].number == number)
        return s->recent[number % LT_STEPS_KEPT];
    lt_scaled_step step = s->step;
    step.skipped = s->scaler.skipped; /* the scaler may have been restored */
    return step;
}

lt_grad_stats lt__loss_scale_last(const lt_loss_scale *s)
{
    lt_grad_stats stats;
    if (lt_grad_table_read(s->table, s->last, 1, &stats) != LT_OK)
        return (lt_grad_stats){0};
    stats.largest = ldexp(stats.largest, -s->scaler.k);
    return stats;
}

/* ==== Gradient statistics ===================================================================== */

/* Clears the rows of gradients that were discarded. */
static lt_status clear_dropped(lt_loss_scale *s)
{
    for (int i = 0; i < s->n_measured; i++)
        if (!lt_grad(s->measured[i]))
            LT_TRY(lt_grad_table_clear(s->table, LT_ROW_FIRST + i));
    return LT_OK;
}

/* Whether x has a row in this step; if so, s->at is its index. Backwards usually complete gradients
 * in the same order, so the search starts after the last one. */
static bool find_row(lt_loss_scale *s, const lt_tensor *x)
{
    int n = s->n_measured, i = 0;
    while (i < n && s->measured[(s->at + i) % n] != x)
        i++;
    s->at = i < n ? (s->at + i) % n : s->at;
    return i < n;
}

/* s->last = the row for the statistics of x's gradient. They replace those of earlier backwards,
 * whose contributions are part of this gradient. */
static lt_status take_row(lt_loss_scale *s, lt_tensor *x)
{
    s->last = LT_ROW_UNOWNED;
    if (!lt_has_optim(x))
        return LT_OK;
    if (!find_row(s, x)) {
        LT_TRY(lt__grow(s->ctx, &s->measured, s->n_measured, &s->capacity, sizeof *s->measured));
        s->measured[s->at = s->n_measured++] = lt_retain(x);
    }
    s->last = LT_ROW_FIRST + s->at++;
    return LT_OK;
}

/* ==== The functions of lt_step_part =========================================================== */

static double scale_of(const lt_loss_scale *s) { return ldexp(1, s->scaler.k); }

static lt_status begin(void *ud, lt_ctx *ctx, lt_tensor *loss, lt_tensor *grad)
{
    lt_loss_scale *s = ud;
    (void)ctx, (void)loss;
    if (s->step_status == LT_PENDING)
        LT_TRY(lt_synchronize(s->ctx));
    if (!s->has_backward)
        begin_step(s);
    return grad ? lt_rescale(grad, scale_of(s), NULL) : LT_OK;
}

/* A leftover gradient may be non-finite although all gradients of this step so far are finite. Then
 * it comes from a skipped step and belongs to a leaf without an optimizer. It is zeroed; otherwise,
 * every later step would be skipped. A leaf that has a row needs no such check: the row covers the
 * leftover. */
static lt_status grad_begin(void *ud, lt_tensor *x, lt_tensor *grad)
{
    lt_loss_scale *s = ud;
    bool is_on_device = !grad->storage->device->is_host;
    lt_grad_stats leftover = {0};
    LT_TRY(lt_grad_table_rescale(s->table, LT_ROW_LEFTOVER, grad, grad, scale_of(s)));
    if (!is_on_device)
        LT_TRY(lt_grad_table_read(s->table, LT_ROW_LEFTOVER, 1, &leftover));
    if (is_on_device ? find_row(s, x) : leftover.not_finite == 0)
        return LT_OK;
    LT_TRY(clear_dropped(s));
    return lt_grad_table_zero_leftover(s->table, grad, LT_ROW_LEFTOVER, LT_ROW_FIRST,
                                       s->n_measured);
}

static lt_status grad_complete(void *ud, lt_tensor *x, lt_tensor *grad, lt_tensor *from)
{
    lt_loss_scale *s = ud;
    LT_TRY(take_row(s, x));
    return lt_grad_table_rescale(s->table, s->last, grad, from, 1 / scale_of(s));
}

/* A hook may have made a gradient finite or not finite. */
static lt_status grad_ready(void *ud, lt_tensor *x, lt_tensor *grad)
{
    lt_loss_scale *s = ud;
    if (!lt_has_hooks(x))
        return LT_OK;
    return lt_grad_table_measure(s->table, s->last, grad, scale_of(s));
}

/* If only other ranks added to the gradient, their votes cover it, so its row is cleared. */
static lt_status grad_set(void *ud, lt_tensor *x, lt_tensor *grad)
{
    lt_loss_scale *s = ud;
    (void)grad;
    if (find_row(s, x)) {
        s->at++;
        return LT_OK;
    }
    LT_TRY(take_row(s, x));
    return lt_grad_table_clear(s->table, s->last);
}

/* Whether this skipped step has non-finite gradients only on other ranks. */
static bool found_inf_elsewhere(const lt_loss_scale *s)
{
    return s->is_reduced && !s->found_inf_here;
}

/* Returns LT_ENUMERIC when no scale helps. A step with anomaly detection must come first, because a
 * run that resumes from a checkpoint starts without anomaly detection. */
static lt_status give_up(lt_loss_scale *s)
{
    long long skipped = s->scaler.in_a_row;
    lt_status status = LT_OK;
    if (s->detects_anomaly && s->scaler.at_floor >= MAX_AT_FLOOR && !found_inf_elsewhere(s))
        status =
            s->anomaly[0]
                ? lt_fail(LT_ENUMERIC, "%s (%lld steps in a row were skipped)", s->anomaly, skipped)
                : lt_fail(
                      LT_ENUMERIC,
                      "the gradients were not finite in %lld steps in a row, the last with a loss "
                      "scale of 2^%d, although no op made them non-finite; check the learning "
                      "rate and the data",
                      skipped, s->step.k);
    lt__anomaly_enable(s, s->scaler.at_floor >= MAX_AT_FLOOR - 1);
    return status;
}

/* Reports the statistics of a step to the scaler and records its decision. */
static lt_status update_scaler(lt_loss_scale *s, lt_grad_stats stats)
{
    s->step = (lt_scaled_step){.k = s->scaler.k,
                               .exponent = lt__exponent_of(stats.largest),
                               .finite = stats.not_finite == 0};
    bool applied = lt_scaler_update(&s->scaler, s->step.exponent, s->step.finite);
    s->step_status = applied ? LT_APPLIED : LT_SKIPPED;
    s->step.number = s->scaler.steps;
    s->step.skipped = s->scaler.skipped;
    s->recent[s->step.number % LT_STEPS_KEPT] = s->step;
    return give_up(s);
}

/* Near the floor the next forward may need anomaly detection, so the decision must not wait. */
static bool can_defer(const lt_loss_scale *s)
{
    return !s->is_reduced && !lt_net_is_divided(s->ctx) && s->scaler.at_floor < MAX_AT_FLOOR - 2 &&
           lt_grad_table_is_on_device(s->table, LT_ROW_FIRST, s->n_measured);
}

/* Joins the statistics of this rank's gradients with the statistics of all other ranks among which
 * the net is divided. */
static lt_status vote(lt_loss_scale *s, lt_grad_stats *stats)
{
    lt_grad_stats own = {ldexp(stats->largest, -s->scaler.k), stats->not_finite};
    float numbers[LT_VOTE_NUMBERS] = {0};
    double sums[LT_VOTE_NUMBERS];
    lt__vote_start(s);
    lt__vote_pack(s, &own, numbers);
    lt_convert(sums, LT_F64, numbers, LT_F32, LT_VOTE_NUMBERS);
    LT_TRY(lt_sum_over_net(s->ctx, sums, LT_VOTE_NUMBERS));
    lt_convert(numbers, LT_F32, sums, LT_F64, LT_VOTE_NUMBERS);
    lt__vote_unpack(s, numbers);
    *stats = s->reduced;
    return LT_OK;
}

static lt_status decide_now(lt_loss_scale *s)
{
    lt_grad_stats stats = s->reduced;
    LT_TRY(lt_synchronize(s->ctx)); /* a loss that is not finite does not count as a step */
    if (!s->is_reduced)
        LT_TRY(lt_grad_table_read(s->table, LT_ROW_FIRST, s->n_measured, &stats));
    if (lt_net_is_divided(s->ctx))
        LT_TRY(vote(s, &stats));
    return update_scaler(s, stats);
}

/* All optimizer steps without a backward in between belong to one step and share its decision. */
static lt_status decide(void *ud, lt_step_status *step_status)
{
    lt_loss_scale *s = ud;
    lt_status status = LT_OK;
    if (s->has_backward) {
        LT_TRY(clear_dropped(s));
        if (can_defer(s)) {
            status = lt_grad_table_check(s->table, LT_ROW_FIRST, s->n_measured);
            s->step_status = LT_PENDING;
        } else {
            status = decide_now(s);
        }
        end_step(s);
    }
    if (status == LT_OK && *step_status == LT_APPLIED)
        *step_status = s->step_status;
    return status;
}

/* Ignores the status: can_defer() makes sure that give_up() does not fail here. */
static bool resolve(void *ud, const lt_grad_stats *stats)
{
    lt_loss_scale *s = ud;
    s->step_status = LT_SKIPPED;
    lt_status status = stats ? update_scaler(s, *stats) : LT_OK;
    (void)status;
    return s->step_status == LT_APPLIED;
}

static const char *explain(void *ud, lt_tensor *loss) { return lt__anomaly_first(ud, loss); }

/* Called when s is used again. If its last step was skipped, optimizers that have not stepped since
 * must still skip it. If none of that step's gradients is left, its status is reset, so that it
 * does not affect gradients computed without s. */
static void reset_stale_status(lt_loss_scale *s)
{
    bool is_needed = s->has_backward || s->step_status != LT_SKIPPED;
    for (int i = 0; i < s->n_measured; i++)
        is_needed |= lt_grad_scaled_by(s->measured[i], s);
    if (is_needed)
        return;
    release_measured(s);
    s->step_status = LT_APPLIED;
}

lt_status lt_use_loss_scale(lt_ctx *ctx, lt_loss_scale *s)
{
    LT_NEED_CTX(ctx, LT_EINVAL);
    const lt_step_part part = {.ud = s,
                               .begin = begin,
                               .grad_begin = grad_begin,
                               .grad_complete = grad_complete,
                               .grad_ready = grad_ready,
                               .grad_set = grad_set,
                               .decide = decide,
                               .resolve = resolve,
                               .explain = explain};
    LT_TRY(lt_set_part(ctx, LT_PART_SCALE, s ? &part : NULL));
    if (s)
        reset_stale_status(s);
    lt__anomaly_install(ctx, s);
    return LT_OK;
}
