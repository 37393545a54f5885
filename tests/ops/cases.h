/* cases.h - reads cases.txt and its fixture, for the tests of ops. Values are doubles outside any
 * context, so that a case can run in several contexts and dtypes. A block is a tensor of such
 * values. Paths are relative to the root of the repository, where tests run.
 */
#ifndef TESTS_OPS_CASES_H
#define TESTS_OPS_CASES_H

#include <stdlib.h>

#include "autograd/autograd.h"
#include "core/locale.h"
#include "core/tensor.h"
#include "ops/ops.h"
#include "tests/lt_test.h"

#define CASES_PATH "tests/ops/cases.txt"
#define FIXTURE_PATH "tests/oracle/ops.safetensors"

enum { MAX_CASES = 600 };

typedef struct block {
    lt_dtype dtype;
    int ndim;
    int64_t dims[LT_MAX_DIMS], count;
    double *at; /* NULL if there is no such tensor */
} block;

typedef struct op_case {
    char op[24], options[64], notes[160];
    int line, n_in;
    struct case_input {
        char name[16], kind[16];
        int ndim;
        int64_t dims[LT_MAX_DIMS];
    } in[LT_MAX_IN];
    char key[17]; /* prefix of its tensors in the fixture */
} op_case;

static inline lt_ctx *ctx_with(lt_config config)
{
    lt_ctx *ctx = lt_open(&config);
    if (!ctx)
        FAIL("%s", lt_errmsg());
    return ctx;
}

/* Returns -(-x), a result of ops, so that a kernel may write its gradient over that of the output.
 * New. */
static inline lt_tensor *made_of(lt_tensor *x)
{
    lt_tensor *minus = lt_run(lt_tensor_ctx(x), "neg", NULL, x, NULL);
    lt_tensor *same = lt_run(lt_tensor_ctx(x), "neg", NULL, minus, NULL);
    CHECK(same != NULL);
    lt_release(minus);
    return same;
}

/* ==== Blocks ================================================================================== */

static inline void block_free(block *b)
{
    free(b->at);
    b->at = NULL;
}

static inline block block_new(lt_dtype dtype, int ndim, const int64_t *dims)
{
    block b = {.dtype = dtype, .ndim = ndim, .count = 1};
    for (int i = 0; i < ndim; i++)
        b.count *= b.dims[i] = dims[i];
    b.at = malloc((size_t)(b.count + 1) * sizeof *b.at); /* + 1: never NULL */
    if (!b.at)
        FAIL("out of memory for %lld values", (long long)b.count);
    return b;
}

static inline block block_copy(const block *a)
{
    block b = block_new(a->dtype, a->ndim, a->dims);
    memcpy(b.at, a->at, (size_t)a->count * sizeof *b.at);
    return b;
}

static inline bool same_dims(const block *a, const block *b)
{
    bool same = a->ndim == b->ndim;
    for (int i = 0; same && i < a->ndim; i++)
        same = a->dims[i] == b->dims[i];
    return same;
}

static inline block block_of(lt_tensor *x)
{
    block b = block_new(lt_tensor_dtype(x), lt_ndim(x), lt_dims(x));
    block stored = block_new(b.dtype, b.ndim, b.dims);
    if (lt_read(x, stored.at) != LT_OK)
        FAIL("%s", lt_errmsg());
    lt_convert(b.at, LT_F64, stored.at, b.dtype, (size_t)b.count);
    block_free(&stored);
    return b;
}

/* Rounds the values to dtype. */
static inline void block_round(block *b, lt_dtype dtype)
{
    block stored = block_new(dtype, b->ndim, b->dims);
    lt_convert(stored.at, dtype, b->at, LT_F64, (size_t)b->count);
    lt_convert(b->at, LT_F64, stored.at, dtype, (size_t)b->count);
    b->dtype = dtype;
    block_free(&stored);
}

/* Returns the values as a tensor of dtype. New. */
static inline lt_tensor *block_tensor(lt_ctx *ctx, const block *b, lt_dtype dtype)
{
    block stored = block_new(dtype, b->ndim, b->dims);
    lt_convert(stored.at, dtype, b->at, LT_F64, (size_t)b->count);
    lt_tensor *x = lt_tensor_from(ctx, dtype, b->ndim, b->dims, stored.at);
    if (!x)
        FAIL("%s", lt_errmsg());
    block_free(&stored);
    return x;
}

/* ==== The table =============================================================================== */

/* Returns the trimmed field before the next '|', which it cuts off. Advances *text past the '|'. */
static inline char *next_field(char **text)
{
    char *field = *text + strspn(*text, " "), *end = field + strcspn(field, "|\n");
    *text = *end == '|' ? end + 1 : end;
    while (end > field && end[-1] == ' ')
        end--;
    *end = 0;
    return field;
}

/* FNV-1a. */
#define HASH_START 0xcbf29ce484222325
static inline uint64_t hash_text(uint64_t h, const char *text)
{
    for (; *text; text++)
        h = (h ^ (unsigned char)*text) * 0x100000001b3;
    return h;
}

/* Parses inputs such as "x=normal(2,3), y=ids7()". False on a syntax error. */
static inline bool read_inputs_of(op_case *c, const char *text)
{
    for (; *text; c->n_in++) {
        struct case_input *in = &c->in[c->n_in];
        int used = 0;
        if (c->n_in == LT_MAX_IN ||
            sscanf(text, " %15[^=]=%15[^(](%n", in->name, in->kind, &used) != 2)
            return false;
        text += used;
        while (*text != ')') {
            char *end;
            if (in->ndim == LT_MAX_DIMS)
                return false;
            in->dims[in->ndim++] = strtoll(text, &end, 10);
            if (end == text)
                return false;
            text = end + (*end == ',');
        }
        text++;
        text += strspn(text, ", ");
    }
    return true;
}

static inline void read_case(op_case *c, char *text, int line)
{
    char *field[5];
    uint64_t h = HASH_START;
    memset(c, 0, sizeof *c);
    for (int i = 0; i < 5; i++) {
        field[i] = next_field(&text);
        if (i < 4)
            h = hash_text(i > 0 ? hash_text(h, " | ") : h, field[i]);
    }
    snprintf(c->key, sizeof c->key, "%016llx", (unsigned long long)h);
    snprintf(c->op, sizeof c->op, "%s", field[0]);
    snprintf(c->options, sizeof c->options, "%s", field[2]);
    snprintf(c->notes, sizeof c->notes, "%s", field[4]);
    c->notes[strcspn(c->notes, ":")] = 0; /* the reason after the colon is for readers */
    c->line = line;
    if (!*field[3] || !read_inputs_of(c, field[1]))
        FAIL("%s:%d: a case reads: op | inputs | options | expression | notes", CASES_PATH, line);
}

/* Returns all *n cases in the order of the table. They live as long as the program. */
static inline const op_case *all_cases(int *n)
{
    static op_case cases[MAX_CASES];
    static int count;
    char text[1024];
    FILE *f = count ? NULL : fopen(CASES_PATH, "r");
    if (!count && !f)
        FAIL("%s cannot be opened; run this test in the root of the repository", CASES_PATH);
    for (int line = 1; f && fgets(text, sizeof text, f); line++) {
        if (*text == '#' || *text == '\n')
            continue;
        if (count == MAX_CASES)
            FAIL("%s has more than %d cases; raise MAX_CASES", CASES_PATH, MAX_CASES);
        read_case(&cases[count++], text, line);
    }
    if (f)
        fclose(f);
    *n = count;
    return cases;
}

static inline bool has_note(const op_case *c, const char *word)
{
    return strstr(c->notes, word) != NULL;
}

/* Large cases test vector loops and threads. They skip checks that small cases cover. */
static inline bool is_large(const op_case *c)
{
    bool large = false;
    for (int i = 0; i < c->n_in; i++) {
        int64_t count = 1;
        for (int k = 0; k < c->in[i].ndim; k++)
            count *= c->in[i].dims[k];
        large |= count > 4096;
    }
    return large;
}

/* ==== Values: the same as in make.py ========================================================== */

static inline bool is_float_kind(const char *kind)
{
    return strcmp(kind, "mask") != 0 && strncmp(kind, "ids", 3) != 0;
}

static inline lt_dtype dtype_of_kind(const char *kind)
{
    if (is_float_kind(kind))
        return LT_F64;
    if (strcmp(kind, "mask") == 0 || strstr(kind, "u8"))
        return LT_U8;
    return strstr(kind, "i32") ? LT_I32 : LT_I64;
}

/* The seed of the named values of a case: "x", "dy 0". */
static inline uint64_t seed_of(const op_case *c, const char *name)
{
    return hash_text(hash_text(hash_text(HASH_START, c->key), " "), name);
}

/* Number i of a sequence, in [0, 1): splitmix64 (Steele, Lea and Flood, 2014). */
static inline double uniform(uint64_t seed, uint64_t i)
{
    uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

/* Mean 0, standard deviation 1, from four uniform numbers. The operations give the same bits in
 * every language. */
static inline double normal(uint64_t seed, uint64_t i)
{
    double sum = uniform(seed, 4 * i) + uniform(seed, 4 * i + 1) + uniform(seed, 4 * i + 2) +
                 uniform(seed, 4 * i + 3);
    return (sum - 2) * 1.7320508075688772;
}

/* Element i of n values of a kind. */
static inline double value_of(const char *kind, uint64_t seed, int64_t i, int64_t n)
{
    static const double kinks[] = {-1, 0, 0, 1, 6};
    static const double special[] = {NAN, INFINITY, -INFINITY, 0, -1, 2};
    double u = uniform(seed, 4 * (uint64_t)i), v = uniform(seed, 4 * (uint64_t)i + 1);
    if (strcmp(kind, "normal") == 0)
        return normal(seed, (uint64_t)i);
    if (strcmp(kind, "offset") == 0)
        return normal(seed, (uint64_t)i) + 100;
    if (strcmp(kind, "wide") == 0)
        return normal(seed, (uint64_t)i) * 300;
    if (strcmp(kind, "positive") == 0)
        return 0.5 + 1.5 * u;
    if (strcmp(kind, "away") == 0)
        return (floor(24 * u) - 12) / 4 + 0.03 + 0.19 * v;
    if (strcmp(kind, "distinct") == 0)
        return (double)(i * 7919 % n - n / 2) * 3 / 64 + u / 64;
    if (strcmp(kind, "kinks") == 0)
        return kinks[(int)(5 * u)];
    if (strcmp(kind, "special") == 0)
        return special[i % 6];
    if (strcmp(kind, "mask") == 0)
        return u < 0.5;
    if (strncmp(kind, "ids", 3) == 0)
        return floor(atoi(kind + 3) * u);
    lt_locale l = lt__enter_c_locale();
    double number = atof(kind);
    lt__leave_c_locale(l);
    return number;
}

/* Input i of the case, with floats in f64. New. */
static inline block make_input(const op_case *c, int i)
{
    block b = block_new(dtype_of_kind(c->in[i].kind), c->in[i].ndim, c->in[i].dims);
    for (int64_t k = 0; k < b.count; k++)
        b.at[k] = value_of(c->in[i].kind, seed_of(c, c->in[i].name), k, b.count);
    return b;
}

/* Tensor KEY.WHAT of the fixture; at is NULL if there is none. New. */
static inline block fixture_block(lt_file *file, const op_case *c, const char *what)
{
    char name[64];
    snprintf(name, sizeof name, "%s.%s", c->key, what);
    int i = lt_file_find(file, name);
    if (i < 0)
        return (block){0};
    lt_tensor *x = lt_file_read(file, i);
    if (!x)
        FAIL("%s", lt_errmsg());
    block b = block_of(x);
    lt_release(x);
    return b;
}

/* ==== Backward ================================================================================ */

/* Runs backward from each output that requires a gradient, with an output gradient of 0.5. Skips a
 * loss that is not finite, because lt_backward() refuses it. */
static inline lt_status run_backward(lt_ctx *ctx, lt_tensor *const *out)
{
    lt_status status = LT_OK;
    for (int k = 0; k < LT_MAX_OUT && out[k] && status == LT_OK; k++) {
        double loss = 0;
        if (lt_count(out[k]) == 1)
            CHECK_OK(lt_item(out[k], 0, &loss));
        if (!lt_requires_grad(out[k]) || !isfinite(loss))
            continue;
        lt_tensor *dy =
            lt_tensor_full(ctx, lt_tensor_dtype(out[k]), lt_ndim(out[k]), lt_dims(out[k]), 0.5);
        status = dy ? lt_backward(out[k], dy) : lt_errcode();
        lt_release(dy);
    }
    return status;
}

#endif
