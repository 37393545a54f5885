/* bind.c - opens Lua states, defines the helpers that all parts of the binding share, and decides
 * when the collector runs.
 *
 * The collector. Lua counts 40 bytes for a tensor of a gigabyte, so its own pace says nothing about
 * tensors. The bytes of tensors drive the collector instead. Before a new tensor is created, a full
 * collection runs if the tensors given to Lua since the last collection exceed a quarter of the
 * bytes that were live after it, and also MIN_FRESH. This bounds the memory of garbage tensors.
 * Backward releases each node that it has processed, but that frees no memory while garbage still
 * refers to the tensors. So backward also runs a collection first if there may be enough garbage.
 * Inside lt.step() the end of the scope frees the rest.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <lualib.h>

#include "core/locale.h"
#include "core/tensor.h"
#include "lua/bind/bind.h"
#include "lua/bind/embedded.h"

enum {
    MIN_FRESH = 128 << 20,
    /* times Lua's own memory: computing that many bytes of tensors takes far longer than traversing
     * Lua's memory */
    MANY = 64
};

/* Registry keys, by address. */
static const char key_context, key_state;

/* ==== Tensors as values ======================================================================= */

static void collect(lua_State *L, lt_lua *s)
{
    if (!lua_gc(L, LUA_GCISRUNNING))
        return;
    lua_gc(L, LUA_GCCOLLECT);
    size_t part = lt_memory_stats(s->ctx).live / 4;
    s->fresh = 0;
    s->limit = part > MIN_FRESH ? part : MIN_FRESH;
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

void lt__share_box(lua_State *L, lt_tensor **box, lt_tensor *x)
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
        lt__refuse(L, s, "%s: %s wants a tensor, it is %s", who, what, lt__text(L, index));
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
        lt__refuse(L, s, "%s: the path wants a string, it is %s", who, lt__text(L, index));
    if (strlen(lua_tostring(L, index)) != lua_rawlen(L, index))
        lt__refuse(L, s, "%s: the path has a zero byte in it", who);
    return lua_tostring(L, index);
}

int lt__check_named(lua_State *L, lt_lua *s, const char *who)
{
    int n = (int)luaL_len(L, 1);
    for (int i = 1; i <= n; i++) {
        lua_rawgeti(L, 1, i);
        lua_rawgeti(L, 2, i);
        if (lua_type(L, -2) != LUA_TSTRING)
            lt__refuse(L, s, "%s: a name wants a string, it is %s", who, lt__text(L, -2));
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

/* ==== Opening a state ========================================================================= */

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
        lt__push_lua(L);
        lua_pushcclosure(L, functions->func, 1);
        lua_setfield(L, -2, functions->name);
    }
}

void lt__new_class(lua_State *L, const char *name, const luaL_Reg *methods, lua_CFunction gc)
{
    const luaL_Reg ends[] = {{"__gc", gc}, {"__close", gc}, {NULL, NULL}};
    luaL_newmetatable(L, name);
    lt__register(L, ends);
    lua_newtable(L);
    lt__register(L, methods);
    lua_setfield(L, -2, "__index");
    lua_pushboolean(L, 0); /* hides it from scripts: its functions do not check their arguments */
    lua_setfield(L, -2, "__metatable");
}

/* The package loader of an embedded module. Upvalue 1 is its lt_embedded; upvalue 2, the core
 * table, is passed to the file as its argument. */
static int load_embedded(lua_State *L)
{
    const lt_embedded *file = lua_touserdata(L, lua_upvalueindex(1));
    const char *chunk =
        lua_pushfstring(L, LT_EMBEDDED "%s.lua", luaL_gsub(L, file->name, ".", "/"));
    if (luaL_loadbufferx(L, file->text, file->length, chunk, "t") != LUA_OK)
        return lua_error(L);
    lua_pushvalue(L, lua_upvalueindex(2));
    lua_call(L, 1, 1);
    return 1;
}

static int close_state(lua_State *L)
{
    lt_lua *s = lua_touserdata(L, 1);
    lt__drop_hooks(s);
    lt__drop_times(s);
    lt_reducer_free(s->reducer);
    s->reducer = NULL;
    if (s->ctx) {
        lt_set_allreduce(s->ctx, NULL, NULL);
        lt_set_where(s->ctx, NULL, NULL);
    }
    if (s->owned)
        lt_ctx_free(s->ctx);
    else if (s->ctx)
        lt__ctx_release(s->ctx);
    s->ctx = NULL;
    return 0;
}

static uint64_t variable(lua_State *L, const char *name, uint64_t most)
{
    const char *text = getenv(name);
    char *end;
    if (!text || !*text)
        return 0;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno || value > most)
        luaL_error(L, "variable %s wants a whole number, it is '%s'", name, text);
    return value;
}

/* Sets s->ctx to the context passed to lt_lua_new(), or to a new context that s owns. */
static void find_context(lua_State *L, lt_lua *s)
{
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &key_context) == LUA_TLIGHTUSERDATA) {
        s->ctx = lt__ctx_retain(lua_touserdata(L, -1));
    } else {
        const char *device = getenv("LUATRAIN_DEVICE");
        lt_config config = {.device = device && *device ? device : "auto",
                            .seed = variable(L, "LUATRAIN_SEED", UINT64_MAX),
                            .threads = (int)variable(L, "LUATRAIN_THREADS", 1024),
                            .deterministic = variable(L, "LUATRAIN_DETERMINISTIC", 1) > 0,
                            .tf32 = variable(L, "LUATRAIN_TF32", 1) > 0};
        s->ctx = lt_open(&config);
        s->owned = true;
        if (!s->ctx)
            lt__raise(L, s);
    }
    lua_pop(L, 1);
    lt_set_where(s->ctx, lt__where, s);
}

static lt_lua *new_state(lua_State *L)
{
    lt_lua *s = lua_newuserdatauv(L, sizeof *s, 0);
    *s = (lt_lua){.limit = MIN_FRESH};
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, close_state);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, -2);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &key_state);
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_MAINTHREAD);
    s->running = lua_tothread(L, -1);
    lua_pop(L, 1);
    find_context(L, s);
    return s;
}

/* Pushes the core, the table of all functions written in C. Only the embedded files see it, because
 * some of its functions do not check their arguments. */
static void push_core(lua_State *L, lt_lua *s)
{
    lua_newtable(L);
    lt__open_error(L);
    lt__open_tensor(L, s);
    lt__open_ops(L, s);
    lt__open_run(L);
    lt__open_optim(L);
    lt__open_file(L);
    lt__open_data(L);
    lt__open_system(L);
    lt__open_times(L);
    lt__open_dist(L);
    lt__open_amp(L);
    lt__open_deferred(L);
    lt__open_check(L);
    lt__open_locale(L);
    lua_pushliteral(L, LT_VERSION);
    lua_setfield(L, -2, "version");
}

int luaopen_luatrain(lua_State *L)
{
    luaL_checkversion(L);
    lt_lua *s = new_state(L);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
    push_core(L, s);
    for (const lt_embedded *file = lt__embedded; file->name; file++) {
        lua_pushfstring(L, "luatrain.%s", file->name);
        lua_pushlightuserdata(L, (void *)file);
        lua_pushvalue(L, -3);
        lua_pushcclosure(L, load_embedded, 2);
        lua_rawset(L, -4);
    }
    lua_getglobal(L, "require");
    lua_pushliteral(L, "luatrain.init");
    lua_call(L, 1, 1);
    return 1;
}

static int fill_state(lua_State *L)
{
    luaL_openlibs(L);
    lt__open_load(L);
    lua_pushvalue(L, 1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &key_context);
    luaL_requiref(L, "luatrain", luaopen_luatrain, 0);
    return 0;
}

lua_State *lt_lua_new(lt_ctx *ctx)
{
    lua_State *L = luaL_newstate();
    if (!L) {
        lt_fail(LT_ENOMEM, "out of memory for a Lua state");
        return NULL;
    }
    lua_pushcfunction(L, fill_state);
    lua_pushlightuserdata(L, ctx);
    if (lt_lua_call(L, 1, 0) == LT_OK)
        return L;
    lt_lua_close(L);
    return NULL;
}

/* ==== The C API =============================================================================== */

typedef struct script {
    const char *path;
    int argc;
    char **argv;
} script;

/* Pushes the chunk of a script and its arguments, and sets the global arg. */
static int load_script(lua_State *L)
{
    const script *f = lua_touserdata(L, 1);
    if (lt__load_file(L, f->path) != LUA_OK)
        return lua_error(L);
    luaL_checkstack(L, f->argc + 2, "too many arguments");
    lua_createtable(L, f->argc, 1);
    lua_pushstring(L, f->path);
    lua_rawseti(L, -2, 0);
    for (int i = 0; i < f->argc; i++) {
        lua_pushstring(L, f->argv[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setglobal(L, "arg");
    for (int i = 0; i < f->argc; i++)
        lua_pushstring(L, f->argv[i]);
    return 1 + f->argc;
}

lt_status lt_lua_dofile(lua_State *L, const char *path, int argc, char **argv)
{
    script f = {path, argc, argv};
    if (!lua_checkstack(L, argc + 3))
        return lt_fail(LT_ENOMEM, "out of memory for the Lua stack");
    lua_pushcfunction(L, load_script);
    lua_pushlightuserdata(L, &f);
    LT_TRY(lt_lua_call(L, 1, 1 + argc));
    return lt_lua_call(L, argc, LUA_MULTRET);
}

static int push_given(lua_State *L)
{
    lt_tensor **box = lt__push_box(L, lt__lua_of(L));
    lt__share_box(L, box, lua_touserdata(L, 1));
    return 1;
}

lt_status lt_lua_push(lua_State *L, lt_tensor *x)
{
    if (!lua_checkstack(L, 3))
        return lt_fail(LT_ENOMEM, "out of memory for the Lua stack");
    lua_pushcfunction(L, push_given);
    lua_pushlightuserdata(L, x);
    return lt_lua_call(L, 1, 1);
}

lt_tensor *lt_lua_tensor(lua_State *L, int index)
{
    lt_lua *s = lt__lua_of(L);
    lt_tensor *x = NULL;
    if (s && luaL_testudata(L, index, "luatrain.Tensor"))
        x = *(lt_tensor **)lua_touserdata(L, index);
    if (!x)
        lt_fail(LT_EINVAL, "there is a %s where a tensor was wanted", luaL_typename(L, index));
    return x;
}

lt_status lt_lua_run(lua_State *L, lt_tensor *const *in, int n_in, lt_tensor **out, int n_out)
{
    int top = lua_gettop(L);
    if (top == 0)
        return lt_fail(LT_EINVAL, "there is no function on the stack");
    if (!lua_checkstack(L, n_in + n_out + 1))
        return lt_fail(LT_ENOMEM, "out of memory for the Lua stack");
    lua_pushvalue(L, top);
    lt_status status = LT_OK;
    for (int i = 0; i < n_in && status == LT_OK; i++)
        status = lt_lua_push(L, in[i]);
    if (status == LT_OK)
        status = lt_lua_call(L, n_in, n_out);
    for (int i = 0; i < n_out && status == LT_OK; i++)
        if (!lt_lua_tensor(L, top + 1 + i))
            status = LT_EINVAL;
    for (int i = 0; i < n_out && status == LT_OK; i++)
        out[i] = lt_retain(lt_lua_tensor(L, top + 1 + i));
    lua_settop(L, top);
    return status;
}

void lt_lua_close(lua_State *L)
{
    lt_locale l = lt__enter_c_locale(); /* finalizers run Lua code */
    if (L)
        lua_close(L);
    lt__leave_c_locale(l);
}
