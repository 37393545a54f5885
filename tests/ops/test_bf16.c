/* test_bf16.c - elementwise ops with bf16 kernels give the same results as f32 copies that are
 * rounded once. Inputs are random bits, which include zeros of both signs, subnormal numbers,
 * infinities and NaN. The bits of a NaN may differ.
 */
#include "core/tensor.h"
#include "ops/ops.h"
#include "tests/lt_test.h"

enum { N = 40013 }; /* several blocks, with a last one of odd size */

/* Random bits; a twentieth of the numbers are special values. New. */
static lt_tensor *bits(lt_ctx *ctx, uint64_t stream)
{
    static const uint16_t rare[] = {0, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0xffc1, 1, 0x80ff};
    lt_tensor *x = lt_tensor_new(ctx, LT_BF16, 1, (int64_t[]){N});
    CHECK(x != NULL);
    uint16_t *at = lt_data(x);
    for (int64_t i = 0; i < N; i++) {
        uint32_t word[4];
        lt_random(1, LT_RNG_USER, stream, (uint64_t)i, word);
        at[i] = word[1] % 20 == 0 ? rare[word[2] % 8] : (uint16_t)word[0];
    }
    return x;
}

static lt_tensor *cast(lt_tensor *x, lt_ctx *ctx, const char *options)
{
    lt_tensor *y = lt_run(ctx, "cast", options, x, NULL);
    CHECK(y != NULL);
    return y;
}

/* Returns the number of elements of x that differ from those of f rounded. before: values that are
 * added to f, or NULL. */
static int differences(lt_tensor *x, lt_tensor *f, const uint16_t *before)
{
    const uint16_t *have = lt_data(x);
    const float *want = lt_data(f);
    int n = 0;
    for (int64_t i = 0; i < N; i++) {
        float sum = before ? lt__bf16_to_f32(before[i]) + want[i] : want[i];
        bool nan = isnan(lt__bf16_to_f32(have[i]));
        n += nan != (bool)isnan(sum) || (!nan && have[i] != lt__f32_to_bf16(sum));
    }
    return n;
}

/* Compares y and the gradients of one or two inputs in both dtypes. A second backward in bf16 adds
 * to the gradients. */
static void try_op(lt_ctx *ctx, const char *op, int inputs)
{
    static uint16_t before[2][N];
    lt_tensor *x[2] = {NULL}, *wide[2] = {NULL}, *dy = bits(ctx, 9);
    for (int i = 0; i < inputs; i++) {
        x[i] = bits(ctx, (uint64_t)i);
        wide[i] = cast(x[i], ctx, "dtype=f32");
        CHECK_OK(lt_set_requires_grad(x[i], true));
        CHECK_OK(lt_set_requires_grad(wide[i], true));
    }
    lt_tensor *d_wide = cast(dy, ctx, "dtype=f32");
    lt_tensor *y = lt_runv(ctx, op, "", x, inputs), *z = lt_runv(ctx, op, "", wide, inputs);
    CHECK(y != NULL && z != NULL);
    CHECK_EQ(differences(y, z, NULL), 0);
    CHECK_OK(lt_backward(y, dy));
    CHECK_OK(lt_backward(z, d_wide));
    for (int i = 0; i < inputs; i++) {
        CHECK_EQ(differences(lt_grad(x[i]), lt_grad(wide[i]), NULL), 0);
        memcpy(before[i], lt_data(lt_grad(x[i])), sizeof before[i]);
    }
    lt_release(y);
    CHECK((y = lt_runv(ctx, op, "", x, inputs)) != NULL);
    CHECK_OK(lt_backward(y, dy));
    for (int i = 0; i < inputs; i++) {
        CHECK_EQ(differences(lt_grad(x[i]), lt_grad(wide[i]), before[i]), 0);
        lt_release(x[i]);
        lt_release(wide[i]);
    }
    lt_release(y);
    lt_release(z);
    lt_release(dy);
    lt_release(d_wide);
}

TEST(results_are_rounded_once)
{
    static const char *const unary[] = {"relu", "relu6", "neg", "abs", "clamp"};
    static const char *const binary[] = {"add", "sub", "mul", "div"};
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 2});
    CHECK(ctx != NULL);
    for (size_t i = 0; i < sizeof unary / sizeof *unary; i++)
        try_op(ctx, unary[i], 1);
    for (size_t i = 0; i < sizeof binary / sizeof *binary; i++)
        try_op(ctx, binary[i], 2);
    lt_ctx_free(ctx);
}
