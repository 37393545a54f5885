/* Adam's count of steps per parameter, and options that are not set. */
#include <math.h>

#include "autograd/tape.h"
#include "ops/ops.h"
#include "tests/autograd/train.h"

enum { N = 3 };

/* Three f64 parameters of one element, adjacent in their arena, all 1. */
typedef struct net {
    lt_ctx *ctx;
    lt_params *params;
    lt_tensor *w[N];
    lt_optim *optim;
    lt_opt opt[LT_MAX_OPT];
} net;

static net make(const char *op, const char *options)
{
    net n = {.ctx = lt_open(&(lt_config){.poison = true, .device = "cpu"})};
    for (int i = 0; i < N; i++)
        n.w[i] = param(n.ctx, LT_F64, 1, 1);
    n.params = placed(n.ctx, n.w, N);
    n.optim = lt_optim_new(n.ctx, op, n.w, N);
    CHECK(n.optim != NULL);
    if (options)
        CHECK_OK(lt_opts_parse(&lt_optim_def(n.optim)->schema, options, n.opt));
    return n;
}

static void destroy(net *n)
{
    lt_optim_free(n->optim);
    lt_params_free(n->params);
    lt_ctx_free(n->ctx);
}

/* A gradient of 2 for each parameter of the mask. */
static void backward(net *n, unsigned mask)
{
    for (int i = 0; i < N; i++) {
        if (!(mask >> i & 1))
            continue;
        lt_tensor *y = lt_run(n->ctx, "add", NULL, n->w[i], n->w[i], NULL);
        lt_tensor *loss = lt_run(n->ctx, "sum", NULL, y, NULL);
        CHECK_OK(lt_backward(loss, NULL));
        RELEASE(y, loss);
    }
}

static lt_status step(net *n)
{
    return lt_optim_step(n->optim, (const lt_opt *const[]){n->opt}, 1, NULL);
}

/* The weight after steps from `first` to `last` with gradients of 2; m and v are zero before. */
static double weight(int first, int last)
{
    double w = 1, m = 0, v = 0;
    for (int t = first; t <= last; t++) {
        m = 0.9 * m + 0.1 * 2;
        v = 0.999 * v + 0.001 * 4;
        w -= 0.01 * (m / (1 - pow(0.9, t))) / (sqrt(v / (1 - pow(0.999, t))) + 1e-8);
    }
    return w;
}

static double value(const net *n, int i)
{
    double x;
    CHECK_OK(lt_item(n->w[i], 0, &x));
    return x;
}

static lt_status refuse(void *ud, lt_optim *optim, const lt_opt *const *options,
                        lt_step_status step_status, double factor)
{
    (void)ud, (void)optim, (void)options, (void)step_status, (void)factor;
    return lt_fail(LT_EINVAL, "no step");
}

TEST(a_step_that_fails_has_no_norm)
{
    lt_tensor *squares = NULL;
    const lt_opt *options[1];
    double norm;
    net n = make("sgd_step", "lr=0.1");
    options[0] = n.opt;
    backward(&n, 7);
    CHECK_OK(lt_set_part(n.ctx, LT_PART_EXCHANGE, &(lt_step_part){.apply = refuse}));
    CHECK_FAILS(lt_optim_step_clipped(n.optim, options, 1, 1, &squares, NULL), LT_EINVAL,
                "no step");
    CHECK(!squares);
    CHECK_OK(lt_set_part(n.ctx, LT_PART_EXCHANGE, NULL));
    CHECK_OK(lt_optim_step_clipped(n.optim, options, 1, 1, &squares, NULL));
    CHECK_OK(lt_item(squares, 0, &norm));
    CHECK_NEAR(norm, 12, 0);
    lt_release(squares);
    destroy(&n);
}

/* The memory for the squares of the parameters is kept; views of it and of gradients are not. */
TEST(the_norm_of_gradients_allocates_no_scratch)
{
    double norm;
    net n = make("sgd_step", "lr=0.1");
    backward(&n, 7);
    CHECK_OK(lt_optim_grad_norm(n.optim, &norm));
    uint64_t before = lt_memory_stats(n.ctx).allocations;
    CHECK_OK(lt_optim_grad_norm(n.optim, &norm));
    enum { RESULT = 3, VIEWS = 3 };
    CHECK_EQ(lt_memory_stats(n.ctx).allocations - before, RESULT + N * VIEWS);
    CHECK_NEAR(norm, sqrt(12), 1e-12);
    destroy(&n);
}

TEST(each_parameter_has_its_own_count)
{
    net n = make("adam_step", "lr=0.01");
    static const unsigned masks[] = {5, 5, 1, 7, 7, 5, 7}; /* c misses step 3, b has 4, 5 and 7 */
    for (int t = 0; t < 7; t++) {
        backward(&n, masks[t]);
        CHECK_OK(step(&n));
    }
    static const int counts[N] = {7, 3, 6};
    for (int i = 0; i < N; i++) {
        CHECK_EQ(lt_optim_steps(n.optim, n.w[i]), counts[i]);
        CHECK_NEAR(value(&n, i), weight(1, counts[i]), 1e-14);
    }
    destroy(&n);
}

TEST(ranges_have_equal_counts)
{
    static const bool all[N] = {true, true, true};
    for (int sgd = 0; sgd < 2; sgd++) {
        net n = make(sgd ? "sgd_step" : "adam_step", "lr=0.01");
        lt_optim_range r = {0};
        backward(&n, 3);
        CHECK_OK(step(&n));
        CHECK(lt_optim_next_range(n.optim, NULL, all, false, &r));
        CHECK_EQ(r.end, sgd ? 3 : 2);
        CHECK_EQ(r.steps, 1);
        CHECK_EQ(lt_optim_next_range(n.optim, NULL, all, false, &r), !sgd);
        CHECK_EQ(r.steps, sgd);
        destroy(&n);
    }
}

/* The end of the first range, given the options of two groups; the last parameter is in the second
 * group. Every step updates all parameters. */
static int first_end(const char *first, const char *second)
{
    static const bool all[N] = {true, true, true};
    net n = make("momentum_step", first), other = make("momentum_step", second);
    const lt_opt *const options[] = {n.opt, other.opt};
    lt_optim_range r = {0};
    CHECK_OK(lt_optim_set_group(n.optim, n.w[N - 1], 1));
    CHECK(lt_optim_next_range(n.optim, options, all, false, &r));
    int end = r.end;
    CHECK_EQ(r.group, 0);
    backward(&n, 7);
    CHECK_OK(lt_optim_step(n.optim, options, 2, NULL));
    CHECK_NEAR(value(&n, 0), 1 - 0.125 * 2, 0);
    CHECK_NEAR(value(&n, N - 1), 1 - other.opt[0].f * 2, 0);
    destroy(&other);
    destroy(&n);
    return end;
}

TEST(groups_with_the_same_options_share_a_range)
{
    CHECK_EQ(first_end("lr=0.125", "lr=0.125"), N);
    CHECK_EQ(first_end("lr=0.125 nesterov=false", "lr=0.125 momentum=0.9"), N);
    CHECK_EQ(first_end("lr=0.125", "lr=0.25"), N - 1);
    CHECK_EQ(first_end("lr=0.125", "lr=0.125 momentum=0.5"), N - 1);
    CHECK_EQ(first_end("lr=0.125 momentum=0.0", "lr=0.125 momentum=0.0 nesterov=true"), N - 1);
}

TEST(a_count_can_be_restored)
{
    net n = make("adam_step", "lr=0.01"), other = make("adam_step", "lr=0.01");
    CHECK_OK(lt_optim_set_steps(n.optim, n.w[1], 4));
    backward(&n, 2);
    CHECK_OK(step(&n));
    CHECK_NEAR(value(&n, 1), weight(5, 5), 1e-14);
    CHECK_EQ(lt_optim_steps(n.optim, n.w[1]), 5);
    CHECK_FAILS(lt_optim_set_steps(n.optim, n.w[1], -2), LT_EINVAL,
                "the number of steps must be from 0 to 2^62, but is -2");
    CHECK_FAILS(lt_optim_set_steps(n.optim, n.w[1], INT64_MAX), LT_EINVAL,
                "the number of steps must be from 0 to 2^62, but is 9223372036854775807");
    CHECK_FAILS(lt_optim_set_steps(n.optim, other.w[1], 2), LT_EINVAL,
                "this parameter does not belong to the optimizer");
    CHECK_EQ(lt_optim_steps(n.optim, other.w[1]), -1);
    destroy(&n);
    destroy(&other);
}

TEST(incomplete_options_are_refused)
{
    static const char *const ops[] = {"sgd_step", "momentum_step", "lars_step", "adam_step"};
    for (int i = 0; i < 4; i++) {
        net n = make(ops[i], NULL); /* the options are zero */
        char text[128];
        backward(&n, 7);
        snprintf(text, sizeof text,
                 "%s: option 'lr' of group 0 is not set; fill the options of each group with "
                 "lt_opts_parse()",
                 ops[i]);
        CHECK_FAILS(step(&n), LT_EINVAL, text);
        CHECK_FAILS(lt_optim_step(n.optim, (const lt_opt *const[]){NULL}, 1, NULL), LT_EINVAL,
                    "the options of group 0 are NULL");
        CHECK_FAILS(lt_optim_step(n.optim, NULL, 0, NULL), LT_EINVAL,
                    "a parameter is in group 0, but options were given for 0 groups");
        CHECK_OK(lt_opts_parse(&lt_optim_def(n.optim)->schema, "lr=0.01", n.opt));
        n.opt[1 + (i == 3)].n = 0; /* weight_decay, momentum or beta1 */
        CHECK(step(&n) == LT_EINVAL);
        CHECK_MSG("of group 0 is not set");
        CHECK_OK(lt_opts_parse(&lt_optim_def(n.optim)->schema, "lr=0.01", n.opt));
        CHECK_OK(step(&n)); /* the errors left the gradients as they were */
        destroy(&n);
    }
}

TEST(the_optimizer_sets_the_step)
{
    net n = make("adam_step", "lr=0.01 step=1");
    backward(&n, 7);
    CHECK_FAILS(step(&n), LT_EINVAL,
                "adam_step: option 'step' must not be set: the optimizer counts the steps of each "
                "parameter; see lt_optim_set_steps()");
    lt_tensor *x = lt_tensor_full(n.ctx, LT_F32, 0, NULL, 1);
    const lt_def *def = lt_optim_def(n.optim);
    CHECK_OK(lt_opts_parse(&def->schema, "lr=0.01", n.opt));
    CHECK_FAILS(lt_apply(n.ctx, def, (lt_tensor *[]){x, x, x, x}, 4, n.opt, NULL), LT_EINVAL,
                "adam_step: option 'step' is missing");
    lt_release(x);
    destroy(&n);
}
