/* test_join.c - how the CUDA backend uses NVIDIA's libraries: which ops call them, what it logs
 * when a library is missing, and that it frees everything when it closes. The libraries are
 * stand-ins.
 */
#include "tests/lt_test.h"

#ifdef LT_WITH_CUDNN
#include "ops/cuda/libraries.h"
#include "tests/cuda/reference.h"

static char last_warning[1024];
static int warnings;

static void count_warnings(void *ud, lt_log_level level, const char *text)
{
    (void)ud;
    if (level == LT_LOG_WARN) {
        warnings++;
        snprintf(last_warning, sizeof last_warning, "%s", text);
    }
}

static stand_in *dnn, *blas;

static void open_both(void)
{
    dnn = open_stand_in("libcudnn.so.9");
    blas = open_stand_in(LT_CUBLASLT_SONAME);
}

static void watch(lt_ctx *ctx)
{
    lt_set_log(ctx, count_warnings, NULL);
    warnings = 0;
}

/* A test with a machine *m that finds both libraries. */
#define TEST_JOIN(title)                                                                           \
    static void join_##title(machine *m);                                                          \
    TEST(title)                                                                                    \
    {                                                                                              \
        machine m = machine_with(true);                                                            \
        open_both();                                                                               \
        watch(m.ctx);                                                                              \
        join_##title(&m);                                                                          \
        lt_ctx_free(m.ctx);                                                                        \
        CHECK_EQ(dnn->live + blas->live, 0);                                                       \
    }                                                                                              \
    static void join_##title(machine *m)

static void run(machine *m, const char *op, const char *options, const char *shapes)
{
    const spec s = {.op = op,
                    .options = options,
                    .dtype = LT_F32,
                    .shapes = shapes,
                    .spacings = 1,
                    .slack = {.by = 0x1p-12}};
    check_call(m, &s, op);
}

static bool contains(const char *text, const char *part)
{
    if (strstr(text, part))
        return true;
    printf("'%s' is not in '%s'\n", part, text);
    return false;
}

TEST(device_name_with_libraries)
{
    open_both();
    dnn->version = 91900;
    open_nccl()->version = 22809;
    lt_accelerator cuda = open_accelerator(&(lt_accelerator_config){.index = 0});
    CHECK_STR(cuda.name, "shim (cuDNN 9.19.0, NCCL 2.28.9, CUDA 13.0)");
    CHECK_EQ(dnn->live, 0); /* no handle yet */
    CHECK_EQ(blas->live, 0);
    cuda.device->close(cuda.device);
}

/* `luatrain --version` shows this. */
TEST(report_of_the_libraries)
{
    char text[4096], want[4 * PATH_MAX], path[PATH_MAX];
    open_both();
    dnn->version = 91900;
    open_nccl()->version = 22809;
    setenv("SHIM_HIDES", "cuBLASLt", 1);
    SHIM(lt_accelerator_libraries)(text, sizeof text);
    setenv("SHIM_HIDES", "", 1);
    beside("libs", path);
    snprintf(want, sizeof want,
             "cuDNN 9.19.0: %s/libcudnn.so.9\ncuBLASLt is not used: a test hides cuBLASLt\n"
             "NCCL 2.28.9: %s/libnccl.so.2\n",
             path, path);
    CHECK_STR(text, want);
}

TEST_JOIN(convolutions_run_in_cudnn)
{
    run(m, "conv2d", "pad=1", "2x5x4x3, 4x3x3x3, 4");
    CHECK_EQ(dnn->run, 7); /* y; dx and dw overwritten, both added to, one of each */
    run(m, "conv2d", "pad=1 groups=4", "2x5x4x4, 4x3x3x1, 4"); /* depthwise */
    run(m, "max_pool2d", "kernel=2", "2x4x4x3");
    run(m, "conv2d", "pad=1", "0x5x4x3, 4x3x3x3, 4"); /* cuDNN has no empty tensors */
    CHECK_EQ(dnn->run, 7);
    CHECK_EQ(blas->run, 0);
}

TEST_JOIN(products_run_in_cublaslt)
{
    run(m, "linear", "", "3x4, 5x4, 5");
    CHECK_EQ(blas->run, 7);
    run(m, "matmul", "", "3x4, 4x5");
    CHECK_EQ(blas->run, 14);
    run(m, "linear", "", "3x0, 5x0, 5"); /* no terms and a bias: our kernel runs forward */
}

TEST_JOIN(own_kernels_run_what_a_library_does_not_support)
{
    dnn->engines[0][0].number = 0; /* no engine at all */
    run(m, "conv2d", "pad=1 stride=2", "2x5x4x3, 4x3x3x3, 4");
    CHECK_EQ(dnn->run, 0);
}

/* Each refusal is of one product; the others run in the library. */
TEST_JOIN(own_kernels_run_what_a_library_refuses)
{
    blas->fail_run = CUBLAS_STATUS_ARCH_MISMATCH;
    run(m, "linear", "", "3x4, 5x4, 5");
    CHECK_EQ(blas->run, 6);
    blas->fail_run = CUBLAS_STATUS_NOT_SUPPORTED;
    run(m, "matmul", "", "3x4, 4x5");
    CHECK_EQ(blas->run, 12);
    CHECK_EQ(warnings, 1);
    CHECK(contains(last_warning, "cuda:0: cuBLASLt 13.1.0 refuses a product of 5 x 4 and 4 x 3 in "
                                 "f32: status 8; luatrain tries other algorithms, then its own "
                                 "kernel, which is slow") ||
          contains(last_warning, "cuda:0: cuBLASLt 13.1.0 refuses a product of 3 x 4 and 4 x 5 in "
                                 "f32: status 8; luatrain tries other algorithms, then its own "
                                 "kernel, which is slow"));
    dnn->fail_run = CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH;
    run(m, "conv2d", "pad=1", "2x5x4x3, 4x3x3x3, 4");
    CHECK_EQ(dnn->run, 6);
    CHECK_EQ(warnings, 2);
}

/* Every call of a library fails after a kernel that failed. */
TEST_JOIN(a_failed_kernel_is_not_a_refusal)
{
    lt_tensor *x = values(m, LT_F32, 2, (int64_t[]){4, 4}, 1, false);
    mirror tx = mirror_of(m, x, 0), ty = mirror_of(m, lt_retain(x), 0);
    lt_tensor *in[] = {on_device(&tx), on_device(&tx)}, *out[] = {on_device(&ty)};
    lt_call product = {
        .ctx = m->ctx, .op = lt_op_find(m->ctx, "matmul")->op, .n_in = 2, .in = in, .out = out};
    SHIM(shim_fault)("an illegal memory access was encountered");
    CHECK_FAILS(m->cuda.op[LT_OP_matmul].fwd(&product), LT_EENV,
                "an illegal memory access was encountered");
    CHECK_EQ(warnings, 0);
    SHIM(shim_reset)();
    must(m->cuda.op[LT_OP_matmul].fwd(&product));
    mirror_free(m, &tx);
    mirror_free(m, &ty);
}

/* How often cuDNN runs if its only engine has this numerical note. */
static int runs_of(int note, const lt_accelerator_config *config)
{
    machine m = machine_as(true, config);
    open_both();
    memset(dnn->engines, 0, sizeof dnn->engines);
    dnn->engines[0][0] = (stand_in_engine){.number = 1, .note = note};
    run(&m, "conv2d", "pad=1", "2x5x4x3, 4x3x3x3, 4");
    lt_ctx_free(m.ctx);
    return dnn->run;
}

TEST(numerical_notes_that_a_config_allows)
{
    const lt_accelerator_config plain = {0}, tf32 = {.tf32 = true};
    const lt_accelerator_config strict = {.deterministic = true};
    CHECK_EQ(runs_of(CUDNN_NUMERICAL_NOTE_TENSOR_CORE, &plain), 0);
    CHECK_EQ(runs_of(CUDNN_NUMERICAL_NOTE_TENSOR_CORE, &tf32), 7);
    CHECK_EQ(runs_of(CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC, &plain), 7);
    CHECK_EQ(runs_of(CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC, &strict), 0);
}

TEST(without_libraries_it_warns_once)
{
    machine m = machine_with(false);
    watch(m.ctx);
    run(&m, "max_pool2d", "kernel=2", "2x4x4x3");
    run(&m, "conv2d", "pad=1 groups=4", "2x5x4x4, 4x3x3x1, 4");
    CHECK_EQ(warnings, 0);
    run(&m, "conv2d", "", "2x5x4x3, 4x3x3x3, 4");
    run(&m, "conv2d", "pad=1", "2x5x4x3, 4x3x3x3, 4");
    CHECK_EQ(warnings, 1);
    CHECK(contains(last_warning, "cuda:0 computes convolutions without cuDNN, which is slow: a "
                                 "test hides cuDNN"));
    run(&m, "matmul", "", "3x4, 4x5");
    run(&m, "linear", "", "3x4, 5x4, 5");
    CHECK_EQ(warnings, 2);
    CHECK(contains(last_warning, "cuda:0 computes matrix products without cuBLASLt, which is "
                                 "slow: a test hides cuBLASLt"));
    lt_ctx_free(m.ctx);
}

/* A stand-in computes inside the call, but after all work queued before it and before all work that
 * follows. */
TEST_JOIN(library_calls_keep_the_order_of_the_stream)
{
    lt_tensor *x = values(m, LT_F32, 2, (int64_t[]){8, 8}, 1, false);
    lt_tensor *z = values(m, LT_F32, 2, (int64_t[]){8, 8}, 2, false);
    lt_tensor *want = values(m, LT_F32, 2, (int64_t[]){8, 8}, 2, false);
    for (int i = 0; i < 64; i++)
        ((float *)x->data)[i] = i % 9 == 0 ? -2 : 0; /* relu(-(-2 one) x z) is 2 z or 0 */
    for (int i = 0; i < 64; i++) {
        float v = 2 * ((float *)z->data)[i];
        ((float *)want->data)[i] = v > 0 ? v : 0;
    }
    mirror tx = mirror_of(m, x, 0), tz = mirror_of(m, z, 0), ty = mirror_of(m, want, 0);
    must(m->cuda.device->fill(m->cuda.device, ty.tensor.data, LT_F32, 64, 7));
    lt_tensor *one[] = {on_device(&tx)}, *two[] = {on_device(&tx), on_device(&tz)};
    lt_tensor *y[] = {on_device(&ty)};
    const lt_def *matmul = lt_op_find(m->ctx, "matmul");
    lt_call neg = {.ctx = m->ctx, .n_in = 1, .in = one, .out = one};
    lt_call product = {.ctx = m->ctx, .op = matmul->op, .n_in = 2, .in = two, .out = y};
    lt_call relu = {.ctx = m->ctx, .n_in = 1, .in = y, .out = y};
    must(m->cuda.op[LT_OP_neg].fwd(&neg));
    must(m->cuda.op[LT_OP_matmul].fwd(&product));
    must(m->cuda.op[LT_OP_relu].fwd(&relu));
    compare(m, "y", &ty, 0);
    mirror_free(m, &tx);
    mirror_free(m, &tz);
    mirror_free(m, &ty);
}
#else
TEST(join) { SKIP("cuDNN's and cuBLASLt's headers are not installed"); }
#endif
