/* test_depthwise.c - compares the depthwise kernels with double sums of the definition on random
 * shapes: in f32 and bf16, written and added, on one thread and on two, with scratch and results
 * full of NaNs and guard bytes after every result. */
#include <stdlib.h>

#include "ops/cpu/conv.h"
#include "tests/ops/cases.h"

enum { SHAPES = 400, GUARD = 64 }; /* bytes */

typedef struct array {
    double *at;   /* values; of a result, the expected ones */
    double *size; /* of a result: the sums of the absolute values of the terms */
    int64_t count;
    lt_operand operand;
} array;

static size_t bytes_of(const array *a)
{
    return (size_t)a->count * lt_dtype_bytes(a->operand.dtype);
}

/* Random numbers, rounded to dtype. New. */
static array array_new(lt_dtype dtype, int64_t count, uint64_t seed)
{
    array a = {.count = count, .operand = {.dtype = dtype}};
    a.at = calloc((size_t)count + 1, sizeof *a.at);
    a.size = calloc((size_t)count + 1, sizeof *a.size);
    a.operand.data = malloc(bytes_of(&a) + GUARD);
    if (!a.at || !a.size || !a.operand.data)
        FAIL("out of memory");
    for (int64_t i = 0; i < count; i++)
        a.at[i] = normal(seed, (uint64_t)i);
    lt_convert(a.operand.data, dtype, a.at, LT_F64, (size_t)count);
    lt_convert(a.at, LT_F64, a.operand.data, dtype, (size_t)count);
    return a;
}

static void array_free(array *a)
{
    free(a->at);
    free(a->size);
    free(a->operand.data);
}

/* ==== The definition ========================================================================== */

static void add_term(array *to, int64_t at, double term)
{
    to->at[at] += term;
    to->size[at] += fabs(term);
}

/* Computes the expected result: adds each product of the definition. */
static void define(const lt_conv_task *task, array *x, array *w, array *y)
{
    const lt_conv *v = task->conv;
    const lt_window *k = &v->window;
    array *result = task->kind == LT_CONV ? y : task->kind == LT_CONV_DATA ? x : w;
    for (int64_t i = 0; i < result->count; i++) {
        result->at[i] *= task->add;
        result->size[i] = fabs(result->at[i]);
    }
    for (int64_t at = 0; at < y->count * 9; at++) {
        int64_t tap = at % 9, c = at / 9 % v->in, pixel = at / 9 / v->in;
        int64_t ow = pixel % k->out[1], oh = pixel / k->out[1] % k->out[0];
        int64_t n = pixel / k->out[1] / k->out[0];
        int64_t ih = oh * k->stride[0] - k->pad[0] + tap / 3;
        int64_t iw = ow * k->stride[1] - k->pad[1] + tap % 3;
        if (ih < 0 || ih >= k->in[0] || iw < 0 || iw >= k->in[1])
            continue;
        int64_t of_x = ((n * k->in[0] + ih) * k->in[1] + iw) * v->in + c, of_w = c * 9 + tap;
        int64_t of_y = pixel * v->in + c;
        if (task->kind == LT_CONV)
            add_term(y, of_y, x->at[of_x] * w->at[of_w]);
        else if (task->kind == LT_CONV_DATA)
            add_term(x, of_x, y->at[of_y] * w->at[of_w]);
        else
            add_term(w, of_w, x->at[of_x] * y->at[of_y]);
    }
}

/* ==== One task ================================================================================ */

/* Runs the task; result is poisoned first, or holds `before` if the task adds. */
static void run(lt_conv_task *task, lt_operand *result, const array *truth, const void *before,
                int threads)
{
    lt_call call = {.threads = threads};
    size_t bytes = bytes_of(truth);
    size_t scratch = lt__depthwise.scratch(&call, task->conv, task->y.dtype, true);
    call.scratch = aligned_alloc(64, (scratch + 127) / 64 * 64);
    if (!call.scratch)
        FAIL("out of memory");
    memset(call.scratch, 0xff, scratch);
    memset(result->data, 0xff, bytes + GUARD);
    if (task->add)
        memcpy(result->data, before, bytes);
    CHECK_OK(lt__depthwise.run(&call, task));
    free(call.scratch);
    for (int i = 0; i < GUARD; i++)
        CHECK(((unsigned char *)result->data)[bytes + (size_t)i] == 0xff);
}

/* Allows for the errors of f32 sums, and in bf16 for one rounding. */
static void check_result(const array *truth, const char *name)
{
    double *got = calloc((size_t)truth->count + 1, sizeof *got);
    double half = truth->operand.dtype == LT_BF16 ? 0x1p-8 : 0;
    if (!got)
        FAIL("out of memory");
    lt_convert(got, LT_F64, truth->operand.data, truth->operand.dtype, (size_t)truth->count);
    for (int64_t i = 0; i < truth->count; i++)
        if (!(fabs(got[i] - truth->at[i]) <= half * fabs(truth->at[i]) + 0x1p-19 * truth->size[i]))
            FAIL("%s: element %lld is %.9g, not %.9g", name, (long long)i, got[i], truth->at[i]);
    free(got);
}

static bool takes(const lt_conv_task *task) { return lt__depthwise.accepts(NULL, task) == LT_OK; }

static void check_task(const lt_conv *v, lt_conv_task_kind kind, lt_dtype dtype, lt_dtype of_w,
                       bool add, bool biased, uint64_t seed)
{
    const lt_window *k = &v->window;
    array x = array_new(dtype, v->n * k->in[0] * k->in[1] * v->in, seed);
    array w = array_new(of_w, v->in * 9, seed + 1), bias = array_new(dtype, v->in, seed + 3);
    array y = array_new(dtype, v->n * k->out[0] * k->out[1] * v->in, seed + 2);
    array *result = kind == LT_CONV ? &y : kind == LT_CONV_DATA ? &x : &w;
    lt_conv_task task = {
        .kind = kind, .conv = v, .x = x.operand, .w = w.operand, .y = y.operand, .add = add};
    char name[160];
    snprintf(name, sizeof name, "task %d, %s, w %s, %lldx%lldx%lldx%lld stride %lld pad %lld%s%s",
             (int)kind, lt_dtype_name(dtype), lt_dtype_name(of_w), (long long)v->n,
             (long long)k->in[0], (long long)k->in[1], (long long)v->in, (long long)k->stride[0],
             (long long)k->pad[0], add ? ", added" : "", biased ? ", bias" : "");
    if (biased)
        task.bias = bias.operand;
    bool narrow = dtype == LT_BF16 && v->in < 32 && k->stride[0] == 1 && kind != LT_CONV_WEIGHTS;
    if (takes(&task) == narrow)
        FAIL("%s: was %saccepted", name, narrow ? "" : "not ");

    void *before = malloc(bytes_of(result) + 1), *first = malloc(bytes_of(result) + 1);
    if (!before || !first)
        FAIL("out of memory");
    memcpy(before, result->operand.data, bytes_of(result));
    define(&task, &x, &w, &y);
    for (int64_t i = 0; i < y.count && biased; i++)
        add_term(&y, i, bias.at[i % v->in]);
    run(&task, &result->operand, result, before, 1);
    check_result(result, name);
    memcpy(first, result->operand.data, bytes_of(result));
    run(&task, &result->operand, result, before, 2);
    if (memcmp(first, result->operand.data, bytes_of(result)) != 0)
        FAIL("%s: one and two threads give different bits", name);
    free(before);
    free(first);
    array_free(&x);
    array_free(&w);
    array_free(&y);
    array_free(&bias);
}

/* ==== Shapes ================================================================================== */

static int64_t roll(uint64_t seed, uint64_t i, int64_t low, int64_t high)
{
    return low + (int64_t)(uniform(seed, i) * (double)(high - low + 1));
}

static lt_conv conv_of(int64_t n, int64_t h, int64_t w, int64_t c, int64_t stride, int64_t pad)
{
    lt_conv v = {.n = n,
                 .in = c,
                 .out = c,
                 .groups = c,
                 .window = {.in = {h, w},
                            .kernel = {3, 3},
                            .stride = {stride, stride},
                            .pad = {pad, pad},
                            .dilation = {1, 1}}};
    for (int i = 0; i < 2; i++)
        v.window.out[i] = (v.window.in[i] + 2 * pad - 3) / stride + 1;
    return v;
}

/* Few channels, whole vectors, tails, and sometimes enough channels for wide tiles. */
static lt_conv any_shape(uint64_t seed)
{
    int64_t stride = roll(seed, 0, 1, 2), pad = roll(seed, 1, 0, 1), least = 3 - 2 * pad;
    int64_t c = roll(seed, 2, 0, 9) == 0 ? roll(seed, 3, 500, 530) : roll(seed, 3, 1, 50);
    int64_t most = c > 100 ? 7 : 20;
    return conv_of(roll(seed, 4, 0, 3), roll(seed, 5, least, most), roll(seed, 6, least, most),
                   roll(seed, 7, 0, 2) == 0 ? (c + 15) / 16 * 16 : c, stride, pad);
}

static void check_shapes(lt_conv_task_kind kind)
{
    for (uint64_t i = 0; i < SHAPES; i++) {
        uint64_t seed = hash_text(HASH_START, "depthwise") + 1000 * i + (uint64_t)kind;
        lt_conv v = any_shape(seed);
        lt_dtype dtype = roll(seed, 8, 0, 1) ? LT_BF16 : LT_F32;
        bool mixed = kind == LT_CONV_WEIGHTS && roll(seed, 9, 0, 1);
        bool biased = kind == LT_CONV && roll(seed, 10, 0, 1);
        check_task(&v, kind, dtype, mixed ? LT_F32 : dtype, kind != LT_CONV && roll(seed, 11, 0, 1),
                   biased, seed);
    }
}

TEST(forward_matches_the_definition) { check_shapes(LT_CONV); }
TEST(gradients_of_x_match_the_definition) { check_shapes(LT_CONV_DATA); }
TEST(gradients_of_w_match_the_definition) { check_shapes(LT_CONV_WEIGHTS); }

/* The critical bf16 NaNs are those that rounding could carry into the sign bit. */
TEST(a_bf16_NaN_stays_NaN)
{
    static const uint16_t kinds[] = {0x7fff, 0xffff, 0x7f81, 0xff81};
    lt_conv v = conv_of(1, 5, 6, 40, 1, 1);
    for (int i = 0; i < 4; i++) {
        array x = array_new(LT_BF16, 5 * 6 * 40, 1), w = array_new(LT_BF16, 40 * 9, 2);
        array y = array_new(LT_BF16, x.count, 3);
        lt_conv_task task = {
            .kind = LT_CONV, .conv = &v, .x = x.operand, .w = w.operand, .y = y.operand};
        for (int64_t k = 0; k < x.count; k++)
            ((uint16_t *)x.operand.data)[k] = kinds[i];
        run(&task, &y.operand, &y, NULL, 1);
        for (int64_t k = 0; k < y.count; k++)
            CHECK(isnan(lt__bf16_to_f32(((uint16_t *)y.operand.data)[k])));
        array_free(&x);
        array_free(&w);
        array_free(&y);
    }
}

TEST(other_tasks_are_not_accepted)
{
    lt_conv v = conv_of(1, 8, 8, 4, 1, 1);
    lt_operand f32 = {NULL, LT_F32}, bf16 = {NULL, LT_BF16}, f16 = {NULL, LT_F16};
    lt_conv_task task = {.kind = LT_CONV, .conv = &v, .x = f32, .w = f32, .y = f32}, other = task;
    CHECK(takes(&task));
    CHECK(lt__depthwise.scratch(NULL, &v, LT_F32, false) > 0);
    other.w = bf16;
    CHECK(!takes(&other));
    other = task;
    other.x = other.w = other.y = f16;
    CHECK(!takes(&other));
    other = (lt_conv_task){.kind = LT_CONV_DATA, .conv = &v, .x = f32, .w = bf16, .y = bf16};
    CHECK(!takes(&other));
    other = (lt_conv_task){.kind = LT_CONV_WEIGHTS, .conv = &v, .x = bf16, .w = f32, .y = bf16};
    CHECK(takes(&other));
    other.bias = (lt_operand){&v, LT_F32};
    CHECK(!takes(&other));
    for (int i = 0; i < 6; i++) {
        lt_conv odd = v;
        int64_t *changed[] = {&odd.window.kernel[1],
                              &odd.window.dilation[0],
                              &odd.window.stride[1],
                              &odd.window.pad[0],
                              &odd.out,
                              &odd.groups};
        *changed[i] *= 2;
        other = task;
        other.conv = &odd;
        CHECK(!takes(&other));
        CHECK_EQ(lt__depthwise.scratch(NULL, &odd, LT_F32, true), 0);
    }
}
