/* Anomaly detection: after ten steps that no loss scale could have saved, the message names the
 * first non-finite tensor. */
#include "amp/scale.h"
#include "core/tensor.h"
#include "tests/autograd/train.h"

/* Two parameters of four elements each, and x of two rows of four, all constant, with a static
 * scale. */
typedef struct net {
    lt_ctx *ctx;
    lt_params *params;
    lt_tensor *w, *v, *x;
    lt_optim *optim;
    lt_loss_scale *scale;
} net;

enum { DIMS = 4 };

static net begin(int k, double w, double v, double x)
{
    static const int64_t one[] = {1, DIMS}, two[] = {2, DIMS};
    net n = {.ctx = lt_open(&(lt_config){.poison = true})};
    lt_scaler scaler = lt_scaler_init(LT_SCALE_STATIC, k, 0);
    n.w = lt_param_new(n.ctx, LT_F32, 2, one, (lt_init){LT_INIT_CONSTANT, w, 0});
    n.v = lt_param_new(n.ctx, LT_F32, 2, one, (lt_init){LT_INIT_CONSTANT, v, 0});
    n.params = placed(n.ctx, (lt_tensor *[]){n.w, n.v}, 2);
    n.x = lt_tensor_full(n.ctx, LT_F32, 2, two, x);
    n.optim = lt_optim_new(n.ctx, "sgd_step", (lt_tensor *[]){n.w, n.v}, 2);
    n.scale = lt_loss_scale_new(n.ctx, &scaler);
    CHECK_OK(lt_use_loss_scale(n.ctx, n.scale));
    lt_set_autocast(n.ctx, LT_F16);
    return n;
}

static void end(net *n)
{
    CHECK_OK(lt_use_loss_scale(n->ctx, NULL));
    lt_loss_scale_free(n->scale);
    lt_optim_free(n->optim);
    lt_params_free(n->params);
    lt_release(n->x);
    lt_ctx_free(n->ctx);
}

#define TEST_NET(title, ...) TEST_WITH_STRUCT(title, net n, begin(__VA_ARGS__), end)

/* op(x, y). New. Releases x. */
static lt_tensor *apply_release(net *n, const char *op, lt_tensor *x, lt_tensor *y)
{
    lt_tensor *z = lt_run(n->ctx, op, NULL, x, y, NULL);
    if (!z)
        FAIL("%s: %s", op, lt_errmsg());
    lt_release(x);
    return z;
}

typedef lt_tensor *(*forward)(net *n);

/* One step: backward of the sum of f's result, starting with the gradient `seed` unless it is NULL,
 * and the update. */
static lt_status step_from(net *n, forward f, lt_tensor *seed)
{
    lt_tensor *loss = apply_release(n, "sum", f(n), NULL);
    lt_status status = lt_backward(loss, seed);
    lt_release(loss);
    return status != LT_OK ? status : step_with(n->optim, "lr=0.0", NULL);
}

static lt_status step(net *n, forward f) { return step_from(n, f, NULL); }

/* The tenth step and all later steps fail with this message. */
static void check_tenth_step_fails(net n, forward f, const char *message)
{
    for (int i = 1; i < 10; i++)
        CHECK_OK(step(&n, f));
    CHECK_EQ(lt_loss_scale_scaler(n.scale)->at_floor, 9);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(step(&n, f), LT_ENUMERIC);
        CHECK(strncmp(lt_errmsg(), message, strlen(message)) == 0 ||
              (printf("%s\n", lt_errmsg()), false));
        CHECK_MSG(i ? " (11 steps in a row were skipped)" : " (10 steps in a row were skipped)");
    }
    end(&n);
}

/* The first backward fails with this message. */
static void check_backward_fails(net n, forward f, const char *message)
{
    CHECK_EQ(step(&n, f), LT_ENUMERIC);
    CHECK_STR(lt_errmsg(), message);
    CHECK_EQ(lt_tape_nodes(lt_tape_current(n.ctx)), 0);
    end(&n);
}

static lt_tensor *linear(net *n) { return lt_run(n->ctx, "linear", NULL, n->x, n->w, NULL); }

static lt_tensor *relu_of_linear(net *n) { return apply_release(n, "relu", linear(n), NULL); }

/* linear(x)^v: for v = -1 and an infinite base it is 0, but its gradient is not finite. */
static lt_tensor *power(net *n)
{
    return apply_release(n, "pow", apply_release(n, "relu", linear(n), NULL), n->v);
}

/* linear(x), multiplied by an f16 number twice. */
static lt_tensor *times(net *n, double by)
{
    lt_tensor *factor = lt_tensor_full(n->ctx, LT_F16, 0, NULL, by);
    lt_tensor *y = apply_release(n, "mul", apply_release(n, "mul", linear(n), factor), factor);
    lt_release(factor);
    return y;
}
static lt_tensor *times_1(net *n) { return times(n, 1); }
static lt_tensor *times_512(net *n) { return times(n, 512); }
static lt_tensor *times_32768(net *n) { return times(n, 32768); }

/* The square root of 0, in f16 and in f32. */
static lt_tensor *root(net *n) { return apply_release(n, "sqrt", linear(n), NULL); }
static lt_tensor *wide_root(net *n)
{
    return apply_release(n, "sqrt", lt_run(n->ctx, "mul", NULL, n->x, n->w, NULL), NULL);
}

/* The square root of x - x. */
static lt_tensor *root_of_0(net *n)
{
    lt_tensor *y = linear(n), *z = lt_run(n->ctx, "sub", NULL, y, y, NULL);
    lt_release(y);
    return apply_release(n, "sqrt", z, NULL);
}

/* The square root of w - w. */
static lt_tensor *root_of_w_less_w(net *n)
{
    return apply_release(n, "sqrt", lt_run(n->ctx, "sub", NULL, n->w, n->w, NULL), NULL);
}

/* linear(x) is used twice. With the scale 2^15, the gradient of each use fits in f16, but their sum
 * does not. */
static lt_tensor *twice(net *n)
{
    lt_tensor *y = linear(n), *z = lt_run(n->ctx, "add", NULL, y, y, NULL);
    lt_release(y);
    return z;
}

/* ==== Forward ================================================================================= */

TEST(a_non_finite_loss_names_the_op)
{
    check_backward_fails(
        begin(16, 80, 1, 256), linear,
        "linear: its output is the first non-finite tensor: 81920 does not fit in f16, whose "
        "maximum is 65504; compute it in f32 with lt.autocast(\"off\", ...) (the loss is inf at "
        "step 1)");
    check_backward_fails(
        begin(16, 80, 1, 256), relu_of_linear,
        "linear: its output is the first non-finite tensor: 81920 does not fit in f16, whose "
        "maximum is 65504; compute it in f32 with lt.autocast(\"off\", ...) (the loss is inf at "
        "step 1)");
}

TEST(a_non_finite_loss_names_the_input)
{
    check_backward_fails(
        begin(16, NAN, 1, 1), relu_of_linear,
        "linear: its w is the first non-finite tensor: it is a parameter that contains nan before "
        "the step; check the learning rate and the loaded weights (the loss is nan at step "
        "1)");
    check_backward_fails(
        begin(16, 1e5, 1, 1), relu_of_linear,
        "linear: its w is the first non-finite tensor: it is a parameter that contains inf or a "
        "number beyond 65504, the f16 maximum; check the learning rate and the loaded weights "
        "(the loss is inf at step 1)");
    check_backward_fails(
        begin(16, 1, 1, NAN), relu_of_linear,
        "linear: its x is the first non-finite tensor: it already contains nan; check the data "
        "(the loss is nan at step 1)");
    check_backward_fails(
        begin(16, 1, 1, 1e5), relu_of_linear,
        "linear: its x is the first non-finite tensor: it already contains inf or a number beyond "
        "65504, the f16 maximum; check the data (the loss is inf at step 1)");
}

TEST(a_loss_that_is_not_finite_in_f32_either)
{
    check_backward_fails(
        begin(16, 0, -1, 1), power,
        "pow: its output is the first non-finite tensor: it contains inf, in f32 as well, although "
        "all its inputs are finite; check the learning rate and the data, and look for a division "
        "by 0 (the loss is inf at step 1)");
}

TEST(forward_overflow_with_a_finite_loss)
{
    check_tenth_step_fails(
        begin(16, 80, -1, 256), power,
        "linear: its output is the first non-finite tensor: 81920 does not fit in f16, whose "
        "maximum is 65504; compute it in f32 with lt.autocast(\"off\", ...) (");
}

/* ==== Backward ================================================================================ */

TEST(backward_with_too_large_a_scale)
{
    check_tenth_step_fails(
        begin(16, 1, 1, 1), times_1,
        "backward of cast: the gradient of its x is the first non-finite tensor: including the "
        "loss scale of 2^16, 65536 does not fit in f16, whose maximum is 65504; lower the scale, "
        "or use an adaptive one (");
    check_tenth_step_fails(
        begin(8, 0.125, 1, 0.125), times_512,
        "backward of mul: the gradient of its x is the first non-finite tensor: including the loss "
        "scale of 2^8, 131072 does not fit in f16, whose maximum is 65504; lower the scale, or use "
        "an adaptive one (");
}

TEST(backward_with_the_lowest_scale)
{
    check_tenth_step_fails(
        begin(LT_SCALE_MIN, 0x1p-10, 1, 0x1p-10), times_32768,
        "backward of mul: the gradient of its x is the first non-finite tensor: including the loss "
        "scale of 2^-14, 65536 does not fit in f16, whose maximum is 65504; compute it in f32 with "
        "lt.autocast(\"off\", ...), or try a smaller learning rate (");
}

TEST(backward_overflow_in_a_sum)
{
    check_tenth_step_fails(
        begin(15, 1, 1, 1), twice,
        "backward of linear: the gradient of its output is the first non-finite tensor: including "
        "the loss scale of 2^15, it does not fit in f16, whose maximum is 65504; lower the scale, "
        "or use an adaptive one (");
}

TEST(backward_not_finite_in_f32_either)
{
    static const char message[] =
        "backward of sqrt: the gradient of its x is the first non-finite tensor: it contains inf, "
        "in f32 as well, although all its inputs are finite; check the learning rate and the "
        "data, and look for a division by 0 (";
    check_tenth_step_fails(begin(4, 0, 1, 1), root, message);
    check_tenth_step_fails(begin(4, 0, 1, 1), wide_root, message);
}

TEST_NET(a_non_finite_initial_gradient, 4, 1, 1, 1)
{
    lt_tensor *seed = lt_tensor_full(n.ctx, LT_F32, 0, NULL, INFINITY);
    for (int i = 1; i < 10; i++)
        CHECK_OK(step_from(&n, linear, seed));
    CHECK_FAILS(
        step_from(&n, linear, seed), LT_ENUMERIC,
        "backward of sum: the gradient of its output is the first non-finite tensor: it contains "
        "inf, from the gradient that backward began with or from a sum; check the learning rate "
        "and the data (10 steps in a row were skipped)");
    lt_release(seed);
}

/* ==== Steps =================================================================================== */

/* w is the loss: its gradient is the one that backward starts with, and no kernel runs. */
TEST_NET(a_backward_without_any_op, 4, 1, 1, 1)
{
    lt_tensor *seed = lt_tensor_full(n.ctx, LT_F32, 2, n.w->dims, INFINITY);
    lt_status status = LT_OK;
    for (int i = 1; i <= 10; i++) {
        CHECK_OK(status);
        CHECK_OK(lt_backward(n.w, seed));
        status = step_with(n.optim, "lr=0.0", NULL);
    }
    CHECK_EQ(status, LT_ENUMERIC);
    CHECK_STR(
        lt_errmsg(),
        "the gradients were not finite in 10 steps in a row, the last with a loss scale of 2^4, "
        "although no op made them non-finite; check the learning rate and the data");
    lt_release(seed);
}

/* An applied step resets the count. A finding from before it is not reported after it. */
TEST_NET(nine_skipped_steps_are_tolerated, 4, 1, 1, 1)
{
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 9; i++)
            CHECK_OK(step(&n, root_of_0));
        CHECK_OK(step(&n, linear));
        CHECK_EQ(lt_loss_scale_scaler(n.scale)->at_floor, 0);
    }
}

/* A training resumed at its tenth skipped step ran without detection so far, so it gets one more
 * step. */
TEST_NET(a_resumed_training_gets_one_step_with_detection, 4, 1, 1, 1)
{
    lt_loss_scale_scaler(n.scale)->at_floor = 9;
    CHECK_OK(step(&n, root_of_0));
    CHECK_FAILS(step(&n, root_of_0), LT_ENUMERIC, "backward of sqrt: the gradient of its x is");
}

/* Of two ranks that voted to skip, the one whose gradients are finite continues. */
TEST(a_rank_with_finite_gradients_continues)
{
    for (int mine = 0; mine < 2; mine++) {
        net n = begin(4, 1, 1, 1);
        lt_status status = LT_OK;
        for (int i = 1; i <= 10; i++) {
            float numbers[LT_VOTE_NUMBERS] = {1};
            CHECK_OK(status);
            lt_tensor *loss = apply_release(&n, "sum", mine ? root_of_0(&n) : linear(&n), NULL);
            CHECK_OK(lt_backward(loss, NULL));
            lt_release(loss);
            lt__vote_start(n.scale);
            lt__vote_pack(n.scale, &(lt_grad_stats){1, mine}, (float[LT_VOTE_NUMBERS]){0});
            lt__vote_unpack(n.scale, numbers);
            lt_step_status step_status = LT_APPLIED;
            status = step_with(n.optim, "lr=0.0", &step_status);
            CHECK(status != LT_OK || step_status == LT_SKIPPED);
        }
        CHECK_EQ(status, mine ? LT_ENUMERIC : LT_OK);
        end(&n);
    }
}

/* Such as ops between the steps of a run, and those of evaluations. */
TEST_NET(ops_outside_a_step_are_not_checked, 4, 80, 1, 256)
{
    for (int i = 1; i < 10; i++)
        CHECK_OK(step(&n, root_of_w_less_w));
    CHECK_OK(lt_use_loss_scale(n.ctx, NULL));
    lt_release(linear(&n));
    CHECK_OK(lt_use_loss_scale(n.ctx, n.scale));
    lt_grad_off(n.ctx);
    lt_release(linear(&n));
    lt_grad_on(n.ctx);
    CHECK_FAILS(step(&n, root_of_w_less_w), LT_ENUMERIC, "backward of sqrt: the gradient of its");
}

/* The output of linear, or -1 if it is unknown. */
static void read_linear(void *ud, const lt_call *call, bool backward, const char *where)
{
    (void)backward, (void)where;
    if (strcmp(call->schema->name, "linear") != 0)
        return;
    *(double *)ud = -1;
    if (call->out[0])
        CHECK_OK(lt_item(call->out[0], 0, ud));
}

/* A replay recomputes an output only if all inputs are available. This bias is not: backward does
 * not read it, and it is no parameter. */
TEST_NET(an_input_that_was_not_saved_is_not_taken_for_omitted, 4, 1, 1, 1)
{
    lt_set_autocast(n.ctx, LT_F32);
    for (int with_bias = 0; with_bias < 2; with_bias++) {
        double seen = 0;
        lt_tensor *bias = with_bias ? lt_tensor_full(n.ctx, LT_F32, 1, (int64_t[]){1}, 3) : NULL;
        lt_tensor *y = lt_run(n.ctx, "linear", NULL, n.x, n.w, bias, NULL);
        CHECK(y != NULL);
        lt_tensor *loss = apply_release(&n, "sum", y, NULL);
        lt_replay_ops(loss, read_linear, &seen);
        CHECK_NEAR(seen, with_bias ? -1 : DIMS, 0);
        RELEASE(loss, bias);
    }
}
