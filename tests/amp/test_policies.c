/* test_policies.c - the cast policy of every op, on the small cases of ops/cases.txt. The policy is
 * lt_op.cast, so a new op needs nothing here. */
#include "amp/amp.h"
#include "tests/ops/cases.h"

static const lt_dtype halves[] = {LT_F16, LT_BF16};

/* Calls fn for each small case with a float input, in contexts with autocast and without. Ops that
 * write their inputs are not cast. */
static void each_case(void (*fn)(lt_ctx *cast, lt_ctx *plain, const op_case *c))
{
    int n;
    const op_case *cases = all_cases(&n);
    lt_ctx *cast = lt_open(&(lt_config){.threads = 1}),
           *plain = lt_open(&(lt_config){.threads = 1});
    for (int i = 0; i < n; i++) {
        const lt_def *def = lt_op_find(plain, cases[i].op);
        bool floats = false;
        for (int k = 0; k < cases[i].n_in; k++)
            floats |= is_float_kind(cases[i].in[k].kind);
        if (floats && !def->op->in_place && !is_large(&cases[i]))
            fn(cast, plain, &cases[i]);
    }
    lt_ctx_free(cast);
    lt_ctx_free(plain);
}

typedef struct {
    lt_tensor *in[LT_MAX_IN], *out[LT_MAX_OUT];
} call;

static lt_status apply(lt_ctx *ctx, const op_case *c, call *k)
{
    const lt_def *def = lt_op_find(ctx, c->op);
    lt_opt opts[LT_MAX_OPT];
    CHECK_OK(lt_opts_parse(&def->schema, c->options, opts));
    lt_status status = lt_apply(ctx, def, k->in, c->n_in, opts, k->out);
    lt_bn_stats_clear(ctx);
    return status;
}

static void release(call *k)
{
    for (int i = 0; i < LT_MAX_IN; i++)
        lt_release(k->in[i]);
    for (int i = 0; i < LT_MAX_OUT; i++)
        lt_release(k->out[i]);
}

/* ==== Dtypes ================================================================================== */

/* An op under autocast gives what it gives without if the inputs are cast by hand. */
static void compare_outputs(const op_case *c, const call *got, const call *want)
{
    for (int k = 0; k < LT_MAX_OUT && want->out[k]; k++) {
        block a = block_of(got->out[k]), b = block_of(want->out[k]);
        if (a.dtype != b.dtype)
            FAIL("%s:%d: %s returns %s, not %s", CASES_PATH, c->line, c->op, lt_dtype_name(a.dtype),
                 lt_dtype_name(b.dtype));
        for (int64_t i = 0; i < b.count; i++)
            if (a.at[i] != b.at[i] && !(isnan(a.at[i]) && isnan(b.at[i])))
                FAIL("%s:%d: %s[%lld] is %g, not %g", CASES_PATH, c->line, c->op, (long long)i,
                     a.at[i], b.at[i]);
        block_free(&a);
        block_free(&b);
    }
}

/* The first float input is of dtype `first`, the others of `rest`. */
static void check_dtypes(lt_ctx *cast, lt_ctx *plain, const op_case *c, lt_cast_policy policy,
                         lt_dtype first, lt_dtype rest)
{
    call got = {.in = {NULL}}, want = {.in = {NULL}};
    lt_dtype half = lt_autocast(cast), next = first, widest = first;
    int floats = 0;
    for (int i = 0; i < c->n_in; i++)
        floats += is_float_kind(c->in[i].kind);
    if (floats > 1 && rest != half)
        widest = rest;
    for (int i = 0; i < c->n_in; i++) {
        block b = make_input(c, i);
        bool is_float = b.dtype == LT_F64;
        lt_dtype dtype = is_float ? next : b.dtype;
        got.in[i] = block_tensor(cast, &b, dtype);
        if (is_float) {
            block_round(&b, dtype);
            dtype = policy == LT_CAST_HALF     ? half
                    : policy == LT_CAST_F32    ? LT_F32
                    : policy == LT_CAST_WIDEST ? widest
                                               : next;
            next = rest;
        }
        want.in[i] = block_tensor(plain, &b, dtype);
        block_free(&b);
    }
    lt_status status = apply(plain, c, &want);
    char message[512];
    snprintf(message, sizeof message, "%s", lt_errmsg());
    CHECK_EQ(apply(cast, c, &got), status);
    if (status == LT_OK)
        compare_outputs(c, &got, &want);
    else
        CHECK_STR(lt_errmsg(), message);
    release(&got);
    release(&want);
}

static void check_policy(lt_ctx *cast, lt_ctx *plain, const op_case *c)
{
    lt_cast_policy policy = lt_op_find(plain, c->op)->op->cast;
    for (int i = 0; i < 2; i++) {
        lt_set_autocast(cast, halves[i]);
        check_dtypes(cast, plain, c, policy, LT_F32, LT_F32);
        check_dtypes(cast, plain, c, policy, halves[i], halves[i]);
        check_dtypes(cast, plain, c, policy, halves[i], LT_F32);
    }
}

TEST(each_op_runs_in_the_dtype_of_its_policy) { each_case(check_policy); }

/* ==== Extremes ================================================================================ */

/* Input i with the extremes of f16, or their magnitudes if the case wants positive numbers. */
static block extreme_input(const op_case *c, int i)
{
    static const double extremes[] = {65504, -65504, 65504, 0, 0x1p-24, -0x1p-24, 60000, -3, 1};
    block b = make_input(c, i);
    for (int64_t k = 0; b.dtype == LT_F64 && k < b.count; k++)
        b.at[k] = strcmp(c->in[i].kind, "positive") == 0 ? fabs(extremes[(k + i) % 9])
                                                         : extremes[(k + i) % 9];
    return b;
}

static void check_nan(const op_case *c, const char *what, lt_tensor *got, lt_tensor *want)
{
    block a = block_of(got), b = block_of(want);
    for (int64_t i = 0; i < a.count; i++)
        if (isnan(a.at[i]) && !isnan(b.at[i]))
            FAIL("%s:%d: %s %s: [%lld] is a NaN, not %g", CASES_PATH, c->line, c->op, what,
                 (long long)i, b.at[i]);
    block_free(&a);
    block_free(&b);
}

static bool all_finite(lt_tensor *x)
{
    block b = block_of(x);
    bool finite = true;
    for (int64_t i = 0; i < b.count; i++)
        finite &= isfinite(b.at[i]);
    block_free(&b);
    return finite;
}

/* Runs backward from the mean of the first output. */
static void go_back(lt_ctx *ctx, lt_tensor *y)
{
    lt_tensor *dy =
        lt_tensor_full(ctx, lt_tensor_dtype(y), lt_ndim(y), lt_dims(y), 1 / (double)lt_count(y));
    CHECK_OK(lt_backward(y, dy));
    lt_release(dy);
}

static void check_extremes(lt_ctx *cast, lt_ctx *plain, const op_case *c)
{
    call half = {.in = {NULL}}, full = {.in = {NULL}};
    lt_set_autocast(cast, LT_F16);
    for (int i = 0; i < c->n_in; i++) {
        block b = extreme_input(c, i);
        bool is_float = b.dtype == LT_F64;
        half.in[i] = block_tensor(cast, &b, is_float ? LT_F16 : b.dtype);
        full.in[i] = block_tensor(plain, &b, b.dtype);
        if (is_float) {
            CHECK_OK(lt_set_requires_grad(half.in[i], true));
            CHECK_OK(lt_set_requires_grad(full.in[i], true));
        }
        block_free(&b);
    }
    CHECK_OK(apply(plain, c, &full));
    CHECK_OK(apply(cast, c, &half));
    check_nan(c, "output", half.out[0], full.out[0]);
    if (lt_requires_grad(half.out[0]) && all_finite(half.out[0])) {
        go_back(cast, half.out[0]);
        go_back(plain, full.out[0]);
        for (int i = 0; i < c->n_in; i++)
            if (lt_grad(half.in[i]))
                check_nan(c, c->in[i].name, lt_grad(half.in[i]), lt_grad(full.in[i]));
    }
    release(&half);
    release(&full);
}

TEST(f16_gives_a_nan_only_where_f64_does) { each_case(check_extremes); }
