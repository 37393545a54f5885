/* test_losses.c - compares softmax, losses, dropout and embedding on CUDA with the reference
 * kernels of the CPU. Exponentials are equal on both sides. Sums along a row are in double here, so
 * only their rounding differs. */
#include "tests/cuda/reference.h"
#include "tests/device/emu.h"

static const lt_dtype integers[] = {LT_I64, LT_I32, LT_U8};

/* Backward starts from the device's own results, which may differ by a spacing already. */
static void check_softmax(machine *m, sample *samples, int n, spec s)
{
    static const double slack_of[] = {4, 0x1p12, 0x1p15}; /* floats */
    s.spacings = 2;
    for (int d = 0; d < COUNT(floats); d++) {
        s.slack.spacings = slack_of[d];
        check_samples(m, &floats[d], 1, samples, n, s);
    }
}

TEST_CUDA(softmaxes)
{
    static sample samples[] = {{"", "3x5"},           {"axis=1", "2x3x4"},   {"axis=0", "1000x3"},
                               {"axis=0", "31x129"},  {"axis=-1", "31x2"},   {"axis=-1", "2x10"},
                               {"axis=-1", "7x1000"}, {"axis=-1", "1x2100"}, {"axis=0", "5"},
                               {"axis=1", "0x5"},     {"axis=0", "0x5"},     {"axis=1", "3x64x40"},
                               {"axis=1", "6x1"},     {"axis=0", "2x1000"},  {"axis=1", "40x7x2"}};
    check_softmax(m, samples, COUNT(samples), (spec){.op = "softmax"});
    check_softmax(m, samples, COUNT(samples), (spec){.op = "log_softmax", .offset = 100});
}

/* The maxima of the rows differ so much that the exponentials underflow if the maximum of the wrong
 * row is subtracted. */
TEST_CUDA(softmax_of_rows_far_apart)
{
    static const lt_dtype f32[] = {LT_F32};
    static sample samples[] = {{"axis=0", "31x129", "softmax"},
                               {"axis=0", "31x129", "log_softmax"}};
    CHECK_ALL(m, f32, samples, .spacings = 2, .slack = {64, 0}, .apart = 200);
}

TEST_CUDA(softmax_of_nonfinite_values)
{
    static sample samples[] = {{"", "50x9", "softmax"},
                               {"", "50x9", "log_softmax"},
                               {"axis=0", "9x50", "softmax"},
                               {"axis=0", "9x50", "log_softmax"}};
    check_softmax(m, samples, COUNT(samples), (spec){.special = true});
}

TEST_CUDA(cross_entropy)
{
    static const struct {
        const char *shapes, *labels;
        int classes;
    } cases[] = {{"1x2", "1", 2},         {"31x2", "31", 2},   {"1000x2", "1000", 2},
                 {"2x10", "2", 10},       {"31x10", "31", 10}, {"2x1000", "2", 1000},
                 {"31x1000", "31", 1000}, {"6x1", "6", 1},     {"2x3x5x7", "2x3x5", 7},
                 {"9", "-", 9},           {"0x5", "0", 5},     {"5001x3", "5001", 3}};
    static const char *const label_smoothing[] = {"", "label_smoothing=0.1", "label_smoothing=1.0"};
    for (int d = 0; d < COUNT(floats); d++)
        for (int i = 0; i < COUNT(cases); i++) {
            char shapes[64];
            int k = (i + d) % 3, classes = cases[i].classes;
            bool fits = integers[k] != LT_U8 || classes <= 256;
            snprintf(shapes, sizeof shapes, "%s, %s:%s", cases[i].shapes,
                     lt_dtype_name(integers[fits ? k : 0]), cases[i].labels);
            check(m, (spec){.op = "cross_entropy",
                            .options = label_smoothing[(i + i / 3) % 3],
                            .dtype = floats[d],
                            .shapes = shapes,
                            .ids = classes,
                            .spacings = 2,
                            .slack = {1, 0},
                            .offset = i % 2 ? 0 : 30});
        }
}

TEST_CUDA(mse_loss)
{
    static sample samples[] = {{"", "1, 1"}, {"", "1000x129, 1000x129"}, {"", "2x3x4, 2x3x4"}};
    static sample around_9[] = {{"", "-, -"}, {"", "31x7, 31x7"}, {"", "0x3, 0x3"}};
    CHECK_ALL(m, floats, samples, .op = "mse_loss", .spacings = 1);
    CHECK_ALL(m, floats, around_9, .op = "mse_loss", .spacings = 1, .offset = 9);
}

/* ==== dropout ================================================================================= */

/* The bits are those of the CPU, whatever the first row of the shard in the global batch. */
TEST_CUDA(dropout)
{
    static const char *const shapes[] = {"1", "31", "1000", "7x3", "3x7x5", "64x129", "-", "0x4"};
    static const char *const options[] = {"", "p=0.1", "p=1", "p=0.9999999999"};
    for (int d = 0; d < COUNT(floats); d++)
        for (int i = 0; i < COUNT(shapes); i++)
            for (int k = 0; k < COUNT(options); k++)
                check(m, (spec){.op = "dropout",
                                .options = options[k],
                                .dtype = floats[d],
                                .shapes = shapes[i],
                                .first_row = (i + k) % 5,
                                .stream = ((uint64_t)i << 32) + (unsigned)k});
    check(m, (spec){.op = "dropout",
                    .dtype = LT_F32,
                    .shapes = "10x1024",
                    .first_row = (int64_t)1 << 33,
                    .stream = 5});
}

/* ==== embedding =============================================================================== */

/* Both sides sum in the order of the ids, so the bits are equal. */
TEST_CUDA(embedding)
{
    static const struct {
        const char *w, *ids;
        int rows;
    } cases[] = {{"7x3", "4", 7},        {"2x3", "900", 2},       {"7x3", "2x3", 7},
                 {"7x3", "0", 7},        {"1x1", "1000", 1},      {"97x130", "391", 97},
                 {"3000x8", "31", 3000}, {"12x4x16", "40x2", 12}, {"9", "20", 9},
                 {"5x0", "3", 5},        {"40x300", "300", 40}};
    for (int d = 0; d < COUNT(floats); d++)
        for (int i = 0; i < COUNT(cases); i++) {
            char shapes[64];
            int k = cases[i].rows > 256 ? 0 : (i + d) % 3;
            snprintf(shapes, sizeof shapes, "%s, %s:%s", cases[i].w, lt_dtype_name(integers[k]),
                     cases[i].ids);
            check(m, (spec){.op = "embedding",
                            .dtype = floats[d],
                            .shapes = shapes,
                            .ids = cases[i].rows});
        }
}

/* ==== Labels and ids out of range ============================================================= */

/* A tensor of n ids on the device. New. */
static lt_tensor *ids_of(lt_ctx *ctx, int64_t n, const int64_t *values)
{
    lt_tensor *x = lt_tensor_new(ctx, LT_I64, 1, &n);
    CHECK_OK(lt_write(x, values));
    return x;
}

/* Checks that the first read of y fails with this message, and later ones return NaN. */
static void check_deferred_error(lt_tensor *y, const char *message)
{
    double value;
    CHECK(y != NULL);
    CHECK_EQ(lt_item(y, 0, &value), LT_EDATA);
    CHECK_STR(lt_errmsg(), message);
    CHECK_OK(lt_item(y, 0, &value)); /* the error is reported once */
    CHECK(isnan(value));
}

TEST(the_next_wait_reports_a_bad_label)
{
    use_shim();
    lt_ctx *ctx = open_device();
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 2, (int64_t[]){4, 3}, 1);
    lt_tensor *pair = lt_tensor_full(ctx, LT_F32, 1, (int64_t[]){2}, 1);
    CHECK_OK(lt_set_requires_grad(x, true));
    static const int64_t wrong[][4] = {{0, 2, 3, 3}, {0, -1, 9, 1}, {2, 1, 0, 1}};
    static const char *const messages[] = {
        "cross_entropy: label number 3 is 3, but x has 3 classes (labels start at 0)",
        "cross_entropy: label number 2 is -1, but x has 3 classes (labels start at 0)"};
    for (int i = 0; i < 3; i++) {
        lt_tensor *labels = ids_of(ctx, 4, wrong[i]), *later = ids_of(ctx, 4, wrong[0]);
        lt_tensor *loss = lt_run(ctx, "cross_entropy", "label_smoothing=1.0", x, labels, NULL);
        CHECK(loss != NULL);
        if (i == 1) /* a second bad label is not reported */
            lt_release(lt_run(ctx, "cross_entropy", NULL, x, later, NULL));
        lt_release(later);
        double value;
        if (i < 2)
            check_deferred_error(loss, messages[i]);
        CHECK_OK(lt_item(loss, 0, &value));
        CHECK(isnan(value) == (i < 2));
        lt_tensor *two =
            lt_run(ctx, "mul", NULL, loss, pair, NULL); /* backward accepts these NaNs */
        CHECK_OK(lt_backward(two, pair));
        lt_release(two);
        for (int64_t k = 0; k < 12; k++) { /* NaN in rows 2 and 3, then 1 and 2, then none */
            CHECK_OK(lt_item(lt_grad(x), k, &value));
            bool bad = i == 0 ? k / 3 >= 2 : i == 1 && (k / 3 == 1 || k / 3 == 2);
            CHECK(isnan(value) == bad);
        }
        lt_zero_grad(x);
        RELEASE(loss, labels);
    }
    RELEASE(pair, x);
    lt_ctx_free(ctx);
}

/* A backward waits for the deferred results of the one before. It reports the bad label rather than
 * a NaN loss. */
TEST(the_next_backward_reports_a_bad_label)
{
    use_shim();
    lt_ctx *ctx = open_device();
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 2, (int64_t[]){2, 3}, 1);
    lt_tensor *bad = ids_of(ctx, 2, (int64_t[]){0, 3}), *good = ids_of(ctx, 2, (int64_t[]){0, 2});
    CHECK_OK(lt_set_requires_grad(x, true));
    lt_tensor *loss = lt_run(ctx, "cross_entropy", NULL, x, bad, NULL);
    lt_tensor *next = lt_run(ctx, "cross_entropy", NULL, x, good, NULL);
    CHECK_OK(lt_backward(loss, NULL));
    CHECK_EQ(lt_backward(next, NULL), LT_EDATA);
    CHECK_STR(lt_errmsg(),
              "cross_entropy: label number 2 is 3, but x has 3 classes (labels start at "
              "0)");
    RELEASE(next, loss, good, bad, x);
    lt_ctx_free(ctx);
}

TEST(the_next_wait_reports_a_bad_id)
{
    use_shim();
    lt_ctx *ctx = open_device();
    lt_tensor *w = lt_tensor_full(ctx, LT_F32, 2, (int64_t[]){5, 3}, 1);
    CHECK_OK(lt_set_requires_grad(w, true));
    lt_tensor *ids = ids_of(ctx, 3, (int64_t[]){5, 0, 4});
    lt_tensor *y = lt_run(ctx, "embedding", NULL, w, ids, NULL), *ones;
    check_deferred_error(y, "embedding: id number 1 is 5, but w has 5 rows (ids start at 0)");
    ones = lt_tensor_full(ctx, LT_F32, 2, (int64_t[]){3, 3}, 1);
    CHECK_OK(lt_backward(y, ones));
    for (int64_t k = 0; k < 15; k++) {
        double value;
        CHECK_OK(lt_item(lt_grad(w), k, &value));
        CHECK_EQ((int)value, k / 3 == 0 || k / 3 == 4);
    }
    RELEASE(ones, y, ids, w);
    lt_ctx_free(ctx);
}
