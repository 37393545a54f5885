/* hint.c - suggestions for unknown names: "did you mean". */
#include "lua/bind/bind.h"

const char *lt__hint(lua_State *L, const char *word, const char *const *names, int n,
                     const char *otherwise)
{
    int near = lt_nearest(word, names, n);
    return near < 0 ? lua_pushstring(L, otherwise)
                    : lua_pushfstring(L, " (did you mean '%s'?)", names[near]);
}

/* hint(word, names, otherwise): see lt__hint(). */
static int hint(lua_State *L)
{
    int n;
    const char *word = luaL_checkstring(L, 1), **names = lt__check_strings(L, 2, &n);
    lt__hint(L, word, names, n, luaL_checkstring(L, 3));
    return 1;
}

/* foreign(name): see lt__foreign(). */
static int foreign(lua_State *L)
{
    return lt__return_string(L, lt__foreign(luaL_checkstring(L, 1)));
}

static const luaL_Reg functions[] = {LT_FN(hint), LT_FN(foreign), {NULL, NULL}};

void lt__open_hint(lua_State *L) { lt__register(L, functions); }
