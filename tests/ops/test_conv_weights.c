/* test_conv_weights.c - which gradients of weights conv_weights.c accepts, and that its results
 * have the same bits in every run. test_conv2d.c compares their values with the reference. */
#include <stdlib.h>
#include <sys/mman.h>

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

static lt_conv_task task_of(const lt_conv *v, lt_dtype dtype)
{
    lt_operand of = {NULL, dtype};
    return (lt_conv_task){
        .kind = LT_CONV_WEIGHTS, .conv = v, .x = of, .w = {NULL, LT_F32}, .y = of};
}

static bool takes(const lt_conv *v, lt_dtype dtype, int threads)
{
    lt_conv_task task = task_of(v, dtype);
    return lt__conv_weights.accepts(&(lt_call){.threads = threads}, &task) == LT_OK;
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
        CHECK(takes(&first, dtype, 2) && takes(&second, dtype, 2) && takes(&wide, dtype, 2));
        CHECK(!takes(&plain, dtype, 2));
    }
    CHECK(!takes(&first, LT_F64, 2));
}

TEST(each_thread_needs_many_pixels)
{
    want_fast_products();
    lt_conv v = conv_of(16, 14, 1024, 256, 1, 1), large = conv_of(16, 14, 1024, 2048, 1, 1);
    lt_call call = {.threads = 3};
    CHECK(takes(&v, LT_BF16, 3));
    CHECK(lt__conv_weights.scratch(&call, &v, LT_BF16, true) > 3 * 1024 * 256 * sizeof(float));
    CHECK(!takes(&v, LT_BF16, 4));
    CHECK(!takes(&large, LT_BF16, 1));
    CHECK_EQ(lt__conv_weights.scratch(&call, &large, LT_BF16, true), 0);
}

/* Overlapping windows: only in bf16 and with few channels. */
TEST(stride_1_is_accepted_in_bf16)
{
    want_fast_products();
    lt_conv few = conv_of(16, 28, 64, 128, 3, 1), many = conv_of(16, 28, 128, 128, 3, 1);
    CHECK(takes(&few, LT_BF16, 2) && !takes(&few, LT_F32, 2));
    CHECK(!takes(&many, LT_BF16, 2));
}

TEST(other_tasks_are_not_accepted)
{
    want_fast_products();
    lt_conv v = conv_of(128, 28, 16, 32, 3, 2);
    lt_call call = {.threads = 1};
    lt_conv_task half = task_of(&v, LT_BF16), forward = task_of(&v, LT_F32);
    half.w.dtype = LT_BF16;
    forward.kind = LT_CONV;
    CHECK_EQ(lt__conv_weights.accepts(&call, &half), LT_EUNSUPPORTED);
    CHECK_EQ(lt__conv_weights.accepts(&call, &forward), LT_EUNSUPPORTED);
    for (int i = 0; i < 4; i++) {
        lt_conv odd = v;
        int64_t *changed[] = {&odd.window.dilation[0], &odd.window.dilation[1], &odd.groups,
                              &odd.in};
        *changed[i] += 1;
        CHECK(!takes(&odd, LT_F32, 1));
        CHECK_EQ(lt__conv_weights.scratch(&call, &odd, LT_BF16, true), 0);
    }
}

/* ==== Bits ==================================================================================== */

/* Random numbers. New. */
static lt_operand random_operand(lt_dtype dtype, int64_t count, uint64_t seed)
{
    size_t bytes = (size_t)count * lt_dtype_bytes(dtype);
    lt_operand x = {malloc(bytes), dtype};
    if (!x.data)
        FAIL("out of memory");
    for (int64_t i = 0; i < count; i++) {
        double value = normal(seed, (uint64_t)i);
        lt_convert((char *)x.data + i * (int64_t)lt_dtype_bytes(dtype), dtype, &value, LT_F64, 1);
    }
    return x;
}

/* Runs the task with scratch full of `poison`, which ends at an inaccessible page. */
static void run(const lt_conv_task *task, int threads, int poison)
{
    enum { PAGE = 4096 };
    lt_call call = {.threads = threads};
    size_t bytes = lt__conv_weights.scratch(&call, task->conv, task->x.dtype, true),
           capacity = (bytes + PAGE - 1) & -PAGE;
    char *all =
        mmap(NULL, capacity + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || mprotect(all + capacity, PAGE, PROT_NONE) != 0)
        FAIL("out of memory");
    call.scratch = memset(all + capacity - bytes, poison, bytes);
    CHECK_OK(lt__conv_weights.run(&call, task));
    munmap(all, capacity + PAGE);
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
        run(&task, 3, 0xff);
        run(&again, 3, 0);
        CHECK(memcmp(task.w.data, again.w.data, (size_t)of_w * sizeof(float)) == 0);
        void *all[] = {task.x.data, task.w.data, task.y.data, again.w.data};
        for (int k = 0; k < 4; k++)
            free(all[k]);
    }
}
