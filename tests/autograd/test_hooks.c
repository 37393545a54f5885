/* test_hooks.c - hooks that change the graph during backward: they register further hooks, release
 * or freeze their leaf, or try to run backward themselves. */
#include "tests/autograd/graph.h"

typedef struct probe {
    lt_tensor *x; /* the tensor that the hook changes */
    int calls;
    lt_status status;  /* status of its last attempt, */
    char message[160]; /* and the message */
} probe;

static void remember(probe *p, lt_status status)
{
    p->status = status;
    snprintf(p->message, sizeof p->message, "%s", status == LT_OK ? "" : lt_errmsg());
}

static lt_status count(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)x;
    (void)grad;
    ((probe *)ud)->calls++;
    return LT_OK;
}

/* Adds the gradient of sum(x^2) to x's gradient. */
static lt_status square_back(lt_tensor *x)
{
    lt_tensor *loss = take1("sum", lt_run(lt_tensor_ctx(x), "mul", NULL, x, x, NULL));
    lt_status status = lt_backward(loss, NULL);
    lt_release(loss);
    return status;
}

/* ==== Hooks that register hooks =============================================================== */

static lt_status register_itself(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)grad;
    probe *p = ud;
    if (++p->calls > 4000) /* the test must fail, not hang */
        return lt_fail(LT_EINVAL, "this hook is called forever");
    return lt_on_grad(x, register_itself, p, NULL);
}

TEST_GRAPH(a_hook_that_registers_itself_is_called_again_at_the_next_backward)
{
    lt_tensor *x = leaf(ctx, 2, 3);
    probe p = {.x = x};
    CHECK_OK(lt_on_grad(x, register_itself, &p, NULL));
    CHECK_OK(square_back(x));
    CHECK_EQ(p.calls, 1);
    CHECK_OK(square_back(x));
    CHECK_EQ(p.calls, 1 + 2);
    CHECK_OK(lt_backward(x, x)); /* the loss is a leaf */
    CHECK_EQ(p.calls, 1 + 2 + 4);
    lt_release(x);
}

TEST_GRAPH(hooks_that_double_in_every_backward_are_an_error)
{
    lt_tensor *x = leaf(ctx, 2, 3);
    probe p = {.x = x};
    lt_status status = lt_on_grad(x, register_itself, &p, NULL);
    int backwards = 0;
    for (; status == LT_OK && backwards < 64; backwards++)
        status = square_back(x);
    CHECK_EQ(status, LT_EINVAL);
    CHECK_STR(
        lt_errmsg(),
        "on_grad: this tensor already has the maximum of 1000 hooks; a hook that registers itself "
        "doubles their number in every backward");
    CHECK_EQ(backwards, 10);
    lt_release(x);
}

static int freed;
static void count_freed(void *ud)
{
    (void)ud;
    freed++;
}

TEST_GRAPH(a_rejected_hook_is_freed)
{
    lt_tensor *x = leaf(ctx, 2, 3);
    probe p = {.x = x};
    freed = 0;
    for (int i = 0; i < 1000; i++)
        CHECK_OK(lt_on_grad(x, count, &p, count_freed));
    CHECK_FAILS(lt_on_grad(x, count, &p, count_freed), LT_EINVAL, "the maximum of 1000 hooks");
    CHECK_EQ(freed, 1);
    CHECK_OK(square_back(x));
    CHECK_EQ(p.calls, 1000);
    lt_release(x);
    CHECK_EQ(freed, 1001);
}

static lt_status register_on_other(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)x;
    (void)grad;
    return lt_on_grad(((probe *)ud)->x, count, ud, NULL);
}

/* Backward reaches b after a, so b's hooks have not run yet. */
TEST_GRAPH(a_hook_may_register_another_on_a_later_leaf)
{
    lt_tensor *a = leaf(ctx, 2, 3), *b = leaf(ctx, 2, 5);
    probe p = {.x = b};
    CHECK_OK(lt_on_grad(a, register_on_other, &p, NULL));
    lt_tensor *y = lt_run(ctx, "exp", NULL, b, NULL);
    lt_tensor *loss = take1("sum", take2("mul", y, lt_retain(a)));
    CHECK_OK(lt_backward(loss, NULL));
    CHECK_EQ(p.calls, 1);
    RELEASE(loss, a, b);
}

/* ==== Hooks that release, freeze and discard ================================================== */

static lt_status drop_leaf(void *ud, lt_tensor *x, lt_tensor *grad)
{
    probe *p = ud;
    double value;
    p->calls++;
    lt_release(p->x);
    p->x = NULL;
    (void)x;
    return lt_item(grad, 0, &value);
}

/* Releases the last handle. */
TEST_GRAPH(a_hook_may_release_its_leaf)
{
    lt_tensor *x = leaf(ctx, 2, 3), *loss = take1("sum", lt_run(ctx, "neg", NULL, x, NULL));
    probe p = {.x = x};
    CHECK_OK(lt_on_grad(x, drop_leaf, &p, NULL));
    CHECK_OK(lt_backward(loss, NULL));
    CHECK_EQ(p.calls, 1);
    lt_release(loss);
}

TEST_GRAPH(a_hook_may_release_the_loss)
{
    lt_tensor *x = leaf(ctx, 1, 3), *y = leaf(ctx, 1, 5);
    lt_tensor *loss = take1("sum", lt_run(ctx, "neg", NULL, y, NULL));
    probe of_leaf = {.x = x}, of_graph = {.x = loss};
    CHECK_OK(lt_on_grad(x, drop_leaf, &of_leaf, NULL));
    CHECK_OK(lt_backward(x, NULL)); /* the loss is a leaf */
    CHECK_EQ(of_leaf.calls, 1);
    CHECK_OK(lt_on_grad(y, drop_leaf, &of_graph, NULL));
    CHECK_OK(lt_backward(loss, NULL));
    CHECK_EQ(of_graph.calls, 1);
    lt_release(y);
}

static lt_status look_at_leaf(void *ud, lt_tensor *x, lt_tensor *grad)
{
    CHECK(x != NULL);
    CHECK_EQ(lt_count(x), lt_count(grad));
    ((probe *)ud)->calls++;
    return LT_OK;
}

TEST_GRAPH(later_hooks_still_see_a_leaf_that_a_hook_released)
{
    lt_tensor *x = leaf(ctx, 2, 3), *loss = take1("sum", lt_run(ctx, "neg", NULL, x, NULL));
    probe p = {.x = x}, behind = {.x = NULL};
    CHECK_OK(lt_on_grad(x, drop_leaf, &p, NULL));
    CHECK_OK(lt_on_grad(x, look_at_leaf, &behind, NULL));
    CHECK_OK(lt_set_part(ctx, LT_PART_EXCHANGE,
                         &(lt_step_part){.ud = &behind, .grad_ready = look_at_leaf}));
    CHECK_OK(lt_backward(loss, NULL));
    CHECK_EQ(p.calls, 1);
    CHECK_EQ(behind.calls, 2);
    lt_release(loss);
    CHECK_OK(lt_set_part(ctx, LT_PART_EXCHANGE, NULL));
}

static lt_status freeze(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)grad;
    ((probe *)ud)->calls++;
    return lt_set_requires_grad(x, false);
}

TEST_GRAPH(a_hook_may_freeze_its_leaf)
{
    lt_tensor *x = leaf(ctx, 2, 3);
    probe p = {.x = x};
    CHECK_OK(lt_on_grad(x, freeze, &p, NULL));
    CHECK_OK(square_back(x));
    CHECK_NEAR(grad_at(x, 0), 6, 0);
    CHECK_FAILS(square_back(x), LT_EINVAL, "not computed from anything that requires a gradient");
    CHECK_EQ(p.calls, 1);
    lt_release(x);
}

static lt_status forget(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)grad;
    ((probe *)ud)->calls++;
    lt_zero_grad(x);
    return LT_OK;
}

TEST_GRAPH(a_hook_may_discard_the_gradient)
{
    lt_tensor *x = leaf(ctx, 2, 3);
    probe p = {.x = x};
    CHECK_OK(lt_on_grad(x, forget, &p, NULL));
    CHECK_OK(square_back(x));
    CHECK(!lt_grad(x));
    CHECK_OK(square_back(x));
    CHECK_EQ(p.calls, 2);
    lt_release(x);
}

static lt_status close_scope(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)grad;
    ((probe *)ud)->calls++;
    lt_scope_pop(lt_tensor_ctx(x));
    return LT_OK;
}

/* Backward retains the graph, but tensors that it still needs are dead. */
TEST_GRAPH(backward_fails_if_a_hook_ends_the_scope_of_the_graph)
{
    lt_tensor *a = leaf(ctx, 2, 3), *b = leaf(ctx, 2, 5);
    probe p = {.x = NULL};
    CHECK_OK(lt_on_grad(a, close_scope, &p, NULL));
    CHECK_OK(lt_scope_push(ctx));
    lt_tensor *y = take1("neg", lt_run(ctx, "exp", NULL, b, NULL));
    lt_tensor *z = take2("mul", lt_run(ctx, "mul", NULL, y, b, NULL), lt_retain(a));
    lt_tensor *loss = take1("sum", z);
    CHECK_FAILS(lt_backward(loss, NULL), LT_EINVAL, "belongs to a step that is over");
    CHECK_EQ(p.calls, 1);
    RELEASE(loss, y, a, b);
}

/* ==== Hooks that run backward ================================================================= */

static lt_status go_back(lt_tensor *x) { return lt_backward(x, x); }

static lt_status begin_dry_run(lt_tensor *x)
{
    return lt_dry_run_begin(lt_tensor_ctx(x), NULL, NULL, NULL);
}

static lt_status rescale(lt_tensor *x)
{
    return lt_set_part(lt_tensor_ctx(x), LT_PART_SCALE, NULL);
}

static lt_status (*attempt)(lt_tensor *x); /* the function that the hook calls */

static lt_status call_attempt(void *ud, lt_tensor *x, lt_tensor *grad)
{
    probe *p = ud;
    (void)grad;
    p->calls++;
    remember(p, attempt(x));
    return LT_OK;
}

TEST_GRAPH(backward_in_a_hook_is_rejected_and_the_outer_one_continues)
{
    static const struct {
        lt_status (*call)(lt_tensor *x);
        const char *message;
    } wrong[] = {{go_back, "backward: called from a hook of a running backward"},
                 {begin_dry_run, "a dry run cannot begin within backward"},
                 {rescale, "the loss scale cannot change within backward"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        lt_tensor *x = leaf(ctx, 2, 3);
        probe p = {.x = x};
        attempt = wrong[i].call;
        CHECK_OK(lt_on_grad(x, call_attempt, &p, NULL));
        CHECK_OK(square_back(x));
        CHECK_EQ(p.status, LT_EINVAL);
        CHECK_STR(p.message, wrong[i].message);
        CHECK_NEAR(grad_at(x, 0), 6, 0);
        CHECK_OK(square_back(x));
        CHECK_NEAR(grad_at(x, 1), 12, 0);
        CHECK_EQ(p.calls, 2);
        lt_release(x);
    }
}
