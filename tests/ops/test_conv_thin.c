/* test_conv_thin.c - which convolutions conv_thin.c accepts, and that its results have the same
 * bits in every run. test_conv2d.c compares their values with the reference. */
#include <stdlib.h>

#include "ops/cpu/conv.h"
#include "ops/cpu/panel.h"
#include "tests/ops/cases.h"

static lt_conv conv_of(int64_t n, int64_t side, int64_t in, int64_t out, int64_t kernel,
                       int64_t stride)
{
    lt_conv v = {.n = n,
                 .in = in,
                 .out = out,
                 .groups = 1,
                 .window = {.in = {side, side},
                            .kernel = {kernel, kernel},
                            .stride = {stride, stride},
                            .pad = {kernel / 2, kernel / 2},
                            .dilation = {1, 1}}};
    for (int i = 0; i < 2; i++)
        v.window.out[i] = (side + 2 * v.window.pad[i] - kernel) / stride + 1;
    return v;
}

static bool takes(const lt_conv *v, lt_conv_task_kind kind, lt_dtype dtype)
{
    lt_operand of = {NULL, dtype};
    lt_conv_task task = {.kind = kind, .conv = v, .x = of, .w = of, .y = of};
    return lt__conv_thin.accepts(NULL, &task) == LT_OK;
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
        CHECK(takes(&all[i], LT_CONV_WEIGHTS, LT_F32));
        CHECK(!takes(&all[i], LT_CONV_WEIGHTS, LT_BF16) && !takes(&all[i], LT_CONV_DATA, LT_F32));
    }
}

TEST(forward_is_accepted_for_up_to_two_channels)
{
    want_fast_products();
    lt_conv one = conv_of(64, 28, 1, 32, 3, 1), two = conv_of(64, 28, 2, 32, 5, 1);
    lt_conv three = conv_of(64, 28, 3, 32, 3, 1), strided = conv_of(64, 28, 1, 32, 3, 2);
    CHECK(takes(&one, LT_CONV, LT_F32) && takes(&two, LT_CONV, LT_F32));
    CHECK(!takes(&three, LT_CONV, LT_F32) && !takes(&strided, LT_CONV, LT_F32));
}

TEST(other_convolutions_are_not_accepted)
{
    want_fast_products();
    lt_conv v = conv_of(16, 28, 4, 32, 7, 7), odd;
    int64_t *changed[] = {&odd.in,
                          &odd.out,
                          &odd.groups,
                          &odd.window.kernel[0],
                          &odd.window.stride[1],
                          &odd.window.dilation[0]};
    CHECK(takes(&v, LT_CONV_WEIGHTS, LT_F32));
    for (int i = 0; i < 6; i++) {
        odd = v;
        *changed[i] += 1;
        CHECK(!takes(&odd, LT_CONV_WEIGHTS, LT_F32));
        CHECK_EQ(lt__conv_thin.scratch(&(lt_call){.threads = 1}, &odd, LT_F32, true), 0);
    }
    odd = v;
    odd.window.pad[0] = 7;
    CHECK(!takes(&odd, LT_CONV_WEIGHTS, LT_F32));
}

/* Random numbers. New. */
static lt_operand random_operand(int64_t count, uint64_t seed)
{
    lt_operand x = {malloc((size_t)count * sizeof(float)), LT_F32};
    if (!x.data)
        FAIL("out of memory");
    for (int64_t i = 0; i < count; i++)
        ((float *)x.data)[i] = (float)normal(seed, (uint64_t)i);
    return x;
}

/* Runs the task with scratch full of `poison`. */
static void run(const lt_conv_task *task, int threads, int poison)
{
    lt_call call = {.threads = threads};
    bool backward = task->kind == LT_CONV_WEIGHTS;
    size_t bytes = lt__conv_thin.scratch(&call, task->conv, LT_F32, backward);
    if (!(call.scratch = aligned_alloc(64, (bytes + 63) / 64 * 64)))
        FAIL("out of memory");
    memset(call.scratch, poison, bytes);
    CHECK_OK(lt__conv_thin.run(&call, task));
    free(call.scratch);
}

TEST(every_run_gives_the_same_bits)
{
    want_fast_products();
    lt_conv v = conv_of(5, 67, 3, 64, 5, 2);
    int64_t of_x = 5 * 67 * 67 * 3, of_w = 64 * 25 * 3, of_y = 5 * 34 * 34 * 64;
    for (int i = 0; i < 2; i++) {
        lt_conv_task task = {.kind = i == 0 ? LT_CONV : LT_CONV_WEIGHTS,
                             .conv = &v,
                             .x = random_operand(of_x, 4),
                             .w = random_operand(of_w, 5),
                             .y = random_operand(of_y, 3)};
        lt_conv_task again = task;
        lt_operand *twice = i == 0 ? &again.y : &again.w, *once = i == 0 ? &task.y : &task.w;
        int64_t count = i == 0 ? of_y : of_w;
        *twice = random_operand(count, 7);
        run(&task, 3, 0xff);
        run(&again, 3, 0);
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
    lt_operand w = random_operand(32 * 9, 1);
    run(&(lt_conv_task){.kind = LT_CONV_WEIGHTS, .conv = &v, .w = w}, 2, 0xff);
    for (int i = 0; i < 32 * 9; i++)
        CHECK(((float *)w.data)[i] == 0);
    free(w.data);
}

/* The bits of y do not depend on the number of threads: each pixel is summed separately. */
TEST(y_does_not_depend_on_the_number_of_threads)
{
    want_fast_products();
    lt_conv v = conv_of(3, 21, 2, 32, 3, 1);
    lt_operand x = random_operand(3 * 21 * 21 * 2, 1), w = random_operand(32 * 9 * 2, 2);
    int64_t count = 3 * 21 * 21 * 32;
    lt_operand y[2] = {random_operand(count, 3), random_operand(count, 4)};
    for (int i = 0; i < 2; i++) {
        lt_conv_task task = {.kind = LT_CONV, .conv = &v, .x = x, .w = w, .y = y[i]};
        run(&task, 1 + 3 * i, 0xff);
    }
    CHECK(memcmp(y[0].data, y[1].data, (size_t)count * sizeof(float)) == 0);
    void *all[] = {x.data, w.data, y[0].data, y[1].data};
    for (int k = 0; k < 4; k++)
        free(all[k]);
}
