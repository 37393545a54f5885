/* locale.c - the C locale for functions of the embedded files.
 *
 * lt_lua_call() runs all Lua in the C locale. A stock Lua that requires luatrain keeps its own
 * locale: there these functions enter the C locale for as long as they run.
 */
#include "core/locale.h"
#include "lua/bind/bind.h"

/* Upvalue 2 is the function. It must not yield: the thread would keep the C locale. */
static int call_in_c_locale(lua_State *L)
{
    lua_pushvalue(L, lua_upvalueindex(2));
    lua_insert(L, 1);
    lt_locale l = lt__enter_c_locale();
    int rc = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
    lt__leave_c_locale(l);
    return rc == LUA_OK ? lua_gettop(L) : lua_error(L);
}

/* in_c_locale(function): a function that calls it in the C locale: numbers have a decimal point,
 * and strings are in the order of their bytes. */
static int in_c_locale(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lt__push_lua(L);
    lua_pushvalue(L, 1);
    lua_pushcclosure(L, call_in_c_locale, 2);
    return 1;
}

static const luaL_Reg functions[] = {{"in_c_locale", in_c_locale}, {NULL, NULL}};

void lt__open_locale(lua_State *L) { lt__register(L, functions); }
