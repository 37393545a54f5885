/* test_scratch.c - libraries that run out of memory in a query for the workspace of a call. The
 * call must fail with LT_ENOMEM and must not run without a workspace. The libraries are stand-ins,
 * which write to all of the workspace that they request.
 */
#include "tests/lt_test.h"

#ifdef LT_WITH_CUDNN
#include "ops/cuda/libraries.h"
#include "ops/kernel.h"
#include "ops/backend/plugin.h"
#include "tests/cuda/libs.h"
#include "tests/device/emu.h"

typedef struct sides {
    lt_ctx *ctx;
    stand_in *dnn, *blas;
} sides;

static sides open_sides(void)
{
    sides s = {.dnn = open_stand_in("libcudnn.so.9"), .blas = open_stand_in(LT_CUBLASLT_SONAME)};
    s.dnn->engines[0][0].workspace = s.blas->engines[0][0].workspace = 4096;
    use_plugins(""); /* the plugin is beside this test program */
    s.ctx = open_device();
    return s;
}

static lt_tensor *ones(lt_ctx *ctx, int ndim, const int64_t *dims)
{
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, ndim, dims, 1);
    CHECK_OK(lt_set_requires_grad(x, true));
    return x;
}

static double first_of(lt_tensor *x)
{
    double value = 0;
    CHECK(x != NULL);
    CHECK_OK(lt_item(x, 0, &value));
    return value;
}

/* Checks op(x, w), forward and backward: each fails once when the library has no memory, and then
 * succeeds. */
static void check_op(lt_ctx *ctx, const char *op, const char *options, lt_tensor *x, lt_tensor *w,
                     stand_in *library, int no_memory, const char *name, double y_is, double dx_is,
                     double dw_is)
{
    char forward[96], backward[96];
    snprintf(forward, sizeof forward, "%s: out of memory in %s; try a smaller batch", op, name);
    snprintf(backward, sizeof backward, "backward of %s: out of memory in %s; try a smaller batch",
             op, name);
    library->fail_query = no_memory;
    CHECK(lt_run(ctx, op, options, x, w, NULL) == NULL);
    CHECK_EQ(lt_errcode(), LT_ENOMEM);
    CHECK_STR(lt_errmsg(), forward);

    lt_tensor *y = lt_run(ctx, op, options, x, w, NULL);
    if (!y)
        FAIL("%s: %s", op, lt_errmsg());
    CHECK_NEAR(first_of(y), y_is, 0);
    lt_tensor *dy = lt_tensor_full(ctx, LT_F32, lt_ndim(y), lt_dims(y), 1);
    library->fail_query = no_memory;
    CHECK_FAILS(lt_backward(y, dy), LT_ENOMEM, backward);
    CHECK(!lt_grad(x) || library->fail_query == 0);
    lt_release(y);

    lt_zero_grad(x);
    lt_zero_grad(w);
    y = lt_run(ctx, op, options, x, w, NULL);
    CHECK_OK(lt_backward(y, dy));
    CHECK_NEAR(first_of(lt_grad(x)), dx_is, 0);
    CHECK_NEAR(first_of(lt_grad(w)), dw_is, 0);
    lt_release(y);
    lt_release(dy);
    lt_release(x);
    lt_release(w);
}

TEST(convolutions)
{
    sides s = open_sides();
    lt_tensor *x = ones(s.ctx, 4, (int64_t[]){2, 4, 4, 3});
    lt_tensor *w = ones(s.ctx, 4, (int64_t[]){5, 3, 3, 3});
    check_op(s.ctx, "conv2d", "stride=2", x, w, s.dnn,
             CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED, "cuDNN", 27, 5, 2);
    lt_ctx_free(s.ctx);
}

TEST(linear_layers)
{
    sides s = open_sides();
    lt_tensor *x = ones(s.ctx, 2, (int64_t[]){2, 3}), *w = ones(s.ctx, 2, (int64_t[]){5, 3});
    check_op(s.ctx, "linear", "", x, w, s.blas, CUBLAS_STATUS_ALLOC_FAILED, "cuBLASLt", 3, 5, 2);
    lt_ctx_free(s.ctx);
}

TEST(products)
{
    sides s = open_sides();
    lt_tensor *x = ones(s.ctx, 3, (int64_t[]){7, 2, 3}), *w = ones(s.ctx, 3, (int64_t[]){7, 3, 5});
    check_op(s.ctx, "matmul", "", x, w, s.blas, CUBLAS_STATUS_ALLOC_FAILED, "cuBLASLt", 3, 5, 2);
    lt_ctx_free(s.ctx);
}
#else
TEST(scratch) { SKIP("cuDNN's and cuBLASLt's headers are not installed"); }
#endif
