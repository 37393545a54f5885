/* test_stream.c - asynchronous copies from and to an accelerator: deferred scalars and batches. The
 * accelerator is the emulator. */
#include "tests/device/emu_counts.h"
#include "tests/device/deferred_batches.h"

/* More deferred scalars than there are slots. Each has the value at the time of its request. */
TEST(deferred_scalars)
{
    enum { N = 300 };
    lt_ctx *ctx = open_emu();
    emu_count_fn *count = emu_counter();
    lt_tensor *x = lt_tensor_full(ctx, LT_F16, 1, (int64_t[]){1}, 0);
    lt_tensor *two = lt_tensor_full(ctx, LT_F32, 1, (int64_t[]){2}, 0);
    lt_deferred *deferred[N];
    long waits = count(EMU_WAITS);
    for (int i = 0; i < N; i++) {
        CHECK_OK(lt_fill(x, i));
        CHECK((deferred[i] = lt_item_deferred(x)) != NULL);
        CHECK(i >= 256 || count(EMU_WAITS) == waits);
    }
    for (int i = N - 1; i >= 0; i--) {
        double value;
        if (i % 3 > 0)
            CHECK_OK(lt_deferred_item(deferred[i], &value));
        if (i % 3 > 0)
            CHECK_NEAR(value, i, 0);
        lt_deferred_free(deferred[i]);
    }
    CHECK_OK(lt_fill(x, -1));
    deferred[0] = lt_item_deferred(x); /* reuses the slot of a scalar that was never read */
    double value, again;
    CHECK_OK(lt_deferred_item(deferred[0], &value));
    CHECK_OK(lt_deferred_item(deferred[0], &again));
    CHECK(value == -1 && again == -1);
    lt_deferred_free(deferred[0]);
    CHECK(!lt_item_deferred(two));
    CHECK_MSG("a deferred scalar must be one element, but this is 2 f32");
    lt_release(two);
    lt_release(x);
    lt_ctx_free(ctx);
}

TEST(batches)
{
    use_emu();
    check_batches(1);
    check_batches(3);
    check_batches(-1);
    check_batches_of_bytes();
}

TEST(requested_batches)
{
    use_emu();
    check_requested_batches(1);
    check_requested_batches(3);
    check_requested_batches(-1);
    check_uploads_at_requests();
}

TEST(abandoned_batches)
{
    use_emu();
    check_abandoned_batches();
}

/* Without pinned host memory every copy is synchronous, and step checks are not possible. */
TEST(without_pinned_memory)
{
    double value;
    setenv("EMU", "no-memory", 1);
    lt_ctx *ctx = open_emu();
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 0, NULL, 3);
    lt_deferred *deferred = lt_item_deferred(x);
    CHECK_OK(lt_deferred_item(deferred, &value));
    CHECK(value == 3);
    CHECK_OK(lt_set_requires_grad(x, true));
    CHECK_FAILS(lt_backward(x, NULL), LT_ENOMEM, "out of host memory for copies from cuda:0");
    lt_deferred_free(deferred);
    lt_release(x);
    lt_ctx_free(ctx);
    check_batches(1);
    check_requested_batches(1);
    unsetenv("EMU");
}
