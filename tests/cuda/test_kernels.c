/* test_kernels.c - compares our CUDA kernels with the reference kernels of the CPU.
 *
 * Elementwise arithmetic must give the same bits, in f16 and bf16 too, as both sides compute in f32
 * and round once. Both sides sum in double, but in different orders. After rounding to f32 such
 * sums rarely differ by more than one rounding, so the tolerance is one spacing.
 */
#include "ops/unary.h"
#include "tests/cuda/reference.h"

static const lt_dtype integers[] = {LT_I64, LT_I32, LT_U8};

static sample unary_shapes[] = {
    {"", "-"}, {"", "1"},     {"", "2"},    {"", "31"},    {"", "33"},
    {"", "0"}, {"", "3x0x2"}, {"", "4099"}, {"", "3x5x7"}, {"", "2x1x3x1x2x1x2x3"}};

TEST_CUDA(unary_ops)
{
#define NAME(name, ...) #name,
    static const char *const ops[] = {"neg", "abs", "clamp", LT_UNARY_LIST(NAME)};
#undef NAME
    for (int k = 0; k < COUNT(ops); k++)
        CHECK_ALL(m, floats, unary_shapes, .op = ops[k], .special = true);
}

TEST_CUDA(unary_ops_of_integers)
{
    static const lt_dtype with_sign[] = {LT_I64, LT_I32};
    static sample clamps[] = {
        {"min=-1.5 max=1.5", "333"}, {"min=1", "333"}, {"min=2 max=-2", "33"}};
    CHECK_ALL(m, with_sign, unary_shapes, .op = "neg");
    CHECK_ALL(m, integers, unary_shapes, .op = "abs");
    CHECK_ALL(m, numerics, clamps, .op = "clamp");
}

static const char *const binary[] = {"add", "sub", "mul", "div", "floor_divide", "pow"};
static sample binary_shapes[] = {{"", "-, -"},
                                 {"", "7, 7"},
                                 {"", "33x7, 7"},
                                 {"", "7, 33x7"},
                                 {"", "64x24, 24"},
                                 {"", "64x24, 64x1"},
                                 {"", "5x1x3, 4x1"},
                                 {"", "1x1, 6x5"},
                                 {"", "-, 2x3"},
                                 {"", "3x40, -"},
                                 {"", "2x3x1x2x1x3x2x2, 3x1x1x2x3x1x1"},
                                 {"", "0x3, 3"},
                                 {"", "1, 0"},
                                 {"", "700x33, 33"},
                                 {"", "40x16x8, 1x16x1"},
                                 {"", "1, 5000"},
                                 {"", "3, 1x3"}};

TEST_CUDA(binary_ops)
{
    for (int k = 0; k < COUNT(binary); k++) {
        CHECK_ALL(m, floats, binary_shapes, .op = binary[k], .spacings = 1);
        if (!lt_op_find(m->ctx, binary[k])->op->to_floats)
            CHECK_ALL(m, integers, binary_shapes, .op = binary[k]);
    }
}

/* Without broadcasting the gradients are not sums, so the bits are equal. */
TEST_CUDA(binary_ops_bit_by_bit)
{
    static sample finite[] = {{"", "6x9x8, 6x9x8"}}, any[] = {{"", "1031, 1031"}};
    for (int k = 0; k < COUNT(binary); k++) {
        CHECK_ALL(m, floats, finite, .op = binary[k]);
        CHECK_ALL(m, floats, any, .op = binary[k], .special = true);
    }
}

TEST_CUDA(comparisons)
{
    static const char *const ops[] = {"eq", "ne", "lt", "le", "gt", "ge"};
    for (int k = 0; k < COUNT(ops); k++)
        CHECK_ALL(m, numerics, binary_shapes, .op = ops[k], .special = true);
}

TEST_CUDA(where)
{
    static sample samples[] = {{"", "u8:33, 33, 33"},       {"", "u8:5x1, 7, 5x7"},
                               {"", "u8:-, 4x8, 8"},        {"", "u8:64x32, 1, 32"},
                               {"", "u8:3x1x2, 4x1, -"},    {"", "u8:0, 1, 0"},
                               {"", "u8:900x16, 16, 900x1"}};
    CHECK_ALL(m, floats, samples, .op = "where", .spacings = 1);
    CHECK_ALL(m, integers, samples, .op = "where");
    check(m, (spec){.op = "where", .dtype = LT_F32, .shapes = "u8:515, 515, 515", .special = true});
}

/* ==== Reductions ============================================================================== */

static sample reductions[] = {{"", "-"},
                              {"", "1"},
                              {"", "31"},
                              {"", "33x3"},
                              {"", "60013"},
                              {"axis=0", "9001x3"},
                              {"axis=-1", "3x9001"},
                              {"axis=-1", "5x64x16"},
                              {"axis=1", "2000x5"},
                              {"axis=0", "700x70"},
                              {"axis=1 keep=true", "4x33x65"},
                              {"axis=0", "1x5"},
                              {"axis=0", "3x0"},
                              {"axis=0", "60000x1"}};
static sample of_axes[] = {{"axis=0,2", "5x7x9x11"},
                           {"axis=0,1,2", "3x5x4x6"},
                           {"axis=0,2,4,6", "2x3x2x3x2x1x3x2"},
                           {"axis=0,2", "40x3x700"}};
static sample of_nothing[] = {{"", "0"}, {"axis=0", "0x3"}, {"axis=1", "3x0x2"}};

TEST_CUDA(sums)
{
    static const char *const ops[] = {"sum", "mean", "norm"};
    for (int k = 0; k < COUNT(ops); k++) {
        CHECK_ALL(m, floats, reductions, .op = ops[k], .spacings = 1);
        CHECK_ALL(m, floats, of_axes, .op = ops[k], .spacings = 1);
        CHECK_ALL(m, floats, of_nothing, .op = ops[k], .spacings = 1);
    }
    for (int k = 0; k < 2; k++) {
        CHECK_ALL(m, integers, reductions, .op = ops[k]);
        CHECK_ALL(m, integers, of_axes, .op = ops[k]);
        CHECK_ALL(m, integers, of_nothing, .op = ops[k]);
    }
}

TEST_CUDA(maxima_and_minima)
{
    CHECK_ALL(m, numerics, reductions, .op = "max");
    CHECK_ALL(m, numerics, of_axes, .op = "max");
    CHECK_ALL(m, numerics, reductions, .op = "min");
    CHECK_ALL(m, numerics, of_axes, .op = "min");
    CHECK_ALL(m, numerics, reductions, .op = "argmax");
}

TEST_CUDA(a_nan_is_a_maximum_and_a_minimum)
{
    static sample samples[] = {{"axis=1", "40x9"}, {"axis=0", "40x9"}, {"", "50007"}};
    static const char *const ops[] = {"max", "min", "argmax"};
    for (int k = 0; k < COUNT(ops); k++)
        CHECK_ALL(m, floats, samples, .op = ops[k], .special = true);
}

/* ==== Shapes ================================================================================== */

/* In all dtypes that kernels of the op support, because it only moves elements. */
TEST_CUDA(transposes)
{
    static sample samples[] = {{"", "33x65", "transpose"},
                               {"", "1x5", "transpose"},
                               {"", "2x3x5", "transpose"},
                               {"axes=0,2", "9x4x35", "transpose"},
                               {"", "0x4", "transpose"},
                               {"", "3x100", "transpose"},
                               {"axes=0,2,3,1", "2x3x5x7", "permute"},
                               {"axes=0,3,1,2", "2x9x9x40", "permute"},
                               {"axes=2,1,0", "8x16x24", "permute"},
                               {"axes=1,0,2", "5x6x32", "permute"},
                               {"axes=0,1,2", "5x6x3", "permute"},
                               {"axes=0", "5", "permute"},
                               {"axes=7,6,5,4,3,2,1,0", "2x3x1x2x3x2x1x4", "permute"},
                               {"axes=3,0,4,1,5,2,7,6", "2x3x2x2x3x2x3x4", "permute"}};
    CHECK_ALL(m, numerics, samples, .op = NULL);
}

TEST_CUDA(slices_pads_and_concatenations)
{
    static sample samples[] = {{"axis=1 first=1 last=3", "4x5x3", "slice"},
                               {"axis=-1 first=8 last=23", "7x32", "slice"},
                               {"axis=1 first=2 last=1", "4x5", "slice"},
                               {"axis=1 first=0 last=-1", "4x5", "slice"},
                               {"axis=2 first=-2 last=-1", "2x3x64x16", "slice"},
                               {"before=1 after=2", "3x5", "pad"},
                               {"before=0,8 after=0,16 value=7", "5x40", "pad"},
                               {"before=0 after=0", "9", "pad"},
                               {"before=0,1,1,0 after=0,1,1,1 value=2", "2x5x5x3", "pad"},
                               {"before=2 after=1", "0", "pad"},
                               {"axis=0", "3x4, 2x4, 0x4", "cat"},
                               {"axis=1", "5x3, 5x1, 5x4", "cat"},
                               {"axis=-1", "6x16, 6x8", "cat"},
                               {"axis=1", "2x3x64, 2x1x64, 2x5x64, 2x2x64", "cat"},
                               {"axis=0", "33", "cat"}};
    CHECK_ALL(m, numerics, samples, .op = NULL);
}

TEST_CUDA(pads_of_floats)
{
    static sample samples[] = {{"before=0,8 after=0,16 value=-1.5", "5x40"}};
    CHECK_ALL(m, floats, samples, .op = "pad");
}

TEST_CUDA(casts)
{
    for (int to = 0; to < COUNT(numerics); to++)
        for (int d = 0; d < COUNT(numerics); d++) {
            char options[32];
            snprintf(options, sizeof options, "dtype=%s", lt_dtype_name(numerics[to]));
            spec s = {.op = "cast", .options = options, .dtype = numerics[d], .special = true};
            for (int empty = 0; empty < 2 && to != d; empty++) {
                s.shapes = empty ? "2x0" : "1037";
                check(m, s);
            }
        }
}

/* ==== Updates ================================================================================= */

/* Checks an op on n tensors of several sizes and, with stats, on a tensor of three. positive: bit i
 * for a tensor that must not be negative. */
static void check_update(machine *m, const char *op, const char *options, int n, bool stats,
                         uint32_t positive, int spacings)
{
    static const char *const counts[] = {"1", "33", "4096", "40001", "0"};
    for (int d = 0; d < COUNT(floats); d++)
        for (int i = 0; i < COUNT(counts); i++) {
            char shapes[64] = "";
            for (int j = 0; j < n; j++)
                sprintf(shapes + strlen(shapes), "%s%s", j ? ", " : "", counts[i]);
            strcat(shapes, stats ? ", 3" : "");
            check(m, (spec){.op = op,
                            .options = options,
                            .dtype = floats[d],
                            .shapes = shapes,
                            .positive = positive,
                            .spacings = spacings});
        }
}

TEST_CUDA(updates)
{
    static const struct {
        const char *op, *options;
        int n;
    } ops[] = {{"sgd_step", "lr=0.1", 2},
               {"sgd_step", "lr=0.1 weight_decay=0.01 scale=0.5", 2},
               {"momentum_step", "lr=0.1 momentum=0.8 weight_decay=0.01", 3},
               {"momentum_step", "lr=0.1 nesterov=true scale=0.25", 3},
               {"lars_step", "lr=0.1 weight_decay=0.01 scale=0.5", 3},
               {"lars_step", "lr=0.1 adapt=false", 3},
               {"adam_step", "lr=0.1 step=3 weight_decay=0.1", 4},
               {"adam_step", "lr=0.1 step=1 weight_decay=0.1 decoupled=true scale=2.0", 4}};
    for (int k = 0; k < COUNT(ops); k++) {
        bool lars = ops[k].op[0] == 'l'; /* its rate has a ratio of norms */
        check_update(m, ops[k].op, ops[k].options, ops[k].n, false, 0, lars);
    }
}

TEST_CUDA(updates_with_delayed_gradients)
{
    check_update(m, "dc_grad", "lam=0.5 weight_decay=0.01", 3, false, 0, 0);
    check_update(m, "dc_grad", "lam=0.5", 4, false, 1 << 3, 0);
    check_update(m, "dc_grad", "lam=2 adaptive=true", 4, false, 1 << 3, 0);
    check_update(m, "gap_grad", "lr=0.1 correction=0.5 weight_decay=0.01", 5, false, 1 << 4, 0);
    check_update(m, "ordered_step", "lr=0.1 late=0", 3, false, 0, 0);
    check_update(m, "ordered_step", "lr=0.1 weight_decay=0.1 late=2 opens=true", 3, false, 0, 0);
    /* the limit is a ratio of norms */
    check_update(m, "ddc_step", "lr=0.1 weight_decay=0.01 r=0.5 q=0.75", 5, true, 1 << 3, 1);
    check_update(m, "ddc_step", "lr=0.1 r=1 q=1 lam=0.01", 5, true, 1 << 3, 1);
}

/* The statistics are f64, as in training. With lam=0 the limit is 1, so the bits are equal. */
TEST_CUDA(statistics_of_ddc_step)
{
    for (int k = 0; k < 2 * COUNT(floats); k++)
        check(m, (spec){.op = "ddc_step",
                        .options = k % 2 ? "lr=0.1 r=0.5 q=0.75" : "lr=0.1 r=0.5 q=0.75 lam=0",
                        .dtype = floats[k / 2],
                        .shapes = "5001, 5001, 5001, 5001, 5001, f64:3",
                        .positive = 1 << 3,
                        .spacings = k % 2 ? 64 : 0});
}

/* On the device v is the gradient itself; on the host it is a copy. */
TEST_CUDA(gap_grad_without_momentum)
{
    enum { GRAD, WEIGHTS, BACKUP, V, MS, N_IN };
    const lt_def *def = lt_op_find(m->ctx, "gap_grad");
    for (int k = 0; k < 2 * COUNT(floats); k++) {
        mirror t[N_IN];
        lt_opt opts[LT_MAX_OPT];
        lt_tensor *host[N_IN], *device[N_IN];
        must(lt_opts_parse(&def->schema, "lr=0.1 correction=0.5 weight_decay=0.1", opts));
        for (int i = 0; i < N_IN; i++) {
            uint32_t seed = i == V ? 1 : 1 + (uint32_t)i;
            host[i] = values(m, floats[k / 2], 1, &(int64_t){4099}, seed, false);
            adjust(host[i], 0, i == MS, 0);
            t[i] = mirror_of(m, host[i], k % 2);
        }
        for (int i = 0; i < N_IN; i++)
            device[i] = on_device(&t[i == V ? GRAD : i]);
        lt_call c = {.ctx = m->ctx,
                     .device = m->ctx->devices[0],
                     .op = def->op,
                     .schema = &def->schema,
                     .opt = opts,
                     .n_in = N_IN,
                     .in = host};
        must(lt__run_kernel(&c, def, false));
        c.in = device;
        c.device = m->cuda.device;
        run_on_device(m, def, &c, false);
        for (int i = 0; i < N_IN; i++) {
            compare(m, def->schema.in[i].name, &t[i], 0);
            mirror_free(m, &t[i]);
        }
    }
}

/* The total may have another dtype. */
TEST_CUDA(sums_of_squares)
{
    static const char *const totals[] = {"f64", "f32", "f16", "bf16"};
    static const char *const counts[] = {"1", "0", "33", "40001"};
    for (int d = 0; d < COUNT(floats); d++)
        for (int t = 0; t < COUNT(totals); t++)
            for (int i = 0; i < COUNT(counts); i++) {
                char shapes[64];
                snprintf(shapes, sizeof shapes, "%s:-, %s", totals[t], counts[i]);
                check(m, (spec){.op = "add_squares",
                                .dtype = floats[d],
                                .shapes = shapes,
                                .spacings = t == 0 ? 64 : 1});
            }
}
