/* test_rescale.c - lt_rescale(), which removes the loss scale from gradients: values and
 * statistics. */
#include "core/tensor.h"
#include "ops/ops.h"
#include "tests/lt_test.h"

static void set(lt_tensor *x, int64_t i, double value)
{
    lt_tensor *one = lt__tensor_view(x, 0, NULL, i, true);
    CHECK(one != NULL);
    CHECK_OK(lt_fill(one, value));
    lt_release(one);
}

/* n elements of dtype: 1, -2, 3, -4... times `unit`. */
static lt_tensor *make(lt_ctx *ctx, lt_dtype dtype, int64_t n, double unit)
{
    lt_tensor *x = lt_tensor_full(ctx, dtype, 1, &n, 0);
    CHECK(x != NULL);
    for (int64_t i = 0; i < n; i++)
        set(x, i, (i % 2 ? -1 : 1) * (double)(i % 50 + 1) * unit);
    return x;
}

static double at(lt_tensor *x, int64_t i)
{
    double value;
    CHECK_OK(lt_item(x, i, &value));
    return value;
}

static void check_one(lt_ctx *ctx, lt_dtype dtype, int64_t n)
{
    lt_grad_stats stats = {0};
    lt_tensor *x = make(ctx, dtype, n, 0.25);
    CHECK_OK(lt_rescale(x, 0x1p-5, &stats));
    for (int64_t i = 0; i < n; i++)
        CHECK_NEAR(at(x, i), (i % 2 ? -1 : 1) * (double)(i % 50 + 1) * 0.25 / 32, 0);
    CHECK_NEAR(stats.largest, n == 0 ? 0 : (n < 50 ? (double)n : 50) * 0.25, 0);
    CHECK_EQ(stats.not_finite, 0);
    CHECK_NEAR(lt_grad_stats_of(x).largest, stats.largest / 32, 0);
    CHECK_OK(lt_rescale(x, 0x1p5, &stats));
    for (int64_t i = 0; i < n; i++)
        CHECK_NEAR(at(x, i), (i % 2 ? -1 : 1) * (double)(i % 50 + 1) * 0.25, 0);
    if (n > 17) { /* every position, wherever a vector or a block begins */
        for (int64_t i = 0; i<n; i += n> 1000 ? 997 : 1) {
            double was = at(x, i);
            double wrong[] = {INFINITY, -INFINITY, NAN};
            set(x, i, wrong[i % 3]);
            stats = (lt_grad_stats){0};
            CHECK_OK(lt_rescale(x, 1, &stats));
            CHECK_EQ(stats.not_finite, 1);
            CHECK(i % 3 == 2 ? isnan(at(x, i)) : at(x, i) == wrong[i % 3]);
            CHECK(lt_grad_stats_of(x).not_finite == 1 &&
                  lt_grad_stats_of(x).largest == stats.largest);
            set(x, i, -500);
            CHECK_OK(lt_rescale(x, 1, &stats));
            CHECK_NEAR(stats.largest, 500, 0);
            CHECK(lt_grad_stats_of(x).not_finite == 0 && lt_grad_stats_of(x).largest == 500);
            CHECK_EQ(stats.not_finite, 1);
            set(x, i, was);
        }
    }
    lt_release(x);
}

static void check_all(const lt_config *config)
{
    static const int64_t counts[] = {0, 1, 15, 16, 17, 100, 16384, 16385, 70001};
    for (lt_dtype dtype = LT_F32; dtype <= LT_BF16; dtype++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            lt_ctx *ctx = lt_open(config);
            check_one(ctx, dtype, counts[i]);
            lt_ctx_free(ctx);
        }
}

TEST(values_and_statistics_on_one_thread) { check_all(&(lt_config){.threads = 1}); }
TEST(values_and_statistics_on_two_threads) { check_all(&(lt_config){.threads = 2}); }
TEST(values_and_statistics_of_the_reference) { check_all(&(lt_config){.reference = true}); }

/* Statistics are those of the values before rescaling, even if these become 0 or overflow. */
TEST(statistics_are_of_the_values_before)
{
    static const struct {
        lt_dtype dtype;
        double smallest, largest;
    } ends[] = {{LT_F16, 0x1p-24, 65504},
                {LT_BF16, 0x1p-133, 0x1.fep127},
                {LT_F32, 0x1p-149, 0x1.fffffep127}};
    for (int plain = 0; plain < 2; plain++)
        for (int k = 0; k < 3; k++) {
            lt_ctx *ctx = lt_open(&(lt_config){.reference = plain});
            lt_grad_stats stats = {0};
            lt_tensor *x = make(ctx, ends[k].dtype, 40, ends[k].smallest);
            set(x, 7, 0);
            set(x, 8, -0.0);
            CHECK_OK(lt_rescale(x, 0x1p-3, &stats)); /* 1 to 4 of 8 become 0: half to even */
            CHECK_NEAR(at(x, 3), 0, 0);
            CHECK_NEAR(stats.largest, 40 * ends[k].smallest, 0);
            set(x, 0, -ends[k].largest);
            stats = (lt_grad_stats){0};
            CHECK_OK(lt_rescale(x, 2, &stats));
            CHECK(at(x, 0) == -INFINITY);
            CHECK_EQ(stats.not_finite, 0);
            CHECK_NEAR(stats.largest, ends[k].largest, 0);
            lt_release(x);
            lt_ctx_free(ctx);
        }
}

TEST(factors_that_would_round_are_errors)
{
    lt_ctx *ctx = lt_open(NULL);
    lt_grad_stats stats = {0};
    lt_tensor *x = make(ctx, LT_F32, 3, 1), *i = lt_tensor_full(ctx, LT_I64, 0, NULL, 1);
    static const double factors[] = {3, 0, -2, INFINITY, NAN};
    for (int k = 0; k < 5; k++)
        CHECK_FAILS(lt_rescale(x, factors[k], &stats), LT_EINVAL,
                    "rescale requires a power of two, but got");
    CHECK_FAILS(lt_rescale(i, 2, &stats), LT_EINVAL,
                "rescale requires a float tensor, but got scalar i64");
    CHECK_NEAR(at(x, 2), 3, 0);
    lt_release(x);
    lt_release(i);
    lt_ctx_free(ctx);
}
