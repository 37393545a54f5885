/* test_rng.c - compares Philox with its published vectors, and fills and shuffles with numbers
 * computed in another language. Each number must depend only on (seed, purpose, stream, index).
 */
#include <stdlib.h>

#include "core/core.h"
#include "tests/lt_test.h"

static lt_ctx *context(uint64_t seed, int threads)
{
    lt_ctx *ctx = lt_ctx_new(&(lt_config){.seed = seed, .threads = threads});
    CHECK(ctx != NULL);
    return ctx;
}

#define TEST_SEEDED(title) TEST_WITH(title, lt_ctx *ctx, context(3, 1), CLOSE_CTX)

static lt_tensor *line(lt_ctx *ctx, lt_dtype dtype, int64_t n)
{
    lt_tensor *x = lt_tensor_new(ctx, dtype, 1, &n);
    CHECK(x != NULL);
    return x;
}

/* From tests/kat_vectors of Random123: the lines of philox4x32 with 10 rounds. */
TEST(published_vectors)
{
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int k = 0; k < 3; k++) {
        uint32_t out[4];
        lt_philox(known[k].counter, known[k].key, out);
        CHECK_EQ(memcmp(out, known[k].out, sizeof out), 0);
    }
}

TEST(random_is_the_documented_function)
{
    static const uint32_t known[4] = {0x66e97bda, 0x5799982e, 0x863ec1a6, 0x0e117cea};
    uint32_t out[4], other[4];
    lt_random(42, LT_RNG_INIT, 7, ((uint64_t)1 << 33) + 5, out);
    CHECK_EQ(memcmp(out, known, sizeof out), 0);
    lt_random(43, LT_RNG_INIT, 7, ((uint64_t)1 << 33) + 5, other);
    CHECK(memcmp(out, other, sizeof out) != 0);
    lt_random(42, LT_RNG_USER, 7, ((uint64_t)1 << 33) + 5, other);
    CHECK(memcmp(out, other, sizeof out) != 0);
    lt_random(42, LT_RNG_INIT, 8, ((uint64_t)1 << 33) + 5, other);
    CHECK(memcmp(out, other, sizeof out) != 0);
    lt_random(42, LT_RNG_INIT, 7, 5, other);
    CHECK(memcmp(out, other, sizeof out) != 0);
}

TEST(fills_give_the_documented_numbers)
{
    static const uint64_t index[] = {0, 1, 2, 1000001};
    static const double uniform[] = {0x1.bef5033b7e00cp-1, 0x1.2a7b775d83babp-1,
                                     0x1.3899c3b71d5e6p-1, 0x1.ea7f03dc4eef0p-4};
    static const double normal[] = {-1.7615309596808602, -1.0117130158317589, 0.76443069142520337,
                                    0.58841354461295214};
    lt_ctx *ctx = context(42, 1);
    lt_tensor *x = line(ctx, LT_F64, 1);
    double *value = lt_data(x);
    for (int k = 0; k < 4; k++) {
        CHECK_OK(lt_fill_uniform(x, LT_RNG_USER, 3, index[k], 0, 1));
        CHECK_NEAR(*value, uniform[k], 0);
        CHECK_OK(lt_fill_uniform(x, LT_RNG_USER, 3, index[k], -2, 6));
        CHECK_NEAR(*value, -2 + 8 * uniform[k], 0);
        CHECK_OK(lt_fill_normal(x, LT_RNG_USER, 3, index[k], 0, 1));
        CHECK_NEAR(*value, normal[k], 1e-14);
        CHECK_OK(lt_fill_normal(x, LT_RNG_USER, 3, index[k], 10, 0.5));
        CHECK_NEAR(*value, 10 + 0.5 * normal[k], 1e-14);
    }
    lt_release(x);
    lt_ctx_free(ctx);
}

/* A fill by 4 threads equals a fill by 1 thread, and a fill of any part that starts at its own
 * index, odd or even. */
static void check_parts(lt_dtype dtype, bool normal)
{
    enum { N = 30011 };
    lt_ctx *one = context(9, 1), *four = context(9, 4);
    lt_tensor *a = line(one, dtype, N), *b = line(four, dtype, N);
    size_t size = lt_dtype_bytes(dtype);
    CHECK_OK(normal ? lt_fill_normal(a, LT_RNG_INIT, 5, 100, 0, 1)
                    : lt_fill_uniform(a, LT_RNG_INIT, 5, 100, -1, 1));
    CHECK_OK(normal ? lt_fill_normal(b, LT_RNG_INIT, 5, 100, 0, 1)
                    : lt_fill_uniform(b, LT_RNG_INIT, 5, 100, -1, 1));
    CHECK_EQ(memcmp(lt_data(a), lt_data(b), N * size), 0);
    static const int64_t start[] = {0, 1, 2, 1023, 1024, 1025, 20001},
                         count[] = {1, 2, 3, 1024, 1025, 9000};
    for (int s = 0; s < 7; s++)
        for (int c = 0; c < 6; c++) {
            lt_tensor *piece = line(one, dtype, count[c]);
            uint64_t first = 100 + (uint64_t)start[s];
            CHECK_OK(normal ? lt_fill_normal(piece, LT_RNG_INIT, 5, first, 0, 1)
                            : lt_fill_uniform(piece, LT_RNG_INIT, 5, first, -1, 1));
            CHECK_EQ(memcmp(lt_data(piece), (char *)lt_data(a) + (size_t)start[s] * size,
                            (size_t)count[c] * size),
                     0);
            lt_release(piece);
        }
    RELEASE(a, b);
    lt_ctx_free(one);
    lt_ctx_free(four);
}

TEST(fills_do_not_depend_on_threads_or_parts)
{
    for (lt_dtype dtype = LT_F32; dtype <= LT_BF16; dtype++) {
        check_parts(dtype, false);
        check_parts(dtype, true);
    }
}

/* The moments are within 5 standard errors, and each of 16 equal bins has its fraction. */
TEST(uniform_numbers_are_uniform)
{
    enum { N = 400000 };
    lt_ctx *ctx = context(1, 2);
    lt_tensor *x = line(ctx, LT_F32, N);
    CHECK_OK(lt_fill_uniform(x, LT_RNG_USER, 0, 0, 0, 1));
    const float *value = lt_data(x);
    double sum = 0, square = 0;
    int bin[16] = {0};
    for (int i = 0; i < N; i++) {
        CHECK(value[i] >= 0 && value[i] < 1);
        sum += value[i];
        square += (value[i] - 0.5) * (value[i] - 0.5);
        bin[(int)(value[i] * 16)]++;
    }
    CHECK_NEAR(sum / N, 0.5, 5 * sqrt(1.0 / 12 / N));
    CHECK_NEAR(square / N, 1.0 / 12, 5 * sqrt(1.0 / 180 / N));
    for (int k = 0; k < 16; k++)
        CHECK_NEAR(bin[k], N / 16.0, 5 * sqrt(N / 16.0));
    lt_release(x);
    lt_ctx_free(ctx);
}

TEST(normal_numbers_are_normal)
{
    enum { N = 400000 };
    lt_ctx *ctx = context(1, 2);
    lt_tensor *x = line(ctx, LT_F64, N);
    CHECK_OK(lt_fill_normal(x, LT_RNG_USER, 0, 0, 0, 1));
    const double *value = lt_data(x);
    double moment[5] = {0}, neighbours = 0;
    int beyond[4] = {0};
    for (int i = 0; i < N; i++) {
        double power = 1;
        for (int k = 1; k <= 4; k++)
            moment[k] += (power *= value[i]) / N;
        neighbours += value[i] * value[i ^ 1] / N; /* the two of a pair are independent */
        for (int k = 1; k < 4; k++)
            beyond[k] += fabs(value[i]) > k;
    }
    CHECK_NEAR(moment[1], 0, 5 * sqrt(1.0 / N));
    CHECK_NEAR(moment[2], 1, 5 * sqrt(2.0 / N));
    CHECK_NEAR(moment[3], 0, 5 * sqrt(15.0 / N));
    CHECK_NEAR(moment[4], 3, 5 * sqrt(96.0 / N));
    CHECK_NEAR(neighbours, 0, 5 * sqrt(2.0 / N));
    for (int k = 1; k < 4; k++) {
        double share = erfc(k / sqrt(2));
        CHECK_NEAR(beyond[k], N * share, 5 * sqrt(N * share));
    }
    lt_release(x);
    lt_ctx_free(ctx);
}

/* Plain rounding to a 16-bit dtype would reach the upper end once in a few hundred numbers. */
TEST_SEEDED(uniform_numbers_stay_below_high_in_every_dtype)
{
    static const double ends[][2] = {{0, 1}, {-1, 0}, {-3, -2}, {-1, 1}, {0.1, 0.3}};
    enum { N = 20000 };
    for (lt_dtype dtype = LT_F32; dtype <= LT_BF16; dtype++)
        for (int k = 0; k < 5; k++) {
            lt_tensor *x = line(ctx, dtype, N), *wide = line(ctx, LT_F64, N),
                      *end = line(ctx, dtype, 2);
            double low, high;
            lt_convert(lt_data(end), dtype, ends[k], LT_F64, 2);
            CHECK_OK(lt_item(end, 0, &low));
            CHECK_OK(lt_item(end, 1, &high));
            CHECK_OK(lt_fill_uniform(x, LT_RNG_USER, 1, 0, ends[k][0], ends[k][1]));
            CHECK_OK(lt_copy(wide, x));
            double *value = lt_data(wide), highest = low;
            for (int i = 0; i < N; i++) {
                CHECK(value[i] >= low && value[i] < high);
                highest = fmax(highest, value[i]);
            }
            CHECK(highest > low + 0.98 * (high - low));
            RELEASE(x, wide, end);
        }
    /* 1000 and 1001 are the same number in bf16, so every number is the lower end */
    lt_tensor *x = line(ctx, LT_BF16, 3);
    double value;
    CHECK_OK(lt_fill_uniform(x, LT_RNG_USER, 1, 0, 1000, 1001));
    CHECK_OK(lt_item(x, 2, &value));
    CHECK_NEAR(value, 1000, 0);
    lt_release(x);
}

TEST_SEEDED(bad_fills_are_refused)
{
    lt_tensor *x = line(ctx, LT_F32, 3), *i = line(ctx, LT_I32, 3), *half = line(ctx, LT_F16, 3);
    CHECK_FAILS(lt_fill_uniform(i, LT_RNG_USER, 0, 0, 0, 1), LT_EINVAL,
                "require a float tensor, but this one is i32");
    CHECK_FAILS(lt_fill_normal(i, LT_RNG_USER, 0, 0, 0, 1), LT_EINVAL,
                "require a float tensor, but this one is i32");
    CHECK_FAILS(lt_fill_uniform(x, LT_RNG_USER, 0, 0, 1, 0), LT_EINVAL, "require low <= high");
    CHECK_FAILS(lt_fill_uniform(x, LT_RNG_USER, 0, 0, 0, NAN), LT_EINVAL, "require low <= high");
    CHECK_FAILS(lt_fill_uniform(x, LT_RNG_USER, 0, 0, -INFINITY, 0), LT_EINVAL, "both finite");
    CHECK_FAILS(lt_fill_uniform(half, LT_RNG_USER, 0, 0, 0, 1e6), LT_EINVAL, "both finite in f16");
    CHECK_FAILS(lt_fill_normal(x, LT_RNG_USER, 0, 0, 0, -1), LT_EINVAL,
                "a deviation of at least 0");
    CHECK_FAILS(lt_fill_normal(x, LT_RNG_USER, 0, 0, NAN, 1), LT_EINVAL, "require a finite mean");
    RELEASE(x, i, half);
}

TEST_SEEDED(an_empty_fill_succeeds)
{
    lt_tensor *x = line(ctx, LT_F32, 0);
    CHECK_OK(lt_fill_uniform(x, LT_RNG_USER, 0, 0, 0, 1));
    CHECK_OK(lt_fill_normal(x, LT_RNG_USER, 0, 0, 0, 1));
    lt_release(x);
}

TEST(shuffles_give_the_documented_orders)
{
    static const int64_t known[2][10] = {{9, 1, 2, 8, 5, 6, 4, 7, 3, 0},
                                         {7, 1, 9, 3, 5, 0, 6, 4, 2, 8}};
    int64_t order[10];
    for (int k = 0; k < 2; k++) {
        lt_shuffle(42, 5 + (uint64_t)k, order, 10);
        CHECK_EQ(memcmp(order, known[k], sizeof order), 0);
    }
}

TEST(a_shuffle_is_a_permutation)
{
    static const int64_t sizes[] = {0, 1, 2, 3, 1000, 60000};
    for (int k = 0; k < 6; k++) {
        int64_t n = sizes[k];
        int64_t *order = malloc((size_t)(n + 1) * sizeof *order);
        char *seen = calloc((size_t)n + 1, 1);
        order[n] = -7;
        lt_shuffle(1, 2, order, n);
        for (int64_t i = 0; i < n; i++) {
            CHECK(order[i] >= 0 && order[i] < n && !seen[order[i]]);
            seen[order[i]] = 1;
        }
        CHECK_EQ(order[n], -7);
        free(order);
        free(seen);
    }
}

/* The 24 orders of 4 are equally frequent: chi-square is below the 1e-6 point for 23 degrees of
 * freedom. */
TEST(all_orders_are_equally_likely)
{
    enum { EPOCHS = 240000 };
    int count[256] = {0}, kinds = 0;
    double chi = 0, expected = EPOCHS / 24.0;
    for (uint64_t epoch = 0; epoch < EPOCHS; epoch++) {
        int64_t order[4];
        lt_shuffle(11, epoch, order, 4);
        count[order[0] << 6 | order[1] << 4 | order[2] << 2 | order[3]]++;
    }
    for (int k = 0; k < 256; k++)
        if (count[k] > 0) {
            kinds++;
            chi += (count[k] - expected) * (count[k] - expected) / expected;
        }
    CHECK_EQ(kinds, 24);
    CHECK(chi < 72.5);
}

TEST_SEEDED(draws_of_a_context_are_counted)
{
    CHECK_EQ(lt_next_draw(ctx), 0);
    CHECK_EQ(lt_next_draw(ctx), 1);
    lt_set_next_draw(ctx, 1ull << 40);
    CHECK_EQ(lt_next_draw(ctx), 1ull << 40);
    CHECK_EQ(lt_next_draw(ctx), (1ull << 40) + 1);
    lt_set_seed(ctx, 4);
    CHECK_EQ(lt_next_draw(ctx), 0);
}
