/* test_arguments.c - calls every op with random arguments. A wrong call must fail with the right
 * status and a message that begins with the op's name, without a crash or a leak. For a valid call,
 * reference and fast kernels must agree.
 *
 * Calls are mutations of the cases in cases.txt, or are generated from the signature: ranks, dims
 * (including 0), dtypes, counts of inputs, options. They depend on the number of the call only, so
 * failures are reproducible.
 */
#include <ctype.h>

#include "tests/ops/cases.h"

enum { CALLS = 300 };            /* per op */
enum { MAX_IN = LT_MAX_IN + 2 }; /* of a call; tests too many inputs as well */

/* ==== Random calls ============================================================================ */

typedef struct rolls {
    uint64_t call, n;
} rolls; /* random numbers: the number of the call, and how many were drawn */

static int64_t roll(rolls *r, int64_t sides)
{
    return (int64_t)(uniform(r->call, r->n++) * (double)sides);
}

typedef struct wild_call {
    const lt_def *def;
    int n_in;
    struct wild_input {
        bool absent;
        lt_dtype dtype;
        int ndim;
        int64_t dims[LT_MAX_DIMS];
        int64_t ids; /* integers are in [0, ids), or in [ids, 0] if it is negative */
    } in[MAX_IN];
    char options[256];
} wild_call;

/* One of option k's words, or an invalid word. */
static void make_word(rolls *r, const lt_schema *s, int k, char *word, size_t capacity)
{
    const char *at = s->opt[k].words;
    for (int64_t n = roll(r, 4); n > 0 && at[strcspn(at, "|,)")] == '|'; n--)
        at += strcspn(at, "|") + 1;
    snprintf(word, capacity, "%.*s%s", (int)strcspn(at, "|, )"), at, roll(r, 8) ? "" : "x");
}

/* Appends option k of the signature with a random value. */
static void make_option(rolls *r, const lt_schema *s, int k, char *text, size_t capacity)
{
    static const char *const numbers[] = {"0", "1", "0.5", "-1", "1e30", "nan", "inf", "3"};
    char value[64] = "";
    switch (s->opt[k].value.kind) {
    case LT_KIND_NUMBER: snprintf(value, sizeof value, "%s", numbers[roll(r, 8)]); break;
    case LT_KIND_BOOL: snprintf(value, sizeof value, "%s", roll(r, 2) ? "true" : "false"); break;
    case LT_KIND_DTYPE:
        snprintf(value, sizeof value, "%s", lt_dtype_name((lt_dtype)roll(r, LT_DTYPE_COUNT)));
        break;
    case LT_KIND_WORD: make_word(r, s, k, value, sizeof value); break;
    default:
        for (int64_t n = roll(r, 4); n >= 0; n--)
            snprintf(value + strlen(value), sizeof value - strlen(value), "%lld%s",
                     (long long)roll(r, 8) - 3, n ? "," : "");
    }
    snprintf(text + strlen(text), capacity - strlen(text), " %s=%s", s->opt[k].name, value);
}

static void make_call(rolls *r, wild_call *w)
{
    const lt_schema *s = &w->def->schema;
    w->n_in = s->variadic ? 1 + (int)roll(r, 4) : s->n_in - (int)roll(r, 2) * (s->n_in - s->min_in);
    for (int i = 0; i < w->n_in; i++) {
        w->in[i].dtype = roll(r, 4) ? LT_F32 : (lt_dtype)roll(r, LT_DTYPE_COUNT);
        w->in[i].ndim = (int)roll(r, 6);
        for (int k = 0; k < w->in[i].ndim; k++)
            w->in[i].dims[k] = roll(r, 5);
        w->in[i].ids = roll(r, 12) - 2;
    }
    for (int k = 0; k < s->n_opt; k++) {
        bool needed = !s->opt[k].optional && s->opt[k].same_as < 0 && s->opt[k].value.n == 0;
        if (needed || roll(r, 2))
            make_option(r, s, k, w->options, sizeof w->options);
    }
}

/* Copies the call of a case, which is valid. */
static void take_case(rolls *r, wild_call *w, const op_case *c)
{
    static const lt_dtype floats[] = {LT_F32, LT_F64, LT_F16, LT_BF16};
    lt_dtype dtype = floats[roll(r, 4)];
    w->n_in = c->n_in;
    snprintf(w->options, sizeof w->options, "%s", c->options);
    for (int i = 0; i < c->n_in; i++) {
        const char *kind = c->in[i].kind;
        w->in[i].dtype = is_float_kind(kind) ? dtype : dtype_of_kind(kind);
        w->in[i].ndim = c->in[i].ndim;
        memcpy(w->in[i].dims, c->in[i].dims, sizeof c->in[i].dims);
        w->in[i].ids = strncmp(kind, "ids", 3) == 0 ? atoi(kind + 3) : 2;
    }
}

/* Changes one property of the call. */
static void bend(rolls *r, wild_call *w)
{
    struct wild_input *in = &w->in[roll(r, w->n_in)];
    int axis = in->ndim ? (int)roll(r, in->ndim) : 0;
    switch (roll(r, 8)) {
    case 0: in->dims[axis] = roll(r, 5); break;
    case 1: in->dims[axis] += roll(r, 2) ? 1 : in->dims[axis] > 0 ? -1 : 0; break;
    case 2: in->ndim -= in->ndim > 0; break;
    case 3:
        if (in->ndim < LT_MAX_DIMS)
            in->dims[in->ndim++] = roll(r, 3);
        break;
    case 4: in->dtype = (lt_dtype)roll(r, LT_DTYPE_COUNT); break;
    case 5: in->ids = roll(r, 12) - 2; break;
    case 6: in->absent = true; break;
    default:
        if (w->def->schema.n_opt > 0) /* if an option is given twice, the last value counts */
            make_option(r, &w->def->schema, (int)roll(r, w->def->schema.n_opt), w->options,
                        sizeof w->options);
        else
            w->n_in += roll(r, 2) ? 1 : -1;
    }
}

/* ==== Running the calls ======================================================================= */

typedef struct answer {
    lt_status status, back;
    char message[512];
    block out[LT_MAX_OUT], grad[MAX_IN];
} answer;

static lt_tensor *wild_tensor(lt_ctx *ctx, const struct wild_input *in, uint64_t seed)
{
    block b = block_new(in->dtype, in->ndim, in->dims);
    for (int64_t k = 0; k < b.count; k++) {
        double u = uniform(seed, (uint64_t)k) * (double)in->ids;
        b.at[k] = lt__is_float(b.dtype) ? normal(seed, (uint64_t)k) : floor(u);
    }
    lt_tensor *x = block_tensor(ctx, &b, b.dtype);
    block_free(&b);
    return x;
}

static void run_wild(lt_ctx *ctx, const wild_call *w, answer *a)
{
    lt_tensor *in[MAX_IN] = {NULL}, *out[LT_MAX_OUT] = {NULL};
    lt_opt opts[LT_MAX_OPT];
    memset(a, 0, sizeof *a);
    for (int i = 0; i < w->n_in; i++) {
        in[i] = w->in[i].absent ? NULL : wild_tensor(ctx, &w->in[i], (uint64_t)i);
        if (in[i] && lt__is_float(w->in[i].dtype) && !w->def->op->in_place)
            CHECK_OK(lt_set_requires_grad(in[i], true));
    }
    a->status = lt_opts_parse(&w->def->schema, w->options, opts);
    if (a->status == LT_OK)
        a->status = lt_apply(ctx, w->def, in, w->n_in, opts, out);
    for (int k = 0; k < LT_MAX_OUT && a->status == LT_OK && out[k]; k++)
        a->out[k] = block_of(out[k]);
    if (a->status == LT_OK)
        a->back = run_backward(ctx, out);
    if (a->status != LT_OK || a->back != LT_OK)
        snprintf(a->message, sizeof a->message, "%s", lt_errmsg());
    for (int k = 0; k < LT_MAX_OUT; k++)
        lt_release(out[k]);
    for (int i = 0; i < w->n_in; i++) {
        if (in[i] && lt_grad(in[i]))
            a->grad[i] = block_of(lt_grad(in[i]));
        lt_release(in[i]);
    }
    CHECK_OK(lt_bn_stats_commit(ctx));
}

/* ==== Checking the results ==================================================================== */

static const char *show(const wild_call *w)
{
    static char text[1024];
    snprintf(text, sizeof text, "%s(", w->def->schema.name);
    for (int i = 0; i < w->n_in; i++) {
        size_t used = strlen(text);
        if (w->in[i].absent)
            snprintf(text + used, sizeof text - used, "NULL ");
        for (int k = 0; k < w->in[i].ndim && !w->in[i].absent; k++, used = strlen(text))
            snprintf(text + used, sizeof text - used, "%s%lld", k ? "x" : "",
                     (long long)w->in[i].dims[k]);
        snprintf(text + used, sizeof text - used, " %s, ", lt_dtype_name(w->in[i].dtype));
    }
    snprintf(text + strlen(text), sizeof text - strlen(text), ";%s)", w->options);
    return text;
}

/* Kernels may differ by rounding, and by which inf or NaN they give for extreme values. */
static bool near(const block *a, const block *b)
{
    double most = 1, tolerance = lt__is_half(a->dtype) ? 0.05 : 1e-3;
    if (!a->at || !b->at || a->dtype != b->dtype || !same_dims(a, b))
        return !a->at && !b->at;
    for (int64_t i = 0; i < a->count; i++)
        if (isfinite(a->at[i]))
            most = fmax(most, fabs(a->at[i]));
    for (int64_t i = 0; i < a->count; i++) {
        bool extreme = !isfinite(a->at[i]) && !isfinite(b->at[i]);
        if (!extreme && most < 1e20 && !(fabs(a->at[i] - b->at[i]) <= tolerance * most))
            return false;
    }
    return true;
}

static void check_answers(const wild_call *w, const answer *a, const answer *b)
{
    size_t name = strlen(w->def->schema.name);
    if (a->status != LT_OK) {
        if (a->status != LT_EINVAL && a->status != LT_EDATA)
            FAIL("%s: status '%s': %s", show(w), lt_status_text(a->status), a->message);
        if (strncmp(a->message, w->def->schema.name, name) != 0 || a->message[name] != ':' ||
            strlen(a->message) < name + 10)
            FAIL("%s: unexpected message \"%s\"", show(w), a->message);
    }
    if (a->back != LT_OK)
        FAIL("%s: forward succeeded, but backward failed: %s", show(w), a->message);
    if (a->status != b->status || a->back != b->back || strcmp(a->message, b->message) != 0)
        FAIL("%s: reference: %s \"%s\", fast: %s \"%s\"", show(w), lt_status_text(a->status),
             a->message, lt_status_text(b->status), b->message);
    for (int k = 0; k < LT_MAX_OUT; k++)
        if (!near(&a->out[k], &b->out[k]))
            FAIL("%s: reference and fast kernel differ in output %d", show(w), k);
    for (int i = 0; i < MAX_IN; i++)
        if (!near(&a->grad[i], &b->grad[i]))
            FAIL("%s: reference and fast kernel differ in the gradient of input %d", show(w), i);
}

static void free_answer(answer *a)
{
    for (int k = 0; k < LT_MAX_OUT; k++)
        block_free(&a->out[k]);
    for (int i = 0; i < MAX_IN; i++)
        block_free(&a->grad[i]);
}

static void try_call(lt_ctx *reference, lt_ctx *fast, const wild_call *w, int *right)
{
    answer a, b;
    size_t live = lt_memory_stats(reference).live;
    run_wild(reference, w, &a);
    if (lt_memory_stats(reference).live != live)
        FAIL("%s: leaked %lld bytes", show(w),
             (long long)lt_memory_stats(reference).live - (long long)live);
    run_wild(fast, w, &b);
    check_answers(w, &a, &b);
    *right += a.status == LT_OK;
    free_answer(&a);
    free_answer(&b);
}

static void try_op(const char *op)
{
    lt_ctx *reference = lt_open(&(lt_config){.reference = true, .threads = 1, .poison = true});
    lt_ctx *fast = lt_open(&(lt_config){.threads = 2, .poison = true});
    CHECK(reference && fast);
    const lt_def *def = lt_op_find(reference, op);
    int n, own = 0, right = 0, at[MAX_CASES];
    const op_case *cases = all_cases(&n);
    for (int i = 0; i < n; i++)
        if (strcmp(cases[i].op, op) == 0 && !is_large(&cases[i]))
            at[own++] = i;
    for (int call = 0; call < CALLS; call++) {
        rolls r = {.call = (uint64_t)def->id * CALLS + (uint64_t)call};
        wild_call w = {.def = def};
        if (own > 0 && roll(&r, 4)) {
            take_case(&r, &w, &cases[at[roll(&r, own)]]);
            for (int64_t bends = roll(&r, 3); bends > 0 && w.n_in > 0; bends--)
                bend(&r, &w);
        } else {
            make_call(&r, &w);
        }
        try_call(reference, fast, &w, &right);
    }
    if (right < CALLS / 20 || right > CALLS * 19 / 20)
        FAIL("%s: %d of %d random calls were valid; expected from 5 to 95 percent", op, right,
             CALLS);
    lt_ctx_free(reference);
    lt_ctx_free(fast);
}

#define X(name)                                                                                    \
    TEST(name) { try_op(#name); }
#include "ops/list.h"
LT_OP_LIST(X)
#undef X

/* ==== Messages ================================================================================ */

/* Makes tensors of ones from a list such as "2x3 f32; 4 i64". Returns their number. */
static int tensors_from(lt_ctx *ctx, const char *text, lt_tensor **in)
{
    int n = 0;
    while (*text) {
        block b = {.count = 1};
        char dtype[8];
        int used = 0;
        while (isdigit((unsigned char)*text)) {
            char *end;
            b.dims[b.ndim++] = strtoll(text, &end, 10);
            text = end + (*end == 'x');
        }
        if (sscanf(text, " %7[a-z0-9]%n", dtype, &used) != 1)
            FAIL("'%s' is not a list of tensors", text);
        in[n++] = lt_tensor_full(ctx, (lt_dtype)lt_dtype_find(dtype), b.ndim, b.dims, 1);
        text += used + strspn(text + used, "; ");
    }
    return n;
}

#define THREE "4 f32; 4 f32; 4 f32"
#define FIVE THREE "; 4 f32; 4 f32"
#define IMAGES "2x8x8x3 f32; 4x3x3x3 f32"
#define WIDE "0x500000000000000000 f32; 0x500000000000000000 f32; 0x500000000000000000 f32; "

TEST(exact_messages)
{
    static const struct {
        const char *op, *options, *in, *message; /* after the op's name */
    } wrong[] = {
        {"conv2d", "", "32x32x32x3 f32; 64x3x3x64 f32",
         "w has 64 input channels, but x has 3 (x 32x32x32x3 f32, w 64x3x3x64 f32)"},
        {"conv2d", "strides=2", IMAGES, "unknown option 'strides' (did you mean 'stride'?)"},
        {"conv2d", "stride=0", IMAGES, "stride must be at least 1, but is 0"},
        {"conv2d", "stride=9223372036854775807", IMAGES,
         "stride must be at most 2147483647, but is 9223372036854775807"},
        {"conv2d", "pad=2147483648", IMAGES, "pad must be at most 2147483647, but is 2147483648"},
        {"conv2d", "dilation=1,9223372036854775807", "2x8x8x3 f32; 4x1x1x3 f32",
         "dilation must be at most 2147483647, but is 9223372036854775807"},
        {"conv2d", "stride=-9223372036854775808", IMAGES,
         "stride must be at least 1, but is -9223372036854775808"},
        {"conv2d", "stride=9223372036854775808", IMAGES,
         "option 'stride' must be integers such as 2 or 2,1, but is '9223372036854775808'"},
        {"max_pool2d", "kernel=2 stride=1,9223372036854775807", "2x8x8x3 f32",
         "stride must be at most 2147483647, but is 9223372036854775807"},
        {"avg_pool2d", "kernel=9223372036854775807", "2x8x8x3 f32",
         "the kernel, 9223372036854775807x9223372036854775807 with dilation 1x1, is larger than "
         "x padded to 8x8 (x 2x8x8x3 f32, pad 0x0)"},
        {"matmul", "", "1099511627776x0 f32; 0x1099511627776 f32",
         "x 1099511627776x0 f32 times y 0x1099511627776 f32 is too large"},
        {"cat", "axis=1", WIDE WIDE WIDE WIDE WIDE WIDE "0x500000000000000000 f32",
         "the sum of the lengths along axis 2 is too large"},
        {"conv2d", "stride=fast", IMAGES,
         "option 'stride' must be integers such as 2 or 2,1, but is 'fast'"},
        {"conv2d", "", "32x32 f32; 4x3x3x3 f32",
         "x must have 4 axes (n, h, w, c), but has 2 (32x32 f32)"},
        {"conv2d", "", "2x8x8x3 f32; 4x3x3x3 f32; 5 f32",
         "b must have one value per output channel (4), but is 5 f32"},
        {"conv2d", "groups=2", IMAGES,
         "groups 2 must divide the 3 channels of x and the 4 output channels of w (x 2x8x8x3 "
         "f32, w 4x3x3x3 f32)"},
        {"add", "", "2x3 f32; 2x4 f32",
         "x is 2x3 f32 and y is 2x4 f32, which do not broadcast: axis 1 from the end has 3 and 4"},
        {"add", "", "2x3 f32; 2x3 i64", "x is f32, y is i64; cast one of them, e.g. y to f32"},
        {"add", "", "2x3 f32", "tensor y is missing"},
        {"add", "", "3 f32; 3 f32; 3 f32", "expected at most 2 tensors, got 3"},
        {"add", "axis=1", "3 f32; 3 f32", "unknown option 'axis' (it has no options)"},
        {"matmul", "", "2x3 f32; 4x5 f32",
         "y must have 3 rows, one for each column of x, but has 4 (x 2x3 f32, y 4x5 f32)"},
        {"linear", "", "2x3 f32; 4x5 f32",
         "w has 5 input features, but x has 3 (x 2x3 f32, w 4x5 f32)"},
        {"reshape", "", "2x3 f32", "option 'shape' is missing"},
        {"reshape", "shape=5,2", "2x3 f32",
         "x (2x3 f32) has 6 elements, which do not fill a shape of 10"},
        {"cat", "axis=0", "2x3 f32; 2x4 f32",
         "tensor 2 is 2x4 f32, but the first is 2x3 f32; only axis 1 may differ"},
        {"sum", "axis=2", "2x3 f32", "axis 3 is out of range for the 2 axes of x (2x3 f32)"},
        {"sum", "axis=-3", "2x3 f32", "axis -3 is out of range for the 2 axes of x (2x3 f32)"},
        {"sum", "axis=0,0", "2x3 f32", "axis contains axis 1 twice"},
        {"slice", "axis=0 first=1 last=5", "2x3 f32",
         "2 to 6 is not a range of axis 1 of x (2x3 f32), which has 2"},
        {"batch_norm", "train=true", "1x3 f32; 3 f32; 3 f32; 3 f32; 3 f32",
         "train=true requires more than one value per channel, but x has one (1x3 f32); use a "
         "larger batch or train=false"},
        {"batch_norm", "act=rellu", "2x3 f32; 3 f32; 3 f32; 3 f32; 3 f32",
         "option 'act' must be none, relu or relu6, but is 'rellu' (did you mean 'relu'?)"},
        {"batch_norm", "", "2x3 f32; 3 f32; 3 f32; 3 f32; 3 f32; 2x1 f32",
         "residual must have the shape of x (2x3), but is 2x1 f32"},
        {"batch_norm", "", "2x3 f32; 3 f32; 3 f32; 3 f32; 3 f32; 2x3 f64",
         "x is f32, residual is f64; cast one of them, e.g. residual to f32"},
        {"relu", "", "2 i64", "x must have a float dtype, but is i64; cast it, e.g. to f32"},
        {"dropout", "p=2", "2 f32", "p must be a number from 0 to 1, but is 2"},
        {"cast", "dtype=f99", "2 f32", "option 'dtype' must be a dtype such as f32, but is 'f99'"},
        {"cross_entropy", "", "2x1 f32; 2 i64",
         "label number 1 is 1, but x has 1 classes (labels start at 0)"},
        {"cross_entropy", "", "2x3 f32; 2 f32",
         "labels must have an integer dtype (i64, i32 or u8), but is f32; cast it, e.g. to i64"},
        {"embedding", "", "1x3 f32; 2 i64", "id number 1 is 1, but w has 1 rows (ids start at 0)"},
        {"mse_loss", "", "2x3 f32; 3 f32", "y must have the shape of x (2x3), but is 3 f32"},
        {"max", "", "0x3 f32", "axis 1 of x (0x3 f32) must not be empty"},
        {"where", "", "2 f32; 2 f32; 2 f32", "cond must be u8, as from a comparison, but is f32"},
        {"dc_grad", "lam=-1", THREE, "lam must be at least 0, but is -1"},
        {"dc_grad", "lam=1 rho=1", THREE, "rho must be at least 0 and below 1, but is 1"},
        {"dc_grad", "lam=1 weight_decay=-1", THREE, "weight_decay must be at least 0, but is -1"},
        {"dc_grad", "lam=1 adaptive=true", THREE,
         "tensor ms is missing; adaptive=true requires it"},
        {"dc_grad", "lam=1", "4 f32; 5 f32; 4 f32",
         "w must have the same number of elements as g (4 f32), but is 5 f32"},
        {"gap_grad", "lr=-1 correction=1", FIVE, "lr must be at least 0, but is -1"},
        {"gap_grad", "lr=1 correction=0", FIVE,
         "correction must be above 0 and at most 1, but is 0"},
        {"gap_grad", "lr=1 correction=1.5", FIVE,
         "correction must be above 0 and at most 1, but is 1.5"},
        {"gap_grad", "lr=1 correction=1 rho=-1", FIVE,
         "rho must be at least 0 and below 1, but is -1"},
        {"gap_grad", "lr=1 correction=1 weight_decay=-1", FIVE,
         "weight_decay must be at least 0, but is -1"},
        {"ddc_step", "lr=-1 r=1 q=1", FIVE "; 3 f64", "lr must be at least 0, but is -1"},
        {"ddc_step", "lr=1 r=1 q=1 momentum=-1", FIVE "; 3 f64",
         "momentum must be at least 0, but is -1"},
        {"ddc_step", "lr=1 r=1 q=1 weight_decay=-1", FIVE "; 3 f64",
         "weight_decay must be at least 0, but is -1"},
        {"ddc_step", "lr=1 r=2 q=1", FIVE "; 3 f64", "r must be a number from 0 to 1, but is 2"},
        {"ddc_step", "lr=1 r=1 q=-1", FIVE "; 3 f64", "q must be a number from 0 to 1, but is -1"},
        {"ddc_step", "lr=1 r=1 q=1 lam=-1", FIVE "; 3 f64", "lam must be at least 0, but is -1"},
        {"ddc_step", "lr=1 r=1 q=1 cap=-1", FIVE "; 3 f64", "cap must be at least 0, but is -1"},
        {"ddc_step", "lr=1 r=1 q=1 rho=1", FIVE "; 3 f64",
         "rho must be at least 0 and below 1, but is 1"},
        {"ddc_step", "lr=1 r=1 q=1", FIVE "; 4 f64", "stats must be 3 floats, but is 4 f64"},
        {"ddc_step", "lr=1 r=1 q=1", FIVE "; 3 i64", "stats must be 3 floats, but is 3 i64"},
        {"ordered_step", "lr=1 late=0 momentum=1", THREE,
         "momentum must be at least 0 and below 1, but is 1"},
        {"ordered_step", "lr=1 late=-1", THREE, "late must be at least 0, but is -1"},
        {"ordered_step", "lr=1 late=1,2", THREE, "late must be one integer, but got 2"},
        {"ordered_step", "lr=-1 late=1", THREE, "lr must be at least 0, but is -1"},
        {"ordered_step", "lr=1 late=1 weight_decay=-1", THREE,
         "weight_decay must be at least 0, but is -1"},
    };
    lt_ctx *ctx = lt_open(NULL);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        lt_tensor *in[LT_MAX_LIST] = {NULL}, *out[LT_MAX_OUT];
        char message[512];
        int n = tensors_from(ctx, wrong[i].in, in);
        const lt_def *def = lt_op_find(ctx, wrong[i].op);
        lt_opt opts[LT_MAX_OPT];
        lt_status status = lt_opts_parse(&def->schema, wrong[i].options, opts);
        CHECK(status != LT_OK || lt_apply(ctx, def, in, n, opts, out) != LT_OK);
        snprintf(message, sizeof message, "%s: %s", wrong[i].op, wrong[i].message);
        CHECK_STR(lt_errmsg(), message);
        CHECK_EQ(lt_errcode(), strstr(message, "number 1 is") ? LT_EDATA : LT_EINVAL);
        while (n-- > 0)
            lt_release(in[n]);
    }
    CHECK(lt_runv(ctx, "max_poool2d", "", NULL, 0) == NULL);
    CHECK_STR(lt_errmsg(), "unknown op 'max_poool2d' (did you mean 'max_pool2d'?)");
    lt_ctx_free(ctx);
}

TEST(invalid_labels_and_ids_are_data_errors)
{
    lt_ctx *ctx = lt_open(NULL);
    const int64_t labels[] = {0, 2, -1};
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 2, (int64_t[]){3, 3}, 0);
    lt_tensor *ids = lt_tensor_from(ctx, LT_I64, 1, (int64_t[]){3}, labels);
    CHECK(lt_run(ctx, "cross_entropy", NULL, x, ids, NULL) == NULL);
    CHECK_EQ(lt_errcode(), LT_EDATA);
    CHECK_STR(lt_errmsg(), "cross_entropy: label number 3 is -1, but x has 3 classes (labels start "
                           "at 0)");
    CHECK(lt_run(ctx, "embedding", NULL, x, ids, NULL) == NULL);
    CHECK_EQ(lt_errcode(), LT_EDATA);
    CHECK_STR(lt_errmsg(), "embedding: id number 3 is -1, but w has 3 rows (ids start at 0)");
    lt_release(x);
    lt_release(ids);
    lt_ctx_free(ctx);
}

TEST(a_nested_call_that_fails_is_named)
{
    lt_ctx *ctx = lt_open(NULL);
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 2, (int64_t[]){3, 3}, 0);
    CHECK(lt_run(ctx, "relu", NULL, lt_run(ctx, "liner", NULL, x, x, NULL), NULL) == NULL);
    CHECK_EQ(lt_errcode(), LT_EINVAL);
    CHECK_STR(lt_errmsg(), "relu: tensor x is missing; the last error was: unknown op 'liner' (did "
                           "you mean 'linear'?)");
    CHECK(lt_run(ctx, "mean", NULL, lt_run(ctx, "add", NULL, x, NULL), NULL) == NULL);
    CHECK(strstr(lt_errmsg(), "mean: tensor x is missing; the last error was: add: tensor y is "
                              "missing; the last error was: relu: tensor x") == lt_errmsg());
    lt_release(x);
    lt_ctx_free(ctx);
}
