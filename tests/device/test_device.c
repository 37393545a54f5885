/* test_device.c - a context with an accelerator: opening it and the errors, tensors on two devices
 * and copies between them, and invalid calls. The accelerator is emulated; only its own functions
 * can access its memory. tests/cuda/test_device.c tests the functions of the plugin. */
#include "amp/amp.h"
#include "core/tensor.h"
#include "data/data.h"
#include "dist/dist.h"
#include "tests/device/emu.h"

static const int64_t two_by_three[] = {2, 3};
static const float six[] = {1, -2, 3.5f, 4, 0.1f, -70000};

static lt_tensor *sixes(lt_ctx *ctx) { return lt_tensor_from(ctx, LT_F32, 2, two_by_three, six); }

/* Checks the values of an f32 tensor on any device. */
static void check_values(lt_tensor *x, const float *want)
{
    float got[64];
    CHECK(lt_count(x) <= 64);
    CHECK_OK(lt_read(x, got));
    for (int64_t i = 0; i < lt_count(x); i++)
        CHECK_NEAR(got[i], want[i], 0);
}

/* ==== Opening ================================================================================= */

static lt_ctx *open_on(const char *device)
{
    return lt_open(&(lt_config){.device = device, .threads = 1});
}

static void check_refused(const char *device, lt_status code, const char *text)
{
    lt_ctx *ctx = open_on(device);
    CHECK(!ctx);
    CHECK_EQ(lt_errcode(), code);
    CHECK_MSG(text);
}

typedef struct log_line {
    lt_log_level level;
    char line[256];
} log_line;

static void keep_line(void *ud, lt_log_level level, const char *line)
{
    log_line *t = ud;
    t->level = level;
    snprintf(t->line, sizeof t->line, "%s", line);
}

/* Checks that auto selects the CPU, and logs the reason when a log function is set. */
static void check_falls_back(lt_log_level level, const char *why)
{
    log_line t = {.line = ""};
    char backend[96], cpu[96];
    lt_ctx *ctx = open_on("auto");
    CHECK(ctx);
    CHECK_STR(lt_device_name(ctx), "cpu");
    CHECK_STR(lt_backend(ctx, backend, 96), lt_backend(NULL, cpu, 96));
    lt_set_log(ctx, keep_line, &t);
    CHECK(strncmp(t.line, why, strlen(why)) == 0);
    CHECK_EQ(t.level, level);
    lt_ctx_free(ctx);
}

TEST(without_the_plugin)
{
    unsetenv("LUATRAIN_PLUGINS");
    check_refused("cuda", LT_EENV,
                  "device cuda: libluatrain-cuda.so is missing; it is built if nvcc is installed; "
                  "use the device cpu (--device cpu)");
    check_falls_back(LT_LOG_DEBUG, "computing on the CPU: libluatrain-cuda.so is missing; it is "
                                   "built if nvcc is installed");
}

TEST(machines_that_cannot_run_the_backend)
{
    static const struct {
        int driver, devices, capability;
        lt_log_level level;
        const char *why;
    } cases[] = {
        {0, 0, 0, LT_LOG_DEBUG, "no NVIDIA driver (libcuda.so.1) is installed"},
        {12020, 1, 9, LT_LOG_WARN,
         "the NVIDIA driver supports CUDA 12.2, but this build requires 13.0; install a newer "
         "driver"},
        {13000, 0, 9, LT_LOG_DEBUG,
         "no CUDA device is available to this process (CUDA_VISIBLE_DEVICES can hide devices)"},
        {13000, 1, 7, LT_LOG_WARN,
         "cuda:0 is too old: its compute capability is 7, but this build requires 8 (A100) or "
         "more"}};
    char text[256];
    use_emu();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SHIM(shim_set_machine)(cases[i].driver, cases[i].devices, cases[i].capability);
        snprintf(text, sizeof text, "device cuda:0: %s; use the device cpu (--device cpu)",
                 cases[i].why);
        check_refused("cuda:0", LT_EENV, text);
        snprintf(text, sizeof text, "computing on the CPU: %s", cases[i].why);
        check_falls_back(cases[i].level, text);
    }
    SHIM(shim_set_machine)(13010, 2, 9);
    check_refused("cuda:2", LT_EENV,
                  "device cuda:2: cuda:2 is out of range; this machine has 2, starting at cuda:0");
    lt_ctx_free(open_device());
    SHIM(shim_reset)();
}

TEST(devices_that_do_not_exist)
{
    use_emu();
    check_refused("cuda:", LT_EUSAGE, "unknown device 'cuda:'; it must be auto, cpu or cuda[:i]");
    check_refused("gpu", LT_EUSAGE, "unknown device 'gpu'; it must be auto, cpu or cuda[:i]");
    CHECK(!lt_ctx_new(&(lt_config){.device = "cuda"}));
    CHECK_MSG("device cuda: lt_ctx_new() supports only the CPU; use lt_open() for others");
}

TEST(a_file_that_is_not_a_plugin)
{
    char folder[] = "/tmp/lt_device_XXXXXX", path[64];
    CHECK(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/libluatrain-cuda.so", folder);
    CHECK_OK(lt_file_replace(path, "no library", 10));
    setenv("LUATRAIN_PLUGINS", folder, 1);
    check_refused("cuda", LT_EENV, "device cuda: cannot load a plugin: ");
    CHECK_MSG("too short; use the device cpu (--device cpu)");
    check_falls_back(LT_LOG_WARN, "computing on the CPU: cannot load a plugin: ");
    unlink(path);
    rmdir(folder);
}

TEST(opening_a_device)
{
    char backend[96];
    use_emu();
    lt_ctx *ctx = open_on("cuda:1"), *other = open_on("auto");
    CHECK(ctx && other);
    CHECK_STR(lt_device_name(ctx), "cuda:1");
    CHECK_STR(lt_device_name(other), "cuda:0");
    CHECK_STR(lt_backend(ctx, backend, sizeof backend), "emulator (reference kernels)");
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 0, NULL, 1);
    CHECK_STR(lt_device_of(x), "cuda:1");
    lt_ctx_free(ctx);
    lt_ctx_free(other);
    lt_release(x); /* the device is freed after its last tensor */
}

/* ==== Tensors ================================================================================= */

TEST_EMU(the_library_gives_no_pointer_to_device_memory)
{
    lt_tensor *x = sixes(ctx);
    CHECK(!lt_data(x));
    CHECK_MSG(
        "the CPU cannot read a tensor on cuda:0; copy it with lt_to(x, \"cpu\") or lt_read()");
    check_values(x, six);
    lt_release(x);
}

TEST_EMU(elements)
{
    double value;
    int64_t integer;
    lt_tensor *x = sixes(ctx), *row = lt_rows(x, 1, 1);
    CHECK_OK(lt_item(row, 1, &value));
    CHECK_NEAR(value, 0.1f, 0);
    CHECK_OK(lt_item_integer(x, 5, &integer));
    CHECK_EQ(integer, -70000);
    CHECK_STR(lt_device_of(row), "cuda:0");
    CHECK_OK(lt_fill(row, 7));
    check_values(x, (float[]){1, -2, 3.5f, 7, 7, 7});
    CHECK_OK(lt_write(row, six));
    check_values(x, (float[]){1, -2, 3.5f, 1, -2, 3.5f});
    RELEASE(row, x);
}

TEST_EMU(copies_between_devices)
{
    lt_tensor *x = sixes(ctx), *here = lt_to(x, "cpu"), *there = lt_to(here, "cuda");
    CHECK_STR(lt_device_of(here), "cpu");
    CHECK(memcmp(lt_data(here), six, sizeof six) == 0);
    CHECK_STR(lt_device_of(there), "cuda:0");
    CHECK_OK(lt_fill(x, 0));
    check_values(there, six);
    lt_tensor *same = lt_to(there, "cuda:0"); /* a view */
    CHECK_OK(lt_fill(there, 3));
    check_values(same, (float[]){3, 3, 3, 3, 3, 3});
    CHECK(!lt_to(x, "cuda:1"));
    CHECK_MSG("device 'cuda:1' is not available; this context has 'cpu' and 'cuda:0'");
    RELEASE(same, there, here, x);
}

/* Copies between all dtypes, in every direction, have the results of the CPU. */
TEST_EMU(copies_convert)
{
    lt_tensor *from = sixes(ctx);
    for (int a = 0; a < LT_DTYPE_COUNT; a++)
        for (int b = 0; b < LT_DTYPE_COUNT; b++)
            for (int way = 0; way < 4; way++) {
                char first[48], want[48], got[48];
                lt_device *at = ctx->devices[way / 2], *to = ctx->devices[way % 2];
                lt_tensor *x = lt__tensor_new(ctx, at, (lt_dtype)a, 2, two_by_three, true);
                lt_tensor *y = lt__tensor_new(ctx, to, (lt_dtype)b, 2, two_by_three, true);
                lt_convert(first, (lt_dtype)a, six, LT_F32, 6);
                lt_convert(want, (lt_dtype)b, first, (lt_dtype)a, 6);
                CHECK_OK(lt_copy(x, from));
                CHECK_OK(lt_copy(y, x));
                CHECK_OK(lt_read(y, got));
                CHECK(memcmp(got, want, 6 * lt_dtype_bytes((lt_dtype)b)) == 0);
                RELEASE(x, y);
            }
    lt_release(from);
}

TEST(random_numbers_equal_those_of_the_cpu)
{
    static const int64_t dims[] = {5000};
    lt_ctx *ctx[2] = {open_emu(), open_reference()};
    static float value[2][5000];
    for (int normal = 0; normal < 2; normal++) {
        for (int i = 0; i < 2; i++) {
            lt_tensor *x = lt_tensor_new(ctx[i], LT_F32, 1, dims);
            CHECK_OK((normal ? lt_fill_normal : lt_fill_uniform)(x, LT_RNG_USER, 3, 1, 0, 1));
            CHECK_OK(lt_read(x, value[i]));
            lt_release(x);
        }
        CHECK(memcmp(value[0], value[1], sizeof value[0]) == 0);
    }
    lt_ctx_free(ctx[0]);
    lt_ctx_free(ctx[1]);
}

TEST_EMU(memory_is_counted)
{
    enum { BYTES = 4 << 20 };
    size_t before = lt_memory_stats(ctx).live;
    CHECK_EQ(lt_device_memory_stats(ctx).live, 0);
    CHECK_OK(lt_scope_push(ctx));
    lt_tensor *x = lt_tensor_new(ctx, LT_U8, 1, (int64_t[]){BYTES});
    size_t taken = lt_device_memory_stats(ctx).live;
    CHECK(taken >= BYTES && taken <= BYTES + 4096); /* a sanitizer adds a guard */
    CHECK(lt_memory_stats(ctx).live >= before + BYTES);
    CHECK(lt_memory_stats(ctx).live < before + taken + 4096); /* its header is on the CPU */
    lt_scope_pop(ctx);
    CHECK(lt_is_dead(x) && !lt_device_of(x));
    CHECK_EQ(lt_device_memory_stats(ctx).live, 0);
    CHECK_EQ(lt_device_memory_stats(ctx).peak, taken);
    CHECK(lt_device_memory_stats(ctx).cached >= BYTES);
    lt_memory_trim(ctx);
    CHECK_EQ(lt_device_memory_stats(ctx).cached, 0);
    CHECK(!lt_tensor_new(ctx, LT_U8, 1, (int64_t[]){(int64_t)1 << 40}));
    CHECK_MSG("out of memory on cuda:0: 1048576.0 MiB requested, 0.0 MiB in use");
    lt_release(x);
}

TEST_EMU(files)
{
    char path[] = "/tmp/lt_device_XXXXXX";
    const char *names[] = {"x"};
    CHECK(close(mkstemp(path)) == 0);
    lt_tensor *x = sixes(ctx), *half = lt_tensor_new(ctx, LT_F16, 2, two_by_three);
    CHECK_OK(lt_file_save(path, 1, names, &x, 0, NULL));
    lt_file *file = lt_file_open(ctx, path);
    CHECK(file);
    lt_tensor *y = lt_file_read(file, 0);
    CHECK_STR(lt_device_of(y), "cuda:0");
    check_values(y, six);
    CHECK_OK(lt_file_read_into(file, 0, half));
    CHECK_OK(lt_copy(y, half));
    check_values(y, (float[]){1, -2, 3.5f, 4, 0.0999755859375f, -INFINITY});
    lt_file_close(file);
    unlink(path);
    RELEASE(x, y, half);
}

/* The images of a data set may be on any device; batches are on the context's device. */
TEST_EMU(batches)
{
    lt_tensor *images = lt_tensor_from(ctx, LT_F32, 3, (int64_t[]){6, 1, 1}, six), *x, *y;
    lt_tensor *labels = lt_tensor_full(ctx, LT_I64, 1, (int64_t[]){6}, 2);
    for (int here = 0; here < 2; here++) {
        lt_tensor *given = here ? lt_to(images, "cpu") : lt_retain(images);
        lt_source *source = lt_source_tensors(ctx, given, labels);
        CHECK(source);
        lt_batches *batches = lt_batches_new(ctx, source, &(lt_batch_options){.batch = 6});
        CHECK_OK(lt_batches_next(batches, &x, &y));
        CHECK_STR(lt_device_of(x), "cuda:0");
        CHECK_STR(lt_device_of(y), "cuda:0");
        check_values(x, six);
        RELEASE(x, y);
        lt_batches_free(batches);
        lt_source_release(source);
        lt_release(given);
    }
    RELEASE(images, labels);
}

/* ==== Calls =================================================================================== */

TEST_EMU(tensors_of_two_devices)
{
    lt_tensor *x = sixes(ctx), *here = lt_to(x, "cpu");
    lt_tensor *one = lt_tensor_full(ctx, LT_F32, 0, NULL, 1);
    CHECK(!lt_run(ctx, "mul", NULL, x, here, NULL));
    CHECK_MSG("mul: x is on cuda:0, but y is on cpu; copy one to the device of the other, e.g. "
              "y:to('cuda:0')");
    CHECK(!lt_run(ctx, "cat", "axis=0", x, x, here, NULL));
    CHECK_MSG("cat: x is on cuda:0, but x is on cpu; copy one to the device of the other");
    CHECK_OK(lt_set_requires_grad(here, true));
    lt_tensor *y = lt_run(ctx, "sum", NULL, here, NULL);
    CHECK_FAILS(lt_backward(y, one), LT_EINVAL,
                "backward: the gradient is on cuda:0, but the loss is on cpu; copy it, e.g. "
                "grad:to('cpu')");
    CHECK_OK(lt_backward(y, NULL)); /* the call and its gradient are on the CPU */
    CHECK_STR(lt_device_of(lt_grad(here)), "cpu");
    check_values(lt_grad(here), (float[]){1, 1, 1, 1, 1, 1});
    RELEASE(y, one, here, x);
}

TEST(without_a_kernel)
{
    setenv("SHIM_HIDES", "pow", 1);
    lt_ctx *ctx = open_emu();
    unsetenv("SHIM_HIDES");
    lt_tensor *x = sixes(ctx), *here = lt_to(x, "cpu");
    CHECK(!lt_run(ctx, "pow", NULL, x, x, NULL));
    CHECK_EQ(lt_errcode(), LT_EUNSUPPORTED);
    CHECK_MSG("pow: no forward kernel on cuda:0; use the CPU, with copies by x:to('cpu')");
    lt_tensor *y = lt_run(ctx, "pow", NULL, here, here, NULL);
    CHECK_STR(lt_device_of(y), "cpu");
    lt_tensor *wide = lt_run(ctx, "cast", "dtype=f64", x, NULL);
    CHECK(wide && !lt_run(ctx, "relu", NULL, wide, NULL));
    CHECK_MSG("relu: cuda:0 does not support f64 for this op; cast to f32, or compute on the CPU");
    RELEASE(wide, y, here, x);
    lt_ctx_free(ctx);
}

/* They run while it is freed. These use the op's definition and the CPU's device. */
TEST_EMU(kernels_that_are_queued_when_the_context_is_freed)
{
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 4, (int64_t[]){1, 4, 4, 1}, 1);
    lt_tensor *y = lt_run(ctx, "avg_pool2d", "kernel=2", x, NULL);
    lt_tensor *z = lt_run(ctx, "pad", "before=0,1,1,0 after=0,1,1,0", x, NULL);
    CHECK(y && z);
    RELEASE(x, y, z);
}

static lt_status no_sum(void *ud, double *numbers, int64_t n, bool backward)
{
    (void)ud, (void)numbers, (void)n, (void)backward;
    return LT_OK;
}

TEST_EMU(ranks)
{
    lt_group *group[2];
    CHECK_OK(lt_local_open(2, NULL, group));
    CHECK(!lt_reducer_new(ctx, group[0], &(lt_reducer_config){.vranks = 2}));
    CHECK_EQ(lt_errcode(), LT_EUSAGE);
    CHECK_MSG(
        "a deterministic run (with vranks) requires the CPU, but this rank computes on cuda:0; use "
        "the device cpu (--device cpu)");
    lt_group_close(group[0]);
    lt_group_close(group[1]);
    lt_tensor *x = sixes(ctx), *c = lt_tensor_full(ctx, LT_F32, 1, (int64_t[]){3}, 1);
    lt_set_allreduce(ctx, no_sum, NULL);
    CHECK(!lt_run(ctx, "batch_norm", "train=true sync=true", x, c, c, c, c, NULL));
    CHECK_MSG(
        "batch_norm: sums over all ranks are not supported on cuda:0 yet; use the CPU, or omit "
        "sync");
    RELEASE(c, x);
}

static void add_seconds(void *ud, const lt_call *call, bool backward, double seconds)
{
    double *sum = ud;
    sum[backward] += seconds + (call->in != NULL);
}

TEST_EMU(timers)
{
    double sum[2] = {0};
    lt_tensor *x = sixes(ctx);
    CHECK_OK(lt_set_requires_grad(x, true));
    lt_set_timer(ctx, add_seconds, sum);
    lt_tensor *y = lt_run(ctx, "sum", NULL, x, NULL);
    CHECK_OK(lt_backward(y, NULL));
    CHECK(sum[0] > 1 && sum[0] < 2 && sum[1] > 1 && sum[1] < 2);
    RELEASE(y, x);
}

/* ==== Parameters ============================================================================== */

/* SHA-256 of the weights after steps in half precision. Both ops read their parameters through half
 * copies: the kernel of linear computes f32 gradients, that of mul computes half ones. Each step
 * runs backward twice, so that gradients are added. */
static void train_halves(lt_ctx *ctx, lt_dtype dtype, char hex[65])
{
    lt_params *params = lt_params_new(ctx);
    lt_tensor *p[2] = {
        lt_param_new(ctx, LT_F32, 2, (int64_t[]){3, 3}, (lt_init){LT_INIT_NORMAL, 0, 1}),
        lt_param_new(ctx, LT_F32, 1, (int64_t[]){3}, (lt_init){LT_INIT_UNIFORM, 0.5, 1.5})};
    CHECK_OK(lt_params_add(params, "w", p[0]));
    CHECK_OK(lt_params_add(params, "s", p[1]));
    CHECK_OK(lt_params_place(params));
    CHECK_STR(lt_device_of(p[0]), lt_device_name(ctx));
    lt_optim *optim = lt_optim_new(ctx, "momentum_step", p, 2);
    lt_opt opts[LT_MAX_OPT];
    CHECK_OK(lt_opts_parse(&lt_optim_def(optim)->schema, "lr=0.01", opts));
    lt_set_autocast(ctx, dtype);
    double norm[4];
    for (int step = 0; step < 4; step++) {
        lt_tensor *x = lt_tensor_new(ctx, LT_F32, 2, two_by_three);
        CHECK_OK(lt_fill_normal(x, LT_RNG_USER, (uint64_t)step, 0, 0, 1));
        for (int part = 0; part < 2; part++) {
            lt_tensor *y = lt_run(ctx, "linear", NULL, x, p[0], NULL);
            lt_tensor *z = lt_run(ctx, "mul", NULL, y, lt_half(p[1], dtype), NULL);
            lt_tensor *zero = lt_run(ctx, "sub", NULL, z, z, NULL);
            lt_tensor *loss = lt_run(ctx, "mse_loss", NULL, z, zero, NULL);
            CHECK(loss);
            CHECK_EQ(lt_tensor_dtype(z), dtype);
            CHECK_OK(lt_backward(loss, NULL));
            RELEASE(loss, zero, z, y);
        }
        lt_release(x);
        CHECK_OK(lt_optim_grad_norm(optim, &norm[step]));
        CHECK(norm[step] > 0);
        CHECK_OK(lt_optim_step(optim, (const lt_opt *[]){opts}, 1, NULL));
    }
    CHECK_OK(lt_params_sha256(params, hex));
    lt_optim_free(optim);
    lt_params_free(params);
    RELEASE(p[0], p[1]);
}

TEST(half_copies)
{
    static const lt_dtype dtypes[] = {LT_BF16, LT_F16};
    for (int k = 0; k < 2; k++) {
        char hex[2][65];
        lt_ctx *ctx[2] = {open_emu(), open_reference()};
        for (int i = 0; i < 2; i++) {
            train_halves(ctx[i], dtypes[k], hex[i]);
            lt_ctx_free(ctx[i]);
        }
        CHECK_STR(hex[0], hex[1]);
    }
}

/* A kernel whose gradients are always bf16: they are converted after it runs, both when they are
 * the first and when they are added. */
TEST_EMU(gradients_of_half_copies)
{
    lt_params *params = lt_params_new(ctx);
    lt_tensor *p =
        lt_param_new(ctx, LT_F32, 2, (int64_t[]){3, 2}, (lt_init){LT_INIT_CONSTANT, 1, 0});
    lt_tensor *x = sixes(ctx), *one = lt_tensor_full(ctx, LT_BF16, 2, (int64_t[]){2, 2}, 1);
    lt_tensor *half = lt_run(ctx, "cast", "dtype=bf16", x, NULL);
    CHECK_OK(lt_params_add(params, "p", p));
    CHECK_OK(lt_params_place(params));
    for (int k = 1; k < 3; k++) {
        lt_tensor *y = lt_run(ctx, "matmul", NULL, half, lt_half(p, LT_BF16), NULL);
        CHECK(y && lt_tensor_dtype(y) == LT_BF16);
        CHECK_OK(lt_backward(y, one));
        lt_release(y);
        CHECK_EQ(lt_tensor_dtype(lt_grad(p)), LT_F32);
        float sum = -70144, first = (float)k * 5; /* of columns, in bf16 */
        check_values(lt_grad(p), (float[]){first, first, (float)k * -1.8984375f,
                                           (float)k * -1.8984375f, (float)k * sum, (float)k * sum});
    }
    RELEASE(half, one, x, p);
    lt_params_free(params);
}

static void ignore_timing(void *ud, const lt_call *call, bool backward, double seconds)
{
    (void)ud, (void)call, (void)backward, (void)seconds;
}

/* The error message about the first value that is not finite. To find it, backward inspects all
 * values and recomputes some of them, here with a timer that makes every kernel synchronous. */
static void overflow_message(lt_ctx *ctx, char text[512])
{
    lt_scaler scaler = lt_scaler_init(LT_SCALE_STATIC, 0, 0);
    lt_loss_scale *scale = lt_loss_scale_new(ctx, &scaler);
    CHECK_OK(lt_use_loss_scale(ctx, scale));
    lt_set_autocast(ctx, LT_F16);
    lt_tensor *x = lt_tensor_full(ctx, LT_F32, 2, two_by_three, 300);
    CHECK_OK(lt_set_requires_grad(x, true));
    lt_tensor *y = lt_run(ctx, "linear", NULL, x, x, NULL);
    lt_tensor *loss = lt_run(ctx, "mean", NULL, y, NULL);
    lt_set_timer(ctx, ignore_timing, NULL);
    CHECK_EQ(lt_backward(loss, NULL), LT_ENUMERIC);
    lt_set_timer(ctx, NULL, NULL);
    snprintf(text, 512, "%s", lt_errmsg());
    CHECK_OK(lt_synchronize(ctx)); /* the error is reported once */
    RELEASE(loss, y, x);
    CHECK_OK(lt_use_loss_scale(ctx, NULL));
    lt_loss_scale_free(scale);
}

TEST(the_first_value_that_is_not_finite)
{
    char text[2][512];
    lt_ctx *ctx[2] = {open_emu(), open_reference()};
    for (int i = 0; i < 2; i++) {
        overflow_message(ctx[i], text[i]);
        lt_ctx_free(ctx[i]);
    }
    CHECK_STR(text[0], text[1]);
    CHECK(strstr(text[0],
                 "linear: its output is the first non-finite tensor: 270000 does not fit in f16"));
}
