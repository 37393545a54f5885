/* test_planner.c - the plans that are found for a net. */
#include <float.h>

#include "core/tensor.h"
#include "tests/dist/failing.h"
#include "tests/dist/nets.h"
#include "tests/lt_test.h"

/* ==== All plans =============================================================================== */

/* A net of random units with random residuals. Few units may not begin a stage. */
static net *random_net(int units)
{
    net *n = net_new();
    for (int i = 0; i < units; i++) {
        *add_unit(n, 0, 0, 0) = (lt_pipe_unit){.may_begin_stage = pick(5) > 0,
                                               .forward = {1 + pick(9), 4 + pick(20)},
                                               .inputs = {pick(9), 2 + pick(20)},
                                               .weights = {pick(9), pick(20)},
                                               .update = pick(3),
                                               .grad_bytes = pick(2) * pick(4 << 20),
                                               .state_bytes = pick(100),
                                               .saved_bytes = pick(10),
                                               .back_bytes = pick(10),
                                               .work_bytes = pick(40)};
        if (i > 0)
            add_value(n, i - 1, i, pick(2) && i + 1 < units ? i + 1 + pick(units - i - 1) : -1,
                      pick(30))
                ->requires_grad = pick(4) > 0;
    }
    n->net.n_sizes = 2;
    n->net.sizes[1] = 4;
    return n;
}

/* The fastest division that fits into memory, by trying all of them: its time; or infinity. */
static double fastest(const net *n, const lt_pipe_job *job, lt_pipe_plan *plan, int k)
{
    double best = INFINITY;
    if (k == plan->stages) {
        CHECK_OK(lt_pipe_plan_predict(&n->net, job, plan));
        for (int i = 0; i < plan->stages; i++)
            if (job->memory > 0 && plan->stage[i].peak_bytes > job->memory)
                return INFINITY;
        return plan->seconds;
    }
    for (int i = k == 0 ? 0 : plan->stage[k - 1].first + 1; i < (k == 0 ? 1 : n->net.n_units);
         i++) {
        if (i > 0 && !n->units[i].may_begin_stage)
            continue;
        plan->stage[k].first = i;
        best = fmin(best, fastest(n, job, plan, k + 1));
    }
    return best;
}

/* The plan with the numbers of `like`, or NULL. */
static const lt_pipe_plan *find(const lt_pipe_plans *plans, const lt_pipe_plan *like)
{
    for (const lt_pipe_plan *p = plans->plan; p < plans->plan + plans->n; p++)
        if (p->stages == like->stages && p->replicas == like->replicas && p->micro == like->micro &&
            p->lag == like->lag && p->kind == like->kind)
            return p;
    return NULL;
}

/* Tries all numbers of stages, replicas and micro-batches, all lags and kinds, and all divisions.
 * Returns the best time. Checks that each plan that was found has the best division. */
static double check_all(const net *n, const lt_pipe_job *job, const lt_pipe_plans *plans,
                        int *found)
{
    lt_pipe_plan_stage stage[STAGES];
    lt_pipe_plan p = {.stage = stage};
    double best = INFINITY;
    for (p.stages = 1; p.stages <= job->ranks && p.stages <= n->net.n_units; p.stages++) {
        p.replicas = job->ranks / p.stages;
        if (p.replicas * p.stages != job->ranks)
            continue;
        for (p.micro = 1; p.micro * p.replicas <= job->batch; p.micro++)
            for (p.lag = 0; p.lag < LT_PIPE_LAGS; p.lag++)
                for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++) {
                    int own = ((int)job->batch + p.replicas - 1) / p.replicas;
                    int size = (own + p.micro - 1) / p.micro;
                    p.kind = kind;
                    if ((own + size - 1) / size != p.micro ||
                        (p.stages == 1 && (p.kind != LT_1F1B || p.micro > 1)))
                        continue;
                    double seconds = fastest(n, job, &p, 0);
                    const lt_pipe_plan *plan = find(plans, &p);
                    if (plan) {
                        CHECK(plan->seconds == seconds);
                        ++*found;
                    }
                    best = fmin(best, seconds);
                }
    }
    return best;
}

static double peak_of(const lt_pipe_plan *p)
{
    double peak = 0;
    for (int i = 0; i < p->stages; i++)
        peak = fmax(peak, p->stage[i].peak_bytes);
    return peak;
}

static void check_plan(const net *n, const lt_pipe_job *job, const lt_pipe_plan *plan)
{
    lt_pipe_plan_stage stage[STAGES];
    lt_pipe_plan again = *plan;
    again.stage = stage;
    for (int i = 0; i < plan->stages; i++)
        stage[i].first = plan->stage[i].first;
    CHECK_OK(lt_pipe_plan_predict(&n->net, job, &again));
    CHECK(again.seconds == plan->seconds);
    for (int i = 0; i < plan->stages; i++) {
        const lt_pipe_plan_stage *a = &plan->stage[i];
        CHECK(a->busy == stage[i].busy && a->idle == stage[i].idle);
        CHECK(a->sent_bytes == stage[i].sent_bytes && a->peak_bytes == stage[i].peak_bytes);
        CHECK(job->memory == 0 || a->peak_bytes <= job->memory);
    }
    CHECK_EQ(plan->stages * plan->replicas, job->ranks);
}

/* Times are compared as float, so the first plan may be slower than the best one by that much. */
static void check_order(const lt_pipe_plans *plans, double best)
{
    for (int i = 0; i < plans->n; i++)
        CHECK(plans->plan[i].seconds >= best);
    for (int i = 1; i < plans->n; i++)
        CHECK(plans->plan[i].seconds >= plans->plan[i - 1].seconds * (1 - FLT_EPSILON));
    CHECK_NEAR(plans->plan[0].seconds, best, FLT_EPSILON * best);
}

TEST(the_winner_is_the_best_of_all_plans)
{
    int unfit = 0, limited = 0, wins[5] = {0}, nets = 300 / test_stride(5);
    for (int k = 0; k < nets; k++) {
        net *n = random_net(1 + pick(6));
        lt_pipe_job job = any;
        job.ranks = 1 + pick(4);
        job.batch = 1 + pick(6);
        job.memory = k % 2 ? 50 + pick(400) : 0;
        job.link = (lt_pipe_link){pick(3), 1 + pick(20)};
        job.exchange = (lt_pipe_link){pick(3) / 4., MiB * (1 + pick(8)) / 4};
        job.wire_bytes = pick(2) ? 2 : 4;
        lt_pipe_plans plans;
        int found = 0;
        lt_status status = lt_pipe_plans_find(&n->net, &job, &plans);
        double best = check_all(n, &job, &plans, &found);
        CHECK_EQ(status, isinf(best) ? LT_EINVAL : LT_OK);
        CHECK_EQ(found, plans.n);
        if (status == LT_OK) {
            check_order(&plans, best);
            for (int i = 0; i < plans.n; i++)
                check_plan(n, &job, &plans.plan[i]);
            wins[plans.plan[0].stages]++;
        }
        unfit += status != LT_OK;
        limited += status == LT_OK && job.memory > 0;
        lt_pipe_plans_free(&plans);
        free(n);
    }
    CHECK(unfit > nets / 30 && limited > nets / 6);
    for (int stages = 1; stages <= 4; stages++)
        CHECK(wins[stages] > 0);
}

/* 5 stages of 30 units: 23,751 divisions are too many to try. */
TEST(large_nets_are_divided_almost_as_well_as_possible)
{
    double sum = 0, worst = 1;
    const int nets = 12 / test_stride(4);
    for (int k = 0; k < nets; k++) {
        net *n = random_net(30);
        for (int i = 0; i < 30; i++)
            n->units[i].may_begin_stage = true;
        lt_pipe_plan_stage stage[5];
        lt_pipe_plan plan = {5, 1, 4, 1, pick(2) ? LT_ZERO_BUBBLE : LT_1F1B, 0, stage};
        lt_pipe_job job = any;
        job.ranks = job.stages = 5;
        job.batch = job.micro = 4;
        job.replicas = job.lag = 1;
        job.kind = (int)plan.kind;
        job.link.bytes_per_s = 1 + pick(20);
        lt_pipe_plans plans;
        CHECK_OK(lt_pipe_plans_find(&n->net, &job, &plans));
        CHECK_EQ(plans.n, 1);
        double ratio = plans.plan[0].seconds / fastest(n, &job, &plan, 0);
        CHECK(ratio >= 1);
        sum += ratio;
        worst = fmax(worst, ratio);
        lt_pipe_plans_free(&plans);
        free(n);
    }
    printf("mean %.4f, worst %.4f of the best time\n", sum / nets, worst);
    CHECK(sum / nets < 1.02 && worst < 1.15);
}

TEST(a_job_limits_the_plans)
{
    net *n = random_net(6);
    lt_pipe_job job = any;
    lt_pipe_plans plans;
    job.ranks = 4;
    job.batch = 32;
    job.least_micro = 8;
    CHECK_OK(lt_pipe_plans_find(&n->net, &job, &plans));
    for (int i = 0; i < plans.n; i++)
        CHECK(plans.plan[i].micro * plans.plan[i].replicas <= 4);
    lt_pipe_plans_free(&plans);
    job.batch = 4; /* no micro-batch is large enough: only data parallelism is left */
    CHECK_OK(lt_pipe_plans_find(&n->net, &job, &plans));
    CHECK_EQ(plans.n, 1);
    CHECK(plans.plan[0].stages == 1 && plans.plan[0].micro == 1);
    lt_pipe_plans_free(&plans);
    job.batch = 32;
    job.least_micro = 0;
    job.most_micro = 3;
    job.stages = job.replicas = 2;
    job.kind = LT_ZERO_BUBBLE;
    job.lag = 7;
    CHECK_OK(lt_pipe_plans_find(&n->net, &job, &plans));
    CHECK_EQ(plans.n, 3);
    for (int i = 0; i < plans.n; i++) {
        const lt_pipe_plan *p = &plans.plan[i];
        CHECK(p->stages == 2 && p->replicas == 2 && p->kind == LT_ZERO_BUBBLE && p->lag == 7);
    }
    lt_pipe_plans_free(&plans);
    job.micro = 5; /* even if the micro-batches are of 3.2 images */
    CHECK_OK(lt_pipe_plans_find(&n->net, &job, &plans));
    CHECK(plans.n == 1 && plans.plan[0].micro == 5);
    lt_pipe_plans_free(&plans);
    free(n);
}

/* All plans take 0 s. */
TEST(of_equally_fast_plans_the_one_with_the_least_memory_wins)
{
    net *n = net_new();
    lt_pipe_job job = any;
    lt_pipe_plans plans;
    int different = 0;
    for (int i = 0; i < 3; i++)
        add_unit(n, 0, 0, 0)->saved_bytes = 10;
    job.ranks = 3;
    job.batch = 6;
    job.link.latency = job.exchange.latency = 0;
    CHECK_OK(lt_pipe_plans_find(&n->net, &job, &plans));
    for (int i = 1; i < plans.n; i++) {
        CHECK(peak_of(&plans.plan[i - 1]) <= peak_of(&plans.plan[i]));
        different += peak_of(&plans.plan[i - 1]) < peak_of(&plans.plan[i]);
    }
    CHECK(different > 0);
    lt_pipe_plans_free(&plans);
    free(n);
}

TEST(data_parallelism_wins_if_the_exchange_is_free)
{
    net *n = random_net(8);
    lt_pipe_job job = any;
    lt_pipe_plans plans;
    for (int i = 0; i < n->net.n_units; i++)
        n->units[i].grad_bytes = 1000;
    job.ranks = 4;
    job.batch = 64;
    job.link = job.exchange = (lt_pipe_link){0, INFINITY};
    CHECK_OK(lt_pipe_plans_find(&n->net, &job, &plans));
    CHECK(plans.plan[0].stages == 1 && plans.plan[0].replicas == 4 && plans.plan[0].micro == 1);
    lt_pipe_plans_free(&plans);
    free(n);
}

/* VGG-16 on one core: 0.585 s an image, in proportion to the operations of its layers. */
static net *vgg(void)
{
    static const struct {
        int width, out, size;
    } conv[13] = {{3, 64, 224},   {64, 64, 224},  {64, 128, 112}, {128, 128, 112}, {128, 256, 56},
                  {256, 256, 56}, {256, 256, 56}, {256, 512, 28}, {512, 512, 28},  {512, 512, 28},
                  {512, 512, 14}, {512, 512, 14}, {512, 512, 14}};
    static const int linear[4] = {25088, 4096, 4096, 1000};
    net *n = net_new();
    for (int i = 0; i < 16; i++) {
        double in = i < 13 ? conv[i].width : linear[i - 13];
        double out = i < 13 ? conv[i].out : linear[i - 12];
        double area = i < 13 ? (double)conv[i].size * conv[i].size : 1;
        double params = in * out * (i < 13 ? 9 : 1), seconds = params * area / 15.47e9 * 0.195;
        bool pooled = i < 13 && (i == 12 || conv[i + 1].size < conv[i].size);
        *add_unit(n, 0, 0, 0) = (lt_pipe_unit){.may_begin_stage = true,
                                               .forward = {seconds},
                                               .inputs = {i > 0 ? seconds : 0},
                                               .weights = {seconds},
                                               .update = params / 2e9,
                                               .grad_bytes = 4 * params,
                                               .state_bytes = 12 * params,
                                               .saved_bytes = 8 * out * area};
        if (i < 15)
            add_value(n, i, i + 1, -1, 4 * out * area / (pooled ? 4 : 1));
    }
    return n;
}

TEST(a_pipeline_wins_for_vgg_on_a_slow_link)
{
    net *n = vgg();
    lt_pipe_job job = any;
    lt_pipe_plans plans;
    job.link = job.exchange = (lt_pipe_link){100e-6, 125e6};
    job.batch = 8;
    CHECK_OK(lt_pipe_plans_find(&n->net, &job, &plans));
    const lt_pipe_plan *best = &plans.plan[0];
    const lt_pipe_plan *parallel = find(&plans, &(lt_pipe_plan){1, 2, 1, 0, LT_1F1B, 0, NULL});
    printf("%s, lag %d, %d micro-batches, cut at unit %d: %.3f s; data parallelism: %.3f s\n",
           lt_schedule_name(best->kind), best->lag, best->micro, best->stage[1].first,
           best->seconds, parallel->seconds);
    CHECK(best->stages == 2 && best->replicas == 1);
    CHECK(best->seconds < 0.7 * parallel->seconds);
    lt_pipe_plans_free(&plans);
    free(n);
}

/* ==== Lags ==================================================================================== */

/* Plans for a pipeline of 2 x 2 ranks with this schedule and number of micro-batches, over a link
 * of 1 Gbit/s. */
static lt_pipe_job hybrid(lt_schedule_kind kind, int micro)
{
    lt_pipe_job job = any;
    job.link = job.exchange = (lt_pipe_link){100e-6, 125e6};
    job.ranks = 4;
    job.stages = job.replicas = 2;
    job.batch = 2 * micro;
    job.micro = micro;
    job.kind = (int)kind;
    return job;
}

static void check_lags(lt_schedule_kind kind, int micro, const int *lags, int n_lags)
{
    net *n = vgg();
    lt_pipe_job job = hybrid(kind, micro);
    lt_pipe_plans plans;
    CHECK_OK(lt_pipe_plans_find(&n->net, &job, &plans));
    CHECK_EQ(plans.n, n_lags);
    for (int i = 0; i < n_lags; i++)
        CHECK(find(&plans, &(lt_pipe_plan){2, 2, micro, lags[i], kind, 0, NULL}) != NULL);
    lt_pipe_plans_free(&plans);
    free(n);
}

TEST(lags)
{
    check_lags(LT_ZERO_BUBBLE, 1, (int[]){0}, 1);
    check_lags(LT_ZERO_BUBBLE, 3, (int[]){0, 1, 2}, 3);
    check_lags(LT_ZERO_BUBBLE, 8, (int[]){0, 1, 2, 3, 4, 7}, 6);
    check_lags(LT_ZERO_BUBBLE, 16, (int[]){0, 1, 2, 3, 4, 8, 15}, 7);
    check_lags(LT_1F1B, 16, (int[]){0, 1, 2, 3, 4}, 5);
    check_lags(LT_GPIPE, 16, (int[]){0}, 1);
}

/* The more second halves are left after the last backward pass, the more of the sums overlaps with
 * them. With less memory, a smaller lag wins. The cut is before stage4. */
TEST(a_large_lag_hides_the_sums_of_replicas)
{
    net *n = vgg();
    for (int i = 0; i < n->net.n_units; i++)
        n->units[i].may_begin_stage = i == 7;
    lt_pipe_job job = hybrid(LT_ZERO_BUBBLE, 8);
    lt_pipe_plans plans;
    CHECK_OK(lt_pipe_plans_find(&n->net, &job, &plans));
    lt_pipe_plan best = plans.plan[0];
    const lt_pipe_plan *usual = find(&plans, &(lt_pipe_plan){2, 2, 8, 1, LT_ZERO_BUBBLE, 0, NULL});
    double peak = peak_of(&plans.plan[0]);
    printf("lag %d: %.3f s, %.0f MB; lag 1: %.3f s, %.0f MB\n", best.lag, best.seconds, peak / 1e6,
           usual->seconds, peak_of(usual) / 1e6);
    CHECK(best.lag > 1 && best.seconds < 0.95 * usual->seconds && peak > peak_of(usual));
    lt_pipe_plans_free(&plans);
    job.memory = peak - 1;
    CHECK_OK(lt_pipe_plans_find(&n->net, &job, &plans));
    CHECK(plans.plan[0].lag < best.lag && plans.plan[0].seconds > best.seconds);
    CHECK(peak_of(&plans.plan[0]) <= job.memory);
    lt_pipe_plans_free(&plans);
    free(n);
}

/* ==== Limits ================================================================================== */

TEST(a_net_that_is_too_large_is_refused)
{
    net *n = two_units();
    lt_pipe_job job = any;
    lt_pipe_plans plans;
    job.memory = 214;
    CHECK_FAILS(lt_pipe_plans_find(&n->net, &job, &plans), LT_EINVAL, "no plan fits into 0.000214");
    job.memory = 215; /* two stages fit, with the smallest micro-batches */
    CHECK_OK(lt_pipe_plans_find(&n->net, &job, &plans));
    CHECK_EQ(plans.plan[0].stages, 2);
    lt_pipe_plans_free(&plans);
    free(n);
}

TEST(every_allocation_can_fail)
{
    net *n = two_units();
    int allocations = 0;
    for (bool is_reached = true; is_reached; allocations++) {
        lt_pipe_plans plans;
        fail_at(allocations + 1);
        lt_status status = lt_pipe_plans_find(&n->net, &any, &plans);
        is_reached = end_failing();
        CHECK_EQ(status, is_reached ? LT_ENOMEM : LT_OK);
        if (is_reached)
            CHECK_MSG("out of memory");
        lt_pipe_plans_free(&plans);
    }
    CHECK(allocations > 50);
    for (int i = 1; i < 6; i++) {
        lt_pipe_plan_stage stage[] = {{.first = 0}, {.first = 1}};
        lt_pipe_plan plan = {2, 1, 2, 0, LT_1F1B, 0, stage};
        fail_at(i);
        lt_status status = lt_pipe_plan_predict(&n->net, &any, &plan);
        CHECK(end_failing());
        CHECK_EQ(status, LT_ENOMEM);
    }
    free(n);
}

/* ==== Speed =================================================================================== */

TEST(many_ranks_and_units)
{
    net *n = random_net(UNITS);
    lt_pipe_job job = any;
    lt_pipe_plans plans;
    job.ranks = STAGES;
    job.batch = 64;
    double began = lt__seconds();
    CHECK_OK(lt_pipe_plans_find(&n->net, &job, &plans));
    printf("%d plans for %d units and %d ranks: %.2f s\n", plans.n, UNITS, STAGES,
           lt__seconds() - began);
    check_order(&plans, plans.plan[0].seconds);
    check_plan(n, &job, &plans.plan[0]);
    lt_pipe_plans_free(&plans);
    free(n);
}
