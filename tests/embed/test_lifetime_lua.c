/* test_lifetime_lua.c - Lua states and their objects after their context was closed. */
#include <lauxlib.h>
#include <lualib.h>

#include "lua/luatrain.h"
#include "tests/embed/lifetime.h"

/* Runs a script, which returns a function. */
static void run_script(lua_State *L, const char *script)
{
    char folder[32], path[64];
    make_folder(folder);
    snprintf(path, sizeof path, "%s/model.lua", folder);
    CHECK_OK(lt_file_replace(path, script, strlen(script)));
    CHECK_OK(lt_lua_dofile(L, path, 0, NULL));
    remove_folder(folder);
}

/* A tensor that C got from a state. Its hook is a function of the state, which is closed. */
TEST_BOTH(objects_of_a_lua_state)
{
    static const char script[] = "local lt = require 'luatrain'\n"
                                 "local w = lt.ones({4}):requires_grad()\n"
                                 "w:on_grad(function(g) g:fill(0) end)\n"
                                 "local y = (w * w):sum()\n"
                                 "return function(x) return w, y end\n";
    lt_tensor *out[2], *x = leaf(ctx, 4, 3);
    lua_State *L = lt_lua_new(ctx);
    run_script(L, script);
    CHECK_OK(lt_lua_run(L, &x, 1, out, 2));
    lt_lua_close(L);
    CHECK_OK(lt_backward(out[1], NULL));
    CHECK_NEAR(sum_of(lt_grad(out[0])), 8, 0);
    lt_ctx_free(ctx);
    CHECK_NEAR(sum_of(out[0]), 4, 0);
    RELEASE(out[0], out[1], x);
}

/* A state that owns its context loads the library again. Then only tensors refer to the first
 * context, which ends while they exist. */
TEST(objects_of_a_library_that_was_loaded_twice)
{
    static const char script[] =
        "local lt = require 'luatrain'\n"
        "w = lt.ones({4}):requires_grad()\n"
        "w:on_grad(function() end)\n"
        "y = (w * w):sum()\n"
        "net = lt.nn.linear{4, 2}\n"
        "optim = lt.optim.sgd(net, {lr = 0.1})\n"
        "lt = nil\n"
        "for name in pairs(package.loaded) do\n"
        "    if name:find('^luatrain') then package.loaded[name] = nil end\n"
        "end\n"
        "local again = require 'luatrain'\n"
        "collectgarbage()\n"
        "assert(again.ones({3}):sum():item() == 3)\n"
        "w, net, optim = nil\n"
        "collectgarbage()\n"
        "y = nil\n"
        "collectgarbage()\n";
    lua_State *L = luaL_newstate();
    luaL_openlibs(L);
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "preload");
    lua_pushcfunction(L, luaopen_luatrain);
    lua_setfield(L, -2, "luatrain");
    setenv("LUATRAIN_DEVICE", "cpu", 1);
    bool failed = luaL_dostring(L, script);
    char text[512] = "";
    if (failed)
        snprintf(text, sizeof text, "%s", lua_tostring(L, -1));
    lua_close(L);
    CHECK_STR(text, "");
}

/* The tensors are finalized before the table, which is older, and the library after it. */
TEST(finalizers_that_use_tensors_while_a_state_closes)
{
    static const char script[] =
        "local kept = {}\n"
        "setmetatable(kept, {__gc = function() pcall(function() return kept.y:sum() end) end})\n"
        "local lt = require 'luatrain'\n"
        "kept.lt, kept.x = lt, lt.ones({4}):requires_grad()\n"
        "kept.y = kept.x * 2\n"
        "return function(x) return kept.y end\n";
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 1});
    lua_State *L = lt_lua_new(ctx);
    lt_tensor *x = leaf(ctx, 1, 1), *y;
    run_script(L, script);
    CHECK_OK(lt_lua_run(L, &x, 1, &y, 1));
    lt_lua_close(L);
    lt_ctx_free(ctx);
    CHECK_NEAR(sum_of(y), 8, 0);
    RELEASE(x, y);
}

/* Its objects can still be read, and its hooks are dropped when it closes. */
TEST_BOTH(a_lua_state)
{
    static const char script[] = "local lt = require 'luatrain'\n"
                                 "local w = lt.ones({4}):requires_grad()\n"
                                 "w:on_grad(function(g) end)\n"
                                 "local y = (w * w):sum()\n"
                                 "return function(x) return y end, lt.nn.linear{4, 2}\n";
    lt_tensor *out, *x = leaf(ctx, 4, 3);
    lua_State *L = lt_lua_new(ctx);
    run_script(L, script);
    lua_pop(L, 1);
    lt_ctx_free(ctx);
    CHECK_OK(lt_lua_run(L, &x, 1, &out, 1));
    lt_release(out);
    run_script(L, "return function(x) return x * 2 end\n");
    CHECK_FAILS(lt_lua_run(L, &x, 1, &out, 1), LT_EINVAL, "the context was closed");
    lt_release(x);
    lt_lua_close(L);
}
