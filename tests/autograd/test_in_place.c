/* Gradients that reuse the memory of the incoming gradient: when that is allowed, and when not. */
#include "tests/autograd/graph.h"

/* If the loss is a leaf, the given gradients are added to its gradient directly. */
TEST_GRAPH(half_gradients_are_added_in_f32)
{
    enum { N = 3000 };
    static const lt_dtype dtypes[] = {LT_F16, LT_BF16};
    int64_t n = N;
    for (int k = 0; k < 2; k++) {
        lt_tensor *x = lt_tensor_full(ctx, dtypes[k], 1, &n, 0), *g[2];
        CHECK_OK(lt_set_requires_grad(x, true));
        for (int i = 0; i < 2; i++) {
            g[i] = lt_tensor_new(ctx, dtypes[k], 1, &n);
            CHECK_OK(lt_fill_normal(g[i], LT_RNG_USER, (uint64_t)i, 0, 0, 1));
            CHECK_OK(lt_backward(x, g[i]));
        }
        for (int64_t i = 0; i < N; i++) {
            double a, b;
            CHECK_OK(lt_item(g[0], i, &a));
            CHECK_OK(lt_item(g[1], i, &b));
            float sum = (float)a + (float)b;
            lt_convert(&a, LT_F64, (uint16_t[]){k ? lt__f32_to_bf16(sum) : lt__f32_to_f16(sum)},
                       dtypes[k], 1);
            CHECK_NEAR(grad_at(x, i), a, 0);
        }
        RELEASE(g[0], g[1], x);
    }
}

/* ==== Gradients in place ====================================================================== */

TEST_GRAPH(a_gradient_reuses_the_memory_of_the_incoming_one)
{
    lt_tensor *x = leaf(ctx, 100000, 0.5), *y = take1("neg", lt_retain(x));
    for (int i = 0; i < 20; i++)
        y = take1(i % 2 ? "relu" : "sigmoid", y);
    y = take1("sum", y);
    size_t before = lt_memory_stats(ctx).live;
    CHECK_OK(lt_backward(y, NULL));
    CHECK(lt_memory_stats(ctx).peak < before + 1200000); /* one gradient of 0.8 MB, not two */
    CHECK(grad_at(x, 99999) < 0);
    RELEASE(y, x);
}

/* add passes one gradient to both of its inputs. The first input must not overwrite it; the last
 * one may. */
TEST_GRAPH(a_shared_gradient_is_not_overwritten)
{
    lt_tensor *x = leaf(ctx, 3, 2), *y = leaf(ctx, 3, 5), *z = leaf(ctx, 3, 1);
    lt_tensor *a = take1("sqrt", take1("neg", take1("neg", lt_retain(x))));
    lt_tensor *b = take1("relu6", take1("neg", lt_retain(y)));
    lt_tensor *c = take1("exp", take1("neg", lt_retain(z)));
    lt_tensor *loss = take1("sum", take2("add", take2("add", a, b), c));
    CHECK_OK(lt_backward(loss, NULL));
    CHECK_NEAR(grad_at(x, 2), 0.5 / sqrt(2), 1e-15);
    CHECK_NEAR(grad_at(y, 2), 0, 0);
    CHECK_NEAR(grad_at(z, 2), -exp(-1), 1e-15);
    RELEASE(loss, x, y, z);
}

/* The gradient of x has two contributions, through a reshape, which is a view. The gradient that
 * the caller gave does not change. */
TEST_GRAPH(views_and_given_gradients_are_not_overwritten)
{
    lt_tensor *x = leaf(ctx, 4, 3), *h = lt_run(ctx, "neg", NULL, x, NULL);
    lt_tensor *flat = lt_run(ctx, "reshape", "shape=2,2", h, NULL);
    lt_tensor *y = take2("add", take1("abs", lt_retain(flat)), take1("neg", lt_retain(flat)));
    lt_tensor *dy = lt_tensor_full(ctx, LT_F64, 2, lt_dims(y), 7);
    double v;
    CHECK_OK(lt_backward(y, dy));
    CHECK_NEAR(grad_at(x, 3), 14, 0);
    CHECK_OK(lt_item(dy, 3, &v));
    CHECK_NEAR(v, 7, 0);
    RELEASE(dy, y, flat, h, x);
}

/* An op that writes to an optional input may be called without it. */
TEST_GRAPH(an_optional_input_that_is_written_may_be_absent)
{
    const lt_def *def = lt_op_find(ctx, "dc_grad");
    lt_opt opts[LT_MAX_OPT];
    lt_tensor *in[4] = {NULL}, *out[LT_MAX_OUT];
    CHECK(def != NULL);
    for (int i = 0; i < 3; i++)
        in[i] = lt_tensor_full(ctx, LT_F32, 1, (int64_t[]){2}, 1 + i);
    CHECK_OK(lt_opts_parse(&def->schema, "lam=0.5", opts));
    CHECK_OK(lt_apply(ctx, def, in, 4, opts, out));
    for (int i = 0; i < 3; i++)
        lt_release(in[i]);
}
