/* test_windows.c - compares the CUDA backend's own kernels for products, convolutions and pools
 * with the reference kernels of the CPU, over odd shapes.
 *
 * Sums are in f32 on the device, and in f32 or double, in another order, on the CPU. In f32 they
 * differ by less than 2^-20 of the sum of the absolute terms, in f16 and bf16 by at most one
 * rounding.
 */
#include "tests/cuda/reference.h"

#ifdef __SANITIZE_ADDRESS__ /* makes the kernels ten times slower */
static const lt_dtype floats[] = {LT_F32, LT_F16};
#else
static const lt_dtype floats[] = {LT_F32, LT_F16, LT_BF16};
#endif
#define COUNT(array) (int)(sizeof(array) / sizeof *(array))

typedef struct sample {
    const char *options, *shapes;
} sample;

/* by: the absolute tolerance. */
static void check_all(const char *op, const sample *samples, int n, double by)
{
    machine m = machine_open();
    for (int d = 0; d < COUNT(floats); d++)
        for (int i = 0; i < n; i++)
            check(&m, (spec){.op = op,
                             .options = samples[i].options,
                             .dtype = floats[d],
                             .shapes = samples[i].shapes,
                             .spacings = 1,
                             .slack = {.by = by}});
    lt_ctx_free(m.ctx);
}

/* ==== Products ================================================================================ */

TEST(products)
{
    static const sample samples[] = {
        {"", "1x1, 1x1"},         {"", "3x5, 5x7"},         {"", "64x8, 8x64"},
        {"", "65x9, 9x63"},       {"", "130x31, 31x70"},    {"", "2x700, 700x3"},
        {"", "3x4x5, 3x5x2"},     {"", "3x4x5, 5x2"},       {"", "4x5, 3x5x2"},
        {"", "2x1x4x70, 3x70x2"}, {"", "2x3x4x5, 1x3x5x6"}, {"", "2x1x3x4x5, 1x2x3x5x2"},
        {"", "0x4, 4x5"},         {"", "3x0, 0x5"},         {"", "3x4, 4x0"},
        {"", "0x3x4, 4x5"},       {"", "0x3x4, 1x4x5"},     {"", "700x2, 2x3"},
        {"", "1x1x3x4, 4x2"},     {"", "600x1x2, 1x2x3"}};
    check_all("matmul", samples, COUNT(samples), 0x1p-12);
}

TEST(linear_layers)
{
    static const sample samples[] = {{"", "3x4, 5x4, 5"},    {"", "3x4, 5x4"},
                                     {"", "1x7, 1x7, 1"},    {"", "2x3x70, 66x70, 66"},
                                     {"", "4, 5x4, 5"},      {"", "0x4, 5x4, 5"},
                                     {"", "3x0, 5x0, 5"},    {"", "3x4, 0x4, 0"},
                                     {"", "1500x3, 2x3, 2"}, {"", "5x600, 3x600, 3"}};
    check_all("linear", samples, COUNT(samples), 0x1p-12);
}

/* ==== Convolutions ============================================================================ */

static const sample conv_samples[] = {{"", "2x5x5x3, 4x3x3x3, 4"},
                                      {"pad=1", "2x5x4x3, 4x3x3x3"},
                                      {"stride=2 pad=1", "1x7x6x2, 3x3x3x2, 3"},
                                      {"dilation=2", "1x7x8x2, 3x3x3x2"},
                                      {"stride=2,1 pad=1,0 dilation=2,3", "1x8x7x2, 2x3x2x2, 2"},
                                      {"", "2x4x3x5, 7x1x1x5, 7"},
                                      {"pad=1 groups=2", "2x4x5x4, 6x3x3x2, 6"},
                                      {"groups=3 stride=2", "1x5x6x9, 3x2x3x3, 3"},
                                      {"stride=3 pad=0,2", "1x9x8x1, 2x1x5x1, 2"},
                                      {"pad=2", "1x2x2x2, 2x5x5x2"},
                                      {"pad=1", "3x9x8x17, 70x3x3x17, 70"},
                                      {"stride=3", "1x8x8x2, 2x2x2x2"},
                                      {"pad=1", "0x5x5x3, 4x3x3x3, 4"},
                                      {"stride=2", "2x30x31x3, 5x3x3x3"},
                                      {"groups=2", "1x3x3x0, 0x3x3x0, 0"},
                                      {"pad=1 groups=5", "1x7x5x5, 10x3x3x1, 10"}};

TEST(convolutions) { check_all("conv2d", conv_samples, COUNT(conv_samples), 0x1p-12); }

static const sample depthwise[] = {{"pad=1 groups=3", "2x5x4x3, 3x3x3x1, 3"},
                                   {"stride=2 pad=1 groups=4", "1x6x6x4, 4x3x3x1"},
                                   {"pad=1 groups=17", "2x7x5x17, 17x3x3x1"},
                                   {"groups=8", "1x4x3x8, 8x3x3x1, 8"},
                                   {"stride=2 pad=1 groups=33", "1x6x9x33, 33x3x3x1, 33"},
                                   {"pad=1 groups=3", "1x1x1x3, 3x3x3x1"},
                                   {"stride=2 groups=16", "2x5x8x16, 16x3x3x1"},
                                   {"pad=1 groups=64", "3x9x8x64, 64x3x3x1, 64"},
                                   {"stride=2 pad=1 groups=160", "2x7x7x160, 160x3x3x1, 160"},
                                   {"pad=1 groups=132", "1x7x7x132, 132x3x3x1"},
                                   {"groups=5", "1x3x3x5, 5x3x3x1"},
                                   {"pad=1 groups=4", "0x5x5x4, 4x3x3x1, 4"},
                                   {"stride=2 pad=1 groups=2", "40x17x16x2, 2x3x3x1"},
                                   {"stride=2 groups=8", "1x6x6x8, 8x3x3x1"},
                                   {"pad=1 groups=9", "1x3x40x9, 9x3x3x1, 9"}};

TEST(depthwise_convolutions) { check_all("conv2d", depthwise, COUNT(depthwise), 0x1p-12); }

/* f32 gradients of parameters whose f16 or bf16 copies are the inputs. */
static void check_f32_grads(const char *op, const sample *samples, int n)
{
    machine m = machine_open();
    for (int d = 1; d < COUNT(floats); d++)
        for (int i = 0; i < n; i++)
            check(&m, (spec){.op = op,
                             .options = samples[i].options,
                             .dtype = floats[d],
                             .shapes = samples[i].shapes,
                             .spacings = 1,
                             .slack = {.by = 0x1p-12},
                             .f32_grads = true});
    lt_ctx_free(m.ctx);
}

TEST(f32_gradients_of_f16_and_bf16)
{
    static const sample linear = {"", "70x9, 5x9, 5"}, matmul = {"", "2x3x4x5, 1x3x5x6"};
    check_f32_grads("conv2d", conv_samples, COUNT(conv_samples));
    check_f32_grads("conv2d", depthwise, COUNT(depthwise));
    check_f32_grads("linear", &linear, 1);
    check_f32_grads("matmul", &matmul, 1);
}

/* ==== Pools =================================================================================== */

static const sample pools[] = {{"kernel=2", "2x4x4x3"},
                               {"kernel=2", "1x7x5x1"},
                               {"kernel=3 stride=2 pad=1", "2x7x6x8"},
                               {"kernel=3 stride=2 pad=1", "1x8x9x129"},
                               {"kernel=3 stride=1 pad=1", "1x5x4x64"},
                               {"kernel=2,3 stride=1,2 pad=1,0", "2x5x7x16"},
                               {"kernel=2 stride=3", "1x7x8x7"},
                               {"kernel=17 stride=4 pad=8", "1x20x19x3"},
                               {"kernel=1", "3x2x3x5"},
                               {"kernel=2", "0x4x4x3"},
                               {"kernel=5,1 stride=9", "1x20x1x2"},
                               {"kernel=2", "1x4x4x0"}};

TEST(maxima) { check_all("max_pool2d", pools, COUNT(pools), 0x1p-18); }
TEST(means) { check_all("avg_pool2d", pools, COUNT(pools), 0x1p-18); }

/* The gradient goes to the first of equal elements, or to the first NaN. */
TEST(maxima_of_special_values)
{
    machine m = machine_open();
    for (int d = 0; d < COUNT(floats); d++) {
        check(&m, (spec){.op = "max_pool2d",
                         .options = "kernel=2",
                         .dtype = floats[d],
                         .shapes = "3x8x6x16",
                         .special = true});
        check(&m, (spec){.op = "max_pool2d",
                         .options = "kernel=3",
                         .dtype = floats[d],
                         .shapes = "2x9x9x5",
                         .special = true});
    }
    lt_ctx_free(m.ctx);
}

TEST(means_of_images)
{
    static const sample samples[] = {{"", "2x3x4x5"},     {"", "1x1x1x3"}, {"", "3x7x7x64"},
                                     {"", "2x13x11x129"}, {"", "0x4x4x3"}, {"", "1x70x50x1"},
                                     {"", "2x2x2x0"}};
    check_all("global_avg_pool2d", samples, COUNT(samples), 0);
}
