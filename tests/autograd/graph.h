/* graph.h - helpers that build small graphs, for the tests of autograd. */
#ifndef TESTS_AUTOGRAD_GRAPH_H
#define TESTS_AUTOGRAD_GRAPH_H

#include "autograd/tape.h"
#include "ops/ops.h"
#include "tests/lt_test.h"

static inline lt_tensor *leaf(lt_ctx *ctx, int64_t n, double value)
{
    lt_tensor *x = lt_tensor_full(ctx, LT_F64, 1, &n, value);
    CHECK_OK(lt_set_requires_grad(x, true));
    return x;
}

/* op(x, y). Releases x and y. */
static inline lt_tensor *take2(const char *op, lt_tensor *x, lt_tensor *y)
{
    lt_tensor *z = lt_run(lt_tensor_ctx(x), op, NULL, x, y, NULL);
    RELEASE(x, y);
    return z;
}

static inline lt_tensor *take1(const char *op, lt_tensor *x)
{
    lt_tensor *y = lt_run(lt_tensor_ctx(x), op, NULL, x, NULL);
    lt_release(x);
    return y;
}

static inline double grad_at(lt_tensor *x, int64_t i)
{
    double v;
    CHECK(lt_grad(x) != NULL);
    CHECK_OK(lt_item(lt_grad(x), i, &v));
    return v;
}

static inline void finish(lt_ctx *ctx)
{
    CHECK_EQ(lt_tape_nodes(lt_tape_current(ctx)), 0);
    lt_ctx_free(ctx);
}

#define TEST_GRAPH(title)                                                                          \
    TEST_WITH(title, lt_ctx *ctx, lt_open(&(lt_config){.poison = true}), finish)

#endif
