/* A dry run has no side effects and computes the same as the next pass. */
#include <math.h>

#include "tests/autograd/graph.h"
#include "tests/autograd/train.h"

/* The sum of dropout(batch_norm(linear(x, w))), and the state that a dry run must not change. */
typedef struct net {
    lt_ctx *ctx;
    lt_params *params;
    lt_tensor *w, *scale, *shift, *mean, *var, *x;
    lt_optim *optim;
    int hooks, begins, sums; /* calls of each */
    double seen;             /* sum of the outputs that the op hook saw, */
    double grads[8];         /* and the sum of each gradient of a leaf */
    int hooked, leaves;
} net;

static net make(const char *fault)
{
    net n = {.ctx = lt_open(&(lt_config){.seed = 5, .threads = 1, .poison = true, .fault = fault})};
    n.params = lt_params_new(n.ctx);
    n.w = member(n.params, n.ctx, "w", false, 2, 5, 1);
    n.scale = member(n.params, n.ctx, "scale", false, 1, 5, 1);
    n.shift = member(n.params, n.ctx, "shift", false, 1, 5, 0.5);
    n.mean = member(n.params, n.ctx, "mean", true, 1, 5, 0);
    n.var = member(n.params, n.ctx, "var", true, 1, 5, 1);
    CHECK_OK(lt_params_place(n.params));
    n.x = lt_tensor_new(n.ctx, LT_F32, 2, (int64_t[]){6, 5});
    CHECK_OK(lt_fill_uniform(n.x, LT_RNG_USER, 0, 0, -1, 1));
    n.optim = lt_optim_new(n.ctx, "sgd_step", (lt_tensor *[]){n.w, n.scale, n.shift}, 3);
    return n;
}

static void end(net *n)
{
    CHECK_OK(lt_set_part(n->ctx, LT_PART_EXCHANGE, NULL));
    lt_optim_free(n->optim);
    lt_params_free(n->params);
    lt_release(n->x);
    finish(n->ctx);
}

#define TEST_NET(title, ...) TEST_WITH_STRUCT(title, net n, make(__VA_ARGS__), end)

/* w is used twice. */
static lt_tensor *forward(net *n)
{
    lt_tensor *y = lt_run(n->ctx, "linear", NULL, n->x, n->w, NULL);
    lt_tensor *z =
        lt_run(n->ctx, "batch_norm", "train=true", y, n->scale, n->shift, n->mean, n->var, NULL);
    lt_release(y);
    y = lt_run(n->ctx, "dropout", "p=0.5 train=true", z, NULL);
    lt_release(z);
    z = lt_run(n->ctx, "linear", NULL, y, n->w, NULL);
    lt_release(y);
    if (!z)
        FAIL("%s", lt_errmsg());
    return take1("sum", take2("mul", z, lt_retain(z)));
}

static double go(net *n)
{
    double value;
    lt_tensor *loss = forward(n);
    CHECK_OK(lt_item(loss, 0, &value));
    CHECK_OK(lt_backward(loss, NULL));
    lt_release(loss);
    return value;
}

static void step(net *n) { CHECK_OK(step_with(n->optim, "lr=0.05", NULL)); }

static lt_status count_hook(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)x, (void)grad;
    ((net *)ud)->hooks++;
    return LT_OK;
}

static lt_status count_begin(void *ud, lt_ctx *ctx, lt_tensor *loss, lt_tensor *grad)
{
    (void)ctx, (void)loss, (void)grad;
    ((net *)ud)->begins++;
    return LT_OK;
}

static lt_status count_sum(void *ud, double *numbers, int64_t count, bool backward)
{
    (void)numbers, (void)count, (void)backward;
    ((net *)ud)->sums++;
    return LT_OK;
}

static double sum_of(lt_tensor *x)
{
    double sum = 0, value;
    for (int64_t i = 0; i < x->count; i++) {
        CHECK_OK(lt_item(x, i, &value));
        sum += value;
    }
    return sum;
}

static void look(void *ud, const lt_call *c, bool backward, const char *where)
{
    net *n = ud;
    (void)where;
    n->hooked++;
    if (!backward && !c->op->in_place)
        n->seen += sum_of(c->out[0]);
    for (int i = 0; backward && i < c->n_in; i++)
        if (c->leaves >> i & 1) {
            CHECK(c->d_in[i] != NULL);
            n->grads[n->leaves++ % 8] = sum_of(c->d_in[i]);
        }
}

static double dry_run(net *n)
{
    CHECK_OK(lt_dry_run_begin(n->ctx, NULL, look, n));
    double loss = go(n);
    lt_dry_run_end(n->ctx);
    return loss;
}

TEST(a_training_is_the_same_with_dry_runs)
{
    char with[65], without[65];
    for (int twice = 0; twice < 2; twice++) {
        net a = make(NULL), b = make(NULL);
        for (int i = 0; i < 4; i++) {
            uint64_t draw = lt_next_draw(a.ctx);
            if (twice)
                CHECK_NEAR(dry_run(&a), dry_run(&a), 0);
            CHECK_OK(lt_dry_run_begin(a.ctx, NULL, NULL, NULL));
            lt_next_draw(a.ctx);
            lt_tensor *never = forward(&a); /* no backward */
            lt_release(never);
            lt_dry_run_end(a.ctx);
            CHECK_EQ(lt_next_draw(a.ctx), draw + 1);
            double loss = dry_run(&a);
            CHECK_NEAR(go(&a), loss, 0);
            CHECK_NEAR(go(&b), loss, 0);
            CHECK_EQ(lt_bn_stats_pending(a.ctx), 1);
            step(&a);
            step(&b);
        }
        CHECK_OK(lt_params_sha256(a.params, with));
        CHECK_OK(lt_params_sha256(b.params, without));
        CHECK_STR(with, without);
        end(&a);
        end(&b);
    }
}

TEST_NET(a_dry_run_may_set_the_seed, NULL)
{
    lt_set_step(n.ctx, 3);
    lt_set_seed(n.ctx, 7);
    lt_set_step(n.ctx, 5);
    uint64_t trees = n.ctx->trees, draw = lt_next_draw(n.ctx);
    CHECK_OK(lt_dry_run_begin(n.ctx, NULL, NULL, NULL));
    lt_set_seed(n.ctx, 8);
    lt_dry_run_end(n.ctx);
    CHECK_EQ(lt_seed(n.ctx), 7);
    CHECK_EQ(lt_random_step(n.ctx), 2);
    CHECK_EQ(lt_next_draw(n.ctx), draw + 1);
    CHECK_EQ(n.ctx->trees, trees);
}

/* Hooks, callbacks, faults, running statistics and other ranks are not affected. */
TEST_NET(a_dry_run_has_no_side_effects, "inf:rank=0:step=1:param=w")
{
    lt_grad_fault(n.w, 0);
    CHECK_OK(lt_on_grad(n.w, count_hook, &n, NULL));
    CHECK_OK(
        lt_set_part(n.ctx, LT_PART_EXCHANGE,
                    &(lt_step_part){.ud = &n, .begin = count_begin, .grad_ready = count_hook}));
    lt_set_allreduce(n.ctx, count_sum, &n);
    CHECK_OK(lt_dry_run_begin(n.ctx, NULL, look, &n));
    lt_tensor *y = lt_run(n.ctx, "batch_norm", "train=true sync=true", n.x, n.scale, n.shift,
                          n.mean, n.var, NULL);
    CHECK(y != NULL);
    lt_tensor *sum = take1("sum", y);
    CHECK_OK(lt_backward(sum, NULL));
    lt_release(sum);
    go(&n);
    lt_dry_run_end(n.ctx);
    CHECK(isfinite(n.seen) && n.leaves > 0);
    CHECK_EQ(n.hooks + n.begins + n.sums, 0);
    CHECK_EQ(lt_bn_stats_pending(n.ctx), 0);
    CHECK(!lt_grad(n.w) && !lt_grad(n.scale) && !n.ctx->inf.injected);
    CHECK(!n.w->leaf->dry_grad);
    lt_set_allreduce(n.ctx, NULL, NULL);
    go(&n);
    CHECK_EQ(n.begins, 1);
    CHECK_EQ(n.hooks, 4); /* for w twice: its hook and the ready callback */
    CHECK(isinf(grad_at(n.w, 0)) && n.ctx->inf.injected);
}

/* The tape that was current when the dry run began may be freed in it. */
TEST_NET(a_dry_run_outlives_the_tape_before_it, NULL)
{
    lt_tape *tape = lt_tape_new(n.ctx), *own = lt_tape_use(n.ctx, tape);
    CHECK_OK(lt_dry_run_begin(n.ctx, NULL, NULL, NULL));
    lt_tape_free(tape);
    lt_dry_run_end(n.ctx);
    CHECK(lt_tape_current(n.ctx) == own);
    go(&n);
}

/* The gradients equal those of a backward, except that gradients of several uses are reported as
 * they grow: for w, first the gradient of one use, then the sum of both. */
TEST_NET(gradients_are_visible_and_earlier_ones_stay, NULL)
{
    go(&n);
    lt_tensor *was = lt__tensor_copy(lt_grad(n.w), LT_F32);
    double scale = sum_of(lt_grad(n.scale)), shift = sum_of(lt_grad(n.shift));
    lt_zero_grad(n.scale);
    lt_bn_stats_clear(n.ctx);
    lt_tape_set_first_row(lt_tape_current(n.ctx), 0); /* to draw the same numbers again */
    dry_run(&n);
    CHECK_EQ(n.leaves, 4);
    CHECK_NEAR(n.grads[1], scale, 0);
    CHECK_NEAR(n.grads[2], shift, 0);
    CHECK_NEAR(n.grads[3], sum_of(was), 0);
    CHECK(n.grads[0] != n.grads[3]);
    CHECK(memcmp(lt_grad(n.w)->data, was->data, 25 * sizeof(float)) == 0);
    CHECK(lt_grad(n.shift) && !lt_grad(n.scale));
    CHECK_OK(lt_dry_run_begin(n.ctx, NULL, NULL, NULL));
    lt_zero_grad(n.w);
    lt_dry_run_end(n.ctx);
    CHECK(lt_grad(n.w) != NULL);
    lt_release(was);
}

typedef struct scaled {
    int seeds, completes;
    double largest;
} scaled;

static lt_status seed(void *ud, lt_ctx *ctx, lt_tensor *loss, lt_tensor *grad)
{
    (void)ctx, (void)loss;
    ((scaled *)ud)->seeds++;
    return lt_fill(grad, 4);
}

static lt_status complete(void *ud, lt_tensor *x, lt_tensor *grad, lt_tensor *from)
{
    scaled *s = ud;
    CHECK(from == grad);
    CHECK(lt_count(x) == lt_count(grad));
    s->completes++;
    s->largest = fmax(s->largest, fabs(sum_of(grad)));
    return LT_OK;
}

static lt_status never(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)ud, (void)x, (void)grad;
    return lt_fail(LT_EINVAL, "an earlier gradient must not change");
}

static lt_status never_complete(void *ud, lt_tensor *x, lt_tensor *grad, lt_tensor *from)
{
    (void)from;
    return never(ud, x, grad);
}

static lt_step_part scale_of(scaled *s)
{
    return (lt_step_part){.ud = s, .begin = seed, .grad_begin = never, .grad_complete = complete};
}

TEST_NET(a_dry_run_has_its_own_scaling, NULL)
{
    scaled training = {0}, dry_run = {0};
    lt_step_part of_training = scale_of(&training), own = scale_of(&dry_run);
    CHECK_OK(lt_set_part(n.ctx, LT_PART_SCALE, &of_training));
    go(&n);
    CHECK_EQ(training.completes, 3);
    lt_set_op_hook(n.ctx, look, &n);
    CHECK_OK(lt_dry_run_begin(n.ctx, &own, NULL, NULL));
    CHECK_FAILS(lt_set_part(n.ctx, LT_PART_SCALE, NULL), LT_EINVAL,
                "the loss scale cannot change in a dry run");
    go(&n);
    lt_dry_run_end(n.ctx);
    CHECK_EQ(n.hooked, 0);
    CHECK_EQ(training.completes, 3);
    CHECK(dry_run.seeds == 1 && dry_run.completes == 3 && dry_run.largest > 0);
    for (int i = 0; i < 3; i++)
        lt_zero_grad((lt_tensor *[]){n.w, n.scale, n.shift}[i]);
    go(&n);
    CHECK(training.seeds == 2 && n.hooked > 0);
    CHECK_EQ(dry_run.seeds, 1);
    CHECK_OK(lt_set_part(n.ctx, LT_PART_SCALE, NULL));
}

TEST_NET(a_dry_run_rejects_invalid_calls, NULL)
{
    double norm;
    lt_tensor *before = forward(&n);
    CHECK_OK(lt_dry_run_begin(n.ctx, NULL, NULL, NULL));
    CHECK_FAILS(lt_dry_run_begin(n.ctx, NULL, NULL, NULL), LT_EINVAL,
                "a dry run cannot begin within another one");
    CHECK_FAILS(step_with(n.optim, "lr=0.05", NULL), LT_EINVAL,
                "an optimizer step cannot run in a dry run, which leaves no gradients");
    CHECK_FAILS(lt_optim_grad_norm(n.optim, &norm), LT_EINVAL,
                "a gradient norm cannot run in a dry");
    CHECK_FAILS(lt_backward(before, NULL), LT_EINVAL, "was computed before the dry run");
    lt_tensor *late = forward(&n);
    lt_dry_run_end(n.ctx);
    lt_dry_run_end(n.ctx);
    CHECK_FAILS(lt_backward(late, NULL), LT_EINVAL,
                "freed by an earlier backward or at the end of its");
    CHECK_OK(lt_backward(before, NULL));
    RELEASE(before, late);
}

/* A loss that is a leaf, an infinite loss, and a backward that fails. */
TEST_NET(special_losses_in_a_dry_run, NULL)
{
    lt_tensor *x = leaf(n.ctx, 1, INFINITY);
    scaled s = {0};
    lt_step_part failing = scale_of(&s), fine = failing;
    failing.grad_complete = never_complete;
    CHECK_OK(lt_dry_run_begin(n.ctx, &fine, NULL, NULL));
    CHECK_OK(lt_backward(x, NULL));
    CHECK_EQ(s.completes, 1);
    lt_tensor *y = take1("exp", lt_retain(x));
    CHECK_OK(lt_backward(y, NULL));
    CHECK_EQ(s.completes, 2);
    lt_release(y);
    lt_dry_run_end(n.ctx);
    CHECK_OK(lt_dry_run_begin(n.ctx, &failing, NULL, NULL));
    lt_tensor *loss = forward(&n);
    CHECK_FAILS(lt_backward(loss, NULL), LT_EINVAL, "an earlier gradient");
    CHECK(!n.shift->leaf->dry_grad && !n.w->leaf->dry_grad);
    CHECK_FAILS(lt_backward(x, NULL), LT_EINVAL, "an earlier gradient");
    CHECK(!x->leaf->dry_grad && !lt_grad(x));
    lt_release(loss);
    lt_dry_run_end(n.ctx);
    CHECK(!lt_grad(n.w));
    CHECK_EQ(lt_bn_stats_pending(n.ctx), 0);
    lt_release(x);
    go(&n);
    step(&n);
}
