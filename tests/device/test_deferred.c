/* test_deferred.c - asynchronous steps on an accelerator with deferred checks. The results must
 * equal those on the CPU, where each step is decided at once. The accelerator is emulated, mostly
 * with the reference kernels of the CPU. */
#include "amp/amp.h"
#include "core/tensor.h"
#include "tests/device/deferred.h"

static char text[2][TEXT]; /* results on the CPU and on an accelerator */

/* Calls a function of deferred.lua with this folder for its output. */
static void call_in(const char *out, bool emu, const char *name, const char *options,
                    const char *fault, waits *w)
{
    char all[512];
    use_emu();
    lt_ctx *ctx = lt_open(&(lt_config){.device = emu ? "cuda" : "cpu",
                                       .threads = 1,
                                       .poison = true,
                                       .reference = true,
                                       .fault = fault});
    lua_State *L = ctx ? lt_lua_new(ctx) : NULL;
    if (!L)
        FAIL("%s", lt_errmsg());
    snprintf(all, sizeof all, "out = '%s', %s", out, options);
    if (call_lua(L, name, all, w ? w : &(waits){0}, text[emu]) != LT_OK)
        FAIL("%s: %s", options, lt_errmsg());
    lt_lua_close(L);
    lt_ctx_free(ctx);
}

static void call(bool emu, const char *name, const char *options, const char *fault)
{
    char out[32];
    make_folder(out);
    call_in(out, emu, name, options, fault, NULL);
    remove_folder(out);
}

static void call_both(const char *name, const char *options, const char *fault)
{
    call(false, name, options, fault);
    call(true, name, options, fault);
}

/* Checks that both devices have the same result, which contains `part`. */
static void check_same(const char *name, const char *options, const char *fault, const char *part)
{
    call_both(name, options, fault);
    if (strcmp(text[0], text[1]) != 0)
        FAIL("%s %s:\n%s\non the CPU\n%s", options, fault ? fault : "", text[1], text[0]);
    if (!strstr(text[0], part))
        FAIL("%s %s: no '%s' in\n%s", options, fault ? fault : "", part, text[0]);
}

static void check_loop(const char *options, const char *fault, const char *part)
{
    check_same("loop", options, fault, part);
}

/* ==== Skipped steps =========================================================================== */

TEST(a_loop)
{
    check_loop("policy = 'static'", NULL, "done");
    check_loop("policy = 'adaptive', scale = 2.0^24", NULL, "done");
    check_loop("policy = 'dynamic', scale = 2.0^24, inspect = true, adam = true", NULL, "done");
    check_loop("amp = 'bf16', adam = true", NULL, "done");
    check_loop("amp = 'off', clips = true", NULL, "done");
    check_loop("amp = 'bf16', clips = true, adam = true, inspect = true", NULL, "done");
    check_loop("policy = 'adaptive', clips = true, accumulate = 2", NULL, "done");
}

TEST(an_inf_in_any_gradient)
{
    static const char *const params[] = {"1.w", "1.b", "2.scale", "2.shift", "5.w", "5.b"};
    for (size_t i = 0; i < sizeof params / sizeof *params; i++)
        for (int t = 1; t <= 6; t += t == 1 ? 2 : 3) { /* 1, 3, 6 */
            char fault[64];
            snprintf(fault, sizeof fault, "inf:rank=0:step=%d:param=%s", t, params[i]);
            check_loop("policy = 'dynamic'", fault, " skipped=0x1p+0");
            check_loop("policy = 'adaptive', adam = true, accumulate = 2", fault,
                       " skipped=0x1p+0");
        }
}

TEST(several_skipped_steps)
{
    check_loop("policy = 'dynamic', spikes = {[2] = true, [3] = true}", NULL, "skipped=0x1p+1");
    check_loop("policy = 'adaptive', adam = true, spikes = {true, true, [5] = true}", NULL,
               "skipped=0x1.8p+1");
    check_loop("policy = 'adaptive', accumulate = 2, spikes = {true, [6] = true}, adam = true",
               NULL, "skipped=0x1p+1");
    check_loop("policy = 'dynamic', clips = true, spikes = {[2] = true, [3] = true}", NULL,
               "skipped=0x1p+1");
    check_loop("policy = 'dynamic', inspect = true, adam = true, spikes = {[2] = true}", NULL,
               "skipped=0x1p+0");
    check_loop("policy = 'dynamic', grads = true, spikes = {[2] = true}", NULL, "skipped=0x1p+0");
}

TEST(gradients_are_checked_after_hooks)
{
    check_loop("policy = 'dynamic', breaks_in = {[2] = true, [5] = true}", NULL, "skipped=0x1p+1");
    check_loop("policy = 'adaptive', breaks_in = {[3] = true}, accumulate = 2, inspect = true",
               NULL, "skipped=0x1p+0");
}

TEST(dropped_gradients_are_not_checked)
{
    check_loop("policy = 'dynamic', drops = {[2] = true, [3] = true}", NULL, "skipped=0x0p+0");
    check_loop("policy = 'dynamic', extra = true, drops = {[2] = true}", NULL, "skipped=0x0p+0");
    check_loop("policy = 'dynamic', drops = {[2] = true}, spikes = {[2] = true}, accumulate = 2",
               NULL, "skipped=0x1p+0");
}

TEST(an_optimizer_that_steps_later)
{
    check_same("two_optimizers", "", NULL, "skipped=0x1p+2");
    CHECK(strncmp(text[0] + 65, text[0], 64) == 0); /* step 2 was skipped */
    CHECK(strncmp(text[0] + 3 * 65, text[0], 64) != 0);
}

/* The images are a leaf whose gradient no optimizer zeroes. The first backward of the next step
 * zeroes what a skipped step left in it; the following backward of that step does not. */
TEST(a_leaf_without_an_optimizer)
{
    check_loop("policy = 'dynamic', leaf = true, accumulate = 2, spikes = {[2] = true}", NULL,
               "skipped=0x1p+0");
    check_loop("policy = 'dynamic', leaf = true, spikes = {[2] = true, [3] = true}", NULL,
               "skipped=0x1p+1");
}

/* Every step overflows. After ten skipped steps each op is inspected, and the training fails. */
TEST(steps_that_always_overflow)
{
    check_loop("policy = 'static', steps = 20, spikes = setmetatable({}, {__index = function() "
               "return true end})",
               NULL, "is the first non-finite tensor");
}

/* ==== A loss that is not finite =============================================================== */

TEST(a_loss_that_is_not_finite)
{
    check_loop("amp = 'off', nans = {[3] = true}", NULL,
               "the loss is nan at step 3; check the "
               "learning rate and the data");
    check_loop("amp = 'off', nans = {true}, adam = true", NULL, "the loss is nan at step 1");
    check_loop("amp = 'bf16', nans = {[6] = true}, accumulate = 2", NULL,
               "the loss is nan at step 6"); /* no backward follows that step */
}

/* On the CPU the step itself fails. On the accelerator the next backward does, or a read of the
 * net. */
TEST(a_norm_that_is_not_finite)
{
    for (int t = 3; t < 7; t += 3) {
        char options[64], message[64];
        snprintf(options, sizeof options, "amp = 'off', clips = true, breaks_in = {[%d] = true}",
                 t);
        snprintf(message, sizeof message, "the norm of the gradients is inf at step %d; check", t);
        call_both("loop", options, NULL);
        CHECK(strstr(text[0], message) && strstr(text[1], message));
        CHECK_STR(strchr(text[1], '\n'), strchr(text[0], '\n')); /* weights and slots */
    }
}

/* After such an error, calling the optimizer's step again has no effect on the weights, then or
 * later. */
TEST(a_step_after_a_loss_that_was_reported)
{
    static char first[TEXT];
    call(true, "reported", "", NULL);
    strcpy(first, text[1]);
    call(true, "reported", "again = true", NULL);
    CHECK_STR(text[1], first);
}

TEST(reading_running_statistics)
{
    check_same("read_statistics", "", NULL, "the loss is nan at step 1");
}

/* With a loss scale the CPU's message has more detail, as the loss's inputs still exist there. */
TEST(a_loss_that_is_not_finite_under_a_scale)
{
    call_both("loop", "policy = 'dynamic', nans = {[3] = true}, spikes = {[2] = true}", NULL);
    for (int emu = 0; emu < 2; emu++) {
        CHECK(strstr(text[emu], "the loss is nan at step 3"));
        CHECK(strstr(text[emu], " headroom=0x0p+0 "));
        CHECK(strstr(text[emu], " skipped=0x1p+0 steps=0x1p+1 "));
    }
    CHECK_STR(strchr(text[1], '\n'), strchr(text[0], '\n')); /* weights, slots and the scaler */
}

/* The last layer has errors. */
TEST(lt_amp_check)
{
    check_same("check", "amp = 'fp16'", NULL, "\nnet.5 0x1.");
    check_same("check", "amp = 'bf16'", NULL, "\nnet.5 0x1.");
}

/* ==== Runs ==================================================================================== */

static void check_fit(const char *options, const char *fault, const char *part)
{
    check_same("fit", options, fault, part);
}

/* Also compares the lines of metrics.jsonl. */
TEST(a_run)
{
    const char *fault = "inf:rank=0:step=7:param=1.w";
    check_fit("amp = 'off'", NULL, "done");
    check_fit("amp = 'bf16', accumulate = 3", NULL, "done");
    check_fit("amp = 'fp16', policy = 'dynamic', scale = 2.0^24", NULL, "done");
    check_fit("amp = 'fp16', policy = 'adaptive', workers = 2, accumulate = 2", fault,
              "\"skipped\":1");
    check_fit("amp = 'fp16', policy = 'dynamic', scale = 256, max_steps = 5", NULL, "step 5");
    check_fit("amp = 'off', nan = 4", NULL, "the loss is nan at step 4");
    check_fit("amp = 'off', nan = 6", NULL, "the loss is nan at step 6");
}

/* A script's own loop over a run. The function of its step returns the loss as a tensor. */
TEST(a_loop_over_a_run)
{
    call(false, "run", "amp = 'fp16', kind = 'number'", NULL);
    call(true, "run", "amp = 'fp16', kind = 'tensor'", NULL);
    CHECK_STR(text[1], text[0]);
    CHECK(strstr(text[0], "\"step\":12"));
}

/* Resumes from a checkpoint that was saved right after a skipped step. */
TEST(a_run_that_is_resumed)
{
    static char whole[TEXT];
    const char *options = "amp = 'fp16', policy = 'dynamic', scale = 256, save_every = 1";
    const char *fault = "inf:rank=0:step=2:param=5.w";
    char out[32], first[256];
    call(false, "fit", options, fault);
    strcpy(whole, text[0]);
    for (int emu = 0; emu < 2; emu++) {
        make_folder(out);
        snprintf(first, sizeof first, "%s, max_steps = 2", options);
        call_in(out, true, "fit", first, fault, NULL);
        CHECK(strstr(text[1], "\"skipped\":1"));
        call_in(out, emu, "fit", options, NULL, NULL);
        remove_folder(out);
        CHECK(strncmp(text[emu], whole, strlen("done\n") + 64) == 0); /* the weights */
    }
}

/* The host may wait for one check and for the memory of one batch, and must not empty the stream.
 */
static void check_step_waits(const char *options)
{
    waits w = {.most = 2};
    char out[32];
    make_folder(out);
    call_in(out, true, "fit", options, NULL, &w);
    remove_folder(out);
    CHECK(strncmp(text[1], "done", 4) == 0);
    CHECK_EQ(w.steps, 12);
    if (w.bad > 0)
        FAIL("%s: %d steps", options, w.bad);
}

TEST(a_step_waits_only_for_the_one_before)
{
    check_step_waits("amp = 'off'");
    check_step_waits("amp = 'off', clip = 0.5");
    check_step_waits("amp = 'bf16', workers = 2, mixup = 0.2");
    check_step_waits("amp = 'fp16', policy = 'adaptive'");
    check_step_waits("amp = 'fp16', policy = 'adaptive', clip = 0.5");
    check_step_waits("amp = 'fp16', policy = 'adaptive', workers = 0");
}

/* ==== Steps in C, with CUDA kernels =========================================================== */

typedef struct training {
    lt_ctx *ctx;
    lt_tensor *p, *x;
    lt_params *params;
    lt_optim *optim;
    lt_opt opts[LT_MAX_OPT];
} training;

/* Takes ctx. */
static training training_new(lt_ctx *ctx)
{
    enum { COUNT_P = 5000 };
    training t = {.ctx = ctx};
    t.p = lt_param_new(t.ctx, LT_F32, 1, (int64_t[]){COUNT_P}, (lt_init){LT_INIT_NORMAL, 0, 1});
    t.x = lt_tensor_new(t.ctx, LT_F32, 1, (int64_t[]){COUNT_P});
    CHECK_OK(lt_fill_normal(t.x, LT_RNG_USER, 1, 0, 1, 1));
    t.params = lt_params_new(t.ctx);
    CHECK_OK(lt_params_add(t.params, "p", t.p));
    CHECK_OK(lt_params_place(t.params));
    t.optim = lt_optim_new(t.ctx, "momentum_step", &t.p, 1);
    CHECK_OK(lt_opts_parse(&lt_optim_def(t.optim)->schema, "lr=0.25", t.opts));
    return t;
}

static void training_free(training *t)
{
    lt_optim_free(t->optim);
    lt_params_free(t->params);
    RELEASE(t->p, t->x);
    lt_ctx_free(t->ctx);
}

/* Backward of by * mean(p x). */
static lt_status backward(training *t, double by)
{
    lt_tensor *a = lt_run(t->ctx, "mul", NULL, t->p, t->x, NULL);
    lt_tensor *factor = lt_tensor_full(t->ctx, LT_F32, 0, NULL, by);
    lt_tensor *b = lt_run(t->ctx, "mean", NULL, a, NULL);
    lt_tensor *loss = lt_run(t->ctx, "mul", NULL, b, factor, NULL);
    lt_status status = lt_backward(loss, NULL);
    RELEASE(loss, b, factor, a);
    return status;
}

static lt_status update(training *t, lt_step_status *step_status)
{
    return lt_optim_step(t->optim, (const lt_opt *[]){t->opts}, 1, step_status);
}

static lt_status step(training *t, double by)
{
    LT_TRY(backward(t, by));
    return update(t, NULL);
}

/* Updates with gradients clipped to a norm of 0.01. */
static lt_status clipped_update(training *t)
{
    return lt_optim_step_clipped(t->optim, (const lt_opt *[]){t->opts}, 1, 0.01, NULL, NULL);
}

static lt_status clipped_step(training *t, double by)
{
    LT_TRY(backward(t, by));
    return clipped_update(t);
}

/* Whether the weights have this SHA-256. */
static bool has_weights(training *t, const char *hex)
{
    char now[65];
    CHECK_OK(lt_params_sha256(t->params, now));
    return strcmp(now, hex) == 0;
}

/* Checks that the last step was skipped, and that the next one is applied. */
static void check_continues(training *t, lt_status (*run_step)(training *, double),
                            const char *before)
{
    CHECK(has_weights(t, before));
    CHECK_EQ(lt_optim_step_status(t->optim), LT_SKIPPED);
    CHECK_OK(run_step(t, 1));
    CHECK_OK(lt_synchronize(t->ctx));
    CHECK_EQ(lt_optim_step_status(t->optim), LT_APPLIED);
    CHECK(!has_weights(t, before));
}

/* Runs steps on the CPU or on a device. Each waits at most once, for the one before. */
static void take_steps(bool on_device, bool clips, bool scaled, lt_scaler *scaler, char hex[65])
{
    enum { STEPS = 8 };
    training t = training_new(on_device ? open_shim(true) : open_reference());
    *scaler = lt_scaler_init(LT_SCALE_DYNAMIC, 8, 2);
    lt_loss_scale *scale = scaled ? lt_loss_scale_new(t.ctx, scaler) : NULL;
    CHECK_OK(lt_use_loss_scale(t.ctx, scale));
    for (int k = 0; k < STEPS; k++) {
        int64_t waited = counted(SHIM_WAITS), drained = counted(SHIM_DRAINS);
        bool overflows = scaled && (k == 2 || k == 3 || k == STEPS - 1);
        double by = overflows ? 0x1p125 : k == 4 ? 0.01 : 1; /* 0.01: the norm is small */
        CHECK_OK(clips ? clipped_step(&t, by) : step(&t, by));
        CHECK(k < 2 || counted(SHIM_WAITS) - waited <= 1);
        CHECK(k < 2 || counted(SHIM_DRAINS) == drained);
    }
    if (scale)
        *scaler = *lt_loss_scale_scaler(scale);
    CHECK_OK(lt_params_sha256(t.params, hex));
    CHECK_OK(lt_use_loss_scale(t.ctx, NULL));
    lt_loss_scale_free(scale);
    training_free(&t);
}

/* Two consecutive steps overflow, and a single one. */
TEST(steps_that_overflow_or_are_clipped)
{
    for (int scaled = 0; scaled < 2; scaled++)
        for (int clips = 0; clips < 2; clips++) {
            char hex[2][65];
            lt_scaler scaler[2];
            for (int i = 0; i < 2; i++)
                take_steps(i == 1, clips, scaled, &scaler[i], hex[i]);
            CHECK_EQ(scaler[0].skipped, 3 * scaled);
            CHECK(memcmp(&scaler[0], &scaler[1], sizeof scaler[0]) == 0);
            CHECK_STR(hex[1], hex[0]);
        }
}

/* The device finds it, and it fails like a loss that is not finite. */
TEST(a_norm_that_is_not_finite_in_c)
{
    char before[65];
    training t = training_new(open_shim(true));
    CHECK_OK(clipped_step(&t, 1));
    CHECK_OK(lt_params_sha256(t.params, before));
    CHECK_OK(backward(&t, 1));
    CHECK_OK(lt_fill(lt_grad(t.p), INFINITY));
    CHECK_OK(clipped_update(&t));
    CHECK_FAILS(clipped_step(&t, 1), LT_ENUMERIC,
                "the norm of the gradients is inf at step 2; "
                "check the learning rate and the data");
    check_continues(&t, clipped_step, before);
    training_free(&t);
}

/* The second optimizer of a step clips without a wait. A step before the first backward is an
 * error. */
TEST(two_optimizers_that_clip)
{
    training t = training_new(open_shim(true));
    lt_optim *other = lt_optim_new(t.ctx, "momentum_step", &t.p, 1);
    CHECK_FAILS(clipped_update(&t), LT_EINVAL,
                "an optimizer step has no gradients: no backward has run since the last step; call "
                "backward on the loss first");
    for (int k = 0; k < 4; k++) {
        CHECK_OK(clipped_step(&t, 1));
        int64_t so_far = counted(SHIM_WAITS);
        CHECK_OK(lt_optim_step_clipped(other, (const lt_opt *[]){t.opts}, 1, 1, NULL, NULL));
        CHECK_EQ(counted(SHIM_WAITS), so_far);
    }
    char before[65];
    CHECK_OK(lt_synchronize(t.ctx));
    CHECK_OK(lt_params_sha256(t.params, before));
    CHECK_OK(backward(&t, NAN));
    CHECK_OK(update(&t, NULL));
    CHECK_OK(lt_optim_step_clipped(other, (const lt_opt *[]){t.opts}, 1, 1, NULL, NULL));
    CHECK_FAILS(lt_synchronize(t.ctx), LT_ENUMERIC, "the loss is nan at step 9");
    CHECK(has_weights(&t, before));
    lt_optim_free(other);
    training_free(&t);
}

/* The error comes from the next step or from lt_synchronize(). The weights do not change. */
TEST(a_loss_that_is_not_finite_in_c)
{
    char before[65];
    for (int synchronize = 0; synchronize < 2; synchronize++) {
        training t = training_new(open_shim(true));
        CHECK_OK(step(&t, 1));
        CHECK_OK(lt_params_sha256(t.params, before));
        CHECK_OK(step(&t, NAN));
        CHECK_FAILS(synchronize ? lt_synchronize(t.ctx) : step(&t, 1), LT_ENUMERIC,
                    "the loss is nan at step 2; check the learning rate and the data");
        check_continues(&t, step, before);
        training_free(&t);
    }
}

/* One of several backwards of a step has such a loss. The error is reported once, and no step uses
 * the gradients of that step. */
TEST(a_micro_batch_whose_loss_is_not_finite)
{
    char before[65];
    lt_step_status step_status;
    training t = training_new(open_shim(true));
    CHECK_OK(lt_params_sha256(t.params, before));
    CHECK_OK(backward(&t, -INFINITY));
    CHECK_FAILS(backward(&t, 1), LT_ENUMERIC,
                "the loss is inf at step 1; check the learning rate and the data");
    CHECK_OK(backward(&t, 1));
    CHECK_OK(backward(&t, 1));
    CHECK_OK(lt_synchronize(t.ctx));
    CHECK_OK(update(&t, &step_status));
    CHECK_EQ(step_status, LT_SKIPPED);
    CHECK(has_weights(&t, before));
    CHECK_OK(backward(&t, 1));
    CHECK_OK(update(&t, &step_status));
    CHECK_EQ(step_status, LT_PENDING);
    CHECK_EQ(lt_optim_step_status(t.optim), LT_APPLIED);
    training_free(&t);
}
