/* luatrain.h - the one header of the library: the doors of all rooms, and Lua states for programs
 * that embed them.
 *
 * A program trains a model written in Lua, without Lua's own headers, in these steps:
 *     lt_ctx *ctx = lt_open(NULL);
 *     lua_State *L = lt_lua_new(ctx);
 *     lt_lua_dofile(L, "model.lua", 0, NULL);       the file returns a function (x, labels)
 *     lt_lua_run(L, (lt_tensor *[]){x, labels}, 2, &loss, 1);
 *     lt_lua_close(L); lt_ctx_free(ctx);
 *
 * Locale. The library reads and writes numbers with a decimal point whatever locale the program has
 * set, and leaves that locale as it is. The functions below run Lua in the C locale of the calling
 * thread: there os.setlocale() and the program's setlocale() do not change how numbers look and how
 * strings are sorted. After luaopen_luatrain() in another state Lua keeps the program's locale, and
 * the files that luatrain writes still have points.
 */
#ifndef LUATRAIN_H
#define LUATRAIN_H

#include "amp/amp.h"
#include "autograd/autograd.h"
#include "core/core.h"
#include "data/data.h"
#include "dist/dist.h"
#include "ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lua_State lua_State; /* as in lua.h, which is only needed to do more with one */

/* A Lua state with the standard libraries, in which require "luatrain" works in ctx. ctx has one
 * state at a time; after lt_ctx_free() ops fail in it, and it is closed as usual. Lua code is
 * loaded from source text alone: load, loadfile, dofile and require refuse compiled chunks. New.
 * NULL with LT_ENOMEM. */
LT_API lua_State *lt_lua_new(lt_ctx *ctx);
LT_API void lt_lua_close(lua_State *L); /* NULL is fine */

/* What the state trains from now on is trained by all ranks of group together, each with its part
 * of every batch: each rank has a state of its own, in a thread or process of its own, and runs the
 * same script. What all but rank 0 print goes to the file rank-N.log in the run's folder. group is
 * borrowed and outlives the state; config may be NULL. Before the first script. LT_ENOMEM, or
 * LT_EUSAGE for a config that does not fit the group. */
LT_MUST lt_status lt_lua_join(lua_State *L, lt_group *group, const lt_reducer_config *config);

/* Runs a script with the global table arg = {[0] = path, argv[0], argv[1], ...}. What the file
 * returns is left on the stack. The error of a call of the library keeps its status if the script
 * does not catch it; any other error is LT_ESCRIPT. Its traceback goes to the log as LT_LOG_DEBUG.
 */
LT_MUST lt_status lt_lua_dofile(lua_State *L, const char *path, int argc, char **argv);

/* out[0..n_out) = f(in[0..n_in)) for the function or module f on top of the stack, which stays
 * there. The results must be tensors; new. On failure there are none. */
LT_MUST lt_status lt_lua_run(lua_State *L, lt_tensor *const *in, int n_in, lt_tensor **out,
                             int n_out);

/* lua_pcall() with errors as above: calls the function (or the module) below n_args arguments, all
 * popped; leaves n_results results, none on failure. */
LT_MUST lt_status lt_lua_call(lua_State *L, int n_args, int n_results);

/* Pushes x, which is kept. The state must be of x's context. LT_ENOMEM. */
LT_MUST lt_status lt_lua_push(lua_State *L, lt_tensor *x);

/* The tensor at a stack index. Borrowed from the value there. NULL with LT_EINVAL when it is none.
 */
LT_API lt_tensor *lt_lua_tensor(lua_State *L, int index);

/* For require "luatrain" of a Lua 5.4 that is not ours: the state gets a context of its own, set by
 * the variables LUATRAIN_DEVICE, LUATRAIN_THREADS, LUATRAIN_SEED, LUATRAIN_DETERMINISTIC and
 * LUATRAIN_TF32. */
LT_API int luaopen_luatrain(lua_State *L);

#ifdef __cplusplus
}
#endif
#endif
