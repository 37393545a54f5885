/* test_late.c - steps on an accelerator that nobody waits for: what becomes of them is what it is
 * on the CPU, where each is decided on at once. The accelerator is the emulator. */
#include <lauxlib.h>

#include "amp/amp.h"
#include "core/tensor.h"
#include "lua/luatrain.h"
#include "tests/device/emu.h"

enum { TEXT = 1 << 16 };

static lua_State *open_lua(lt_ctx *ctx)
{
    lua_State *L = lt_lua_new(ctx);
    if (!L || luaL_loadfile(L, "tests/device/late.lua") != LUA_OK)
        FAIL("%s", L ? lua_tostring(L, -1) : lt_errmsg());
    CHECK_OK(lt_lua_call(L, 0, 1));
    return L;
}

/* What function `name` of late.lua gives for options, a table's text. The context ends. */
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
    lt_ctx *ctx = lt_open(&(lt_config){.device = emu ? "cuda" : "cpu", .threads = 1,
                                       .poison = true, .reference = true, .fault = fault});
    if (!ctx)
        FAIL("%s", lt_errmsg());
    return ctx;
}

/* Both devices give the same, which has `part` in it. */
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

/* ==== Steps that are skipped ================================================================== */

TEST(a_loop)
{
    check_loop("policy = 'static'", NULL, "done");
    check_loop("policy = 'adaptive', scale = 2.0^24", NULL, "done");
    check_loop("policy = 'dynamic', scale = 2.0^24, curious = true, adam = true", NULL, "done");
    check_loop("amp = 'bf16', adam = true", NULL, "done");
    check_loop("amp = 'off', norms = true", NULL, "done");
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
    check_loop("policy = 'dynamic', norms = true, spikes = {[2] = true, [3] = true}", NULL,
               "skipped=0x1p+1");
    check_loop("policy = 'dynamic', curious = true, adam = true, spikes = {[2] = true}", NULL,
               "skipped=0x1p+0");
    check_loop("policy = 'dynamic', look = true, spikes = {[2] = true}", NULL, "skipped=0x1p+0");
}

TEST(what_is_dropped_does_not_count)
{
    check_loop("policy = 'dynamic', drops = {[2] = true, [3] = true}", NULL, "skipped=0x0p+0");
    check_loop("policy = 'dynamic', extra = true, drops = {[2] = true}", NULL, "skipped=0x0p+0");
    check_loop("policy = 'dynamic', drops = {[2] = true}, spikes = {[2] = true}, accumulate = 2",
               NULL, "skipped=0x1p+0");
}

/* The images are a leaf that no optimizer forgets: what a skipped step has left in its gradient is
 * zeroed by the next, not by the part that comes behind it. */
TEST(a_leaf_without_an_optimizer)
{
    check_loop("policy = 'dynamic', leaf = true, accumulate = 2, spikes = {[2] = true}", NULL,
               "skipped=0x1p+0");
    check_loop("policy = 'dynamic', leaf = true, spikes = {[2] = true, [3] = true}", NULL,
               "skipped=0x1p+1");
}

/* No scale helps: the last of ten steps is looked at op by op. */
TEST(at_the_floor)
{
    check_loop("policy = 'static', steps = 20, spikes = setmetatable({}, {__index = function() "
               "return true end})", NULL, "is the first that is not finite");
}

/* ==== A loss that is not finite =============================================================== */

TEST(a_loss_that_is_not_finite)
{
    check_loop("amp = 'off', nans = {[3] = true}", NULL, "the loss is nan at step 3; look at the "
               "learning rate and at the data");
    check_loop("amp = 'off', nans = {true}, adam = true", NULL, "the loss is nan at step 1");
    check_loop("amp = 'bf16', nans = {[6] = true}, accumulate = 2", NULL,
               "the loss is nan at step 6"); /* which no backward follows */
}

TEST(looking_at_statistics)
{
    static char text[2][TEXT];
    for (int emu = 0; emu < 2; emu++)
        call(open_with(emu, NULL), "look", "", text[emu]);
    CHECK_STR(text[1], text[0]);
    CHECK(strstr(text[0], "the loss is nan at step 1"));
}

/* With a scale the CPU says more than that: what it was computed from is still there. */
TEST(a_loss_that_is_not_finite_under_a_scale)
{
    static char text[2][TEXT];
    const char *options = "policy = 'dynamic', nans = {[3] = true}, spikes = {[2] = true}";
    for (int emu = 0; emu < 2; emu++) {
        call(open_with(emu, NULL), "loop", options, text[emu]);
        CHECK(strstr(text[emu], "the loss is nan at step 3"));
        CHECK(strstr(text[emu], " skipped=0x1p+0 steps=0x1p+1 "));
    }
    CHECK_STR(strchr(text[1], '\n'), strchr(text[0], '\n')); /* weights, slots and the scaler */
}
