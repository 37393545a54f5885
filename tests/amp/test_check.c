/* Compares a pass in half precision with the same pass in f32. Expected errors, underflows and
 * overflows are computed by hand. */
#include <math.h>

#include "amp/scale.h"
#include "core/tensor.h"
#include "tests/autograd/train.h"

/* y = x w^T for x and w of 8 rows and one column, so that each element of y is one product. */
typedef struct net {
    lt_ctx *ctx;
    lt_params *params;
    lt_tensor *w, *x;
    lt_precision_check *check;
} net;

enum { ROWS = 8, OUTPUTS = ROWS * ROWS };

static net make(const lt_config *config, double w, double x)
{
    static const int64_t dims[] = {ROWS, 1};
    net n = {.ctx = lt_open(config)};
    n.w = lt_param_new(n.ctx, LT_F32, 2, dims, (lt_init){LT_INIT_CONSTANT, w, 0});
    n.params = placed(n.ctx, &n.w, 1);
    n.x = lt_tensor_full(n.ctx, LT_F32, 2, dims, x);
    n.check = lt_precision_check_new(n.ctx);
    CHECK(n.x && n.check);
    return n;
}

static void end(net *n)
{
    lt_precision_check_free(n->check);
    lt_params_free(n->params);
    lt_release(n->x);
    CHECK_EQ(lt_tape_nodes(lt_tape_current(n->ctx)), 0);
    lt_ctx_free(n->ctx);
}

/* op(x, y). New. Releases x; NULL if x is NULL. */
static lt_tensor *apply_release(net *n, const char *op, lt_tensor *x, lt_tensor *y)
{
    lt_tensor *z = x ? lt_run(n->ctx, op, NULL, x, y, NULL) : NULL;
    lt_release(x);
    return z;
}

/* Multiplies the output by `by` in its own dtype. */
static lt_status go(net *n, double by)
{
    lt_tensor *y = lt_run(n->ctx, "linear", NULL, n->x, n->w, NULL);
    if (y && by != 1) {
        lt_tensor *factor = lt_tensor_full(n->ctx, lt_tensor_dtype(y), 0, NULL, by);
        y = factor ? apply_release(n, "mul", y, factor) : (lt_release(y), NULL);
        lt_release(factor);
    }
    lt_tensor *loss = apply_release(n, "sum", y, NULL);
    lt_status status = loss ? lt_backward(loss, NULL) : lt_errcode();
    lt_release(loss);
    return status;
}

/* Runs both passes, with autocast to dtype. */
static lt_status check(net *n, lt_dtype dtype, int k, double by)
{
    lt_set_autocast(n->ctx, dtype);
    lt_status status = LT_OK;
    for (int second = 0; second < 2 && status == LT_OK; second++) {
        LT_TRY(lt_precision_check_begin(n->check, k, second));
        status = go(n, by);
        lt_status end = lt_precision_check_end(n->check);
        status = status == LT_OK ? end : status;
    }
    return status;
}

/* The row of an op's output, or of the gradient of its input `of`. */
static lt_precision row_of(net *n, const char *op, const char *of)
{
    lt_precision row;
    for (int i = 0; lt_precision_check_row(n->check, i, &row); i++)
        if (strcmp(row.op, op) == 0 && (of ? row.of && strcmp(row.of, of) == 0 : !row.of))
            return row;
    FAIL("no row for the %s of %s", of ? of : "output", op);
    return row;
}

static void check_row(net *n, const char *op, const char *of, int64_t count, int64_t underflows,
                      int64_t overflows, double error)
{
    lt_precision row = row_of(n, op, of);
    CHECK_EQ(row.count, count);
    CHECK_EQ(row.underflows, underflows);
    CHECK_EQ(row.overflows, overflows);
    CHECK_NEAR(row.error, error, error * 1e-6);
    CHECK((row.norm > 0) == (count > overflows));
    CHECK_EQ(row.leaf, of && strcmp(of, "w") == 0);
}

/* 2^-13 * 2^-12 is half of the smallest f16 number. The gradients of w are f32. */
TEST(an_underflow)
{
    net n = make(NULL, 0x1p-12, 0x1p-13);
    CHECK_OK(check(&n, LT_F16, 0, 1));
    CHECK_EQ(lt_precision_check_half(n.check), LT_F16);
    check_row(&n, "linear", NULL, OUTPUTS, OUTPUTS, 0, 1);
    check_row(&n, "sum", NULL, 1, 1, 0, 1);
    check_row(&n, "linear", "w", ROWS, 0, 0, 0);
    CHECK_OK(check(&n, LT_BF16, 0, 1)); /* bf16 has the range of f32 */
    CHECK_EQ(lt_precision_check_half(n.check), LT_BF16);
    check_row(&n, "linear", NULL, OUTPUTS, 0, 0, 0);
    end(&n);
}

TEST(an_overflow)
{
    net n = make(NULL, 256, 256);
    CHECK_OK(check(&n, LT_F16, 0, 1));
    check_row(&n, "linear", NULL, OUTPUTS, 0, OUTPUTS, 0);
    check_row(&n, "sum", NULL, 1, 0, 1, 0);
    check_row(&n, "linear", "w", ROWS, 0, 0, 0); /* sums of 8 times 256 */
    end(&n);
}

/* f16 rounds 1 + 2^-12 to 1 and holds 1 + 2^-6 exactly; so does bf16. */
TEST(a_rounding)
{
    net n = make(NULL, 1 + 0x1p-12, 1 + 0x1p-6);
    CHECK_OK(check(&n, LT_F16, 0, 1));
    check_row(&n, "linear", NULL, OUTPUTS, 0, 0, 0x1p-12 / (1 + 0x1p-12));
    CHECK_NEAR(row_of(&n, "linear", NULL).norm, ROWS * (1 + 0x1p-12) * (1 + 0x1p-6), 1e-6);
    check_row(&n, "linear", "w", ROWS, 0, 0, 0);
    CHECK_OK(lt_fill(n.x, 1 + 0x1p-11)); /* a tie, which rounds to even: 1 */
    CHECK_OK(check(&n, LT_F16, 0, 1));
    double exact = (1 + 0x1p-12) * (1 + 0x1p-11);
    check_row(&n, "linear", NULL, OUTPUTS, 0, 0, (exact - 1) / exact);
    check_row(&n, "linear", "w", ROWS, 0, 0, 0x1p-11 / (1 + 0x1p-11));
    CHECK_OK(lt_fill(n.x, 0)); /* no division by 0 */
    CHECK_OK(check(&n, LT_F16, 0, 1));
    check_row(&n, "linear", NULL, 0, 0, 0, 0);
    end(&n);
}

/* The gradient of the sum is f32. It is cast to f16 for mul, and becomes inf from 2^16 on. */
TEST(gradients_include_the_scale)
{
    for (int k = 0; k <= 20; k += 10) {
        net n = make(NULL, 1, 1);
        CHECK_OK(lt_set_requires_grad(n.x, true));
        CHECK_OK(check(&n, LT_F16, k, 0x1p-20));
        check_row(&n, "sum", "x", OUTPUTS, 0, 0, 0);
        check_row(&n, "mul", "x", OUTPUTS, 0, k == 20 ? OUTPUTS : 0, 0);
        check_row(&n, "linear", "x", ROWS, 0, k == 20 ? ROWS : 0, 0);
        end(&n);
    }
    net n = make(NULL, 1, 1);
    CHECK_OK(check(&n, LT_F16, -12, 0x1p-14));
    check_row(&n, "mul", "x", OUTPUTS, OUTPUTS, 0, 1); /* 2^-26 */
    CHECK_OK(check(&n, LT_F16, -2, 0x1p-14));
    check_row(&n, "mul", "x", OUTPUTS, 0, 0, 0);
    end(&n);
}

/* Values that became 0 in half precision for other reasons than underflow. */
TEST(zeros_that_are_not_underflows)
{
    net n = make(NULL, 1 + 0x1p-12, 1);
    lt_set_autocast(n.ctx, LT_F16);
    for (int second = 0; second < 2; second++) {
        CHECK_OK(lt_precision_check_begin(n.check, 0, second));
        lt_tensor *y = lt_run(n.ctx, "linear", NULL, n.x, n.w, NULL);
        lt_tensor *one = lt_tensor_full(n.ctx, lt_tensor_dtype(y), 0, NULL, 1);
        lt_tensor *z = apply_release(&n, "sub", y, one), *loss = apply_release(&n, "sum", z, NULL);
        CHECK_OK(lt_backward(loss, NULL));
        RELEASE(loss, one);
        CHECK_OK(lt_precision_check_end(n.check));
    }
    check_row(&n, "sub", NULL, OUTPUTS, 0, 0, 1); /* 2^-12 */
    end(&n);
}

/* relu runs only in the first pass, exp only in the second. */
TEST(ops_of_only_one_pass_are_omitted)
{
    net n = make(NULL, 2, 3);
    lt_precision row;
    lt_set_autocast(n.ctx, LT_F16);
    for (int second = 0; second < 2; second++) {
        CHECK_OK(lt_precision_check_begin(n.check, 0, second));
        lt_tensor *y = lt_run(n.ctx, "linear", NULL, n.x, n.w, NULL);
        y = apply_release(&n, second ? "abs" : "relu", y, NULL);
        y = apply_release(&n, "neg", y, NULL);
        lt_tensor *loss = apply_release(&n, "sum", y, NULL);
        CHECK_OK(lt_backward(loss, NULL));
        CHECK(!lt_precision_check_row(n.check, 0, &row) || second);
        lt_release(loss);
        CHECK_OK(lt_precision_check_end(n.check));
    }
    int rows = 0;
    while (lt_precision_check_row(n.check, rows, &row)) {
        CHECK(strcmp(row.op, "relu") != 0 && strcmp(row.op, "abs") != 0);
        CHECK_NEAR(row.error, 0, 0);
        rows++;
    }
    CHECK_EQ(rows, 6); /* linear, neg and sum: output and gradient of each */
    end(&n);
}

TEST(a_check_has_no_side_effects)
{
    net n = make(&(lt_config){.poison = true}, 0.3, 0.7);
    lt_scaler scaler = lt_scaler_init(LT_SCALE_DYNAMIC, 4, 2), was = scaler;
    lt_loss_scale *scale = lt_loss_scale_new(n.ctx, &scaler);
    lt_precision row;
    CHECK_OK(lt_use_loss_scale(n.ctx, scale));
    CHECK_OK(check(&n, LT_F16, 4, 1));
    CHECK(lt_precision_check_row(n.check, 0, &row));
    CHECK(row.error > 0 && row.error < 0x1p-10);
    CHECK_STR(row.where, "");
    CHECK(!lt_grad(n.w));
    CHECK(memcmp(lt_loss_scale_scaler(scale), &was, sizeof was) == 0);
    CHECK_EQ(lt_autocast(n.ctx), LT_F16);
    CHECK_OK(go(&n, 1)); /* with the scale from before */
    CHECK_NEAR(lt__loss_scale_last(scale).largest, ROWS * 0.7, 0.01);
    CHECK_OK(lt_precision_check_begin(n.check, 0, false));
    CHECK_EQ(lt_precision_check_begin(n.check, 0, true), LT_EINVAL);
    CHECK_OK(lt_precision_check_end(n.check));
    CHECK(!lt_precision_check_row(n.check, 0, &row));
    CHECK_EQ(lt_precision_check_half(n.check), LT_F32);
    CHECK_OK(lt_use_loss_scale(n.ctx, NULL));
    lt_loss_scale_free(scale);
    end(&n);
}

/* Each allocation of the check fails once: the check fails, and the training continues. */
TEST(out_of_memory_at_any_allocation)
{
    lt_status status = LT_ENOMEM;
    for (uint64_t i = 1; status != LT_OK; i++) {
        net n = make(NULL, 0.3, 0.7);
        n.ctx->fail_at = n.ctx->memory.allocations + i;
        status = check(&n, LT_F16, 0, 0.5);
        CHECK(status == LT_OK || status == LT_ENOMEM);
        n.ctx->fail_at = 0;
        CHECK(!lt_grad(n.w));
        CHECK_OK(go(&n, 0.5));
        CHECK_OK(check(&n, LT_F16, 0, 1));
        end(&n);
    }
}
