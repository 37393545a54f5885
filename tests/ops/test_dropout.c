/* test_dropout.c - properties of dropout that an oracle cannot check: how much it keeps, that
 * backward drops the same elements as forward, and that the mask depends only on seed, step, call
 * and position in the global batch.
 */
#include "core/locale.h"
#include "ops/ops.h"
#include "tests/lt_test.h"

enum { ROWS = 64, COLS = 1500, COUNT = ROWS * COLS };

typedef struct setup {
    uint64_t seed;
    int64_t step;
    int threads;
    bool reference;
    lt_dtype dtype;
} setup;

static const setup plain = {.seed = 7, .step = 3, .threads = 1, .reference = true, .dtype = LT_F32};

static lt_ctx *open_ctx(setup s)
{
    lt_ctx *ctx = lt_open(&(lt_config){
        .seed = s.seed, .threads = s.threads, .reference = s.reference, .poison = true});
    if (!ctx)
        FAIL("%s", lt_errmsg());
    lt_set_step(ctx, s.step);
    return ctx;
}

static void read_all(lt_tensor *x, double *values)
{
    lt_convert(values, LT_F64, lt_data(x), lt_tensor_dtype(x), (size_t)lt_count(x));
}

/* A leaf of ones. New. */
static lt_tensor *ones(lt_ctx *ctx, lt_dtype dtype, int64_t rows)
{
    lt_tensor *x = lt_tensor_full(ctx, dtype, 2, (int64_t[]){rows, COLS}, 1);
    CHECK_OK(lt_set_requires_grad(x, true));
    return x;
}

/* Computes y = dropout(ones) in a new context, and dx for dy = 3 if dx is not NULL. */
static void drop(setup s, const char *options, double *y, double *dx)
{
    lt_ctx *ctx = open_ctx(s);
    lt_tensor *x = ones(ctx, s.dtype, ROWS);
    lt_tensor *out = lt_run(ctx, "dropout", options, x, NULL);
    CHECK(out != NULL);
    read_all(out, y);
    if (dx) {
        lt_tensor *dy = lt_tensor_full(ctx, s.dtype, 2, lt_dims(out), 3);
        CHECK_OK(lt_backward(out, dy));
        read_all(lt_grad(x), dx);
        lt_release(dy);
    }
    lt_release(out);
    lt_release(x);
    lt_ctx_free(ctx);
}

static double one[COUNT], two[COUNT]; /* values that a test compares */

static int differences(const double *a, const double *b)
{
    int n = 0;
    for (int i = 0; i < COUNT; i++)
        n += a[i] != b[i];
    return n;
}

TEST(it_keeps_the_right_fraction_and_scales_it)
{
    static const double p_of[] = {0.1, 0.5, 0.9};
    double *y = one;
    for (int k = 0; k < 3; k++) {
        char options[16];
        double p = p_of[k], kept = 0;
        lt__format(options, sizeof options, "p=%g", p);
        drop((setup){.seed = 7, .step = 3, .threads = 1, .dtype = LT_F64}, options, y, NULL);
        for (int i = 0; i < COUNT; i++) {
            if (y[i] != 0)
                CHECK_NEAR(y[i], 1 / (1 - p), 1e-12);
            kept += y[i] != 0;
        }
        CHECK_NEAR(kept / COUNT, 1 - p, 5 * sqrt(p * (1 - p) / COUNT)); /* five deviations */
    }
}

TEST(the_mask_does_not_repeat_along_rows_or_columns)
{
    double *y = one;
    drop(plain, "p=0.5", y, NULL);
    int same_below = 0, same_beside = 0;
    for (int i = 0; i < COUNT - COLS; i++) {
        same_below += (y[i] != 0) == (y[i + COLS] != 0);
        same_beside += (y[i] != 0) == (y[i + 1] != 0);
    }
    CHECK_NEAR(same_below / (double)(COUNT - COLS), 0.5, 5 * sqrt(0.25 / COUNT));
    CHECK_NEAR(same_beside / (double)(COUNT - COLS), 0.5, 5 * sqrt(0.25 / COUNT));
}

TEST(backward_uses_the_mask_of_forward)
{
    double *y = one, *dx = two;
    drop(plain, "p=0.3", y, dx);
    for (int i = 0; i < COUNT; i++)
        CHECK_NEAR(dx[i], 3 * y[i], 1e-6);
    drop(plain, "p=1.0", y, dx);
    for (int i = 0; i < COUNT; i++)
        CHECK(y[i] == 0 && dx[i] == 0);
}

TEST(the_mask_depends_on_seed_and_step_only)
{
    double *a = one, *b = two;
    setup other_seed = plain, other_step = plain, fast = plain, half = plain;
    other_seed.seed++;
    other_step.step++;
    fast.reference = false;
    fast.threads = 2;
    half.dtype = LT_F16;
    drop(plain, "p=0.5", a, NULL);
    drop(plain, "p=0.5", b, NULL);
    CHECK_EQ(differences(a, b), 0);
    drop(fast, "p=0.5", b, NULL);
    CHECK_EQ(differences(a, b), 0);
    drop(half, "p=0.5", b, NULL);
    CHECK_EQ(differences(a, b), 0);
    drop(other_seed, "p=0.5", b, NULL);
    CHECK(differences(a, b) > COUNT / 3);
    drop(other_step, "p=0.5", b, NULL);
    CHECK(differences(a, b) > COUNT / 3);
}

TEST(two_calls_in_a_step_have_different_masks)
{
    double *a = one, *b = two;
    lt_ctx *ctx = open_ctx(plain);
    lt_tensor *x = ones(ctx, LT_F32, ROWS);
    lt_tensor *first = lt_run(ctx, "dropout", "p=0.5", x, NULL);
    lt_tensor *second = lt_run(ctx, "dropout", "p=0.5", x, NULL);
    CHECK(first && second);
    read_all(first, a);
    read_all(second, b);
    CHECK(differences(a, b) > COUNT / 3);
    lt_release(first);
    lt_release(second);
    lt_release(x);
    lt_ctx_free(ctx);
}

TEST(shards_have_the_mask_of_the_whole_batch)
{
    static const int64_t rows_of[] = {1, 24, 0, 39};
    double *whole = one, *parts = two;
    int64_t first = 0;
    drop(plain, "p=0.4", whole, NULL);
    for (int k = 0; k < 4; k++) {
        lt_ctx *ctx = open_ctx(plain);
        lt_tape_set_first_row(lt_tape_current(ctx), first);
        lt_tensor *x = ones(ctx, LT_F32, rows_of[k]);
        lt_tensor *y = lt_run(ctx, "dropout", "p=0.4", x, NULL);
        CHECK(y != NULL);
        read_all(y, parts + first * COLS);
        first += rows_of[k];
        lt_release(y);
        lt_release(x);
        lt_ctx_free(ctx);
    }
    CHECK_EQ(first, ROWS);
    CHECK_EQ(differences(whole, parts), 0);
}
