/* locale.c - runs functions of the embedded files in the C locale.
 *
 * lt_lua_call() runs all Lua code in the C locale. A stock Lua that requires luatrain keeps its own
 * locale, so functions that depend on it enter the C locale while they run.
 */
#include "core/locale.h"
#include "lua/bind/bind.h"

/* Calls upvalue 2 in the C locale. That function must not yield, because the thread would keep the
 * C locale. */
static int call_in_c_locale(lua_State *L)
{
    lua_pushvalue(L, lua_upvalueindex(2));
    lua_insert(L, 1);
    lt_locale l = lt__enter_c_locale();
    int rc = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
    lt__leave_c_locale(l);
    return rc == LUA_OK ? lua_gettop(L) : lua_error(L);
}

/* in_c_locale(function): returns a function that calls the given one in the C locale, where numbers
 * have a decimal point and strings compare bytewise. */
static int in_c_locale(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lt__push_lua(L);
    lua_pushvalue(L, 1);
    lua_pushcclosure(L, call_in_c_locale, 2);
    return 1;
}

static const luaL_Reg functions[] = {LT_FN(in_c_locale), {NULL, NULL}};

void lt__open_locale(lua_State *L) { lt__register(L, functions); }
