/* pipeline.c - training in a pipeline, for the embedded Lua files. */
#include <stdlib.h>
#include <string.h>

#include "autograd/stages.h"
#include "core/tensor.h"
#include "lua/bind/bind.h"

/* ==== The stage of each parameter ============================================================= */

/* The parameters and buffers in the order in which the profile has seen them placed. */
struct lt_lua_plan {
    int n, next; /* entries; the one after the last one that was placed */
    struct {
        uint32_t count;
        char at[64];         /* where the script made the last one */
    } writes[LT_MAX_STAGES]; /* of this rank's script to tensors of each stage */
    struct {
        char *name; /* owned */
        int stage;
    } entries[];
};

static void free_plan(struct lt_lua_plan *plan)
{
    for (int i = 0; plan && i < plan->n; i++)
        free(plan->entries[i].name);
    free(plan);
}

/* A script usually places the same parameters in the same order as in the profile. A parameter
 * that the profile does not have goes to the stage of the one before it. */
static int stage_of(void *ud, const char *name, const lt_tensor *x)
{
    struct lt_lua_plan *plan = ud;
    (void)x;
    for (int i = 0; i < plan->n; i++) {
        int at = (plan->next + i) % plan->n;
        if (strcmp(plan->entries[at].name, name) != 0)
            continue;
        plan->next = at + 1;
        return plan->entries[at].stage;
    }
    return plan->next > 0 ? plan->entries[plan->next - 1].stage : 0;
}

/* Reads a list of names at index, and one of stages, from 0, at index + 1. New. NULL if out of
 * memory. */
static struct lt_lua_plan *read_plan(lua_State *L, int index)
{
    int n = (int)luaL_len(L, index);
    struct lt_lua_plan *plan = calloc(1, sizeof *plan + (size_t)n * sizeof *plan->entries);
    for (int i = 0; plan && i < n; i++) {
        lua_rawgeti(L, index, i + 1);
        lua_rawgeti(L, index + 1, i + 1);
        plan->entries[i].name = strdup(lua_tostring(L, -2));
        plan->entries[i].stage = (int)lua_tointeger(L, -1);
        plan->n = i + 1;
        lua_pop(L, 2);
        if (!plan->entries[i].name) {
            free_plan(plan);
            return NULL;
        }
    }
    return plan;
}

/* ==== Functions =============================================================================== */

lt_schedule_kind lt__schedule_kind(lua_State *L, int index)
{
    const char *kinds[LT_SCHEDULE_KINDS + 1] = {NULL};
    for (int i = 0; i < LT_SCHEDULE_KINDS; i++)
        kinds[i] = lt_schedule_name((lt_schedule_kind)i);
    return (lt_schedule_kind)luaL_checkoption(L, index, NULL, kinds);
}

/* schedules(): returns the list of names of schedules. */
static int schedules(lua_State *L)
{
    lua_createtable(L, LT_SCHEDULE_KINDS, 0);
    for (int i = 0; i < LT_SCHEDULE_KINDS; i++) {
        lua_pushstring(L, lt_schedule_name((lt_schedule_kind)i));
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* The lt_allreduce_fn of a pipeline with several micro-batches.
 * NOLINTNEXTLINE(readability-non-const-parameter) */
static lt_status refuse_sum(void *ud, double *numbers, int64_t n, bool backward)
{
    const lt_lua *s = ud;
    (void)numbers, (void)n, (void)backward;
    return lt_fail(LT_EUSAGE,
                   "sync_batch_norm requires the whole batch at once, but the pipeline computes it "
                   "in %d micro-batches; use batch_norm, or micro=1",
                   s->micro);
}

/* Makes the reducer of the replicas of this stage. It sends nothing before the last pass. */
static lt_status open_reducer(lt_lua *s)
{
    lt_group *replicas = lt_pipeline_group(s->pipeline);
    if (!replicas)
        return LT_OK;
    s->reducer_config.blocking = true;
    if (!(s->reducer = lt_reducer_new(s->ctx, replicas, &s->reducer_config)))
        return lt_errcode();
    s->wire_scales = lt_wire_scales_init();
    if (s->micro == 1)
        lt_set_allreduce(s->ctx, lt_reducer_allreduce, s->reducer);
    return lt_reducer_use_loss_scale(s->reducer, s->scale, &s->wire_scales);
}

/* open_pipeline(names, stages, number, schedule, lag, micro): makes this rank a stage of a pipeline
 * of `number` stages. names is the list of parameters and buffers, and stages has their stages,
 * from 0. schedule is one of schedules(); micro, the number of micro-batches of each batch and
 * replica. */
static int open_pipeline(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    luaL_checktype(L, 2, LUA_TTABLE);
    lt_pipeline_config config = {.stages = (int)luaL_checkinteger(L, 3),
                                 .kind = lt__schedule_kind(L, 4),
                                 .lag = (int)luaL_checkinteger(L, 5),
                                 .stage_of = stage_of};
    s->micro = (int)luaL_checkinteger(L, 6);
    if (!(s->plan = config.ud = read_plan(L, 1)))
        lt__error(L, s, LT_ENOMEM, "out of memory for a pipeline");
    if (!(s->pipeline = lt_pipeline_new(s->ctx, s->group, &config)))
        lt__raise(L, s);
    if (s->micro > 1)
        lt_set_allreduce(s->ctx, refuse_sum, s);
    lt__check(L, s, open_reducer(s));
    return 0;
}

void lt__close_pipeline(lt_lua *s)
{
    lt_pipeline_free(s->pipeline);
    free_plan(s->plan);
    s->pipeline = NULL;
    s->plan = NULL;
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
    lt__push_number(L, value);
    return 1;
}

/* is_remote(tensor): whether only another stage of the pipeline has its values. */
static int is_remote(lua_State *L)
{
    lua_pushboolean(L, lt_is_remote(lt__self(L, "is_remote")));
    return 1;
}

/* pipeline_times(): returns the fields of lt_pipeline_times: seconds, since the last call, of
 * backward passes, of their second halves, of waiting for messages, and in lt_pipeline_drain(). */
static int pipeline_times(lua_State *L)
{
    lt_pipeline_times times = lt_pipeline_take_times(lt__lua(L)->pipeline);
    lua_pushnumber(L, times.backward);
    lua_pushnumber(L, times.weights);
    lua_pushnumber(L, times.waited);
    lua_pushnumber(L, times.drained);
    return 4;
}

lt_tensor *lt__here(lua_State *L, lt_lua *s, lt_tensor *x)
{
    if (!lt_has_stages(s->ctx) || x->stage == 0)
        return x;
    if (s->on_root)
        lt__refuse(L, s,
                   "in a pipeline, reading a tensor of the net requires all ranks, but "
                   "lt.on_root runs on rank 0 only");
    lt__group_set_location(L);
    lt_tensor **box = lt__push_box(L, s);
    *box = lt_fetch(x);
    if (!*box)
        lt__raise(L, s);
    return *box;
}

bool lt__begin_write(lua_State *L, lt_lua *s, const lt_tensor *x)
{
    if (!s->pipeline || x->stage == 0)
        return !lt_is_remote(x); /* false in a profile */
    if (s->on_root)
        lt__refuse(L, s,
                   "in a pipeline, writing to a tensor of the net requires all ranks, but "
                   "lt.on_root runs on rank 0 only");
    int stage = x->stage - 1;
    s->plan->writes[stage].count++;
    lt__where(s, s->plan->writes[stage].at, sizeof s->plan->writes[stage].at);
    return !lt_is_remote(x);
}

/* writes(stage): returns the number of writes of this rank's script to tensors of a stage, from 0,
 * and the place of the last one, "train.lua:7: ". */
static int writes(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    lua_Integer stage = luaL_checkinteger(L, 1);
    luaL_argcheck(L, s->plan && stage >= 0 && stage < LT_MAX_STAGES, 1, "no such stage");
    lua_pushinteger(L, s->plan->writes[stage].count);
    lua_pushstring(L, s->plan->writes[stage].at);
    return 2;
}

static const luaL_Reg functions[] = {LT_FN(schedules), LT_FN(open_pipeline), LT_FN(joins_pipeline),
                                     LT_FN(pipeline),  LT_FN(counts),        LT_FN(own_item),
                                     LT_FN(is_remote), LT_FN(writes),        LT_FN(pipeline_times),
                                     {NULL, NULL}};

void lt__open_pipeline(lua_State *L) { lt__register(L, functions); }
