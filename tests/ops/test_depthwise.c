/* test_depthwise.c - which convolutions depthwise.c accepts, that its results have the same bits on
 * one thread and on two, and that it writes nothing behind them. test_conv2d.c compares their
 * values with the reference. */
#include "tests/ops/conv.h"

enum { SHAPES = 400, GUARD = 64 }; /* bytes */

static int64_t roll(uint64_t seed, uint64_t i, int64_t low, int64_t high)
{
    return low + (int64_t)(uniform(seed, i) * (double)(high - low + 1));
}

static lt_conv depthwise_of(int64_t n, int64_t h, int64_t w, int64_t c, int64_t stride, int64_t pad)
{
    return conv_with(n, (int64_t[]){h, w}, c, c, c, 3, stride, (int64_t[]){pad, pad});
}

/* Few channels, whole vectors, tails, and sometimes enough channels for wide tiles. */
static lt_conv any_shape(uint64_t seed)
{
    int64_t stride = roll(seed, 0, 1, 2), pad = roll(seed, 1, 0, 1), least = 3 - 2 * pad;
    int64_t c = roll(seed, 2, 0, 9) == 0 ? roll(seed, 3, 500, 530) : roll(seed, 3, 1, 50);
    int64_t most = c > 100 ? 7 : 20;
    return depthwise_of(roll(seed, 4, 0, 3), roll(seed, 5, least, most), roll(seed, 6, least, most),
                        roll(seed, 7, 0, 2) == 0 ? (c + 15) / 16 * 16 : c, stride, pad);
}

/* Runs a task whose result is `before`, which it adds to or overwrites. Returns the result and
 * GUARD bytes behind it. New. */
static char *run(lt_conv_task task, const void *before, size_t bytes, int threads)
{
    lt_operand *result = task.kind == LT_CONV        ? &task.y
                         : task.kind == LT_CONV_DATA ? &task.x
                                                     : &task.w;
    char *at = result->data = malloc(bytes + GUARD);
    if (!at)
        FAIL("out of memory");
    memset(at, 0xff, bytes + GUARD);
    if (task.add)
        memcpy(at, before, bytes);
    run_task(&lt__depthwise, &task, threads, 0xff);
    return at;
}

static void check_task(const lt_conv *v, lt_conv_task_kind kind, lt_dtype dtype, lt_dtype of_w,
                       uint64_t seed)
{
    const lt_window *k = &v->window;
    bool weights = kind == LT_CONV_WEIGHTS;
    int64_t of_x = v->n * k->in[0] * k->in[1] * v->in, of_y = v->n * k->out[0] * k->out[1] * v->in;
    lt_conv_task task = {.kind = kind,
                         .conv = v,
                         .x = random_operand(dtype, of_x, seed),
                         .w = random_operand(of_w, v->in * 9, seed + 1),
                         .y = random_operand(dtype, of_y, seed + 2),
                         .add = kind != LT_CONV && roll(seed, 11, 0, 1)};
    lt_operand bias = random_operand(dtype, v->in, seed + 3);
    if (kind == LT_CONV && roll(seed, 10, 0, 1))
        task.bias = bias;
    bool narrow = dtype == LT_BF16 && v->in < 32 && k->stride[0] == 1 && !weights;
    CHECK_EQ(lt__depthwise.accepts(NULL, &task), narrow ? LT_EUNSUPPORTED : LT_OK);

    lt_operand result = kind == LT_CONV ? task.y : kind == LT_CONV_DATA ? task.x : task.w;
    int64_t count = kind == LT_CONV ? of_y : kind == LT_CONV_DATA ? of_x : v->in * 9;
    size_t bytes = (size_t)count * lt_dtype_bytes(result.dtype);
    char *one = run(task, result.data, bytes, 1), *two = run(task, result.data, bytes, 2);
    CHECK(memcmp(one, two, bytes + GUARD) == 0);
    for (size_t i = bytes; i < bytes + GUARD; i++)
        CHECK((unsigned char)one[i] == 0xff);
    void *all[] = {task.x.data, task.w.data, task.y.data, bias.data, one, two};
    for (int i = 0; i < 6; i++)
        free(all[i]);
}

static void check_shapes(lt_conv_task_kind kind)
{
    for (uint64_t i = 0; i < SHAPES; i++) {
        uint64_t seed = hash_text(HASH_START, "depthwise") + 1000 * i + (uint64_t)kind;
        lt_conv v = any_shape(seed);
        lt_dtype dtype = roll(seed, 8, 0, 1) ? LT_BF16 : LT_F32;
        bool mixed = kind == LT_CONV_WEIGHTS && roll(seed, 9, 0, 1);
        check_task(&v, kind, dtype, mixed ? LT_F32 : dtype, seed);
    }
}

TEST(bits_of_y) { check_shapes(LT_CONV); }
TEST(bits_of_gradients_of_x) { check_shapes(LT_CONV_DATA); }
TEST(bits_of_gradients_of_w) { check_shapes(LT_CONV_WEIGHTS); }

/* The critical bf16 NaNs are those that rounding could carry into the sign bit. */
TEST(a_bf16_NaN_stays_NaN)
{
    static const uint16_t kinds[] = {0x7fff, 0xffff, 0x7f81, 0xff81};
    enum { COUNT = 5 * 6 * 40 };
    lt_conv v = depthwise_of(1, 5, 6, 40, 1, 1);
    lt_conv_task task = {.kind = LT_CONV,
                         .conv = &v,
                         .x = random_operand(LT_BF16, COUNT, 1),
                         .w = random_operand(LT_BF16, 40 * 9, 2),
                         .y = {NULL, LT_BF16}};
    for (int i = 0; i < 4; i++) {
        for (int64_t k = 0; k < COUNT; k++)
            ((uint16_t *)task.x.data)[k] = kinds[i];
        char *y = run(task, NULL, COUNT * sizeof(uint16_t), 1);
        for (int64_t k = 0; k < COUNT; k++)
            CHECK(isnan(lt__bf16_to_f32(((uint16_t *)y)[k])));
        free(y);
    }
    free(task.x.data);
    free(task.w.data);
}

TEST(other_tasks_are_not_accepted)
{
    lt_conv v = depthwise_of(1, 8, 8, 4, 1, 1);
    lt_window *w = &v.window;
    lt_operand f32 = {NULL, LT_F32}, bf16 = {NULL, LT_BF16};
    CHECK(takes(&lt__depthwise, LT_CONV, &v, LT_F32, LT_F32, 1));
    CHECK(lt__depthwise.scratch(NULL, &v, LT_F32, false) > 0);
    CHECK(!takes(&lt__depthwise, LT_CONV, &v, LT_F32, LT_BF16, 1));
    CHECK(!takes(&lt__depthwise, LT_CONV, &v, LT_F16, LT_F16, 1));
    lt_conv_task other = {.kind = LT_CONV_DATA, .conv = &v, .x = f32, .w = bf16, .y = bf16};
    CHECK_EQ(lt__depthwise.accepts(NULL, &other), LT_EUNSUPPORTED);
    other = (lt_conv_task){.kind = LT_CONV_WEIGHTS, .conv = &v, .x = bf16, .w = f32, .y = bf16};
    CHECK_OK(lt__depthwise.accepts(NULL, &other));
    other.bias = (lt_operand){&v, LT_F32};
    CHECK_EQ(lt__depthwise.accepts(NULL, &other), LT_EUNSUPPORTED);
    int64_t *sizes[] = {&w->kernel[1], &w->dilation[0], &w->stride[1],
                        &w->pad[0],    &v.out,          &v.groups};
    check_declined(&lt__depthwise, &v, sizes, 6, 1);
}
