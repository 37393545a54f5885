/* test_plan.c - predicted steps of plans of pipelines. */
#include "core/tensor.h"
#include "dist/bucket_plan.h"
#include "ops/ops.h"
#include "tests/dist/nets.h"
#include "tests/lt_test.h"

/* ==== One plan ================================================================================ */

TEST(times_are_fitted_by_least_squares)
{
    static const double sizes[] = {1, 4, 16};
    lt_pipe_line l = lt_pipe_fit(sizes, (double[]){5, 11, 35}, 3);
    CHECK_NEAR(l.at_zero, 3, 1e-12);
    CHECK_NEAR(l.per_image, 2, 1e-12);
    l = lt_pipe_fit(sizes, (double[]){2, 3}, 2);
    CHECK_NEAR(l.at_zero, 5. / 3, 1e-12);
    CHECK_NEAR(l.per_image, 1. / 3, 1e-12);
    l = lt_pipe_fit(&sizes[1], (double[]){8}, 1);
    CHECK(l.at_zero == 0 && l.per_image == 2);
    l = lt_pipe_fit(sizes, (double[]){1, 7, 31}, 3); /* the line is -1 + 2 x */
    CHECK(l.at_zero == 0);
    CHECK_NEAR(l.per_image, (1 + 28 + 496) / 273., 1e-12);
    l = lt_pipe_fit(sizes, (double[]){3, 2, 1}, 3);
    CHECK(l.at_zero == 2 && l.per_image == 0);
    l = lt_pipe_fit((double[]){4, 4}, (double[]){8, 12}, 2);
    CHECK(l.at_zero == 0 && l.per_image == 2.5);
    l = lt_pipe_fit(sizes, (double[]){0, 0, 0}, 3);
    CHECK(l.at_zero == 0 && l.per_image == 0);
}

/* The fit is at least as good as any other line without negative numbers. */
TEST(no_other_line_fits_better)
{
    static const double sizes[] = {1, 4, 16};
    for (int k = 0; k < 200; k++) {
        double t[3] = {pick(20), pick(40), pick(80)}, error[2] = {0, 0};
        lt_pipe_line l = lt_pipe_fit(sizes, t, 3);
        CHECK(l.at_zero >= 0 && l.per_image >= 0);
        for (int j = 0; j < 50; j++) {
            lt_pipe_line other = {pick(2000) / 100., pick(1000) / 100.};
            for (int i = 0; i < 3; i++) {
                error[0] += pow(l.at_zero + l.per_image * sizes[i] - t[i], 2);
                error[1] += pow(other.at_zero + other.per_image * sizes[i] - t[i], 2);
            }
            CHECK(error[0] <= error[1] + 1e-9);
        }
    }
}

TEST(two_stages_by_hand)
{
    static const double seconds[] = {
        [LT_GPIPE] = 14.25, [LT_1F1B] = 14.25, [LT_ZERO_BUBBLE] = 13.25};
    static const double peak[] = {[LT_GPIPE] = 230, [LT_1F1B] = 215, [LT_ZERO_BUBBLE] = 215};
    net *n = two_units();
    for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++) {
        lt_pipe_plan_stage stage[] = {{.first = 0}, {.first = 1}};
        lt_pipe_plan plan = {2, 1, 2, 0, kind, 0, stage};
        CHECK_OK(lt_pipe_plan_predict(&n->net, &any, &plan));
        CHECK_NEAR(plan.seconds, seconds[kind], 1e-12);
        CHECK_NEAR(stage[0].busy, 6.25, 1e-12);
        CHECK_NEAR(stage[1].busy, 8.5, 1e-12);
        CHECK_NEAR(stage[0].idle, 1 - 6.25 / seconds[kind], 1e-12);
        CHECK(stage[0].sent_bytes == 20 && stage[1].sent_bytes == 20);
        CHECK(stage[0].exposed == 0 && stage[0].exchanged_bytes == 0);
        CHECK(stage[0].peak_bytes == 114 && stage[1].peak_bytes == peak[kind]);
        CHECK_EQ(stage[0].in_memory, 2);
    }
    free(n);
}

TEST(an_output_without_gradient_returns_no_message)
{
    net *n = two_units();
    lt_pipe_plan_stage stage[] = {{.first = 0}, {.first = 1}};
    lt_pipe_plan plan = {2, 1, 2, 0, LT_1F1B, 0, stage};
    n->values[0].requires_grad = false;
    CHECK_OK(lt_pipe_plan_predict(&n->net, &any, &plan));
    CHECK_NEAR(plan.seconds, 11, 1e-12); /* of stage 1, with its update: 2.5 + 2 * 4 + 0.5 */
    CHECK(stage[0].sent_bytes == 20 && stage[1].sent_bytes == 0);
    free(n);
}

/* The output of unit 0 is used by units 1, 2 and 3. Stages: 0; 1 and 2; 3. */
TEST(a_value_is_sent_once_to_each_stage_that_uses_it)
{
    net *n = net_new();
    for (int i = 0; i < 4; i++)
        add_unit(n, 1, 1, 1);
    add_value(n, 0, 1, 2, 10);
    n->uses[0][2] = 3;
    n->values[0].n = 3;
    add_value(n, 1, 2, -1, 1000);
    add_value(n, 2, 3, -1, 30)->requires_grad = false;
    lt_pipe_plan_stage stage[] = {{.first = 0}, {.first = 1}, {.first = 3}};
    lt_pipe_plan plan = {3, 1, 2, 0, LT_1F1B, 0, stage};
    CHECK_OK(lt_pipe_plan_predict(&n->net, &any, &plan));
    CHECK(stage[0].sent_bytes == 2 * 20);
    CHECK(stage[1].sent_bytes == 2 * (30 + 10));
    CHECK(stage[2].sent_bytes == 2 * 10);
    stage[2].first = 2; /* now the value that stage 1 keeps is sent, too */
    CHECK_OK(lt_pipe_plan_predict(&n->net, &any, &plan));
    CHECK(stage[0].sent_bytes == 2 * 20);
    CHECK(stage[1].sent_bytes == 2 * (1000 + 10));
    CHECK(stage[2].sent_bytes == 2 * (1000 + 10));
    free(n);
}

/* A stage without units passes nothing on: values go straight to the stage that uses them. */
TEST(a_stage_may_be_empty)
{
    net *n = two_units();
    lt_pipe_plan_stage stage[] = {{.first = 0}, {.first = 1}, {.first = 1}, {.first = 2}};
    lt_pipe_plan two = {
        2, 1, 2, 0, LT_GPIPE, 0, (lt_pipe_plan_stage[]){{.first = 0}, {.first = 1}}};
    lt_pipe_plan four = {4, 1, 2, 0, LT_GPIPE, 0, stage};
    CHECK_OK(lt_pipe_plan_predict(&n->net, &any, &two));
    CHECK_OK(lt_pipe_plan_predict(&n->net, &any, &four));
    CHECK(two.seconds == four.seconds);
    CHECK(stage[1].busy == 0 && stage[3].busy == 0 && stage[1].idle == 1);
    CHECK(stage[1].sent_bytes == 0 && stage[1].peak_bytes == 0);
    free(n);
}

/* ==== The gradient exchange =================================================================== */

/* The unit of 2 MiB is the first bucket. That of 3 MiB exceeds half of the 4 MiB left, and has its
 * own bucket, like the last one. A sum of 2 ranks takes 0.75 s and 1 s per MiB. */
TEST(data_parallelism_by_hand)
{
    net *n = net_new();
    lt_pipe_plan_stage stage[1] = {{.first = 0}};
    lt_pipe_plan plan = {1, 2, 1, 0, LT_1F1B, 0, stage};
    lt_pipe_job job = any;
    for (int i = 0; i < 3; i++)
        add_unit(n, 1, i < 2 ? 1 : 0.5, i == 0 ? 2 : i == 1 ? 1 : 0.5)->update = 0.5;
    n->units[0].grad_bytes = MiB;
    n->units[1].grad_bytes = 3 * MiB;
    n->units[2].grad_bytes = 2 * MiB;
    CHECK_OK(lt_pipe_plan_predict(&n->net, &job, &plan));
    /* ready at 1, 3, 6 s of backward; sent at 0.75 (record), 3.75, 7.5, 9.25 s */
    CHECK_NEAR(stage[0].exposed, 3.25, 1e-12);
    CHECK_NEAR(stage[0].exchange, 0.75 + 2.75 + 3.75 + 1.75, 1e-12);
    CHECK_NEAR(plan.seconds, 3 + 6 + 3.25 + 1.5, 1e-12);
    CHECK_NEAR(stage[0].busy, 10.5, 1e-12);
    CHECK(stage[0].exchanged_bytes == 6 * MiB && stage[0].sent_bytes == 0);
    job.wire_bytes = 2; /* sent at 0.75, 2.75, 5.25, 7.25 s */
    CHECK_OK(lt_pipe_plan_predict(&n->net, &job, &plan));
    CHECK_NEAR(stage[0].exposed, 1.25, 1e-12);
    CHECK(stage[0].exchanged_bytes == 3 * MiB);
    job.wire_bytes = 4;
    job.batch = 4;
    plan.micro = 2; /* the exchange begins with the last pass */
    CHECK_OK(lt_pipe_plan_predict(&n->net, &job, &plan));
    CHECK_NEAR(plan.seconds, 2 * 9 + 3.25 + 1.5, 1e-12);
    plan = (lt_pipe_plan){1, 4, 1, 0, LT_1F1B, 0, stage};
    /* a sum takes 7 * 0.25 + 1.5 s per MiB: sent at 1.75, 6.5, 12.75, 16 s */
    CHECK_OK(lt_pipe_plan_predict(&n->net, &job, &plan));
    CHECK_NEAR(stage[0].exposed, 10, 1e-12);
    CHECK(stage[0].exchanged_bytes == 9 * MiB);
    free(n);
}

/* Stage 0 ends its passes at 13 s of two_units(), and stage 1 at 10.5 s. Each has one bucket, which
 * is complete at the end of the last pass. The record is sent before. */
TEST(the_exchange_of_a_stage_begins_with_its_last_pass)
{
    net *n = two_units();
    lt_pipe_plan_stage stage[] = {{.first = 0}, {.first = 1}};
    lt_pipe_plan plan = {2, 2, 2, 0, LT_ZERO_BUBBLE, 0, stage};
    lt_pipe_job job = any;
    job.batch = 4;
    n->units[0].grad_bytes = n->units[1].grad_bytes = MiB;
    CHECK_OK(lt_pipe_plan_predict(&n->net, &job, &plan));
    CHECK_NEAR(stage[0].exposed, 1.75, 1e-12);
    CHECK_NEAR(stage[0].exchange, 0.75 + 1.75, 1e-12);
    CHECK_NEAR(plan.seconds, 13 + 1.75 + 0.25, 1e-12);
    n->units[1].grad_bytes = 4 * MiB;
    CHECK_OK(lt_pipe_plan_predict(&n->net, &job, &plan));
    CHECK_NEAR(plan.seconds, 10.5 + 4.75 + 0.5, 1e-12);
    plan.kind = LT_1F1B;
    n->units[1].grad_bytes = MiB;
    CHECK_OK(lt_pipe_plan_predict(&n->net, &job, &plan));
    CHECK_NEAR(plan.seconds, 14 + 1.75 + 0.25, 1e-12);
    free(n);
}

/* The sums of a step end at the same point of the next step: a step takes 14 s and the sum of its
 * record, or as long as the sums. They need memory of their own. */
TEST(with_a_delay_a_step_hides_the_sums)
{
    net *n = two_units();
    lt_pipe_plan_stage stage[] = {{.first = 0}, {.first = 1}};
    lt_pipe_plan plan = {2, 2, 2, 0, LT_1F1B, 0, stage};
    lt_pipe_job job = any;
    job.batch = 4;
    n->units[0].grad_bytes = n->units[1].grad_bytes = MiB;
    CHECK_OK(lt_pipe_plan_predict(&n->net, &job, &plan));
    double peak = stage[0].peak_bytes;
    job.delay = true;
    CHECK_OK(lt_pipe_plan_predict(&n->net, &job, &plan));
    CHECK_NEAR(plan.seconds, 14 + 0.75 + 0.25, 1e-12);
    CHECK(stage[0].exposed == 0 && stage[0].peak_bytes == peak + MiB);
    n->units[0].grad_bytes = 20 * MiB;
    CHECK_OK(lt_pipe_plan_predict(&n->net, &job, &plan));
    CHECK_NEAR(plan.seconds, 0.75 + 20.75, 1e-12);
    CHECK_NEAR(stage[0].exposed, 21.5 - 15, 1e-12);
    plan.replicas = 1; /* nothing to sum */
    job.batch = 2;
    CHECK_OK(lt_pipe_plan_predict(&n->net, &job, &plan));
    CHECK(plan.seconds < 15 && stage[0].peak_bytes == peak);
    free(n);
}

/* The gradients of a unit's weights take 2 s for each of two micro-batches, and their sum 2.75 s.
 * With a lag of 2, no pass for weights runs before the last backward pass. */
TEST(passes_for_weights_after_the_last_pass_overlap)
{
    /* of a pass of 6 s, buckets are complete at 4 and 6 s, and sent at 6.75 and 9.5 s; of a pass of
     * 10 s, complete at 6 and 10 s, and sent at 8.75 and 12.75 s */
    static const double exposed[] = {3.5, 2.75};
    net *n = net_new();
    lt_pipe_plan_stage stage[] = {{.first = 0}};
    lt_pipe_job job = any;
    job.batch = 4;
    for (int i = 0; i < 2; i++)
        add_unit(n, 1, 1, 2)->grad_bytes = 2 * MiB;
    for (int k = 0; k < 2; k++) {
        lt_pipe_plan plan = {1, 2, 2, 2 * k, LT_ZERO_BUBBLE, 0, stage};
        CHECK_OK(lt_pipe_plan_predict(&n->net, &job, &plan));
        CHECK_NEAR(stage[0].exposed, exposed[k], 1e-12);
        CHECK_NEAR(plan.seconds, 16 + exposed[k], 1e-12);
    }
    free(n);
}

/* The number of sums that the prediction counts, without the step record. */
static int predicted_buckets(const net *n)
{
    lt_pipe_plan_stage stage[1] = {{.first = 0}};
    lt_pipe_plan plan = {1, 2, 1, 0, LT_1F1B, 0, stage};
    lt_pipe_job job = any;
    job.exchange = (lt_pipe_link){1, INFINITY};
    CHECK_OK(lt_pipe_plan_predict(&n->net, &job, &plan));
    CHECK_NEAR(stage[0].exposed, round(stage[0].exposed / 3) * 3, 1e-9);
    return (int)round(stage[0].exposed / 3) - 1;
}

TEST(predicted_buckets_are_those_of_the_reducer)
{
    for (int k = 0; k < 20; k++) {
        lt_ctx *ctx = lt_open(NULL);
        lt_params *params = lt_params_new(ctx);
        lt_bucket_plan buckets = {0};
        lt_tensor *x[12];
        net *n = net_new();
        int count = 1 + pick(12);
        for (int i = 0; i < count; i++) {
            char name[16];
            int64_t dim = 16 + 16 * (pick(2) ? pick(1 << 16) : pick(1 << 10));
            snprintf(name, sizeof name, "p%d", i);
            x[i] = lt_param_new(ctx, LT_F32, 1, &dim, (lt_init){LT_INIT_CONSTANT, 0, 0});
            CHECK_OK(lt_params_add(params, name, x[i]));
            add_unit(n, 0, 0, 0)->grad_bytes = 4. * (double)dim;
        }
        CHECK_OK(lt_params_place(params));
        for (int i = 0; i < count; i++)
            CHECK_OK(lt__bucket_plan_add(&buckets, x[i]));
        CHECK_OK(lt__bucket_plan_cut(&buckets, LT_FIRST_BUCKET, LT_BUCKET));
        CHECK_EQ(predicted_buckets(n), buckets.n_buckets);
        lt__bucket_plan_free(&buckets);
        for (int i = 0; i < count; i++)
            lt_release(x[i]);
        lt_params_free(params);
        lt_ctx_free(ctx);
        free(n);
    }
}

/* ==== Refusals ================================================================================ */

TEST(empty_nets_are_refused)
{
    lt_pipe_plan_stage stage[1] = {{.first = 0}};
    lt_pipe_plan plan = {1, 1, 1, 0, LT_1F1B, 0, stage};
    lt_pipe_plans plans;
    net *n = two_units();
    static const char no_unit[] = "planning: a net has at least 1 unit, not 0";
    static const char no_size[] = "planning: a net is measured at 1 size or more, not 0";
    n->net.n_sizes = 0;
    CHECK_FAILS(lt_pipe_plans_find(&n->net, &any, &plans), LT_EINVAL, no_size);
    CHECK(plans.n == 0 && !plans.plan);
    CHECK_FAILS(lt_pipe_plan_predict(&n->net, &any, &plan), LT_EINVAL, no_size);
    n->net = (lt_pipe_net){.n_sizes = 1, .sizes = {1}};
    CHECK_FAILS(lt_pipe_plans_find(&n->net, &any, &plans), LT_EINVAL, no_unit);
    CHECK_FAILS(lt_pipe_plan_predict(&n->net, &any, &plan), LT_EINVAL, no_unit);
    free(n);
}

TEST(invalid_jobs_and_plans_are_refused)
{
    net *n = two_units();
    lt_pipe_plans plans;
#define REFUSE(change, text)                                                                       \
    do {                                                                                           \
        lt_pipe_job job = any;                                                                     \
        job.change;                                                                                \
        CHECK_FAILS(lt_pipe_plans_find(&n->net, &job, &plans), LT_EINVAL, text);                   \
    } while (0)
    REFUSE(ranks = 0, "planning: a job has at least 1 rank, not 0");
    REFUSE(batch = 0, "planning: a batch has at least 1 image, not 0");
    REFUSE(memory = -1, "planning: the ranks have -1 bytes of memory; use 0 for no limit");
    REFUSE(wire_bytes = 3, "gradients are sent with 2 or 4 bytes, not 3");
    REFUSE(least_micro = -1, "micro-batches have at least 1 image, not -1");
    REFUSE(most_micro = 1025, "a step has at most 1024 micro-batches, not 1025");
    REFUSE(link.bytes_per_s = 0, "the link of the messages has a latency of 0.5 s and 0 bytes/s");
    REFUSE(link.bytes_per_s = 1e-101, "the rate at least 1e-100");
    REFUSE(exchange.latency = NAN, "the link of the gradient exchange has a latency of nan s");
    REFUSE(stages = 3, "the number of stages must be from 1 to 2 for this job, but");
    REFUSE(replicas = 0, "the number of replicas must be from 1 to 2");
    REFUSE(micro = 3, "the number of micro-batches must be from 1 to 2");
    REFUSE(lag = -2, "the lag must be from 0 to 1024");
    REFUSE(kind = LT_SCHEDULE_KINDS, "the kind of schedule must be from 0 to 2");
    REFUSE(stages = 2; job.least_micro = 8, "planning: no plan is possible with 2 ranks, a batch");
#undef REFUSE
#define REFUSE(change, text)                                                                       \
    do {                                                                                           \
        lt_pipe_plan_stage stage[] = {{.first = 0}, {.first = 1}};                                 \
        lt_pipe_plan plan = {2, 1, 2, 0, LT_1F1B, 0, stage};                                       \
        change;                                                                                    \
        CHECK_FAILS(lt_pipe_plan_predict(&n->net, &any, &plan), LT_EINVAL, text);                  \
    } while (0)
    REFUSE(plan.stages = 65, "a plan has 1 to 64 stages, not 65");
    REFUSE(plan.replicas = 2,
           "2 replicas with 2 micro-batches each is not possible for a batch of 2");
    REFUSE(plan.micro = 0, "a plan has 1 to 1024 micro-batches, not 0");
    REFUSE(plan.lag = -1, "a lag of 0 to 1024, not -1");
    REFUSE(stage[0].first = 1, "stage 0 of a plan begins with unit 1");
    n->units[1].may_begin_stage = false;
    REFUSE(plan.lag = 0, "stage 1 of a plan begins with unit 1, which may not begin a stage");
    n->units[1].may_begin_stage = true;
    REFUSE(stage[1].first = 3, "stage 1 of a plan begins with unit 3");
#undef REFUSE
    free(n);
}
