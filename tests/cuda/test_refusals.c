/* test_refusals.c - ops on the emulated CUDA device while cuDNN and cuBLASLt, which are stand-ins,
 * refuse calls. Each case is drawn: which calls are refused, and with which status. The results
 * must be right, or the op must fail with a message. After that, it must work again.
 */
#include "tests/lt_test.h"

#ifdef LT_WITH_CUDNN
#include "ops/cuda/libraries.h"
#include "tests/cuda/reference.h"

/* All that the headers document, except success and what they declare deprecated. */
static const int of_cublaslt[] = {
    CUBLAS_STATUS_NOT_INITIALIZED, CUBLAS_STATUS_ALLOC_FAILED,  CUBLAS_STATUS_INVALID_VALUE,
    CUBLAS_STATUS_ARCH_MISMATCH,   CUBLAS_STATUS_MAPPING_ERROR, CUBLAS_STATUS_EXECUTION_FAILED,
    CUBLAS_STATUS_INTERNAL_ERROR,  CUBLAS_STATUS_NOT_SUPPORTED, CUBLAS_STATUS_LICENSE_ERROR};

/* clang-format off */
#define CUDNN_STATUSES(X)                                                                          \
    X(NOT_INITIALIZED) X(SUBLIBRARY_VERSION_MISMATCH) X(SERIALIZATION_VERSION_MISMATCH)            \
    X(DEPRECATED) X(LICENSE_ERROR) X(RUNTIME_IN_PROGRESS) X(RUNTIME_FP_OVERFLOW)                   \
    X(SUBLIBRARY_LOADING_FAILED) X(BAD_PARAM) X(BAD_PARAM_NULL_POINTER)                            \
    X(BAD_PARAM_MISALIGNED_POINTER) X(BAD_PARAM_NOT_FINALIZED) X(BAD_PARAM_OUT_OF_BOUND)           \
    X(BAD_PARAM_SIZE_INSUFFICIENT) X(BAD_PARAM_STREAM_MISMATCH) X(BAD_PARAM_SHAPE_MISMATCH)        \
    X(BAD_PARAM_DUPLICATED_ENTRIES) X(BAD_PARAM_ATTRIBUTE_TYPE) X(NOT_SUPPORTED)                   \
    X(NOT_SUPPORTED_GRAPH_PATTERN) X(NOT_SUPPORTED_SHAPE) X(NOT_SUPPORTED_DATA_TYPE)               \
    X(NOT_SUPPORTED_LAYOUT) X(NOT_SUPPORTED_INCOMPATIBLE_CUDA_DRIVER)                              \
    X(NOT_SUPPORTED_INCOMPATIBLE_CUDART) X(NOT_SUPPORTED_ARCH_MISMATCH)                            \
    X(NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING) X(NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE)          \
    X(NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT) X(NOT_SUPPORTED_PADDING)                           \
    X(NOT_SUPPORTED_BAD_LAUNCH_PARAM) X(INTERNAL_ERROR) X(INTERNAL_ERROR_COMPILATION_FAILED)       \
    X(INTERNAL_ERROR_UNEXPECTED_VALUE) X(INTERNAL_ERROR_HOST_ALLOCATION_FAILED)                    \
    X(INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED) X(INTERNAL_ERROR_BAD_LAUNCH_PARAM)                  \
    X(INTERNAL_ERROR_TEXTURE_CREATION_FAILED) X(EXECUTION_FAILED) X(EXECUTION_FAILED_CUDA_DRIVER)  \
    X(EXECUTION_FAILED_CUBLAS) X(EXECUTION_FAILED_CUDART) X(EXECUTION_FAILED_CURAND)
/* clang-format on */

static const int of_cudnn[] = {
#define X(name) CUDNN_STATUS_##name,
    CUDNN_STATUSES(X)
#undef X
};

enum { CASES = 150, SLOW_CASES = 600 };
enum { MOST_RUNS = 8 }; /* runs of a forward and three backwards of most ops, at most */

static int failures, warnings;

/* A clean failure names the library, and says what to do if memory is short. */
static void on_failure(lt_status status)
{
    const char *text = lt_errmsg();
    failures++;
    if (status == LT_ENOMEM
            ? !strstr(text, "try a smaller batch")
            : status != LT_EENV || !(strstr(text, "cuDNN 9") || strstr(text, "cuBLASLt ")))
        FAIL("status %d: %s", status, text);
}

static void count_warnings(void *ud, lt_log_level level, const char *text)
{
    (void)ud, (void)text;
    warnings += level == LT_LOG_WARN;
}

typedef struct target { /* an op and the library that it calls */
    const char *op, *options, *shapes;
    lt_dtype dtype;
    bool f32_grads;
} target;

static void run(machine *m, const target *t)
{
    const spec s = {.op = t->op,
                    .options = t->options,
                    .dtype = t->dtype,
                    .shapes = t->shapes,
                    .spacings = 4,
                    .f32_grads = t->f32_grads,
                    .slack = {.by = t->dtype == LT_F32 ? 0x1p-11 : 0x1p-4}};
    check_call(m, &s, t->op);
}

static uint64_t draw(uint64_t *seed, uint64_t n)
{
    *seed = *seed * 6364136223846793005 + 1442695040888963407;
    return (*seed >> 33) % n;
}

/* Opens a device, runs the op while calls are refused, and then without refusals. */
static void run_case(const target *t, stand_in *(*open)(void), uint64_t most, const int *statuses,
                     uint64_t n, uint64_t *seed)
{
    static const int times[] = {1, 1, 2, 5, 20, 1 << 30};
    machine m = machine_with(true);
    stand_in *library = open();
    lt_set_log(m.ctx, count_warnings, NULL);
    for (int i = 0; i < 3; i++)
        library->engines[0][i] =
            (stand_in_engine){.number = 1 + i, .note = -1, .workspace = 64 * (3 - i)};
    library->runs_only = draw(seed, 2);
    library->refuse_at = 1 + (int)draw(seed, library->runs_only ? MOST_RUNS : most);
    library->refusals = times[draw(seed, sizeof times / sizeof *times)];
    library->refuse_with = statuses[draw(seed, n)];
    printf("%s: from %s %d, %d give status %d\n", t->op, library->runs_only ? "run" : "call",
           library->refuse_at, library->refusals, library->refuse_with);
    warnings = 0;
    m.on_failure = on_failure;
    run(&m, t);
    CHECK(warnings <= 1);
    library->refuse_at = 0;
    m.on_failure = NULL;
    run(&m, t);
    CHECK(warnings <= 1);
    lt_ctx_free(m.ctx);
    CHECK_EQ(library->live, 0);
}

static int cases(void) { return getenv("LUATRAIN_TEST_SLOW") ? SLOW_CASES : CASES; }

static stand_in *open_dnn(void) { return open_stand_in("libcudnn.so.9"); }
static stand_in *open_blas(void) { return open_stand_in(LT_CUBLASLT_SONAME); }

TEST(refusals_of_cudnn)
{
    static const target targets[] = {
        {"conv2d", "pad=1", "2x5x4x3, 4x3x3x3, 4", LT_F32, false},
        {"conv2d", "stride=2", "1x5x5x2, 3x3x3x2", LT_F16, true},
    };
    uint64_t seed = 11;
    failures = 0;
    for (int i = 0; i < cases(); i++)
        run_case(&targets[i % 2], open_dnn, 500, of_cudnn, sizeof of_cudnn / sizeof *of_cudnn,
                 &seed);
    CHECK(failures > 0);
}

TEST(refusals_of_cublaslt)
{
    static const target targets[] = {
        {"linear", "", "3x4, 5x4, 5", LT_F32, false},
        {"linear", "", "3x4, 5x4, 5", LT_F16, true},
        {"matmul", "", "3x4, 4x5", LT_F32, false},
        {"matmul", "", "1x2x4, 3x4x5", LT_F32, false},
    };
    uint64_t seed = 12;
    failures = 0;
    for (int i = 0; i < cases(); i++)
        run_case(&targets[i % 4], open_blas, 120, of_cublaslt,
                 sizeof of_cublaslt / sizeof *of_cublaslt, &seed);
    CHECK(failures > 0);
}
#else
TEST(refusals) { SKIP("cuDNN's and cuBLASLt's headers are not installed"); }
#endif
