/* A loss scale that the ranks of a reducer use together: they apply and skip the same steps. */
#include <pthread.h>
#include <string.h>

#include "amp/scale.h"
#include "tests/autograd/train.h"

enum { RANKS = 3, N = 5, STEPS = 6, OVERFLOW_STEP = 3 };

typedef struct job {
    lt_dtype wire;
    bool without_scale;
    int overflows; /* the rank whose gradient overflows in OVERFLOW_STEP, or -1 */
} job;

typedef struct rank {
    const job *job;
    int number;
    lt_group *group;
    pthread_t thread;
    lt_step_status step_status[STEPS];
    float w[STEPS][N];
    lt_scaler scaler;
    lt_wire_scales wires;
} rank;

/* Every rank multiplies the loss by another factor, so that the average shows all of them. */
static lt_status backward(lt_ctx *ctx, lt_tensor *w, double factor)
{
    lt_tensor *by = lt_tensor_full(ctx, LT_F32, 0, NULL, factor);
    lt_tensor *sum = lt_run(ctx, "sum", NULL, w, NULL);
    lt_tensor *loss = lt_run(ctx, "mul", NULL, sum, by, NULL);
    lt_status status = lt_backward(loss, NULL);
    RELEASE(by, sum, loss);
    return status;
}

/* A gradient of 2^120 overflows f32 when it is multiplied by the loss scale, 2^10. */
static double factor_of(const rank *r, int step)
{
    bool overflows = step == OVERFLOW_STEP && r->number == r->job->overflows;
    return overflows ? 0x1p120 : 1 + r->number;
}

static void *train(void *ud)
{
    rank *r = ud;
    lt_scaler scaler = lt_scaler_init(LT_SCALE_ADAPTIVE, 10, 0);
    lt_reducer_config config = {.wire = r->job->wire};
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 1});
    trained t = trained_new(ctx, N, "sgd_step");
    lt_reducer *reducer = lt_reducer_new(ctx, r->group, &config);
    lt_loss_scale *scale = r->job->without_scale ? NULL : lt_loss_scale_new(ctx, &scaler);
    r->wires = lt_wire_scales_init();
    CHECK_OK(lt_reducer_use_loss_scale(reducer, scale, &r->wires));
    CHECK_OK(lt_reducer_add(reducer, &t.w, 1));
    for (int i = 0; i < STEPS; i++) {
        CHECK_OK(backward(ctx, t.w, factor_of(r, i)));
        CHECK_OK(step_with(t.optim, "lr=0.125", &r->step_status[i]));
        CHECK_OK(lt_read(t.w, r->w[i]));
        lt_zero_grad(t.w);
    }
    if (scale)
        r->scaler = *lt_loss_scale_scaler(scale);
    CHECK_OK(lt_reducer_use_loss_scale(reducer, NULL, &r->wires));
    lt_loss_scale_free(scale);
    lt_reducer_free(reducer);
    trained_free(&t);
    lt_ctx_free(ctx);
    lt_group_close(r->group);
    return NULL;
}

static void train_all(const job *j, rank ranks[RANKS])
{
    lt_group *group[RANKS];
    CHECK_OK(lt_local_open(RANKS, NULL, group));
    for (int i = 0; i < RANKS; i++) {
        ranks[i] = (rank){.job = j, .number = i, .group = group[i]};
        CHECK_EQ(pthread_create(&ranks[i].thread, NULL, train, &ranks[i]), 0);
    }
    for (int i = 0; i < RANKS; i++)
        pthread_join(ranks[i].thread, NULL);
}

/* The mean of the factors is 2, so an applied step subtracts 0.25. */
static void check_step(const rank *r, int step, bool skipped)
{
    float before = step > 0 ? r->w[step - 1][0] : 1;
    CHECK_EQ(r->step_status[step], skipped ? LT_SKIPPED : LT_APPLIED);
    for (int i = 0; i < N; i++)
        CHECK_NEAR(r->w[step][i], skipped ? before : before - 0.25F, skipped ? 0 : 1e-3);
}

TEST(an_overflow_on_one_rank_skips_the_step_on_all)
{
    static rank ranks[RANKS];
    for (int overflows = -1; overflows < RANKS; overflows++)
        for (int k = 0; k < 3; k++) {
            lt_dtype wire = (lt_dtype[]){LT_F32, LT_F16, LT_BF16}[k];
            train_all(&(job){.wire = wire, .overflows = overflows}, ranks);
            for (int i = 0; i < RANKS; i++) {
                for (int step = 0; step < STEPS; step++)
                    check_step(&ranks[i], step, overflows >= 0 && step == OVERFLOW_STEP);
                CHECK_EQ(ranks[i].scaler.steps, STEPS);
                CHECK_EQ(ranks[i].scaler.skipped, overflows >= 0);
                CHECK(memcmp(ranks[i].w, ranks[0].w, sizeof ranks[i].w) == 0);
                CHECK(memcmp(&ranks[i].scaler, &ranks[0].scaler, sizeof ranks[i].scaler) == 0);
                CHECK(memcmp(&ranks[i].wires, &ranks[0].wires, sizeof ranks[i].wires) == 0);
                CHECK_EQ(ranks[i].wires.used, wire == LT_F16);
            }
        }
}

TEST(buckets_in_f16_have_wire_scales_without_a_loss_scale)
{
    static rank ranks[RANKS];
    train_all(&(job){.wire = LT_F16, .without_scale = true, .overflows = -1}, ranks);
    for (int i = 0; i < RANKS; i++) {
        for (int step = 0; step < STEPS; step++)
            check_step(&ranks[i], step, false);
        CHECK_EQ(ranks[i].wires.used, 1);
        CHECK_EQ(ranks[i].wires.resends, 1); /* the first wire scale is too large for 1 */
    }
}

TEST_OPEN(buckets_in_f16_require_wire_scales)
{
    lt_group *group[1];
    lt_scaler scaler = lt_scaler_init(LT_SCALE_STATIC, 3, 0);
    lt_loss_scale *scale = lt_loss_scale_new(ctx, &scaler);
    CHECK_OK(lt_local_open(1, NULL, group));
    lt_reducer *r = lt_reducer_new(ctx, group[0], &(lt_reducer_config){.wire = LT_F16});
    CHECK_EQ(lt_reducer_use_loss_scale(r, scale, NULL), LT_EINVAL);
    CHECK_STR(lt_errmsg(), "the reducer sends gradients in f16, which requires wire scales");
    CHECK_EQ(lt_reducer_use_loss_scale(r, NULL, NULL), LT_EINVAL);
    lt_reducer_free(r);
    r = lt_reducer_new(ctx, group[0], NULL);
    CHECK_OK(lt_reducer_use_loss_scale(r, scale, NULL));
    CHECK_OK(lt_reducer_use_loss_scale(r, NULL, NULL));
    lt_reducer_free(r);
    lt_loss_scale_free(scale);
    lt_group_close(group[0]);
}
