/* luatrain.h - the only header that a program needs. It includes the public headers of all parts of
 * the library, and declares functions for programs that embed Lua.
 *
 * A program trains a model written in Lua as follows. It does not need Lua's own headers.
 *     lt_ctx *ctx = lt_open(NULL);
 *     lua_State *L = lt_lua_new(ctx);
 *     lt_lua_dofile(L, "model.lua", 0, NULL);       the file returns a function (x, labels)
 *     lt_lua_run(L, (lt_tensor *[]){x, labels}, 2, &loss, 1);
 *     lt_lua_close(L); lt_ctx_free(ctx);
 *
 * Locale. The library reads and writes numbers with a decimal point in any locale, and never
 * changes the program's locale. The functions below switch the calling thread to the C locale while
 * Lua runs, so neither os.setlocale() nor the program's setlocale() changes how Lua formats numbers
 * and sorts strings. A state that was opened with luaopen_luatrain() keeps the program's locale;
 * the files that luatrain writes still use a decimal point.
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

typedef struct lua_State lua_State; /* as in lua.h; include lua.h to use Lua's own API */

/* Creates a Lua state with the standard libraries, in which require "luatrain" uses ctx. ctx must
 * be from lt_open(); it is kept. A context can have one state at a time. After lt_ctx_free(ctx),
 * ops in the state fail; the state must still be closed. load, loadfile, dofile and require accept
 * source text only and refuse compiled chunks. New; NULL with LT_ENOMEM. */
LT_API lua_State *lt_lua_new(lt_ctx *ctx);
LT_API void lt_lua_close(lua_State *L); /* NULL is allowed */

/* Makes the state a rank of group, which trains together with the other ranks. Each rank has its
 * own state in its own thread or process, runs the same script, and computes a part of every batch.
 * Output of ranks other than 0 goes to the file rank-N.log in the run's folder. Call this before
 * the first script. group is borrowed and must outlive the state; config is copied, or NULL for the
 * defaults. Does nothing if the group has one rank, unless config sets vranks or
 * LT_SUM_BACKEND_NCCL. LT_ENOMEM, or LT_EUSAGE as from lt_reducer_new(). */
LT_MUST lt_status lt_lua_join(lua_State *L, lt_group *group, const lt_reducer_config *config);
/* Prepares the state for a profile of the net that the script makes. The script sees itself as rank
 * `rank` of `ranks`, and lt.barrier waits for all ranks of group. profile and group are borrowed
 * and must outlive the state. */
LT_API void lt_lua_join_profile(lua_State *L, lt_profile *profile, lt_group *group, int rank,
                                int ranks);

typedef struct lt_lua_pipeline { /* plan of a training in a pipeline; the same on all ranks */
    const lt_pipe_net *net;
    const lt_pipe_job *job;
    /* NULL if the script ended before a backward pass, so that no plan could be made. If the script
     * then trains all the same, its run fails with `status` and the message `text` */
    const lt_pipe_plan *plan;
    bool only_replicas; /* the plan has one stage and one micro-batch: train with a reducer */
    lt_status status;
    const char *text; /* with a plan: a warning that the first run logs, or NULL; else see plan */
} lt_lua_pipeline;
/* Like lt_lua_join(), for training in a pipeline: each rank has a stage of the net, see
 * dist/pipeline.h. config is for the gradient exchange between replicas of a stage. pipeline is
 * borrowed and must outlive the state. The group may have one rank. Also the errors of
 * lt_pipeline_new(). */
LT_MUST lt_status lt_lua_join_pipeline(lua_State *L, lt_group *group,
                                       const lt_reducer_config *config,
                                       const lt_lua_pipeline *pipeline);
/* Pushes a table with the fields net, job and plans: the arguments, converted to tables. Raises a
 * Lua error if Lua runs out of memory. */
LT_API void lt_lua_push_plans(lua_State *L, const lt_pipe_net *net, const lt_pipe_job *job,
                              const lt_pipe_plans *plans);
/* Like lt_lua_join(), for asynchronous training: each rank computes whole batches, see
 * dist/async.h. The environment variable LUATRAIN_PARALLEL must request asynchronous training.
 * Optimizer steps are then errors outside of lt.run, lt.fit and loops over shuffled batches. group
 * is borrowed and must outlive the state; it may have one rank. LT_ENOMEM. */
LT_MUST lt_status lt_lua_join_async(lua_State *L, lt_group *group);

/* Runs a script with the arguments argv, which are also in the global table arg = {[0] = path,
 * argv[0], argv[1], ...}, and leaves its results on the stack. If a library call in the script
 * fails and the script does not catch the error, returns the status of that call. Returns LT_ENOMEM
 * if Lua runs out of memory, and LT_ESCRIPT for any other error. On one of several ranks,
 * os.exit(code) ends the script with LT_EXIT + code, or LT_EDONE if code is 0. The traceback is
 * logged at LT_LOG_DEBUG. */
LT_MUST lt_status lt_lua_dofile(lua_State *L, const char *path, int argc, char **argv);

/* Calls the function or module f on top of the stack: out[0..n_out) = f(in[0..n_in)). f stays on
 * the stack. in[i] may be NULL, which is nil in Lua. The results are new; LT_EINVAL if one is not a
 * tensor. Other errors as in lt_lua_dofile(). On failure out is not set. */
LT_MUST lt_status lt_lua_run(lua_State *L, lt_tensor *const *in, int n_in, lt_tensor **out,
                             int n_out);

/* lua_pcall() with errors as in lt_lua_dofile(). Pops n_args arguments and the function or module
 * below them, calls it, and pushes n_results results (LUA_MULTRET for all), or none on failure. */
LT_MUST lt_status lt_lua_call(lua_State *L, int n_args, int n_results);

/* Pushes x, or nil if x is NULL. x is kept. The state must belong to x's context. LT_ENOMEM. */
LT_MUST lt_status lt_lua_push(lua_State *L, lt_tensor *x);

/* Returns the tensor at a stack index, borrowed from the Lua value. NULL with LT_EINVAL if the
 * value is not a tensor or was closed. */
LT_API lt_tensor *lt_lua_tensor(lua_State *L, int index);

/* The entry point for require "luatrain" in a stock Lua 5.4. The state gets its own context,
 * configured by the environment variables LUATRAIN_DEVICE (default: auto), LUATRAIN_THREADS,
 * LUATRAIN_SEED, LUATRAIN_DETERMINISTIC and LUATRAIN_TF32. */
LT_API int luaopen_luatrain(lua_State *L);

#ifdef __cplusplus
}
#endif
#endif
