/* test_pool2d.c - compares the fast kernels of pooling with the reference on random windows over
 * images of any size and number of channels. Values are small integers, so sums are exact and both
 * must give the same bits. Many values are equal, and for max_pool2d some are infinite or NaN.
 */
#include "ops/ops.h"
#include "tests/lt_test.h"

enum { TRIES = 150 };

typedef struct {
    lt_dtype dtype;
    int64_t dims[4];
    char options[64];
} setup;

/* A random integer in [low, high] that depends on the stream and the index. */
static int64_t pick(uint64_t stream, uint64_t index, int64_t low, int64_t high)
{
    uint32_t word[4];
    lt_random(1, LT_RNG_USER, stream, index, word);
    return low + (int64_t)(word[0] % (uint64_t)(high - low + 1));
}

static setup random_setup(uint64_t try)
{
    setup s = {.dtype = try % 2 ? LT_BF16 : LT_F32};
    int64_t kernel[2], stride[2], pad[2];
    bool apart = pick(try, 52, 0, 1); /* windows that do not overlap */
    for (int i = 0; i < 2; i++) {
        kernel[i] = pick(try, 10 + (uint64_t)i, 1, 4);
        stride[i] = apart ? kernel[i] : pick(try, 20 + (uint64_t)i, 1, 5);
        pad[i] = pick(try, 30 + (uint64_t)i, 0, apart ? kernel[i] / 3 : kernel[i] / 2);
        s.dims[1 + i] = pick(try, 40 + (uint64_t)i, kernel[i], 13);
    }
    s.dims[0] = pick(try, 50, 1, 3);
    s.dims[3] = pick(try, 51, 1, 70);
    snprintf(s.options, sizeof s.options, "kernel=%d,%d stride=%d,%d pad=%d,%d", (int)kernel[0],
             (int)kernel[1], (int)stride[0], (int)stride[1], (int)pad[0], (int)pad[1]);
    return s;
}

/* Integers in [-3, 3]; with special, also some infinities and NaN. */
static lt_tensor *numbers(lt_ctx *ctx, const setup *s, int ndim, const int64_t *dims,
                          uint64_t stream, bool special)
{
    static const double odd[] = {NAN, INFINITY, -INFINITY};
    lt_tensor *x = lt_tensor_new(ctx, s->dtype, ndim, dims);
    CHECK(x != NULL);
    char *at = lt_data(x);
    for (int64_t i = 0; i < lt_count(x); i++) {
        int64_t k = pick(stream, (uint64_t)i, -3, special ? 40 : 3);
        double value = k <= 3 ? (double)k : k <= 6 ? odd[k - 4] : (double)(k % 7 - 3);
        lt_convert(at + (size_t)i * lt_dtype_bytes(s->dtype), s->dtype, &value, LT_F64, 1);
    }
    return x;
}

/* Computes y and the gradient of x, which the first backward writes and the second adds to. New. */
static void run(lt_ctx *ctx, const char *op, const setup *s, lt_tensor **y, lt_tensor **x)
{
    *x = numbers(ctx, s, 4, s->dims, 7, strcmp(op, "max_pool2d") == 0);
    CHECK_OK(lt_set_requires_grad(*x, true));
    for (int pass = 0; pass < 2; pass++) {
        *y = lt_run(ctx, op, s->options, *x, NULL);
        if (!*y)
            FAIL("%s [%s]: %s", op, s->options, lt_errmsg());
        lt_tensor *dy = numbers(ctx, s, lt_ndim(*y), lt_dims(*y), 8 + (uint64_t)pass, false);
        CHECK_OK(lt_backward(*y, dy));
        lt_release(dy);
        if (pass == 0)
            lt_release(*y);
    }
}

static void check_same(const char *op, const char *what, const setup *s, lt_tensor *fast,
                       lt_tensor *plain)
{
    char text[96];
    size_t bytes = (size_t)lt_count(plain) * lt_dtype_bytes(s->dtype);
    CHECK_EQ(lt_count(fast), lt_count(plain));
    if (memcmp(lt_data(fast), lt_data(plain), bytes) != 0)
        FAIL("%s [%s] of %lldx%lldx%lldx%lld: %s (%s) differs from the reference", op, s->options,
             (long long)s->dims[0], (long long)s->dims[1], (long long)s->dims[2],
             (long long)s->dims[3], what, lt_describe(plain, text, sizeof text));
}

static void compare(const char *op, const setup *s)
{
    lt_ctx *ctx[2];
    lt_tensor *x[2], *y[2];
    for (int plain = 0; plain < 2; plain++) {
        ctx[plain] = lt_open(&(lt_config){.reference = plain, .threads = 2, .poison = true});
        CHECK(ctx[plain] != NULL);
        run(ctx[plain], op, s, &y[plain], &x[plain]);
    }
    check_same(op, "y", s, y[0], y[1]);
    check_same(op, "the gradient", s, lt_grad(x[0]), lt_grad(x[1]));
    for (int plain = 0; plain < 2; plain++) {
        lt_release(x[plain]);
        lt_release(y[plain]);
        lt_ctx_free(ctx[plain]);
    }
}

TEST(max_pool2d_of_any_window)
{
    for (uint64_t try = 0; try < TRIES; try++) {
        setup s = random_setup(try);
        compare("max_pool2d", &s);
    }
}

TEST(avg_pool2d_of_any_window)
{
    for (uint64_t try = 0; try < TRIES; try++) {
        setup s = random_setup(TRIES + try);
        compare("avg_pool2d", &s);
    }
}

/* The number of windows is that of non-overlapping ones. */
TEST(overlapping_windows)
{
    setup s = {.dims = {2, 6, 6, 17}, .options = "kernel=3 stride=2"};
    compare("max_pool2d", &s);
    compare("avg_pool2d", &s);
}

TEST(global_avg_pool2d_of_any_image)
{
    for (uint64_t try = 0; try < TRIES; try++) {
        setup s = random_setup(2 * TRIES + try);
        s.options[0] = 0;
        s.dims[3] *= 1 + 10 * (int64_t)(try % 3); /* also more than are read together */
        compare("global_avg_pool2d", &s);
    }
}

/* The index of the tap does not fit into a byte. */
TEST(max_pool2d_of_a_large_window)
{
    lt_ctx *ctx = lt_open(&(lt_config){.poison = true});
    int64_t dims[] = {1, 17, 17, 2};
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 4, dims, -1);
    float *at = lt_data(x);
    CHECK_OK(lt_set_requires_grad(x, true));
    at[2 * 288] = 5;    /* the last tap of channel 0 */
    at[2 * 32 + 1] = 6; /* tap 32 = 288 - 256 of channel 1 */
    lt_tensor *y = lt_run(ctx, "max_pool2d", "kernel=17", x, NULL);
    lt_tensor *dy = lt_tensor_full(ctx, LT_F32, 4, lt_dims(y), 1);
    CHECK_OK(lt_backward(y, dy));
    CHECK_NEAR(((float *)lt_data(y))[0], 5, 0);
    CHECK_NEAR(((float *)lt_data(y))[1], 6, 0);
    const float *dx = lt_data(lt_grad(x));
    for (int i = 0; i < 2 * 289; i++)
        CHECK_NEAR(dx[i], i == 2 * 288 || i == 2 * 32 + 1, 0);
    lt_release(dy);
    lt_release(y);
    lt_release(x);
    lt_ctx_free(ctx);
}
