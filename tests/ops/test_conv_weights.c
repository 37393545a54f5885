/* test_conv_weights.c - which gradients of weights conv_weights.c accepts, and that its results
 * have the same bits in every run. test_conv2d.c compares their values with the reference. */
#include "tests/ops/conv.h"

static bool weights_takes(const lt_conv *v, lt_dtype dtype, int threads)
{
    return takes(&lt__conv_weights, LT_CONV_WEIGHTS, v, dtype, LT_F32, threads);
}

static void want_fast_products(void)
{
    if (!has_fast_products(true))
        SKIP("conv_weights has no kernel for this CPU or compiler");
}

TEST(strides_are_accepted)
{
    want_fast_products();
    lt_conv first = conv_of(128, 28, 16, 32, 3, 2), second = conv_of(128, 14, 32, 64, 1, 2);
    lt_conv wide = conv_of(16, 56, 64, 64, 3, 2), plain = conv_of(16, 56, 16, 32, 3, 1);
    for (int i = 0; i < 2; i++) {
        lt_dtype dtype = i == 0 ? LT_F32 : LT_BF16;
        CHECK(weights_takes(&first, dtype, 2) && weights_takes(&second, dtype, 2));
        CHECK(weights_takes(&wide, dtype, 2) && !weights_takes(&plain, dtype, 2));
    }
    CHECK(!weights_takes(&first, LT_F64, 2));
}

TEST(each_thread_needs_many_pixels)
{
    want_fast_products();
    lt_conv v = conv_of(16, 14, 1024, 256, 1, 1), large = conv_of(16, 14, 1024, 2048, 1, 1);
    lt_call call = {.threads = 3};
    CHECK(weights_takes(&v, LT_BF16, 3));
    CHECK(lt__conv_weights.scratch(&call, &v, LT_BF16, true) > 3 * 1024 * 256 * sizeof(float));
    CHECK(!weights_takes(&v, LT_BF16, 4));
    CHECK(!weights_takes(&large, LT_BF16, 1));
    CHECK_EQ(lt__conv_weights.scratch(&call, &large, LT_BF16, true), 0);
}

/* Overlapping windows: only in bf16 and with few channels. */
TEST(stride_1_is_accepted_in_bf16)
{
    want_fast_products();
    lt_conv few = conv_of(16, 28, 64, 128, 3, 1), many = conv_of(16, 28, 128, 128, 3, 1);
    CHECK(weights_takes(&few, LT_BF16, 2) && !weights_takes(&few, LT_F32, 2));
    CHECK(!weights_takes(&many, LT_BF16, 2));
}

TEST(other_tasks_are_not_accepted)
{
    want_fast_products();
    lt_conv v = conv_of(128, 28, 16, 32, 3, 2);
    int64_t *sizes[] = {&v.window.dilation[0], &v.window.dilation[1], &v.groups, &v.in};
    CHECK(!takes(&lt__conv_weights, LT_CONV_WEIGHTS, &v, LT_BF16, LT_BF16, 1));
    CHECK(!takes(&lt__conv_weights, LT_CONV, &v, LT_F32, LT_F32, 1));
    check_declined(&lt__conv_weights, &v, sizes, 4, 1);
}

/* With 16 channels, the last columns of the sums are a single vector in the last panel. */
TEST(every_run_gives_the_same_bits)
{
    want_fast_products();
    for (int i = 0; i < 4; i++) {
        int64_t in = i & 1 ? 16 : 32;
        lt_conv v = conv_of(67, 13, in, 48, 3, 2);
        int64_t of_x = 67 * 13 * 13 * in, of_w = 48 * 9 * in, of_y = 67 * 7 * 7 * 48;
        lt_dtype dtype = i & 2 ? LT_BF16 : LT_F32;
        lt_conv_task task = {.kind = LT_CONV_WEIGHTS,
                             .conv = &v,
                             .x = random_operand(dtype, of_x, 4),
                             .w = random_operand(LT_F32, of_w, 5),
                             .y = random_operand(dtype, of_y, 3)};
        lt_conv_task again = task;
        again.w = random_operand(LT_F32, of_w, 7);
        run_task(&lt__conv_weights, &task, 3, 0xff);
        run_task(&lt__conv_weights, &again, 3, 0);
        CHECK(memcmp(task.w.data, again.w.data, (size_t)of_w * sizeof(float)) == 0);
        void *all[] = {task.x.data, task.w.data, task.y.data, again.w.data};
        for (int k = 0; k < 4; k++)
            free(all[k]);
    }
}
