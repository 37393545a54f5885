/* check_ops.c - check_ops ROOT [--name=value]...: compares ops on a device with the CPU, for
 * tools/gpu_check. ROOT is the root of the repository.
 *
 *   --device=DEVICE   the device to check
 *   --layers          check the layers of tests/cuda/graphs.txt instead of tests/ops/cases.txt
 *   --small           skip large cases; make layers small
 *   --dtypes=N        use only the first N of f32, f16 and bf16
 *   --after=OP DTYPE  start after this op and dtype
 *   --peer=PREFIX     the expected results of the cases are in PREFIXf32.safetensors and so on,
 *                     which tests/oracle/make.py writes. Otherwise, the reference kernels compute
 *                     them in f64
 *
 * Prints lines of JSON: {"begin": "neg f32"} before each op and dtype, its row afterwards, and at
 * the end {"done": true}. After a crash, gpu_check continues with --after="neg f32".
 */
#define main test_main
#include "tests/ops/tolerance.h"
#undef main
#include <fcntl.h>
#include <unistd.h>

#include "ops/list.h"

#define GRAPHS_PATH "tests/cuda/graphs.txt"

/* A case, or a layer in the form of a case. */
typedef struct item {
    const char *op;   /* in the row: "depthwise" for a conv2d with groups */
    char name[48];    /* "line 7" or "x 2x56x56x64" */
    double terms[4];  /* of the sums in a layer's output and in the gradients of its inputs */
    const op_case *c; /* borrowed */
} item;

typedef struct row {
    const char *op;
    lt_dtype dtype;
    int items;
    const item *last;
    double worst; /* the largest error, relative to the allowed one */
    char where[96], other_bits[48], error[600];
} row;

enum { N_DTYPES = 3, MAX_ITEMS = MAX_CASES };
static const lt_dtype dtypes[N_DTYPES] = {LT_F32, LT_F16, LT_BF16};
static lt_ctx *reference, *cpu, *device;
static lt_file *peers[N_DTYPES]; /* or NULL */
static bool layers, small;
static item items[MAX_ITEMS];
static int n_items;

/* ==== Output ================================================================================== */

/* Prints ", "name": "text"", or nothing if text is empty. */
static void put(const char *name, const char *text)
{
    if (!*text)
        return;
    printf(", \"%s\": \"", name);
    for (; *text; text++)
        printf(*text == '"' || *text == '\\' ? "\\%c" : "%c", *text < ' ' ? ' ' : *text);
    printf("\"");
}

static void print_row(const row *r)
{
    printf("{\"name\": \"%s\", \"dtype\": \"%s\", \"cases\": %d", r->op, lt_dtype_name(r->dtype),
           r->items);
    if (isfinite(r->worst))
        printf(", \"worst\": %.17g", r->worst);
    put("where", r->where);
    put("other_bits", r->other_bits);
    put("error", r->error);
    printf("}\n");
}

static void print_log(void *ud, lt_log_level level, const char *line)
{
    (void)ud;
    if (level == LT_LOG_WARN)
        fprintf(stderr, "luatrain: %s\n", line);
}

/* ==== Checks ================================================================================== */

/* The inputs of an item and its upstream gradients, rounded to dtype. New. */
static values given_in(const item *it, lt_dtype dtype)
{
    const lt_op *op = lt_op_find(reference, it->c->op)->op;
    lt_ctx *ctx = layers ? cpu : reference;
    values v = {.same_input = false};
    result own;
    for (int i = 0; i < it->c->n_in; i++)
        v.part[IN + i] = make_input(it->c, i);
    if (has_gradients(op, it->c, &v)) {
        if (run_case(ctx, it->c, &v, layers ? LT_F32 : LT_F64, &own))
            make_dy(it->c, &own, &v);
        free_result(&own);
    }
    values given = rounded(&v, dtype);
    given.made = layers; /* so that they run once */
    free_values(&v);
    return given;
}

/* Replaces own results by PyTorch's. A gradient that is not in the file is zero, and an input that
 * is not there has not changed. */
static void trust_peer(lt_file *file, const op_case *c, result *truth)
{
    for (int part = 0; part < FOUND; part++) {
        block *own = &truth->part[part];
        char name[32];
        if (!own->at)
            continue;
        block theirs = fixture_block(file, c, part_name(c, part, name));
        if (theirs.at) {
            theirs.dtype = own->dtype;
            block_free(own);
            *own = theirs;
        } else if (part >= GRAD && part < AFTER) {
            memset(own->at, 0, (size_t)own->count * sizeof *own->at);
        }
    }
}

/* In a sum of n terms, each of the n partial sums is rounded. Their total error is about sqrt(n)
 * roundoffs of the result. Twice that is allowed, because the CPU's result has the same error. */
static margin margin_for_layer(const item *it, int part, lt_dtype dtype)
{
    double terms = it->terms[part < GRAD ? 0 : 1 + (part - GRAD) % 3];
    return (margin){.relative = 8 * roundoff(LT_F32) + (dtype == LT_F32 ? 0 : 2 * roundoff(dtype)),
                    .typical = 2 * (64 + sqrt(terms)) * roundoff(LT_F32)};
}

static void check_part(const item *it, int part, const block *got, const block *want, margin m,
                       row *r)
{
    char name[32];
    bool chosen = strstr(it->c->options, "dtype=") != NULL; /* by the case */
    double worst = INFINITY;
    part_name(it->c, part, name);
    if (got->at && same_dims(got, want))
        worst = deviation_of(got, want, m).worst;
    if (worst > r->worst) {
        r->worst = worst;
        snprintf(r->where, sizeof r->where, layers ? "%2$s of %1$s" : "%s, %s", it->name, name);
    }
    if (!*r->error && want->dtype == LT_F64 && got->dtype != r->dtype && !chosen)
        snprintf(r->error, sizeof r->error, "%s is %s", name, lt_dtype_name(got->dtype));
}

/* Checks the device's results, and that a second run has the same bits. */
static void check_results(const item *it, const values *v, const result *truth,
                          const result *wobble, row *r)
{
    const lt_op *op = lt_op_find(reference, it->c->op)->op;
    result got, again;
    bool ok = run_case(device, it->c, v, r->dtype, &got);
    ok = run_case(device, it->c, v, r->dtype, &again) && ok;
    if (!ok)
        snprintf(r->error, sizeof r->error, "%s: %s", it->name, lt_errmsg());
    for (int part = 0; part < FOUND && ok; part++)
        if (got.part[part].at &&
            deviation_of(&again.part[part], &got.part[part], (margin){0}).at >= 0)
            snprintf(r->other_bits, sizeof r->other_bits, "%s", it->name);
    if (!layers)
        third_of_grads(&got);
    for (int part = 0; part < (layers ? AFTER : FOUND) && ok; part++) {
        const block *g = &got.part[part], *w = &wobble->part[part];
        lt_dtype stored = g->dtype == LT_F64 ? LT_F32 : g->dtype;
        if (truth->part[part].at)
            check_part(it, part, g, &truth->part[part],
                       layers ? margin_for_layer(it, part, stored)
                              : margin_for(op, v, stored, part, w->at ? w : NULL),
                       r);
    }
    free_result(&got);
    free_result(&again);
}

/* Adds up the wobbles from each part alone. If all parts move at once, some moves cancel, and a
 * device may add in another order than the CPU. */
static bool add_wobbles(const op_case *c, const values *v, const result *truth, result *total)
{
    bool ok = true;
    for (int i = 0; i < GIVEN && ok; i++) {
        result one;
        if (!v->part[i].at || v->part[i].dtype != LT_F64)
            continue;
        ok = find_wobble(reference, c, v, truth, i, &one);
        for (int part = 0; part < FOUND && ok; part++) {
            block *sum = &total->part[part];
            for (int64_t k = 0; sum->at && k < sum->count; k++)
                one.part[part].at[k] += sum->at[k];
            block_free(sum);
            *sum = one.part[part];
            one.part[part].at = NULL;
        }
        free_result(&one);
    }
    return ok;
}

static void check_item(const item *it, lt_file *peer, row *r)
{
    values v = given_in(it, r->dtype);
    result truth, wobble = {.part = {{0}}};
    bool ok = run_case(layers ? cpu : reference, it->c, &v, layers ? LT_F32 : LT_F64, &truth);
    if (ok && !layers) {
        third_of_grads(&truth);
        ok = add_wobbles(it->c, &v, &truth, &wobble);
    }
    if (peer)
        trust_peer(peer, it->c, &truth);
    if (ok)
        check_results(it, &v, &truth, &wobble, r);
    else
        snprintf(r->error, sizeof r->error, "%s: %s", it->name, lt_errmsg());
    free_result(&truth);
    free_result(&wobble);
    free_values(&v);
}

static void check_op(row *r, lt_file *peer)
{
    for (int i = 0; i < n_items && !*r->error; i++) {
        const item *it = r->last = &items[i];
        if (strcmp(it->op, r->op) != 0 || (r->dtype != LT_F32 && has_note(it->c, "f32+f64")))
            continue;
        r->items++;
        check_item(it, peer, r);
    }
}

/* Checks an op in a dtype and prints the row. A failed CHECK, such as an error of the device when a
 * result is read, ends the op. */
static void walk(const char *op, int d)
{
    static row r;
    jmp_buf here;
    r = (row){.op = op, .dtype = dtypes[d]};
    printf("{\"begin\": \"%s %s\"}\n", op, lt_dtype_name(r.dtype));
    test_exit = &here;
    if (setjmp(here) == 0)
        check_op(&r, peers[d]);
    else
        snprintf(r.error, sizeof r.error, "%s: %s", r.last->name, lt_errmsg());
    if (!isfinite(r.worst) && !*r.error)
        snprintf(r.error, sizeof r.error, "not finite: %s", r.where);
    print_row(&r);
}

/* ==== Items =================================================================================== */

static void add_cases(void)
{
    int n;
    const op_case *cases = all_cases(&n);
    for (int i = 0; i < n; i++) {
        if (small && is_large(&cases[i]))
            continue;
        item *it = &items[n_items++];
        *it = (item){.op = cases[i].op, .c = &cases[i]};
        snprintf(it->name, sizeof it->name, "line %d", cases[i].line);
    }
}

/* Adds a layer whose x has the dims n, h, w, c. text: a line as in cases.txt. */
LT_PRINTF(5, 6)
static void add_layer(const char *op, const int dims[4], const double *terms, int n_terms,
                      const char *fmt, ...)
{
    static op_case cases[MAX_ITEMS];
    char text[400];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    read_case(&cases[n_items], text, n_items);
    item *it = &items[n_items];
    *it = (item){.op = op, .c = &cases[n_items++]};
    memcpy(it->terms, terms, (size_t)n_terms * sizeof *terms);
    snprintf(it->name, sizeof it->name, "x %dx%dx%dx%d", dims[0], dims[1], dims[2], dims[3]);
}

static int at_most(int value, int limit) { return small && value > limit ? limit : value; }

static void add_linear(int columns, int out)
{
    const int rows = small ? 3 : 64;
    columns = at_most(columns, 16), out = at_most(out, 16);
    add_layer("linear", (int[]){rows, 1, 1, columns}, (double[]){columns, out, rows, rows}, 4,
              "linear | x=normal(%d,%d), w=normal(%d,%d), b=normal(%d) | | -", rows, columns, out,
              columns, out);
}

/* Adds the layer in a line of graphs.txt, and after a 3x3 convolution the batch norm of its x. */
static void add_graph(const char *line)
{
    char op[16], bias[24] = "";
    int h, w, c, out, kh, kw, sh, sw, ph, pw, groups, has_bias;
    if (sscanf(line,
               "%15s x %dx%dx%d y %*dx%*dx%d kernel %dx%d stride %dx%d pad %dx%d dilation %*dx%*d "
               "groups %d bias %d",
               op, &h, &w, &c, &out, &kh, &kw, &sh, &sw, &ph, &pw, &groups, &has_bias) != 13)
        return;
    h = at_most(h, 14), w = at_most(w, 14), c = at_most(c, 16), out = at_most(out, 16);
    const int n = small ? 1 : 2, dims[4] = {n, h, w, c};
    if (strcmp(op, "conv2d") != 0) {
        kh = kh < h ? kh : h, kw = kw < w ? kw : w;
        add_layer(*op == 'm' ? "max_pool2d" : "avg_pool2d", dims, (double[]){kh * kw, kh * kw}, 2,
                  "%s | x=distinct(%d,%d,%d,%d) | kernel=%d,%d stride=%d,%d pad=%d,%d | -", op, n,
                  h, w, c, kh, kw, sh, sw, ph, pw);
        return;
    }
    const int area = kh * kw, pixels = n * h * w / (sh * sw);
    groups = groups > 1 ? c : 1;
    if (has_bias)
        snprintf(bias, sizeof bias, ", b=normal(%d)", out);
    add_layer(groups > 1 ? "depthwise" : "conv2d", dims,
              (double[]){area * c / groups, area * out / groups, pixels, pixels}, 4,
              "conv2d | x=normal(%d,%d,%d,%d), w=normal(%d,%d,%d,%d)%s | "
              "stride=%d,%d pad=%d,%d groups=%d | -",
              n, h, w, c, out, kh, kw, c / groups, bias, sh, sw, ph, pw, groups);
    if (groups == 1 && kh == 3)
        add_layer("batch_norm", dims, (double[]){1, 1, n * h * w, n * h * w}, 4,
                  "batch_norm | x=normal(%d,%d,%d,%d), scale=normal(%d), shift=normal(%d), "
                  "mean=normal(%d), var=positive(%d) | train=true | -",
                  n, h, w, c, c, c, c, c);
}

/* The convolutions, pools and batch norms of the networks, and their linear layers. */
static void add_layers(void)
{
    char line[200];
    FILE *f = fopen(GRAPHS_PATH, "r");
    while (f && fgets(line, sizeof line, f))
        add_graph(line);
    if (f)
        fclose(f);
    add_linear(2048, 1000);
    add_linear(1024, 1000);
    add_linear(4096, 4096);
}

/* ==== Main ==================================================================================== */

static const char *const op_names[] = {
#define X(name) #name,
    LT_OP_LIST(X)
#undef X
        NULL};
static const char *const layer_names[] = {"max_pool2d", "avg_pool2d", "batch_norm", "depthwise",
                                          NULL};

/* These call cuDNN and cuBLASLt, which take long to load, above all under compute-sanitizer. */
static const char *const last_names[] = {"matmul", "linear", "conv2d", NULL};

static bool is_in(const char *const *names, const char *name)
{
    while (*names && strcmp(*names, name) != 0)
        names++;
    return *names;
}

static bool has_items(const char *op)
{
    int i = 0;
    while (i < n_items && strcmp(items[i].op, op) != 0)
        i++;
    return i < n_items;
}

/* Walks these ops, each in n_dtypes dtypes, beginning after `*after` unless that is "". */
static void walk_all(const char *const *names, bool last, int n_dtypes, const char **after)
{
    for (; *names; names++)
        for (int d = 0; d < n_dtypes && has_items(*names) && is_in(last_names, *names) == last;
             d++) {
            char name[40];
            snprintf(name, sizeof name, "%s %s", *names, lt_dtype_name(dtypes[d]));
            if (!**after)
                walk(*names, d);
            else if (strcmp(*after, name) == 0)
                *after = "";
        }
}

/* The value of the option --name=value, "" for --name, or NULL. */
static const char *option(char **argv, const char *name)
{
    size_t n = strlen(name);
    for (; *argv; argv++)
        if (strncmp(*argv, name, n) == 0 && (!(*argv)[n] || (*argv)[n] == '='))
            return *argv + n + ((*argv)[n] == '=');
    return NULL;
}

static int fail(const char *why)
{
    fprintf(stderr, "luatrain: %s\n", why);
    return lt_errcode() ? lt_errcode() : 2;
}

int main(int argc, char **argv)
{
    const char *peer = option(argv, "--peer"), *after = option(argv, "--after");
    const char *count = option(argv, "--dtypes");
    const int n_dtypes = count ? atoi(count) : N_DTYPES;
    layers = option(argv, "--layers");
    small = option(argv, "--small");
    after = after ? after : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    reference = lt_open(&(lt_config){.reference = true});
    cpu = lt_open(NULL);
    device = lt_open(&(lt_config){.device = option(argv, "--device"), .poison = true});
    if (!reference || !cpu || !device)
        return fail(lt_errmsg());
    lt_set_log(device, print_log, NULL);
    for (int d = 0; peer && d < n_dtypes; d++) {
        char path[4096];
        snprintf(path, sizeof path, "%s%s.safetensors", peer, lt_dtype_name(dtypes[d]));
        if (!(peers[d] = lt_file_open(reference, path)))
            return fail(lt_errmsg());
    }
    int folder = open(".", O_RDONLY);
    if (argc < 2 || chdir(argv[1]) != 0)
        return fail("usage: check_ops ROOT [--name=value]...");
    if (layers)
        add_layers();
    else
        add_cases();
    if (fchdir(folder) != 0) /* variables may have relative paths */
        return fail("cannot return to the working folder");
    walk_all(layers ? layer_names : op_names, false, n_dtypes, &after);
    walk_all(layers ? last_names : op_names, true, n_dtypes, &after);
    printf("{\"done\": true}\n");
    for (int d = 0; d < N_DTYPES; d++)
        lt_file_close(peers[d]);
    lt_ctx_free(device);
    lt_ctx_free(cpu);
    lt_ctx_free(reference);
    return 0;
}
