/* cuda_test.h - helpers for the tests that call NVIDIA's libraries. */
#ifndef TESTS_CUDA_CUDA_TEST_H
#define TESTS_CUDA_CUDA_TEST_H

#include "ops/cuda/cudnn.h"
#include "tests/cuda/libs.h"

static const lt_host test_host = {lt_fail, lt_log};
static void *const test_stream = (void *)&test_host; /* any stream except the default one */

/* A test between two calls. */
#define TEST_BETWEEN(title, begin, end)                                                            \
    static void between_##title(void);                                                             \
    TEST(title)                                                                                    \
    {                                                                                              \
        begin;                                                                                     \
        between_##title();                                                                         \
        end;                                                                                       \
    }                                                                                              \
    static void between_##title(void)

/* Reads a whole file, with a final 0, into a buffer of `bytes` bytes. */
static inline void read_text(const char *path, char *text, size_t bytes)
{
    FILE *file = fopen(path, "r");
    if (!file)
        FAIL("%s: cannot open the file", path);
    size_t n = fread(text, 1, bytes - 1, file);
    text[n] = 0;
    fclose(file);
}

/* A random number from 0 to n - 1, by xorshift64* (Vigna, 2016). */
static inline int64_t draw(uint64_t *seed, int64_t n)
{
    *seed ^= *seed >> 12;
    *seed ^= *seed << 25;
    *seed ^= *seed >> 27;
    return (int64_t)((*seed * 0x2545f4914f6cdd1d) >> 33) % n;
}

/* Random values between -1 and 1; duplicates are unlikely. New. */
static inline lt_tensor *random_tensor(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims,
                                       uint64_t *seed)
{
    lt_tensor *x = lt_tensor_new(ctx, dtype, ndim, dims);
    if (!x)
        FAIL("%s", lt_errmsg());
    for (int64_t i = 0; i < x->count; i++) {
        double value = (double)draw(seed, 1 << 20) / (1 << 19) - 1;
        lt_convert((char *)x->data + i * (int64_t)lt_dtype_bytes(dtype), dtype, &value, LT_F64, 1);
    }
    return x;
}

/* A copy of x in f64, or in its own dtype if that is an integer. New. */
static inline lt_tensor *exact_copy(lt_tensor *x)
{
    bool is_float = lt__is_float((lt_dtype)x->dtype);
    lt_tensor *y = lt_tensor_new(x->ctx, is_float ? LT_F64 : (lt_dtype)x->dtype, x->ndim, x->dims);
    if (!y)
        FAIL("%s", lt_errmsg());
    CHECK_OK(lt_copy(y, x));
    return y;
}

/* ==== Forward and backward of one op, with all its tensors ==================================== */

enum { INPUTS = 3 };

typedef struct problem {
    lt_ctx *ctx;
    const lt_def *def;
    lt_opt opts[LT_MAX_OPT];
    int n_in;
    lt_tensor *in[INPUTS], *out[1], *d_out[1], *d_in[INPUTS];
    uint64_t add;
} problem;

static inline lt_call call_of(problem *p)
{
    return (lt_call){.ctx = p->ctx,
                     .op = p->def->op,
                     .schema = &p->def->schema,
                     .opt = p->opts,
                     .n_in = p->n_in,
                     .in = p->in,
                     .out = p->out,
                     .d_out = p->d_out,
                     .d_in = p->d_in,
                     .add = p->add,
                     .threads = 1};
}

/* Makes the output and its gradient. The op's shape rule sets their dims. */
static inline void make_output(problem *p, uint64_t *seed)
{
    lt_spec spec[1];
    lt_call c = call_of(p);
    c.spec = spec;
    CHECK_OK(p->def->op->shape(&c));
    p->out[0] = lt_tensor_new(p->ctx, spec->dtype, spec->ndim, spec->dims);
    p->d_out[0] = random_tensor(p->ctx, spec->dtype, spec->ndim, spec->dims, seed);
}

static inline void free_problem(problem *p)
{
    for (int i = 0; i < INPUTS; i++) {
        lt_release(p->in[i]);
        lt_release(p->d_in[i]);
    }
    lt_release(p->out[0]);
    lt_release(p->d_out[0]);
}

/* A copy of the problem in f64. */
static inline problem exact_problem(const problem *from)
{
    problem p = *from;
    for (int i = 0; i < INPUTS; i++) {
        p.in[i] = from->in[i] ? exact_copy(from->in[i]) : NULL;
        p.d_in[i] = from->d_in[i] ? exact_copy(from->d_in[i]) : NULL;
    }
    p.out[0] = exact_copy(from->out[0]);
    p.d_out[0] = exact_copy(from->d_out[0]);
    return p;
}

/* Gives the call exactly as much scratch as it requests, so that AddressSanitizer finds an overrun.
 * Free c->scratch with free(). */
static inline void give_scratch(lt_call *c, size_t bytes)
{
    c->scratch = NULL;
    c->scratch_bytes = bytes;
    if (bytes > 0 && posix_memalign(&c->scratch, 64, bytes) != 0)
        FAIL("out of memory");
    if (bytes > 0)
        memset(c->scratch, 0xff, bytes);
}

/* The largest relative error when a number is rounded to dtype. */
static inline double rounding(lt_dtype dtype)
{
    return dtype == LT_BF16 ? 0x1p-8 : dtype == LT_F16 ? 0x1p-11 : 0x1p-24;
}

/* Compares with an exact result, which includes `old` if that is not NULL. Tolerates `times`
 * roundings to dtype of the result and of what was added to `old`, plus 2^-23, because f16 numbers
 * near zero are multiples of 2^-24. */
static inline void compare(const char *what, lt_tensor *got, lt_tensor *want, lt_tensor *old,
                           lt_dtype dtype, int times)
{
    for (int64_t i = 0; i < got->count; i++) {
        double value, before = 0, right = ((double *)want->data)[i];
        CHECK_OK(lt_item(got, i, &value));
        if (old)
            CHECK_OK(lt_item(old, i, &before));
        double by = times * rounding(dtype) * (fabs(right) + fabs(right - before)) + 0x1p-23;
        if (!(fabs(value - right) <= by))
            FAIL("%s: element %lld must be near %.9g, but is %.9g", what, (long long)i, right,
                 value);
    }
}

/* Compares the library's results with those of the reference kernels in f64. run: forward and
 * backward by the library; returns the gradients that it computed, bit i for input i. times: see
 * compare(), for gradients in f32. */
static inline void check_problem(problem *p, uint32_t (*run)(problem *p), int times)
{
    static const char *const names[INPUTS] = {"gradient 0", "gradient 1", "gradient 2"};
    problem exact = exact_problem(p);
    lt_tensor *old[INPUTS];
    lt_call c = call_of(&exact);
    for (int i = 0; i < INPUTS; i++)
        old[i] = p->d_in[i] && (p->add >> i & 1) ? exact_copy(p->d_in[i]) : NULL;
    CHECK_OK(p->def->op->fwd(&c));
    CHECK_OK(p->def->op->bwd(&c));
    uint32_t computed = run(p);
    compare("y", p->out[0], exact.out[0], NULL, (lt_dtype)p->out[0]->dtype, 1);
    for (int i = 0; i < INPUTS; i++) {
        lt_tensor *dx = computed >> i & 1 ? p->d_in[i] : NULL;
        if (dx)
            compare(names[i], dx, exact.d_in[i], old[i], (lt_dtype)dx->dtype,
                    dx->dtype == LT_F32 ? times : 1);
        lt_release(old[i]);
    }
    free_problem(&exact);
}

#endif
