/* test_ranks.c - data-parallel training on emulated accelerators with the reference kernels. The
 * results must equal those of ranks on the CPU.
 */
#include "tests/device/ranks.h"

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
        if (there->waits.bad > 0)
            FAIL("%d ranks %s, %s: rank %d emptied the stream in %d steps", j->ranks, places[j->at],
                 given, i, there->waits.bad);
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
    open_nccl();
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

/* A single rank is on its own device anyway. */
static void check_job(job j, const char *part)
{
    check_up_to(j.ranks > 1 ? ON_OWN : ON_ONE, j, part);
}

/* With sums in small buckets while the ranks compute, or blocking ones. */
static void check_loop(int ranks, bool blocking, const char *options, const char *fault,
                       const char *part)
{
    job j = loop_of(ranks, ON_CPU, options);
    j.fault = fault;
    if (blocking)
        j.config = (lt_reducer_config){.blocking = true};
    check_job(j, part);
}

/* ==== Tests =================================================================================== */

/* Each kind of loop has blocking sums with 2 or with 4 ranks, and others with the other number. */
TEST(a_loop)
{
    static const char *const options[] = {"amp = 'off'", "amp = 'bf16', adam = true",
                                          "policy = 'adaptive', scale = 2.0^24, adam = true",
                                          "amp = 'off', clips = true, accumulate = 3"};
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < 4; i += test_stride(2))
            check_loop(1 << k, (i + k) % 2 == 0, options[i], NULL, "done");
}

/* Each parameter and step, and each pair of a policy and a kind of sum. */
TEST(an_inf_in_any_gradient)
{
    static const char *const params[] = {"1.w", "2.shift", "5.b"};
    static const char *const options[] = {"policy = 'dynamic'",
                                          "policy = 'adaptive', adam = true, accumulate = 2"};
    for (int i = 0; i < 3; i++)
        for (int late = 0; late < 2; late++) {
            char fault[64];
            snprintf(fault, sizeof fault, "inf:rank=%d:step=%d:param=%s", i % 2, late ? 4 : 1,
                     params[i]);
            check_loop(2, (late + (i > 0)) % 2 == 0, options[(i + late) % 2], fault,
                       " skipped=0x1p+0");
        }
}

TEST(several_skipped_steps)
{
    check_loop(2, true, "policy = 'dynamic', spikes = {[2] = true, [3] = true}", NULL,
               "skipped=0x1p+1");
    check_loop(4, false, "policy = 'adaptive', accumulate = 2, spikes = {true, [6] = true}", NULL,
               "skipped=0x1p+1");
}

TEST(no_scale_helps)
{
    check_loop(2, false,
               "policy = 'static', steps = 20, spikes = setmetatable({}, {__index = function() "
               "return true end})",
               NULL, "is the first non-finite tensor");
}

TEST(half_precision_wires)
{
    job j = loop_of(2, ON_CPU, "policy = 'dynamic'");
    j.config.wire = LT_F16;
    check_up_to(ON_ONE, j, "done");
    j.options = "amp = 'off'";
    j.config.wire = LT_BF16;
    check_up_to(ON_ONE, j, "done");
}

TEST(a_parameter_that_one_rank_uses)
{
    check_loop(2, false, "amp = 'off', rare = true", NULL, "done");
    check_loop(2, true, "policy = 'dynamic', rare = true, accumulate = 2", NULL, "done");
    check_loop(4, false, "policy = 'dynamic', rare = true, accumulate = 2", NULL, "done");
}

TEST(a_run)
{
    static const char *const options[] = {"amp = 'off'",
                                          "amp = 'bf16', accumulate = 3, workers = 2",
                                          "amp = 'fp16', policy = 'dynamic', scale = 2.0^24"};
    static const int ranks[] = {2, 4, 2};
    for (int i = 0; i < 3; i++)
        check_job((job){.ranks = ranks[i], .name = "fit", .options = options[i], .config = small},
                  "done");
}

/* The other ranks learn of the failure before they apply the step. */
TEST(a_rank_that_fails)
{
    static rank ranks[MAX_RANKS];
    for (where at = ON_ONE; at <= ON_OWN; at++) {
        job j = loop_of(2, at, "amp = 'off', breaks = 3");
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
    job j = loop_of(2, ON_CPU, "amp = 'off', steps = 1");
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

TEST(a_single_rank)
{
    static rank ranks[2][MAX_RANKS];
    job j = loop_of(1, ON_CPU, "policy = 'dynamic'");
    run_all(&j, ranks[0]);
    j.at = ON_OWN;
    j.config.sum_backend = LT_SUM_BACKEND_NCCL;
    run_all(&j, ranks[1]);
    CHECK_EQ(ranks[1][0].status, LT_OK);
    CHECK_STR(ranks[1][0].text, ranks[0][0].text);
    j.hidden = "NCCL";
    run_all(&j, ranks[1]);
    CHECK_EQ(ranks[1][0].status, LT_EENV);
    CHECK(strstr(ranks[1][0].text, "--sums nccl: rank 0: a test hides NCCL"));
}

/* Accelerators round each f16 or bf16 sum, so the results differ from the CPU, but all ranks have
 * the same. */
TEST(sums_in_f16_and_bf16)
{
    static const lt_dtype wires[] = {LT_F16, LT_BF16};
    static rank ranks[MAX_RANKS];
    for (int n = 2; n <= 4; n *= 2)
        for (int w = 0; w < 2; w++) {
            job j = loop_of(n, ON_OWN, "policy = 'dynamic', spikes = {[2] = true}");
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
    CHECK_EQ(p->sent, r->sent);
    CHECK_EQ(p->stats.not_finite, 0);
    CHECK_NEAR(p->stats.largest, 1 + r->number, 0);
    CHECK_NEAR(p->largest, 1 + r->number, 0);
    p->exponent = r->sent == 0 ? 18 : 3;
    p->tail[0] = (float)(1 + r->number);
    p->tail[LT_MAX_TAIL - 1] = 7;
}

static bool unpack(void *ud, const lt_packet *p)
{
    rank *r = ud;
    CHECK_NEAR(p->tail[0], 3, 0);
    CHECK_NEAR(p->tail[1], 0, 0);
    CHECK_NEAR(p->tail[LT_MAX_TAIL - 1], 14, 0);
    return r->sent++ == 0;
}

static lt_grad_stats never(void *ud, const lt_tensor *grad)
{
    (void)grad;
    ((rank *)ud)->inspected++;
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
    RELEASE(factor, sum, loss, w);
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
    setenv("SHIM_HIDES", "", 1);
    open_nccl();
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
        CHECK_EQ(ranks[i].sent, 2);
        CHECK_EQ(ranks[i].inspected,
                 0); /* the filter never inspected device gradients on the host */
    }
}
