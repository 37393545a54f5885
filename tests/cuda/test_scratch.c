/* test_scratch.c - libraries that run out of memory in a query for the workspace of a call. The
 * call must fail with LT_ENOMEM and must not run without a workspace. The libraries are stand-ins,
 * which write to all of the workspace that they request.
 */
#include "tests/lt_test.h"

#ifdef LT_WITH_CUDNN
#include "ops/cuda/libraries.h"
#include "tests/device/emu.h"

typedef struct sample { /* op(x, w) of ones, and the first values of the results */
    const char *op, *options, *library;
    int ndim;
    int64_t x[4], w[4];
    double y, dx, dw;
} sample;

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

/* Checks the op, forward and backward: each fails once when the library has no memory, and then
 * succeeds. */
static void check_op(sample s, stand_in *library, int no_memory)
{
    char forward[96], backward[128];
    lt_ctx *ctx = open_device();
    lt_tensor *x = ones(ctx, s.ndim, s.x), *w = ones(ctx, s.ndim, s.w);
    snprintf(forward, sizeof forward, "%s: out of memory in %s; try a smaller batch", s.op,
             s.library);
    snprintf(backward, sizeof backward, "backward of %s", forward);
    library->fail_query = no_memory;
    CHECK(lt_run(ctx, s.op, s.options, x, w, NULL) == NULL);
    CHECK_EQ(lt_errcode(), LT_ENOMEM);
    CHECK_STR(lt_errmsg(), forward);

    lt_tensor *y = lt_run(ctx, s.op, s.options, x, w, NULL);
    if (!y)
        FAIL("%s: %s", s.op, lt_errmsg());
    CHECK_NEAR(first_of(y), s.y, 0);
    lt_tensor *dy = lt_tensor_full(ctx, LT_F32, lt_ndim(y), lt_dims(y), 1);
    library->fail_query = no_memory;
    CHECK_FAILS(lt_backward(y, dy), LT_ENOMEM, backward);
    CHECK(!lt_grad(x) || library->fail_query == 0);
    lt_release(y);

    lt_zero_grad(x);
    lt_zero_grad(w);
    y = lt_run(ctx, s.op, s.options, x, w, NULL);
    CHECK_OK(lt_backward(y, dy));
    CHECK_NEAR(first_of(lt_grad(x)), s.dx, 0);
    CHECK_NEAR(first_of(lt_grad(w)), s.dw, 0);
    RELEASE(y, dy, x, w);
    lt_ctx_free(ctx);
}

TEST(no_memory)
{
    static const sample products[] = {{"linear", "", "cuBLASLt", 2, {2, 3}, {5, 3}, 3, 5, 2},
                                      {"matmul", "", "cuBLASLt", 3, {7, 2, 3}, {7, 3, 5}, 3, 5, 2}};
    stand_in *dnn = open_stand_in("libcudnn.so.9"), *blas = open_stand_in(LT_CUBLASLT_SONAME);
    dnn->engines[0][0].workspace = blas->engines[0][0].workspace = 4096;
    use_shim();
    check_op((sample){"conv2d", "stride=2", "cuDNN", 4, {2, 4, 4, 3}, {5, 3, 3, 3}, 27, 5, 2}, dnn,
             CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED);
    for (int i = 0; i < 2; i++)
        check_op(products[i], blas, CUBLAS_STATUS_ALLOC_FAILED);
}
#else
TEST(scratch) { SKIP("cuDNN's and cuBLASLt's headers are not installed"); }
#endif
