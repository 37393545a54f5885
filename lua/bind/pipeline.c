/* pipeline.c - training in a pipeline, for the embedded Lua files. */
#include <stdlib.h>
#include <string.h>

#include "autograd/stages.h"
#include "core/tensor.h"
#include "lua/bind/bind.h"

/* ==== The stage of each parameter ============================================================= */

/* A cut is the name of the first parameter or module of a stage. Parameters get their stages in the
 * order in which they are placed, which is the order of their tree. */
struct lt_lua_cuts {
    int n, reached; /* cuts; how many of them parameters have reached */
    char *names[];  /* (n) owned */
};

static void free_cuts(struct lt_lua_cuts *cuts)
{
    for (int i = 0; cuts && i < cuts->n; i++)
        free(cuts->names[i]);
    free(cuts);
}

/* Whether name is that of the cut, or of something in the module of the cut. */
static bool is_at(const char *cut, const char *name)
{
    size_t n = strlen(cut);
    return strncmp(cut, name, n) == 0 && (name[n] == '\0' || name[n] == '.');
}

static int stage_of(void *ud, const char *name, const lt_tensor *x)
{
    struct lt_lua_cuts *cuts = ud;
    (void)x;
    if (cuts->reached < cuts->n && is_at(cuts->names[cuts->reached], name))
        cuts->reached++;
    return cuts->reached;
}

/* Copies the list of names at index. New. NULL if out of memory. */
static struct lt_lua_cuts *read_cuts(lua_State *L, int index)
{
    int n = (int)luaL_len(L, index);
    struct lt_lua_cuts *cuts = calloc(1, sizeof *cuts + (size_t)n * sizeof *cuts->names);
    for (int i = 0; cuts && i < n; i++) {
        lua_rawgeti(L, index, i + 1);
        cuts->names[i] = strdup(lua_tostring(L, -1));
        lua_pop(L, 1);
        cuts->n += cuts->names[i] != NULL;
    }
    if (cuts && cuts->n == n)
        return cuts;
    free_cuts(cuts);
    return NULL;
}

/* ==== Functions =============================================================================== */

static const char *const kinds[LT_SCHEDULE_KINDS + 1] = {"gpipe", "1f1b", "zb", NULL};

/* open_pipeline(cuts, schedule, lag, micro): makes this rank a stage of a pipeline with a stage
 * more than cuts, which is a list of names of parameters or modules. schedule is "gpipe", "1f1b" or
 * "zb"; micro, the number of micro-batches of each batch and replica. */
static int open_pipeline(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    lt_pipeline_config config = {.stages = (int)luaL_len(L, 1) + 1,
                                 .kind = (lt_schedule_kind)luaL_checkoption(L, 2, NULL, kinds),
                                 .lag = (int)luaL_checkinteger(L, 3),
                                 .stage_of = stage_of};
    s->micro = (int)luaL_checkinteger(L, 4);
    if (!(s->cuts = config.ud = read_cuts(L, 1)))
        lt__error(L, s, LT_ENOMEM, "out of memory for a pipeline");
    if (!(s->pipeline = lt_pipeline_new(s->ctx, s->group, &config)))
        lt__raise(L, s);
    return 0;
}

void lt__close_pipeline(lt_lua *s)
{
    lt_pipeline_free(s->pipeline);
    free_cuts(s->cuts);
    s->pipeline = NULL;
    s->cuts = NULL;
}

/* joins_pipeline(): whether the ranks train in a pipeline. */
static int joins_pipeline(lua_State *L)
{
    lua_pushboolean(L, lt__lua(L)->joins_pipeline);
    return 1;
}

/* pipeline(): returns this rank's stage, from 0, the number of stages, its replica, from 0, and the
 * number of replicas. Returns nothing if there is no pipeline. */
static int pipeline(lua_State *L)
{
    const lt_pipeline *p = lt__lua(L)->pipeline;
    if (!p)
        return 0;
    lua_pushinteger(L, lt_pipeline_stage(p));
    lua_pushinteger(L, lt_pipeline_stages(p));
    lua_pushinteger(L, lt_pipeline_replica(p));
    lua_pushinteger(L, lt_pipeline_replicas(p));
    return 4;
}

/* missed_cut(): returns the first cut that no parameter has reached, or nil. */
static int missed_cut(lua_State *L)
{
    const struct lt_lua_cuts *cuts = lt__lua(L)->cuts;
    if (!cuts || cuts->reached == cuts->n)
        return 0;
    lua_pushstring(L, cuts->names[cuts->reached]);
    return 1;
}

/* counts(tensor): whether this rank counts the tensor in a sum over all ranks. In a pipeline, one
 * stage of each replica does. */
static int counts(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    lua_pushboolean(L, !s->pipeline || lt_pipeline_counts(s->pipeline, lt__self(L, "counts")));
    return 1;
}

/* own_item(tensor): returns the only element of a tensor that this rank has. Unlike item(), it does
 * not send it to the other stages. */
static int own_item(lua_State *L)
{
    double value;
    lt__check(L, lt__lua(L), lt_item(lt__self(L, "item"), 0, &value));
    lua_pushnumber(L, value);
    return 1;
}

/* is_remote(tensor): whether only another stage of the pipeline has its values. */
static int is_remote(lua_State *L)
{
    lua_pushboolean(L, lt_is_remote(lt__self(L, "is_remote")));
    return 1;
}

/* pipeline_times(): returns the seconds of backward passes, of passes for weights, and of waiting
 * for messages, and the bytes sent, all since the last call. */
static int pipeline_times(lua_State *L)
{
    lt_pipeline_times times = lt_pipeline_take_times(lt__lua(L)->pipeline);
    lua_pushnumber(L, times.backward);
    lua_pushnumber(L, times.weights);
    lua_pushnumber(L, times.waited);
    lua_pushinteger(L, times.bytes);
    return 4;
}

lt_tensor *lt__here(lua_State *L, lt_lua *s, lt_tensor *x)
{
    if (!s->pipeline)
        return x;
    lt__group_set_location(L);
    lt_tensor **box = lt__push_box(L, s);
    *box = lt_fetch(x);
    if (!*box)
        lt__raise(L, s);
    return *box;
}

static const luaL_Reg functions[] = {{"open_pipeline", open_pipeline},
                                     {"joins_pipeline", joins_pipeline},
                                     {"pipeline", pipeline},
                                     {"missed_cut", missed_cut},
                                     {"counts", counts},
                                     {"own_item", own_item},
                                     {"is_remote", is_remote},
                                     {"pipeline_times", pipeline_times},
                                     {NULL, NULL}};

void lt__open_pipeline(lua_State *L) { lt__register(L, functions); }
