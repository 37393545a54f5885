/* plan.c - the planner of pipelines for the embedded Lua files, and the measurements it needs. */
#include <stdlib.h>
#include <string.h>

#include "lua/bind/bind.h"

/* ==== Arguments =============================================================================== */

static double number_field(lua_State *L, int index, const char *key)
{
    lua_getfield(L, index, key);
    double value = luaL_optnumber(L, -1, 0);
    lua_pop(L, 1);
    return value;
}

static int int_field(lua_State *L, int index, const char *key, int otherwise)
{
    lua_getfield(L, index, key);
    int value = (int)luaL_optinteger(L, -1, otherwise);
    lua_pop(L, 1);
    return value;
}

static bool boolean_field(lua_State *L, int index, const char *key)
{
    lua_getfield(L, index, key);
    bool value = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return value;
}

/* Reads a list of up to LT_PIPE_SIZES numbers. */
static void list_field(lua_State *L, int index, const char *key, double list[LT_PIPE_SIZES])
{
    lua_getfield(L, index, key);
    for (int i = 0; i < LT_PIPE_SIZES; i++) {
        lua_rawgeti(L, -1, i + 1);
        list[i] = lua_tonumber(L, -1);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

static lt_pipe_link link_field(lua_State *L, int index, const char *key)
{
    lua_getfield(L, index, key);
    lt_pipe_link link = {number_field(L, lua_gettop(L), "latency"),
                         number_field(L, lua_gettop(L), "bytes_per_s")};
    lua_pop(L, 1);
    return link;
}

/* Reads the units of the net at 1 into new userdata, which stays on the stack. */
static void read_units(lua_State *L, lt_pipe_net *net)
{
    lua_getfield(L, 1, "units");
    net->n_units = (int)luaL_len(L, -1);
    lt_pipe_net_unit *units = lua_newuserdatauv(L, ((size_t)net->n_units + 1) * sizeof *units, 0);
    net->units = units;
    for (int i = 0; i < net->n_units; i++) {
        lua_rawgeti(L, -2, i + 1);
        int at = lua_gettop(L);
        units[i] = (lt_pipe_net_unit){.may_begin_stage = boolean_field(L, at, "may_begin_stage"),
                                      .update = number_field(L, at, "update"),
                                      .grad_bytes = number_field(L, at, "grad_bytes"),
                                      .state_bytes = number_field(L, at, "state_bytes"),
                                      .saved_bytes = number_field(L, at, "saved_bytes")};
        list_field(L, at, "forward", units[i].forward);
        list_field(L, at, "inputs", units[i].inputs);
        list_field(L, at, "weights", units[i].weights);
        lua_pop(L, 1);
    }
}

/* Reads the list `uses` of a value at the top. *n: its length. It stays on the stack. */
static const int *read_uses(lua_State *L, int at, int *n)
{
    lua_getfield(L, at, "uses");
    *n = (int)luaL_len(L, -1);
    int *uses = lua_newuserdatauv(L, ((size_t)*n + 1) * sizeof *uses, 0);
    for (int i = 0; i < *n; i++) {
        lua_rawgeti(L, -2, i + 1);
        uses[i] = (int)lua_tointeger(L, -1) - 1;
        lua_pop(L, 1);
    }
    return uses;
}

/* Reads the values of the net at 1. The userdata of their lists are kept in a table. */
static void read_values(lua_State *L, lt_pipe_net *net)
{
    lua_getfield(L, 1, "values");
    int list = lua_gettop(L);
    net->n_values = (int)luaL_len(L, list);
    lt_pipe_net_value *values =
        lua_newuserdatauv(L, ((size_t)net->n_values + 1) * sizeof *values, 0);
    net->values = values;
    lua_newtable(L);
    int kept = lua_gettop(L);
    for (int i = 0; i < net->n_values; i++) {
        lua_rawgeti(L, list, i + 1);
        int at = lua_gettop(L);
        values[i] = (lt_pipe_net_value){.unit = int_field(L, at, "unit", 0) - 1,
                                        .bytes = number_field(L, at, "bytes"),
                                        .tracked = boolean_field(L, at, "tracked")};
        values[i].uses = read_uses(L, at, &values[i].n);
        lua_rawseti(L, kept, i + 1);
        lua_settop(L, kept);
    }
}

static lt_pipe_job read_job(lua_State *L, int index)
{
    return (lt_pipe_job){.ranks = int_field(L, index, "ranks", 0),
                         .batch = int_field(L, index, "batch", 0),
                         .link = link_field(L, index, "link"),
                         .exchange = link_field(L, index, "exchange"),
                         .wire_bytes = int_field(L, index, "wire_bytes", 0),
                         .least_micro = int_field(L, index, "least_micro", 0),
                         .most_micro = int_field(L, index, "most_micro", 0),
                         .stages = int_field(L, index, "stages", LT_PIPE_ANY),
                         .replicas = int_field(L, index, "replicas", LT_PIPE_ANY),
                         .micro = int_field(L, index, "micro", LT_PIPE_ANY),
                         .lag = int_field(L, index, "lag", LT_PIPE_ANY),
                         .kind = int_field(L, index, "kind", LT_PIPE_ANY)};
}

/* ==== Results ================================================================================= */

static void set_integer(lua_State *L, const char *key, lua_Integer value)
{
    lua_pushinteger(L, value);
    lua_setfield(L, -2, key);
}

static void set_number(lua_State *L, const char *key, double value)
{
    lua_pushnumber(L, value);
    lua_setfield(L, -2, key);
}

static void push_stage(lua_State *L, const lt_pipe_plan_stage *s)
{
    lua_createtable(L, 0, 8);
    set_integer(L, "first", s->first + 1);
    set_number(L, "busy", s->busy);
    set_number(L, "idle", s->idle);
    set_number(L, "exposed", s->exposed);
    set_number(L, "peak_bytes", s->peak_bytes);
    set_number(L, "sent_bytes", s->sent_bytes);
    set_number(L, "exchanged_bytes", s->exchanged_bytes);
    set_integer(L, "in_memory", s->in_memory);
}

static void push_plan(lua_State *L, const lt_pipe_plan *p)
{
    lua_createtable(L, 0, 8);
    set_integer(L, "stages", p->stages);
    set_integer(L, "replicas", p->replicas);
    set_integer(L, "micro", p->micro);
    set_integer(L, "lag", p->lag);
    lua_pushstring(L, lt_schedule_name(p->kind));
    lua_setfield(L, -2, "schedule");
    set_number(L, "seconds", p->seconds);
    lua_createtable(L, p->stages, 0);
    for (int i = 0; i < p->stages; i++) {
        push_stage(L, &p->stage[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "stage");
}

static lt_pipe_net read_net(lua_State *L)
{
    lt_pipe_net net = {.n_sizes = int_field(L, 1, "n_sizes", 0)};
    list_field(L, 1, "sizes", net.sizes);
    read_units(L, &net);
    read_values(L, &net);
    return net;
}

/* Pushes the plans, at 1, as a list. */
static int push_plans(lua_State *L)
{
    const lt_pipe_plans *plans = lua_touserdata(L, 1);
    lua_createtable(L, plans->n, 0);
    for (int i = 0; i < plans->n; i++) {
        push_plan(L, &plans->plan[i]);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* find_plans(net, job): returns the plans for a net, the fastest first; see lt_pipe_plans_find().
 * net: n_sizes, sizes, units and values, with the fields of lt_pipe_net. job: the fields of
 * lt_pipe_job; kind is a number. Units and stages count from 1. A plan has
 * the fields of lt_pipe_plan; its kind is called schedule. */
static int find_plans(lua_State *L)
{
    lt_pipe_plans plans = {0};
    luaL_checktype(L, 1, LUA_TTABLE);
    luaL_checktype(L, 2, LUA_TTABLE);
    lt_pipe_job job = read_job(L, 2);
    lt_pipe_net net = read_net(L);
    lt__check(L, lt__lua(L), lt_pipe_plans_find(&net, &job, &plans));
    lua_pushcfunction(L, push_plans);
    lua_pushlightuserdata(L, &plans);
    int status = lua_pcall(L, 1, 1, 0);
    lt_pipe_plans_free(&plans);
    return status == LUA_OK ? 1 : lua_error(L);
}

/* predict_plan(net, job, plan): returns the plan with its predictions; see
 * lt_pipe_plan_predict(). */
static int predict_plan(lua_State *L)
{
    lt_pipe_job job = read_job(L, 2);
    int n = int_field(L, 3, "stages", 0);
    lt_pipe_plan_stage *stage = lua_newuserdatauv(L, ((size_t)n + 1) * sizeof *stage, 0);
    lt_pipe_plan plan = {.stages = n,
                         .replicas = int_field(L, 3, "replicas", 1),
                         .micro = int_field(L, 3, "micro", 1),
                         .lag = int_field(L, 3, "lag", 0),
                         .kind = (lt_schedule_kind)int_field(L, 3, "kind", 0),
                         .stage = stage};
    lua_getfield(L, 3, "stage");
    int list = lua_gettop(L);
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, list, i + 1);
        stage[i] = (lt_pipe_plan_stage){.first = int_field(L, lua_gettop(L), "first", 1) - 1};
        lua_pop(L, 1);
    }
    lt_pipe_net net = read_net(L);
    lt__check(L, lt__lua(L), lt_pipe_plan_predict(&net, &job, &plan));
    push_plan(L, &plan);
    return 1;
}

/* ==== Measurements ============================================================================ */

/* run_profile(passes, rows): runs the script in a state of its own, and returns the profile of its
 * net as text; see luatrain/commands/profile.lua. */
static int run_profile(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    char *text = NULL;
    int passes = (int)luaL_checkinteger(L, 1);
    int64_t rows = luaL_checkinteger(L, 2);
    luaL_checkstack(L, 4, NULL);
    lt_status status = s->profile_script(s->profile_ud, passes, rows, &text);
    if (status != LT_OK)
        lt__raise(L, s);
    lua_pushstring(L, text); /* if this raises, the program ends */
    free(text);
    return 1;
}

/* time_message(bytes): returns the seconds of a message between the first and the last rank. All
 * ranks must call it. */
static int time_message(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    double seconds;
    lt__check(L, s, lt_group_time_message(s->group, (size_t)luaL_checkinteger(L, 1), &seconds));
    lua_pushnumber(L, seconds);
    return 1;
}

static const luaL_Reg functions[] = {{"find_plans", find_plans},
                                     {"predict_plan", predict_plan},
                                     {"run_profile", run_profile},
                                     {"time_message", time_message},
                                     {NULL, NULL}};

void lt__open_plan(lua_State *L) { lt__register(L, functions); }
