/* test_cudnn.c - compares conv2d by cuDNN's graph API with the reference kernels in f64, over
 * random shapes. The library is a stand-in that computes on the CPU, so this tests the graphs that
 * the backend builds, not cuDNN.
 */
#include "tests/lt_test.h"

#ifdef LT_WITH_CUDNN
#include "tests/cuda/cuda_test.h"

enum { X, W, B };
enum { CASES = 150 };

static const lt_dtype dtypes[] = {LT_F32, LT_F16, LT_BF16};

static lt_ctx *ctx;
static stand_in *library;
static lt_cuda_env env;
static lt_cudnn *cudnn;

static void begin(void)
{
    char text[512];
    lt_cudnn_table table;
    const lt_cudnn_config config = {.tf32 = true};
    ctx = lt_open(&(lt_config){.reference = true, .poison = true, .threads = 1});
    library = open_stand_in("libcudnn.so.9");
    library->engines[0][0].workspace = 100;
    env = (lt_cuda_env){
        .host = &test_host, .device = ctx->devices[0], .stream = test_stream, .model = "none"};
    if (lt__cudnn_open_library(&table, text, sizeof text) != 0 ||
        !(cudnn = lt__cudnn_new(&table, &env, &config, text, sizeof text)))
        FAIL("%s", text);
}

static void end(void)
{
    lt__cudnn_free(cudnn);
    lt_ctx_free(ctx);
    CHECK_EQ(library->live, 0);
}

#define TEST_CUDNN(title) TEST_BETWEEN(title, begin(), end())

/* ==== conv2d ================================================================================== */

/* A random convolution. Each axis has its own random size, so that swapped axes are detected. */
static problem draw_conv(lt_dtype dtype, uint64_t *seed)
{
    problem p = {.ctx = ctx, .def = lt_op_find(ctx, "conv2d"), .n_in = INPUTS};
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
    p.in[X] = random_tensor(ctx, dtype, 4, x, seed);
    p.in[W] = random_tensor(ctx, dtype, 4, w, seed);
    if (draw(seed, 2))
        p.in[B] = random_tensor(ctx, dtype, 1, w, seed);
    make_output(&p, seed);
    p.d_in[X] = random_tensor(ctx, dtype, 4, x, seed);
    p.d_in[W] = random_tensor(ctx, dtype, 4, w, seed);
    p.add = (uint64_t)draw(seed, 4);
    return p;
}

static uint32_t run(problem *p)
{
    lt_call c = call_of(p);
    give_scratch(&c, lt__cudnn_conv2d_scratch(cudnn, &c, false));
    CHECK_OK(lt__cudnn_conv2d_fwd(cudnn, &c));
    free(c.scratch);
    give_scratch(&c, lt__cudnn_conv2d_scratch(cudnn, &c, true));
    CHECK_OK(lt__cudnn_conv2d_grad(cudnn, &c, X));
    CHECK_OK(lt__cudnn_conv2d_grad(cudnn, &c, W));
    free(c.scratch);
    return 1 << X | 1 << W;
}

static void walk_conv(lt_dtype dtype)
{
    uint64_t seed = 21 + dtype;
    begin();
    for (int i = 0; i < CASES; i++) {
        problem p = draw_conv(dtype, &seed);
        check_problem(&p, run, 1);
        free_problem(&p);
    }
    end();
}

TEST(conv2d_f32) { walk_conv(LT_F32); }
TEST(conv2d_f16) { walk_conv(LT_F16); }
TEST(conv2d_bf16) { walk_conv(LT_BF16); }

/* Such a gradient is not written. Autograd asks first, and passes a tensor of the inputs' dtype. */
TEST_CUDNN(f32_gradients_of_f16_are_refused)
{
    uint64_t seed = 9;
    problem p = draw_conv(LT_F16, &seed), without_plan = draw_conv(LT_F16, &seed);
    lt_tensor *dw = p.d_in[W];
    lt_call c = call_of(&p);
    p.d_in[W] = NULL;
    CHECK(lt__cudnn_conv2d_computes(cudnn, &c, W));
    p.d_in[W] = lt_tensor_new(ctx, LT_F32, 4, dw->dims);
    CHECK(lt__cudnn_conv2d_grad(cudnn, &c, W) == LT_EUNSUPPORTED);
    CHECK_EQ(library->run, 0);
    library->engines[0][0].number = 0;
    c = call_of(&without_plan);
    CHECK(!lt__cudnn_conv2d_computes(cudnn, &c, W));
    lt_release(dw);
    free_problem(&p);
    free_problem(&without_plan);
}

/* A random tensor that starts one element into its memory. New. */
static lt_tensor *shifted(lt_dtype dtype, int ndim, const int64_t *dims, uint64_t *seed)
{
    int64_t n = 1, more;
    for (int i = 0; i < ndim; i++)
        n *= dims[i];
    more = n + 1;
    lt_tensor *all = random_tensor(ctx, dtype, 1, &more, seed);
    lt_tensor *x = lt__tensor_view(all, ndim, dims, 1, true);
    lt_release(all);
    return x;
}

/* Inputs may be views that start at any element. */
TEST_CUDNN(conv2d_of_misaligned_tensors)
{
    uint64_t seed = 5;
    for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++)
        for (int i = 0; i < 10; i++) {
            problem p = draw_conv(dtypes[t], &seed);
            for (int k = X; k <= B; k++) {
                lt_tensor *old = p.in[k];
                if (!old)
                    continue;
                p.in[k] = shifted(dtypes[t], old->ndim, old->dims, &seed);
                lt_release(old);
            }
            check_problem(&p, run, 1);
            free_problem(&p);
        }
}

/* No plan is built for a gradient that is not needed. */
TEST_CUDNN(conv2d_gradients_one_by_one)
{
    uint64_t seed = 6;
    problem p = draw_conv(LT_F32, &seed);
    lt_tensor *dx = p.d_in[X];
    lt_call c = call_of(&p);
    p.d_in[X] = NULL;
    give_scratch(&c, lt__cudnn_conv2d_scratch(cudnn, &c, true));
    CHECK_EQ(library->built, 1);
    CHECK_OK(lt__cudnn_conv2d_grad(cudnn, &c, W));
    CHECK_EQ(library->run, 1);
    free(c.scratch);
    lt_release(dx);
    free_problem(&p);
}
#else
TEST(cudnn) { SKIP("cuDNN's headers are not installed"); }
#endif
