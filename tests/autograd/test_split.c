/* test_split.c - split backwards: order, errors and cleanup. test_split_bits.c compares bits. */
#include "tests/autograd/graph.h"
#include "tests/autograd/train.h"

enum { WIDE = 4, LAYERS = 3, PARAMS = 2 * LAYERS };

/* Layers y = linear(x, w, b), the last with the weights of the first, so that these are shared. */
typedef struct net {
    lt_ctx *ctx;
    lt_params *params;
    lt_tensor *w[LAYERS - 1], *b[LAYERS], *x;
    int layers; /* the first ones are used */
    lt_optim *optim;
    char log[512];
    const char *fails; /* the hook of this parameter fails */
    lt_tensor *zeroes; /* its hook discards its gradient */
    lt_tensor *victim; /* the hook of w0 discards its gradient */
} net;

typedef struct named {
    net *net;
    char name[8];
} named;

static lt_status note(void *ud, lt_tensor *x, lt_tensor *grad)
{
    named *n = ud;
    (void)grad;
    strcat(n->net->log, n->name);
    strcat(n->net->log, " ");
    if (n->net->zeroes == x)
        lt_zero_grad(x);
    if (n->net->victim && n->net->w[0] == x)
        lt_zero_grad(n->net->victim);
    return n->net->fails && strcmp(n->net->fails, n->name) == 0 ? lt_fail(LT_EPEER, "hook says no")
                                                                : LT_OK;
}

static lt_status begin(void *ud, lt_ctx *ctx, lt_tensor *loss, lt_tensor *grad)
{
    (void)ctx, (void)loss, (void)grad;
    strcat(((net *)ud)->log, "begin ");
    return LT_OK;
}

static lt_status end(void *ud, lt_ctx *ctx, lt_status status)
{
    (void)ctx;
    strcat(((net *)ud)->log, status == LT_OK ? "end " : "broken ");
    return status;
}

static void set_part(net *n, bool is_exclusive)
{
    CHECK_OK(lt_set_part(
        n->ctx, LT_PART_EXCHANGE,
        &(lt_step_part){.ud = n, .is_exclusive = is_exclusive, .begin = begin, .end = end}));
}

static lt_status add(net *n, lt_tensor **x, const char *name, int ndim)
{
    static named names[PARAMS];
    static int count;
    lt_init init = {LT_INIT_UNIFORM, -1, 1};
    *x = lt_param_new(n->ctx, LT_F32, ndim, (int64_t[]){WIDE, WIDE}, init);
    if (!*x || lt_params_add(n->params, name, *x) != LT_OK)
        return lt_errcode();
    named *ud = &names[count++ % PARAMS];
    ud->net = n;
    snprintf(ud->name, sizeof ud->name, "%s", name);
    return lt_on_grad(*x, note, ud, NULL);
}

static void close_net(net *n)
{
    lt_optim_free(n->optim);
    lt_params_free(n->params);
    for (int i = 0; i < LAYERS; i++) {
        lt_release(i < LAYERS - 1 ? n->w[i] : NULL);
        lt_release(n->b[i]);
    }
    lt_release(n->x);
}

static lt_status open_net(net *n, lt_ctx *ctx)
{
    static const char *const names[] = {"w0", "w1", "b0", "b1", "b2"};
    *n = (net){.ctx = ctx, .params = lt_params_new(ctx), .layers = LAYERS};
    lt_status status = n->params ? LT_OK : lt_errcode();
    for (int i = 0; i < 5 && status == LT_OK; i++)
        status = add(n, i < 2 ? &n->w[i] : &n->b[i - 2], names[i], i < 2 ? 2 : 1);
    if (status == LT_OK)
        status = lt_params_place(n->params);
    if (status == LT_OK &&
        (!(n->x = lt_tensor_new(ctx, LT_F32, 2, (int64_t[]){2, WIDE})) ||
         !(n->optim = lt_optim_new(ctx, "sgd_step", (lt_tensor *[]){n->w[0], n->w[1]}, 2))))
        status = lt_errcode();
    if (status == LT_OK)
        status = lt_fill_uniform(n->x, LT_RNG_USER, 1, 0, -1, 1);
    if (status == LT_OK)
        status = lt_set_requires_grad(n->x, true);
    return status;
}

/* A new net. The hooks refer to it. */
static net *made(void)
{
    static net n;
    CHECK_OK(open_net(&n, lt_open(&(lt_config){.seed = 5, .threads = 1, .poison = true})));
    return &n;
}

static void done(net *n)
{
    lt_ctx *ctx = n->ctx;
    CHECK_OK(lt_set_part(ctx, LT_PART_EXCHANGE, NULL));
    close_net(n);
    finish(ctx);
}

#define TEST_NET(title) TEST_WITH(title, net *n, made(), done)

/* The loss of a micro-batch. New. NULL on failure. */
static lt_tensor *forward(net *n)
{
    lt_tensor *y = lt_retain(n->x);
    for (int i = 0; i < n->layers && y; i++) {
        lt_tensor *next = lt_run(n->ctx, "linear", NULL, y, n->w[i % 2], n->b[i], NULL);
        lt_release(y);
        y = next ? lt_run(n->ctx, "tanh", NULL, next, NULL) : NULL;
        lt_release(next);
    }
    lt_tensor *loss = y ? lt_run(n->ctx, "sum", NULL, y, NULL) : NULL;
    lt_release(y);
    return loss;
}

static lt_status go_back(net *n, lt_deferred_wgrad **weights)
{
    lt_tensor *loss = forward(n), *grad = NULL;
    lt_status status = loss ? lt_backward_from(n->ctx, &loss, &grad, 1, weights) : lt_errcode();
    lt_release(loss);
    return status;
}

static lt_deferred_wgrad *split(net *n)
{
    lt_deferred_wgrad *weights = NULL;
    CHECK_OK(go_back(n, &weights));
    CHECK(weights != NULL);
    return weights;
}

static int all_grads(net *n, float *to)
{
    lt_tensor *all[] = {n->x, n->w[0], n->w[1], n->b[0], n->b[1], n->b[2]};
    int count = 0;
    for (int i = 0; i < 6; i++)
        for (int64_t k = 0; k < lt_count(all[i]); k++)
            to[count++] = (float)grad_at(all[i], k);
    return count;
}

static void step(net *n, lt_status status, const char *message)
{
    if (status == LT_OK)
        CHECK_OK(step_with(n->optim, "lr=0.05", NULL));
    else
        CHECK_FAILS(step_with(n->optim, "lr=0.05", NULL), status, message);
}

/* ==== Order =================================================================================== */

/* w0 is used twice, so its layers are not split. */
TEST_NET(hooks_and_callbacks_run_once_per_backward_in_order)
{
    lt_deferred_wgrad *list[2];
    set_part(n, false);
    CHECK_OK(go_back(n, NULL));
    CHECK_STR(n->log, "begin b2 w1 b1 w0 b0 end ");
    n->log[0] = 0;
    list[0] = split(n);
    CHECK_STR(n->log, "begin b2 w0 b0 ");
    list[1] = split(n);
    n->log[0] = 0;
    CHECK_OK(lt_backward_weights(list[0]));
    CHECK_STR(n->log, "w1 b1 end ");
    CHECK_OK(lt_backward_weights(list[1]));
    CHECK_STR(n->log, "w1 b1 end w1 b1 end ");
    step(n, LT_OK, NULL);
    CHECK_OK(lt_backward_from(n->ctx, NULL, NULL, 0, &list[0]));
    n->log[0] = 0;
    CHECK_OK(lt_backward_weights(list[0]));
    CHECK_STR(n->log, "end ");
}

TEST(late_lists_accumulate_like_whole_backwards)
{
    float grads[2][128];
    for (int k = 0; k < 2; k++) {
        net *n = made();
        lt_deferred_wgrad *list[3] = {NULL};
        for (int i = 0; i < 3; i++) {
            CHECK_OK(lt_fill_uniform(n->x, LT_RNG_USER, (uint64_t)i, 0, -1, 1));
            if (k == 1)
                list[i] = split(n);
            else
                CHECK_OK(go_back(n, NULL));
        }
        for (int i = 0; i < 3 && k == 1; i++)
            CHECK_OK(lt_backward_weights(list[i]));
        all_grads(n, grads[k]);
        done(n);
    }
    CHECK_EQ(memcmp(grads[0], grads[1], sizeof(float) * (size_t)(2 * WIDE + 2 * 16 + 3 * WIDE)), 0);
}

TEST(the_graph_of_a_pending_list_may_be_freed)
{
    net *n = made();
    float grads[2][128];
    CHECK_OK(go_back(n, NULL));
    all_grads(n, grads[0]);
    step(n, LT_OK, NULL);
    done(n);
    n = made();
    lt_tape *tape = lt_tape_new(n->ctx);
    lt_tape_use(n->ctx, tape);
    lt_deferred_wgrad *list = split(n);
    CHECK_EQ(lt_tape_nodes(tape), 0);
    CHECK(!lt_grad(n->w[1]) && lt_grad(n->w[0]) && lt_grad(n->x));
    lt_tape_free(tape);
    CHECK_OK(lt_backward_weights(list));
    CHECK_EQ(all_grads(n, grads[1]), 2 * WIDE + 2 * 16 + 3 * WIDE);
    CHECK_EQ(memcmp(grads[0], grads[1], sizeof(float) * (size_t)(2 * WIDE + 2 * 16 + 3 * WIDE)), 0);
    done(n);
}

/* ==== All lists together ====================================================================== */

/* Backwards through the first layers[i] layers of the net (n). With `way`, they are split and then
 * completed: one after the other if it is 1, together if it is 2. */
static void run_backwards(net *n, const int *layers, int count, int way)
{
    lt_deferred_wgrad *list[4] = {NULL};
    lt_tensor *before = n->x, *x[4];
    for (int i = 0; i < count; i++) {
        n->layers = layers[i];
        n->x = x[i] = lt_tensor_new(n->ctx, LT_F32, 2, (int64_t[]){2, WIDE});
        CHECK_OK(lt_fill_uniform(x[i], LT_RNG_USER, (uint64_t)i, 0, -1, 1));
        if (way > 0)
            list[i] = split(n);
        else
            CHECK_OK(go_back(n, NULL));
    }
    n->log[0] = 0;
    if (way == 2)
        CHECK_OK(lt_backward_weights_all(n->ctx));
    for (int i = 0; i < count; i++) {
        CHECK_OK(list[i] ? lt_backward_weights(list[i]) : LT_OK);
        lt_release(x[i]);
    }
    n->x = before;
}

static void check_together(const int *layers, int count, const char *log)
{
    float grads[3][2][16];
    for (int way = 0; way < 3; way++) {
        net *n = made();
        set_part(n, false);
        run_backwards(n, layers, count, way);
        if (way == 2)
            CHECK_STR(n->log, log);
        for (int i = 0; i < 2; i++)
            for (int64_t k = 0; k < lt_count(n->w[i]); k++)
                grads[way][i][k] = (float)grad_at(n->w[i], k);
        done(n);
    }
    for (int way = 1; way < 3; way++)
        CHECK_EQ(memcmp(grads[way], grads[0], sizeof grads[0]), 0);
}

/* Layer by layer, each in the order of the backwards. */
TEST(all_lists_together)
{
    check_together((int[]){2, 2, 2}, 3, "w1 b1 w1 b1 w1 b1 w0 b0 w0 b0 w0 b0 end end end ");
    check_together((int[]){2}, 1, "w1 b1 w0 b0 end ");
    check_together((int[]){2, 1}, 2, "w0 b0 w0 b0 w1 b1 end end ");
    check_together((int[]){2, 1, 2}, 3, "w1 b1 w1 b1 w0 b0 w0 b0 w0 b0 end end end ");
    check_together((int[]){3, 2}, 2, "w1 b1 w1 b1 w0 b0 end end ");
}

TEST_NET(lists_that_fail_together)
{
    lt_deferred_wgrad *list[2];
    CHECK_OK(lt_backward_weights_all(n->ctx)); /* there is none */
    set_part(n, false);
    n->layers = 2;
    for (int i = 0; i < 2; i++)
        list[i] = split(n);
    n->log[0] = 0;
    n->fails = "b1";
    CHECK_FAILS(lt_backward_weights_all(n->ctx), LT_EPEER, "hook says no");
    CHECK_STR(n->log, "w1 b1 broken broken ");
    n->fails = NULL;
    for (int i = 0; i < 2; i++)
        lt_deferred_wgrad_free(list[i]);
    CHECK_STR(n->log, "w1 b1 broken broken ");
    CHECK_EQ(lt_grad_uses(n->w[0]), 0);
}

TEST_NET(a_gradient_discarded_while_lists_run_together)
{
    lt_deferred_wgrad *list[2];
    n->layers = 2;
    for (int i = 0; i < 2; i++)
        list[i] = split(n);
    n->zeroes = n->w[1]; /* in its own hook it can */
    CHECK_OK(lt_backward_weights_all(n->ctx));
    CHECK(!lt_grad(n->w[1]) && lt_grad(n->b[1]));
    for (int i = 0; i < 2; i++)
        lt_deferred_wgrad_free(list[i]);
    for (int i = 0; i < 2; i++)
        list[i] = split(n);
    lt_zero_grad(n->b[0]);
    CHECK_FAILS(lt_backward_weights_all(n->ctx), LT_EINVAL,
                "lt_backward_weights_all(): lt_zero_grad() has discarded a gradient");
    for (int i = 0; i < 2; i++)
        lt_deferred_wgrad_free(list[i]);
}

static int halves, leaves;

static void count_calls(void *ud, const lt_call *c, bool backward, const char *where)
{
    (void)ud, (void)where;
    halves += backward && c->n_in == 3 && c->d_in[0] && !c->d_in[1];
    for (int i = 0; backward && i < c->n_in; i++)
        leaves += c->leaves >> i & 1 && c->d_in[i];
}

TEST_NET(an_op_hook_sees_both_calls)
{
    halves = leaves = 0;
    lt_set_op_hook(n->ctx, count_calls, NULL);
    lt_deferred_wgrad *list = split(n);
    CHECK_EQ(halves, 1);
    CHECK_EQ(leaves, 2 + 3);
    CHECK_OK(lt_backward_weights(list));
    CHECK_EQ(leaves, 2 + 3 + 2);
    lt_set_op_hook(n->ctx, NULL, NULL);
}

/* ==== Errors ================================================================================== */

TEST_NET(lists_are_completed_in_order)
{
    lt_deferred_wgrad *one = split(n), *two = split(n);
    CHECK_FAILS(lt_backward_weights(two), LT_EINVAL, "an earlier backward must be completed first");
    CHECK_EQ(n->w[1]->leaf->deferred, 1);
    CHECK_OK(lt_backward_weights(one));
}

TEST_NET(no_step_and_no_new_scaling_while_gradients_are_pending)
{
    lt_deferred_wgrad *list = split(n);
    step(n, LT_EINVAL,
         "an optimizer step cannot run while gradients of parameters are pending; "
         "call lt_backward_weights() first");
    CHECK_FAILS(lt_set_part(n->ctx, LT_PART_SCALE, NULL), LT_EINVAL,
                "the loss scale cannot change while gradients of parameters are pending");
    CHECK_OK(lt_backward_weights(list));
    CHECK_OK(lt_set_part(n->ctx, LT_PART_SCALE, NULL));
    step(n, LT_OK, NULL);
}

TEST_NET(a_pending_gradient_cannot_be_discarded)
{
    lt_deferred_wgrad *list = split(n);
    lt_zero_grad(n->w[0]); /* not pending */
    CHECK_OK(lt_backward_weights(list));
    list = split(n);
    lt_zero_grad(n->w[1]);
    CHECK_FAILS(lt_backward_weights(list), LT_EINVAL, "lt_zero_grad() has discarded a gradient");
    list = split(n);
    n->zeroes = n->w[1]; /* in its own hook it can */
    CHECK_OK(lt_backward_weights(list));
    CHECK(!lt_grad(n->w[1]) && lt_grad(n->b[1]));
}

TEST_NET(a_backward_cannot_overtake_a_pending_gradient)
{
    lt_deferred_wgrad *list = split(n);
    CHECK_FAILS(go_back(n, NULL), LT_EINVAL,
                "backward of linear: an earlier backward has not added to this gradient yet; call "
                "lt_backward_weights() for it first");
    lt_tensor *other = lt_run(n->ctx, "exp", NULL, n->w[0], NULL);
    lt_tensor *sum = take1("sum", other);
    CHECK_OK(lt_backward(sum, NULL)); /* w0 is not pending */
    lt_release(sum);
    CHECK_FAILS(lt_backward(n->b[1], n->b[0]), LT_EINVAL, "has not added to this gradient yet");
    CHECK_EQ(lt_grad_uses(n->b[1]), 1); /* by the list */
    CHECK_OK(lt_backward_weights(list));
    CHECK_EQ(lt_grad_uses(n->b[1]), 0);
    CHECK_OK(go_back(n, NULL));
}

/* w0 is computed at once, so its hook runs in the first half of the second backward. */
TEST_NET(a_hook_may_not_discard_a_pending_gradient_of_another_parameter)
{
    lt_deferred_wgrad *list = split(n);
    n->victim = n->w[1];
    lt_deferred_wgrad *more = split(n);
    n->victim = NULL;
    CHECK_FAILS(lt_backward_weights(list), LT_EINVAL, "lt_zero_grad() has discarded a gradient");
    lt_deferred_wgrad_free(more);
}

TEST_NET(callbacks_must_support_overlapping_backwards)
{
    set_part(n, true);
    lt_deferred_wgrad *list = split(n), *more = NULL;
    CHECK_FAILS(go_back(n, &more), LT_EINVAL,
                "backward cannot start before lt_backward_weights() has completed the earlier "
                "split backward, because the gradient callbacks do not support overlap");
    CHECK(!more);
    CHECK_OK(lt_backward_weights(list));
    list = split(n);
    lt_deferred_wgrad_free(list);
    CHECK_STR(n->log, "begin b2 w0 b0 w1 b1 end begin b2 w0 b0 broken ");
}

TEST_NET(a_dry_run_defers_nothing)
{
    lt_deferred_wgrad *list = split(n), *dry;
    CHECK_OK(lt_dry_run_begin(n->ctx, NULL, NULL, NULL));
    dry = split(n);
    CHECK_EQ(n->w[1]->leaf->deferred, 1);
    CHECK_OK(lt_backward_weights(dry));
    dry = split(n);
    lt_dry_run_end(n->ctx);
    CHECK(!lt_grad(n->w[1]));
    CHECK_OK(lt_backward_weights(dry));
    CHECK_OK(lt_backward_weights(list));
    CHECK(lt_grad(n->w[1]) != NULL);
    list = split(n);
    CHECK_OK(lt_dry_run_begin(n->ctx, NULL, NULL, NULL));
    CHECK_FAILS(lt_backward_weights(list), LT_EINVAL, "its backward ran before the dry run");
    lt_dry_run_end(n->ctx);
    CHECK_EQ(n->w[1]->leaf->deferred, 0);
}

/* ==== Cleanup ================================================================================= */

TEST_NET(a_hook_that_fails_ends_the_backward)
{
    lt_deferred_wgrad *list, *next;
    set_part(n, false);
    n->fails = "b2"; /* in the first half */
    list = (lt_deferred_wgrad *)n;
    CHECK_FAILS(go_back(n, &list), LT_EPEER, "hook says no");
    CHECK(!list);
    n->fails = "w1";
    list = split(n);
    next = split(n);
    CHECK_FAILS(lt_backward_weights(list), LT_EPEER, "hook says no");
    n->fails = NULL;
    CHECK_OK(lt_backward_weights(next));
    CHECK_STR(n->log, "begin b2 broken begin b2 w0 b0 begin b2 w0 b0 w1 broken w1 b1 end ");
    CHECK_EQ(n->w[1]->leaf->deferred, 0);
}

TEST(lists_may_be_freed_in_any_order_and_after_the_context)
{
    net *n = made();
    lt_deferred_wgrad *list[3] = {split(n), split(n), split(n)};
    lt_deferred_wgrad_free(list[1]);
    CHECK_EQ(n->w[1]->leaf->deferred, 2);
    CHECK_OK(lt_backward_weights(list[0]));
    lt_deferred_wgrad_free(NULL);
    close_net(n);
    lt_ctx_free(n->ctx);
    CHECK_FAILS(lt_backward_weights(list[2]), LT_EINVAL, "the context was closed");
}

TEST_NET(a_frozen_or_changed_parameter)
{
    lt_deferred_wgrad *list = split(n);
    CHECK_OK(lt_set_requires_grad(n->w[1], false));
    CHECK_OK(lt_backward_weights(list));
    CHECK(!lt_grad(n->w[1]) && lt_grad(n->b[1]));
    CHECK_OK(lt_set_requires_grad(n->w[1], true));
    list = split(n);
    CHECK_OK(lt_fill(n->w[1], 1));
    CHECK_FAILS(lt_backward_weights(list), LT_EINVAL,
                "backward of linear: its input 2 was changed in place after it was used");
}

/* Two split backwards and a step. */
static lt_status train(lt_ctx *ctx)
{
    static net n;
    lt_deferred_wgrad *list[2] = {NULL};
    lt_status status = open_net(&n, ctx);
    for (int i = 0; i < 2 && status == LT_OK; i++)
        status = go_back(&n, &list[i]);
    for (int i = 0; i < 2 && status == LT_OK; i++) {
        lt_deferred_wgrad *next = list[i];
        list[i] = NULL;
        status = lt_backward_weights(next);
    }
    lt_deferred_wgrad_free(list[1]);
    lt_deferred_wgrad_free(list[0]);
    close_net(&n);
    return status;
}

TEST(every_allocation_can_fail)
{
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 1, .reference = true});
    size_t live = 0;
    lt_status status = train(ctx);
    CHECK_OK(status);
    live = lt_memory_stats(ctx).live;
    lt_ctx_free(ctx);
    int n = 0;
    for (status = LT_ENOMEM; status != LT_OK; n++) {
        char fault[32];
        snprintf(fault, sizeof fault, "alloc:n=%d", n + 1);
        ctx = lt_open(&(lt_config){.fault = fault, .threads = 1, .reference = true});
        if (!ctx)
            continue;
        status = train(ctx);
        CHECK(status == LT_OK || status == LT_ENOMEM);
        CHECK_EQ(lt_tape_nodes(lt_tape_current(ctx)), 0);
        if (status != LT_OK)
            CHECK_OK(train(ctx));
        CHECK_EQ(lt_memory_stats(ctx).live, live);
        lt_ctx_free(ctx);
        CHECK(n < 2000);
    }
    CHECK(n > 50);
}
