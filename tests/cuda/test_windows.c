/* test_windows.c - compares the CUDA backend's own kernels for products, convolutions and pools
 * with the reference kernels of the CPU, over odd shapes.
 *
 * Sums are in f32 on the device, and in f32 or double, in another order, on the CPU. In f32 they
 * differ by less than 2^-20 of the sum of the absolute terms, in f16 and bf16 by at most one
 * rounding.
 */
#include "tests/cuda/reference.h"

#ifdef __SANITIZE_ADDRESS__ /* makes the kernels ten times slower */
static const lt_dtype some[] = {LT_F32, LT_F16}, halves[] = {LT_F16};
#else
static const lt_dtype some[] = {LT_F32, LT_F16, LT_BF16}, halves[] = {LT_F16, LT_BF16};
#endif

/* The tolerance, besides one spacing. */
#define WITHIN(most) .spacings = 1, .slack = {.by = (most)}

/* ==== Products ================================================================================ */

TEST_CUDA(products)
{
    static sample samples[] = {
        {"", "1x1, 1x1"},         {"", "3x5, 5x7"},         {"", "64x8, 8x64"},
        {"", "65x9, 9x63"},       {"", "130x31, 31x70"},    {"", "2x700, 700x3"},
        {"", "3x4x5, 3x5x2"},     {"", "3x4x5, 5x2"},       {"", "4x5, 3x5x2"},
        {"", "2x1x4x70, 3x70x2"}, {"", "2x3x4x5, 1x3x5x6"}, {"", "2x1x3x4x5, 1x2x3x5x2"},
        {"", "0x4, 4x5"},         {"", "3x0, 0x5"},         {"", "3x4, 4x0"},
        {"", "0x3x4, 4x5"},       {"", "0x3x4, 1x4x5"},     {"", "700x2, 2x3"},
        {"", "1x1x3x4, 4x2"},     {"", "600x1x2, 1x2x3"}};
    CHECK_ALL(m, some, samples, .op = "matmul", WITHIN(0x1p-12));
}

TEST_CUDA(linear_layers)
{
    static sample samples[] = {{"", "3x4, 5x4, 5"},    {"", "3x4, 5x4"},
                               {"", "1x7, 1x7, 1"},    {"", "2x3x70, 66x70, 66"},
                               {"", "4, 5x4, 5"},      {"", "0x4, 5x4, 5"},
                               {"", "3x0, 5x0, 5"},    {"", "3x4, 0x4, 0"},
                               {"", "1500x3, 2x3, 2"}, {"", "5x600, 3x600, 3"}};
    CHECK_ALL(m, some, samples, .op = "linear", WITHIN(0x1p-12));
}

/* ==== Convolutions ============================================================================ */

static sample conv_samples[] = {{"", "2x5x5x3, 4x3x3x3, 4"},
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

TEST_CUDA(convolutions) { CHECK_ALL(m, some, conv_samples, .op = "conv2d", WITHIN(0x1p-12)); }

static sample depthwise[] = {{"pad=1 groups=3", "2x5x4x3, 3x3x3x1, 3"},
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

TEST_CUDA(depthwise_convolutions)
{
    CHECK_ALL(m, some, depthwise, .op = "conv2d", WITHIN(0x1p-12));
}

/* f32 gradients of parameters whose f16 or bf16 copies are the inputs. */
TEST_CUDA(f32_gradients_of_f16_and_bf16)
{
    static sample others[] = {{"", "70x9, 5x9, 5", "linear"}, {"", "2x3x4x5, 1x3x5x6", "matmul"}};
    CHECK_ALL(m, halves, conv_samples, .op = "conv2d", WITHIN(0x1p-12), .f32_grads = true);
    CHECK_ALL(m, halves, depthwise, .op = "conv2d", WITHIN(0x1p-12), .f32_grads = true);
    CHECK_ALL(m, halves, others, WITHIN(0x1p-12), .f32_grads = true);
}

/* ==== Pools =================================================================================== */

static sample pools[] = {{"kernel=2", "2x4x4x3"},
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

TEST_CUDA(maxima) { CHECK_ALL(m, some, pools, .op = "max_pool2d", WITHIN(0x1p-18)); }
TEST_CUDA(means) { CHECK_ALL(m, some, pools, .op = "avg_pool2d", WITHIN(0x1p-18)); }

/* The gradient goes to the first of equal elements, or to the first NaN. */
TEST_CUDA(maxima_of_special_values)
{
    static sample samples[] = {{"kernel=2", "3x8x6x16"}, {"kernel=3", "2x9x9x5"}};
    CHECK_ALL(m, some, samples, .op = "max_pool2d", .special = true);
}

TEST_CUDA(means_of_images)
{
    static sample samples[] = {{"", "2x3x4x5"},     {"", "1x1x1x3"}, {"", "3x7x7x64"},
                               {"", "2x13x11x129"}, {"", "0x4x4x3"}, {"", "1x70x50x1"},
                               {"", "2x2x2x0"}};
    CHECK_ALL(m, some, samples, .op = "global_avg_pool2d", WITHIN(0));
}
