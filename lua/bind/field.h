/* field.h - reads and sets fields of Lua tables. Private to lua. */
#ifndef LT_LUA_BIND_FIELD_H
#define LT_LUA_BIND_FIELD_H

#include <lauxlib.h>
#include <stdbool.h>

/* Set field `key` of the table on top. */
static inline void lt__set_integer(lua_State *L, const char *key, lua_Integer value)
{
    lua_pushinteger(L, value);
    lua_setfield(L, -2, key);
}

static inline void lt__set_number(lua_State *L, const char *key, double value)
{
    lua_pushnumber(L, value);
    lua_setfield(L, -2, key);
}

static inline void lt__set_string(lua_State *L, const char *key, const char *value)
{
    lua_pushstring(L, value);
    lua_setfield(L, -2, key);
}

static inline void lt__set_boolean(lua_State *L, const char *key, bool value)
{
    lua_pushboolean(L, value);
    lua_setfield(L, -2, key);
}

/* Return field `key` of the table at index; `otherwise` if it is nil. Raise for another type. */
static inline lua_Integer lt__integer_field(lua_State *L, int index, const char *key,
                                            lua_Integer otherwise)
{
    lua_getfield(L, index, key);
    lua_Integer value = luaL_optinteger(L, -1, otherwise);
    lua_pop(L, 1);
    return value;
}

static inline double lt__number_field(lua_State *L, int index, const char *key, double otherwise)
{
    lua_getfield(L, index, key);
    double value = luaL_optnumber(L, -1, otherwise);
    lua_pop(L, 1);
    return value;
}

/* Returns whether field `key` of the table at index is neither nil nor false. */
static inline bool lt__boolean_field(lua_State *L, int index, const char *key)
{
    lua_getfield(L, index, key);
    bool value = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return value;
}

#endif
