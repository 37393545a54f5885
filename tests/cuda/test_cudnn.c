/* test_cudnn.c - compares conv2d by cuDNN's graph API with the reference kernels in f64, over
 * random shapes. The library is a stand-in that computes on the CPU, so this tests the graphs that
 * the backend builds, not cuDNN.
 */
#include "tests/lt_test.h"

#ifdef LT_WITH_CUDNN
#include "tests/cuda/cuda_test.h"

enum { X, W, B, INPUTS };
enum { CASES = 150 };

static const lt_dtype dtypes[] = {LT_F32, LT_F16, LT_BF16};

/* ==== A context with cuDNN ==================================================================== */

typedef struct setting {
    lt_ctx *ctx;
    stand_in *library;
    lt_cuda_env env;
    lt_cudnn *cudnn;
} setting;

static void open_setting(setting *s)
{
    char text[512];
    lt_cudnn_table table;
    const lt_cudnn_config config = {.tf32 = true};
    s->ctx = lt_open(&(lt_config){.reference = true, .poison = true, .threads = 1});
    s->library = open_stand_in("libcudnn.so.9");
    s->library->engines[0][0].workspace = 100;
    s->env = (lt_cuda_env){
        .host = &test_host, .device = s->ctx->devices[0], .stream = test_stream, .model = "none"};
    if (lt__cudnn_open_library(&table, text, sizeof text) != 0 ||
        !(s->cudnn = lt__cudnn_new(&table, &s->env, &config, text, sizeof text)))
        FAIL("%s", text);
}

static void close_setting(setting *s)
{
    lt__cudnn_free(s->cudnn);
    lt_ctx_free(s->ctx);
    CHECK_EQ(s->library->live, 0);
}

/* ==== A case ================================================================================== */

typedef struct problem { /* forward and backward of one op, with all its tensors */
    const lt_def *def;
    lt_opt opts[LT_MAX_OPT];
    int n_in;
    lt_tensor *in[INPUTS], *out[2], *d_out[1], *d_in[INPUTS];
    uint64_t add;
} problem;

/* Makes the outputs; the op's shape rule sets their dims. */
static void make_outputs(setting *s, problem *p)
{
    lt_spec spec[2];
    lt_call c = {.ctx = s->ctx,
                 .op = p->def->op,
                 .schema = &p->def->schema,
                 .opt = p->opts,
                 .n_in = p->n_in,
                 .in = p->in,
                 .spec = spec};
    CHECK_OK(p->def->op->shape(&c));
    for (int i = 0; i < 1 + p->def->op->n_aux; i++)
        p->out[i] = lt_tensor_new(s->ctx, spec[i].dtype, spec[i].ndim, spec[i].dims);
}

static void free_problem(problem *p)
{
    for (int i = 0; i < INPUTS; i++) {
        lt_release(p->in[i]);
        lt_release(p->d_in[i]);
    }
    lt_release(p->out[0]);
    lt_release(p->out[1]);
    lt_release(p->d_out[0]);
}

/* A copy of the problem in f64. */
static problem exact_problem(const problem *from)
{
    problem p = *from;
    for (int i = 0; i < INPUTS; i++) {
        p.in[i] = from->in[i] ? exact_copy(from->in[i]) : NULL;
        p.d_in[i] = from->d_in[i] ? exact_copy(from->d_in[i]) : NULL;
    }
    for (int i = 0; i < 2; i++)
        p.out[i] = from->out[i] ? exact_copy(from->out[i]) : NULL;
    p.d_out[0] = exact_copy(from->d_out[0]);
    return p;
}

static lt_call call_of(setting *s, problem *p)
{
    return (lt_call){.ctx = s->ctx,
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

typedef size_t (*scratch_fn)(lt_cudnn *d, const lt_call *c, bool backward);

/* Allocates exactly as much scratch as the kernel requests, so that AddressSanitizer finds an
 * overrun. */
static void alloc_scratch(setting *s, lt_call *c, scratch_fn scratch, bool backward)
{
    size_t bytes = scratch(s->cudnn, c, backward);
    c->scratch = NULL;
    c->scratch_bytes = bytes;
    if (bytes > 0 && posix_memalign(&c->scratch, 64, bytes) != 0)
        FAIL("out of memory");
    if (bytes > 0)
        memset(c->scratch, 0xff, bytes);
}

static void free_scratch(lt_call *c)
{
    free(c->scratch);
    c->scratch = NULL;
}

/* ==== conv2d ================================================================================== */

/* A random convolution. Each axis has its own random size, so that swapped axes are detected. */
static problem draw_conv(setting *s, lt_dtype dtype, uint64_t *seed)
{
    problem p = {.def = lt_op_find(s->ctx, "conv2d"), .n_in = INPUTS};
    int64_t x[4], w[4], stride[2], pad[2], dilation[2];
    int64_t groups = draw(seed, 3) ? 1 : 1 + draw(seed, 4), each = 1 + draw(seed, 4);
    char options[128];
    x[0] = 1 + draw(seed, 3);
    x[3] = groups * (draw(seed, 4) ? each : 1);
    w[0] = groups * (1 + draw(seed, 5));
    w[3] = x[3] / groups;
    for (int i = 0; i < 2; i++) {
        w[1 + i] = 1 + draw(seed, 4);
        stride[i] = 1 + draw(seed, 3);
        pad[i] = draw(seed, 3);
        dilation[i] = 1 + draw(seed, 3) / 2;
        int64_t reach = (w[1 + i] - 1) * dilation[i] + 1 - 2 * pad[i];
        x[1 + i] = (reach > 1 ? reach : 1) + draw(seed, 7);
    }
    snprintf(options, sizeof options, "stride=%d,%d pad=%d,%d dilation=%d,%d groups=%d",
             (int)stride[0], (int)stride[1], (int)pad[0], (int)pad[1], (int)dilation[0],
             (int)dilation[1], (int)groups);
    CHECK_OK(lt_opts_parse(&p.def->schema, options, p.opts));
    p.in[X] = random_tensor(s->ctx, dtype, 4, x, seed);
    p.in[W] = random_tensor(s->ctx, dtype, 4, w, seed);
    if (draw(seed, 2))
        p.in[B] = random_tensor(s->ctx, dtype, 1, w, seed);
    make_outputs(s, &p);
    p.d_out[0] = random_tensor(s->ctx, dtype, 4, p.out[0]->dims, seed);
    p.d_in[X] = random_tensor(s->ctx, dtype, 4, x, seed);
    p.d_in[W] = random_tensor(s->ctx, dtype, 4, w, seed);
    p.add = (uint64_t)draw(seed, 4);
    return p;
}

static void run_conv(setting *s, problem *p)
{
    lt_call c = call_of(s, p);
    alloc_scratch(s, &c, lt__cudnn_conv2d_scratch, false);
    CHECK_OK(lt__cudnn_conv2d_fwd(s->cudnn, &c));
    free_scratch(&c);
    alloc_scratch(s, &c, lt__cudnn_conv2d_scratch, true);
    CHECK_OK(lt__cudnn_conv2d_grad(s->cudnn, &c, X));
    CHECK_OK(lt__cudnn_conv2d_grad(s->cudnn, &c, W));
    free_scratch(&c);
}

static void check_conv(setting *s, problem *p)
{
    static const char *const names[] = {"dx", "dw"};
    problem exact = exact_problem(p);
    lt_tensor *old[2] = {exact_copy(p->d_in[X]), exact_copy(p->d_in[W])};
    const lt_dtype dtype = (lt_dtype)p->in[X]->dtype;
    lt_call c = call_of(s, &exact);
    CHECK_OK(p->def->op->fwd(&c));
    CHECK_OK(p->def->op->bwd(&c));
    run_conv(s, p);
    compare("y", p->out[0], exact.out[0], NULL, dtype, 1);
    for (int i = X; i <= W; i++)
        compare(names[i], p->d_in[i], exact.d_in[i], p->add >> i & 1 ? old[i] : NULL, dtype, 1);
    lt_release(old[X]);
    lt_release(old[W]);
    free_problem(&exact);
}

static void walk_conv(lt_dtype dtype)
{
    setting s;
    uint64_t seed = 21 + dtype;
    open_setting(&s);
    for (int i = 0; i < CASES; i++) {
        problem p = draw_conv(&s, dtype, &seed);
        check_conv(&s, &p);
        free_problem(&p);
    }
    close_setting(&s);
}

TEST(conv2d_f32) { walk_conv(LT_F32); }
TEST(conv2d_f16) { walk_conv(LT_F16); }
TEST(conv2d_bf16) { walk_conv(LT_BF16); }

/* Such a gradient is not written. Autograd asks first, and passes a tensor of the inputs' dtype. */
TEST(f32_gradients_of_f16_are_refused)
{
    setting s;
    uint64_t seed = 9;
    open_setting(&s);
    problem p = draw_conv(&s, LT_F16, &seed), without_plan = draw_conv(&s, LT_F16, &seed);
    lt_tensor *dw = p.d_in[W];
    lt_call c = call_of(&s, &p);
    p.d_in[W] = NULL;
    CHECK(lt__cudnn_conv2d_computes(s.cudnn, &c, W));
    p.d_in[W] = lt_tensor_new(s.ctx, LT_F32, 4, dw->dims);
    CHECK(lt__cudnn_conv2d_grad(s.cudnn, &c, W) == LT_EUNSUPPORTED);
    CHECK_EQ(s.library->run, 0);
    s.library->engines[0][0].number = 0;
    c = call_of(&s, &without_plan);
    CHECK(!lt__cudnn_conv2d_computes(s.cudnn, &c, W));
    lt_release(dw);
    free_problem(&p);
    free_problem(&without_plan);
    close_setting(&s);
}

/* A random tensor that starts one element into its memory. New. */
static lt_tensor *shifted(setting *s, lt_dtype dtype, int ndim, const int64_t *dims, uint64_t *seed)
{
    int64_t n = 1, more;
    for (int i = 0; i < ndim; i++)
        n *= dims[i];
    more = n + 1;
    lt_tensor *all = random_tensor(s->ctx, dtype, 1, &more, seed);
    lt_tensor *x = lt__tensor_view(all, ndim, dims, 1, true);
    lt_release(all);
    return x;
}

/* Inputs may be views that start at any element. */
TEST(conv2d_of_misaligned_tensors)
{
    setting s;
    uint64_t seed = 5;
    open_setting(&s);
    for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++)
        for (int i = 0; i < 10; i++) {
            problem p = draw_conv(&s, dtypes[t], &seed);
            for (int k = X; k <= B; k++) {
                lt_tensor *old = p.in[k];
                if (!old)
                    continue;
                p.in[k] = shifted(&s, dtypes[t], old->ndim, old->dims, &seed);
                lt_release(old);
            }
            check_conv(&s, &p);
            free_problem(&p);
        }
    close_setting(&s);
}

/* No plan is built for a gradient that is not needed. */
TEST(conv2d_gradients_one_by_one)
{
    setting s;
    uint64_t seed = 6;
    open_setting(&s);
    problem p = draw_conv(&s, LT_F32, &seed);
    lt_tensor *dx = p.d_in[X];
    lt_call c = call_of(&s, &p);
    p.d_in[X] = NULL;
    alloc_scratch(&s, &c, lt__cudnn_conv2d_scratch, true);
    CHECK_EQ(s.library->built, 1);
    CHECK_OK(lt__cudnn_conv2d_grad(s.cudnn, &c, W));
    CHECK_EQ(s.library->run, 1);
    free_scratch(&c);
    lt_release(dx);
    free_problem(&p);
    close_setting(&s);
}
#else
TEST(cudnn) { SKIP("cuDNN's headers are not installed"); }
#endif
