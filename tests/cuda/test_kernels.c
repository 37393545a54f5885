/* test_kernels.c - compares our CUDA kernels with the reference kernels of the CPU.
 *
 * Elementwise arithmetic must give the same bits, in f16 and bf16 too, as both sides compute in f32
 * and round once. Both sides sum in double, but in different orders. After rounding to f32 such
 * sums rarely differ by more than one rounding, so the tolerance is one spacing.
 */
#include "ops/unary.h"
#include "tests/cuda/reference.h"

static const lt_dtype floats[] = {LT_F32, LT_F16, LT_BF16};
static const lt_dtype numerics[] = {LT_F32, LT_F16, LT_BF16, LT_I64, LT_I32, LT_U8};
#define COUNT(array) (int)(sizeof(array) / sizeof *(array))

static const char *const unary_shapes[] = {"-", "1",     "2",    "31",    "33",
                                           "0", "3x0x2", "4099", "3x5x7", "2x1x3x1x2x1x2x3"};

TEST(unary_ops)
{
#define NAME(name, ...) #name,
    static const char *const ops[] = {"neg", "abs", "clamp", LT_UNARY_LIST(NAME)};
#undef NAME
    machine m = machine_open();
    for (int k = 0; k < COUNT(ops); k++)
        for (int d = 0; d < COUNT(floats); d++)
            for (int i = 0; i < COUNT(unary_shapes); i++)
                check(&m, (spec){.op = ops[k],
                                 .dtype = floats[d],
                                 .shapes = unary_shapes[i],
                                 .special = true});
    lt_ctx_free(m.ctx);
}

TEST(unary_ops_of_integers)
{
    machine m = machine_open();
    for (int d = 3; d < COUNT(numerics); d++)
        for (int i = 0; i < COUNT(unary_shapes); i++) {
            if (numerics[d] != LT_U8)
                check(&m, (spec){.op = "neg", .dtype = numerics[d], .shapes = unary_shapes[i]});
            check(&m, (spec){.op = "abs", .dtype = numerics[d], .shapes = unary_shapes[i]});
        }
    for (int d = 0; d < COUNT(numerics); d++) {
        lt_dtype t = numerics[d];
        check(&m,
              (spec){.op = "clamp", .options = "min=-1.5 max=1.5", .dtype = t, .shapes = "333"});
        check(&m, (spec){.op = "clamp", .options = "min=1", .dtype = t, .shapes = "333"});
        check(&m, (spec){.op = "clamp", .options = "min=2 max=-2", .dtype = t, .shapes = "33"});
    }
    lt_ctx_free(m.ctx);
}

static const char *const binary_shapes[] = {"-, -",
                                            "7, 7",
                                            "33x7, 7",
                                            "7, 33x7",
                                            "64x24, 24",
                                            "64x24, 64x1",
                                            "5x1x3, 4x1",
                                            "1x1, 6x5",
                                            "-, 2x3",
                                            "3x40, -",
                                            "2x3x1x2x1x3x2x2, 3x1x1x2x3x1x1",
                                            "0x3, 3",
                                            "1, 0",
                                            "700x33, 33",
                                            "40x16x8, 1x16x1",
                                            "1, 5000",
                                            "3, 1x3"};

TEST(binary_ops)
{
    static const char *const ops[] = {"add", "sub", "mul", "div", "floor_divide", "pow"};
    machine m = machine_open();
    for (int k = 0; k < COUNT(ops); k++)
        for (int d = 0; d < COUNT(numerics); d++)
            for (int i = 0; i < COUNT(binary_shapes); i++)
                if (lt__is_float(numerics[d]) || !lt_op_find(m.ctx, ops[k])->op->to_floats)
                    check(&m, (spec){.op = ops[k],
                                     .dtype = numerics[d],
                                     .shapes = binary_shapes[i],
                                     .spacings = lt__is_float(numerics[d])});
    lt_ctx_free(m.ctx);
}

/* Without broadcasting the gradients are not sums, so the bits are equal. */
TEST(binary_ops_bit_by_bit)
{
    static const char *const ops[] = {"add", "sub", "mul", "div", "floor_divide", "pow"};
    machine m = machine_open();
    for (int k = 0; k < COUNT(ops); k++)
        for (int d = 0; d < COUNT(floats); d++) {
            check(
                &m,
                (spec){.op = ops[k], .dtype = floats[d], .shapes = "1031, 1031", .special = true});
            check(&m, (spec){.op = ops[k], .dtype = floats[d], .shapes = "6x9x8, 6x9x8"});
        }
    lt_ctx_free(m.ctx);
}

TEST(comparisons)
{
    static const char *const ops[] = {"eq", "ne", "lt", "le", "gt", "ge"};
    machine m = machine_open();
    for (int k = 0; k < COUNT(ops); k++)
        for (int d = 0; d < COUNT(numerics); d++)
            for (int i = 0; i < COUNT(binary_shapes); i++)
                check(&m, (spec){.op = ops[k],
                                 .dtype = numerics[d],
                                 .shapes = binary_shapes[i],
                                 .special = true});
    lt_ctx_free(m.ctx);
}

TEST(where)
{
    static const char *const shapes[] = {"u8:33, 33, 33",       "u8:5x1, 7, 5x7",   "u8:-, 4x8, 8",
                                         "u8:64x32, 1, 32",     "u8:3x1x2, 4x1, -", "u8:0, 1, 0",
                                         "u8:900x16, 16, 900x1"};
    machine m = machine_open();
    for (int d = 0; d < COUNT(numerics); d++)
        for (int i = 0; i < COUNT(shapes); i++)
            check(&m, (spec){.op = "where",
                             .dtype = numerics[d],
                             .shapes = shapes[i],
                             .spacings = lt__is_float(numerics[d])});
    check(&m,
          (spec){.op = "where", .dtype = LT_F32, .shapes = "u8:515, 515, 515", .special = true});
    lt_ctx_free(m.ctx);
}

/* ==== Reductions ============================================================================== */

static const struct {
    const char *options, *shapes;
    bool empty;
} reductions[] = {{"", "-", false},
                  {"", "1", false},
                  {"", "31", false},
                  {"", "33x3", false},
                  {"", "60013", false},
                  {"axis=0", "9001x3", false},
                  {"axis=-1", "3x9001", false},
                  {"axis=-1", "5x64x16", false},
                  {"axis=1", "2000x5", false},
                  {"axis=0", "700x70", false},
                  {"axis=1 keep=true", "4x33x65", false},
                  {"axis=0,2", "5x7x9x11", false},
                  {"axis=0,1,2", "3x5x4x6", false},
                  {"axis=0,2,4,6", "2x3x2x3x2x1x3x2", false},
                  {"axis=0", "1x5", false},
                  {"", "0", true},
                  {"axis=0", "0x3", true},
                  {"axis=1", "3x0x2", true},
                  {"axis=0", "3x0", false},
                  {"axis=0", "60000x1", false},
                  {"axis=0,2", "40x3x700", false}};

static void check_reductions(const char *op, const lt_dtype *dtypes, int n, bool empty,
                             int spacings)
{
    machine m = machine_open();
    for (int d = 0; d < n; d++)
        for (int i = 0; i < COUNT(reductions); i++)
            if (empty || !reductions[i].empty)
                check(&m, (spec){.op = op,
                                 .options = reductions[i].options,
                                 .dtype = dtypes[d],
                                 .shapes = reductions[i].shapes,
                                 .spacings = lt__is_float(dtypes[d]) ? spacings : 0});
    lt_ctx_free(m.ctx);
}

TEST(sums) { check_reductions("sum", numerics, COUNT(numerics), true, 1); }
TEST(means) { check_reductions("mean", numerics, COUNT(numerics), true, 1); }
TEST(norms) { check_reductions("norm", floats, COUNT(floats), true, 1); }
TEST(maxima) { check_reductions("max", numerics, COUNT(numerics), false, 0); }
TEST(minima) { check_reductions("min", numerics, COUNT(numerics), false, 0); }

TEST(argmax)
{
    machine m = machine_open();
    for (int d = 0; d < COUNT(numerics); d++)
        for (int i = 0; i < COUNT(reductions); i++)
            if (!reductions[i].empty && !strchr(reductions[i].options, ','))
                check(&m, (spec){.op = "argmax",
                                 .options = reductions[i].options,
                                 .dtype = numerics[d],
                                 .shapes = reductions[i].shapes});
    lt_ctx_free(m.ctx);
}

TEST(a_nan_is_a_maximum_and_a_minimum)
{
    static const char *const ops[] = {"max", "min", "argmax"};
    machine m = machine_open();
    for (int k = 0; k < COUNT(ops); k++)
        for (int d = 0; d < COUNT(floats); d++) {
            spec s = {.op = ops[k],
                      .options = "axis=1",
                      .dtype = floats[d],
                      .shapes = "40x9",
                      .special = true};
            check(&m, s);
            s.options = "axis=0";
            check(&m, s);
            s.options = "";
            s.shapes = "50007";
            check(&m, s);
        }
    lt_ctx_free(m.ctx);
}

/* ==== Shapes ================================================================================== */

static const lt_dtype all[] = {LT_F32, LT_F64, LT_F16, LT_BF16, LT_I64, LT_I32, LT_U8};

typedef struct moved {
    const char *op, *options, *shapes;
} moved;

/* Checks ops that only move elements, in all dtypes that the kernels support. */
static void check_moves(const moved *cases, int n)
{
    machine m = machine_open();
    for (int d = 0; d < COUNT(all); d++)
        for (int i = 0; i < n; i++)
            if (all[d] != LT_F64)
                check(&m, (spec){.op = cases[i].op,
                                 .options = cases[i].options,
                                 .dtype = all[d],
                                 .shapes = cases[i].shapes});
    lt_ctx_free(m.ctx);
}

TEST(transposes)
{
    static const moved cases[] = {{"transpose", "", "33x65"},
                                  {"transpose", "", "1x5"},
                                  {"transpose", "", "2x3x5"},
                                  {"transpose", "axes=0,2", "9x4x35"},
                                  {"transpose", "", "0x4"},
                                  {"transpose", "", "3x100"},
                                  {"permute", "axes=0,2,3,1", "2x3x5x7"},
                                  {"permute", "axes=0,3,1,2", "2x9x9x40"},
                                  {"permute", "axes=2,1,0", "8x16x24"},
                                  {"permute", "axes=1,0,2", "5x6x32"},
                                  {"permute", "axes=0,1,2", "5x6x3"},
                                  {"permute", "axes=0", "5"},
                                  {"permute", "axes=7,6,5,4,3,2,1,0", "2x3x1x2x3x2x1x4"},
                                  {"permute", "axes=3,0,4,1,5,2,7,6", "2x3x2x2x3x2x3x4"}};
    check_moves(cases, COUNT(cases));
}

TEST(slices_pads_and_concatenations)
{
    static const moved cases[] = {{"slice", "axis=1 first=1 last=3", "4x5x3"},
                                  {"slice", "axis=-1 first=8 last=23", "7x32"},
                                  {"slice", "axis=1 first=2 last=1", "4x5"},
                                  {"slice", "axis=1 first=0 last=-1", "4x5"},
                                  {"slice", "axis=2 first=-2 last=-1", "2x3x64x16"},
                                  {"pad", "before=1 after=2", "3x5"},
                                  {"pad", "before=0,8 after=0,16 value=7", "5x40"},
                                  {"pad", "before=0 after=0", "9"},
                                  {"pad", "before=0,1,1,0 after=0,1,1,1 value=2", "2x5x5x3"},
                                  {"pad", "before=2 after=1", "0"},
                                  {"cat", "axis=0", "3x4, 2x4, 0x4"},
                                  {"cat", "axis=1", "5x3, 5x1, 5x4"},
                                  {"cat", "axis=-1", "6x16, 6x8"},
                                  {"cat", "axis=1", "2x3x64, 2x1x64, 2x5x64, 2x2x64"},
                                  {"cat", "axis=0", "33"}};
    check_moves(cases, COUNT(cases));
}

TEST(pads_of_floats)
{
    machine m = machine_open();
    for (int d = 0; d < COUNT(floats); d++)
        check(&m, (spec){.op = "pad",
                         .options = "before=0,8 after=0,16 value=-1.5",
                         .dtype = floats[d],
                         .shapes = "5x40"});
    lt_ctx_free(m.ctx);
}

TEST(casts)
{
    machine m = machine_open();
    for (int to = 0; to < COUNT(all); to++)
        for (int d = 0; d < COUNT(all); d++) {
            char options[32];
            if (all[to] == all[d] || all[to] == LT_F64 || all[d] == LT_F64)
                continue;
            snprintf(options, sizeof options, "dtype=%s", lt_dtype_name(all[to]));
            check(&m, (spec){.op = "cast",
                             .options = options,
                             .dtype = all[d],
                             .shapes = "1037",
                             .special = true});
            check(&m, (spec){.op = "cast", .options = options, .dtype = all[d], .shapes = "2x0"});
        }
    lt_ctx_free(m.ctx);
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

TEST(updates)
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
    machine m = machine_open();
    for (int k = 0; k < COUNT(ops); k++) {
        bool lars = ops[k].op[0] == 'l'; /* its rate has a ratio of norms */
        check_update(&m, ops[k].op, ops[k].options, ops[k].n, false, 0, lars);
    }
    lt_ctx_free(m.ctx);
}

TEST(updates_with_delayed_gradients)
{
    machine m = machine_open();
    check_update(&m, "dc_grad", "lam=0.5 weight_decay=0.01", 3, false, 0, 0);
    check_update(&m, "dc_grad", "lam=0.5", 4, false, 1 << 3, 0);
    check_update(&m, "dc_grad", "lam=2 adaptive=true", 4, false, 1 << 3, 0);
    check_update(&m, "gap_grad", "lr=0.1 correction=0.5 weight_decay=0.01", 5, false, 1 << 4, 0);
    check_update(&m, "ordered_step", "lr=0.1 late=0", 3, false, 0, 0);
    check_update(&m, "ordered_step", "lr=0.1 weight_decay=0.1 late=2 opens=true", 3, false, 0, 0);
    /* the limit is a ratio of norms */
    check_update(&m, "ddc_step", "lr=0.1 weight_decay=0.01 r=0.5 q=0.75", 5, true, 1 << 3, 1);
    check_update(&m, "ddc_step", "lr=0.1 r=1 q=1 lam=0.01", 5, true, 1 << 3, 1);
    lt_ctx_free(m.ctx);
}

/* The statistics are f64, as in training. With lam=0 the limit is 1, so the bits are equal. */
TEST(statistics_of_ddc_step)
{
    machine m = machine_open();
    for (int k = 0; k < 2 * COUNT(floats); k++)
        check(&m, (spec){.op = "ddc_step",
                         .options = k % 2 ? "lr=0.1 r=0.5 q=0.75" : "lr=0.1 r=0.5 q=0.75 lam=0",
                         .dtype = floats[k / 2],
                         .shapes = "5001, 5001, 5001, 5001, 5001, f64:3",
                         .positive = 1 << 3,
                         .spacings = k % 2 ? 64 : 0});
    lt_ctx_free(m.ctx);
}

/* On the device v is the gradient itself; on the host it is a copy. */
TEST(gap_grad_without_momentum)
{
    enum { GRAD, WEIGHTS, BACKUP, V, MS, N_IN };
    machine m = machine_open();
    const lt_def *def = lt_op_find(m.ctx, "gap_grad");
    for (int k = 0; k < 2 * COUNT(floats); k++) {
        mirror t[N_IN];
        lt_opt opts[LT_MAX_OPT];
        lt_tensor *host[N_IN], *device[N_IN];
        must(lt_opts_parse(&def->schema, "lr=0.1 correction=0.5 weight_decay=0.1", opts));
        for (int i = 0; i < N_IN; i++) {
            uint32_t seed = i == V ? 1 : 1 + (uint32_t)i;
            host[i] = values(&m, floats[k / 2], 1, &(int64_t){4099}, seed, false);
            adjust(host[i], 0, i == MS, 0);
            t[i] = mirror_of(&m, host[i], k % 2);
        }
        for (int i = 0; i < N_IN; i++)
            device[i] = on_device(&t[i == V ? GRAD : i]);
        lt_call c = {.ctx = m.ctx,
                     .device = m.ctx->devices[0],
                     .op = def->op,
                     .schema = &def->schema,
                     .opt = opts,
                     .n_in = N_IN,
                     .in = host};
        must(lt__run_kernel(&c, def, false));
        c.in = device;
        c.device = m.cuda.device;
        run_on_device(&m, def, &c, false);
        for (int i = 0; i < N_IN; i++) {
            compare(&m, def->schema.in[i].name, &t[i], 0);
            mirror_free(&m, &t[i]);
        }
    }
    lt_ctx_free(m.ctx);
}

/* The total may have another dtype. */
TEST(sums_of_squares)
{
    static const char *const totals[] = {"f64", "f32", "f16", "bf16"};
    static const char *const counts[] = {"1", "0", "33", "40001"};
    machine m = machine_open();
    for (int d = 0; d < COUNT(floats); d++)
        for (int t = 0; t < COUNT(totals); t++)
            for (int i = 0; i < COUNT(counts); i++) {
                char shapes[64];
                snprintf(shapes, sizeof shapes, "%s:-, %s", totals[t], counts[i]);
                check(&m, (spec){.op = "add_squares",
                                 .dtype = floats[d],
                                 .shapes = shapes,
                                 .spacings = t == 0 ? 64 : 1});
            }
    lt_ctx_free(m.ctx);
}
