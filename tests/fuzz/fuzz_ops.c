/* fuzz_ops.c - calls ops with random shapes, dtypes, values and options, and with little memory.
 * Each call must return a result, or an error message that begins with the op's name. Nothing may
 * overflow or leak.
 *
 * Bytes 0 and 1 select a case of tests/ops/cases.txt, which is valid; byte 2 selects how it is run.
 * Each following triple changes one thing about the call: a dimension, a dtype, the number of
 * inputs, or an option.
 */
#define main test_main /* libFuzzer has its own */
#include "tests/ops/cases.h"
#undef main

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_IN = 20, MAX_BYTES = 1 << 18 }; /* inputs of a call; one block of memory */

static const int64_t integers[] = {0,
                                   1,
                                   2,
                                   3,
                                   4,
                                   5,
                                   7,
                                   8,
                                   9,
                                   64,
                                   255,
                                   256,
                                   257,
                                   -1,
                                   -2,
                                   -3,
                                   -4,
                                   -8,
                                   -9,
                                   1 << 16,
                                   INT32_MAX,
                                   INT32_MAX + 1LL,
                                   INT32_MIN,
                                   INT32_MIN - 1LL,
                                   1LL << 32,
                                   1LL << 40,
                                   1LL << 58,
                                   1LL << 59,
                                   (1LL << 59) - 1,
                                   1LL << 60,
                                   1LL << 62,
                                   INT64_MAX / 2,
                                   INT64_MAX - 1,
                                   INT64_MAX,
                                   INT64_MIN,
                                   INT64_MIN + 1,
                                   INT64_MIN + 8,
                                   INT64_MIN / 2};
static const double numbers[] = {0,     -0.0,   1,     -1,       0.5,       3,   1e-5, 0.9, 1e30,
                                 -1e30, 1e-320, 1e308, INFINITY, -INFINITY, NAN, -NAN, 1e19};
#define PICK(table, byte) (table)[(byte) % (sizeof(table) / sizeof *(table))]

typedef struct wild_call {
    const lt_def *def;
    int n_in;
    struct {
        bool absent;
        lt_dtype dtype;
        int ndim;
        int64_t dims[LT_MAX_DIMS];
    } in[MAX_IN];
    lt_opt opts[LT_MAX_OPT];
    bool wild_values; /* extremes instead of small numbers */
} wild_call;

static void must(bool promise, const char *what)
{
    if (promise)
        return;
    fprintf(stderr, "%s; the last message is \"%s\"\n", what, lt_errmsg());
    abort();
}

/* ==== Limited memory ========================================================================== */

static void *(*real_alloc)(lt_device *device, size_t bytes);

static void *alloc(lt_device *device, size_t bytes)
{
    return bytes <= MAX_BYTES ? real_alloc(device, bytes) : NULL;
}

/* A context with reference kernels, or with fast ones. Borrowed. */
static lt_ctx *context(bool reference)
{
    static lt_ctx *ctx[2];
    if (ctx[reference])
        return ctx[reference];
    lt_ctx *c = ctx[reference] =
        lt_open(&(lt_config){.threads = 8, .reference = reference, .poison = true});
    must(c != NULL, "lt_open failed");
    real_alloc = c->devices[0]->alloc;
    c->devices[0]->alloc = alloc;
    return c;
}

/* ==== Making a call =========================================================================== */

static void take_case(wild_call *w, lt_ctx *ctx, const op_case *c, lt_dtype dtype)
{
    w->def = lt_op_find(ctx, c->op);
    must(w->def != NULL, "a case has an unknown op");
    must(lt_opts_parse(&w->def->schema, c->options, w->opts) == LT_OK, "a case has bad options");
    w->n_in = c->n_in;
    for (int i = 0; i < c->n_in; i++) {
        w->in[i].dtype = is_float_kind(c->in[i].kind) ? dtype : dtype_of_kind(c->in[i].kind);
        w->in[i].ndim = c->in[i].ndim;
        memcpy(w->in[i].dims, c->in[i].dims, sizeof c->in[i].dims);
    }
}

static void change_option(wild_call *w, uint8_t which, uint8_t value)
{
    const lt_schema *s = &w->def->schema;
    if (s->n_opt == 0)
        return;
    int k = which % s->n_opt;
    lt_opt *opt = &w->opts[k];
    switch (opt->kind) {
    case LT_KIND_INTS:
        if (value >= 0xf8) { /* changes the number of values; all are equal to the first */
            opt->n = (uint8_t)(value & 7) + 1;
            for (int i = 1; i < opt->n; i++)
                opt->i[i] = opt->i[0];
        } else {
            opt->n = opt->n > 0 ? opt->n : 1;
            opt->i[which / s->n_opt % opt->n] = PICK(integers, value);
        }
        break;
    case LT_KIND_NUMBER:
        opt->n = 1;
        opt->f = PICK(numbers, value);
        break;
    case LT_KIND_DTYPE:
        opt->n = 1;
        opt->i[0] = value % LT_DTYPE_COUNT;
        break;
    case LT_KIND_BOOL:
        opt->n = 1;
        opt->i[0] = value & 1;
        break;
    default:
        opt->n = 1;
        opt->i[0] = value % 2;
        break; /* one of several words; each such option has at least two */
    }
}

static void change(wild_call *w, const uint8_t byte[3])
{
    int i = byte[1] % (w->n_in > 0 ? w->n_in : 1), ndim = w->in[i].ndim;
    int axis = ndim > 0 ? byte[1] / 8 % ndim : 0;
    int64_t *dims = w->in[i].dims, size = PICK(integers, byte[2]);
    switch (byte[0] % 12) {
    case 0: dims[axis] = size; break;
    case 1: /* makes the tensor empty, since only then can an axis be so long */
        dims[axis] = size;
        if (ndim > 1)
            dims[(axis + 1) % ndim] = 0;
        break;
    case 2: w->in[i].ndim = byte[2] % (LT_MAX_DIMS + 1); break;
    case 3: w->in[i].dtype = (lt_dtype)(byte[2] % LT_DTYPE_COUNT); break;
    case 4: w->in[i].absent = byte[2] & 1; break;
    case 5: /* adds copies of this input */
        for (int n = byte[2] % 20; n > 0 && w->n_in > 0 && w->n_in < MAX_IN; n--, w->n_in++)
            w->in[w->n_in] = w->in[i];
        break;
    case 6: w->n_in -= w->n_in > 0; break;
    default: change_option(w, byte[1], byte[2]); break;
    }
}

/* ==== Running it ============================================================================== */

/* New, or NULL if the tensor is invalid or too large. */
static lt_tensor *make_tensor(lt_ctx *ctx, const wild_call *w, int i)
{
    lt_tensor *x = lt_tensor_new(ctx, w->in[i].dtype, w->in[i].ndim, w->in[i].dims);
    bool is_float = lt__is_float(w->in[i].dtype);
    must(x || lt_errcode() == LT_EINVAL || lt_errcode() == LT_ENOMEM,
         "a tensor fails with another status");
    for (int64_t k = 0; x && k < lt_count(x); k++) {
        void *to = (char *)x->data + (size_t)k * lt_dtype_bytes(w->in[i].dtype);
        double small = (double)(k % 5) - (is_float ? 1 : 0), wild = PICK(numbers, (size_t)k);
        if (is_float || !w->wild_values)
            lt_convert(to, w->in[i].dtype, w->wild_values ? &wild : &small, LT_F64, 1);
        else
            lt_convert(to, w->in[i].dtype, &PICK(integers, (size_t)(k * 7 + 2)), LT_I64, 1);
    }
    if (x && is_float && !w->def->op->in_place)
        must(lt_set_requires_grad(x, true) == LT_OK, "a leaf cannot require a gradient");
    return x;
}

static void check_message(const wild_call *w)
{
    const char *name = w->def->schema.name;
    size_t n = strlen(name);
    must(strncmp(lt_errmsg(), name, n) == 0 && lt_errmsg()[n] == ':' &&
             strlen(lt_errmsg()) > n + 10,
         "a message does not begin with the op's name");
}

static void check_backward(lt_ctx *ctx, lt_tensor *const *out)
{
    for (int k = 0; k < LT_MAX_OUT && out[k]; k++) {
        if (!lt_requires_grad(out[k]))
            continue;
        lt_tensor *dy =
            lt_tensor_full(ctx, lt_tensor_dtype(out[k]), lt_ndim(out[k]), lt_dims(out[k]), 0.5);
        lt_status status = dy ? lt_backward(out[k], dy) : lt_errcode();
        must(status == LT_OK || status == LT_ENOMEM || status == LT_ENUMERIC,
             "backward fails after a successful forward");
        lt_release(dy);
    }
}

static void run(lt_ctx *ctx, const wild_call *w, bool backward)
{
    lt_tensor *in[MAX_IN] = {NULL}, *out[LT_MAX_OUT] = {NULL};
    bool made = true;
    for (int i = 0; i < w->n_in && made; i++)
        made = w->in[i].absent || (in[i] = make_tensor(ctx, w, i)) != NULL;
    if (made) {
        lt_status status = lt_apply(ctx, w->def, in, w->n_in, w->opts, out);
        must(status == LT_OK || status == LT_EINVAL || status == LT_EDATA || status == LT_ENOMEM,
             "a call fails with another status");
        if (status != LT_OK)
            check_message(w);
        else if (backward)
            check_backward(ctx, out);
    }
    lt_bn_stats_clear(ctx);
    for (int k = 0; k < LT_MAX_OUT; k++)
        lt_release(out[k]);
    for (int i = 0; i < w->n_in; i++)
        lt_release(in[i]);
}

/* Takes views, rows and elements of a tensor at arbitrary indices. */
static void run_core(lt_ctx *ctx, const wild_call *w)
{
    const int64_t a = w->opts[0].i[0], b = w->opts[1].i[0];
    double value;
    lt_tensor *x = w->n_in > 0 ? make_tensor(ctx, w, 0) : NULL;
    lt_tensor *view = x && w->n_in > 1 ? lt_view(x, w->in[1].ndim, w->in[1].dims) : NULL;
    lt_tensor *rows = x ? lt_rows(x, a, b) : NULL;
    must(!rows || (a >= 0 && b >= 0 && a + b <= lt_dim(x, 0)), "rows out of range");
    lt_status status = x ? lt_item(x, a, &value) : LT_OK;
    must(!x || (status == LT_OK) == (a >= 0 && a < lt_count(x)), "an element out of range");
    RELEASE(rows, view, x);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const lt_dtype floats[] = {LT_F32, LT_F64, LT_F16, LT_BF16};
    uint8_t head[3] = {0};
    int n;
    const op_case *cases = all_cases(&n);
    memcpy(head, data, size < 3 ? size : 3);
    const op_case *c = &cases[(head[0] + 256 * head[1]) % n];
    if (is_large(c))
        return 0;
    lt_ctx *ctx = context(head[2] & 1);
    size_t live = lt_memory_stats(ctx).live;
    wild_call w = {.wild_values = head[2] >> 1 & 1};
    take_case(&w, ctx, c, floats[head[2] >> 2 & 3]);
    for (size_t at = 3; at + 3 <= size && at < 3 + 16 * 3; at += 3)
        change(&w, data + at);
    lt_tape_set_first_row(lt_tape_current(ctx), head[2] >> 6 == 1 ? INT64_MAX : 0);
    if (head[2] >> 6 == 2)
        run_core(ctx, &w);
    else
        run(ctx, &w, head[2] >> 4 & 1);
    must(lt_memory_stats(ctx).live == live, "a call leaks");
    return 0;
}
