/* test_extremes.c - calls every op with extreme integers: as options, and as dimensions of empty
 * tensors. Each call gives a result or an error message that begins with the op's name.
 * UBSan watches the arithmetic of the shape rules and kernels.
 */
#include "tests/ops/cases.h"

static const int64_t extremes[] = {INT64_MIN, INT64_MIN + 1, INT32_MIN - 1LL, INT32_MIN,
                                   -65537,    65537,         INT32_MAX,       INT32_MAX + 1LL,
                                   1LL << 40, 1LL << 59,     INT64_MAX / 2,   INT64_MAX - 1,
                                   INT64_MAX};
enum { EXTREMES = sizeof extremes / sizeof *extremes, FEW_CASES = 4, SMALL_BLOCK = 1 << 20 };

static void *(*alloc_of_cpu)(lt_device *device, size_t bytes);

/* Refuses results of gigabytes. */
static void *alloc_small(lt_device *device, size_t bytes)
{
    return bytes <= SMALL_BLOCK ? alloc_of_cpu(device, bytes) : NULL;
}

static lt_ctx *open_small(bool reference)
{
    lt_ctx *ctx = ctx_with((lt_config){.reference = reference, .threads = 2, .poison = true});
    alloc_of_cpu = ctx->devices[0]->alloc;
    ctx->devices[0]->alloc = alloc_small;
    return ctx;
}

/* The call of a case, with some arguments changed. */
typedef struct call {
    const lt_def *def;
    const op_case *of;
    lt_opt opts[LT_MAX_OPT];
    int64_t dims[LT_MAX_IN][LT_MAX_DIMS];
} call;

static const char *show(const call *e)
{
    static char text[1024];
    snprintf(text, sizeof text, "%s:%d: %s(", CASES_PATH, e->of->line, e->of->op);
    for (int i = 0; i < e->of->n_in; i++)
        for (int k = 0; k < e->of->in[i].ndim; k++)
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%lld",
                     k > 0   ? "x"
                     : i > 0 ? ", "
                             : "",
                     (long long)e->dims[i][k]);
    for (int k = 0; k < e->def->schema.n_opt; k++)
        if (e->opts[k].kind == LT_KIND_INTS)
            for (int i = 0; i < e->opts[k].n; i++)
                snprintf(text + strlen(text), sizeof text - strlen(text), " %s=%lld",
                         e->def->schema.opt[k].name, (long long)e->opts[k].i[i]);
    return text;
}

static void run(lt_ctx *ctx, const call *e)
{
    lt_tensor *in[LT_MAX_IN] = {NULL}, *out[LT_MAX_OUT] = {NULL};
    size_t name = strlen(e->of->op), live = lt_memory_stats(ctx).live;
    bool made = true;
    for (int i = 0; i < e->of->n_in && made; i++) {
        lt_dtype dtype = is_float_kind(e->of->in[i].kind) ? LT_F32
                                                          : dtype_of_kind(e->of->in[i].kind);
        in[i] = lt_tensor_full(ctx, dtype, e->of->in[i].ndim, e->dims[i], 1);
        made = in[i] != NULL;
        if (in[i] && lt__is_float(dtype) && !e->def->op->in_place)
            CHECK_OK(lt_set_requires_grad(in[i], true));
    }
    lt_status status = made ? lt_apply(ctx, e->def, in, e->of->n_in, e->opts, out) : LT_OK;
    if (status != LT_OK && status != LT_EINVAL && status != LT_EDATA && status != LT_ENOMEM)
        FAIL("%s: '%s': %s", show(e), lt_status_text(status), lt_errmsg());
    if (status != LT_OK && (strncmp(lt_errmsg(), e->of->op, name) != 0 ||
                            lt_errmsg()[name] != ':' || strlen(lt_errmsg()) < name + 10))
        FAIL("%s: unexpected message \"%s\"", show(e), lt_errmsg());
    lt_status back = made && status == LT_OK ? run_backward(ctx, out) : LT_OK;
    if (back != LT_OK && back != LT_ENOMEM)
        FAIL("%s: forward succeeded, but backward failed: %s", show(e), lt_errmsg());
    lt_bn_stats_clear(ctx);
    for (int k = 0; k < LT_MAX_OUT; k++)
        lt_release(out[k]);
    for (int i = 0; i < e->of->n_in; i++)
        lt_release(in[i]);
    if (ctx->config.reference && lt_memory_stats(ctx).live != live) /* other kernels cache plans */
        FAIL("%s: leaked memory", show(e));
}

static void change_options(lt_ctx *ctx, const call *e)
{
    for (int k = 0; k < e->def->schema.n_opt; k++)
        for (int v = 0; e->opts[k].kind == LT_KIND_INTS && v < EXTREMES; v++) {
            call other = *e;
            lt_opt *opt = &other.opts[k];
            opt->n = opt->n > 0 ? opt->n : 1;
            opt->i[opt->n - 1] = extremes[v];
            run(ctx, &other);
            opt->i[0] = extremes[v];
            run(ctx, &other);
        }
}

/* Sets axis `large` of input i to `size` and axis `empty` to 0: first in this input alone, then in
 * all inputs, for all axes that had the same sizes as these two. */
static void change_two_dims(lt_ctx *ctx, const call *e, int i, int large, int empty, int64_t size)
{
    call alone = *e, all = *e;
    int64_t was_large = e->dims[i][large], was_empty = e->dims[i][empty];
    for (int k = 0; k < e->of->n_in; k++)
        for (int j = 0; j < e->of->in[k].ndim; j++)
            if (e->dims[k][j] == was_empty)
                all.dims[k][j] = 0;
            else if (e->dims[k][j] == was_large)
                all.dims[k][j] = size;
    alone.dims[i][empty] = all.dims[i][empty] = 0;
    alone.dims[i][large] = all.dims[i][large] = size;
    run(ctx, &alone);
    run(ctx, &all);
}

static void change_dims(lt_ctx *ctx, const call *e)
{
    for (int i = 0; i < e->of->n_in; i++)
        for (int large = 0; large < e->of->in[i].ndim; large++)
            for (int empty = 0; empty < e->of->in[i].ndim; empty++) {
                change_two_dims(ctx, e, i, large, empty, 65537);
                change_two_dims(ctx, e, i, large, empty, INT32_MAX + 1LL);
                change_two_dims(ctx, e, i, large, empty, INT64_MAX / 16); /* the largest count */
                change_two_dims(ctx, e, i, large, empty, INT64_MAX);
            }
}

TEST(extreme_integers)
{
    int n, seen = 0;
    const op_case *cases = all_cases(&n);
    for (int plain = 0; plain < 2; plain++) {
        lt_ctx *ctx = open_small(plain);
        for (int i = 0; i < n; i++) {
            seen = i > 0 && strcmp(cases[i].op, cases[i - 1].op) == 0 ? seen + 1 : 0;
            if (seen >= FEW_CASES || is_large(&cases[i]))
                continue;
            call e = {.def = lt_op_find(ctx, cases[i].op), .of = &cases[i]};
            CHECK_OK(lt_opts_parse(&e.def->schema, cases[i].options, e.opts));
            for (int k = 0; k < cases[i].n_in; k++)
                memcpy(e.dims[k], cases[i].in[k].dims, sizeof e.dims[k]);
            change_options(ctx, &e);
            change_dims(ctx, &e);
        }
        lt_ctx_free(ctx);
    }
}

/* lt_run() counts its arguments up to one more than any op accepts. */
TEST(more_tensors_than_any_op_accepts)
{
    lt_ctx *ctx = lt_open(NULL);
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 1, (int64_t[]){2}, 1);
#define FOUR x, x, x, x
#define SIXTEEN FOUR, FOUR, FOUR, FOUR
    CHECK(lt_run(ctx, "cat", "axis=0", SIXTEEN, SIXTEEN, SIXTEEN, SIXTEEN, x, NULL) == NULL);
    CHECK_STR(lt_errmsg(), "cat: expected at most 64 tensors, got 65");
    lt_tensor *y = lt_run(ctx, "cat", "axis=0", SIXTEEN, SIXTEEN, SIXTEEN, SIXTEEN, NULL);
    CHECK_EQ(lt_count(y), 128);
    lt_release(y);
    lt_release(x);
    lt_ctx_free(ctx);
}
