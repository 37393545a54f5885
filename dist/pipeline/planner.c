/* planner.c - predicts the steps of plans, and finds the fastest plan; see dist/plan.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/pipeline/costs.h"

/* All divisions are tried if there are few, or if there are not many and the plan is one of the
 * fastest (BEST). For these, borders are moved by up to REACH units. */
enum { FEW_DIVISIONS = 1000, MANY_DIVISIONS = 20000, BEST = 32, REACH = 4 };

/* ==== One plan ================================================================================ */

static void fill_stage(const lt_costs *c, const lt_costed_pipe *p, const lt_pipe_result *r,
                       const lt_schedule *schedule, int end, lt_pipe_plan_stage *stage)
{
    int i = schedule->stage, n = schedule->stages;
    double bytes = 0;
    for (int j = 0; j < n; j++)
        bytes += j > i ? p->bytes[i * n + j] : p->grads[j * n + i];
    stage->name = stage->first < c->net->n_units ? c->net->units[stage->first].name : NULL;
    stage->busy = r->busy[i] + p->stage[i].update;
    stage->idle = r->seconds > 0 ? fmax(1 - stage->busy / r->seconds, 0) : 0;
    stage->exchange = lt__costs_exchange(c, stage->first, end);
    stage->exposed = r->reduce[i];
    stage->peak_bytes = lt__costs_memory(c, schedule, stage->first, end);
    stage->sent_bytes = bytes * c->micro;
    stage->exchanged_bytes = lt__costs_exchanged(c, stage->first, end);
    stage->in_memory = r->in_memory[i];
}

/* Simulates a plan with this division: the first unit of each stage (stages + 1). */
static lt_status predict(const lt_costs *c, const int *first, lt_costed_pipe *p, lt_pipe_plan *plan)
{
    lt_schedule schedule = {plan->kind, plan->stages, 0, plan->lag};
    lt_pipe_result r;
    lt__costs_pipe(c, &schedule, first, p);
    LT_TRY(lt__costs_simulate(p, &r));
    plan->seconds = r.seconds;
    for (int i = 0; i < plan->stages; i++) {
        schedule.stage = i;
        plan->stage[i].first = first[i];
        fill_stage(c, p, &r, &schedule, first[i + 1], &plan->stage[i]);
    }
    return LT_OK;
}

/* Checks the stages of a caller's plan, and sets first (stages + 1). */
static lt_status check_stages(const lt_pipe_net *net, const lt_pipe_plan *plan, int *first)
{
    first[plan->stages] = net->n_units;
    for (int i = plan->stages - 1; i >= 0; i--) {
        first[i] = plan->stage[i].first;
        if (first[i] < 0 || first[i] > first[i + 1] || (i == 0 && first[i] > 0))
            return lt_fail(LT_EINVAL,
                           "stage %d of a plan begins with unit %d; the first stage begins with "
                           "unit 0, and the units of the others ascend up to %d",
                           i, first[i], net->n_units);
        if (first[i] > 0 && first[i] < net->n_units && !net->units[first[i]].may_begin_stage)
            return lt_fail(LT_EINVAL,
                           "stage %d of a plan begins with unit %d, which may not begin a stage", i,
                           first[i]);
    }
    return LT_OK;
}

static lt_status check_plan(const lt_pipe_job *job, const lt_pipe_plan *plan)
{
    if (plan->stages < 1 || plan->stages > LT_MAX_STAGES)
        return lt_fail(LT_EINVAL, "a plan has 1 to %d stages, not %d", LT_MAX_STAGES, plan->stages);
    if (plan->micro < 1 || plan->micro > LT_PIPE_MOST_MICRO || plan->lag < 0 || plan->kind < 0 ||
        plan->lag > LT_PIPE_MOST_MICRO || plan->kind >= LT_SCHEDULE_KINDS)
        return lt_fail(LT_EINVAL,
                       "a plan has 1 to %d micro-batches, not %d, a lag of 0 to %d, not %d, and a "
                       "kind of schedule from 0 to %d, not %d",
                       LT_PIPE_MOST_MICRO, plan->micro, LT_PIPE_MOST_MICRO, plan->lag,
                       LT_SCHEDULE_KINDS - 1, (int)plan->kind);
    if (plan->replicas < 1 || (int64_t)plan->replicas * plan->micro > job->batch)
        return lt_fail(LT_EINVAL,
                       "a plan of %d replicas with %d micro-batches each is not possible for a "
                       "batch of %lld images; each micro-batch has at least 1",
                       plan->replicas, plan->micro, (long long)job->batch);
    return LT_OK;
}

lt_status lt_pipe_plan_predict(const lt_pipe_net *net, const lt_pipe_job *job, lt_pipe_plan *plan)
{
    int first[LT_MAX_STAGES + 1];
    lt_costs costs;
    LT_TRY(lt__pipe_job_check(job));
    LT_TRY(check_plan(job, plan));
    LT_TRY(check_stages(net, plan, first));
    lt_costed_pipe *pipe;
    LT_TRY(LT_CALLOC(pipe, 1, "to predict a plan"));
    lt_status status = lt__costs_open(&costs, net, job);
    if (status == LT_OK) {
        lt__costs_set(&costs, plan->replicas, plan->micro);
        status = predict(&costs, first, pipe, plan);
    }
    lt__costs_close(&costs);
    free(pipe);
    return status;
}

/* ==== The division into stages ================================================================ */

/* Divisions are in blocks here. */
typedef struct search { /* plans with the same numbers of stages, replicas and micro-batches */
    lt_costs costs;
    lt_costed_pipe pipe;
    lt_schedule schedule;
    int start[LT_MAX_STAGES + 1]; /* division from lt__partition() */
    int best[LT_MAX_STAGES + 1];  /* fastest division so far */
    double seconds;               /* time of the best division; INFINITY before the first */
} search;

/* The first unit of each stage (stages + 1), from its first block. */
static void to_units(const search *s, const int *blocks, int *units)
{
    for (int i = 0; i <= s->schedule.stages; i++)
        units[i] = s->costs.begin[blocks[i]];
}

/* Whether the stages of a division fit into memory. */
static bool fits(const search *s, const int *first)
{
    const lt_costs *c = &s->costs;
    lt_schedule schedule = s->schedule;
    for (int i = 0; i < schedule.stages && c->job->memory > 0; i++) {
        schedule.stage = i;
        if (lt__costs_memory(c, &schedule, first[i], first[i + 1]) > c->job->memory)
            return false;
    }
    return true;
}

/* Simulates a division (stages + 1) and keeps it if it is the fastest so far. */
static lt_status try_division(search *s, const int *blocks)
{
    int first[LT_MAX_STAGES + 1];
    lt_pipe_result r;
    to_units(s, blocks, first);
    if (!fits(s, first))
        return LT_OK;
    lt__costs_pipe(&s->costs, &s->schedule, first, &s->pipe);
    s->pipe.pipe.limit = isfinite(s->seconds) ? s->seconds : 0;
    LT_TRY(lt__costs_simulate(&s->pipe, &r));
    if (r.seconds < s->seconds) {
        s->seconds = r.seconds;
        memcpy(s->best, blocks, ((size_t)s->schedule.stages + 1) * sizeof *blocks);
    }
    return LT_OK;
}

/* Moves borders i to k of the best division. */
static lt_status move(search *s, int i, int k, int by)
{
    int first[LT_MAX_STAGES + 1];
    memcpy(first, s->best, sizeof first);
    for (int j = i; j <= k; j++)
        first[j] += by;
    bool is_valid = first[i] > first[i - 1] && first[k] < first[k + 1];
    return is_valid ? try_division(s, first) : LT_OK;
}

/* Moves single borders by one unit, or if thorough also several ones by several units, as long as
 * the step gets faster. */
static lt_status move_borders(search *s, bool thorough)
{
    int stages = s->schedule.stages, reach = thorough ? REACH : 1;
    double before;
    do {
        before = s->seconds;
        for (int i = 1; i < stages; i++)
            for (int k = i; k < (thorough ? stages : i + 1); k++)
                for (int by = 1; by <= reach; by++) {
                    LT_TRY(move(s, i, k, -by));
                    LT_TRY(move(s, i, k, by));
                }
    } while (s->seconds < before);
    return LT_OK;
}

/* Whether there are at most `max` divisions of n blocks, with at least one block in each stage. */
static bool are_few(int n, int stages, int max)
{
    double divisions = 1;
    for (int k = 1; k < stages; k++)
        divisions *= (double)(n - k) / k;
    return divisions < max + 0.5;
}

/* Tries all divisions, in lexical order. */
static lt_status try_all(search *s)
{
    int stages = s->schedule.stages, n = s->costs.n_blocks, k = stages - 1;
    int first[LT_MAX_STAGES + 1];
    for (int i = 0; i < stages; i++)
        first[i] = i;
    first[stages] = n;
    while (k >= 0) {
        LT_TRY(try_division(s, first));
        for (k = stages - 1; k > 0 && first[k] == n - stages + k; k--)
            ;
        if (k == 0)
            break;
        first[k]++;
        for (int i = k + 1; i < stages; i++)
            first[i] = first[i - 1] + 1;
    }
    return LT_OK;
}

/* Sets s->start. *is_there: whether some division fits into memory. The estimate is high: each
 * stage counts the working memory of the whole net, and values that skip the stage. */
static lt_status partition(search *s, bool *is_there)
{
    const lt_costs *c = &s->costs;
    double memory = c->job->memory;
    if (memory > 0) /* at least one byte: 0 is no limit */
        memory = fmax(memory - lt__costs_work(c, 0, c->net->n_units), 1);
    return lt__partition(c, &s->schedule, memory, s->start, is_there);
}

/* Finds the best division for a schedule. again: s->start and s->best belong to another
 * schedule. Without a memory limit, s->start is the same for both schedules. */
static lt_status divide(search *s, const lt_pipe_plan *plan, bool again)
{
    bool is_there = true;
    int before[LT_MAX_STAGES + 1], stages = plan->stages;
    s->schedule = (lt_schedule){plan->kind, stages, 0, plan->lag};
    again = again && isfinite(s->seconds);
    memcpy(before, s->best, sizeof before);
    s->seconds = INFINITY;
    if (!again || s->costs.job->memory > 0)
        LT_TRY(partition(s, &is_there));
    if (is_there)
        LT_TRY(try_division(s, s->start));
    if (again)
        LT_TRY(try_division(s, before));
    if (are_few(s->costs.n_blocks, stages, FEW_DIVISIONS))
        return try_all(s);
    return isfinite(s->seconds) ? move_borders(s, false) : LT_OK;
}

/* ==== All plans =============================================================================== */

static lt_status append(lt_pipe_plans *plans, const lt_pipe_plan *plan)
{
    int n = plans->n;
    lt_pipe_plan *more = plans->plan;
    if ((n & (n - 1)) == 0) /* doubles the array when it is full */
        more = realloc(more, (n > 0 ? 2 * (size_t)n : 1) * sizeof *more);
    if (more)
        plans->plan = more;
    lt_pipe_plan_stage *stage = malloc((size_t)plan->stages * sizeof *stage);
    if (!more || !stage) {
        free(stage);
        return lt_fail(LT_ENOMEM, "out of memory for %d plans", n + 1);
    }
    plans->plan[n] = *plan;
    plans->plan[n].stage = stage;
    plans->n++;
    return LT_OK;
}

/* Predicts a plan with the best division. */
static lt_status predict_best(search *s, lt_pipe_plan *plan)
{
    int first[LT_MAX_STAGES + 1];
    to_units(s, s->best, first);
    return predict(&s->costs, first, &s->pipe, plan);
}

/* Adds the best plan with these numbers, if one fits into memory. */
static lt_status add_plan(search *s, const lt_pipe_plan *plan, bool again, lt_pipe_plans *plans)
{
    LT_TRY(divide(s, plan, again));
    if (isinf(s->seconds))
        return LT_OK;
    LT_TRY(append(plans, plan));
    return predict_best(s, &plans->plan[plans->n - 1]);
}

static bool is_allowed(int choice, int x) { return choice == LT_PIPE_ANY || choice == x; }

/* Whether the planner tries the lag of a plan: see lt_pipe_plans_find(). */
static bool is_lag(const lt_pipe_plan *p)
{
    bool hides_sums = p->kind == LT_ZERO_BUBBLE && p->replicas > 1;
    bool is_large = p->lag == p->micro / 2 || p->lag == p->micro - 1;
    return p->lag < p->micro && (p->lag < LT_PIPE_LAGS || (hides_sums && is_large));
}

/* Whether no other plan has the same order of passes. */
static bool is_schedule(const lt_pipe_job *job, const lt_pipe_plan *p)
{
    if (p->stages == 1)
        return p->kind == LT_1F1B && p->lag == 0;
    if (!is_allowed(job->kind, (int)p->kind))
        return false;
    if (p->kind == LT_GPIPE)
        return p->lag == 0;
    return job->lag == LT_PIPE_ANY ? is_lag(p) : p->lag == job->lag;
}

/* Adds plans of all schedules. *n counts the plans that were considered. */
static lt_status add_schedules(search *s, lt_pipe_plan plan, lt_pipe_plans *plans, int *n)
{
    const lt_pipe_job *job = s->costs.job;
    int last = LT_MAX(job->lag, plan.micro - 1);
    bool again = false;
    for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++)
        for (plan.lag = 0; plan.lag <= last; plan.lag++) {
            plan.kind = (lt_schedule_kind)kind;
            if (!is_schedule(job, &plan))
                continue;
            LT_TRY(add_plan(s, &plan, again, plans));
            again = true;
            ++*n;
        }
    return LT_OK;
}

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Whether the job allows this number of micro-batches. */
static bool is_micro(const lt_pipe_job *job, const lt_pipe_plan *p)
{
    int max = job->most_micro > 0 ? job->most_micro : LT_PIPE_MICRO;
    int min = job->least_micro > 0 ? job->least_micro : 1;
    double images = (double)job->batch / p->replicas / p->micro;
    int64_t own = divide_up(job->batch, p->replicas);
    if (job->micro != LT_PIPE_ANY)
        return p->micro == job->micro && images >= 1;
    if (p->stages == 1)
        return p->micro == 1;
    if (p->micro > max || divide_up(own, divide_up(own, p->micro)) != p->micro)
        return false; /* fewer of the same size, rounded up, are enough */
    return images >= min;
}

/* Adds plans with these numbers of stages and replicas. */
static lt_status add_micros(search *s, lt_pipe_plan plan, lt_pipe_plans *plans, int *n)
{
    for (plan.micro = 1; plan.micro <= LT_PIPE_MOST_MICRO; plan.micro++)
        if (is_micro(s->costs.job, &plan)) {
            lt__costs_set(&s->costs, plan.replicas, plan.micro);
            LT_TRY(add_schedules(s, plan, plans, n));
        }
    return LT_OK;
}

/* Whether the job and the net allow these numbers of stages and replicas. */
static bool is_division(const search *s, const lt_pipe_plan *p)
{
    const lt_pipe_job *job = s->costs.job;
    return p->stages * p->replicas == job->ranks && p->stages <= s->costs.n_blocks &&
           p->replicas <= job->batch && is_allowed(job->stages, p->stages) &&
           is_allowed(job->replicas, p->replicas);
}

static lt_status add_all(search *s, lt_pipe_plans *plans)
{
    const lt_pipe_job *job = s->costs.job;
    lt_pipe_plan plan = {0};
    int n = 0;
    for (plan.stages = 1; plan.stages <= job->ranks && plan.stages <= LT_MAX_STAGES;
         plan.stages++) {
        plan.replicas = job->ranks / plan.stages;
        if (is_division(s, &plan))
            LT_TRY(add_micros(s, plan, plans, &n));
    }
    if (n == 0)
        return lt_fail(LT_EINVAL,
                       "planning: no plan is possible with %d rank%s, a batch of %lld images and "
                       "micro-batches of at least %d; allow other numbers of stages, replicas or "
                       "micro-batches",
                       job->ranks, job->ranks == 1 ? "" : "s", (long long)job->batch,
                       job->least_micro > 0 ? job->least_micro : 1);
    if (plans->n == 0)
        return lt_fail(
            LT_EINVAL,
            "planning: no plan fits into %.4g MB per rank on %d rank%s; allow more ranks "
            "or smaller micro-batches",
            job->memory / 1e6, job->ranks, job->ranks == 1 ? "" : "s");
    return LT_OK;
}

static double peak_of(const lt_pipe_plan *p)
{
    double peak = 0;
    for (int i = 0; i < p->stages; i++)
        peak = fmax(peak, p->stage[i].peak_bytes);
    return peak;
}

static int compare(double a, double b) { return (a > b) - (a < b); }

/* Rounding errors do not count: times are compared as float. */
static int by_seconds(const void *a, const void *b)
{
    const lt_pipe_plan *p = a, *q = b;
    const int order[] = {compare((float)p->seconds, (float)q->seconds),
                         compare(peak_of(p), peak_of(q)),
                         compare(p->stages, q->stages),
                         compare(p->micro, q->micro),
                         compare(p->kind, q->kind),
                         compare(p->lag, q->lag)};
    int k = 0;
    while (k < 5 && order[k] == 0)
        k++;
    return order[k];
}

static void sort(lt_pipe_plans *plans)
{
    qsort(plans->plan, (size_t)plans->n, sizeof *plans->plan, by_seconds);
}

/* Searches for a better division for a plan. */
static lt_status improve(search *s, lt_pipe_plan *plan)
{
    int n = s->costs.n_blocks;
    lt__costs_set(&s->costs, plan->replicas, plan->micro);
    s->schedule = (lt_schedule){plan->kind, plan->stages, 0, plan->lag};
    s->seconds = plan->seconds;
    s->best[plan->stages] = n;
    for (int i = plan->stages - 1, block = n; i >= 0; i--) {
        while (s->costs.begin[block] > plan->stage[i].first)
            block--;
        s->best[i] = block;
    }
    if (are_few(n, plan->stages, FEW_DIVISIONS))
        return LT_OK; /* all were tried */
    if (are_few(n, plan->stages, MANY_DIVISIONS))
        LT_TRY(try_all(s));
    else
        LT_TRY(move_borders(s, true));
    return predict_best(s, plan);
}

static lt_status find_all(search *s, lt_pipe_plans *plans)
{
    LT_TRY(add_all(s, plans));
    sort(plans);
    for (int i = 0; i < plans->n && i < BEST; i++)
        LT_TRY(improve(s, &plans->plan[i]));
    sort(plans);
    return LT_OK;
}

lt_status lt_pipe_plans_find(const lt_pipe_net *net, const lt_pipe_job *job, lt_pipe_plans *plans)
{
    *plans = (lt_pipe_plans){0};
    LT_TRY(lt__pipe_job_check(job));
    search *s;
    LT_TRY(LT_CALLOC(s, 1, "to plan a pipeline"));
    lt_status status = lt__costs_open(&s->costs, net, job);
    if (status == LT_OK)
        status = lt__pipe_choices_check(job, s->costs.n_blocks);
    if (status == LT_OK)
        status = find_all(s, plans);
    lt__costs_close(&s->costs);
    free(s);
    if (status != LT_OK)
        lt_pipe_plans_free(plans);
    return status;
}

void lt_pipe_plans_free(lt_pipe_plans *plans)
{
    for (int i = 0; i < plans->n; i++)
        free(plans->plan[i].stage);
    free(plans->plan);
    *plans = (lt_pipe_plans){0};
}
