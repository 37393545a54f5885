/* load.c - load, loadfile, dofile and require that accept only source text.
 *
 * Lua does not verify compiled code: a damaged or hostile chunk can crash the program or run
 * arbitrary code. So states from lt_lua_new() refuse compiled chunks. A stock Lua that requires
 * luatrain keeps its own functions.
 */
#include <string.h>

#include "lua/bind/bind.h"

/* Replaces the message of a failed load on top of the stack if it is Lua's refusal of a binary
 * chunk. Only that message starts with these words; others start with the chunk's name. Returns
 * LUA_ERRSYNTAX. */
static int explain(lua_State *L, const char *who)
{
    static const char refusal[] = "attempt to load a binary chunk";
    const char *text = lua_tostring(L, -1);
    if (text && strncmp(text, refusal, strlen(refusal)) == 0) {
        lua_pop(L, 1);
        lua_pushfstring(L,
                        "%s: this is compiled Lua code, which luatrain does not run; use the "
                        "source text",
                        who);
    }
    return LUA_ERRSYNTAX;
}

int lt__load_file(lua_State *L, const char *path)
{
    int rc = luaL_loadfilex(L, path, "t");
    return rc == LUA_ERRSYNTAX ? explain(L, path ? path : "stdin") : rc;
}

/* Whether the mode at index allows text. If not, pushes nil and a message, the results of load and
 * loadfile. */
static bool allows_text(lua_State *L, int index, const char *who)
{
    const char *mode = luaL_optstring(L, index, "bt");
    if (strchr(mode, 't'))
        return true;
    luaL_pushfail(L);
    lua_pushfstring(L,
                    "%s: mode '%s' allows only compiled Lua code, which luatrain does not run; "
                    "use mode 't'",
                    who, mode);
    return false;
}

/* load(chunk, name, mode, env). Upvalue 1 is Lua's own load. An env of nil differs from a missing
 * env, so the number of arguments is preserved. */
static int load_text(lua_State *L)
{
    if (!lua_isstring(L, 1))
        luaL_checktype(L, 1, LUA_TFUNCTION);
    if (!allows_text(L, 3, "load"))
        return 2;
    if (lua_gettop(L) < 3)
        lua_settop(L, 3);
    lua_pushliteral(L, "t");
    lua_replace(L, 3);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, lua_gettop(L) - 1, LUA_MULTRET);
    if (lua_isnil(L, 1))
        explain(L, "load");
    return lua_gettop(L);
}

/* loadfile(path, mode, env) */
static int loadfile_text(lua_State *L)
{
    const char *path = luaL_optstring(L, 1, NULL);
    bool has_env = !lua_isnone(L, 3);
    if (!allows_text(L, 2, path ? path : "stdin"))
        return 2;
    if (lt__load_file(L, path) != LUA_OK) {
        luaL_pushfail(L);
        lua_insert(L, -2);
        return 2;
    }
    if (has_env) {
        lua_pushvalue(L, 3);
        if (!lua_setupvalue(L, -2, 1))
            lua_pop(L, 1); /* the chunk uses no globals */
    }
    return 1;
}

static int finish_dofile(lua_State *L, int status, lua_KContext context)
{
    (void)status, (void)context;
    return lua_gettop(L) - 1;
}

static int dofile_text(lua_State *L)
{
    const char *path = luaL_optstring(L, 1, NULL);
    lua_settop(L, 1);
    if (lt__load_file(L, path) != LUA_OK)
        return lua_error(L);
    lua_callk(L, 0, LUA_MULTRET, 0, finish_dofile);
    return finish_dofile(L, LUA_OK, 0);
}

/* The searcher of require() that loads a file on package.path. Upvalues: package,
 * package.searchpath. */
static int search_text(lua_State *L)
{
    const char *name = luaL_checkstring(L, 1);
    lua_pushvalue(L, lua_upvalueindex(2));
    lua_pushvalue(L, 1);
    if (lua_getfield(L, lua_upvalueindex(1), "path") != LUA_TSTRING)
        return luaL_error(L, "'package.path' must be a string");
    lua_call(L, 2, 2);
    if (lua_isnil(L, -2))
        return 1; /* the list of the paths it tried */
    lua_pop(L, 1);
    const char *path = lua_tostring(L, -1);
    if (lt__load_file(L, path) != LUA_OK)
        return luaL_error(L, "error loading module '%s' from file '%s':\n\t%s", name, path,
                          lua_tostring(L, -1));
    lua_insert(L, -2);
    return 2;
}

void lt__open_load(lua_State *L)
{
    lua_getglobal(L, "load");
    lua_pushcclosure(L, load_text, 1);
    lua_setglobal(L, "load");
    lua_register(L, "loadfile", loadfile_text);
    lua_register(L, "dofile", dofile_text);
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "searchers");
    lua_pushvalue(L, -2);
    lua_getfield(L, -3, "searchpath");
    lua_pushcclosure(L, search_text, 2);
    lua_rawseti(L, -2, 2); /* searcher 1 uses package.preload; 3 and 4 load C libraries */
    lua_pop(L, 2);
}
