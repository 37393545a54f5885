/* The autocast switch, and tensors that the cast policy does not change. test_policies.c tests the
 * policy of each op. */
#include "amp/amp.h"
#include "ops/ops.h"
#include "tests/autograd/train.h"

static lt_dtype product_dtype(lt_ctx *ctx, lt_dtype x, lt_dtype y)
{
    lt_tensor *a = lt_tensor_full(ctx, x, 2, (int64_t[]){2, 2}, 1);
    lt_tensor *b = lt_tensor_full(ctx, y, 2, (int64_t[]){2, 2}, 1);
    lt_tensor *product = lt_run(ctx, "matmul", NULL, a, b, NULL);
    lt_dtype dtype = product ? lt_tensor_dtype(product) : LT_DTYPE_COUNT;
    RELEASE(a, b, product);
    return dtype;
}

TEST(each_context_has_its_own_switch)
{
    lt_ctx *ctx = lt_open(NULL), *other = lt_open(NULL);
    CHECK_EQ(lt_autocast(ctx), LT_F32);
    CHECK_EQ(product_dtype(ctx, LT_F32, LT_F32), LT_F32);
    for (int i = 0; i < 2; i++) {
        lt_dtype half = i == 0 ? LT_F16 : LT_BF16;
        lt_set_autocast(ctx, half);
        CHECK_EQ(lt_autocast(ctx), half);
        CHECK_EQ(product_dtype(ctx, LT_F32, LT_F32), half);
        CHECK_EQ(product_dtype(ctx, LT_F16, LT_BF16), half);
        CHECK_EQ(product_dtype(ctx, LT_F64, LT_F64), LT_F64);
        CHECK_EQ(product_dtype(ctx, LT_F64, LT_F32), LT_DTYPE_COUNT);
        CHECK_MSG("matmul: x is f64, y is f32");
        CHECK_EQ(product_dtype(ctx, LT_I64, LT_I64), LT_DTYPE_COUNT);
        CHECK_MSG("matmul: x must have a float dtype, but is i64");
        CHECK_EQ(lt_autocast(other), LT_F32);
    }
    lt_set_autocast(ctx, LT_F32);
    CHECK_EQ(lt_autocast(ctx), LT_F32);
    CHECK_EQ(product_dtype(ctx, LT_F32, LT_F32), LT_F32);
    lt_ctx_free(ctx);
    lt_ctx_free(other);
}

static lt_status any_shape(lt_call *call)
{
    (void)call;
    return LT_OK;
}

static lt_status set_to_3(lt_call *call) { return lt_fill(call->in[0], 3); }

TEST_OPEN(the_input_of_an_in_place_op_is_not_cast)
{
    static const lt_op op = {.sig = "set_to_3(x)",
                             .doc = "x = 3.",
                             .cast = LT_CAST_HALF,
                             .in_place = 1,
                             .shape = any_shape,
                             .fwd = set_to_3};
    double value;
    CHECK_OK(lt_op_register(ctx, &op));
    lt_set_autocast(ctx, LT_BF16);
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 0, NULL, 1);
    CHECK_OK(lt_apply(ctx, lt_op_find(ctx, "set_to_3"), &x, 1, NULL, NULL));
    CHECK_OK(lt_item(x, 0, &value));
    CHECK_NEAR(value, 3, 0);
    lt_release(x);
}

/* Each allocation of a call fails once: nothing leaks, and the next call works. */
TEST(out_of_memory_at_any_allocation)
{
    bool all_done = false;
    for (int n = 1; !all_done; n++) {
        char fault[32];
        snprintf(fault, sizeof fault, "alloc:n=%d", n);
        lt_ctx *ctx = lt_open(&(lt_config){.fault = fault});
        if (!ctx)
            continue;
        lt_set_autocast(ctx, LT_BF16);
        lt_params *p = lt_params_new(ctx);
        lt_tensor *w =
            lt_param_new(ctx, LT_F32, 2, (int64_t[]){2, 2}, (lt_init){LT_INIT_CONSTANT, 1, 0});
        lt_tensor *x = lt_tensor_full(ctx, LT_F32, 2, (int64_t[]){2, 2}, 1);
        if (p && w && x && lt_params_add(p, "w", w) == LT_OK && lt_params_place(p) == LT_OK) {
            lt_tensor *y = lt_run(ctx, "linear", NULL, x, w, NULL);
            lt_status status = y ? LT_OK : lt_errcode();
            all_done = y != NULL;
            CHECK(status == LT_OK || status == LT_ENOMEM);
            if (!y)
                CHECK((y = lt_run(ctx, "linear", NULL, x, w, NULL)) != NULL);
            CHECK_EQ(lt_tensor_dtype(y), LT_BF16);
            lt_release(y);
        }
        RELEASE(w, x);
        if (p)
            lt_params_free(p);
        lt_ctx_free(ctx);
    }
}
