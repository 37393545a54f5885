/* test_roots.c - backward from several roots. */
#include "tests/autograd/graph.h"

static lt_tensor *number(lt_ctx *ctx, int64_t n, double value)
{
    return lt_tensor_full(ctx, LT_F64, 1, &n, value);
}

/* Runs backward from two roots with gradients of ones times a and b. */
static lt_status from_two(lt_ctx *ctx, lt_tensor *x, double a, lt_tensor *y, double b)
{
    lt_tensor *grads[] = {number(ctx, lt_count(x), a), number(ctx, lt_count(y), b)};
    lt_status status = lt_backward_from(ctx, (lt_tensor *[]){x, y}, grads, 2, NULL);
    RELEASE(grads[0], grads[1]);
    return status;
}

TEST_GRAPH(roots_that_share_a_graph)
{
    lt_tensor *x = leaf(ctx, 2, 3), *h = lt_run(ctx, "mul", NULL, x, x, NULL);
    lt_tensor *y = lt_run(ctx, "mul", NULL, h, x, NULL), *z = lt_run(ctx, "neg", NULL, h, NULL);
    CHECK_OK(from_two(ctx, y, 1, z, 10));
    CHECK_NEAR(grad_at(x, 1), 3 * 9 - 10 * 6, 0);
    RELEASE(h, y, z, x);
}

TEST(a_root_that_another_root_is_computed_from)
{
    for (int order = 0; order < 2; order++) {
        lt_ctx *ctx = lt_open(&(lt_config){.poison = true});
        lt_tensor *x = leaf(ctx, 2, 3), *h = lt_run(ctx, "mul", NULL, x, x, NULL);
        lt_tensor *y = lt_run(ctx, "neg", NULL, h, NULL);
        CHECK_OK(order ? from_two(ctx, y, 1, h, 10) : from_two(ctx, h, 10, y, 1));
        CHECK_NEAR(grad_at(x, 0), 9 * 6, 0);
        RELEASE(h, y, x);
        finish(ctx);
    }
}

/* 1e16 + 1 - 1e16 depends on the order. */
TEST(gradients_of_equal_roots_are_added_in_order)
{
    static const double terms[2][3] = {{1e16, 1, -1e16}, {1e16, -1e16, 1}};
    for (int k = 0; k < 4; k++) {
        lt_ctx *ctx = lt_open(&(lt_config){.poison = true});
        lt_tensor *x = leaf(ctx, 2, 3), *grads[3];
        lt_tensor *y = k < 2 ? lt_run(ctx, "reshape", "shape=2,1", x, NULL) : lt_retain(x);
        for (int i = 0; i < 3; i++)
            grads[i] =
                lt_tensor_full(ctx, LT_F64, k < 2 ? 2 : 1, (int64_t[]){2, 1}, terms[k % 2][i]);
        CHECK_OK(lt_backward_from(ctx, (lt_tensor *[]){y, y, y}, grads, 3, NULL));
        CHECK_NEAR(grad_at(x, 0), k % 2, 0);
        for (int i = 0; i < 3; i++)
            lt_release(grads[i]);
        RELEASE(y, x);
        finish(ctx);
    }
}

static lt_status count(void *ud, lt_tensor *x, lt_tensor *grad)
{
    (void)x, (void)grad;
    ++*(int *)ud;
    return LT_OK;
}

TEST(a_leaf_among_the_roots)
{
    for (int order = 0; order < 2; order++) {
        lt_ctx *ctx = lt_open(&(lt_config){.poison = true});
        lt_tensor *x = leaf(ctx, 2, 3), *y = lt_run(ctx, "mul", NULL, x, x, NULL);
        int hooks = 0;
        CHECK_OK(lt_on_grad(x, count, &hooks, NULL));
        CHECK_OK(order ? from_two(ctx, y, 1, x, 10) : from_two(ctx, x, 10, y, 1));
        CHECK_NEAR(grad_at(x, 1), 16, 0);
        CHECK_EQ(hooks, 1);
        RELEASE(y, x);
        finish(ctx);
    }
}

/* ==== An op with two outputs ================================================================== */

static lt_status pair_shape(lt_call *c)
{
    for (int i = 0; i < 2; i++)
        c->spec[i] = (lt_spec){.dtype = LT_F64, .ndim = 1, .dims = {c->in[0]->dims[0]}};
    return LT_OK;
}

static lt_status pair_fwd(lt_call *c)
{
    for (int64_t i = 0; i < c->in[0]->count; i++)
        for (int k = 0; k < 2; k++)
            ((double *)c->out[k]->data)[i] = (2 + k) * ((double *)c->in[0]->data)[i];
    return LT_OK;
}

static lt_status pair_bwd(lt_call *c)
{
    for (int64_t i = 0; i < c->d_in[0]->count; i++) {
        double sum = c->add & 1 ? ((double *)c->d_in[0]->data)[i] : 0;
        for (int k = 0; k < 2; k++)
            sum += c->d_out[k] ? (2 + k) * ((double *)c->d_out[k]->data)[i] : 0;
        ((double *)c->d_in[0]->data)[i] = sum;
    }
    return LT_OK;
}

static const lt_op pair = {.sig = "pair(x)",
                           .doc = "2x and 3x.",
                           .n_out = 2,
                           .shape = pair_shape,
                           .fwd = pair_fwd,
                           .bwd = pair_bwd};

TEST_GRAPH(outputs_of_one_op)
{
    CHECK_OK(lt_op_register(ctx, &pair));
    lt_tensor *x = leaf(ctx, 2, 3), *y[2];
    CHECK_OK(lt_apply(ctx, lt_op_find(ctx, "pair"), &x, 1, NULL, y));
    CHECK_OK(from_two(ctx, y[1], 1, y[0], 10));
    CHECK_NEAR(grad_at(x, 1), 23, 0);
    RELEASE(y[0], y[1], x);
}

/* ==== Callbacks and errors ==================================================================== */

typedef struct seen {
    int begins, ends;
    lt_tensor *loss;
    int uses; /* of x when backward began */
    lt_tensor *x;
} seen;

static lt_status note_begin(void *ud, lt_ctx *ctx, lt_tensor *loss, lt_tensor *grad)
{
    seen *s = ud;
    (void)ctx;
    CHECK(!loss == !grad);
    s->begins++;
    s->loss = loss;
    s->uses = s->x ? lt_grad_uses(s->x) : 0;
    return LT_OK;
}

static lt_status note_end(void *ud, lt_ctx *ctx, lt_status status)
{
    (void)ctx;
    ((seen *)ud)->ends++;
    return status;
}

TEST_GRAPH(begin_gets_the_loss_or_null)
{
    lt_tensor *x = leaf(ctx, 2, 3), *y = lt_run(ctx, "exp", NULL, x, NULL);
    lt_tensor *loss = lt_run(ctx, "sum", NULL, x, NULL), *ones = number(ctx, 2, 1);
    seen s = {.x = x};
    CHECK_OK(lt_set_part(ctx, LT_PART_EXCHANGE,
                         &(lt_step_part){.ud = &s, .begin = note_begin, .end = note_end}));
    CHECK_OK(lt_backward_from(ctx, NULL, NULL, 0, NULL));
    CHECK(s.begins == 1 && s.ends == 1 && !s.loss && s.uses == 0 && !lt_grad(x));
    CHECK_OK(lt_backward_from(ctx, (lt_tensor *[]){y, loss, x}, (lt_tensor *[]){ones, NULL, ones},
                              3, NULL));
    CHECK(s.begins == 2 && s.ends == 2 && s.loss == loss);
    CHECK_EQ(s.uses, 3);
    CHECK_EQ(lt_grad_uses(x), 0);
    CHECK_NEAR(grad_at(x, 0), exp(3) + 2, 1e-12);
    CHECK_OK(lt_set_part(ctx, LT_PART_EXCHANGE, NULL));
    RELEASE(ones, loss, y, x);
}

TEST(invalid_roots_are_rejected)
{
    lt_ctx *ctx = lt_open(&(lt_config){.poison = true}), *other = lt_open(NULL);
    lt_tape *tape = lt_tape_new(ctx);
    lt_tensor *x = leaf(ctx, 1, 3), *far = leaf(other, 1, 3), *plain = number(ctx, 1, 3);
    lt_tensor *y = lt_run(ctx, "exp", NULL, x, NULL), *one = number(ctx, 1, 1);
    lt_tensor *two = number(ctx, 2, 1);
    lt_tape_use(ctx, tape);
    lt_tensor *z = lt_run(ctx, "exp", NULL, x, NULL);
    CHECK_FAILS(from_two(ctx, y, 1, z, 1), LT_EINVAL,
                "root 2 was recorded on another tape than the roots before it");
    CHECK_FAILS(from_two(ctx, y, 1, far, 1), LT_EINVAL, "root 2 belongs to another context");
    CHECK_FAILS(from_two(ctx, plain, 1, y, 1), LT_EINVAL,
                "root 1 was not computed from anything that requires a gradient");
    CHECK_FAILS(
        lt_backward_from(ctx, (lt_tensor *[]){y, y, x}, (lt_tensor *[]){one, NULL, NULL}, 3, NULL),
        LT_EINVAL, "roots 2 and 3 have no gradient, but only one root can be the loss");
    CHECK_FAILS(lt_backward_from(ctx, (lt_tensor *[]){y}, (lt_tensor *[]){two}, 1, NULL), LT_EINVAL,
                "the gradient must be 1 f64, but is 2 f64");
    lt_tensor *pending = lt_param_new(ctx, LT_F64, 1, (int64_t[]){1}, (lt_init){0});
    CHECK_OK(lt_scope_push(ctx));
    lt_tensor *dead = lt_run(ctx, "exp", NULL, x, NULL);
    lt_scope_pop(ctx);
    CHECK_FAILS(from_two(ctx, dead, 1, y, 1), LT_EINVAL, "belongs to a step that is over");
    CHECK_FAILS(lt_backward(dead, NULL), LT_EINVAL, "belongs to a step that is over");
    CHECK_FAILS(lt_backward(pending, NULL), LT_EINVAL, "has no memory yet");
    RELEASE(dead, pending);
    CHECK(!lt_grad(x));
    CHECK_EQ(lt_grad_uses(x), 0);
    lt_tape_use(ctx, NULL);
    CHECK_OK(from_two(ctx, y, 1, x, 1));
    CHECK_FAILS(from_two(ctx, x, 1, y, 1), LT_EINVAL, "freed by an earlier backward");
    CHECK_EQ(lt_grad_uses(x), 0);
    lt_release(z);
    lt_tape_free(tape);
    RELEASE(y, x, plain, one, two, far);
    lt_ctx_free(other);
    finish(ctx);
}
