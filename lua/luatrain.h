/* luatrain.h - the one header of the library: the doors of all rooms, and Lua states for programs
 * that embed them.
 *
 * A program runs a Lua model in these steps:
 *     lt_ctx *ctx = lt_open(NULL);
 *     lua_State *L = lt_lua_new(ctx);
 *     lt_lua_dofile(L, "lenet.lua", 0, NULL);      the file returns a function that makes the net
 *     lua_newtable(L); lt_lua_call(L, 1, 1);       net = make({})
 *     lt_lua_push(L, x);   lt_lua_call(L, 1, 1);   y = net(x)
 *     lt_tensor *y = lt_lua_tensor(L, -1);
 *     lua_close(L); lt_ctx_free(ctx);
 */
#ifndef LUATRAIN_H
#define LUATRAIN_H

#include "autograd/autograd.h"
#include "core/core.h"
#include "data/data.h"
#include "ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lua_State lua_State; /* as in lua.h, which is only needed to do more with one */

/* A Lua state with the standard libraries, in which require "luatrain" works in ctx. ctx must
 * outlive the state, and has one state at a time. Close it with lua_close(). New. NULL with
 * LT_ENOMEM. */
LT_API lua_State *lt_lua_new(lt_ctx *ctx);

/* Runs a script with the global table arg = {[0] = path, argv[0], argv[1], ...}. What the file
 * returns is left on the stack. The error of a call of the library keeps its status if the script
 * does not catch it; any other error is LT_ESCRIPT. Its traceback goes to the log as LT_LOG_DEBUG.
 */
LT_MUST lt_status lt_lua_dofile(lua_State *L, const char *path, int argc, char **argv);

/* lua_pcall() with errors as above: calls the function (or the module) below n_args arguments, all
 * popped; leaves n_results results, none on failure. */
LT_MUST lt_status lt_lua_call(lua_State *L, int n_args, int n_results);

/* Pushes x, which is kept. The state must be of x's context. LT_ENOMEM. */
LT_MUST lt_status lt_lua_push(lua_State *L, lt_tensor *x);

/* The tensor at a stack index. Borrowed from the value there. NULL with LT_EINVAL when it is none.
 */
LT_API lt_tensor *lt_lua_tensor(lua_State *L, int index);

/* For require "luatrain" of a Lua 5.4 that is not ours: the state gets a context of its own, set by
 * the variables LUATRAIN_DEVICE, LUATRAIN_THREADS and LUATRAIN_SEED. */
LT_API int luaopen_luatrain(lua_State *L);

#ifdef __cplusplus
}
#endif
#endif
