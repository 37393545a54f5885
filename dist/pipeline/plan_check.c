/* plan_check.c - checks the numbers of a net and of a job; see dist/plan.h. */
#include "dist/pipeline/costs.h"

/* Sums and products of a few amounts must not overflow. */
#define MOST 1e100

static bool is_amount(double x) { return x >= 0 && x <= MOST; }
static bool is_positive(double x) { return x >= 1 / MOST && x <= MOST; }

/* ==== Nets ==================================================================================== */

static lt_status check_sizes(const lt_pipe_net *p)
{
    if (p->n_sizes < 1 || p->n_sizes > LT_PIPE_SIZES)
        return lt_fail(LT_EINVAL, "a net is measured at 1 to %d sizes of micro-batches, not %d",
                       LT_PIPE_SIZES, p->n_sizes);
    for (int i = 0; i < p->n_sizes; i++)
        if (!is_positive(p->sizes[i]))
            return lt_fail(LT_EINVAL,
                           "a net was measured with a micro-batch of %g images; the number must be "
                           "from 1e-100 to 1e100",
                           p->sizes[i]);
    return LT_OK;
}

static lt_status check_seconds(const double *seconds, int n, int unit, const char *what)
{
    for (int i = 0; i < n; i++)
        if (!is_amount(seconds[i]))
            return lt_fail(LT_EINVAL,
                           "unit %d of the net has %g seconds for its %s; times must be from 0 "
                           "to 1e100",
                           unit, seconds[i], what);
    return LT_OK;
}

static lt_status check_unit(const lt_pipe_net *p, int i)
{
    const lt_pipe_net_unit *u = &p->units[i];
    LT_TRY(check_seconds(u->forward, p->n_sizes, i, "forward pass"));
    LT_TRY(check_seconds(u->inputs, p->n_sizes, i, "gradients of inputs"));
    LT_TRY(check_seconds(u->weights, p->n_sizes, i, "gradients of weights"));
    LT_TRY(check_seconds(&u->update, 1, i, "update"));
    if (!is_amount(u->grad_bytes) || !is_amount(u->state_bytes) || !is_amount(u->saved_bytes) ||
        !is_amount(u->back_bytes) || !is_amount(u->work_bytes))
        return lt_fail(LT_EINVAL,
                       "unit %d of the net has %g bytes of gradients, %g of state, %g of saved "
                       "results, %g of their gradients and %g of work memory; they must be "
                       "from 0 to 1e100",
                       i, u->grad_bytes, u->state_bytes, u->saved_bytes, u->back_bytes,
                       u->work_bytes);
    return LT_OK;
}

static lt_status check_value(const lt_pipe_net *p, int i)
{
    const lt_pipe_net_value *v = &p->values[i];
    if (v->unit < 0 || v->unit >= p->n_units)
        return lt_fail(LT_EINVAL,
                       "value %d of the net is made by unit %d, but the units are 0 "
                       "to %d",
                       i, v->unit, p->n_units - 1);
    if (v->n < 1)
        return lt_fail(LT_EINVAL, "value %d of the net is used by no unit; leave it out", i);
    for (int k = 0, before = v->unit; k < v->n; before = v->uses[k++])
        if (v->uses[k] <= before || v->uses[k] >= p->n_units)
            return lt_fail(LT_EINVAL,
                           "value %d of the net is made by unit %d and used by unit %d after "
                           "unit %d; the units that use it must be in ascending order, up to %d",
                           i, v->unit, v->uses[k], before, p->n_units - 1);
    if (!is_amount(v->bytes))
        return lt_fail(LT_EINVAL,
                       "value %d of the net has %g bytes; they must be from 0 to "
                       "1e100",
                       i, v->bytes);
    return LT_OK;
}

lt_status lt__pipe_net_check(const lt_pipe_net *p)
{
    LT_TRY(check_sizes(p));
    if (p->n_units < 1)
        return lt_fail(LT_EINVAL, "a net has at least 1 unit, not %d", p->n_units);
    for (int i = 0; i < p->n_units; i++)
        LT_TRY(check_unit(p, i));
    for (int i = 0; i < p->n_values; i++)
        LT_TRY(check_value(p, i));
    return LT_OK;
}

/* ==== Jobs ==================================================================================== */

static lt_status check_link(const lt_pipe_link *link, const char *what)
{
    if (!is_amount(link->latency) || !(link->bytes_per_s >= 1 / MOST))
        return lt_fail(LT_EINVAL,
                       "planning: the link of the %s has a latency of %g s and %g bytes/s; the "
                       "latency must be from 0 to 1e100, and the rate at least 1e-100",
                       what, link->latency, link->bytes_per_s);
    return LT_OK;
}

lt_status lt__pipe_job_check(const lt_pipe_job *j)
{
    if (j->ranks < 1)
        return lt_fail(LT_EINVAL, "planning: a job has at least 1 rank, not %d", j->ranks);
    if (j->batch < 1)
        return lt_fail(LT_EINVAL, "planning: a batch has at least 1 image, not %lld",
                       (long long)j->batch);
    if (!is_amount(j->memory))
        return lt_fail(LT_EINVAL, "planning: the ranks have %g bytes of memory; use 0 for no limit",
                       j->memory);
    if (j->wire_bytes != 0 && j->wire_bytes != 2 && j->wire_bytes != 4)
        return lt_fail(LT_EINVAL, "planning: gradients are sent with 2 or 4 bytes, not %d",
                       j->wire_bytes);
    if (j->least_micro < 0)
        return lt_fail(LT_EINVAL, "planning: micro-batches have at least 1 image, not %d",
                       j->least_micro);
    if (j->most_micro < 0 || j->most_micro > LT_PIPE_MOST_MICRO)
        return lt_fail(LT_EINVAL, "planning: a step has at most %d micro-batches, not %d",
                       LT_PIPE_MOST_MICRO, j->most_micro);
    LT_TRY(check_link(&j->link, "messages"));
    return check_link(&j->exchange, "gradient exchange");
}

static lt_status check_choice(int choice, int least, int most, const char *what)
{
    if (choice == LT_PIPE_ANY || (choice >= least && choice <= most))
        return LT_OK;
    if (least == most)
        return lt_fail(LT_EINVAL, "planning: the %s must be %d for this job, but is %d", what, most,
                       choice);
    return lt_fail(LT_EINVAL, "planning: the %s must be from %d to %d for this job, but is %d",
                   what, least, most, choice);
}

lt_status lt__pipe_choices_check(const lt_pipe_job *j, int blocks)
{
    int stages = blocks < LT_MAX_STAGES ? blocks : LT_MAX_STAGES;
    int replicas = j->batch < j->ranks ? (int)j->batch : j->ranks;
    int micro = j->batch < LT_PIPE_MOST_MICRO ? (int)j->batch : LT_PIPE_MOST_MICRO;
    LT_TRY(check_choice(j->stages, 1, stages < j->ranks ? stages : j->ranks, "number of stages"));
    LT_TRY(check_choice(j->replicas, 1, replicas, "number of replicas"));
    LT_TRY(check_choice(j->micro, 1, micro, "number of micro-batches"));
    LT_TRY(check_choice(j->lag, 0, LT_PIPE_MOST_MICRO, "lag"));
    return check_choice(j->kind, 0, LT_SCHEDULE_KINDS - 1, "kind of schedule");
}
