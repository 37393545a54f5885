/* test_plans.c - checks that cuDNN has a plan for every convolution of the training scripts,
 * forward and backward, and which engines it uses. No device is needed: *.json have the properties
 * of devices, and no plan runs.
 *
 * graphs.txt lists the distinct convolutions and pools of the nets, recorded in a forward pass.
 * Plans are built for batches of 64 and 256. Those that cuDNN compiles take a second each, so the
 * slow tests build most of them.
 */
#include "tests/lt_test.h"

#ifdef LT_WITH_CUDNN
#include <pthread.h>

#include "lua/luatrain.h"
#include "ops/cuda/plan_file.h"
#include "tests/cuda/cuda_test.h"

#define GRAPHS "tests/cuda/graphs.txt"
#define ENGINES "tests/cuda/engines.txt"

/* AddressSanitizer must not report the leaks of NVIDIA's libraries. test_engines.c finds ours. */
LT_API const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }

enum { MAX_TASKS = 4096, THREADS = 2, LINE = 160 };

typedef struct list {
    lt_cudnn_task at[MAX_TASKS];
    int n;
} list;

static void append(list *l, const lt_cudnn_task *task)
{
    for (int i = 0; i < l->n; i++)
        if (memcmp(&l->at[i], task, sizeof *task) == 0)
            return;
    if (l->n == MAX_TASKS)
        FAIL("more than %d tasks", MAX_TASKS);
    l->at[l->n++] = *task;
}

/* ==== A forward task as a line of text ======================================================== */

enum { MAX_POOL = LT_CUDNN_KINDS, AVG_POOL, KINDS }; /* pools run in our kernels */
static const char *const names[KINDS] = {"conv2d", "conv2d-dx", "conv2d-dw", "max_pool2d",
                                         "avg_pool2d"};

#define FORMAT                                                                                     \
    "x %lldx%lldx%lld y %lldx%lldx%lld kernel %lldx%lld stride %lldx%lld "                         \
    "pad %lldx%lld dilation %lldx%lld groups %lld bias %lld"

static const char *line_of(const lt_cudnn_task *j, char line[LINE])
{
#define PAIR(member) (long long)j->member[0], (long long)j->member[1]
    snprintf(line, LINE, "%s " FORMAT, names[j->kind], PAIR(size), (long long)j->in, PAIR(out_size),
             (long long)j->out, PAIR(kernel), PAIR(stride), PAIR(pad), PAIR(dilation),
             (long long)j->groups, (long long)j->bias);
    return line;
}

static lt_cudnn_task task_of(const char *line)
{
    long long v[16];
    char name[32];
    if (sscanf(line, "%31s " FORMAT, name, &v[0], &v[1], &v[2], &v[3], &v[4], &v[5], &v[6], &v[7],
               &v[8], &v[9], &v[10], &v[11], &v[12], &v[13], &v[14], &v[15]) != 17)
        FAIL(GRAPHS " has an invalid line: %s", line);
    lt_cudnn_task task = {.aligned = 1,
                          .n = 1,
                          .size = {v[0], v[1]},
                          .in = v[2],
                          .out_size = {v[3], v[4]},
                          .out = v[5],
                          .kernel = {v[6], v[7]},
                          .stride = {v[8], v[9]},
                          .pad = {v[10], v[11]},
                          .dilation = {v[12], v[13]},
                          .groups = v[14],
                          .bias = v[15]};
    for (int i = 0; i < KINDS; i++)
        if (strcmp(name, names[i]) == 0)
            task.kind = i;
    return task;
}

static void read_graphs(list *l)
{
    static char text[16384];
    l->n = 0;
    read_text(GRAPHS, text, sizeof text);
    for (char *line = text; *line; line += strcspn(line, "\n"), line += *line == '\n')
        if (*line != '#' && *line != '\n') {
            lt_cudnn_task task = task_of(line);
            append(l, &task);
        }
}

/* ==== Recording the nets ====================================================================== */

static void pair(const lt_call *c, int k, int64_t value[2])
{
    value[0] = c->opt[k].i[0];
    value[1] = c->opt[k].i[c->opt[k].n - 1];
}

/* An op hook that appends the tasks of forward to the list ud. */
static void record(void *ud, const lt_call *c, bool backward, const char *where)
{
    const char *name = c->schema->name;
    const bool conv = strcmp(name, "conv2d") == 0, global = strcmp(name, "global_avg_pool2d") == 0;
    (void)where;
    if (backward || (!conv && !strstr(name, "pool2d")))
        return;
    const int64_t *x = lt_dims(c->in[0]), *y = lt_dims(c->out[0]);
    lt_cudnn_task task = {.kind = conv                   ? LT_CUDNN_CONV
                                  : strstr(name, "max_") ? MAX_POOL
                                                         : AVG_POOL,
                          .bias = conv && c->n_in > 2 && c->in[2],
                          .aligned = 1,
                          .n = 1,
                          .groups = conv ? c->opt[3].i[0] : 1,
                          .in = x[3],
                          .out = global ? y[1] : y[3],
                          .size = {x[1], x[2]},
                          .out_size = {global ? 1 : y[1], global ? 1 : y[2]},
                          .kernel = {x[1], x[2]},
                          .stride = {1, 1},
                          .dilation = {1, 1}};
    if (conv) {
        pair(c, 0, task.stride);
        pair(c, 1, task.pad);
        pair(c, 2, task.dilation);
        task.kernel[0] = lt_dim(c->in[1], 1);
        task.kernel[1] = lt_dim(c->in[1], 2);
    } else if (!global) {
        pair(c, 0, task.kernel);
        pair(c, 1, task.stride);
        pair(c, 2, task.pad);
    }
    append(ud, &task);
}

static bool is_slow(void) { return getenv("LUATRAIN_TEST_SLOW"); }

/* Without slow tests, records only the smallest net. */
TEST(graphs_txt_matches_the_nets)
{
    static char *const nets[] = {"resnet50", "mobilenet_v1", "vgg16"};
    static list now, listed;
    char line[LINE];
    bool same = true;
    for (int i = is_slow() ? 0 : 1; i < (is_slow() ? 3 : 2); i++) {
        lt_ctx *ctx = lt_open(NULL);
        lua_State *L = ctx ? lt_lua_new(ctx) : NULL;
        if (!L)
            FAIL("%s", lt_errmsg());
        lt_set_op_hook(ctx, record, &now);
        CHECK_OK(lt_lua_dofile(L, "tests/cuda/nets.lua", 1, (char *[]){nets[i]}));
        lt_lua_close(L);
        lt_ctx_free(ctx);
    }
    read_graphs(&listed);
    CHECK(now.n > 10);
    for (int i = 0; i < now.n; i++) {
        int at = 0;
        while (at < listed.n && memcmp(&now.at[i], &listed.at[at], sizeof now.at[i]) != 0)
            at++;
        same = same && at < listed.n;
    }
    same = same && (!is_slow() || now.n == listed.n);
    for (int i = 0; i < now.n && !same; i++)
        printf("%s\n", line_of(&now.at[i], line));
    if (!same)
        FAIL(GRAPHS " should have these %d lines%s", now.n, is_slow() ? "" : " and others");
}

/* ==== Plans =================================================================================== */

typedef struct crew { /* threads that build plans, each with its own cuDNN handle */
    const list *tasks;
    lt_cudnn_table table;
    lt_cuda_env env;
    lt_cudnn_config config;
    atomic_int next;
    bool has[MAX_TASKS];
    int engine[MAX_TASKS];        /* -1: none */
    int64_t workspace[MAX_TASKS]; /* bytes */
} crew;

static void silent(lt_ctx *ctx, lt_log_level level, const char *fmt, ...)
{
    (void)ctx, (void)level, (void)fmt;
}

static const lt_host host = {lt_fail, silent};

static void *work(void *ud)
{
    crew *w = ud;
    char text[512];
    lt_cudnn *d = lt__cudnn_new(&w->table, &w->env, &w->config, text, sizeof text);
    if (!d)
        FAIL("%s", text);
    for (int i; d && (i = atomic_fetch_add(&w->next, 1)) < w->tasks->n;) {
        size_t bytes;
        lt_status status = lt__cudnn_plan(d, NULL, &w->tasks->at[i], &bytes);
        w->has[i] = status == LT_OK;
        w->engine[i] = status == LT_OK ? atoi(lt__cudnn_choice(d, &w->tasks->at[i])) : -1;
        w->workspace[i] = (int64_t)bytes;
        if (status != LT_OK && status != LT_EUNSUPPORTED)
            FAIL("%s", lt_errmsg());
    }
    lt__cudnn_free(d);
    return NULL;
}

/* Opens cuDNN, with the stand-in for the CUDA driver. */
static void open_cudnn(lt_cudnn_table *table)
{
    char text[1536], path[PATH_MAX];
    lt_cublaslt_table blas;
    if (!dlopen(beside("driver/libcuda.so.1", path), RTLD_NOW | RTLD_GLOBAL))
        FAIL("%s", dlerror());
    if (lt__cublaslt_open(&blas, text, sizeof text) != 0 ||
        lt__cudnn_open_library(table, text, sizeof text) != 0)
        SKIP("%s", text);
    const char *required = getenv("LT_TEST_REQUIRES");
    if (required && strncmp(text, required, strlen(required)) != 0)
        FAIL("%s", text);
}

static crew plans; /* results of the last make_plans() */

/* Builds plans for all tasks, with the properties of a device. */
static void make_plans(const char *device, const list *tasks, const lt_cudnn_config *config)
{
    static char json[4096];
    char path[64];
    pthread_t thread[THREADS];
    snprintf(path, sizeof path, "tests/cuda/%s.json", device);
    read_text(path, json, sizeof json);
    plans = (crew){.tasks = tasks, .env = {.host = &host, .model = device}, .config = *config};
    plans.config.json = json;
    const char *memory = strstr(json, "\"totalGlobalMem\": ");
    plans.env.memory = memory ? (size_t)strtoull(strchr(memory, ':') + 1, NULL, 10) : 0;
    CHECK(plans.env.memory > 0);
    open_cudnn(&plans.table);
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&thread[i], NULL, work, &plans) != 0)
            FAIL("cannot create a thread");
    for (int i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
}

/* Builds plans for all tasks. Returns how many tasks differ from what is expected: a plan, or none
 * if lacks_plan(). */
static int plan_all(const char *device, const list *tasks, bool strict,
                    bool (*lacks_plan)(const char *device, const lt_cudnn_task *task))
{
    char line[LINE];
    int wrong = 0;
    make_plans(device, tasks, &(lt_cudnn_config){.deterministic = strict, .tf32 = !strict});
    for (int i = 0; i < tasks->n; i++) {
        const lt_cudnn_task *j = &tasks->at[i];
        const bool none = lacks_plan(device, j);
        if (plans.has[i] == !none || (none && j->kind == LT_CUDNN_CONV_WEIGHTS))
            continue;
        printf("%s%s: %s plan for %lld images, %s, %s%s\n", device, strict ? ", strict" : "",
               plans.has[i] ? "a" : "no", (long long)j->n, lt_dtype_name((lt_dtype)j->dtype),
               line_of(j, line), j->add ? ", added" : "");
        wrong++;
    }
    return wrong;
}

/* ==== Tasks =================================================================================== */

static const lt_dtype dtypes[] = {LT_F16, LT_BF16, LT_F32};
enum { DTYPES = 3 };

static bool is_dense(const lt_cudnn_task *task) { return task->groups == 1; }

/* Appends a forward task and those of its gradients. The images, with 3 channels, need none. */
static void append_all(list *l, lt_cudnn_task task, bool added)
{
    append(l, &task);
    task.bias = 0;
    for (int add = 0; add <= added; add++) {
        task.add = add;
        task.kind = LT_CUDNN_CONV_DATA;
        if (task.in > 3)
            append(l, &task);
        task.kind = LT_CUDNN_CONV_WEIGHTS;
        append(l, &task);
    }
}

/* Which of the tasks that cuDNN compiles are collected: one for each stride, all with one batch
 * size, or all with both. */
enum { SOME, ALL, ALL_TWICE };

static void collect(list *l, lt_dtype dtype, int compiled)
{
    static list graphs;
    int64_t seen = 0;
    read_graphs(&graphs);
    for (int i = 0; i < graphs.n; i++) {
        lt_cudnn_task task = graphs.at[i];
        if (task.kind != LT_CUDNN_CONV)
            continue;
        const bool sample = dtype == LT_F16 && !(seen >> task.stride[0] & 1);
        task.dtype = dtype;
        task.n = 256;
        if (is_dense(&task) || compiled != SOME || sample)
            append_all(l, task, is_dense(&task));
        task.n = 64;
        if (is_dense(&task) || compiled == ALL_TWICE)
            append_all(l, task, is_dense(&task));
        if (!is_dense(&task))
            seen |= (int64_t)1 << task.stride[0];
    }
}

/* A T4 has no engines for bf16, as it does not compute in it. (Some weight gradients have one,
 * which is of no use.) */
static bool lacks_plan(const char *device, const lt_cudnn_task *task)
{
    return strcmp(device, "t4") == 0 && task->dtype == LT_BF16;
}

/* Without slow tests, checks only an H200, and few of the tasks that cuDNN compiles. */
TEST(every_device_has_a_plan_for_each_task)
{
    static const char *const devices[] = {"h200", "b200", "a100", "l40s", "t4"};
    static list tasks;
    int wrong = 0;
    for (int i = 0; i < (is_slow() ? 5 : 1); i++)
        for (int t = 0; t < DTYPES; t++) {
            tasks.n = 0;
            collect(&tasks, dtypes[t], !is_slow() ? SOME : i == 0 ? ALL_TWICE : ALL);
            wrong += plan_all(devices[i], &tasks, false, lacks_plan);
            printf("%s, %s: %d tasks\n", devices[i], lt_dtype_name(dtypes[t]), tasks.n);
        }
    CHECK_EQ(wrong, 0);
}

TEST(an_h200_has_a_deterministic_plan_for_each_task)
{
    static list tasks;
    collect(&tasks, LT_F16, SOME);
    collect(&tasks, LT_F32, SOME);
    CHECK_EQ(plan_all("h200", &tasks, true, lacks_plan), 0);
}

/* ==== Engines ================================================================================= */

/* The dense convolutions of the nets with 256 images in one dtype, each with its gradients. */
static void collect_dense(list *l, lt_dtype dtype)
{
    static list graphs;
    read_graphs(&graphs);
    l->n = 0;
    for (int i = 0; i < graphs.n; i++) {
        lt_cudnn_task task = graphs.at[i];
        task.dtype = dtype;
        task.n = 256;
        if (task.kind == LT_CUDNN_CONV && is_dense(&task))
            append_all(l, task, false);
    }
}

/* Writes the engines of the last plans for collect_dense() in the form of engines.txt. */
static void write_engines(char *text, size_t bytes)
{
    const list *tasks = plans.tasks;
    char line[LINE], cells[64];
    int at = snprintf(text, bytes, "cuDNN %zu\n", plans.table.cudnnGetVersion()), k = 0;
    for (int i = 0; i < tasks->n; i++) {
        if (tasks->at[i].kind == LT_CUDNN_CONV)
            k = 0;
        k += snprintf(cells + k, sizeof cells - (size_t)k, "%2d/%-6.1f ", plans.engine[i],
                      (double)plans.workspace[i] / (1 << 20));
        if (tasks->at[i].kind == LT_CUDNN_CONV && tasks->at[i].in == 3)
            k += snprintf(cells + k, sizeof cells - (size_t)k, "%-10s", " -");
        if (tasks->at[i].kind != LT_CUDNN_CONV_WEIGHTS)
            continue;
        lt_cudnn_task task = tasks->at[i];
        task.kind = LT_CUDNN_CONV;
        line_of(&task, line);
        at += snprintf(text + at, bytes - (size_t)at, "%-30s%.*s\n", cells,
                       (int)(strstr(line, " dilation") - line), line);
    }
}

/* Another version of cuDNN may choose other engines. */
TEST(engines_txt_has_the_engines_of_an_h200_in_f32)
{
    static list tasks;
    static char listed[16384], now[16384];
    collect_dense(&tasks, LT_F32);
    make_plans("h200", &tasks, &(lt_cudnn_config){.tf32 = false});
    write_engines(now, sizeof now);
    read_text(ENGINES, listed, sizeof listed);
    const char *start = strstr(listed, "\ncuDNN ") + 1;
    if (strncmp(start, now, strcspn(now, "\n") + 1) != 0)
        SKIP(ENGINES " is for another version than %.*s", (int)strcspn(now, "\n"), now);
    if (strcmp(start, now) != 0) {
        printf("%s", now);
        FAIL(ENGINES " should have these lines");
    }
}

/* cuDNN's fast engines in f32 transpose images in the workspace. Those of VGG with 64 or 128
 * channels are too large for the limit on an H200, like two others; generic engines run these
 * tasks. */
TEST(the_workspace_is_enough_for_copies_of_the_images)
{
    static list tasks;
    static crew limited;
    char line[LINE];
    int other = 0;
    collect_dense(&tasks, LT_F32);
    make_plans("h200", &tasks, &(lt_cudnn_config){.tf32 = false});
    limited = plans;
    make_plans("h200", &tasks, &(lt_cudnn_config){.tf32 = false, .workspace = SIZE_MAX / 2});
    for (int i = 0; i < tasks.n; i++) {
        const lt_cudnn_task *j = &tasks.at[i];
        const int64_t elements =
            j->n * (j->size[0] * j->size[1] * j->in + j->out_size[0] * j->out_size[1] * j->out);
        if (limited.engine[i] == plans.engine[i])
            continue;
        other++;
        if (4 * elements < (int64_t)1500 << 20)
            FAIL("engine %d instead of %d runs %s", limited.engine[i], plans.engine[i],
                 line_of(j, line));
    }
    CHECK(other <= 8);
}

TEST(engines_need_little_workspace_in_f16)
{
    static list tasks;
    char line[LINE];
    collect_dense(&tasks, LT_F16);
    make_plans("h200", &tasks, &(lt_cudnn_config){.tf32 = false});
    for (int i = 0; i < tasks.n; i++)
        if (!plans.has[i] || plans.workspace[i] > 256 * 1000 * 1000)
            FAIL("%lld bytes for %s", (long long)plans.workspace[i], line_of(&tasks.at[i], line));
}

/* ==== The plan file =========================================================================== */

/* Replaces the only value in the plan file. */
static void replace_value(const char *path, const char *value)
{
    char text[4096], note[512], *stamp, *key;
    read_text(path, text, sizeof text);
    stamp = strchr(text, '\n') + 1;
    key = strchr(stamp, '\n') + 1;
    *strchr(key, '\t') = key[-1] = 0;
    lt_plan_file *read = lt__plan_file_read(path, stamp, note, sizeof note);
    CHECK(read && lt__plan_file_find(read, key) && lt__plan_file_put(read, key, value));
    CHECK(lt__plan_file_write(read, note, sizeof note));
    lt__plan_file_free(read);
}

/* The engine chosen for the first convolution of a ResNet in f32, with the plan file `path` or
 * NULL. */
static void choose_engine(const char *path, bool tf32, char choice[1024])
{
    static char json[4096];
    static list graphs;
    const lt_cuda_env env = {.host = &host, .model = "none"};
    const lt_cudnn_config config = {.tf32 = tf32, .json = json, .plans = path};
    lt_cudnn_table table;
    char text[512];
    size_t bytes;
    open_cudnn(&table);
    read_text("tests/cuda/h200.json", json, sizeof json);
    read_graphs(&graphs);
    lt_cudnn_task task = graphs.at[0];
    task.dtype = LT_F32;
    task.n = 256;
    lt_cudnn *d = lt__cudnn_new(&table, &env, &config, text, sizeof text);
    if (!d)
        FAIL("%s", text);
    CHECK_OK(lt__cudnn_plan(d, NULL, &task, &bytes));
    snprintf(choice, 1024, "%s", lt__cudnn_choice(d, &task));
    lt__cudnn_free(d);
}

/* The engine in the plan file overrides the heuristics. Its expected fastest engine rounds to tf32,
 * so the choices with and without tf32 differ. */
TEST(the_plan_file_overrides_the_heuristics)
{
    char path[] = "/tmp/lt-plans-XXXXXX", fast[1024], exact[1024], again[1024];
    int made = mkstemp(path);
    CHECK(made >= 0);
    close(made);
    unlink(path);
    choose_engine(NULL, false, exact);
    choose_engine(path, true, fast);
    CHECK(strcmp(fast, exact) != 0);
    choose_engine(path, true, again);
    CHECK_STR(again, fast);
    replace_value(path, exact);
    choose_engine(path, true, again);
    CHECK_STR(again, exact);
    unlink(path);
}

/* ==== Other versions of cuDNN ================================================================= */

/* Runs tests again with the cuDNNs in the folders of $LUATRAIN_TEST_CUDNN, each in a process of its
 * own. */
TEST(other_versions_of_cudnn)
{
    static const char tests[] = "every_device_has_a_plan_for_each_task "
                                "an_h200_has_a_deterministic_plan_for_each_task "
                                "the_workspace_is_enough_for_copies_of_the_images "
                                "engines_need_little_workspace_in_f16 "
                                "the_plan_file_overrides_the_heuristics";
    char program[PATH_MAX] = "", command[3 * PATH_MAX];
    const char *folders = getenv("LUATRAIN_TEST_CUDNN");
    if (!folders || !*folders)
        SKIP("LUATRAIN_TEST_CUDNN names no folders with other versions of cuDNN");
    CHECK(readlink("/proc/self/exe", program, sizeof program - 1) > 0);
    for (size_t length; *folders; folders += length, folders += *folders == ':') {
        length = strcspn(folders, ":");
        snprintf(command, sizeof command, "LUATRAIN_CUDA_LIBS=%.*s LT_TEST_REQUIRES=%.*s %s %s",
                 (int)length, folders, (int)length, folders, program, tests);
        if (system(command) != 0)
            FAIL("with the cuDNN in %.*s", (int)length, folders);
    }
}
#else
TEST(plans) { SKIP("cuDNN's headers are not installed"); }
#endif
