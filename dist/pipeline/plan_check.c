/* plan_check.c - checks the numbers of a job; see dist/plan.h. */
#include "core/tensor.h"
#include "dist/pipeline/costs.h"

/* Sums and products of a few amounts must not overflow. */
#define MOST 1e100

static bool is_amount(double x) { return x >= 0 && x <= MOST; }

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

static lt_status check_choice(int choice, int min, int max, const char *what)
{
    if (choice == LT_PIPE_ANY || (choice >= min && choice <= max))
        return LT_OK;
    if (min == max)
        return lt_fail(LT_EINVAL, "planning: the %s must be %d for this job, but is %d", what, max,
                       choice);
    return lt_fail(LT_EINVAL, "planning: the %s must be from %d to %d for this job, but is %d",
                   what, min, max, choice);
}

lt_status lt__pipe_choices_check(const lt_pipe_job *j, int blocks)
{
    int stages = LT_MIN(blocks, LT_MAX_STAGES);
    int replicas = j->batch < j->ranks ? (int)j->batch : j->ranks;
    int micro = j->batch < LT_PIPE_MOST_MICRO ? (int)j->batch : LT_PIPE_MOST_MICRO;
    LT_TRY(check_choice(j->stages, 1, LT_MIN(stages, j->ranks), "number of stages"));
    LT_TRY(check_choice(j->replicas, 1, replicas, "number of replicas"));
    LT_TRY(check_choice(j->micro, 1, micro, "number of micro-batches"));
    LT_TRY(check_choice(j->lag, 0, LT_PIPE_MOST_MICRO, "lag"));
    return check_choice(j->kind, 0, LT_SCHEDULE_KINDS - 1, "kind of schedule");
}
