/* test_winograd.c - compares lt__winograd.run() with the reference, for each kind of task, on
 * random shapes, whether Winograd is the fastest algorithm for them or not: odd sizes, images of
 * one pixel, pads from 0 to 2; in f32 and in bf16, written or added, on one thread and on three.
 *
 * The truth is the reference kernel in f64 on the same, rounded inputs. Winograd's sums have other
 * terms than a convolution, so errors are compared with a typical element of the result, its root
 * mean square: winograd.c has the measured errors. The limit of the root mean square error here is
 * a little higher, and more so for results of few elements. That of a single element is eight times
 * as high.
 */
#include "tests/ops/conv.h"

enum { X, W, B, Y, ROLES };
enum { CASES = 40 }; /* per kind of task and number of threads */

#define ERROR_F32 5e-7
#define ERROR_BF16 5.2e-3 /* for bf16 inputs, also in an f32 gradient of w */

typedef struct {
    lt_conv_task_kind kind;
    lt_conv conv;
    lt_dtype dtype, of_w, of_bias;
    bool bias, add;
} problem;

/* ==== Tensors ================================================================================= */

static int64_t draw(uint64_t *seed, int64_t n)
{
    *seed = *seed * 6364136223846793005 + 1442695040888963407;
    return (int64_t)(*seed >> 33) % n;
}

static lt_tensor *tensor_of(lt_ctx *ctx, lt_dtype dtype, const lt_conv *v, int role)
{
    const lt_window *w = &v->window;
    int64_t dims[ROLES][4] = {[X] = {v->n, w->in[0], w->in[1], v->in},
                              [W] = {v->out, w->kernel[0], w->kernel[1], v->in},
                              [B] = {v->out},
                              [Y] = {v->n, w->out[0], w->out[1], v->out}};
    lt_tensor *x = lt_tensor_new(ctx, dtype, role == B ? 1 : 4, dims[role]);
    if (!x)
        FAIL("%s", lt_errmsg());
    return x;
}

/* Values between -1 and 1, or NaNs if poison. New. */
static lt_tensor *filled(lt_ctx *ctx, lt_dtype dtype, const lt_conv *v, int role, bool poison,
                         uint64_t *seed)
{
    lt_tensor *x = tensor_of(ctx, dtype, v, role);
    for (int64_t i = 0; i < x->count; i++) {
        double value = poison ? NAN : (double)draw(seed, 20001) / 10000 - 1;
        lt_convert((char *)x->data + i * (int64_t)lt_dtype_bytes(dtype), dtype, &value, LT_F64, 1);
    }
    return x;
}

static lt_tensor *widened(lt_ctx *ctx, const lt_conv *v, int role, const lt_tensor *from)
{
    if (!from)
        return NULL;
    lt_tensor *x = tensor_of(ctx, LT_F64, v, role);
    lt_convert(x->data, LT_F64, from->data, (lt_dtype)from->dtype, (size_t)from->count);
    return x;
}

static int result_of(lt_conv_task_kind kind)
{
    return kind == LT_CONV ? Y : kind == LT_CONV_DATA ? X : W;
}

/* ==== Running and comparing =================================================================== */

/* Computes the result in f64, in place of its tensor in of[]. */
static void run_reference(lt_ctx *ctx, const problem *t, lt_tensor *of[ROLES])
{
    const lt_def *def = lt_op_find(ctx, "conv2d");
    const lt_window *w = &t->conv.window;
    char text[64];
    lt_opt opts[LT_MAX_OPT];
    snprintf(text, sizeof text, "pad=%d,%d", (int)w->pad[0], (int)w->pad[1]);
    CHECK_OK(lt_opts_parse(&def->schema, text, opts));
    lt_tensor *d_in[] = {t->kind == LT_CONV_DATA ? of[X] : NULL,
                         t->kind == LT_CONV_WEIGHTS ? of[W] : NULL, NULL};
    lt_call c = {.ctx = ctx,
                 .op = def->op,
                 .schema = &def->schema,
                 .opt = opts,
                 .n_in = 3,
                 .in = of,
                 .out = &of[Y],
                 .d_out = &of[Y],
                 .d_in = d_in,
                 .threads = ctx->threads,
                 .save = def->op->save};
    CHECK_OK((t->kind == LT_CONV ? def->op->fwd : def->op->bwd)(&c));
}

static void run(const problem *t, lt_tensor *const of[ROLES], int threads)
{
    lt_conv_task task = {.kind = t->kind,
                         .conv = &t->conv,
                         .x = lt__operand(of[X], 0),
                         .w = lt__operand(of[W], 0),
                         .bias = lt__operand(of[B], 0),
                         .y = lt__operand(of[Y], 0),
                         .add = t->add};
    CHECK(lt__winograd_can(&task));
    run_task(&lt__winograd, &task, threads, 0xff);
}

/* before: the values that are added to, or NULL. */
static void compare(const problem *t, lt_tensor *got, const lt_tensor *truth,
                    const lt_tensor *before)
{
    double squares = 0, errors = 0, limit = t->dtype == LT_BF16 ? ERROR_BF16 : ERROR_F32;
    double rounding = got->dtype == LT_BF16 ? 0x1p-8 : 0x1p-23;
    const double *want = truth->data, *there = before ? before->data : NULL;
    int64_t n = got->count;
    for (int64_t i = 0; i < n; i++)
        squares += want[i] * want[i];
    double typical = sqrt(squares / (double)n);
    for (int64_t i = 0; i < n; i++) {
        double value, sum = want[i] + (there ? there[i] : 0);
        CHECK_OK(lt_item(got, i, &value));
        double error = fabs(value - sum) - (there ? rounding * fabs(sum) : 0);
        error = error < 0 ? 0 : error; /* NaN stays */
        errors += error * error;
        if (!(error <= 8 * limit * typical))
            FAIL("element %lld is %.9g, not %.9g (typical %.3g)", (long long)i, value, sum,
                 typical);
    }
    double mean = sqrt(errors / (double)n) / typical;
    if (!(mean <= limit * (1 + 4 / sqrt((double)n))))
        FAIL("the mean error is %.3g of a typical element", mean);
}

static void check(lt_ctx *ctx, const problem *t, int threads, uint64_t *seed)
{
    int result = result_of(t->kind);
    lt_dtype dtypes[ROLES] = {t->dtype, t->of_w, t->of_bias, t->dtype};
    lt_tensor *of[ROLES] = {NULL}, *wide[ROLES] = {NULL};
    for (int i = X; i <= Y; i++) {
        if (i == B && !t->bias)
            continue;
        of[i] = filled(ctx, dtypes[i], &t->conv, i, i == result && !t->add, seed);
        wide[i] = widened(ctx, &t->conv, i, of[i]);
    }
    lt_tensor *before = t->add ? widened(ctx, &t->conv, result, of[result]) : NULL;
    run_reference(ctx, t, wide);
    run(t, of, threads);
    compare(t, of[result], wide[result], before);
    for (int i = X; i <= Y; i++) {
        lt_release(of[i]);
        lt_release(wide[i]);
    }
    lt_release(before);
}

/* ==== Shapes ================================================================================== */

static lt_conv draw_conv(uint64_t *seed)
{
    int64_t pad[2], size[2];
    for (int i = 0; i < 2; i++) {
        pad[i] = draw(seed, 3);
        size[i] = (pad[i] > 0 ? 1 : 3) + (draw(seed, 5) ? draw(seed, 13) : 0);
    }
    int64_t n = 1 + draw(seed, 4), out = 16 * (1 + draw(seed, 5)), in = 16 * (1 + draw(seed, 5));
    return conv_with(n, size, in, out, 1, 3, 1, pad);
}

static const lt_config reference = {.threads = 2, .reference = true, .poison = true};

static void want_vectors(lt_dtype dtype)
{
    lt_conv v = conv_of(1, 4, 16, 16, 3, 1);
    lt_operand of = {NULL, dtype};
    if (!lt__winograd_can(&(lt_conv_task){.kind = LT_CONV, .conv = &v, .x = of, .w = of, .y = of}))
        SKIP("Winograd has no %s kernel for this CPU", lt_dtype_name(dtype));
}

static void walk(lt_dtype dtype, lt_dtype gradient, uint64_t seed)
{
    want_vectors(dtype);
    lt_ctx *ctx = ctx_with(reference);
    for (int threads = 1; threads <= 3; threads += 2)
        for (int i = 0; i < 3 * CASES; i++) {
            problem t = {.kind = LT_CONV + i % 3,
                         .conv = draw_conv(&seed),
                         .dtype = dtype,
                         .of_bias = draw(&seed, 2) ? dtype : LT_F32,
                         .add = draw(&seed, 2)};
            t.of_w = t.kind == LT_CONV_WEIGHTS ? gradient : dtype;
            t.bias = t.kind == LT_CONV && !t.add && draw(&seed, 2);
            check(ctx, &t, threads, &seed);
        }
    lt_ctx_free(ctx);
}

TEST(random_shapes_in_f32) { walk(LT_F32, LT_F32, 1); }
TEST(random_shapes_in_bf16) { walk(LT_BF16, LT_BF16, 2); }
TEST(random_shapes_in_bf16_with_f32_gradients_of_w) { walk(LT_BF16, LT_F32, 3); }

/* More tiles than are transformed at a time, and an odd number of them: with separate sums in each
 * thread, and with too many channels for that. */
static void check_many_tiles(lt_dtype dtype)
{
    want_vectors(dtype);
    lt_ctx *ctx = ctx_with(reference);
    problem few = {.kind = LT_CONV_WEIGHTS,
                   .conv = conv_of(11, 14, 32, 48, 3, 1),
                   .dtype = dtype,
                   .of_w = LT_F32};
    problem many = few;
    uint64_t seed = 4;
    many.conv = conv_of(5, 14, 16, 2064, 3, 1);
    for (int threads = 1; threads <= 3; threads += 2) {
        check(ctx, &few, threads, &seed);
        check(ctx, &many, threads, &seed);
    }
    lt_ctx_free(ctx);
}

TEST(gradients_of_w_over_many_tiles_in_f32) { check_many_tiles(LT_F32); }
TEST(gradients_of_w_over_many_tiles_in_bf16) { check_many_tiles(LT_BF16); }

/* ==== Accepted convolutions =================================================================== */

static bool winograd_takes(lt_conv_task_kind kind, lt_conv v, lt_dtype dtype)
{
    return takes(&lt__winograd, kind, &v, dtype, dtype, 1);
}

/* According to measurements against oneDNN. */
TEST(convolutions_that_are_faster_are_accepted)
{
    want_vectors(LT_BF16);
    lt_conv one = conv_of(64, 28, 16, 16, 3, 1), two = conv_of(64, 28, 16, 32, 3, 1);
    lt_conv few = conv_of(2, 14, 256, 256, 3, 1), more = conv_of(3, 14, 256, 256, 3, 1);
    lt_conv odd = conv_of(64, 5, 64, 64, 3, 1), seven = conv_of(64, 7, 64, 64, 3, 1);
    for (int kind = LT_CONV; kind <= LT_CONV_WEIGHTS; kind++) {
        bool weights = kind == LT_CONV_WEIGHTS;
        CHECK(!winograd_takes(kind, one, LT_F32) && winograd_takes(kind, one, LT_BF16) == weights);
        CHECK(winograd_takes(kind, two, LT_F32) && winograd_takes(kind, two, LT_BF16));
        CHECK(winograd_takes(kind, few, LT_F32) && !winograd_takes(kind, few, LT_BF16) &&
              winograd_takes(kind, more, LT_BF16));
        CHECK(winograd_takes(kind, odd, LT_F32) && winograd_takes(kind, odd, LT_BF16) == weights);
        CHECK(winograd_takes(kind, seven, LT_F32) && winograd_takes(kind, seven, LT_BF16));
    }
}

TEST(other_convolutions_are_not_accepted)
{
    want_vectors(LT_BF16);
    lt_conv v = conv_of(64, 28, 32, 32, 3, 1);
    lt_window *w = &v.window;
    int64_t *sizes[] = {&w->stride[0], &w->dilation[1], &w->kernel[1], &w->pad[0],
                        &v.groups,     &v.in,           &v.out};
    CHECK(!winograd_takes(LT_CONV, v, LT_F64));
    for (int i = 0; i < 7; i++) {
        *sizes[i] += 2;
        CHECK(!winograd_takes(LT_CONV, v, LT_BF16));
        *sizes[i] -= 2;
    }
    check_declined(&lt__winograd, &v, sizes, 7, 2);
}
