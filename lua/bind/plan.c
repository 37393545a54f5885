/* plan.c - the planner of pipelines for the embedded Lua files, and the measurements it needs. */
#include <stdlib.h>
#include <string.h>

#include "lua/bind/bind.h"
#include "lua/bind/field.h"

/* ==== Arguments =============================================================================== */

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
    lt_pipe_link link = {lt__number_field(L, lua_gettop(L), "latency", 0),
                         lt__number_field(L, lua_gettop(L), "bytes_per_s", 0)};
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
        units[i] =
            (lt_pipe_net_unit){.may_begin_stage = lt__boolean_field(L, at, "may_begin_stage"),
                               .update = lt__number_field(L, at, "update", 0),
                               .grad_bytes = lt__number_field(L, at, "grad_bytes", 0),
                               .state_bytes = lt__number_field(L, at, "state_bytes", 0),
                               .saved_bytes = lt__number_field(L, at, "saved_bytes", 0),
                               .back_bytes = lt__number_field(L, at, "back_bytes", 0),
                               .work_bytes = lt__number_field(L, at, "work_bytes", 0)};
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
        values[i] = (lt_pipe_net_value){.unit = (int)lt__integer_field(L, at, "unit", 0) - 1,
                                        .bytes = lt__number_field(L, at, "bytes", 0),
                                        .tracked = lt__boolean_field(L, at, "tracked")};
        values[i].uses = read_uses(L, at, &values[i].n);
        lua_rawseti(L, kept, i + 1);
        lua_settop(L, kept);
    }
}

/* The kind of the job's schedule, or LT_PIPE_ANY without one. */
static int kind_field(lua_State *L, int index)
{
    int kind = LT_PIPE_ANY;
    if (lua_getfield(L, index, "schedule") != LUA_TNIL)
        kind = (int)lt__schedule_kind(L, -1);
    lua_pop(L, 1);
    return kind;
}

static lt_pipe_job read_job(lua_State *L, int index)
{
    return (lt_pipe_job){.ranks = (int)lt__integer_field(L, index, "ranks", 0),
                         .batch = lt__integer_field(L, index, "batch", 0),
                         .link = link_field(L, index, "link"),
                         .exchange = link_field(L, index, "exchange"),
                         .wire_bytes = (int)lt__integer_field(L, index, "wire_bytes", 0),
                         .memory = lt__number_field(L, index, "memory", 0),
                         .least_micro = (int)lt__integer_field(L, index, "least_micro", 0),
                         .stages = (int)lt__integer_field(L, index, "stages", LT_PIPE_ANY),
                         .replicas = (int)lt__integer_field(L, index, "replicas", LT_PIPE_ANY),
                         .micro = (int)lt__integer_field(L, index, "micro", LT_PIPE_ANY),
                         .lag = (int)lt__integer_field(L, index, "lag", LT_PIPE_ANY),
                         .kind = kind_field(L, index)};
}

/* ==== Results ================================================================================= */

static void push_stage(lua_State *L, const lt_pipe_plan_stage *s)
{
    lua_createtable(L, 0, 8);
    lt__set_integer(L, "first", s->first + 1);
    lt__set_number(L, "busy", s->busy);
    lt__set_number(L, "idle", s->idle);
    lt__set_number(L, "exposed", s->exposed);
    lt__set_number(L, "peak_bytes", s->peak_bytes);
    lt__set_number(L, "sent_bytes", s->sent_bytes);
    lt__set_number(L, "exchanged_bytes", s->exchanged_bytes);
    lt__set_integer(L, "in_memory", s->in_memory);
}

static void push_plan(lua_State *L, const lt_pipe_plan *p)
{
    lua_createtable(L, 0, 8);
    lt__set_integer(L, "stages", p->stages);
    lt__set_integer(L, "replicas", p->replicas);
    lt__set_integer(L, "micro", p->micro);
    lt__set_integer(L, "lag", p->lag);
    lt__set_string(L, "schedule", lt_schedule_name(p->kind));
    lt__set_number(L, "seconds", p->seconds);
    lua_createtable(L, p->stages, 0);
    for (int i = 0; i < p->stages; i++) {
        push_stage(L, &p->stage[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "stage");
}

static lt_pipe_net read_net(lua_State *L)
{
    lt_pipe_net net = {.n_sizes = (int)lt__integer_field(L, 1, "n_sizes", 0)};
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

/* find_plans(net, job): returns the plans for a net, the fastest first, or nil and the message of
 * LT_EINVAL; see lt_pipe_plans_find(). net: n_sizes, sizes, units and values, with the fields of
 * lt_pipe_net. job: the fields of lt_pipe_job, except for most_micro, with a schedule such as "zb"
 * instead of a kind. Units and stages count from 1. A plan has the fields of lt_pipe_plan, and a
 * schedule, too. */
static int find_plans(lua_State *L)
{
    lt_pipe_plans plans = {0};
    luaL_checktype(L, 1, LUA_TTABLE);
    luaL_checktype(L, 2, LUA_TTABLE);
    lt_pipe_job job = read_job(L, 2);
    lt_pipe_net net = read_net(L);
    lt_status status = lt_pipe_plans_find(&net, &job, &plans);
    if (status == LT_EINVAL) {
        lua_pushnil(L);
        lua_pushstring(L, lt_errmsg());
        return 2;
    }
    lt__check(L, lt__lua(L), status);
    lua_pushcfunction(L, push_plans);
    lua_pushlightuserdata(L, &plans);
    bool ok = lua_pcall(L, 1, 1, 0) == LUA_OK;
    lt_pipe_plans_free(&plans);
    return ok ? 1 : lua_error(L);
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
    if (status == LT_ESCRIPT || status == LT_EINVAL || status == LT_ENUMERIC)
        lt_fail(status, "%s (while the script was profiled for --parallel pipe=P)", lt_errmsg());
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
                                     {"run_profile", run_profile},
                                     {"time_message", time_message},
                                     {NULL, NULL}};

void lt__open_plan(lua_State *L) { lt__register(L, functions); }
