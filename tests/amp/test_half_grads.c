/* Gradients that ops compute in f16 with a loss scale: they are converted to f32 when they are
 * complete, unless something needs their values before. */
#include "amp/scale.h"
#include "core/tensor.h"
#include "tests/autograd/train.h"

typedef struct net {
    lt_ctx *ctx;
    lt_params *params;
    lt_tensor *w1, *w2;
    lt_optim *optim;
    lt_loss_scale *scale;
    double read; /* by a hook */
} net;

static net make(const char *fault)
{
    net n = {.ctx = lt_open(&(lt_config){.threads = 1, .fault = fault})};
    lt_scaler scaler = lt_scaler_init(LT_SCALE_STATIC, 10, 0);
    n.w1 = param(n.ctx, LT_F32, 6, 3);
    n.w2 = param(n.ctx, LT_F32, 6, 3);
    n.params = placed(n.ctx, (lt_tensor *[]){n.w1, n.w2}, 2);
    n.optim = lt_optim_new(n.ctx, "momentum_step", (lt_tensor *[]){n.w1, n.w2}, 2);
    n.scale = lt_loss_scale_new(n.ctx, &scaler);
    CHECK_OK(lt_use_loss_scale(n.ctx, n.scale));
    return n;
}

static void end(net *n)
{
    CHECK_OK(lt_use_loss_scale(n->ctx, NULL));
    lt_loss_scale_free(n->scale);
    lt_optim_free(n->optim);
    lt_params_free(n->params);
    lt_ctx_free(n->ctx);
}

#define TEST_NET(title, ...) TEST_WITH_STRUCT(title, net n, make(__VA_ARGS__), end)

/* Runs a backward of the sum of op(x, y), or op(x) if y is NULL, which computes in f16. */
static void go_back(const net *n, const char *op, lt_tensor *x, lt_tensor *y)
{
    lt_tensor *half =
        lt_run(n->ctx, op, NULL, lt_half(x, LT_F16), y ? lt_half(y, LT_F16) : NULL, NULL);
    lt_tensor *wide = lt_run(n->ctx, "cast", "dtype=f32", half, NULL);
    lt_tensor *loss = lt_run(n->ctx, "sum", NULL, wide, NULL);
    CHECK(loss != NULL);
    CHECK_OK(lt_backward(loss, NULL));
    RELEASE(half, wide, loss);
}

/* The last element of a gradient. */
static double last(lt_tensor *x)
{
    double value;
    CHECK_OK(lt_item(lt_grad(x), 5, &value));
    return value;
}

TEST_NET(both_factors_of_a_product_are_the_same, NULL)
{
    go_back(&n, "mul", n.w1, n.w1);
    CHECK_NEAR(last(n.w1), 6, 0);
}

static lt_status read_other(void *ud, lt_tensor *x, lt_tensor *grad)
{
    net *n = ud;
    (void)x, (void)grad;
    n->read = last(n->w2);
    return LT_OK;
}

TEST_NET(a_hook_does_not_see_a_discarded_gradient, NULL)
{
    go_back(&n, "neg", n.w2, NULL);
    CHECK_NEAR(last(n.w2), -1, 0);
    lt_zero_grad(n.w2);
    CHECK_OK(lt_on_grad(n.w1, read_other, &n, NULL));
    go_back(&n, "mul", n.w1, n.w2);
    CHECK(n.read > 0);
    CHECK_NEAR(last(n.w2), 3, 0);
}

TEST_NET(an_injected_inf, "inf:rank=0:step=1:param=a")
{
    lt_step_status status;
    lt_grad_fault(n.w1, 0);
    go_back(&n, "neg", n.w1, NULL);
    CHECK_OK(step_with(n.optim, "lr=1", &status));
    CHECK_EQ(status, LT_SKIPPED);
}
