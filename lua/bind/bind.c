/* bind.c - helpers that all parts of the binding share: tensors, handles and arguments as Lua
 * values. It also decides when the collector runs.
 *
 * The collector. Lua counts 40 bytes for a tensor of a gigabyte, so its own pacing does not suit
 * tensors. The bytes of tensors drive the collector instead. Before a new tensor is created, a full
 * collection runs if the tensors given to Lua since the last collection exceed both
 * LT_MIN_GC_THRESHOLD and a quarter of the bytes that were live after it. This bounds the memory of
 * garbage tensors. Backward releases each node that it has processed, but that frees no memory
 * while garbage still refers to the tensors. So backward also runs a collection first if there may
 * be enough garbage. Inside lt.step() the end of the scope frees the rest.
 */
#include <string.h>

#include "core/locale.h"
#include "core/tensor.h"
#include "lua/bind/bind.h"

enum {
    /* Backward collects if the new tensors exceed this many times Lua's own memory. Computing them
     * takes far longer than traversing Lua's memory. */
    MANY = 64
};

/* ==== Tensors as values ======================================================================= */

static void collect(lua_State *L, lt_lua *s)
{
    if (!lua_gc(L, LUA_GCISRUNNING))
        return;
    lua_gc(L, LUA_GCCOLLECT);
    size_t part = lt_memory_stats(s->ctx).live / 4;
    s->fresh = 0;
    s->limit = part > LT_MIN_GC_THRESHOLD ? part : LT_MIN_GC_THRESHOLD;
}

void lt__collect_for_backward(lua_State *L, lt_lua *s)
{
    if (s->fresh / MANY > (size_t)lua_gc(L, LUA_GCCOUNT) * 1024)
        collect(L, s);
}

lt_tensor **lt__push_box(lua_State *L, lt_lua *s)
{
    if (s->fresh > s->limit)
        collect(L, s);
    lt_tensor **box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = NULL;
    lua_rawgetp(L, LUA_REGISTRYINDEX, s->tensor_meta);
    lua_setmetatable(L, -2);
    return box;
}

void lt__fill_box(lua_State *L, lt_lua *s, lt_tensor **box, lt_tensor *x)
{
    if (!x)
        lt__raise(L, s);
    *box = x;
    s->fresh += (size_t)lt_count(x) * lt_dtype_bytes(lt_tensor_dtype(x));
}

void lt__box_retain(lua_State *L, lt_tensor **box, lt_tensor *x)
{
    if (x) {
        *box = lt_retain(x);
    } else {
        lua_pop(L, 1);
        lua_pushnil(L);
    }
}

lt_tensor *lt__to_tensor(lua_State *L, lt_lua *s, int index)
{
    lt_tensor **box = lua_touserdata(L, index);
    if (!box || !lua_getmetatable(L, index))
        return NULL;
    const void *meta = lua_topointer(L, -1);
    lua_pop(L, 1);
    if (meta != s->tensor_meta)
        return NULL;
    if (!*box)
        lt__refuse(L, s, "this tensor was closed");
    return *box;
}

lt_tensor *lt__check_tensor(lua_State *L, lt_lua *s, int index, const char *who, const char *what)
{
    lt_tensor *x = lt__to_tensor(L, s, index);
    if (!x)
        lt__refuse(L, s, "%s: %s must be a tensor, but is %s", who, what, lt__text(L, index));
    return x;
}

lt_tensor *lt__self(lua_State *L, const char *who)
{
    lt_lua *s = lt__lua(L);
    lt_tensor *x = lt__to_tensor(L, s, 1);
    if (!x)
        lt__refuse(L, s, "x:%s must be called with a colon: x:%s(...)", who, who);
    return x;
}

/* Pushes a float as tostring() formats it in the C locale. */
static const char *push_float(lua_State *L, double value)
{
    char text[40];
    lt__format(text, sizeof text - 2, "%.14g", value);
    if (text[strspn(text, "-0123456789")] == '\0')
        strcat(text, ".0");
    return lua_pushstring(L, text);
}

const char *lt__text(lua_State *L, int index)
{
    switch (lua_type(L, index)) {
    case LUA_TSTRING: return lua_pushfstring(L, "'%s'", lua_tostring(L, index));
    case LUA_TTABLE: return lua_pushstring(L, "a table");
    case LUA_TFUNCTION: return lua_pushstring(L, "a function");
    case LUA_TUSERDATA:
        return lua_pushstring(L, lt__to_tensor(L, lt__lua_of(L), index) ? "a tensor" : "userdata");
    case LUA_TNUMBER:
        return lua_isinteger(L, index) ? luaL_tolstring(L, index, NULL)
                                       : push_float(L, lua_tonumber(L, index));
    case LUA_TNONE: return lua_pushstring(L, "nil");
    default: return luaL_tolstring(L, index, NULL);
    }
}

const char *lt__check_path(lua_State *L, lt_lua *s, int index, const char *who)
{
    if (lua_type(L, index) != LUA_TSTRING)
        lt__refuse(L, s, "%s: the path must be a string, but is %s", who, lt__text(L, index));
    if (strlen(lua_tostring(L, index)) != lua_rawlen(L, index))
        lt__refuse(L, s, "%s: the path contains a zero byte", who);
    return lua_tostring(L, index);
}

int lt__check_named(lua_State *L, lt_lua *s, const char *who)
{
    int n = (int)luaL_len(L, 1);
    for (int i = 1; i <= n; i++) {
        lua_rawgeti(L, 1, i);
        lua_rawgeti(L, 2, i);
        if (lua_type(L, -2) != LUA_TSTRING)
            lt__refuse(L, s, "%s: a name must be a string, but is %s", who, lt__text(L, -2));
        lt__check_tensor(L, s, lua_gettop(L), who, lua_tostring(L, -2));
        lua_pop(L, 2);
    }
    return n;
}

void lt__check_keys(lua_State *L, lt_lua *s, int index, lua_Unsigned n, const char *who,
                    const char *hint)
{
    index = lua_absindex(L, index);
    luaL_checkstack(L, 4, NULL);
    for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
        lua_Integer key = lua_isinteger(L, -2) ? lua_tointeger(L, -2) : 0;
        if (key < 1 || (lua_Unsigned)key > n)
            lt__refuse(L, s, "%s has a key %s; its items count from 1%s", who, lt__text(L, -2),
                       hint);
    }
}

/* ==== Handles ================================================================================= */

void **lt__push_handle(lua_State *L, const char *class)
{
    void **handle = lua_newuserdatauv(L, sizeof *handle, 0);
    *handle = NULL;
    luaL_setmetatable(L, class);
    return handle;
}

void lt__fill_handle(lua_State *L, void **handle, void *object)
{
    if (!object)
        lt__raise(L, lt__lua(L));
    *handle = object;
}

void *lt__check_handle(lua_State *L, const char *class)
{
    void **handle = luaL_checkudata(L, 1, class);
    if (!*handle)
        lt__refuse(L, lt__lua(L), "this %s was closed", class);
    return *handle;
}
