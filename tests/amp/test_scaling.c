/* The loss scale in use: gradients equal those without a scale, and a step with a non-finite
 * gradient changes nothing. */
#include "amp/scale.h"
#include "core/tensor.h"
#include "tests/autograd/train.h"

/* x w1^T -> batch norm -> relu -> w2^T; w2 is also added to w1's product. Output: 4 rows of 6
 * numbers. */
typedef struct net {
    lt_ctx *ctx;
    lt_params *params;
    lt_tensor *w1, *w2, *scale, *shift, *mean, *var, *x;
    lt_optim *optim;
    lt_loss_scale *loss_scale;
} net;

/* k: exponent of a static scale; NO_SCALE for none. */
enum { NO_SCALE = 99 };

static net make(int k, const char *fault)
{
    net n = {.ctx = lt_open(&(lt_config){.seed = 3, .threads = 1, .fault = fault})};
    n.params = lt_params_new(n.ctx);
    n.w1 = member(n.params, n.ctx, "w1", false, 2, 6, 1);
    n.w2 = member(n.params, n.ctx, "w2", false, 2, 6, 0.3);
    n.scale = member(n.params, n.ctx, "scale", false, 1, 6, 1);
    n.shift = member(n.params, n.ctx, "shift", false, 1, 6, 0.1);
    n.mean = member(n.params, n.ctx, "mean", true, 1, 6, 0);
    n.var = member(n.params, n.ctx, "var", true, 1, 6, 1);
    CHECK_OK(lt_params_place(n.params));
    n.x = lt_tensor_new(n.ctx, LT_F32, 2, (int64_t[]){4, 6});
    CHECK_OK(lt_fill_uniform(n.x, LT_RNG_USER, 0, 0, -1, 1));
    n.optim =
        lt_optim_new(n.ctx, "momentum_step", (lt_tensor *[]){n.w1, n.w2, n.scale, n.shift}, 4);
    CHECK(n.optim != NULL);
    if (k != NO_SCALE) {
        lt_scaler scaler = lt_scaler_init(LT_SCALE_STATIC, k, 0);
        n.loss_scale = lt_loss_scale_new(n.ctx, &scaler);
        CHECK_OK(lt_use_loss_scale(n.ctx, n.loss_scale));
    }
    return n;
}

static void end(net *n)
{
    CHECK_OK(lt_use_loss_scale(n->ctx, NULL));
    lt_loss_scale_free(n->loss_scale);
    lt_optim_free(n->optim);
    lt_params_free(n->params);
    lt_release(n->x);
    lt_ctx_free(n->ctx);
}

#define TEST_NET(title, ...) TEST_WITH_STRUCT(title, net n, make(__VA_ARGS__), end)

static lt_tensor *run(net *n, const char *op, const char *options, lt_tensor *x, lt_tensor *y)
{
    lt_tensor *z = lt_run(n->ctx, op, options, x, y, NULL);
    if (!z)
        FAIL("%s: %s", op, lt_errmsg());
    return z;
}

/* The sum of the squares of the net's outputs, times `by`. New. */
static lt_tensor *forward(net *n, lt_tensor *x, double by)
{
    lt_tensor *a = run(n, "linear", NULL, x, n->w1);
    lt_tensor *b = run(n, "linear", NULL, x, n->w2);
    lt_tensor *c = run(n, "add", NULL, a, b);
    lt_tensor *d =
        lt_run(n->ctx, "batch_norm", "train=true", c, n->scale, n->shift, n->mean, n->var, NULL);
    lt_tensor *e = run(n, "relu", NULL, d, NULL);
    lt_tensor *f = run(n, "linear", NULL, e, n->w2);
    lt_tensor *g = run(n, "mul", NULL, f, f);
    lt_tensor *factor = lt_tensor_full(n->ctx, LT_F32, 0, NULL, by);
    lt_tensor *h = run(n, "mul", NULL, g, factor);
    lt_tensor *sum = run(n, "sum", NULL, h, NULL);
    RELEASE(a, b, c, d, e, f, g, h, factor);
    return sum;
}

static lt_status backward(net *n, double by)
{
    lt_tensor *loss = forward(n, n->x, by);
    lt_status status = lt_backward(loss, NULL);
    lt_release(loss);
    return status;
}

static lt_step_status step(lt_optim *optim)
{
    lt_step_status step_status = LT_ACCUMULATING;
    CHECK_OK(step_with(optim, "lr=0.05", &step_status));
    return step_status;
}

static bool same(lt_tensor *x, lt_tensor *y)
{
    return memcmp(x->data, y->data, (size_t)x->count * sizeof(float)) == 0;
}

static void check_same_grads(net *a, net *b)
{
    CHECK(same(lt_grad(a->w1), lt_grad(b->w1)));
    CHECK(same(lt_grad(a->w2), lt_grad(b->w2)));
    CHECK(same(lt_grad(a->scale), lt_grad(b->scale)));
    CHECK(same(lt_grad(a->shift), lt_grad(b->shift)));
}

/* The digest of weights and buffers. */
static void digest(net *n, char hex[65]) { CHECK_OK(lt_params_sha256(n->params, hex)); }

static const int exponents[] = {0, 8, 16, LT_SCALE_MIN, LT_SCALE_MAX};

/* Also when several backwards are summed, and after steps. */
TEST(a_power_of_two_changes_no_bit)
{
    for (size_t i = 0; i < sizeof exponents / sizeof *exponents; i++) {
        net a = make(NO_SCALE, NULL), b = make(exponents[i], NULL);
        char of_a[65], of_b[65];
        for (int round = 0; round < 3; round++) {
            for (int part = 0; part < 3; part++) {
                CHECK_OK(backward(&a, 1 + part));
                CHECK_OK(backward(&b, 1 + part));
                check_same_grads(&a, &b);
            }
            CHECK_EQ(step(a.optim), LT_APPLIED);
            CHECK_EQ(step(b.optim), LT_APPLIED);
        }
        digest(&a, of_a);
        digest(&b, of_b);
        CHECK_STR(of_a, of_b);
        lt_scaled_step last = lt_loss_scale_step(b.loss_scale);
        CHECK_EQ(last.k, exponents[i]);
        CHECK(last.finite);
        CHECK_EQ(lt_loss_scale_scaler(b.loss_scale)->steps, 3);
        end(&a);
        end(&b);
    }
}

TEST_NET(steps_are_found_by_number, 8, NULL)
{
    for (int i = 1; i <= 10; i++) {
        CHECK_OK(backward(&n, 1));
        CHECK_EQ(step(n.optim), LT_APPLIED);
        CHECK_EQ(lt_loss_scale_step_at(n.loss_scale, i).number, i);
    }
    static const int64_t others[] = {INT64_MIN, -9, -1, 0, 2, 11, INT64_MAX}; /* -> the last */
    for (int i = 0; i < 7; i++)
        CHECK_EQ(lt_loss_scale_step_at(n.loss_scale, others[i]).number, 10);
    CHECK_EQ(lt_loss_scale_step_at(n.loss_scale, 3).number, 3);
}

TEST_NET(the_exponent_is_that_of_the_largest_gradient, 10, NULL)
{
    double largest = 0, value;
    CHECK_OK(backward(&n, 1));
    lt_tensor *params[] = {n.w1, n.w2, n.scale, n.shift};
    for (int i = 0; i < 4; i++)
        for (int64_t j = 0; j < params[i]->count; j++) {
            CHECK_OK(lt_item(lt_grad(params[i]), j, &value));
            largest = fmax(largest, fabs(value));
        }
    CHECK_EQ(step(n.optim), LT_APPLIED);
    CHECK_EQ(lt_loss_scale_step(n.loss_scale).exponent, ilogb(largest) + 10);
}

typedef struct seen {
    int calls;
    double sum;
    lt_grad_stats stats;
    lt_loss_scale *scale;
} seen;

static lt_status look(void *ud, lt_tensor *x, lt_tensor *grad)
{
    seen *s = ud;
    double value;
    (void)x;
    s->calls++;
    s->sum = 0;
    for (int64_t i = 0; i < grad->count; i++) {
        CHECK_OK(lt_item(grad, i, &value));
        s->sum += value;
    }
    if (s->scale)
        s->stats = lt__loss_scale_last(s->scale);
    return LT_OK;
}

TEST(hooks_and_slots_see_unscaled_gradients)
{
    net a = make(NO_SCALE, NULL), b = make(16, NULL);
    seen of_a = {0}, of_b = {.scale = b.loss_scale}, ready = {0};
    CHECK_OK(
        lt_set_part(b.ctx, LT_PART_EXCHANGE, &(lt_step_part){.ud = &ready, .grad_ready = look}));
    CHECK_OK(lt_on_grad(a.shift, look, &of_a, NULL));
    CHECK_OK(lt_on_grad(b.shift, look, &of_b, NULL));
    for (int i = 1; i <= 2; i++) {
        CHECK_OK(backward(&a, 1));
        CHECK_OK(backward(&b, 1));
        CHECK_EQ(of_a.calls, i);
        CHECK_EQ(of_b.calls, i);
        CHECK_EQ(ready.calls, 4 * i);
        CHECK(of_a.sum == of_b.sum && of_a.sum != 0);
    }
    CHECK(of_b.stats.largest >= fabs(of_b.sum) / 6 && of_b.stats.largest < 65536);
    CHECK_EQ(of_b.stats.not_finite, 0);
    CHECK_OK(lt_set_part(b.ctx, LT_PART_EXCHANGE, NULL));
    end(&a);
    end(&b);
}

/* It is converted to f32 when it is complete, unless an earlier one is there to add to. */
TEST_NET(a_gradient_that_an_op_computes_in_f16, 10, NULL)
{
    static const double values[] = {1.5, 1.5, 50}; /* 2 50 2^10 does not fit in f16 */
    seen of_w = {.scale = n.loss_scale};
    CHECK_OK(lt_on_grad(n.w1, look, &of_w, NULL));
    for (int i = 0; i < 3; i++) {
        CHECK_OK(lt_fill(n.w1, values[i]));
        lt_tensor *half = run(&n, "neg", NULL, lt_half(n.w1, LT_F16), NULL);
        lt_tensor *y = run(&n, "cast", "dtype=f32", half, NULL),
                  *squares = run(&n, "mul", NULL, y, y);
        lt_tensor *loss = run(&n, "sum", NULL, squares, NULL), *all[] = {half, y, squares, loss};
        CHECK_OK(lt_backward(loss, NULL));
        for (int k = 0; k < 4; k++)
            lt_release(all[k]);
        CHECK(i == 2 || (of_w.sum == (i + 1) * 3 * 36 && of_w.stats.largest == (i + 1) * 3));
        CHECK_EQ(of_w.stats.not_finite, i == 2 ? 36 : 0);
    }
    CHECK_EQ(step(n.optim), LT_SKIPPED);
}

static lt_status make_it(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)x;
    return lt_fill(grad, *(double *)ud);
}

/* Also if a hook repairs an overflow. */
TEST(the_gradient_after_the_hooks_counts)
{
    static const double values[] = {1, INFINITY, 3, NAN, -0x1p20};
    net n = make(16, NULL);
    double value;
    CHECK_OK(lt_on_grad(n.shift, make_it, &value, NULL));
    for (int i = 0; i < 5; i++) {
        value = values[i];
        CHECK_OK(backward(&n, 1));
        CHECK_EQ(step(n.optim), isfinite(value) ? LT_APPLIED : LT_SKIPPED);
    }
    CHECK_EQ(lt_loss_scale_step(n.loss_scale).exponent, 36);
    end(&n);
    n = make(16, NULL);
    lt_tensor *all[] = {n.w1, n.w2, n.scale, n.shift};
    for (int i = 0; i < 4; i++)
        CHECK_OK(lt_on_grad(all[i], make_it, &value, NULL));
    value = 0.25;
    CHECK_OK(backward(&n, 0x1p120));
    CHECK_EQ(step(n.optim), LT_APPLIED);
    CHECK_EQ(lt_loss_scale_step(n.loss_scale).exponent, 14);
    end(&n);
}

TEST(other_leaves_and_frozen_parameters)
{
    for (int leaf_loss = 0; leaf_loss < 2; leaf_loss++) {
        net n = make(12, NULL);
        lt_tensor *x = lt_tensor_full(n.ctx, LT_F64, leaf_loss ? 0 : 1, (int64_t[]){3}, 2);
        CHECK_OK(lt_set_requires_grad(x, true));
        for (int i = 1; i <= 2; i++) {
            lt_tensor *y = leaf_loss ? lt_retain(x) : run(&n, "sum", NULL, x, NULL);
            double value;
            CHECK_OK(lt_backward(y, NULL));
            CHECK_OK(lt_item(lt_grad(x), 0, &value));
            CHECK_NEAR(value, i, 0);
            lt_release(y);
        }
        lt_release(x);
        end(&n);
    }
    net n = make(12, NULL);
    CHECK_OK(lt_params_freeze(n.params, 1, true));
    CHECK_STR(lt_params_span(n.params, 1)->name, "w2");
    CHECK_OK(backward(&n, 1));
    CHECK(!lt_grad(n.w2));
    CHECK_EQ(step(n.optim), LT_APPLIED);
    end(&n);
}

/* ==== Skipped steps =========================================================================== */

TEST(a_skipped_step_changes_nothing)
{
    net n = make(16, "inf:rank=0:step=2:param=w2"), b = make(16, NULL);
    lt_optim *second = lt_optim_new(n.ctx, "sgd_step", (lt_tensor *[]){n.w1}, 1);
    char before[65], after[65];
    double norm = -1;
    lt_grad_fault(n.w2, 0);
    CHECK_OK(backward(&n, 1));
    CHECK_EQ(step(n.optim), LT_APPLIED);
    digest(&n, before);
    lt_tensor *slot = lt_optim_slot(n.optim, 0, n.w1);
    lt_tensor *was = lt__tensor_copy(slot, LT_F32);
    CHECK_OK(backward(&n, 1));
    CHECK_OK(backward(&n, 1)); /* finite or not, the second adds to the first */
    CHECK_OK(lt_optim_grad_norm(n.optim, &norm));
    CHECK_NEAR(norm, 0, 0);
    CHECK_EQ(step(n.optim), LT_SKIPPED);
    CHECK_EQ(step(second), LT_SKIPPED); /* in the same step */
    CHECK_EQ(lt_step(n.ctx), 3);
    CHECK_EQ(lt_bn_stats_pending(n.ctx), 0);
    CHECK(!lt_grad(n.w2) && !lt_grad(n.w1));
    digest(&n, after);
    CHECK_STR(after, before);
    CHECK(same(slot, was));
    CHECK_EQ(lt_loss_scale_scaler(n.loss_scale)->skipped, 1);
    CHECK_EQ(lt_loss_scale_scaler(n.loss_scale)->steps, 2);
    /* Later steps are as if the skipped one had not happened. */
    CHECK_OK(backward(&n, 1));
    CHECK_EQ(step(n.optim), LT_APPLIED);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(backward(&b, 1));
        CHECK_EQ(step(b.optim), LT_APPLIED);
    }
    digest(&n, after);
    digest(&b, before);
    CHECK_STR(after, before);
    RELEASE(slot, was);
    lt_optim_free(second);
    end(&n);
    end(&b);
}

/* No optimizer updates w2. Its gradients accumulate from step to step, but not from a skipped step.
 * */
TEST(a_gradient_that_no_optimizer_clears)
{
    net n = make(16, NULL);
    lt_optim *optim = lt_optim_new(n.ctx, "sgd_step", (lt_tensor *[]){n.shift}, 1);
    CHECK_OK(backward(&n, 0x1p120));
    CHECK_EQ(step(optim), LT_SKIPPED);
    CHECK(lt_grad(n.w2) && !lt_grad(n.shift));
    CHECK_OK(backward(&n, 1));
    CHECK_OK(backward(&n, 0x1p120)); /* in the same step */
    CHECK_OK(backward(&n, 1));
    CHECK_EQ(step(optim), LT_SKIPPED);
    net b = make(NO_SCALE, NULL);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(backward(&n, 1));
        CHECK_OK(backward(&b, 1));
        CHECK(same(lt_grad(n.w2), lt_grad(b.w2)));
    }
    CHECK_EQ(step(optim), LT_APPLIED);
    lt_optim_free(optim);
    end(&n);
    end(&b);
}

static void zero_grads(net *n)
{
    lt_tensor *all[] = {n->w1, n->w2, n->scale, n->shift};
    for (int i = 0; i < 4; i++)
        lt_zero_grad(all[i]);
}

/* Findings in gradients that no longer exist do not count: discarded by the caller, or computed
 * with a scale that was not in use for a while. */
TEST(discarded_gradients_do_not_count)
{
    for (int closed = 0; closed < 2; closed++) {
        net n = make(16, NULL);
        CHECK_OK(backward(&n, 0x1p120));
        if (closed)
            CHECK_OK(lt_use_loss_scale(n.ctx, NULL));
        zero_grads(&n);
        CHECK_OK(lt_use_loss_scale(n.ctx, n.loss_scale));
        CHECK_OK(backward(&n, 1));
        CHECK_EQ(step(n.optim), LT_APPLIED);
        CHECK(lt_loss_scale_step(n.loss_scale).exponent < 40);
        CHECK_OK(backward(&n, 0x1p120));
        zero_grads(&n);
        lt_tensor *loss = run(&n, "sum", NULL, n.w2, NULL); /* the others get no gradient */
        CHECK_OK(lt_backward(loss, NULL));
        lt_release(loss);
        CHECK_EQ(step(n.optim), LT_APPLIED);
        CHECK_OK(backward(&n, 0x1p120));
        lt_zero_grad(n.w2); /* the others still have gradients */
        CHECK_EQ(step(n.optim), LT_SKIPPED);
        CHECK_OK(backward(&n, 1));
        CHECK_EQ(step(n.optim), LT_APPLIED);
        end(&n);
    }
}

/* As with several ranks, whose votes cover only the gradients that are exchanged. */
TEST_NET(a_leaf_without_an_optimizer_does_not_count, 16, NULL)
{
    lt_tensor *x = lt__tensor_copy(n.x, LT_F32);
    lt_tensor *large = lt_tensor_full(n.ctx, LT_F32, 0, NULL, 0x1p126);
    CHECK_OK(lt_set_requires_grad(x, true));
    lt_tensor *y = run(&n, "mul", NULL, x, large), *z = run(&n, "sum", NULL, y, NULL);
    lt_tensor *a = forward(&n, n.x, 1), *loss = run(&n, "add", NULL, a, z);
    CHECK_OK(lt_backward(loss, NULL));
    double value;
    CHECK_OK(lt_item(lt_grad(x), 0, &value));
    CHECK(isinf(value));
    CHECK(!lt_has_optim(x) && lt_has_optim(n.w1));
    CHECK_EQ(step(n.optim), LT_APPLIED);
    RELEASE(x, large, y, z, a, loss);
}

TEST(a_scale_checks_its_own_gradients)
{
    static const char message[] =
        "an optimizer step cannot use gradients of a loss scale that is no longer in use; close "
        "the scale after the step, or discard the gradients";
    net n = make(16, NULL);
    lt_scaler scaler = lt_scaler_init(LT_SCALE_STATIC, 0, 0);
    lt_loss_scale *other = lt_loss_scale_new(n.ctx, &scaler);
    lt_optim *second = lt_optim_new(n.ctx, "sgd_step", (lt_tensor *[]){n.w1}, 1);
    lt_optim *third = lt_optim_new(n.ctx, "sgd_step", (lt_tensor *[]){n.shift}, 1);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(lt_use_loss_scale(n.ctx, n.loss_scale));
        CHECK_OK(backward(&n, 0x1p120));
        CHECK_EQ(step(second), LT_SKIPPED);
        CHECK_OK(lt_use_loss_scale(n.ctx, i ? other : NULL));
        CHECK_FAILS(step_with(third, "lr=0.05", NULL), LT_EINVAL, message);
        CHECK_OK(lt_use_loss_scale(n.ctx, n.loss_scale));
        CHECK_EQ(step(third), LT_SKIPPED);
        zero_grads(&n);
        CHECK_OK(backward(&n, 1));
        CHECK_OK(lt_use_loss_scale(n.ctx, i ? other : NULL));
        zero_grads(&n);
        CHECK_OK(backward(&n, 1));
        CHECK_EQ(step(n.optim), LT_APPLIED);
    }
    lt_optim_free(second);
    lt_optim_free(third);
    end(&n);
    lt_loss_scale_free(other);
}

/* w1's gradient overflows f32. The optimizer detects it, even if nothing else reads it. */
TEST_NET(an_overflow_in_backward_is_detected, 24, NULL)
{
    CHECK_OK(backward(&n, 0x1p110));
    CHECK_EQ(step(n.optim), LT_SKIPPED);
    CHECK_OK(backward(&n, 0x1p90));
    CHECK_EQ(step(n.optim), LT_APPLIED);
}

/* In f16 a gradient of 2^8 becomes inf with the scale 2^8, but not with 2^7. */
TEST(f16_overflows_at_its_maximum)
{
    for (int k = 6; k < 9; k++) {
        net n = make(k, NULL);
        trained t = trained_new(n.ctx, 1, "sgd_step");
        lt_tensor *half = run(&n, "cast", "dtype=f16", t.w, NULL);
        lt_tensor *up = lt_tensor_full(n.ctx, LT_F16, 1, (int64_t[]){1}, 256);
        lt_tensor *y = run(&n, "mul", NULL, half, up), *z = run(&n, "cast", "dtype=f32", y, NULL);
        CHECK_OK(lt_backward(z, NULL));
        CHECK_EQ(step(t.optim), k < 8 ? LT_APPLIED : LT_SKIPPED);
        RELEASE(half, up, y, z);
        trained_free(&t);
        end(&n);
    }
}

static lt_status more_to_come(void *ud, lt_ctx *ctx, lt_step_status *step_status)
{
    int *left = ud;
    (void)ctx;
    if ((*left)-- > 0)
        *step_status = LT_ACCUMULATING;
    return LT_OK;
}

TEST_NET(a_micro_batch_is_not_checked, 4, NULL)
{
    int left = 2;
    CHECK_OK(
        lt_set_part(n.ctx, LT_PART_EXCHANGE, &(lt_step_part){.ud = &left, .reduce = more_to_come}));
    for (int i = 0; i < 3; i++) {
        CHECK_OK(backward(&n, 1));
        CHECK_EQ(step(n.optim), i < 2 ? LT_ACCUMULATING : LT_APPLIED);
        CHECK_EQ(lt_loss_scale_scaler(n.loss_scale)->steps, i / 2);
    }
    CHECK_OK(lt_set_part(n.ctx, LT_PART_EXCHANGE, NULL));
}

TEST_NET(many_skipped_steps_end_the_training, 16, NULL)
{
    lt_status status = LT_OK;
    int steps = 0;
    while (status == LT_OK && steps < 100) {
        CHECK_OK(backward(&n, 0x1p120));
        status = step_with(n.optim, "lr=0.05", NULL);
        steps++;
    }
    CHECK_EQ(steps, 10);
    CHECK_EQ(status, LT_ENUMERIC);
    CHECK_MSG("(10 steps in a row were skipped)");
}

/* ==== Failures ================================================================================ */

static lt_status refuse(void *ud, lt_tensor *x, lt_tensor *grad)
{
    bool *on = ud;
    (void)grad;
    if (!*on)
        return LT_OK;
    CHECK_FAILS(lt_use_loss_scale(x->ctx, NULL), LT_EINVAL, "cannot change within backward");
    return lt_fail(LT_EINVAL, "enough");
}

/* When the hook of the norm's scale runs, one of w2's two contributions has been added. */
TEST(a_failed_backward_leaves_no_scaled_gradient)
{
    net n = make(16, NULL), b = make(NO_SCALE, NULL);
    bool on = true;
    CHECK_OK(lt_on_grad(n.scale, refuse, &on, NULL));
    CHECK_FAILS(backward(&n, 1), LT_EINVAL, "enough");
    CHECK(!lt_grad(n.w2) && !lt_grad(n.w1));
    on = false;
    CHECK_OK(backward(&n, 1));
    CHECK_OK(backward(&b, 1));
    CHECK(same(lt_grad(n.w1), lt_grad(b.w1)));
    CHECK(same(lt_grad(n.w2), lt_grad(b.w2)));
    end(&n);
    end(&b);
}

TEST_NET(a_fault_requires_its_parameter, NO_SCALE, "inf:rank=0:step=1:param=w3")
{
    CHECK_FAILS(step_with(n.optim, "lr=0.05", NULL), LT_EUSAGE,
                "the fault names w3, which is not a parameter of an optimizer");
    lt_grad_fault(n.w1, 1); /* on another rank */
    CHECK_OK(backward(&n, 1));
    CHECK_EQ(step(n.optim), LT_APPLIED);
    double norm;
    CHECK_OK(backward(&n, 1));
    CHECK_OK(lt_optim_grad_norm(n.optim, &norm));
}
