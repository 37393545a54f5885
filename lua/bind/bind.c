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

bool lt__number_fits(lua_State *L, int index, lt_dtype dtype)
{
    return lua_isinteger(L, index) ? lt__dtype_can_represent_integer(dtype, lua_tointeger(L, index))
                                   : lt__dtype_can_represent(dtype, lua_tonumber(L, index));
}

lt_status lt__fill_with(lua_State *L, int index, lt_tensor *x)
{
    return lua_isinteger(L, index) ? lt_fill_integer(x, lua_tointeger(L, index))
                                   : lt_fill(x, lua_tonumber(L, index));
}

double lt__check_number(lua_State *L, lt_lua *s, int index, const char *who, const char *what)
{
    if (lua_type(L, index) != LUA_TNUMBER)
        lt__refuse(L, s, "%s: %s must be a number, but is %s", who, what, lt__text(L, index));
    return lua_tonumber(L, index);
}

void lt__check_element(lua_State *L, lt_lua *s, int index, const char *who, lt_dtype dtype)
{
    lt__check_number(L, s, index, who, "the value");
    if (!lt__number_fits(L, index, dtype))
        lt__refuse(L, s, "%s: %s does not fit into %s", who, lt__text(L, index),
                   lt_dtype_name(dtype));
}

void lt__store_number(lua_State *L, int index, lt_dtype dtype, void *element)
{
    lua_Integer whole = lua_tointeger(L, index);
    double value = lua_tonumber(L, index);
    if (lua_isinteger(L, index))
        lt_convert(element, dtype, &whole, LT_I64, 1);
    else
        lt_convert(element, dtype, &value, LT_F64, 1);
}

const char *lt__check_path(lua_State *L, lt_lua *s, int index, const char *who)
{
    if (lua_type(L, index) != LUA_TSTRING)
        lt__refuse(L, s, "%s: the path must be a string, but is %s", who, lt__text(L, index));
    if (strlen(lua_tostring(L, index)) != lua_rawlen(L, index))
        lt__refuse(L, s, "%s: the path contains a zero byte", who);
    return lua_tostring(L, index);
}

/* ==== Lists =================================================================================== */

int lt__push_integers(lua_State *L, const lua_Integer *values, size_t n)
{
    for (size_t i = 0; i < n; i++)
        lua_pushinteger(L, values[i]);
    return (int)n;
}

void lt__push_dim_list(lua_State *L, const int64_t *dims, int n)
{
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushinteger(L, dims[i]);
        lua_rawseti(L, -2, i + 1);
    }
}

void lt__push_number_list(lua_State *L, const double *numbers, int n)
{
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushnumber(L, numbers[i]);
        lua_rawseti(L, -2, i + 1);
    }
}

void lt__push_string_list(lua_State *L, const char *const *strings, int n)
{
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushstring(L, strings[i]);
        lua_rawseti(L, -2, i + 1);
    }
}

/* Pushes an array for the list at index. *n: its length. */
static void *push_array(lua_State *L, int index, size_t bytes, int *n)
{
    *n = (int)luaL_len(L, index);
    return lua_newuserdatauv(L, (size_t)*n * bytes, 0);
}

double *lt__check_numbers(lua_State *L, int index, int *n)
{
    double *numbers = push_array(L, index, sizeof *numbers, n);
    for (int i = 0; i < *n; i++) {
        lua_rawgeti(L, index, i + 1);
        numbers[i] = luaL_checknumber(L, -1);
        lua_pop(L, 1);
    }
    return numbers;
}

const char **lt__check_strings(lua_State *L, int index, int *n)
{
    const char **strings = push_array(L, index, sizeof *strings, n);
    for (int i = 0; i < *n; i++) {
        lua_rawgeti(L, index, i + 1);
        strings[i] = luaL_checkstring(L, -1);
        lua_pop(L, 1); /* the list keeps the string alive */
    }
    return strings;
}

lt_tensor **lt__check_tensors(lua_State *L, lt_lua *s, int index, const char *who, const char *what,
                              int *n)
{
    lt_tensor **tensors = push_array(L, index, sizeof *tensors, n);
    for (int i = 0; i < *n; i++) {
        lua_rawgeti(L, index, i + 1);
        tensors[i] = lt__check_tensor(L, s, lua_gettop(L), who, what);
        lua_pop(L, 1);
    }
    return tensors;
}

int lt__check_named(lua_State *L, lt_lua *s, int first, const char *who, const char ***names,
                    lt_tensor ***tensors)
{
    int n;
    *names = push_array(L, first, sizeof **names, &n);
    *tensors = push_array(L, first, sizeof **tensors, &n);
    for (int i = 0; i < n; i++) {
        lua_rawgeti(L, first, i + 1);
        lua_rawgeti(L, first + 1, i + 1);
        if (lua_type(L, -2) != LUA_TSTRING)
            lt__refuse(L, s, "%s: a name must be a string, but is %s", who, lt__text(L, -2));
        (*names)[i] = lua_tostring(L, -2);
        (*tensors)[i] = lt__check_tensor(L, s, lua_gettop(L), who, (*names)[i]);
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
    void **handle = lua_newuserdatauv(L, sizeof *handle, 1);
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
