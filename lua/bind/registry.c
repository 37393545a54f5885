/* registry.c - the lt_lua of a state in its registry, and functions and classes that get it as an
 * upvalue.
 */
#include <string.h>

#include "lua/bind/bind.h"

static const char key_state; /* its address is the registry key of the lt_lua */

void lt__set_lua(lua_State *L) { lua_rawsetp(L, LUA_REGISTRYINDEX, &key_state); }

void lt__push_lua(lua_State *L) { lua_rawgetp(L, LUA_REGISTRYINDEX, &key_state); }

lt_lua *lt__lua_of(lua_State *L)
{
    lt__push_lua(L);
    lt_lua *s = lua_touserdata(L, -1);
    lua_pop(L, 1);
    return s;
}

void lt__register(lua_State *L, const luaL_Reg *functions)
{
    for (; functions->name; functions++) {
        const char *path = functions->name, *dot = strpbrk(path, ".:");
        const char *name = dot ? dot + 1 : path;
        size_t length = strcspn(path, "(");
        if (dot) {
            luaL_getsubtable(L, LUA_REGISTRYINDEX, LT_SIGNATURES);
            lua_pushlstring(L, path, length);
            lua_pushstring(L, path);
            lua_rawset(L, -3);
            lua_pop(L, 1);
        }
        lua_pushlstring(L, name, length - (size_t)(name - path));
        lt__push_lua(L);
        lua_pushcclosure(L, functions->func, 1);
        lua_rawset(L, -3);
    }
}

void lt__new_class(lua_State *L, const char *name, const luaL_Reg *methods, lua_CFunction gc)
{
    const luaL_Reg ends[] = {{"__gc", gc}, {"__close", gc}, {NULL, NULL}};
    luaL_newmetatable(L, name);
    lt__register(L, ends);
    lua_newtable(L);
    if (methods)
        lt__register(L, methods);
    lua_setfield(L, -2, "__index");
    lua_pushboolean(L, 0); /* hides it from scripts: its functions do not check their arguments */
    lua_setfield(L, -2, "__metatable");
    lua_pop(L, 1);
}
