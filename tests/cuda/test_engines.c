/* test_engines.c - which cuDNN engine is chosen, how plans are cached in memory and in a file, and
 * which tasks are left to other kernels. The library is a stand-in with invented engines.
 */
#include "tests/lt_test.h"

#ifdef LT_WITH_CUDNN
#include "ops/cuda/cudnn_plan.h"
#include "tests/cuda/cuda_test.h"

enum { A, BE, FALLBACK }; /* modes of heuristics */

static stand_in *library;
static lt_cudnn_table table;
static lt_cuda_env env;
static lt_ctx *ctx;
static char notes[4096]; /* what was logged */
static bool warned;      /* one of them was a warning */

static void note(void *ud, lt_log_level level, const char *line)
{
    (void)ud;
    warned = warned || level == LT_LOG_WARN;
    if (strlen(notes) + strlen(line) + 2 < sizeof notes)
        strcat(strcat(notes, line), "\n");
}

/* Opens the stand-in with its default engines. Tests may then change library->engines. */
static void begin(void)
{
    char text[512];
    library = open_stand_in("libcudnn.so.9");
    if (lt__cudnn_open_library(&table, text, sizeof text) != 0)
        FAIL("%s", text);
    ctx = lt_open(&(lt_config){.reference = true});
    lt_set_log(ctx, note, NULL);
    notes[0] = 0;
    warned = false;
    env = (lt_cuda_env){
        .host = &test_host, .device = ctx->devices[0], .stream = test_stream, .model = "model A"};
}

static lt_cudnn *make(const lt_cudnn_config *config)
{
    char text[512];
    lt_cudnn *d = lt__cudnn_new(&table, &env, config, text, sizeof text);
    if (!d)
        FAIL("%s", text);
    return d;
}

static void end(void)
{
    lt_ctx_free(ctx);
    CHECK_EQ(library->live, 0);
}

#define TEST_ENGINES(title) TEST_BETWEEN(title, begin(), end())

/* 2 images of 5 x 6, from 3 channels to 4, with a kernel of 3 x 3. */
static lt_cudnn_task sample(void)
{
    return (lt_cudnn_task){.kind = LT_CUDNN_CONV,
                           .dtype = LT_F16,
                           .aligned = 1,
                           .n = 2,
                           .in = 3,
                           .out = 4,
                           .groups = 1,
                           .size = {5, 6},
                           .out_size = {5, 6},
                           .kernel = {3, 3},
                           .stride = {1, 1},
                           .pad = {1, 1},
                           .dilation = {1, 1}};
}

/* The number of the engine chosen for a task, or 0 if none. */
static int engine_for(const lt_cudnn_config *config, lt_cudnn_task task)
{
    lt_cudnn *d = make(config);
    size_t bytes;
    lt_status status = lt__cudnn_plan(d, ctx, &task, &bytes);
    int number = atoi(lt__cudnn_choice(d, &task));
    CHECK_EQ(status, number > 0 ? LT_OK : LT_EUNSUPPORTED);
    lt__cudnn_free(d);
    return number;
}

/* ==== Choosing an engine ====================================================================== */

TEST_ENGINES(heuristic_modes_are_tried_in_order)
{
    const lt_cudnn_config config = {.tf32 = true};
    library->engines[BE][0] = (stand_in_engine){.number = 2, .note = -1};
    library->engines[FALLBACK][0] = (stand_in_engine){.number = 3, .note = -1};
    CHECK_EQ(engine_for(&config, sample()), 1);
    CHECK_EQ(library->queries[BE] + library->queries[FALLBACK], 0);
    library->engines[A][0].fails = true;
    CHECK_EQ(engine_for(&config, sample()), 2);
    CHECK_EQ(library->queries[FALLBACK], 0);
    library->engines[BE][0].number = 0;
    CHECK_EQ(engine_for(&config, sample()), 3);
    library->engines[FALLBACK][0].fails = true;
    CHECK_EQ(engine_for(&config, sample()), 0);
}

TEST_ENGINES(the_workspace_limit)
{
    lt_cudnn_config config = {.tf32 = true};
    library->engines[A][0].workspace = ((int64_t)512 << 20) + 1;
    library->engines[A][1] = (stand_in_engine){.number = 2, .note = -1, .workspace = 1001};
    library->engines[A][2] = (stand_in_engine){.number = 3, .note = -1, .workspace = 1000};
    CHECK_EQ(engine_for(&config, sample()), 2);
    env.memory = (size_t)30 << 30;
    CHECK_EQ(engine_for(&config, sample()), 1);
    config.workspace = 1000;
    CHECK_EQ(engine_for(&config, sample()), 3);
    config.workspace = 999;
    CHECK_EQ(engine_for(&config, sample()), 0);
}

TEST(the_workspace_limit_depends_on_the_memory)
{
    const size_t mib = (size_t)1 << 20;
    CHECK_EQ(lt__cudnn_workspace(0), 512 * mib); /* unknown */
    CHECK_EQ(lt__cudnn_workspace(16000 * mib), 512 * mib);
    CHECK_EQ(lt__cudnn_workspace(40000 * mib), 800 * mib);
    CHECK_EQ(lt__cudnn_workspace(80000 * mib), 1536 * mib);
}

/* The engine chosen if engine 1 has this note and engine 2, of the fallback, has none. */
static int with_note(cudnnBackendNumericalNote_t noted, const lt_cudnn_config *config,
                     lt_dtype dtype, lt_cudnn_kind kind)
{
    lt_cudnn_task task = sample();
    task.dtype = dtype;
    task.kind = kind;
    library->engines[A][0].note = (int)noted;
    library->engines[FALLBACK][0] = (stand_in_engine){.number = 2, .note = -1};
    return engine_for(config, task);
}

TEST_ENGINES(imprecise_engines_must_be_allowed)
{
    const lt_cudnn_config tf32 = {.tf32 = true}, plain = {.tf32 = false};
    const lt_cudnn_config strict = {.tf32 = true, .deterministic = true};
    const cudnnBackendNumericalNote_t halves = CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION;
    static const cudnnBackendNumericalNote_t rough[] = {
        CUDNN_NUMERICAL_NOTE_FFT, CUDNN_NUMERICAL_NOTE_WINOGRAD,
        CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4, CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6,
        CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13};
    const cudnnBackendNumericalNote_t cores = CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
    const cudnnBackendNumericalNote_t down = CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS;
    for (size_t i = 0; i < sizeof rough / sizeof *rough; i++) {
        CHECK_EQ(with_note(rough[i], &tf32, LT_F16, LT_CUDNN_CONV), 1);
        CHECK_EQ(with_note(rough[i], &strict, LT_F16, LT_CUDNN_CONV), 2);
    }
    CHECK_EQ(with_note(halves, &tf32, LT_F16, LT_CUDNN_CONV), 2); /* sums are in f32 */
    CHECK_EQ(with_note(cores, &tf32, LT_F32, LT_CUDNN_CONV), 1);
    CHECK_EQ(with_note(cores, &plain, LT_F32, LT_CUDNN_CONV), 2);
    CHECK_EQ(with_note(cores, &plain, LT_F16, LT_CUDNN_CONV), 1);
    CHECK_EQ(with_note(down, &tf32, LT_F32, LT_CUDNN_CONV), 2);
    CHECK_EQ(with_note(down, &tf32, LT_F16, LT_CUDNN_CONV), 1);
    CHECK_EQ(with_note(CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP, &strict, LT_F32, LT_CUDNN_CONV), 1);
}

TEST_ENGINES(nondeterministic_engines_come_last)
{
    lt_cudnn_config config = {.tf32 = true};
    const cudnnBackendNumericalNote_t any = CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
    CHECK_EQ(with_note(any, &config, LT_F16, LT_CUDNN_CONV), 2);
    library->engines[FALLBACK][0].fails = true;
    CHECK_EQ(engine_for(&config, sample()), 1);
    config.deterministic = true;
    CHECK_EQ(engine_for(&config, sample()), 0);
}

/* ==== Tasks that cuDNN does not run =========================================================== */

/* Checks that the task is unsupported, and that the second call uses the cached answer. */
static void check_unsupported(lt_cudnn_task task)
{
    lt_cudnn *d = make(&(lt_cudnn_config){.tf32 = true});
    void *operand[LT_CUDNN_OPERANDS] = {NULL};
    size_t bytes = 1;
    CHECK_EQ(lt__cudnn_plan(d, ctx, &task, &bytes), LT_EUNSUPPORTED);
    CHECK_EQ(bytes, 0);
    int queries = library->queries[A];
    CHECK_EQ(lt__cudnn_run(d, ctx, &task, operand, NULL, 0), LT_EUNSUPPORTED);
    CHECK_EQ(library->queries[A], queries);
    CHECK_EQ(library->run, 0);
    lt__cudnn_free(d);
}

TEST_ENGINES(tasks_for_our_own_kernels)
{
    lt_cudnn_task task = sample();
    task.dtype = LT_F64;
    check_unsupported(task);
    task = sample();
    task.n = 0;
    check_unsupported(task);
    task = sample();
    task.in = 0;
    check_unsupported(task);
    task = sample();
    task.out = 0;
    check_unsupported(task);
    CHECK_EQ(library->queries[A], 0); /* cuDNN was not called for any of these */
    library->engines[A][0].fails = true;
    check_unsupported(sample());
    CHECK(strstr(notes, "no cuDNN engine supports task") != NULL);
    library->engines[A][0].fails = false;
    task = sample();
    task.out_size[0] = 4; /* inconsistent, so cuDNN rejects the graph */
    check_unsupported(task);
}

TEST_ENGINES(plans_for_a_device_of_another_machine_do_not_run)
{
    void *operand[LT_CUDNN_OPERANDS] = {NULL};
    const lt_cudnn_task task = sample();
    size_t bytes;
    lt_cudnn *d = make(&(lt_cudnn_config){.tf32 = true, .json = "{\"deviceName\": \"far\"}"});
    CHECK_OK(lt__cudnn_plan(d, ctx, &task, &bytes));
    CHECK_EQ(lt__cudnn_run(d, ctx, &task, operand, NULL, 0), LT_EUNSUPPORTED);
    char *json = lt__cudnn_properties(d);
    CHECK_STR(json, "{\"deviceName\": \"far\"}");
    free(json);
    lt__cudnn_free(d);
    d = make(&(lt_cudnn_config){.tf32 = true});
    json = lt__cudnn_properties(d);
    CHECK_STR(json, "{\"deviceName\": \"stand-in\"}");
    free(json);
    lt__cudnn_free(d);
}

/* ==== The plan cache ========================================================================== */

static float x[2 * 5 * 6 * 3 + 4], w[4 * 3 * 3 * 3 + 4], y[2][2 * 5 * 6 * 4 + 4];

TEST_ENGINES(plans_are_built_once_and_packs_for_each_run)
{
    lt_cudnn_task task = sample();
    size_t bytes;
    task.dtype = LT_F32;
    void *operand[LT_CUDNN_OPERANDS] = {x, w, y[0]};
    task.aligned = 0;
    x[31] = w[13] = 1;
    lt_cudnn *d = make(&(lt_cudnn_config){.tf32 = true});
    for (int i = 0; i < 4; i++) {
        operand[LT_CUDNN_Y] = y[i / 2];
        memset(y, 0xff, sizeof y);
        CHECK_OK(lt__cudnn_run(d, ctx, &task, operand, NULL, 0));
        CHECK_EQ(library->built, 1);
        CHECK_EQ(library->run, 1 + i);
        CHECK(y[i / 2][0] == 0 && isnan(y[1 - i / 2][0]));
    }
    task.n = 1;
    CHECK_OK(lt__cudnn_plan(d, ctx, &task, &bytes));
    CHECK_EQ(library->built, 2);
    for (int i = 2; i < 1100; i++) { /* more sizes than the cache holds */
        task.n = i;
        CHECK_OK(lt__cudnn_plan(d, ctx, &task, &bytes));
    }
    CHECK(library->live < 1100 * 12);
    lt__cudnn_free(d);
}

/* ==== Refusals ================================================================================ */

/* A status of each category, and all about the installation. */
static const cudnnStatus_t refusals[] = {CUDNN_STATUS_NOT_INITIALIZED,
                                         CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH,
                                         CUDNN_STATUS_LICENSE_ERROR,
                                         CUDNN_STATUS_RUNTIME_IN_PROGRESS,
                                         CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED,
                                         CUDNN_STATUS_BAD_PARAM,
                                         CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER,
                                         CUDNN_STATUS_NOT_SUPPORTED,
                                         CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDA_DRIVER,
                                         CUDNN_STATUS_NOT_SUPPORTED_INCOMPATIBLE_CUDART,
                                         CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING,
                                         CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE,
                                         CUDNN_STATUS_NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT,
                                         CUDNN_STATUS_INTERNAL_ERROR,
                                         CUDNN_STATUS_INTERNAL_ERROR_BAD_LAUNCH_PARAM,
                                         CUDNN_STATUS_EXECUTION_FAILED,
                                         CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER};
enum { REFUSALS = sizeof refusals / sizeof *refusals };

static char space[100]; /* a workspace */

/* Has all further calls refused. */
static void refuse_all(cudnnStatus_t status)
{
    library->calls = 0;
    library->refuse_at = 1;
    library->refusals = 1000;
    library->refuse_with = (int)status;
}

/* Runs a task in f32 on the arrays above. */
static lt_status run_task(lt_cudnn *d, int kind, int64_t add, size_t bytes)
{
    void *operand[LT_CUDNN_OPERANDS] = {x, w, y[0]};
    lt_cudnn_task task = sample();
    task.dtype = LT_F32;
    task.aligned = 0;
    task.kind = kind;
    task.add = add;
    return lt__cudnn_run(d, ctx, &task, operand, space, bytes);
}

/* Engines 1 to 5 of two modes; each needs 10 bytes less than the one before. */
static void set_engines(void)
{
    for (int i = 0; i < 5; i++)
        library->engines[i / 3 ? BE : A][i % 3] =
            (stand_in_engine){.number = 1 + i, .note = -1, .workspace = 100 - 10 * i};
}

TEST(the_next_engine_runs_after_a_refusal)
{
    for (int i = 0; i < REFUSALS; i++) {
        begin();
        set_engines();
        lt_cudnn *d = make(&(lt_cudnn_config){.tf32 = true});
        library->fail_run = (int)refusals[i];
        CHECK_OK(run_task(d, LT_CUDNN_CONV, 0, 100));
        CHECK_OK(run_task(d, LT_CUDNN_CONV, 0, 100));
        CHECK_EQ(library->built, 2);
        CHECK_EQ(library->run, 2);
        CHECK(strstr(notes, "cpu: cuDNN 9."));
        CHECK(strstr(notes, " refuses a convolution (y in f32, x 2x5x6x3, w 4x3x3x3): "
                            "CUDNN_STATUS_REFUSED: failure set by the test; luatrain tries other "
                            "algorithms, then its own kernel, which is slow\n"));
        CHECK(warned);
        warned = false;
        library->fail_run = (int)refusals[i];
        CHECK_OK(run_task(d, LT_CUDNN_CONV, 0, 100));
        CHECK_EQ(library->built, 3);
        CHECK(!warned); /* one warning is enough */
        lt__cudnn_free(d);
        end();
    }
}

/* Engine 4 is the first of mode B. After four refusals, engine 5 is not tried. */
TEST_ENGINES(our_own_kernel_runs_after_some_refusals)
{
    set_engines();
    lt_cudnn *d = make(&(lt_cudnn_config){.tf32 = true});
    refuse_all(CUDNN_STATUS_NOT_SUPPORTED);
    library->runs_only = true;
    CHECK_EQ(run_task(d, LT_CUDNN_CONV, 0, 100), LT_EUNSUPPORTED);
    library->refuse_at = 0;
    CHECK_EQ(library->built, 4);
    CHECK_EQ(run_task(d, LT_CUDNN_CONV, 0, 100), LT_EUNSUPPORTED);
    CHECK_EQ(library->built, 4);
    CHECK_EQ(library->run, 0);
    lt__cudnn_free(d);
}

/* The workspace is for the engine that was refused. */
TEST_ENGINES(the_next_engine_needs_more_workspace)
{
    library->engines[A][0].workspace = 50;
    library->engines[A][1] = (stand_in_engine){.number = 2, .note = -1, .workspace = 51};
    lt_cudnn *d = make(&(lt_cudnn_config){.tf32 = true});
    library->fail_run = CUDNN_STATUS_NOT_SUPPORTED;
    CHECK_EQ(run_task(d, LT_CUDNN_CONV, 0, 50), LT_EUNSUPPORTED);
    CHECK_OK(run_task(d, LT_CUDNN_CONV, 0, 51));
    CHECK_EQ(library->run, 1);
    lt__cudnn_free(d);
}

/* Our own kernel must not add to a result that cuDNN may have added to. */
TEST(a_refused_task_that_adds)
{
    for (int i = 0; i < REFUSALS; i++) {
        const bool may_have_run = CUDNN_STATUS_CATEGORY(refusals[i]) >=
                                      CUDNN_STATUS_INTERNAL_ERROR ||
                                  refusals[i] == CUDNN_STATUS_RUNTIME_IN_PROGRESS;
        begin();
        lt_cudnn *d = make(&(lt_cudnn_config){.tf32 = true});
        library->fail_run = (int)refusals[i];
        if (may_have_run)
            CHECK_FAILS(run_task(d, LT_CUDNN_CONV_WEIGHTS, 1, 100), LT_EENV,
                        "failed to run a plan: CUDNN_STATUS_REFUSED: failure set by the test");
        else
            CHECK_EQ(run_task(d, LT_CUDNN_CONV_WEIGHTS, 1, 100), LT_EUNSUPPORTED);
        lt__cudnn_free(d);
        end();
    }
}

/* Memory does not come back by itself, so this is an error. */
TEST_ENGINES(no_memory_for_a_task)
{
    static const char text[] = "out of memory in cuDNN; try a smaller batch";
    const lt_cudnn_task task = sample();
    size_t bytes;
    lt_cudnn *d = make(&(lt_cudnn_config){.tf32 = true});
    library->fail_run = CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;
    CHECK_FAILS(run_task(d, LT_CUDNN_CONV, 0, 100), LT_ENOMEM, text);
    CHECK_OK(run_task(d, LT_CUDNN_CONV, 0, 100));
    refuse_all(CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED);
    CHECK_FAILS(lt__cudnn_plan(d, ctx, &task, &bytes), LT_ENOMEM, text);
    library->refuse_at = 0;
    CHECK_OK(lt__cudnn_plan(d, ctx, &task, &bytes));
    lt__cudnn_free(d);
}

/* If cuDNN cannot make any plan, the reason is a warning unless it is about the task. */
TEST(a_cudnn_that_makes_no_plans)
{
    for (int i = 0; i < REFUSALS; i++) {
        const lt_cudnn_task task = sample();
        size_t bytes;
        begin();
        lt_cudnn *d = make(&(lt_cudnn_config){.tf32 = true});
        refuse_all(refusals[i]);
        CHECK_EQ(lt__cudnn_plan(d, ctx, &task, &bytes), LT_EUNSUPPORTED);
        CHECK_EQ(warned, !lt__cudnn_is_unsupported(refusals[i]));
        library->refuse_at = 0;
        lt__cudnn_free(d);
        end();
    }
}

/* ==== The plan file =========================================================================== */

static char file[64];

static void begin_file(void)
{
    begin();
    strcpy(file, "/tmp/lt-plans-XXXXXX");
    int made = mkstemp(file);
    CHECK(made >= 0);
    close(made);
    unlink(file);
    library->engines[A][1] = (stand_in_engine){.number = 2, .note = -1, .workspace = 10};
    library->engines[A][0].fails = true;
}

static void end_file(void)
{
    unlink(file);
    end();
}

#define TEST_FILE(title) TEST_BETWEEN(title, begin_file(), end_file())

/* Whether planning the task queries the heuristics, that is, the file does not have its plan. */
static bool queries_for(bool strict, lt_cudnn_task task)
{
    const lt_cudnn_config config = {.tf32 = true, .deterministic = strict, .plans = file};
    int before = library->queries[A];
    notes[0] = 0;
    CHECK_EQ(engine_for(&config, task), 2);
    return library->queries[A] > before;
}

TEST_FILE(a_file_remembers_plans)
{
    lt_cudnn_task other = sample();
    other.n = 3;
    CHECK(queries_for(false, sample()));
    CHECK(!queries_for(false, sample()));
    CHECK(queries_for(false, other));
    CHECK(!queries_for(false, sample()) && !queries_for(false, other));
    CHECK(queries_for(true, sample())); /* other options have other plans */
    CHECK(!queries_for(true, sample()));
    CHECK_STR(notes, "");
}

TEST_FILE(a_file_that_cannot_be_written)
{
    char before[sizeof file];
    memcpy(before, file, sizeof file);
    snprintf(file, sizeof file, "/nowhere/plans");
    CHECK(queries_for(false, sample()));
    CHECK_STR(notes, "plans cannot be written to /nowhere/plans: No such file or directory\n");
    memcpy(file, before, sizeof file);
}

TEST_FILE(a_file_for_another_device_is_ignored)
{
    CHECK(queries_for(false, sample()));
    env.model = "model B";
    CHECK(queries_for(false, sample()));
    CHECK(strstr(notes, "is for another device, driver or cuDNN version; plans are rebuilt"));
    CHECK(!queries_for(false, sample()));
    library->version = 92700;
    CHECK(queries_for(false, sample()));
    CHECK(strstr(notes, "is for another device, driver or cuDNN version"));
}

/* Writes the text to the file with byte i replaced. */
static void write_damaged(const char *text, size_t bytes, size_t i, char to)
{
    FILE *f = fopen(file, "w");
    fwrite(text, 1, bytes, f);
    fseek(f, (long)i, SEEK_SET);
    fputc(to, f);
    fclose(f);
}

TEST_FILE(a_damaged_file_is_ignored)
{
    char text[4096];
    CHECK(queries_for(false, sample()));
    read_text(file, text, sizeof text);
    size_t bytes = strlen(text);
    CHECK(bytes > 100);
    for (size_t i = 0; i < bytes; i++) { /* one wrong byte */
        write_damaged(text, bytes, i, text[i] == '7' ? '8' : '7');
        CHECK(queries_for(false, sample()));
        CHECK(strstr(notes, "plans are rebuilt"));
    }
    for (size_t n = 0; n < bytes; n += 7) { /* truncated */
        write_damaged(text, n, 0, 'l');
        CHECK(queries_for(false, sample()));
    }
    write_damaged(text, bytes, 10, 0);
    CHECK(queries_for(false, sample()));
    CHECK(!queries_for(false, sample()));
}

/* If the plan in the file can no longer be built, another one is chosen and stored. */
TEST_FILE(a_stored_plan_that_cannot_be_built)
{
    const lt_cudnn_config config = {.tf32 = true, .plans = file};
    CHECK(queries_for(false, sample()));
    library->engines[A][0].fails = false;
    library->engines[A][1].fails = true;
    CHECK_EQ(engine_for(&config, sample()), 1);
    library->engines[A][1].fails = false;
    CHECK_EQ(engine_for(&config, sample()), 1); /* now the plan in the file */
}

TEST_FILE(the_absence_of_a_plan_is_not_stored)
{
    const lt_cudnn_config config = {.tf32 = true, .plans = file};
    library->engines[A][1].fails = true;
    CHECK_EQ(engine_for(&config, sample()), 0);
    CHECK(access(file, F_OK) != 0);
    library->engines[A][1].fails = false;
    CHECK_EQ(engine_for(&config, sample()), 2);
}

TEST_FILE(a_file_that_cannot_be_read_or_written)
{
    char path[] = "/proc/none/plans";
    lt_cudnn_config config = {.tf32 = true, .plans = path};
    CHECK_EQ(engine_for(&config, sample()), 2); /* the folder is missing: no warning */
    config.plans = "/tmp";
    CHECK_EQ(engine_for(&config, sample()), 2);
    CHECK(strstr(notes, "the plans in /tmp cannot be read: "));
}
#else
TEST(engines) { SKIP("cuDNN's headers are not installed"); }
#endif
