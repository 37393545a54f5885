/* test_batch_norm.c - compares the fast batch norm with the reference on random shapes: few
 * channels, odd numbers of channels, more channels than a vector has lanes, and sizes that leave
 * the last wide row incomplete; with and without residual and activation, in training and
 * evaluation, in f32, and in bf16 with f32 parameters.
 *
 * The truth is the reference kernel in f64 on the same, rounded inputs. Memory is poisoned.
 * Backward runs on leaves, whose gradients are written once and then added to, or on results of
 * other ops, whose gradients may overwrite dy.
 */
#include "tests/ops/cases.h"

enum { X, SCALE, SHIFT, MEAN, VAR, RESIDUAL, INPUTS }; /* and results: */
enum { Y = INPUTS, DY = INPUTS, MOVED_MEAN, MOVED_VAR, DX, DSCALE, DSHIFT, DRESIDUAL, FOUND };

static const char *const found_name[] = {
    [Y] = "y",           [MOVED_MEAN] = "mean", [MOVED_VAR] = "var",      [DX] = "dx",
    [DSCALE] = "dscale", [DSHIFT] = "dshift",   [DRESIDUAL] = "dresidual"};

typedef struct trial {
    int64_t dims[2];     /* (rows, channels) */
    bool residual, made; /* made: x and the residual are results of ops */
    char options[48];
    block given[INPUTS + 1]; /* and dy */
} trial;

/* ==== Trials ================================================================================== */

static int64_t draw(uint64_t *seed, int64_t n)
{
    return (int64_t)(uniform((*seed)++, 0) * (double)n);
}

static block random_block(uint64_t *seed, int ndim, const int64_t *dims, lt_dtype dtype)
{
    block b = block_new(LT_F64, ndim, dims);
    ++*seed;
    for (int64_t i = 0; i < b.count; i++)
        b.at[i] = normal(*seed << 32, (uint64_t)i);
    block_round(&b, dtype);
    return b;
}

/* x, residual and dy in dtype, parameters in f32. */
static trial make_trial(uint64_t *seed, int64_t rows, int64_t channels, lt_dtype dtype)
{
    static const char *const acts[] = {"none", "relu", "relu6"};
    trial t = {.dims = {rows, channels}};
    t.residual = draw(seed, 2);
    t.made = draw(seed, 2);
    /* No relu6 in bf16 with a residual: where rounding raises y to 6, the gradient is 0, but the
     * true gradient is not. */
    int64_t kinds = t.residual && dtype != LT_F32 ? 2 : 3;
    snprintf(t.options, sizeof t.options, "train=%s act=%s", draw(seed, 3) ? "true" : "false",
             acts[draw(seed, kinds)]);
    for (int i = 0; i <= DY; i++) {
        bool large = i == X || i == RESIDUAL || i == DY;
        t.given[i] = large ? random_block(seed, 2, t.dims, dtype)
                           : random_block(seed, 1, &channels, LT_F32);
    }
    for (int64_t k = 0; k < channels; k++) {
        t.given[VAR].at[k] = 0.5 + fabs(t.given[VAR].at[k]);
        t.given[SCALE].at[k] *= 4; /* for values beyond 6 */
    }
    block_round(&t.given[VAR], LT_F32);
    block_round(&t.given[SCALE], LT_F32);
    return t;
}

static void free_trial(trial *t)
{
    for (int i = 0; i <= DY; i++)
        block_free(&t->given[i]);
}

static void pass(const trial *t, lt_tensor **leaf, lt_tensor *dy, block *y)
{
    lt_tensor *in[INPUTS];
    for (int i = 0; i < INPUTS; i++)
        in[i] = t->made && (i == X || i == RESIDUAL) ? made_of(leaf[i]) : lt_retain(leaf[i]);
    lt_tensor *out =
        lt_runv(lt_tensor_ctx(dy), "batch_norm", t->options, in, t->residual ? INPUTS : RESIDUAL);
    if (!out)
        FAIL("%s", lt_errmsg());
    for (int i = 0; i < INPUTS; i++)
        lt_release(in[i]);
    block_free(y);
    *y = block_of(out);
    CHECK_OK(lt_backward(out, dy));
    lt_release(out);
}

/* Runs the trial with x, residual and dy in dtype and the parameters in param_dtype. */
static void run(lt_ctx *ctx, const trial *t, lt_dtype dtype, lt_dtype param_dtype,
                block found[FOUND])
{
    lt_tensor *in[INPUTS + 1];
    memset(found, 0, FOUND * sizeof *found);
    for (int i = 0; i <= DY; i++)
        in[i] = block_tensor(ctx, &t->given[i], t->given[i].ndim == 2 ? dtype : param_dtype);
    for (int i = 0; i < INPUTS; i++)
        if (i != MEAN && i != VAR)
            CHECK_OK(lt_set_requires_grad(in[i], true));
    pass(t, in, in[DY], &found[Y]);
    pass(t, in, in[DY], &found[Y]); /* the gradients accumulate */
    CHECK_OK(lt_bn_stats_commit(ctx));
    found[MOVED_MEAN] = block_of(in[MEAN]);
    found[MOVED_VAR] = block_of(in[VAR]);
    found[DX] = block_of(lt_grad(in[X]));
    found[DSCALE] = block_of(lt_grad(in[SCALE]));
    found[DSHIFT] = block_of(lt_grad(in[SHIFT]));
    if (t->residual)
        found[DRESIDUAL] = block_of(lt_grad(in[RESIDUAL]));
    for (int i = 0; i <= DY; i++)
        lt_release(in[i]);
}

static void free_found(block found[FOUND])
{
    for (int i = Y; i < FOUND; i++)
        block_free(&found[i]);
}

/* ==== Checking the results ==================================================================== */

/* Elements in bf16 are rounded, gradients twice, because they accumulate. The error of an f32 sum
 * of n terms grows with sqrt(n), even if the terms cancel. */
static void check_result(const trial *t, lt_dtype dtype, const block *truth, const block *found)
{
    for (int i = Y; i < FOUND; i++) {
        double squares = 0, relative = found[i].dtype == LT_BF16 ? 0x1p-7 : 0x1p-20;
        for (int64_t k = 0; k < truth[i].count; k++)
            squares += truth[i].at[k] * truth[i].at[k];
        double typical = sqrt(squares / (double)truth[i].count);
        if (i == DSCALE || i == DSHIFT)
            typical = fmax(typical, sqrt((double)t->dims[0]));
        for (int64_t k = 0; k < truth[i].count; k++) {
            double want = truth[i].at[k], got = found[i].at[k];
            if (!(fabs(got - want) <= relative * fabs(want) + 0x1p-17 * typical))
                FAIL("%lldx%lld %s, %s%s%s: %s[%lld] is %.9g, not %.9g", (long long)t->dims[0],
                     (long long)t->dims[1], lt_dtype_name(dtype), t->options,
                     t->residual ? ", residual" : "", t->made ? ", made" : "", found_name[i],
                     (long long)k, got, want);
        }
    }
}

static void check_same(const block *a, const block *b)
{
    for (int i = Y; i < FOUND; i++)
        CHECK(!a[i].at || memcmp(a[i].at, b[i].at, (size_t)a[i].count * sizeof *a[i].at) == 0);
}

typedef struct contexts {
    lt_ctx *truth, *one, *two;
} contexts;

static contexts open_all(void)
{
    return (contexts){ctx_with((lt_config){.reference = true, .threads = 2, .poison = true}),
                      ctx_with((lt_config){.threads = 1, .poison = true}),
                      ctx_with((lt_config){.threads = 2, .poison = true})};
}

static void close_all(contexts c)
{
    lt_ctx_free(c.truth);
    lt_ctx_free(c.one);
    lt_ctx_free(c.two);
}

static void try_shape(contexts c, uint64_t *seed, int64_t rows, int64_t channels, lt_dtype dtype)
{
    block truth[FOUND], one[FOUND], two[FOUND];
    trial t = make_trial(seed, rows, channels, dtype);
    run(c.truth, &t, LT_F64, LT_F64, truth);
    run(c.one, &t, dtype, LT_F32, one);
    run(c.two, &t, dtype, LT_F32, two);
    check_result(&t, dtype, truth, one);
    check_same(one, two);
    free_found(truth);
    free_found(one);
    free_found(two);
    free_trial(&t);
}

TEST(random_shapes)
{
    static const int64_t channels[] = {1, 2, 3, 7, 16, 17, 24, 31, 64, 65, 127, 128, 129, 160, 300};
    enum { N = sizeof channels / sizeof *channels };
    uint64_t seed = 1;
    contexts c = open_all();
    for (int i = 0; i < 16 * N; i++) {
        int64_t of_row = channels[i % N], most = draw(&seed, 4) ? 3000 : 60000;
        try_shape(c, &seed, 6 + draw(&seed, most / of_row), of_row, i / N % 2 ? LT_BF16 : LT_F32);
    }
    close_all(c);
}

/* Groups consist of many blocks. Streaming stores write whole rows or parts of rows. */
TEST(a_long_batch)
{
    uint64_t seed = 77;
    contexts c = open_all();
    try_shape(c, &seed, 70003, 17, LT_F32);
    try_shape(c, &seed, 70003, 17, LT_BF16);
    try_shape(c, &seed, 1999, 601, LT_F32);
    try_shape(c, &seed, 17000, 64, LT_F32);
    close_all(c);
}

/* ==== Moments ================================================================================= */

/* Values with a large mean, and the first ones with another mean. */
TEST(a_large_mean_loses_no_precision)
{
    enum { ROWS = 600000, FIRST = 20000 };
    static const double mean_of[] = {0, 1000, -30};
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 2});
    block x = block_new(LT_F64, 2, (int64_t[]){ROWS, 3});
    for (int64_t i = 0; i < x.count; i++)
        x.at[i] = normal(5, (uint64_t)i) + mean_of[i % 3] + (i < 3 * FIRST ? 50 : 0);
    block_round(&x, LT_F32);
    lt_tensor *in[5] = {block_tensor(ctx, &x, LT_F32)};
    for (int i = SCALE; i <= VAR; i++)
        in[i] = lt_tensor_full(ctx, LT_F32, 1, (int64_t[]){3}, 1);
    lt_tensor *y = lt_runv(ctx, "batch_norm", "train=true momentum=1", in, 5);
    CHECK(y != NULL);
    CHECK_OK(lt_bn_stats_commit(ctx));
    for (int k = 0; k < 3; k++) {
        double sum = 0, squares = 0, mean, var;
        for (int64_t i = k; i < x.count; i += 3)
            sum += x.at[i];
        for (int64_t i = k; i < x.count; i += 3)
            squares += (x.at[i] - sum / ROWS) * (x.at[i] - sum / ROWS);
        CHECK_OK(lt_item(in[MEAN], k, &mean));
        CHECK_OK(lt_item(in[VAR], k, &var));
        CHECK_NEAR(mean, sum / ROWS, 1e-6 * (fabs(sum / ROWS) + 1));
        CHECK_NEAR(var, squares / (ROWS - 1), 1e-6 * squares / ROWS);
    }
    for (int i = 0; i < 5; i++)
        lt_release(in[i]);
    lt_release(y);
    block_free(&x);
    lt_ctx_free(ctx);
}

/* Rounding to bf16 could turn an f32 NaN whose low bits are all 1 into a zero, by overflow. */
TEST(a_NaN_parameter_stays_NaN)
{
    const uint32_t bits = 0x7fffffff;
    for (int channels = 3; channels <= 4; channels++) {
        lt_ctx *ctx = lt_open(NULL);
        lt_tensor *in[5] = {lt_tensor_full(ctx, LT_BF16, 2, (int64_t[]){5, channels}, 1)};
        for (int i = SCALE; i <= VAR; i++)
            in[i] = lt_tensor_full(ctx, LT_F32, 1, (int64_t[]){channels}, 2);
        for (int k = 0; k < channels; k++)
            memcpy((float *)lt_data(in[SCALE]) + k, &bits, sizeof bits);
        lt_tensor *y = lt_runv(ctx, "batch_norm", "", in, 5);
        CHECK(y != NULL);
        for (int i = 0; i < 5 * channels; i++) {
            double value;
            CHECK_OK(lt_item(y, i, &value));
            CHECK(isnan(value));
        }
        for (int i = 0; i < 5; i++)
            lt_release(in[i]);
        lt_release(y);
        lt_ctx_free(ctx);
    }
}

/* ==== Saved tensors =========================================================================== */

/* Returns the number of elements that y saves for backward besides x. *itself: whether
 * it saves y. */
static int64_t kept(lt_tensor *y, const lt_tensor *x, bool *itself)
{
    int64_t count = 0;
    *itself = false;
    for (int i = 0; lt_saved(y, i); i++) {
        lt_tensor *saved = lt_saved(y, i);
        *itself |= lt_data(saved) == lt_data(y);
        count += saved == x ? 0 : lt_count(saved);
    }
    return count;
}

TEST(y_is_saved_only_if_x_does_not_suffice)
{
    static const struct {
        const char *options;
        bool residual;
        int64_t kept;
    } wants[] = {{"", false, 3 * 8},
                 {"", true, 3 * 8},
                 {"act=relu", false, 4 * 8},
                 {"act=relu", true, 3 * 8 + 5 * 8}};
    lt_ctx *ctx = lt_open(NULL);
    lt_tensor *in[INPUTS];
    for (int i = 0; i < INPUTS; i++) {
        bool large = i == X || i == RESIDUAL;
        in[i] = lt_tensor_full(ctx, LT_F32, large ? 2 : 1,
                               large ? (int64_t[]){5, 8} : (int64_t[]){8}, 1);
    }
    CHECK_OK(lt_set_requires_grad(in[X], true));
    for (int i = 0; i < 4; i++) {
        bool itself;
        lt_tensor *y =
            lt_runv(ctx, "batch_norm", wants[i].options, in, wants[i].residual ? INPUTS : RESIDUAL);
        CHECK(y != NULL);
        CHECK_EQ(kept(y, in[X], &itself), wants[i].kept);
        CHECK_EQ(itself, wants[i].kept > 4 * 8);
        lt_release(y);
    }
    for (int i = 0; i < INPUTS; i++)
        lt_release(in[i]);
    lt_ctx_free(ctx);
}

/* Backward reads the statistics of the first shard after others were merged into them. */
TEST(merging_does_not_change_the_statistics_of_a_shard)
{
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 1});
    lt_tensor *x[6];
    lt_bn_stats merged;
    for (int i = 0; i < 6; i++)
        x[i] = lt_tensor_full(ctx, LT_F32, 1, (int64_t[]){3}, i);
    CHECK_OK(lt_bn_stats_add(ctx, x[0], x[1], x[2], x[3], 4, 0.1));
    CHECK_OK(lt_bn_stats_add(ctx, x[0], x[1], x[4], x[5], 4, 0.1));
    CHECK(lt_bn_stats_at(ctx, 0, &merged));
    CHECK_NEAR(((const float *)lt_data(merged.mean))[0], 3, 0);
    CHECK_NEAR(((const float *)lt_data(merged.var))[0], 5, 0);
    for (int i = 2; i < 6; i++)
        CHECK_NEAR(((const float *)lt_data(x[i]))[0], i, 0);
    lt_bn_stats_clear(ctx);
    for (int i = 0; i < 6; i++)
        lt_release(x[i]);
    lt_ctx_free(ctx);
}

TEST(the_count_of_a_shard_is_checked)
{
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 1});
    lt_tensor *x[4];
    for (int i = 0; i < 4; i++)
        x[i] = lt_tensor_full(ctx, LT_F32, 1, (int64_t[]){3}, 1);
    CHECK_FAILS(lt_bn_stats_add(ctx, x[0], x[1], x[2], x[3], -1, 0.1), LT_EINVAL,
                "batch norm statistics: count must be at least 0, but is -1");
    CHECK_OK(lt_bn_stats_add(ctx, x[0], x[1], x[2], x[3], INT64_MAX - 5, 0.1));
    CHECK_FAILS(lt_bn_stats_add(ctx, x[0], x[1], x[2], x[3], 6, 0.1), LT_EINVAL,
                "batch norm statistics: count must be at most 5, or the sum overflows, but is 6");
    CHECK_OK(lt_bn_stats_add(ctx, x[0], x[1], x[2], x[3], 5, 0.1));
    CHECK_EQ(lt_bn_stats_pending(ctx), 1);
    lt_bn_stats_clear(ctx);
    for (int i = 0; i < 4; i++)
        lt_release(x[i]);
    lt_ctx_free(ctx);
}
