/* test_conv2d.c - compares the fast convolutions with the reference on random shapes: odd sizes,
 * one pixel, one channel, groups, strides; in f32 and in bf16, with gradients of the weights in f32
 * or bf16, written or added, on one thread and on several.
 *
 * The truth is the reference kernel in f64 on the same, rounded inputs. The allowed error of an
 * element is a fraction of the sum of the absolute values of its terms, which the same kernel
 * computes from the absolute values of the inputs. Results are poisoned before they are written: a
 * kernel that declines a case must not have changed the poison.
 */
#include "tests/ops/cases.h"

enum { X, W, B, Y, ROLES };   /* the tensors of a convolution */
enum { VALUES, GRADS, SETS }; /* and their gradients; that of Y is an input */

enum { MAX_THREADS = 3 };
enum { CASES = 60, LARGE_CASES = 8 }; /* per test and number of threads */

/* The fraction: f32 sums of up to some thousand terms, in any order. */
#define FRACTION 0x1p-20
/* Winograd's bf16 sums have other, rounded terms: their error is a fraction of a typical element
 * (test_winograd.c). */
#define WINOGRAD (8 * 5.2e-3)

typedef struct shape {
    int64_t dims[ROLES][4];
    int ndim[ROLES];
    char options[64];
} shape;

typedef struct run {
    lt_tensor *at[SETS][ROLES];
    bool add[B + 1];
} run;

/* ==== Making a case =========================================================================== */

/* A random integer from 0 to n - 1 by xorshift64* (Vigna, 2016). */
static int64_t draw(uint64_t *seed, int64_t n)
{
    *seed ^= *seed >> 12;
    *seed ^= *seed << 25;
    *seed ^= *seed >> 27;
    return (int64_t)((*seed * 0x2545f4914f6cdd1d) >> 33) % n;
}

/* A number of channels: small and arbitrary, or a multiple of a vector. */
static int64_t draw_channels(uint64_t *seed, bool whole)
{
    return whole ? 16 * (1 + draw(seed, 5)) : 1 + draw(seed, 37);
}

/* The number of outputs along an axis. */
static int64_t outputs(int64_t in, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation)
{
    return (in + 2 * pad - (kernel - 1) * dilation - 1) / stride + 1;
}

/* c and k: channels of x and y. Pairs are (height, width). */
static shape shape_of(int64_t n, const int64_t in[2], int64_t c, int64_t k, const int64_t kernel[2],
                      const int64_t stride[2], const int64_t pad[2], int64_t dilation,
                      int64_t groups)
{
    shape s = {
        .dims = {{n, in[0], in[1], c}, {k, kernel[0], kernel[1], c / groups}, {k}, {n, 0, 0, k}},
        .ndim = {4, 4, 1, 4}};
    for (int i = 0; i < 2; i++)
        s.dims[Y][1 + i] = outputs(in[i], kernel[i], stride[i], pad[i], dilation);
    snprintf(s.options, sizeof s.options, "stride=%d,%d pad=%d,%d dilation=%d groups=%d",
             (int)stride[0], (int)stride[1], (int)pad[0], (int)pad[1], (int)dilation, (int)groups);
    return s;
}

static shape draw_shape(uint64_t *seed, int threads)
{
    (void)threads;
    int64_t kernel[2], pad[2], stride[2], in[2];
    bool common = draw(seed, 2); /* 3x3 and 1x1 with stride 1 are the most common in networks */
    int64_t side = draw(seed, 3) ? 3 : 1, dilation = common ? 1 : 1 + draw(seed, 5) / 4;
    for (int i = 0; i < 2; i++) {
        kernel[i] = common ? side : 1 + draw(seed, 5);
        pad[i] = draw(seed, 1 + kernel[i]);
        stride[i] = 1 + draw(seed, common ? 5 : 4) / (common ? 4 : 2);
        int64_t reach = (kernel[i] - 1) * dilation + 1 - 2 * pad[i];
        in[i] = (reach > 1 ? reach : 1) + draw(seed, 11);
    }
    bool whole = draw(seed, 2); /* vectors */
    int64_t n = 1 + draw(seed, 3), groups = 1;
    int64_t c = draw_channels(seed, whole), k = draw_channels(seed, whole);
    switch (draw(seed, 6)) {
    case 0: groups = k = c; break;
    case 1: groups = 2, c *= 2, k *= 2; break;
    }
    return shape_of(n, in, c, k, kernel, stride, pad, dilation, groups);
}

/* Whole vectors of channels, and enough pixels for partial sums in each thread to pay off; most
 * with strides, which may be larger than the kernel. */
static shape draw_many_pixels(uint64_t *seed, int threads)
{
    int64_t kernel[2], pad[2], stride[2], in[2], out[2], side = 1 + draw(seed, 4);
    bool pointwise = draw(seed, 4) == 0, even = draw(seed, 3);
    for (int i = 0; i < 2; i++) {
        kernel[i] = pointwise ? 1 : even ? side : 1 + draw(seed, 5);
        pad[i] = pointwise ? 0 : draw(seed, 1 + kernel[i]);
        stride[i] = pointwise || draw(seed, 6) == 0 ? 1 : 2 + draw(seed, 3) / 2;
        int64_t least = kernel[i] > 2 * pad[i] ? kernel[i] - 2 * pad[i] : 1;
        in[i] = least + (draw(seed, 4) ? draw(seed, 23) : 0);
        out[i] = outputs(in[i], kernel[i], stride[i], pad[i], 1);
    }
    int64_t n = threads * 1024 / (out[0] * out[1]) + 1 + draw(seed, 2);
    int64_t c = 16 * (1 + draw(seed, 3)), k = 16 * (1 + draw(seed, 3));
    return shape_of(n, in, c, k, kernel, stride, pad, 1, 1);
}

/* Whole vectors of channels, and enough tiles of 2x2 pixels of y for Winograd to pay off. */
static shape draw_many_tiles(uint64_t *seed, int threads)
{
    (void)threads;
    static const int64_t kernel[] = {3, 3}, stride[] = {1, 1};
    int64_t one = draw(seed, 3), pad[] = {one, one}, in[] = {9 + draw(seed, 9), 9 + draw(seed, 9)};
    int64_t pixels = (in[0] + 2 * one - 2) * (in[1] + 2 * one - 2);
    int64_t n = 1 + 128 * 4 / pixels + draw(seed, 3);
    int64_t c = 16 * (1 + draw(seed, 3)), k = 16 * (1 + draw(seed, 3));
    return shape_of(n, in, c, k, kernel, stride, pad, 1, 1);
}

/* Few channels of x and whole vectors of channels of y, as in the first layer of a network; images
 * of any size. */
static shape draw_thin(uint64_t *seed, int threads)
{
    (void)threads;
    int64_t kernel[2], pad[2], stride[2], in[2], side = 1 + draw(seed, 7);
    for (int i = 0; i < 2; i++) {
        kernel[i] = draw(seed, 2) ? side : 1 + draw(seed, 7);
        pad[i] = draw(seed, kernel[i]);
        stride[i] = 1 + draw(seed, 2) * draw(seed, kernel[i]);
        int64_t least = kernel[i] > 2 * pad[i] ? kernel[i] - 2 * pad[i] : 1;
        in[i] = least + draw(seed, (int64_t)1 << draw(seed, 8));
    }
    int64_t n = 1 + draw(seed, 3), c = 1 + draw(seed, 4), k = 32 * (1 + draw(seed, 3));
    return shape_of(n, in, c, k, kernel, stride, pad, 1, 1);
}

/* Depthwise, 3x3: few channels, whole vectors, tails, sometimes many channels, or no images. */
static shape draw_depthwise(uint64_t *seed, int threads)
{
    (void)threads;
    int64_t c = draw(seed, 10) ? 1 + draw(seed, 50) : 500 + draw(seed, 31), by = 1 + draw(seed, 2);
    int64_t one = draw(seed, 2), most = c > 100 ? 7 : 20, n = draw(seed, 4);
    int64_t kernel[] = {3, 3}, stride[] = {by, by}, pad[] = {one, one}, in[2];
    for (int i = 0; i < 2; i++)
        in[i] = 3 - 2 * one + draw(seed, most - 2 + 2 * one);
    c = draw(seed, 3) ? c : (c + 15) / 16 * 16;
    return shape_of(n, in, c, c, kernel, stride, pad, 1, c);
}

static bool may_be_winograd(const shape *s)
{
    const int64_t *w = s->dims[W];
    return w[0] % 16 == 0 && w[1] == 3 && w[2] == 3 && w[3] % 16 == 0 && w[3] == s->dims[X][3] &&
           strncmp(s->options, "stride=1,1 ", 11) == 0;
}

/* Values between -1 and 1. New. */
static lt_tensor *random_tensor(lt_ctx *ctx, lt_dtype dtype, const shape *s, int role,
                                uint64_t *seed)
{
    lt_tensor *x = lt_tensor_new(ctx, dtype, s->ndim[role], s->dims[role]);
    if (!x)
        FAIL("%s", lt_errmsg());
    for (int64_t i = 0; i < x->count; i++) {
        double value = (double)draw(seed, 2001) / 1000 - 1;
        lt_convert((char *)x->data + i * (int64_t)lt_dtype_bytes(dtype), dtype, &value, LT_F64, 1);
    }
    return x;
}

/* A result before it is written: NaNs. New. */
static lt_tensor *poisoned(lt_ctx *ctx, lt_dtype dtype, const shape *s, int role)
{
    lt_tensor *x = lt_tensor_full(ctx, dtype, s->ndim[role], s->dims[role], NAN);
    if (!x)
        FAIL("%s", lt_errmsg());
    return x;
}

/* A case with inputs in dtype and the gradients of w and b in grad_dtype. */
static run make_run(lt_ctx *ctx, const shape *s, lt_dtype dtype, lt_dtype grad_dtype,
                    uint64_t *seed)
{
    run r = {.add = {false}};
    bool bias = draw(seed, 2);
    r.at[VALUES][Y] = poisoned(ctx, dtype, s, Y);
    r.at[GRADS][Y] = random_tensor(ctx, dtype, s, Y, seed);
    for (int i = X; i <= B; i++) {
        lt_dtype of_grad = i == X ? dtype : grad_dtype;
        if (i == B && !bias)
            continue;
        r.at[VALUES][i] = random_tensor(ctx, dtype, s, i, seed);
        r.add[i] = draw(seed, 3) == 0;
        r.at[GRADS][i] = r.add[i] ? random_tensor(ctx, of_grad, s, i, seed)
                                  : poisoned(ctx, of_grad, s, i);
    }
    return r;
}

/* Copies a run to f64, with absolute values if `sizes`. Results that are not added to are
 * poison. */
static run copy_run(lt_ctx *ctx, const run *from, bool sizes)
{
    run r = {.add = {from->add[X], from->add[W], from->add[B]}};
    for (int k = 0; k < SETS * ROLES; k++) {
        lt_tensor *x = from->at[k / ROLES][k % ROLES];
        if (!x)
            continue;
        lt_tensor *y = r.at[k / ROLES][k % ROLES] = lt_tensor_new(ctx, LT_F64, x->ndim, x->dims);
        if (!y)
            FAIL("%s", lt_errmsg());
        lt_convert(y->data, LT_F64, x->data, (lt_dtype)x->dtype, (size_t)x->count);
        for (int64_t i = 0; i < x->count && sizes; i++)
            ((double *)y->data)[i] = fabs(((double *)y->data)[i]);
    }
    return r;
}

static void free_run(run *r)
{
    for (int k = 0; k < SETS * ROLES; k++)
        lt_release(r->at[k / ROLES][k % ROLES]);
}

/* ==== Running and comparing =================================================================== */

/* Runs forward or backward with a kernel of conv2d. */
static lt_status run_kernel(lt_ctx *ctx, const shape *s, run *r, bool backward, bool fast)
{
    const lt_def *def = lt_op_find(ctx, "conv2d");
    const lt_op *op = def->op;
    lt_opt opts[LT_MAX_OPT];
    CHECK_OK(lt_opts_parse(&def->schema, s->options, opts));
    lt_call c = {.ctx = ctx,
                 .op = op,
                 .schema = &def->schema,
                 .opt = opts,
                 .n_in = 3,
                 .in = r->at[VALUES],
                 .out = &r->at[VALUES][Y],
                 .d_out = &r->at[GRADS][Y],
                 .d_in = r->at[GRADS],
                 .threads = ctx->threads,
                 .save = op->save};
    for (int i = X; i <= B; i++)
        c.add |= (uint64_t)r->add[i] << i;
    size_t bytes = op->scratch ? op->scratch(&c, backward) : 0;
    c.scratch = bytes ? lt__alloc(ctx, bytes) : NULL;
    if (bytes > 0)
        memset(c.scratch, 0xff, bytes);
    lt_status status = fast ? (backward ? op->fast_bwd : op->fast_fwd)(&c)
                            : (backward ? op->bwd : op->fwd)(&c);
    lt__free(ctx, c.scratch, bytes);
    return status;
}

/* The root mean square of x, which is in f64. */
static double typical(const lt_tensor *x)
{
    double squares = 0;
    for (int64_t i = 0; i < x->count; i++)
        squares += ((double *)x->data)[i] * ((double *)x->data)[i];
    return sqrt(squares / (double)x->count);
}

/* Compares got with truth. The allowed error is `by`, rounding and a fraction of sizes. */
static void compare(const char *what, const shape *s, lt_tensor *got, lt_tensor *truth, double by,
                    lt_tensor *sizes, double fraction)
{
    double rounding = got->dtype == LT_BF16 ? 0x1p-8 : 0x1p-23;
    for (int64_t i = 0; i < got->count; i++) {
        double value, want = ((double *)truth->data)[i], size = ((double *)sizes->data)[i];
        CHECK_OK(lt_item(got, i, &value));
        if (!(fabs(value - want) <= by + rounding * fabs(want) + fraction * size))
            FAIL("%s, x %s, w %s, %s: element %lld is %.9g, not %.9g (terms %.3g)", what,
                 lt_describe(truth, (char[96]){0}, 96), s->options, lt_dtype_name(got->dtype),
                 (long long)i, value, want, size);
    }
}

static bool same_bytes(const lt_tensor *a, const lt_tensor *b)
{
    return memcmp(a->data, b->data, (size_t)a->count * lt_dtype_bytes((lt_dtype)a->dtype)) == 0;
}

/* Checks that the results in r are those of `before`, bit by bit. */
static void check_untouched(const shape *s, const run *r, const run *before, bool backward)
{
    for (int i = X; i <= Y; i++) {
        lt_tensor *now = r->at[backward ? GRADS : VALUES][i];
        if (now && !same_bytes(now, before->at[backward ? GRADS : VALUES][i]))
            FAIL("%s: tensor %d was written before the kernel declined", s->options, i);
    }
}

/* Copies a run. */
static run duplicate(lt_ctx *ctx, const run *from)
{
    run r = *from;
    for (int k = 0; k < SETS * ROLES; k++) {
        lt_tensor *x = from->at[k / ROLES][k % ROLES];
        if (x)
            r.at[k / ROLES][k % ROLES] =
                lt_tensor_from(ctx, (lt_dtype)x->dtype, x->ndim, x->dims, x->data);
    }
    return r;
}

/* Runs one direction in r with the fast kernel. Returns 1, or 0 if the kernel declined. */
static int check_direction(lt_ctx *ctx, const shape *s, run *r, const run *truth, const run *sizes,
                           bool backward)
{
    static const char *const names[] = {"dx", "dw", "db"};
    run before = duplicate(ctx, r);
    lt_status status = run_kernel(ctx, s, r, backward, true);
    if (status == LT_EUNSUPPORTED)
        check_untouched(s, r, &before, backward);
    else
        CHECK_OK(status);
    free_run(&before);
    if (status == LT_EUNSUPPORTED)
        return 0;
    double by = r->at[VALUES][X]->dtype == LT_BF16 && may_be_winograd(s) ? WINOGRAD : 0;
    lt_tensor *const *got = r->at[backward], *const *want = truth->at[backward];
    lt_tensor *const *size = sizes->at[backward];
    if (!backward)
        compare("y", s, got[Y], want[Y], by * typical(want[Y]), size[Y], FRACTION);
    for (int i = X; i <= B && backward; i++)
        if (got[i])
            compare(names[i], s, got[i], want[i], i == B ? 0 : by * typical(want[i]), size[i],
                    got[i]->dtype == LT_BF16 && r->add[i] ? 0x1p-8 : FRACTION);
    return 1;
}

/* Checks one shape with random values. Counts in taken[] the directions, forward and backward, that
 * the fast kernels accepted. */
static void check_shape(lt_ctx *ctx, lt_ctx *plain, const shape *s, lt_dtype dtype,
                        lt_dtype grad_dtype, uint64_t *seed, int taken[2])
{
    run r = make_run(ctx, s, dtype, grad_dtype, seed);
    run truth = copy_run(plain, &r, false), sizes = copy_run(plain, &r, true);
    for (int backward = 0; backward < 2; backward++) {
        CHECK_OK(run_kernel(plain, s, &truth, backward, false));
        CHECK_OK(run_kernel(plain, s, &sizes, backward, false));
        taken[backward] += check_direction(ctx, s, &r, &truth, &sizes, backward);
    }
    free_run(&r);
    free_run(&truth);
    free_run(&sizes);
}

/* Checks `cases` random shapes for each number of threads. */
static void walk(shape (*draw_one)(uint64_t *, int), int cases, lt_dtype dtype, lt_dtype grad_dtype,
                 uint64_t seed)
{
    int taken[2] = {0};
    cases /= test_stride(2);
    for (int threads = 1; threads <= MAX_THREADS; threads++) {
        lt_ctx *ctx = ctx_with((lt_config){.threads = threads, .poison = true});
        lt_ctx *plain = ctx_with((lt_config){.threads = 2, .reference = true, .poison = true});
        for (int i = 0; i < cases; i++) {
            shape s = draw_one(&seed, threads);
            check_shape(ctx, plain, &s, dtype, grad_dtype, &seed, taken);
        }
        lt_ctx_free(ctx);
        lt_ctx_free(plain);
    }
    if (taken[0] == 0 && taken[1] == 0)
        SKIP("%s: no fast kernel on this CPU", lt_dtype_name(dtype));
    char backend[64];
    bool known = strncmp(lt_backend(NULL, backend, sizeof backend), "oneDNN", 6) == 0;
    if (known && (dtype == LT_F32 || strstr(backend, "AVX512"))) /* else bf16 is declined */
        CHECK(taken[0] > cases && taken[1] > cases);             /* of 3 * cases */
}

TEST(fast_f32) { walk(draw_shape, CASES, LT_F32, LT_F32, 11); }
TEST(fast_bf16_with_gradients_of_weights_in_f32) { walk(draw_shape, CASES, LT_BF16, LT_F32, 12); }
TEST(fast_bf16) { walk(draw_shape, CASES, LT_BF16, LT_BF16, 13); }

TEST(fast_f32_of_many_pixels) { walk(draw_many_pixels, LARGE_CASES, LT_F32, LT_F32, 15); }
TEST(fast_f32_of_few_channels) { walk(draw_thin, CASES, LT_F32, LT_F32, 19); }
TEST(fast_f32_of_many_tiles) { walk(draw_many_tiles, LARGE_CASES, LT_F32, LT_F32, 17); }
TEST(fast_bf16_of_many_tiles) { walk(draw_many_tiles, LARGE_CASES, LT_BF16, LT_F32, 18); }
TEST(fast_bf16_of_many_pixels) { walk(draw_many_pixels, LARGE_CASES, LT_BF16, LT_F32, 16); }

TEST(fast_f32_of_depthwise) { walk(draw_depthwise, CASES, LT_F32, LT_F32, 22); }
TEST(fast_bf16_of_depthwise) { walk(draw_depthwise, CASES, LT_BF16, LT_BF16, 23); }
TEST(fast_bf16_of_depthwise_with_gradients_in_f32)
{
    walk(draw_depthwise, CASES, LT_BF16, LT_F32, 24);
}

/* Empty sums and no sums at all: kernels for whole vectors of channels accept 0 channels too. */
TEST(fast_without_channels)
{
    static const int64_t of[3][2] = {{0, 64}, {64, 0}, {0, 0}};
    uint64_t seed = 19;
    int taken[2] = {0};
    lt_ctx *ctx = ctx_with((lt_config){0}), *plain = ctx_with((lt_config){.reference = true});
    for (int i = 0; i < 12; i++) {
        int64_t side = i & 1 ? 3 : 1, by = i & 2 ? 2 : 1, n = lt_threads(ctx) * 4 * by * by + 1;
        int64_t kernel[] = {side, side}, stride[] = {by, by}, pad[] = {side / 2, side / 2};
        shape s =
            shape_of(n, (int64_t[]){16, 16}, of[i / 4][0], of[i / 4][1], kernel, stride, pad, 1, 1);
        check_shape(ctx, plain, &s, LT_F32, LT_F32, &seed, taken);
        check_shape(ctx, plain, &s, LT_BF16, LT_F32, &seed, taken);
    }
    lt_ctx_free(ctx);
    lt_ctx_free(plain);
}

/* Checks that the fast kernel declines, so that the reference runs on f32 copies. */
static void check_declined(const shape *s, bool forward)
{
    uint64_t seed = 14;
    lt_ctx *ctx = ctx_with((lt_config){0});
    run r = make_run(ctx, s, LT_BF16, LT_F32, &seed), before = duplicate(ctx, &r);
    for (int backward = !forward; backward < 2; backward++) {
        CHECK_EQ(run_kernel(ctx, s, &r, backward, true), LT_EUNSUPPORTED);
        check_untouched(s, &r, &before, backward);
    }
    free_run(&r);
    free_run(&before);
    lt_ctx_free(ctx);
}

TEST(bf16_without_images_is_declined)
{
    shape s = {.dims = {{0, 5, 5, 3}, {4, 3, 3, 3}, {4}, {0, 3, 3, 4}}, .ndim = {4, 4, 1, 4}};
    check_declined(&s, true);
}

/* oneDNN 3.2 computes a wrong gradient of w. The gradient of x must not be added before that is
 * known. */
TEST(bf16_of_images_narrower_than_a_stride_is_declined)
{
    shape depthwise = {.dims = {{1, 12, 1, 16}, {16, 2, 4, 1}, {16}, {1, 11, 1, 16}},
                       .ndim = {4, 4, 1, 4},
                       .options = "stride=1,2 pad=0,2 groups=16"};
    shape dense = {.dims = {{2, 1, 1, 32}, {16, 3, 3, 32}, {16}, {2, 1, 1, 16}},
                   .ndim = {4, 4, 1, 4},
                   .options = "stride=2 pad=1"};
    check_declined(&depthwise, false);
    check_declined(&dense, false);
}

/* On CPUs with AMX, oneDNN 3.2 computes wrong results forward; for the second shape only
 * sometimes. */
TEST(bf16_shapes_that_are_wrong_with_amx)
{
    shape even = {.dims = {{2, 7, 8, 48}, {48, 3, 4, 48}, {48}, {2, 3, 3, 48}},
                  .ndim = {4, 4, 1, 4},
                  .options = "stride=2 pad=0"};
    shape rows = {.dims = {{3, 16, 19, 32}, {48, 2, 5, 32}, {48}, {3, 5, 15, 48}},
                  .ndim = {4, 4, 1, 4},
                  .options = "stride=3,1 pad=0"};
    uint64_t seed = 21;
    int taken[2] = {0};
    lt_ctx *ctx = ctx_with((lt_config){.threads = 2});
    lt_ctx *plain = ctx_with((lt_config){.reference = true});
    for (int i = 0; i < 10; i++) {
        check_shape(ctx, plain, &even, LT_BF16, LT_F32, &seed, taken);
        check_shape(ctx, plain, &rows, LT_BF16, LT_F32, &seed, taken);
    }
    CHECK_EQ(taken[0], 0);
    lt_ctx_free(ctx);
    lt_ctx_free(plain);
}
