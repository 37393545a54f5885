/* profile.c - the profile of a net that is to be divided into pipeline stages, for the embedded Lua
 * files. */
#include "lua/bind/bind.h"
#include "lua/bind/field.h"

/* open_profile(passes, rank, ranks): starts the profile of the net that the script makes next; see
 * lt_profile_new(). rank: this rank of the job, from 0. */
static int open_profile(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    if (!(s->profile = lt_profile_new(s->ctx, (int)luaL_checkinteger(L, 1))))
        lt__raise(L, s);
    s->profile_rank = (int)luaL_checkinteger(L, 2);
    s->profile_ranks = (int)luaL_checkinteger(L, 3);
    return 0;
}

static void push_units(lua_State *L, const lt_profile *p)
{
    lua_newtable(L);
    const lt_profile_unit *u;
    for (int i = 0; (u = lt_profile_unit_at(p, i)); i++) {
        lua_createtable(L, 0, 8);
        lt__set_string(L, "name", u->name);
        lt__set_boolean(L, "may_begin_stage", u->may_begin_stage);
        lt__set_integer(L, "state_bytes", u->state_bytes);
        lt__set_integer(L, "grad_bytes", u->grad_bytes);
        lt__set_integer(L, "saved_bytes", u->saved_bytes);
        lt__set_integer(L, "back_bytes", u->back_bytes);
        lt__set_number(L, "forward", u->forward);
        lt__set_number(L, "inputs", u->inputs);
        lt__set_number(L, "weights", u->weights);
        lua_rawseti(L, -2, i + 1);
    }
}

static void push_params(lua_State *L, const lt_profile *p)
{
    const char *name;
    int unit;
    lua_newtable(L);
    for (int i = 0; lt_profile_param_at(p, i, &name, &unit); i++) {
        lua_createtable(L, 0, 2);
        lt__set_string(L, "name", name);
        lt__set_integer(L, "unit", unit + 1);
        lua_rawseti(L, -2, i + 1);
    }
}

static void push_values(lua_State *L, const lt_profile *p)
{
    lt_profile_value v;
    int n = 0;
    lua_newtable(L);
    for (int i = 0; lt_profile_value_at(p, i, &v); i++) {
        if (v.n == 0)
            continue;
        lua_createtable(L, 0, 4);
        lt__set_integer(L, "unit", v.unit + 1);
        lt__set_integer(L, "bytes", v.bytes);
        lt__set_boolean(L, "tracked", v.tracked);
        lua_createtable(L, v.n, 0);
        for (int k = 0; k < v.n; k++) {
            lua_pushinteger(L, v.uses[k] + 1);
            lua_rawseti(L, -2, k + 1);
        }
        lua_setfield(L, -2, "uses");
        lua_rawseti(L, -2, ++n);
    }
}

/* profile(): returns the profile if it is complete, else nil. Fields: units and params, lists as in
 * lt_profile_unit and lt_profile_param_at(); values, a list of those that other units use; and the
 * fields of lt_profile_totals. Units count from 1; a parameter that is not used has unit 0. */
static int profile(lua_State *L)
{
    const lt_profile *p = lt__lua(L)->profile;
    if (!lt_profile_is_complete(p))
        return 0;
    lt_profile_totals totals = lt_profile_total(p);
    lua_createtable(L, 0, 6);
    push_units(L, p);
    lua_setfield(L, -2, "units");
    push_params(L, p);
    lua_setfield(L, -2, "params");
    push_values(L, p);
    lua_setfield(L, -2, "values");
    lt__set_number(L, "forward", totals.forward);
    lt__set_number(L, "inputs", totals.inputs);
    lt__set_number(L, "weights", totals.weights);
    lt__set_boolean(L, "has_batch_norm", totals.has_batch_norm);
    return 1;
}

/* profile_unit(tensor): returns the unit of a parameter or buffer, from 1; 0 if it is not used. */
static int profile_unit(lua_State *L)
{
    lua_pushinteger(L, lt_profile_unit_of(lt__lua(L)->profile, lt__self(L, "profile")) + 1);
    return 1;
}

static const luaL_Reg functions[] = {{"open_profile", open_profile},
                                     {"profile", profile},
                                     {"profile_unit", profile_unit},
                                     {NULL, NULL}};

void lt__open_profile(lua_State *L) { lt__register(L, functions); }
