/* test_norms.c - compares batch_norm and layer_norm on CUDA with the reference kernels of the CPU.
 *
 * batch_norm sums in f32 within a thread, the reference in double. So results may differ by a few
 * f32 spacings, at the largest element or at the typical size of a sum of that many rows.
 */
#include "tests/cuda/reference.h"
#include "tests/device/emu.h"

/* ==== batch_norm ============================================================================== */

enum { VAR = 4 }; /* input */

/* Rows and channels that exercise all ways to split the work into packs, wide rows and parts. */
static const int sizes[][2] = {{2, 1},      {31, 1},   {1000, 1},  {5003, 1}, {2, 3},
                               {31, 3},     {1000, 3}, {2, 7},     {31, 7},   {1000, 7},
                               {2, 64},     {31, 64},  {1000, 64}, {2, 129},  {31, 129},
                               {1000, 129}, {0, 5},    {4100, 16}, {6, 300}};

typedef struct norm { /* a call of batch_norm */
    const char *options;
    bool residual;
    double offset; /* of x */
} norm;

/* With two rows most of dx cancels, so eps is large. */
static void check_norm(machine *m, lt_dtype dtype, int rows, int channels, norm n)
{
    char shapes[200], options[100];
    snprintf(options, sizeof options, "%s%s", n.options, rows == 2 ? " eps=1" : "");
    snprintf(shapes, sizeof shapes, "%dx%d, %d, %d, %d, %d", rows, channels, channels, channels,
             channels, channels);
    if (n.residual)
        sprintf(shapes + strlen(shapes), ", %dx%d", rows, channels);
    check(m, (spec){.op = "batch_norm",
                    .options = options,
                    .dtype = dtype,
                    .shapes = shapes,
                    .spacings = 2,
                    .slack = {4, fmax(4, sqrt(rows))},
                    .offset = n.offset,
                    .positive = 1 << VAR});
}

/* Checks each size with one of the n norms in turn, and a different one in each dtype. */
static void check_norms(const norm *norms, int n)
{
    machine m = machine_open();
    for (int d = 0; d < COUNT(floats); d++)
        for (int i = 0; i < COUNT(sizes); i++)
            check_norm(&m, floats[d], sizes[i][0], sizes[i][1], norms[(i + d) % n]);
    lt_ctx_free(m.ctx);
}

TEST(batch_norm_in_training)
{
    check_norms((norm[]){{"train=true", false, 0}, {"train=true sync=true", false, 50}}, 2);
}

TEST(batch_norm_with_activation_and_residual)
{
    check_norms((norm[]){{"train=true act=relu", false, 0},
                         {"train=true act=relu", true, 0},
                         {"train=true act=relu6", true, 3},
                         {"train=true", true, 0},
                         {"train=true act=relu6", false, 1}},
                5);
}

TEST_CUDA(batch_norm_in_evaluation)
{
    check_norms((norm[]){{"", false, 0}, {"act=relu", true, 0}, {"act=relu6", false, 0}}, 3);
    for (int d = 0; d < COUNT(floats); d++)
        check_norm(m, floats[d], 1, 7, (norm){"act=relu", false, 0});
}

/* Computed from squares of x, the variance would be lost in the 24 bits of f32. */
TEST_CUDA(batch_norm_far_from_zero)
{
    check_norm(m, LT_F32, 1000, 3, (norm){"train=true", false, 1e4});
    check_norm(m, LT_F32, 4100, 16, (norm){"train=true act=relu", false, -1e4});
    check_norm(m, LT_F16, 1000, 64, (norm){"train=true", false, 1e3});
    check_norm(m, LT_BF16, 1000, 7, (norm){"train=true", false, 200});
    check(m, (spec){.op = "batch_norm",
                    .options = "train=true",
                    .dtype = LT_F32,
                    .shapes = "1000x35, 35, 35, 35, 35",
                    .spacings = 2,
                    .slack = {4, 32},
                    .apart = 1e4});
}

TEST_CUDA(act_propagates_nan)
{
    for (int d = 0; d < COUNT(floats); d++)
        check(m, (spec){.op = "batch_norm",
                        .options = d ? "act=relu" : "act=relu6",
                        .dtype = floats[d],
                        .shapes = "90x9, f32:9, f32:9, f32:9, f32:9",
                        .spacings = 2,
                        .slack = {4, 9},
                        .special = true,
                        .positive = 1 << VAR});
}

TEST_CUDA(parameters_of_another_dtype)
{
    check(m, (spec){.op = "batch_norm",
                    .options = "train=true act=relu",
                    .dtype = LT_F16,
                    .shapes = "40x9, f32:9, f32:9, f32:9, f32:9",
                    .spacings = 2,
                    .slack = {4, 0}});
    check(m, (spec){.op = "batch_norm",
                    .options = "train=true",
                    .dtype = LT_F32,
                    .shapes = "4x10x9, bf16:9, f16:9, 9, 9",
                    .spacings = 2,
                    .slack = {4, 0}});
}

TEST_CUDA(running_statistics)
{
    static const char *const options[][2] = {
        {"batch_norm_merge", "count=4 count2=12"},   {"batch_norm_merge", "count=0 count2=5"},
        {"batch_norm_merge", "count=5 count2=0"},    {"batch_norm_update", "count=24 momentum=0.1"},
        {"batch_norm_update", "count=1 momentum=1"}, {"batch_norm_update", "count=0 momentum=1"}};
    for (int k = 0; k < COUNT(options); k++) {
        sample samples[] = {{options[k][1], "1, 1, 1, 1"},
                            {options[k][1], "33, 33, 33, 33"},
                            {options[k][1], "300, 300, 300, 300"},
                            {options[k][1], "f32:7, f32:7, 7, 7"},
                            {options[k][1], "0, 0, 0, 0"}};
        CHECK_ALL(m, floats, samples, .op = options[k][0]);
    }
}

enum { LAYERS = 70, MOST = 600 };

/* Commits statistics of LAYERS layers, and stores the resulting running statistics. Returns the
 * number of kernels that this takes. Takes ctx. */
static int64_t commit_layers(lt_ctx *ctx, float results[LAYERS][2][MOST])
{
    lt_tensor *x[LAYERS][4];
    for (int i = 0; i < LAYERS; i++) {
        int64_t channels = 1 + 97 * i % MOST;
        for (int k = 0; k < 4; k++)
            x[i][k] =
                lt_tensor_full(ctx, i % 7 == k ? LT_BF16 : LT_F32, 1, &channels, 0.1 * i + 0.7 * k);
        must(lt_bn_stats_add(ctx, x[i][0], x[i][1], x[i][2], x[i][3], 1 + i, 0.3));
    }
    int64_t before = counted(SHIM_KERNELS);
    must(lt_bn_stats_commit(ctx));
    int64_t kernels = counted(SHIM_KERNELS) - before;
    CHECK_EQ(lt_bn_stats_pending(ctx), 0);
    for (int i = 0; i < LAYERS; i++)
        for (int k = 0; k < 4; k++) {
            lt_tensor *wide = lt_run(ctx, "cast", "dtype=f32", x[i][k], NULL);
            if (k < 2)
                must(lt_read(wide, results[i][k]));
            lt_release(wide);
            lt_release(x[i][k]);
        }
    lt_ctx_free(ctx);
    return kernels;
}

/* Few kernels update all layers, with the bits of the CPU. */
TEST(running_statistics_of_many_layers)
{
    static float here[LAYERS][2][MOST], there[LAYERS][2][MOST];
    use_shim();
    CHECK_EQ(commit_layers(open_reference(), here), 0);
    CHECK(commit_layers(open_device(), there) < 5);
    CHECK(memcmp(here, there, sizeof here) == 0);
}

/* ==== layer_norm ============================================================================== */

TEST_CUDA(layer_norm)
{
    static sample samples[] = {{"eps=1", "1x1000, 1000, 1000"},
                               {"", "31x7, 7, 7"},
                               {"", "3x3x129, 129, 129"},
                               {"eps=1", "1000x64, 64, 64"},
                               {"eps=1", "6, 6, 6"},
                               {"", "0x4, 4, 4"},
                               {"", "300x1, 1, 1"}};
    static sample around_5[] = {{"", "4x5, 5, 5"},
                                {"eps=1", "2x64, 64, 64"},
                                {"", "5000x3, 3, 3"},
                                {"eps=1", "3x2100, 2100, 2100"}};
    CHECK_ALL(m, floats, samples, .op = "layer_norm", .spacings = 1, .slack = {1, 0});
    CHECK_ALL(m, floats, around_5, .op = "layer_norm", .spacings = 1, .slack = {1, 0}, .offset = 5);
    check(m, (spec){.op = "layer_norm",
                    .dtype = LT_F32,
                    .shapes = "40x100, 100, 100",
                    .spacings = 1,
                    .slack = {1, 0},
                    .offset = 1e4});
}
