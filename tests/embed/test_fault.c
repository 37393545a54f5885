/* test_fault.c - memory runs out at each allocation of two LeNet training steps in turn. Each time,
 * the caller must get LT_ENOMEM, nothing may leak, and the same training must then succeed in the
 * same context. The test also runs under the sanitizers, which find what it cannot: leaks of other
 * memory, and reads of freed memory.
 */
#include "data/data.h"
#include "ops/ops.h"
#include "tests/lt_test.h"

#include "lenet.h"

enum { SIDE = 8, BATCH = 2, MOST = 5000 };

static lt_status train(lt_ctx *ctx)
{
    lenet net = {0};
    lt_tensor *images = NULL, *labels = NULL, *x, *y;
    double loss;
    lt_batches *batches = NULL;
    lt_status status = lenet_synthetic(ctx, 2 * BATCH, SIDE, &images, &labels);
    if (status == LT_OK && !(batches = lenet_batches(ctx, images, labels, BATCH)))
        status = lt_errcode();
    if (status == LT_OK)
        status = lenet_open(&net, ctx, SIDE);
    for (int i = 0; i < 2 && status == LT_OK; i++) {
        if ((status = lt_batches_next(batches, &x, &y)) != LT_OK)
            break;
        status = lenet_step(&net, x, y, &loss);
        RELEASE(x, y);
    }
    lenet_close(&net);
    lt_batches_free(batches);
    RELEASE(labels, images);
    return status;
}

/* The bytes in use after a training: the plans of oneDNN, which are kept for the next training. */
static size_t live_after_training(bool reference)
{
    lt_ctx *ctx = lt_open(&(lt_config){.reference = reference, .threads = 1});
    CHECK(ctx != NULL);
    CHECK_OK(train(ctx));
    size_t live = lt_memory_stats(ctx).live;
    lt_ctx_free(ctx);
    return live;
}

static void fail_at_every_allocation(bool reference)
{
    size_t live = live_after_training(reference);
    lt_status status = LT_ENOMEM;
    int n = 0;
    for (; status != LT_OK; n++) {
        char fault[32];
        snprintf(fault, sizeof fault, "alloc:n=%d", n + 1);
        lt_ctx *ctx = lt_open(&(lt_config){.fault = fault, .reference = reference, .threads = 1});
        if (!ctx) { /* the fault hit an allocation of the context itself */
            CHECK_EQ(lt_errcode(), LT_ENOMEM);
            continue;
        }
        status = train(ctx);
        if (status != LT_OK) {
            CHECK_EQ(status, LT_ENOMEM);
            CHECK_MSG("(fault alloc)");
            CHECK_OK(train(ctx)); /* the context is still usable */
        }
        CHECK_EQ(lt_memory_stats(ctx).live, live);
        lt_ctx_free(ctx);
        CHECK(n < MOST);
    }
    CHECK(n > 100); /* the run without a fault allocates at least that often */
}

TEST(every_allocation_of_two_steps_can_fail) { fail_at_every_allocation(false); }
TEST(every_allocation_of_two_reference_steps_can_fail) { fail_at_every_allocation(true); }
