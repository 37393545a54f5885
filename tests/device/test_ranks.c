/* test_ranks.c - data-parallel training on emulated accelerators. The results must equal those of
 * ranks on the CPU.
 */
#include <lauxlib.h>
#include <pthread.h>
#include <unistd.h>

#include "core/locale.h"
#include "core/tensor.h"
#include "dist/dist.h"
#include "lua/luatrain.h"
#include "tests/device/emu.h"
#include "tests/device/emu_counts.h"

enum { MAX_RANKS = 4, TEXT = 1 << 14, FIRST_STEPS = 3 };

typedef enum where { ON_CPU, ON_ONE, ON_OWN } where; /* ON_ONE: all ranks share an accelerator */

typedef struct job { /* a function of deferred.lua that all ranks call */
    int ranks;
    where at;
    const char *name, *options, *fault;
    double timeout; /* seconds; 0: a minute */
    bool idle;      /* rank 1 has no rows */
    lt_reducer_config config;
} job;

typedef struct rank {
    const job *job;
    int number;
    lt_group *group;
    pthread_t thread;
    lt_status status;
    char text[TEXT]; /* the result of the function, or the error message */
    char note[256];  /* the log line that says where gradients are summed */
    long drains;     /* up to the last step */
    int steps, bad;
} rank;

/* ==== Ranks =================================================================================== */

/* Called before each step. Counts the step before as bad if the rank emptied the stream in it.
 * Excludes the first steps, which allocate, and the first ones after an evaluation. */
static int check_waits(lua_State *L)
{
    rank *r = lua_touserdata(L, lua_upvalueindex(1));
    emu_count_fn *count = emu_counter();
    long drained = count ? count(EMU_DRAINS) - r->drains : 0;
    r->bad += r->steps % 6 >= FIRST_STEPS && drained > 0;
    r->drains += drained;
    r->steps++;
    return 0;
}

static lt_status call(rank *r, lua_State *L)
{
    char code[1024];
    LT_TRY(lt_lua_join(L, r->group, &r->job->config));
    /* Lua reads the decimal point from localeconv(), whose result all threads share */
    lt_locale locale = lt__enter_c_locale();
    int loaded = luaL_loadfile(L, "tests/device/deferred.lua");
    lt__leave_c_locale(locale);
    if (loaded != LUA_OK)
        FAIL("%s", lua_tostring(L, -1));
    LT_TRY(lt_lua_call(L, 0, 1));
    lua_getfield(L, -1, r->job->name);
    snprintf(code, sizeof code, "return {rank = %d, %s}", r->number, r->job->options);
    locale = lt__enter_c_locale();
    int failed = luaL_dostring(L, code);
    lt__leave_c_locale(locale);
    if (failed)
        FAIL("%s", lua_tostring(L, -1));
    lua_pushlightuserdata(L, r);
    lua_pushcclosure(L, check_waits, 1);
    lua_setfield(L, -2, "each");
    LT_TRY(lt_lua_call(L, 1, 1));
    snprintf(r->text, sizeof r->text, "%s", lua_tostring(L, -1));
    return LT_OK;
}

/* An lt_log_fn that keeps the line that says where gradients are summed. */
static void note(void *ud, lt_log_level level, const char *text)
{
    rank *r = ud;
    (void)level;
    if (strstr(text, "buckets are summed"))
        snprintf(r->note, sizeof r->note, "%s", text);
}

static void *run(void *ud)
{
    rank *r = ud;
    char device[16];
    snprintf(device, sizeof device, r->job->at == ON_CPU ? "cpu" : "cuda:%d",
             r->job->at == ON_OWN ? r->number : 0);
    lt_ctx *ctx = lt_open(&(lt_config){
        .device = device, .threads = 1, .poison = true, .reference = true, .fault = r->job->fault});
    lua_State *L = ctx ? lt_lua_new(ctx) : NULL;
    if (ctx)
        lt_set_log(ctx, note, r);
    r->status = L ? call(r, L) : lt_errcode();
    if (r->status != LT_OK) {
        snprintf(r->text, sizeof r->text, "%s", lt_errmsg());
        lt_group_fail(r->group);
    }
    if (L)
        lt_lua_close(L);
    lt_ctx_free(ctx);
    lt_group_close(r->group);
    return NULL;
}

static void run_all(const job *j, rank ranks[MAX_RANKS])
{
    lt_group *group[MAX_RANKS];
    use_emu();
    CHECK_OK(lt_local_open(j->ranks,
                           &(lt_group_config){.timeout = j->timeout > 0 ? j->timeout : 60}, group));
    for (int i = 0; i < j->ranks; i++) {
        memset(&ranks[i], 0, sizeof ranks[i]);
        ranks[i].job = j;
        ranks[i].number = i;
        ranks[i].group = group[i];
        CHECK_EQ(pthread_create(&ranks[i].thread, NULL, run, &ranks[i]), 0);
    }
    for (int i = 0; i < j->ranks; i++)
        pthread_join(ranks[i].thread, NULL);
}

/* Checks that each rank has the result that it has on the CPU. */
static void compare(const job *j, const rank *ranks, const rank *cpu, const char *given)
{
    static const char *const places[] = {"", "on one device", "on a device each"};
    bool is_fit = strcmp(j->name, "fit") == 0;
    for (int i = 0; i < j->ranks; i++) {
        const rank *here = &cpu[i], *there = &ranks[i];
        bool same = here->status == there->status && strcmp(here->text, there->text) == 0;
        if (!same && (i == 0 || !is_fit)) /* others may read the metrics before they are complete */
            FAIL("%d ranks %s, %s %s: rank %d:\n%d %s\non the CPU\n%d %s", j->ranks, places[j->at],
                 given, j->fault ? j->fault : "", i, there->status, there->text, here->status,
                 here->text);
        if (there->bad > 0)
            FAIL("%d ranks %s, %s: rank %d emptied the stream in %d steps", j->ranks, places[j->at],
                 given, i, there->bad);
    }
}

/* Checks that each rank has the same result in all places up to `last`, and that the result of rank
 * 0 contains `part`. */
static void check_up_to(where last, job j, const char *part)
{
    static rank ranks[3][MAX_RANKS];
    char out[32], options[512];
    const char *given = j.options;
    j.options = options;
    for (where at = ON_CPU; at <= last; at++) {
        make_folder(out);
        snprintf(options, sizeof options, "out = '%s', %s", out, given);
        j.at = at;
        run_all(&j, ranks[at]);
        remove_folder(out);
        if (at > ON_CPU)
            compare(&j, ranks[at], ranks[ON_CPU], given);
        if (!strstr(ranks[at][0].text, part))
            FAIL("%d ranks, %s: no '%s' in\n%s", j.ranks, given, part, ranks[at][0].text);
        CHECK_STR(ranks[at][0].note,
                  at == ON_ONE && j.ranks > 1
                      ? "ranks 0 and 1 share cuda:0: buckets are summed on the CPU"
                      : "");
    }
}

static void check_job(job j, const char *part) { check_up_to(ON_OWN, j, part); }

/* So small that almost every parameter has its own bucket. */
static const lt_reducer_config small = {.first_bucket = 64, .bucket = 64};

static void check_loop(int ranks, const char *options, const char *fault, const char *part)
{
    job j = {.ranks = ranks, .name = "loop", .options = options, .fault = fault, .config = small};
    check_job(j, part);
    j.config = (lt_reducer_config){.blocking = true};
    check_job(j, part);
}

/* ==== Tests =================================================================================== */

TEST(a_loop)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        check_loop(ranks, "amp = 'off'", NULL, "done");
        check_loop(ranks, "amp = 'bf16', adam = true", NULL, "done");
        check_loop(ranks, "policy = 'adaptive', scale = 2.0^24, adam = true", NULL, "done");
        check_loop(ranks, "amp = 'off', clips = true, accumulate = 3", NULL, "done");
    }
}

TEST(an_inf_in_any_gradient)
{
    static const char *const params[] = {"1.w", "2.shift", "5.b"};
    for (int i = 0; i < 3; i++)
        for (int t = 1; t <= 4; t += 3) {
            char fault[64];
            snprintf(fault, sizeof fault, "inf:rank=%d:step=%d:param=%s", i % 2, t, params[i]);
            check_loop(2, "policy = 'dynamic'", fault, " skipped=0x1p+0");
            check_loop(2, "policy = 'adaptive', adam = true, accumulate = 2", fault,
                       " skipped=0x1p+0");
        }
}

TEST(several_skipped_steps)
{
    check_loop(2, "policy = 'dynamic', spikes = {[2] = true, [3] = true}", NULL, "skipped=0x1p+1");
    check_loop(4, "policy = 'adaptive', accumulate = 2, spikes = {true, [6] = true}", NULL,
               "skipped=0x1p+1");
}

TEST(no_scale_helps)
{
    check_loop(2,
               "policy = 'static', steps = 20, spikes = setmetatable({}, {__index = function() "
               "return true end})",
               NULL, "is the first non-finite tensor");
}

TEST(half_precision_wires)
{
    job j = {.ranks = 2, .name = "loop", .options = "policy = 'dynamic'", .config = small};
    j.config.wire = LT_F16;
    check_up_to(ON_ONE, j, "done");
    j.options = "amp = 'off'";
    j.config.wire = LT_BF16;
    check_up_to(ON_ONE, j, "done");
}

TEST(a_parameter_that_one_rank_uses)
{
    check_loop(2, "amp = 'off', rare = true", NULL, "done");
    check_loop(4, "policy = 'dynamic', rare = true, accumulate = 2", NULL, "done");
}

TEST(a_run)
{
    static const char *const options[] = {"amp = 'off'",
                                          "amp = 'bf16', accumulate = 3, workers = 2",
                                          "amp = 'fp16', policy = 'dynamic', scale = 2.0^24"};
    for (int i = 0; i < 3; i++)
        for (int ranks = 2; ranks <= 4; ranks *= 2)
            check_job((job){.ranks = ranks, .name = "fit", .options = options[i], .config = small},
                      "done");
}

/* The other ranks learn of the failure before they apply the step. */
TEST(a_rank_that_fails)
{
    static rank ranks[MAX_RANKS];
    for (where at = ON_ONE; at <= ON_OWN; at++) {
        job j = {.ranks = 2,
                 .at = at,
                 .name = "loop",
                 .config = small,
                 .options = "amp = 'off', breaks = 3"};
        run_all(&j, ranks);
        CHECK(strstr(ranks[1].text, "broken"));
        CHECK(strstr(ranks[0].text, "rank 1 failed: "));
        j.options = "amp = 'off', nans = {[3] = true}";
        run_all(&j, ranks);
        for (int i = 0; i < 2; i++)
            CHECK(strstr(ranks[i].text, "the loss is nan at step 3; check the learning rate"));
    }
}

/* The part of the result with the weights and the number of steps. */
static const char *state_of(const rank *r) { return strchr(r->text, '\n'); }

/* Rank 0 fails in step 3. The failure reaches rank 1 before or after it has applied step 2. */
TEST(a_loss_of_one_rank)
{
    static rank after_1[MAX_RANKS], after_2[MAX_RANKS], ranks[MAX_RANKS];
    job j = {.ranks = 2, .name = "loop", .config = small, .options = "amp = 'off', steps = 1"};
    run_all(&j, after_1);
    j.options = "amp = 'off', steps = 2";
    run_all(&j, after_2);
    j.options = "amp = 'off', one = true, nans = {[3] = true}";
    for (j.at = ON_CPU; j.at <= ON_OWN; j.at++) {
        run_all(&j, ranks);
        CHECK(strstr(ranks[0].text, "the loss is nan at step 3"));
        CHECK_STR(state_of(&ranks[0]), state_of(&after_2[0]));
        CHECK(!strstr(ranks[1].text, "done"));
        if (strcmp(state_of(&ranks[1]), state_of(&after_1[1])) != 0)
            CHECK_STR(state_of(&ranks[1]), state_of(&after_2[1]));
    }
}

/* ==== Where gradients are summed ============================================================== */

/* Runs two ranks and checks their status, the text of both, and the log line of rank 0. If one rank
 * fails, the other one may report that failure (LT_EPEER) instead of its own. */
static void check_backend(lt_sum_backend sums, where at, const char *missing, lt_status status,
                          const char *text, const char *note)
{
    static rank ranks[MAX_RANKS];
    job j = {.ranks = 2,
             .at = at,
             .name = "loop",
             .config = small,
             .options = "amp = 'off'",
             .timeout = 12}; /* waiting for a rank that refuses takes half of it */
    j.config.sum_backend = sums;
    setenv("EMU", missing, 1);
    run_all(&j, ranks);
    unsetenv("EMU");
    CHECK(ranks[0].status == status || ranks[1].status == status);
    for (int i = 0; i < 2; i++) {
        CHECK(ranks[i].status == status || ranks[i].status == LT_EPEER);
        if (!strstr(ranks[i].text, text))
            FAIL("rank %d: no '%s' in\n%s", i, text, ranks[i].text);
    }
    CHECK_STR(ranks[0].note, note);
    CHECK_STR(ranks[1].note, "");
}

TEST(sum_backends)
{
    check_backend(LT_SUM_BACKEND_AUTO, ON_OWN, "", LT_OK, "done", "");
    check_backend(LT_SUM_BACKEND_NCCL, ON_OWN, "", LT_OK, "done", "");
    check_backend(LT_SUM_BACKEND_HOST, ON_OWN, "", LT_OK, "done", "");
    check_backend(LT_SUM_BACKEND_AUTO, ON_ONE, "", LT_OK, "done",
                  "ranks 0 and 1 share cuda:0: buckets are summed on the CPU");
    check_backend(LT_SUM_BACKEND_AUTO, ON_OWN, "no-comm", LT_OK, "done",
                  "rank 0: emulators cannot communicate: buckets are summed on the CPU");
    check_backend(LT_SUM_BACKEND_AUTO, ON_OWN, "one-refuses", LT_OK, "done",
                  "rank 1: cuda:1 refuses to connect: buckets are summed on the CPU");
}

/* NCCL refuses to connect ranks with other versions of it. */
TEST(versions_of_the_communication_library)
{
    char host[64] = "", text[400];
    gethostname(host, sizeof host - 1);
    snprintf(text, sizeof text, "rank 0 on %s has emulator 1.0, but rank 1 on %s has emulator 1.1",
             host, host);
    check_backend(LT_SUM_BACKEND_NCCL, ON_OWN, "versions", LT_EENV, text, "");
    strcat(text, ": buckets are summed on the CPU");
    check_backend(LT_SUM_BACKEND_AUTO, ON_OWN, "versions", LT_OK, "done", text);
}

TEST(sum_backends_that_are_not_available)
{
    check_backend(LT_SUM_BACKEND_NCCL, ON_ONE, "", LT_EENV,
                  "--sums nccl: ranks 0 and 1 share cuda:0", "");
    check_backend(LT_SUM_BACKEND_NCCL, ON_OWN, "no-comm", LT_EENV,
                  "--sums nccl: rank 0: emulators cannot communicate", "");
    check_backend(LT_SUM_BACKEND_NCCL, ON_OWN, "one-refuses", LT_EENV,
                  "--sums nccl: rank 1: cuda:1 refuses to connect", "");
    check_backend(
        LT_SUM_BACKEND_NCCL, ON_CPU, "", LT_EENV,
        "--sums nccl requires every rank on an accelerator, but 2 of 2 are not; use --device cuda",
        "");
}

/* A sum that never completes ends both ranks: the first one whose timeout expires informs the
 * other. */
TEST(a_sum_that_never_completes)
{
    static rank ranks[MAX_RANKS];
    job j = {.ranks = 2,
             .at = ON_OWN,
             .name = "loop",
             .config = small,
             .timeout = 1,
             .options = "amp = 'off'"};
    setenv("EMU", "one-hangs", 1);
    double before = lt__seconds();
    run_all(&j, ranks);
    unsetenv("EMU");
    CHECK(lt__seconds() - before < 20);
    CHECK(strstr(ranks[0].text, "rank 1 failed: ") || strstr(ranks[0].text, "bucket "));
    CHECK(strstr(ranks[1].text,
                 "bucket 1: the accelerators of the other ranks did not connect within 1 s"));
}

TEST(a_single_rank)
{
    static rank ranks[2][MAX_RANKS];
    job j = {.ranks = 1, .name = "loop", .config = small, .options = "policy = 'dynamic'"};
    run_all(&j, ranks[0]);
    j.at = ON_OWN;
    j.config.sum_backend = LT_SUM_BACKEND_NCCL;
    run_all(&j, ranks[1]);
    CHECK_EQ(ranks[1][0].status, LT_OK);
    CHECK_STR(ranks[1][0].text, ranks[0][0].text);
    setenv("EMU", "no-comm", 1);
    run_all(&j, ranks[1]);
    unsetenv("EMU");
    CHECK_EQ(ranks[1][0].status, LT_EENV);
    CHECK(strstr(ranks[1][0].text, "--sums nccl: rank 0: emulators cannot communicate"));
}

/* Accelerators round each f16 or bf16 sum, so the results differ from the CPU, but all ranks have
 * the same. */
TEST(sums_in_f16_and_bf16)
{
    static const lt_dtype wires[] = {LT_F16, LT_BF16};
    static rank ranks[MAX_RANKS];
    for (int n = 2; n <= 4; n *= 2)
        for (int w = 0; w < 2; w++) {
            job j = {.ranks = n,
                     .at = ON_OWN,
                     .name = "loop",
                     .config = small,
                     .options = "policy = 'dynamic', spikes = {[2] = true}"};
            j.config.wire = wires[w];
            run_all(&j, ranks);
            CHECK(strstr(ranks[0].text, "done"));
            CHECK(strstr(ranks[0].text, "skipped=0x1p+0"));
            for (int i = 1; i < n; i++)
                CHECK_STR(ranks[i].text, ranks[0].text);
        }
}

/* ==== A reducer in C ========================================================================== */

/* Chooses a wire scale that is too large the first time, so that f16 overflows. */
static void pack(void *ud, lt_packet *p)
{
    rank *r = ud;
    CHECK_EQ(p->n, 1);
    CHECK_EQ(p->in_f16, true);
    CHECK_EQ(p->sent, r->steps);
    CHECK_EQ(p->stats.not_finite, 0);
    CHECK_NEAR(p->stats.largest, 1 + r->number, 0);
    CHECK_NEAR(p->largest, 1 + r->number, 0);
    p->exponent = r->steps == 0 ? 18 : 3;
    p->tail[0] = (float)(1 + r->number);
    p->tail[LT_MAX_TAIL - 1] = 7;
}

static bool unpack(void *ud, const lt_packet *p)
{
    rank *r = ud;
    CHECK_NEAR(p->tail[0], 3, 0);
    CHECK_NEAR(p->tail[1], 0, 0);
    CHECK_NEAR(p->tail[LT_MAX_TAIL - 1], 14, 0);
    return r->steps++ == 0;
}

static lt_grad_stats never(void *ud, const lt_tensor *grad)
{
    (void)grad;
    ((rank *)ud)->bad++;
    return (lt_grad_stats){0};
}

/* One step of two ranks with different initial values. Rank 1 has two of three rows, and twice the
 * loss per row. If the job is idle, rank 1 has no rows, and its backward does not count. */
static void *run_step(void *ud)
{
    enum { N = 5 };
    rank *r = ud;
    float values[N];
    lt_step_status step_status;
    lt_opt opts[LT_MAX_OPT];
    lt_bucket_filter filter = {
        .ud = r, .tail = LT_MAX_TAIL, .measure_late = never, .pack = pack, .unpack = unpack};
    lt_ctx *ctx =
        lt_open(&(lt_config){.device = r->number && r->job->at == ON_OWN ? "cuda:1" : "cuda:0",
                             .threads = 1,
                             .poison = true});
    lt_params *params = lt_params_new(ctx);
    lt_tensor *w =
        lt_param_new(ctx, LT_F32, 1, (int64_t[]){N}, (lt_init){LT_INIT_CONSTANT, 1 + r->number, 0});
    CHECK_OK(lt_params_add(params, "w", w));
    CHECK_OK(lt_params_place(params));
    lt_optim *optim = lt_optim_new(ctx, "momentum_step", &w, 1);
    lt_reducer *reducer = lt_reducer_new(ctx, r->group, &r->job->config);
    if (r->job->config.wire == LT_F16)
        CHECK_OK(lt_reducer_set_filter(reducer, &filter));
    CHECK_OK(lt_reducer_add(reducer, &w, 1));
    bool idle = r->job->idle;
    double times = idle && r->number ? 1e6 : 1 + r->number;
    lt_reducer_set_share(reducer, !idle ? 1 + r->number : r->number ? 0 : 3, 3);
    lt_tensor *factor = lt_tensor_full(ctx, LT_F32, 0, NULL, times);
    lt_tensor *sum = lt_run(ctx, "sum", NULL, w, NULL);
    lt_tensor *loss = lt_run(ctx, "mul", NULL, sum, factor, NULL);
    CHECK_OK(lt_backward(loss, NULL));
    CHECK_OK(lt_opts_parse(&lt_optim_def(optim)->schema, "lr=0.1 momentum=0 weight_decay=0", opts));
    CHECK_OK(lt_optim_step(optim, (const lt_opt *const[]){opts}, 1, &step_status));
    CHECK_EQ(step_status, LT_APPLIED); /* not pending */
    CHECK_NEAR(lt_reducer_last(reducer).loss, idle ? 5 : 25.0 / 3, 1e-6);
    CHECK_OK(lt_read(w, values));
    for (int i = 0; i < N; i++)
        CHECK_NEAR(values[i], idle ? 0.9 : 1 - 0.1 * 5 / 3,
                   r->job->config.wire == LT_F16 ? 2e-4 : 1e-6);
    lt_tensor *all[] = {factor, sum, loss, w};
    for (int i = 0; i < 4; i++)
        lt_release(all[i]);
    lt_reducer_free(reducer);
    lt_optim_free(optim);
    lt_params_free(params);
    lt_ctx_free(ctx);
    lt_group_close(r->group);
    return NULL;
}

static void run_steps(const job *j, rank ranks[2])
{
    lt_group *group[2];
    use_emu();
    CHECK_OK(lt_local_open(2, &(lt_group_config){.timeout = 20}, group));
    for (int i = 0; i < 2; i++) {
        ranks[i] = (rank){.job = j, .number = i, .group = group[i]};
        CHECK_EQ(pthread_create(&ranks[i].thread, NULL, run_step, &ranks[i]), 0);
    }
    for (int i = 0; i < 2; i++)
        pthread_join(ranks[i].thread, NULL);
}

TEST(a_step)
{
    static rank ranks[2];
    for (where at = ON_ONE; at <= ON_OWN; at++) {
        run_steps(&(job){.at = at}, ranks);
        run_steps(&(job){.at = at, .idle = true}, ranks);
    }
}

TEST(a_bucket_that_is_sent_again)
{
    static rank ranks[2];
    run_steps(&(job){.at = ON_OWN, .config = {.wire = LT_F16}}, ranks);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(ranks[i].steps, 2);
        CHECK_EQ(ranks[i].bad, 0); /* the filter never inspected device gradients on the host */
    }
}
