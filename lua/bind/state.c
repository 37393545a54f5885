/* state.c - opens and closes Lua states, and the functions of luatrain.h that use them. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <lualib.h>

#include "core/locale.h"
#include "core/tensor.h"
#include "lua/bind/bind.h"
#include "lua/bind/embedded.h"

static const char key_context; /* its address is the registry key of lt_lua_new()'s context */

/* ==== Opening a state ========================================================================= */

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
    lt__close_pipeline(s);
    free(s->share);
    s->share = NULL;
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

static uint64_t variable(lua_State *L, const char *name, uint64_t max)
{
    const char *text = getenv(name);
    char *end;
    if (!text || !*text)
        return 0;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno || value > max) {
        char limit[24];
        snprintf(limit, sizeof limit, "%llu", (unsigned long long)max);
        luaL_error(L, "environment variable %s must be an integer from 0 to %s, but is '%s'", name,
                   limit, text);
    }
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
    *s = (lt_lua){.limit = LT_MIN_GC_THRESHOLD};
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, close_state);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, -2);
    lt__set_lua(L);
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
    lt__open_hint(L);
    lt__open_tensor(L, s);
    lt__open_arange(L);
    lt__open_ops(L, s);
    lt__open_run(L);
    lt__open_optim(L);
    lt__open_file(L);
    lt__open_data(L);
    lt__open_system(L);
    lt__open_times(L);
    lt__open_dist(L);
    lt__open_shards(L);
    lt__open_async(L);
    lt__open_pipeline(L);
    lt__open_plan(L);
    lt__open_amp(L);
    lt__open_deferred(L);
    lt__open_check(L);
    lt__open_locale(L);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LT_SIGNATURES);
    lua_setfield(L, -2, "signatures");
    lt__push_number(L, NAN);
    lua_setfield(L, -2, "nan");
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
    LT_NEED_CTX(ctx, NULL);
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
    int rc = lt__load_file(L, f->path);
    if (rc == LUA_ERRFILE && (errno == EMFILE || errno == ENFILE))
        lt__error(L, lt__lua_of(L), LT_ENOMEM, "%s", lua_tostring(L, -1));
    if (rc != LUA_OK)
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
    lt__box_retain(L, box, lua_touserdata(L, 1));
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
        lt_fail(LT_EINVAL, "expected a tensor, got %s", luaL_typename(L, index));
    return x;
}

lt_status lt_lua_run(lua_State *L, lt_tensor *const *in, int n_in, lt_tensor **out, int n_out)
{
    int top = lua_gettop(L);
    if (top == 0)
        return lt_fail(LT_EINVAL, "no function on the stack");
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
