/* What several ranks tell each other about the gradients of a step. */
#include <math.h>
#include <string.h>

#include "amp/amp.h"
#include "tests/lt_test.h"

enum { RANKS = 3 };

typedef struct job {
    lt_ctx *ctx;
    lt_loss_scale *scale[RANKS];
    int wire;      /* for the way of the last bucket */
    bool again;    /* it had to be sent again */
} job;

static job begin(int k)
{
    job j = {.ctx = lt_open(NULL)};
    lt_scaler scaler = lt_scaler_begin(LT_SCALE_ADAPTIVE, k, 0);
    for (int i = 0; i < RANKS; i++)
        j.scale[i] = lt_loss_scale_new(j.ctx, &scaler);
    return j;
}

static void end(job *j)
{
    for (int i = 0; i < RANKS; i++)
        lt_loss_scale_free(j->scale[i]);
    lt_ctx_free(j->ctx);
}

/* One bucket, in which rank i has gradients up to largest[i]. */
static void send(job *j, int bucket, const double *largest, const int *not_finite)
{
    float sum[LT_SCALE_NUMBERS] = {0};
    for (int i = 0; i < RANKS; i++) {
        float numbers[LT_SCALE_NUMBERS] = {0};
        int wire;
        lt_loss_scale_tell(j->scale[i], bucket, largest[i], not_finite[i], numbers, &wire);
        CHECK(i == 0 || wire == j->wire);
        j->wire = wire;
        for (int n = 0; n < LT_SCALE_NUMBERS; n++)
            sum[n] += numbers[n];
    }
    for (int i = 0; i < RANKS; i++) {
        bool again = lt_loss_scale_hear(j->scale[i], bucket, sum, true);
        CHECK(i == 0 || again == j->again);
        j->again = again;
    }
}

static void send_finite(job *j, int bucket, double a, double b, double c)
{
    send(j, bucket, (double[]){a, b, c}, (int[]){0, 0, 0});
}

/* As often as it takes, which is to be so many times. */
static void send_through(job *j, int bucket, double a, double b, double c, int times)
{
    int sent = 0;
    do
        send_finite(j, bucket, a, b, c);
    while (++sent < 9 && j->again);
    CHECK_EQ(sent, times);
}

/* The step of all ranks, which they decide on alike. */
static lt_scaled_step decide(job *j)
{
    lt_scaled_step first = {0};
    for (int i = 0; i < RANKS; i++) {
        int64_t dim = 1;
        lt_ctx *ctx = lt_open(NULL);
        lt_params *p = lt_params_new(ctx);
        lt_tensor *w = lt_param_new(ctx, LT_F32, 1, &dim, (lt_init){LT_INIT_CONSTANT, 1, 0});
        CHECK_OK(lt_params_add(p, "w", w));
        CHECK_OK(lt_params_place(p));
        lt_optim *optim = lt_optim_new(ctx, "sgd_step", &w, 1);
        CHECK_OK(lt_use_loss_scale(ctx, j->scale[i]));
        CHECK_OK(lt_backward(w, NULL)); /* finds 1 on this rank, which does not count */
        lt_loss_scale_agree(j->scale[i]);
        lt_opt opts[LT_MAX_OPT];
        CHECK_OK(lt_opts_parse(&lt_optim_def(optim)->schema, "lr=0.1", opts));
        CHECK_OK(lt_optim_step(optim, (const lt_opt *const[]){opts}, 1, NULL));
        CHECK_OK(lt_use_loss_scale(ctx, NULL));
        lt_scaled_step step = lt_loss_scale_step(j->scale[i]);
        lt_scaler *mine = lt_loss_scale_scaler(j->scale[i]);
        if (i == 0)
            first = step;
        CHECK(step.exponent == first.exponent && step.finite == first.finite);
        CHECK(memcmp(mine, lt_loss_scale_scaler(j->scale[0]), sizeof *mine) == 0);
        lt_optim_free(optim);
        lt_params_free(p);
        lt_release(w);
        lt_ctx_free(ctx);
    }
    return first;
}

TEST(the_largest_of_all_ranks_and_buckets_counts)
{
    job j = begin(0);
    send_finite(&j, 0, 3, 100, 0);
    send_finite(&j, 1, 0, 0, 0x1p-5);
    lt_scaled_step step = decide(&j);
    CHECK(step.finite);
    CHECK_EQ(step.exponent, 6);
    send_finite(&j, 0, 0, 0, 0.75);
    CHECK_EQ(decide(&j).exponent, -1); /* nothing is left of the step before */
    send_finite(&j, 0, 0, 0, 0);
    CHECK_EQ(decide(&j).exponent, LT_NO_EXPONENT);
    end(&j);
}

TEST(exponents_end_where_they_can_be_told)
{
    job j = begin(0);
    send_through(&j, 0, 0x1p-80, 0, 0, 3);
    CHECK_EQ(j.wire, 92);
    CHECK_EQ(decide(&j).exponent, LT_EXPONENT_LOW);
    send_through(&j, 0, 0x1p-39, 0, 0, 2);
    CHECK_EQ(decide(&j).exponent, -39);
    send_through(&j, 0, 0x1p79, 0, 0x1p-80, 3);
    CHECK_EQ(decide(&j).exponent, 79);
    send_through(&j, 0, 0, 0x1p127, 0, 2);
    CHECK_EQ(j.wire, -120); /* the scale has gone down */
    CHECK_EQ(decide(&j).exponent, LT_EXPONENT_HIGH);
    send_through(&j, 1, 0, 0x1p-126, 0, 3); /* not that it could travel as it is */
    CHECK_EQ(j.wire, 100);
    send_through(&j, 1, 0x1p-126, 0, 0, 1);
    end(&j);
}

TEST(what_is_not_finite_on_one_rank_skips_the_step_of_all)
{
    for (int rank = 0; rank < RANKS; rank++)
        for (int bucket = 0; bucket < 3; bucket++) {
            job j = begin(0);
            for (int b = 0; b < 3; b++) {
                int odd[RANKS] = {0};
                odd[rank] = b == bucket ? 7 : 0;
                send(&j, b, (double[]){1, 2, 4}, odd);
            }
            lt_scaled_step step = decide(&j);
            CHECK(!step.finite);
            CHECK_EQ(step.exponent, 2);
            for (int b = 0; b < 3; b++)
                send_finite(&j, b, 1, 1, 1);
            CHECK(decide(&j).finite);
            end(&j);
        }
}

/* ==== On the way in f16 ======================================================================= */

TEST(the_way_follows_the_gradients_with_two_bits_to_spare)
{
    job j = begin(4);
    send_finite(&j, 0, 0x1p4, 0x1p6, 1); /* scaled: the true ones end below 2^3 */
    CHECK_EQ(j.wire, 4); /* at first as the loss */
    CHECK(!j.again);
    send_finite(&j, 0, 0x1p4, 0x1p6, 1);
    CHECK_EQ(j.wire, 10); /* so sums stay below 2^13 */
    send_finite(&j, 0, 0x1p8, 0x1p6, 1); /* which takes both bits */
    CHECK_EQ(j.wire, 10);
    CHECK(!j.again);
    send_finite(&j, 1, 0x1p-20, 0, 0); /* another bucket */
    CHECK_EQ(j.wire, 4);
    send_finite(&j, 1, 0x1p-20, 0, 0);
    CHECK_EQ(j.wire, 36);
    send_finite(&j, 1, 0, 0, 0); /* says nothing */
    send_finite(&j, 1, 0x1p-20, 0, 0);
    CHECK_EQ(j.wire, 36);
    end(&j);
}

TEST(a_bucket_that_has_grown_too_much_is_sent_again)
{
    job j = begin(0);
    send_finite(&j, 0, 1, 1, 1);
    CHECK_EQ(lt_loss_scale_sent_again(j.scale[0]), 0);
    send_finite(&j, 0, 8, 1, 1);
    CHECK_EQ(j.wire, 12);
    CHECK(j.again);
    send_finite(&j, 0, 8, 1, 1);
    CHECK_EQ(j.wire, 9);
    CHECK(!j.again);
    CHECK_EQ(lt_loss_scale_sent_again(j.scale[2]), 1);
    CHECK(decide(&j).finite); /* and costs no step */
    int *wire;
    CHECK_EQ(lt_loss_scale_wires(j.scale[1], &wire), 1);
    CHECK_EQ(wire[0], 9);
    end(&j);
}

TEST(a_bucket_that_has_shrunk_too_much_is_sent_again)
{
    job j = begin(0);
    send_finite(&j, 0, 1, 1, 1);
    CHECK(!j.again);
    send_finite(&j, 0, 0x1p-12, 0x1p-12, 0);
    CHECK_EQ(j.wire, 12);
    CHECK(!j.again);
    send_finite(&j, 0, 0x1p-25, 0, 0);
    CHECK_EQ(j.wire, 24);
    CHECK(j.again);
    send_finite(&j, 0, 0x1p-25, 0, 0);
    CHECK_EQ(j.wire, 37);
    CHECK(!j.again);
    end(&j);
}

TEST(not_in_f16_nothing_is_sent_again)
{
    job j = begin(0);
    float numbers[LT_SCALE_NUMBERS] = {0};
    int wire;
    lt_loss_scale_tell(j.scale[0], 0, 0x1p60, 0, numbers, &wire);
    CHECK(!lt_loss_scale_hear(j.scale[0], 0, numbers, false));
    CHECK_EQ(lt_loss_scale_wires(j.scale[0], &(int *){NULL}), 0);
    end(&j);
}
