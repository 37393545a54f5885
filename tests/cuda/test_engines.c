/* test_engines.c - which engine of cuDNN is taken, what is remembered of it, in memory and in a
 * file, and what is left to other kernels. The library is a stand-in, whose engines are made up.
 */
#include "tests/lt_test.h"

#ifdef LT_WITH_CUDNN
#include "tests/cuda/cuda_test.h"

enum { A, BE, FALLBACK }; /* modes of heuristics */

static stand_in *library;
static lt_cudnn_table table;
static lt_cuda_env env;
static lt_ctx *ctx;
static char notes[4096]; /* what was logged */

static void note(void *ud, lt_log_level level, const char *line)
{
    (void)ud, (void)level;
    if (strlen(notes) + strlen(line) + 2 < sizeof notes)
        strcat(strcat(notes, line), "\n");
}

/* With the engines of each mode, in the order of their numbers here. */
static void begin(void)
{
    char text[512];
    library = open_stand_in("libcudnn.so.9");
    if (lt__cudnn_open_library(&table, text, sizeof text) != 0)
        FAIL("%s", text);
    ctx = lt_open(&(lt_config){.reference = true});
    lt_log_to(ctx, note, NULL);
    notes[0] = 0;
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

static void end(lt_cudnn *d)
{
    lt__cudnn_free(d);
    lt_ctx_free(ctx);
    CHECK_EQ(library->live, 0);
}

/* 2 images of 5x6 with 3 channels to 4, by 3x3. */
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

/* The number of the engine that a task gets; 0: none. */
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

/* ==== Which engine ============================================================================ */

TEST(modes_are_asked_in_turn)
{
    const lt_cudnn_config config = {.tf32 = true};
    begin();
    library->engines[BE][0] = (stand_in_engine){.number = 2, .note = -1};
    library->engines[FALLBACK][0] = (stand_in_engine){.number = 3, .note = -1};
    CHECK_EQ(engine_for(&config, sample()), 1);
    CHECK_EQ(library->asked[BE] + library->asked[FALLBACK], 0);
    library->engines[A][0].fails = true;
    CHECK_EQ(engine_for(&config, sample()), 2);
    CHECK_EQ(library->asked[FALLBACK], 0);
    library->engines[BE][0].number = 0;
    CHECK_EQ(engine_for(&config, sample()), 3);
    library->engines[FALLBACK][0].fails = true;
    CHECK_EQ(engine_for(&config, sample()), 0);
    end(NULL);
}

TEST(workspace_has_a_limit)
{
    lt_cudnn_config config = {.tf32 = true};
    begin();
    library->engines[A][0].workspace = LT_CUDNN_WORKSPACE + 1;
    library->engines[A][1] = (stand_in_engine){.number = 2, .note = -1, .workspace = 1001};
    library->engines[A][2] = (stand_in_engine){.number = 3, .note = -1, .workspace = 1000};
    CHECK_EQ(engine_for(&config, sample()), 2);
    config.workspace = 1000;
    CHECK_EQ(engine_for(&config, sample()), 3);
    config.workspace = 999;
    CHECK_EQ(engine_for(&config, sample()), 0);
    end(NULL);
}

/* Engine 1 has the note, engine 2 of the fallback none. */
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

TEST(what_rounds_more_is_for_who_allows_it)
{
    const lt_cudnn_config free_ = {.tf32 = true}, plain = {.tf32 = false};
    const lt_cudnn_config strict = {.tf32 = true, .deterministic = true};
    const cudnnBackendNumericalNote_t halves = CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION;
    static const cudnnBackendNumericalNote_t rough[] = {
        CUDNN_NUMERICAL_NOTE_FFT, CUDNN_NUMERICAL_NOTE_WINOGRAD,
        CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4, CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6,
        CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13};
    const cudnnBackendNumericalNote_t cores = CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
    const cudnnBackendNumericalNote_t down = CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS;
    begin();
    for (size_t i = 0; i < sizeof rough / sizeof *rough; i++) {
        CHECK_EQ(with_note(rough[i], &free_, LT_F16, LT_CUDNN_CONV), 1);
        CHECK_EQ(with_note(rough[i], &strict, LT_F16, LT_CUDNN_CONV), 2);
    }
    CHECK_EQ(with_note(halves, &free_, LT_F16, LT_CUDNN_CONV), 2); /* sums are in f32 */
    CHECK_EQ(with_note(cores, &free_, LT_F32, LT_CUDNN_CONV), 1);
    CHECK_EQ(with_note(cores, &plain, LT_F32, LT_CUDNN_CONV), 2);
    CHECK_EQ(with_note(cores, &plain, LT_F16, LT_CUDNN_CONV), 1);
    CHECK_EQ(with_note(down, &free_, LT_F32, LT_CUDNN_CONV), 2);
    CHECK_EQ(with_note(down, &free_, LT_F16, LT_CUDNN_CONV), 1);
    CHECK_EQ(with_note(CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP, &strict, LT_F32, LT_CUDNN_CONV), 1);
    end(NULL);
}

TEST(sums_without_an_order_come_last)
{
    lt_cudnn_config config = {.tf32 = true};
    const cudnnBackendNumericalNote_t any = CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
    begin();
    CHECK_EQ(with_note(any, &config, LT_F16, LT_CUDNN_CONV), 2);
    library->engines[FALLBACK][0].fails = true;
    CHECK_EQ(engine_for(&config, sample()), 1);
    config.deterministic = true;
    CHECK_EQ(engine_for(&config, sample()), 0);
    end(NULL);
}

/* ==== What is left to others ================================================================== */

/* Asked for twice: the second answer is remembered. */
static void unsupported(lt_cudnn_task task)
{
    lt_cudnn *d = make(&(lt_cudnn_config){.tf32 = true});
    void *operand[LT_CUDNN_OPERANDS] = {NULL};
    size_t bytes = 1;
    CHECK_EQ(lt__cudnn_plan(d, ctx, &task, &bytes), LT_EUNSUPPORTED);
    CHECK_EQ(bytes, 0);
    int asked = library->asked[A];
    CHECK_EQ(lt__cudnn_run(d, ctx, &task, operand, NULL), LT_EUNSUPPORTED);
    CHECK_EQ(library->asked[A], asked);
    CHECK_EQ(library->run, 0);
    lt__cudnn_free(d);
}

TEST(own_kernels_are_for)
{
    lt_cudnn_task task = sample();
    begin();
    task.dtype = LT_F64;
    unsupported(task);
    task = sample();
    task.n = 0;
    unsupported(task);
    task = sample();
    task.in = 0;
    unsupported(task);
    task = sample();
    task.out = 0;
    unsupported(task);
    CHECK_EQ(library->asked[A], 0); /* of all these cuDNN has heard nothing */
    library->engines[A][0].fails = true;
    unsupported(sample());
    CHECK(strstr(notes, "no engine of cuDNN takes task") != NULL);
    library->engines[A][0].fails = false;
    task = sample();
    task.out_size[0] = 4; /* contradicts itself: the graph is refused */
    unsupported(task);
    end(NULL);
}

TEST(a_device_that_is_not_here_runs_nothing)
{
    void *operand[LT_CUDNN_OPERANDS] = {NULL};
    const lt_cudnn_task task = sample();
    size_t bytes;
    begin();
    lt_cudnn *d = make(&(lt_cudnn_config){.tf32 = true, .json = "{\"deviceName\": \"far\"}"});
    CHECK_OK(lt__cudnn_plan(d, ctx, &task, &bytes));
    CHECK_EQ(lt__cudnn_run(d, ctx, &task, operand, NULL), LT_EUNSUPPORTED);
    char *json = lt__cudnn_properties(d);
    CHECK_STR(json, "{\"deviceName\": \"far\"}");
    free(json);
    lt__cudnn_free(d);
    d = make(&(lt_cudnn_config){.tf32 = true});
    json = lt__cudnn_properties(d);
    CHECK_STR(json, "{\"deviceName\": \"stand-in\"}");
    free(json);
    end(d);
}

/* ==== Remembered ============================================================================== */

static float x[2 * 5 * 6 * 3 + 4], w[4 * 3 * 3 * 3 + 4], y[2][2 * 5 * 6 * 4 + 4];

TEST(plans_are_made_once_and_packs_anew)
{
    lt_cudnn_task task = sample();
    size_t bytes;
    task.dtype = LT_F32;
    void *operand[LT_CUDNN_OPERANDS] = {x, w, y[0]};
    begin();
    task.aligned = 0;
    x[31] = w[13] = 1;
    lt_cudnn *d = make(&(lt_cudnn_config){.tf32 = true});
    for (int i = 0; i < 4; i++) {
        operand[LT_CUDNN_Y] = y[i / 2];
        memset(y, 0xff, sizeof y);
        CHECK_OK(lt__cudnn_run(d, ctx, &task, operand, NULL));
        CHECK_EQ(library->built, 1);
        CHECK_EQ(library->run, 1 + i);
        CHECK(y[i / 2][0] == 0 && isnan(y[1 - i / 2][0]));
    }
    task.n = 1;
    CHECK_OK(lt__cudnn_plan(d, ctx, &task, &bytes));
    CHECK_EQ(library->built, 2);
    for (int i = 2; i < 1100; i++) { /* more sizes than are kept */
        task.n = i;
        CHECK_OK(lt__cudnn_plan(d, ctx, &task, &bytes));
    }
    CHECK(library->live < 1100 * 12);
    end(d);
}

TEST(a_run_that_fails_says_why)
{
    lt_cudnn_task task = sample();
    void *operand[LT_CUDNN_OPERANDS] = {x, w, y[0]};
    task.dtype = LT_F32;
    task.aligned = 0;
    begin();
    lt_cudnn *d = make(&(lt_cudnn_config){.tf32 = true});
    library->fail_run = CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER;
    CHECK_FAILS(lt__cudnn_run(d, ctx, &task, operand, NULL), LT_EENV,
                "failed to run a plan: CUDNN_STATUS_REFUSED: as was asked for");
    library->fail_run = CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;
    CHECK_FAILS(lt__cudnn_run(d, ctx, &task, operand, NULL), LT_ENOMEM,
                "out of memory in cuDNN; try a smaller batch");
    CHECK_OK(lt__cudnn_run(d, ctx, &task, operand, NULL));
    end(d);
}

/* ==== The file ================================================================================ */

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
    end(NULL);
}

/* Whether heuristics were asked for that plan: the file did not have it. */
static bool asks(bool strict, lt_cudnn_task task)
{
    const lt_cudnn_config config = {.tf32 = true, .deterministic = strict, .plans = file};
    int before = library->asked[A];
    notes[0] = 0;
    CHECK_EQ(engine_for(&config, task), 2);
    return library->asked[A] > before;
}

TEST(a_file_remembers_plans)
{
    lt_cudnn_task other = sample();
    other.n = 3;
    begin_file();
    CHECK(asks(false, sample()));
    CHECK(!asks(false, sample()));
    CHECK(asks(false, other));
    CHECK(!asks(false, sample()) && !asks(false, other));
    CHECK(asks(true, sample())); /* other options, other plans */
    CHECK(!asks(true, sample()));
    CHECK_STR(notes, "");
    end_file();
}

TEST(a_file_that_cannot_be_written)
{
    char before[sizeof file];
    begin_file();
    memcpy(before, file, sizeof file);
    snprintf(file, sizeof file, "/nowhere/plans");
    CHECK(asks(false, sample()));
    CHECK_STR(notes, "plans cannot be written to /nowhere/plans: No such file or directory\n");
    memcpy(file, before, sizeof file);
    end_file();
}

TEST(a_file_for_something_else_is_left_alone)
{
    begin_file();
    CHECK(asks(false, sample()));
    env.model = "model B";
    CHECK(asks(false, sample()));
    CHECK(strstr(notes, "is for another device, driver or version of cuDNN; plans are made anew"));
    CHECK(!asks(false, sample()));
    library->version = 92700;
    CHECK(asks(false, sample()));
    CHECK(strstr(notes, "is for another device, driver or version of cuDNN"));
    end_file();
}

/* What the file holds, with byte i replaced. */
static void bend(const char *text, size_t bytes, size_t i, char to)
{
    FILE *f = fopen(file, "w");
    fwrite(text, 1, bytes, f);
    fseek(f, (long)i, SEEK_SET);
    fputc(to, f);
    fclose(f);
}

TEST(a_damaged_file_is_left_alone)
{
    char text[4096];
    begin_file();
    CHECK(asks(false, sample()));
    read_text(file, text, sizeof text);
    size_t bytes = strlen(text);
    CHECK(bytes > 100);
    for (size_t i = 0; i < bytes; i++) { /* one byte wrong */
        bend(text, bytes, i, text[i] == '7' ? '8' : '7');
        CHECK(asks(false, sample()));
        CHECK(strstr(notes, "plans are made anew"));
    }
    for (size_t n = 0; n < bytes; n += 7) { /* and cut short */
        bend(text, n, 0, 'l');
        CHECK(asks(false, sample()));
    }
    bend(text, bytes, 10, 0);
    CHECK(asks(false, sample()));
    CHECK(!asks(false, sample()));
    end_file();
}

/* A plan that is no longer possible is looked for once more. */
TEST(a_plan_that_cannot_be_made_again)
{
    const lt_cudnn_config config = {.tf32 = true, .plans = file};
    begin_file();
    CHECK(asks(false, sample()));
    library->engines[A][0].fails = false;
    library->engines[A][1].fails = true;
    CHECK_EQ(engine_for(&config, sample()), 1);
    library->engines[A][1].fails = false;
    CHECK_EQ(engine_for(&config, sample()), 1); /* that is what the file has now */
    end_file();
}

TEST(no_plan_is_not_for_the_file)
{
    const lt_cudnn_config config = {.tf32 = true, .plans = file};
    begin_file();
    library->engines[A][1].fails = true;
    CHECK_EQ(engine_for(&config, sample()), 0);
    CHECK(access(file, F_OK) != 0);
    library->engines[A][1].fails = false;
    CHECK_EQ(engine_for(&config, sample()), 2);
    end_file();
}

TEST(a_file_that_cannot_be_read_or_written)
{
    char path[] = "/proc/none/plans";
    lt_cudnn_config config = {.tf32 = true, .plans = path};
    begin_file();
    CHECK_EQ(engine_for(&config, sample()), 2); /* no folder to write it to: nobody is told */
    config.plans = "/tmp";
    CHECK_EQ(engine_for(&config, sample()), 2);
    CHECK(strstr(notes, "the plans in /tmp cannot be read: "));
    end_file();
}
#else
TEST(engines) { SKIP("cuDNN's headers were not there"); }
#endif
