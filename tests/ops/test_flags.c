/* test_flags.c - kernels that pad, or compute lanes that they do not use, do not compute with what
 * was in memory before. Leftover bytes can be signalling NaNs, which raise the exception `invalid`
 * and stop a host program that traps it, and subnormal numbers, which can make a kernel many times
 * slower. So the processor's floating-point flags must be the same whatever new memory and the
 * stack contain, and no kernel may raise a flag that its formula does not raise. Results must have
 * the same bits.
 *
 * Runs every case of cases.txt, and more cases of the kernels that pad, on one thread, as each
 * thread has its own flags.
 */
#include <fenv.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include "tests/ops/run.h"

/* More lines as in cases.txt, without an expression for PyTorch. */
static const char *const lines[] = {
    /* Winograd: tiles that are no multiple of its rows, and odd images */
    "conv2d | x=normal(1,14,14,32), w=normal(64,3,3,32), b=normal(64) | pad=1 | -",
    "conv2d | x=normal(1,1,1,16), w=normal(32,3,3,16) | pad=1 | -",
    "conv2d | x=normal(1,5,3,48), w=normal(16,3,3,48) | pad=1 | -",
    "conv2d | x=normal(1,7,9,32), w=normal(48,3,3,32) | | -",
    "conv2d | x=normal(3,13,13,16), w=normal(32,3,3,16) | pad=2 | -",
    "conv2d | x=normal(3,13,15,32), w=normal(64,3,3,32) | pad=1 | -",
    "conv2d | x=normal(1,23,25,32), w=normal(64,3,3,32) | pad=1 | -",
    /* few channels */
    "conv2d | x=normal(1,9,11,1), w=normal(32,5,5,1), b=normal(32) | pad=2 | -",
    "conv2d | x=normal(2,13,9,3), w=normal(64,3,3,3) | stride=2 pad=1 | -",
    "conv2d | x=normal(1,19,17,4), w=normal(32,7,7,4) | stride=2 pad=3 | -",
    /* outer products over pixels */
    "conv2d | x=normal(1,37,31,48), w=normal(16,1,1,48) | | -",
    "conv2d | x=normal(1,67,71,32), w=normal(16,3,3,32) | stride=2 pad=1 | -",
    "conv2d | x=normal(1,33,35,32), w=normal(48,3,3,32) | pad=1 | -",
    /* depthwise */
    "conv2d | x=normal(1,5,5,1), w=normal(1,3,3,1) | pad=1 | -",
    "conv2d | x=normal(2,9,7,3), w=normal(3,3,3,1), b=normal(3) | stride=2 pad=1 groups=3 | -",
    "conv2d | x=normal(1,11,5,45), w=normal(45,3,3,1), b=normal(45) | pad=1 groups=45 | -",
    "conv2d | x=normal(1,10,7,70), w=normal(70,3,3,1) | stride=2 pad=1 groups=70 | -",
    /* general and grouped */
    "conv2d | x=normal(1,7,9,19), w=normal(23,3,3,19), b=normal(23) | pad=1 | -",
    "conv2d | x=normal(1,7,9,18), w=normal(27,3,3,6) | stride=2 pad=1 groups=3 | -",
    "matmul | x=normal(5,17), y=normal(17,3) | | -",
    "matmul | x=normal(3,7,19), y=normal(3,19,37) | | -",
    "linear | x=normal(1,129), w=normal(10,129), b=normal(10) | | -",
    "linear | x=normal(13,31), w=normal(37,31), b=normal(37) | | -",
    "max_pool2d | x=distinct(1,7,5,19) | kernel=3 stride=2 pad=1 | -",
    "avg_pool2d | x=normal(1,7,5,19) | kernel=3 stride=2 pad=1 | -",
    "global_avg_pool2d | x=normal(2,5,7,37) | | -",
    "batch_norm | x=normal(3,7,7,24), scale=normal(24), shift=normal(24), mean=normal(24), "
    "var=positive(24) | train=true | -",
    "batch_norm | x=normal(5,3,3,37), scale=normal(37), shift=normal(37), mean=normal(37), "
    "var=positive(37) | act=relu | -",
    "batch_norm | x=normal(3,5,7,128), scale=normal(128), shift=normal(128), mean=normal(128), "
    "var=positive(128), residual=normal(3,5,7,128) | train=true act=relu6 | -",
    "layer_norm | x=normal(3,37), scale=normal(37), shift=normal(37) | | -",
    "softmax | x=normal(3,37) | | -",
    "softmax | x=normal(3,37,5) | axis=1 | -",
    "cross_entropy | x=normal(3,37), labels=ids37(3) | label_smoothing=0.1 | -",
    "sigmoid | x=wide(37) | | -",
    "silu | x=wide(37) | | -",
};
enum { LINES = sizeof lines / sizeof *lines };

/* Bits of two words that each soil memory: zeros; signalling NaNs in f32 and bf16, huge numbers in
 * f64; numbers that are subnormal in all of them. */
enum { CLEAN, NANS, SUBNORMALS, SOILS };
static const uint32_t bits_of[SOILS] = {0, 0x7fa07fa0, 0x00010001};
static const char *const name_of[SOILS] = {"zeros", "signalling NaNs", "subnormal numbers"};

/* ==== Soiled memory =========================================================================== */

enum { REGION = 32 << 20 };

static void *(*alloc_of_cpu)(lt_device *device, size_t bytes);
static int soil;

/* Refuses the region from which several large blocks are cut, so that each block is new. */
static void *alloc_soiled(lt_device *device, size_t bytes)
{
    uint32_t *p = bytes < REGION ? alloc_of_cpu(device, bytes) : NULL;
    for (size_t i = 0; p && i < bytes / sizeof *p; i++)
        p[i] = bits_of[soil];
    return p;
}

static __attribute__((noinline)) void soil_stack(void)
{
    volatile uint32_t words[1 << 14];
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        words[i] = bits_of[soil];
}

static lt_ctx *open_soiled(bool reference)
{
    lt_ctx *ctx = ctx_with((lt_config){.reference = reference, .threads = 1});
    alloc_of_cpu = ctx->devices[0]->alloc;
    ctx->devices[0]->alloc = alloc_soiled;
    return ctx;
}

/* ==== Flags =================================================================================== */

/* Also FE_DENORMAL on x86, which fenv.h does not know: an operand was subnormal. */
enum { DENORMAL = 1 << 1 };
enum { TRAPPED = FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW };

static void clear_flags(void)
{
    feclearexcept(FE_ALL_EXCEPT);
#ifdef __SSE2__
    _mm_setcsr(_mm_getcsr() & ~0x3fu);
#endif
}

static int flags(void)
{
    int found = fetestexcept(TRAPPED);
#ifdef __SSE2__
    found |= (int)_mm_getcsr() & DENORMAL;
#endif
    return found;
}

static const char *text_of(int found)
{
    return found & FE_INVALID     ? "invalid"
           : found & FE_DIVBYZERO ? "divide by zero"
           : found & FE_OVERFLOW  ? "overflow"
                                  : "denormal operand";
}

/* ==== Cases =================================================================================== */

/* Runs the case in memory that contains bits_of[of] and returns its flags. */
static int flags_of(lt_ctx *ctx, const op_case *c, const values *v, lt_dtype dtype, int of,
                    result *r)
{
    soil = of;
    lt_memory_trim(ctx);
    soil_stack();
    clear_flags();
    if (!run_case(ctx, c, v, dtype, r))
        FAIL("%s [%s] failed", c->op, c->options);
    return flags();
}

/* Whether the formula itself raises a flag: of NaN or infinity, a huge exp(), 1 / 0, or the slope
 * of pow at a negative number. The fast kernels then raise only what the reference kernels
 * raise. */
static bool is_special(const op_case *c)
{
    bool special = strcmp(c->op, "exp") == 0 || strcmp(c->op, "div") == 0 ||
                   strcmp(c->op, "pow") == 0;
    for (int i = 0; i < c->n_in; i++)
        special |= strcmp(c->in[i].kind, "special") == 0;
    return special;
}

static void compare_bits(const op_case *c, lt_dtype dtype, int of, const result *got,
                         const result *want)
{
    for (int part = 0; part < FOUND; part++) {
        const block *g = &got->part[part], *w = &want->part[part];
        if (w->at && memcmp(g->at, w->at, (size_t)w->count * sizeof *w->at) != 0)
            fault(c, "%s: the results depend on %s in memory", lt_dtype_name(dtype), name_of[of]);
    }
}

/* Values of the case, rounded to the dtype, with upstream gradients. */
static values values_of(lt_ctx *ctx, const op_case *c, lt_dtype dtype)
{
    values v = {.same_input = false};
    result own;
    for (int i = 0; i < c->n_in; i++) {
        block *b = &v.part[IN + i];
        *b = make_input(c, i);
        bool is_float = b->dtype == LT_F64;
        block_round(b, is_float ? dtype : b->dtype);
        b->dtype = is_float ? LT_F64 : b->dtype;
    }
    if (has_gradients(lt_op_find(ctx, c->op)->op, c, &v) && run_case(ctx, c, &v, dtype, &own)) {
        make_dy(c, &own, &v);
        free_result(&own);
    }
    return v;
}

static void check(lt_ctx *reference, lt_ctx *fast, const op_case *c, lt_dtype dtype)
{
    result want, got, plain;
    values v = values_of(reference, c, dtype);
    int raised = flags_of(fast, c, &v, dtype, CLEAN, &want);
    int allowed = flags_of(reference, c, &v, dtype, CLEAN, &plain);
    int wrong = (is_special(c) ? raised & ~allowed : raised | allowed) & TRAPPED;
    if (wrong)
        fault(c, "%s: %s kernel raises %s", lt_dtype_name(dtype),
              wrong & allowed ? "the reference" : "only the fast", text_of(wrong));
    for (int k = 0; k < 2; k++)
        for (int of = NANS; of < SOILS; of++) {
            int more = flags_of(k ? fast : reference, c, &v, dtype, of, &got);
            if (more & ~(k ? raised : allowed))
                fault(c, "%s%s: %s in memory raise %s", lt_dtype_name(dtype),
                      k ? "" : ", reference", name_of[of], text_of(more & ~(k ? raised : allowed)));
            compare_bits(c, dtype, of, &got, k ? &want : &plain);
            free_result(&got);
        }
    free_result(&plain);
    free_result(&want);
    free_values(&v);
}

static void check_dtypes(lt_ctx *reference, lt_ctx *fast, const op_case *c)
{
    const lt_op *op = lt_op_find(fast, c->op)->op;
    bool direct = op->any_dtype || op->fast_bf16, large = is_large(c);
#ifdef __SANITIZE_ADDRESS__
    if (large) /* takes minutes, and has the same code as the small cases there */
        return;
#endif
    check(reference, fast, c, LT_F32);
    if (!has_note(c, "f32+f64") && (direct || !large))
        check(reference, fast, c, LT_BF16);
}

/* The square of such a number overflows in f32, but neither gelu nor its gradient does. */
TEST(gelu_of_huge_numbers)
{
    static const float huge[] = {3e19f, -3e19f, 3e38f, -3e38f};
    for (int k = 0; k < 2; k++) {
        lt_ctx *ctx = lt_open(&(lt_config){.reference = k == 0, .threads = 1});
        lt_tensor *x = lt_tensor_from(ctx, LT_F32, 1, (int64_t[]){4}, huge);
        CHECK_OK(lt_set_requires_grad(x, true));
        clear_flags();
        lt_tensor *y = lt_run(ctx, "gelu", NULL, x, NULL);
        lt_tensor *loss = lt_run(ctx, "sum", NULL, y, NULL);
        CHECK_OK(lt_backward(loss, NULL));
        CHECK_EQ(flags() & TRAPPED, 0);
        for (int i = 0; i < 4; i++) {
            double value, slope;
            CHECK_OK(lt_item(y, i, &value));
            CHECK_OK(lt_item(lt_grad(x), i, &slope));
            CHECK(value == (huge[i] > 0 ? huge[i] : 0) && slope == (huge[i] > 0));
        }
        lt_release(loss);
        lt_release(y);
        lt_release(x);
        lt_ctx_free(ctx);
    }
}

TEST(no_kernel_computes_with_what_was_in_memory)
{
    lt_ctx *reference = open_soiled(true), *fast = open_soiled(false);
    int n;
    const op_case *cases = all_cases(&n);
    for (int i = 0; i < n; i++)
        check_dtypes(reference, fast, &cases[i]);
    for (int i = 0; i < LINES; i++) {
        op_case c;
        char text[400];
        snprintf(text, sizeof text, "%s", lines[i]);
        read_case(&c, text, 0);
        check_dtypes(reference, fast, &c);
    }
    lt_ctx_free(reference);
    lt_ctx_free(fast);
    if (faults > 0)
        FAIL("%d faults", faults);
}
