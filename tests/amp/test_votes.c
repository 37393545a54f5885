/* The votes of several ranks about the gradients of a step. */
#include <math.h>
#include <string.h>

#include "amp/scale.h"
#include "tests/autograd/train.h"

enum { RANKS = 3 };

typedef struct job {
    lt_ctx *ctx;
    lt_loss_scale *scale[RANKS];
} job;

static job begin(int k)
{
    job j = {.ctx = lt_open(NULL)};
    lt_scaler scaler = lt_scaler_init(LT_SCALE_ADAPTIVE, k, 0);
    for (int i = 0; i < RANKS; i++) {
        j.scale[i] = lt_loss_scale_new(j.ctx, &scaler);
        lt__vote_start(j.scale[i]);
    }
    return j;
}

static void end(job *j)
{
    for (int i = 0; i < RANKS; i++)
        lt_loss_scale_free(j->scale[i]);
    lt_ctx_free(j->ctx);
}

/* One bucket, in which rank i has gradients up to largest[i]. */
static void send(job *j, const double *largest, const int *not_finite)
{
    float sum[LT_VOTE_NUMBERS] = {0};
    for (int i = 0; i < RANKS; i++) {
        float numbers[LT_VOTE_NUMBERS] = {0};
        lt__vote_pack(j->scale[i], &(lt_grad_stats){largest[i], not_finite[i]}, numbers);
        for (int n = 0; n < LT_VOTE_NUMBERS; n++)
            sum[n] += numbers[n];
    }
    for (int i = 0; i < RANKS; i++)
        lt__vote_unpack(j->scale[i], sum);
}

static void send_finite(job *j, double a, double b, double c)
{
    send(j, (double[]){a, b, c}, (int[]){0, 0, 0});
}

/* Decides on the step. All ranks must decide alike. */
static lt_scaled_step decide(job *j)
{
    lt_scaled_step first = {0};
    for (int i = 0; i < RANKS; i++) {
        lt_ctx *ctx = lt_open(NULL);
        trained t = trained_new(ctx, 1, "sgd_step");
        CHECK_OK(lt_use_loss_scale(ctx, j->scale[i]));
        CHECK_OK(lt_backward(t.w, NULL)); /* this rank's own value 1 does not count */
        CHECK_OK(step_with(t.optim, "lr=0.1", NULL));
        CHECK_OK(lt_use_loss_scale(ctx, NULL));
        lt__vote_start(j->scale[i]); /* of the next step */
        lt_scaled_step step = lt_loss_scale_step(j->scale[i]);
        lt_scaler *mine = lt_loss_scale_scaler(j->scale[i]);
        if (i == 0)
            first = step;
        CHECK(step.exponent == first.exponent && step.finite == first.finite);
        CHECK(memcmp(mine, lt_loss_scale_scaler(j->scale[0]), sizeof *mine) == 0);
        trained_free(&t);
        lt_ctx_free(ctx);
    }
    return first;
}

TEST(the_largest_of_all_ranks_and_buckets_counts)
{
    job j = begin(0);
    send_finite(&j, 3, 100, 0);
    send_finite(&j, 0, 0, 0x1p-5);
    lt_scaled_step step = decide(&j);
    CHECK(step.finite);
    CHECK_EQ(step.exponent, 6);
    send_finite(&j, 0, 0, 0.75);
    CHECK_EQ(decide(&j).exponent, -1); /* the previous step has no effect */
    send_finite(&j, 0, 0, 0);
    CHECK_EQ(decide(&j).exponent, LT_NO_EXPONENT);
    end(&j);
    j = begin(4);
    send_finite(&j, 0x1p-6, 0, 0); /* exponents are those of unscaled gradients */
    CHECK_EQ(decide(&j).exponent, -2);
    end(&j);
}

TEST(exponents_are_clamped_to_the_range_of_votes)
{
    job j = begin(0);
    send_finite(&j, 0x1p-80, 0, 0);
    CHECK_EQ(decide(&j).exponent, LT_EXPONENT_LOW);
    send_finite(&j, 0x1p-39, 0, 0);
    CHECK_EQ(decide(&j).exponent, -39);
    send_finite(&j, 0x1p79, 0, 0x1p-80);
    CHECK_EQ(decide(&j).exponent, 79);
    send_finite(&j, 0, 0x1p127, 0);
    CHECK_EQ(decide(&j).exponent, LT_EXPONENT_HIGH);
    end(&j);
}

TEST(non_finite_values_on_one_rank_skip_the_step_on_all)
{
    for (int rank = 0; rank < RANKS; rank++)
        for (int bucket = 0; bucket < 3; bucket++) {
            job j = begin(0);
            for (int b = 0; b < 3; b++) {
                int odd[RANKS] = {0};
                odd[rank] = b == bucket ? 7 : 0;
                send(&j, (double[]){1, 2, 4}, odd);
            }
            lt_scaled_step step = decide(&j);
            CHECK(!step.finite);
            CHECK_EQ(step.exponent, 2);
            for (int b = 0; b < 3; b++)
                send_finite(&j, 1, 1, 1);
            CHECK(decide(&j).finite);
            end(&j);
        }
}

TEST(votes_before_a_restart_do_not_count)
{
    job j = begin(0);
    send(&j, (double[]){1, 2, 4}, (int[]){1, 0, 0});
    for (int i = 0; i < RANKS; i++)
        lt__vote_start(j.scale[i]);
    send_finite(&j, 1, 0, 0);
    lt_scaled_step step = decide(&j);
    CHECK(step.finite);
    CHECK_EQ(step.exponent, 0);
    end(&j);
}

/* ==== Wire scales for f16 ===================================================================== */

typedef struct wire_scales {
    lt_wire_scales of[RANKS];
} wire_scales;

static wire_scales wire_scales_begin(void)
{
    return (wire_scales){{lt_wire_scales_init(), lt_wire_scales_init(), lt_wire_scales_init()}};
}

/* Sends one bucket whose gradients reach a, b and c. Returns the exponent of its wire scale. Sets
 * *again if the bucket must be resent. */
static int send_once(wire_scales *w, int bucket, double a, double b, double c, bool *again)
{
    double largest[RANKS] = {a, b, c};
    float sum[LT_WIRE_SCALE_NUMBERS] = {0};
    int exponent = 0;
    for (int i = 0; i < RANKS; i++) {
        float numbers[LT_WIRE_SCALE_NUMBERS] = {0};
        int packed = lt__wire_scales_pack(&w->of[i], bucket, largest[i], numbers);
        CHECK(i == 0 || packed == exponent);
        exponent = packed;
        for (int n = 0; n < LT_WIRE_SCALE_NUMBERS; n++)
            sum[n] += numbers[n];
    }
    for (int i = 0; i < RANKS; i++) {
        bool once_more = lt__wire_scales_unpack(&w->of[i], bucket, sum);
        CHECK(i == 0 || once_more == *again);
        *again = once_more;
    }
    return exponent;
}

/* Sends a bucket until no resend is needed. Expects this number of sends, and this exponent at the
 * end. */
static void send_until_done(wire_scales *w, int bucket, double a, double b, double c, int times,
                            int exponent)
{
    int sent = 0, has;
    bool again;
    do
        has = send_once(w, bucket, a, b, c, &again);
    while (++sent < 9 && again);
    CHECK_EQ(sent, times);
    CHECK_EQ(has, exponent);
}

/* Sums stay below 2^13. */
TEST(the_wire_scale_follows_the_gradients_with_two_bits_of_headroom)
{
    wire_scales w = wire_scales_begin();
    send_until_done(&w, 0, 1, 4, 0x1p-4, 2, 10);
    send_until_done(&w, 0, 1, 16, 0x1p-4, 1, 10); /* uses both bits of headroom */
    send_until_done(&w, 0, 1, 4, 0x1p-4, 1, 8);
    send_until_done(&w, 1, 0x1p-24, 0, 0, 1, 24); /* another bucket starts over */
    send_until_done(&w, 1, 0x1p-24, 0, 0, 1, 36);
    send_until_done(&w, 1, 0, 0, 0, 1, 36); /* zeros do not change the scale */
    send_until_done(&w, 1, 0x1p-24, 0, 0, 1, 36);
    CHECK_EQ(w.of[0].used, 2);
    CHECK_EQ(w.of[0].resends, 1);
    CHECK(memcmp(&w.of[0], &w.of[2], sizeof w.of[0]) == 0);
}

TEST(a_bucket_that_grew_too_much_is_resent)
{
    wire_scales w = wire_scales_begin();
    send_until_done(&w, 0, 1, 1, 1, 2, 12);
    send_until_done(&w, 0, 4, 1, 1, 1, 12);
    send_until_done(&w, 0, 32, 1, 1, 2, 7);
    send_until_done(&w, 0, 0x1p120, 1, 1, 3, -108); /* more than one vote can express */
}

TEST(a_bucket_that_shrank_too_much_is_resent)
{
    wire_scales w = wire_scales_begin();
    send_until_done(&w, 0, 1, 1, 1, 2, 12);
    send_until_done(&w, 0, 0x1p-12, 0x1p-12, 0, 1, 12);
    send_until_done(&w, 0, 0x1p-25, 0, 0, 2, 37);
    send_until_done(&w, 0, 0x1p-99, 0, 0, 3, 100);
}

TEST(wire_scales_cover_the_range_of_f32)
{
    wire_scales w = wire_scales_begin();
    send_until_done(&w, 0, 0x1p127, 0, 0, 4, -115);
    send_until_done(&w, 1, 0, 0x1p-126, 0, 3, LT_WIRE_SCALE_MAX);
    send_until_done(&w, 1, 0x1p-126, 0, 0, 1, LT_WIRE_SCALE_MAX); /* no scale is better */
    send_until_done(&w, LT_WIRE_SCALE_COUNT + 1, 0x1p-126, 0, 0, 1,
                    LT_WIRE_SCALE_MAX); /* the wire scale of bucket 1 is shared */
    CHECK_EQ(w.of[0].used, 2);
}
