/* test_deferred.c - asynchronous steps on an accelerator with deferred checks. The results must
 * equal those on the CPU, where each step is decided at once. The accelerator is the emulator. */
#include <lauxlib.h>

#include "amp/amp.h"
#include "core/tensor.h"
#include "lua/luatrain.h"
#include "tests/device/emu.h"
#include "tests/device/emu_counts.h"

enum { TEXT = 1 << 16 };

static lua_State *open_lua(lt_ctx *ctx)
{
    lua_State *L = lt_lua_new(ctx);
    if (!L || luaL_loadfile(L, "tests/device/deferred.lua") != LUA_OK)
        FAIL("%s", L ? lua_tostring(L, -1) : lt_errmsg());
    CHECK_OK(lt_lua_call(L, 0, 1));
    return L;
}

/* Calls function `name` of deferred.lua with options, the fields of a table, and copies its result
 * to text. Takes ctx. */
static void call(lt_ctx *ctx, const char *name, const char *options, char *text)
{
    char code[1024];
    lua_State *L = open_lua(ctx);
    lua_getfield(L, -1, name);
    snprintf(code, sizeof code, "return {%s}", options);
    if (luaL_dostring(L, code))
        FAIL("%s", lua_tostring(L, -1));
    if (lt_lua_call(L, 1, 1) != LT_OK)
        FAIL("%s: %s", options, lt_errmsg());
    snprintf(text, TEXT, "%s", lua_tostring(L, -1));
    lt_lua_close(L);
    lt_ctx_free(ctx);
}

static lt_ctx *open_with(bool emu, const char *fault)
{
    use_emu();
    lt_ctx *ctx = lt_open(&(lt_config){.device = emu ? "cuda" : "cpu",
                                       .threads = 1,
                                       .poison = true,
                                       .reference = true,
                                       .fault = fault});
    if (!ctx)
        FAIL("%s", lt_errmsg());
    return ctx;
}

/* Checks that both devices have the same result, which contains `part`. */
static void check_loop(const char *options, const char *fault, const char *part)
{
    static char text[2][TEXT];
    for (int emu = 0; emu < 2; emu++)
        call(open_with(emu, fault), "loop", options, text[emu]);
    if (strcmp(text[0], text[1]) != 0)
        FAIL("%s %s:\n%s\non the CPU\n%s", options, fault ? fault : "", text[1], text[0]);
    if (!strstr(text[0], part))
        FAIL("%s %s: no '%s' in\n%s", options, fault ? fault : "", part, text[0]);
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
    static char text[2][TEXT];
    for (int emu = 0; emu < 2; emu++)
        call(open_with(emu, NULL), "two_optimizers", "", text[emu]);
    CHECK_STR(text[1], text[0]);
    CHECK(strncmp(text[0] + 65, text[0], 64) == 0); /* step 2 was skipped */
    CHECK(strncmp(text[0] + 3 * 65, text[0], 64) != 0);
    CHECK(strstr(text[0], "skipped=0x1p+2"));
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
    static char text[2][TEXT];
    for (int t = 3; t < 7; t += 3) {
        char options[64], message[64];
        snprintf(options, sizeof options, "amp = 'off', clips = true, breaks_in = {[%d] = true}",
                 t);
        snprintf(message, sizeof message, "the norm of the gradients is inf at step %d; check", t);
        for (int emu = 0; emu < 2; emu++) {
            call(open_with(emu, NULL), "loop", options, text[emu]);
            CHECK(strstr(text[emu], message));
        }
        CHECK_STR(strchr(text[1], '\n'), strchr(text[0], '\n')); /* weights and slots */
    }
}

/* After such an error, calling the optimizer's step again has no effect on the weights, then or
 * later. */
TEST(a_step_after_a_loss_that_was_reported)
{
    static char text[2][TEXT];
    for (int again = 0; again < 2; again++)
        call(open_with(true, NULL), "reported", again ? "again = true" : "", text[again]);
    CHECK_STR(text[1], text[0]);
}

TEST(reading_running_statistics)
{
    static char text[2][TEXT];
    for (int emu = 0; emu < 2; emu++)
        call(open_with(emu, NULL), "read_statistics", "", text[emu]);
    CHECK_STR(text[1], text[0]);
    CHECK(strstr(text[0], "the loss is nan at step 1"));
}

/* With a loss scale the CPU's message has more detail, as the loss's inputs still exist there. */
TEST(a_loss_that_is_not_finite_under_a_scale)
{
    static char text[2][TEXT];
    const char *options = "policy = 'dynamic', nans = {[3] = true}, spikes = {[2] = true}";
    for (int emu = 0; emu < 2; emu++) {
        call(open_with(emu, NULL), "loop", options, text[emu]);
        CHECK(strstr(text[emu], "the loss is nan at step 3"));
        CHECK(strstr(text[emu], " headroom=0x0p+0 "));
        CHECK(strstr(text[emu], " skipped=0x1p+0 steps=0x1p+1 "));
    }
    CHECK_STR(strchr(text[1], '\n'), strchr(text[0], '\n')); /* weights, slots and the scaler */
}

TEST(lt_amp_check)
{
    static char text[2][TEXT];
    for (int half = 0; half < 2; half++) {
        for (int emu = 0; emu < 2; emu++)
            call(open_with(emu, NULL), "check", half ? "amp = 'bf16'" : "amp = 'fp16'", text[emu]);
        CHECK_STR(text[1], text[0]);
        CHECK(strstr(text[0], "\nnet.5 0x1.")); /* the last layer has errors */
    }
}

/* ==== Runs ==================================================================================== */

/* Runs lt.fit in folder `out`, which may have checkpoints. */
static void fit(bool emu, const char *out, const char *options, const char *fault, char *text)
{
    char all[512];
    snprintf(all, sizeof all, "out = '%s', %s", out, options);
    call(open_with(emu, fault), "fit", all, text);
}

static void check_fit(const char *options, const char *fault, const char *part)
{
    static char text[2][TEXT];
    char out[32];
    for (int emu = 0; emu < 2; emu++) {
        make_folder(out);
        fit(emu, out, options, fault, text[emu]);
        remove_folder(out);
    }
    if (strcmp(text[0], text[1]) != 0)
        FAIL("%s %s:\n%s\non the CPU\n%s", options, fault ? fault : "", text[1], text[0]);
    if (!strstr(text[0], part))
        FAIL("%s %s: no '%s' in\n%s", options, fault ? fault : "", part, text[0]);
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
    static char text[2][TEXT];
    char out[32], options[128];
    for (int emu = 0; emu < 2; emu++) {
        make_folder(out);
        snprintf(options, sizeof options, "out = '%s', amp = 'fp16', kind = '%s'", out,
                 emu ? "tensor" : "number");
        call(open_with(emu, NULL), "run", options, text[emu]);
        remove_folder(out);
    }
    CHECK_STR(text[1], text[0]);
    CHECK(strstr(text[0], "\"step\":12"));
}

/* Resumes from a checkpoint that was saved right after a skipped step. */
TEST(a_run_that_is_resumed)
{
    static char whole[TEXT], parts[TEXT];
    const char *options = "amp = 'fp16', policy = 'dynamic', scale = 256, save_every = 1";
    const char *fault = "inf:rank=0:step=2:param=5.w";
    char out[32], first[256];
    make_folder(out);
    fit(false, out, options, fault, whole);
    remove_folder(out);
    for (int emu = 0; emu < 2; emu++) {
        make_folder(out);
        snprintf(first, sizeof first, "%s, max_steps = 2", options);
        fit(true, out, first, fault, parts);
        CHECK(strstr(parts, "\"skipped\":1"));
        fit(emu, out, options, NULL, parts);
        remove_folder(out);
        CHECK(strncmp(parts, whole, strlen("done\n") + 64) == 0); /* the weights */
    }
}

/* ==== Waiting ================================================================================= */

typedef struct waits {
    long waits, drains;
    int steps, bad;
} waits;

/* Called before each step. In the step before, the host may wait for one check and for the memory
 * of one batch, and must not empty the stream. Excludes the first steps, which allocate. */
static int check_waits(lua_State *L)
{
    waits *w = lua_touserdata(L, lua_upvalueindex(1));
    emu_count_fn *count = emu_counter();
    long waited = count(EMU_WAITS) - w->waits, drained = count(EMU_DRAINS) - w->drains;
    bool counts = w->steps % 6 > 2; /* also excludes the first steps after an evaluation */
    w->bad += counts && (waited > 2 || drained > 0);
    w->waits += waited;
    w->drains += drained;
    w->steps++;
    return 0;
}

static int count_waits(lt_ctx *ctx, const char *options)
{
    waits w = {0};
    char out[32], code[512];
    lua_State *L = open_lua(ctx);
    make_folder(out);
    lua_getfield(L, -1, "fit");
    snprintf(code, sizeof code, "return {out = '%s', %s}", out, options);
    CHECK(!luaL_dostring(L, code));
    lua_pushlightuserdata(L, &w);
    lua_pushcclosure(L, check_waits, 1);
    lua_setfield(L, -2, "each");
    CHECK_OK(lt_lua_call(L, 1, 1));
    CHECK(strncmp(lua_tostring(L, -1), "done", 4) == 0);
    lt_lua_close(L);
    lt_ctx_free(ctx);
    remove_folder(out);
    CHECK_EQ(w.steps, 12);
    return w.bad;
}

TEST(a_step_waits_only_for_the_one_before)
{
    CHECK_EQ(count_waits(open_with(true, NULL), "amp = 'off'"), 0);
    CHECK_EQ(count_waits(open_with(true, NULL), "amp = 'off', clip = 0.5"), 0);
    CHECK_EQ(count_waits(open_with(true, NULL), "amp = 'bf16', workers = 2, mixup = 0.2"), 0);
    CHECK_EQ(count_waits(open_with(true, NULL), "amp = 'fp16', policy = 'adaptive'"), 0);
    CHECK_EQ(count_waits(open_with(true, NULL), "amp = 'fp16', policy = 'adaptive', clip = 0.5"),
             0);
    CHECK_EQ(count_waits(open_with(true, NULL), "amp = 'fp16', policy = 'adaptive', workers = 0"),
             0);
}
