/* deferred.h - calls the functions of deferred.lua, and counts the waits of the host in a step. */
#ifndef TESTS_DEVICE_DEFERRED_H
#define TESTS_DEVICE_DEFERRED_H

#include "core/locale.h"
#include "tests/device/emu.h"

enum { TEXT = 1 << 14 };

typedef struct waits {
    int64_t waits, drains; /* before the last step */
    int most;              /* waits of a step */
    int steps, bad;        /* bad: with too many waits, or one that emptied the stream */
} waits;

/* Called before each step. Checks the step before, except the first steps, which allocate, and the
 * first ones after an evaluation. */
static inline int check_waits(lua_State *L)
{
    waits *w = lua_touserdata(L, lua_upvalueindex(1));
    int64_t waited = counted(SHIM_WAITS) - w->waits, drained = counted(SHIM_DRAINS) - w->drains;
    w->bad += w->steps % 6 > 2 && (waited > w->most || drained > 0);
    w->waits += waited;
    w->drains += drained;
    w->steps++;
    return 0;
}

/* Calls a function of deferred.lua with options, the fields of a table, and copies its result. */
static inline lt_status call_lua(lua_State *L, const char *name, const char *options, waits *w,
                                 char text[TEXT])
{
    char code[1100];
    snprintf(code, sizeof code, "return {%s}", options);
    /* Lua reads the decimal point from localeconv(), whose result all threads share */
    lt_locale locale = lt__enter_c_locale();
    bool loaded = luaL_loadstring(L, code) == LUA_OK &&
                  luaL_loadfile(L, "tests/device/deferred.lua") == LUA_OK;
    lt__leave_c_locale(locale);
    if (!loaded)
        FAIL("%s", lua_tostring(L, -1));
    LT_TRY(lt_lua_call(L, 0, 1));
    lua_getfield(L, -1, name);
    lua_pushvalue(L, -3);
    LT_TRY(lt_lua_call(L, 0, 1));
    lua_pushlightuserdata(L, w);
    lua_pushcclosure(L, check_waits, 1);
    lua_setfield(L, -2, "each");
    LT_TRY(lt_lua_call(L, 1, 1));
    snprintf(text, TEXT, "%s", lua_tostring(L, -1));
    return LT_OK;
}

#endif
