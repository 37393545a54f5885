/* test_conv_thin.c - which convolutions conv_thin.c accepts, and that its results have the same
 * bits in every run. test_conv2d.c compares their values with the reference. */
#include "tests/ops/conv.h"

static bool thin_takes(const lt_conv *v, lt_conv_task_kind kind, lt_dtype dtype)
{
    return takes(&lt__conv_thin, kind, v, dtype, dtype, 1);
}

static void want_fast_products(void)
{
    if (!has_fast_products(false))
        SKIP("conv_thin has no kernel for this CPU or compiler");
}

TEST(gradients_of_weights_are_accepted)
{
    want_fast_products();
    lt_conv all[] = {conv_of(64, 28, 1, 32, 3, 1), conv_of(16, 224, 3, 32, 3, 2),
                     conv_of(16, 224, 3, 64, 7, 2), conv_of(2, 9, 4, 96, 5, 3)};
    for (int i = 0; i < 4; i++) {
        CHECK(thin_takes(&all[i], LT_CONV_WEIGHTS, LT_F32));
        CHECK(!thin_takes(&all[i], LT_CONV_WEIGHTS, LT_BF16));
        CHECK(!thin_takes(&all[i], LT_CONV_DATA, LT_F32));
    }
}

TEST(forward_is_accepted_for_up_to_two_channels)
{
    want_fast_products();
    lt_conv one = conv_of(64, 28, 1, 32, 3, 1), two = conv_of(64, 28, 2, 32, 5, 1);
    lt_conv three = conv_of(64, 28, 3, 32, 3, 1), strided = conv_of(64, 28, 1, 32, 3, 2);
    CHECK(thin_takes(&one, LT_CONV, LT_F32) && thin_takes(&two, LT_CONV, LT_F32));
    CHECK(!thin_takes(&three, LT_CONV, LT_F32) && !thin_takes(&strided, LT_CONV, LT_F32));
}

TEST(other_convolutions_are_not_accepted)
{
    want_fast_products();
    lt_conv v = conv_of(16, 28, 4, 32, 7, 7);
    lt_window *w = &v.window;
    int64_t *sizes[] = {&v.in, &v.out, &v.groups, &w->kernel[0], &w->stride[1], &w->dilation[0]};
    CHECK(thin_takes(&v, LT_CONV_WEIGHTS, LT_F32));
    check_declined(&lt__conv_thin, &v, sizes, 6, 1);
    w->pad[0] = 7;
    CHECK(!thin_takes(&v, LT_CONV_WEIGHTS, LT_F32));
}

TEST(every_run_gives_the_same_bits)
{
    want_fast_products();
    lt_conv v = conv_of(5, 67, 3, 64, 5, 2);
    int64_t of_x = 5 * 67 * 67 * 3, of_w = 64 * 25 * 3, of_y = 5 * 34 * 34 * 64;
    for (int i = 0; i < 2; i++) {
        lt_conv_task task = {.kind = i == 0 ? LT_CONV : LT_CONV_WEIGHTS,
                             .conv = &v,
                             .x = random_operand(LT_F32, of_x, 4),
                             .w = random_operand(LT_F32, of_w, 5),
                             .y = random_operand(LT_F32, of_y, 3)};
        lt_conv_task again = task;
        lt_operand *twice = i == 0 ? &again.y : &again.w, *once = i == 0 ? &task.y : &task.w;
        int64_t count = i == 0 ? of_y : of_w;
        *twice = random_operand(LT_F32, count, 7);
        run_task(&lt__conv_thin, &task, 3, 0xff);
        run_task(&lt__conv_thin, &again, 3, 0);
        CHECK(memcmp(once->data, twice->data, (size_t)count * sizeof(float)) == 0);
        void *all[] = {task.x.data, task.w.data, task.y.data, twice->data};
        for (int k = 0; k < 4; k++)
            free(all[k]);
    }
}

TEST(the_gradient_of_no_images_is_zero)
{
    want_fast_products();
    lt_conv v = conv_of(0, 9, 1, 32, 3, 1);
    lt_operand w = random_operand(LT_F32, 32 * 9, 1);
    lt_conv_task task = {
        .kind = LT_CONV_WEIGHTS, .conv = &v, .x = {NULL, LT_F32}, .w = w, .y = {NULL, LT_F32}};
    run_task(&lt__conv_thin, &task, 2, 0xff);
    for (int i = 0; i < 32 * 9; i++)
        CHECK(((float *)w.data)[i] == 0);
    free(w.data);
}

/* The bits of y do not depend on the number of threads: each pixel is summed separately. */
TEST(y_does_not_depend_on_the_number_of_threads)
{
    want_fast_products();
    lt_conv v = conv_of(3, 21, 2, 32, 3, 1);
    int64_t count = 3 * 21 * 21 * 32;
    lt_operand x = random_operand(LT_F32, 3 * 21 * 21 * 2, 1);
    lt_operand w = random_operand(LT_F32, 32 * 9 * 2, 2);
    lt_operand y[2] = {random_operand(LT_F32, count, 3), random_operand(LT_F32, count, 4)};
    for (int i = 0; i < 2; i++) {
        lt_conv_task task = {.kind = LT_CONV, .conv = &v, .x = x, .w = w, .y = y[i]};
        run_task(&lt__conv_thin, &task, 1 + 3 * i, 0xff);
    }
    CHECK(memcmp(y[0].data, y[1].data, (size_t)count * sizeof(float)) == 0);
    void *all[] = {x.data, w.data, y[0].data, y[1].data};
    for (int k = 0; k < 4; k++)
        free(all[k]);
}
