/* file.c - files of tensors in Lua. The callers are the embedded init.lua and module.lua. */
#include "autograd/stages.h"
#include "lua/bind/bind.h"

static const char file_class[] = "luatrain.File";

LT_FINALIZER(file_gc, lt_file_close)

static int open_file(lua_State *L)
{
    void **h = lt__push_handle(L, file_class);
    const char *path = lt__check_path(L, lt__lua(L), 1, "load");
    lt__fill_handle(L, h, lt_file_open(lt__lua(L)->ctx, path));
    return 1;
}

/* file:names(): returns the names of the tensors in file order. Here and below, allocations in Lua
 * may run a finalizer that closes the file; then the function raises. */
static int file_names(lua_State *L)
{
    int n = lt_file_count(lt__check_handle(L, file_class));
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lua_pushstring(L, lt_file_name(lt__check_handle(L, file_class), i));
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

static int find_in_file(lua_State *L, lt_file *f)
{
    const char *name = luaL_checkstring(L, 2);
    int i = lt_file_find(f, name);
    if (i < 0)
        lt__error(L, lt__lua(L), LT_EFILE, "no tensor '%s' in the file", name);
    return i;
}

/* file:shape(name): returns the shape as a string such as "64x3x3x1". */
static int file_shape(lua_State *L)
{
    lt_file *f = lt__check_handle(L, file_class);
    int64_t dims[LT_MAX_DIMS];
    lt_dtype dtype;
    int ndim;
    luaL_Buffer text;
    lt_file_shape(f, find_in_file(L, f), &dtype, &ndim, dims);
    luaL_buffinit(L, &text);
    for (int i = 0; i < ndim; i++) {
        if (i > 0)
            luaL_addchar(&text, 'x');
        lua_pushinteger(L, dims[i]);
        luaL_addvalue(&text);
    }
    luaL_pushresult(&text);
    return 1;
}

static int file_read(lua_State *L)
{
    lt_tensor **box = lt__push_box(L, lt__lua(L));
    lt_file *f = lt__check_handle(L, file_class);
    lt__fill_box(L, lt__lua(L), box, lt_file_read(f, find_in_file(L, f)));
    return 1;
}

/* file:read_into(name, tensor): does nothing if another pipeline stage has the tensor. */
static int file_read_into(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_file *f = lt__check_handle(L, file_class);
    lt_tensor *x = lt__check_tensor(L, s, 3, "load", "the target");
    if (!lt__begin_write(L, s, x))
        return 0;
    return lt__done(L, lt_file_read_into(f, find_in_file(L, f), x));
}

/* file:verify(): raises if the file's contents do not match its digest. */
static int file_verify(lua_State *L)
{
    return lt__done(L, lt_file_verify(lt__check_handle(L, file_class)));
}

/* file:has_digest(): whether the file has a digest, as files from lt.save do, so that verify() can
 * check it. */
static int file_has_digest(lua_State *L)
{
    return lt__return_boolean(L, lt_file_has_digest(lt__check_handle(L, file_class)));
}

static int file_meta(lua_State *L)
{
    const char *key, *value;
    lua_newtable(L);
    for (int i = 0; lt_file_meta_at(lt__check_handle(L, file_class), i, &key, &value); i++) {
        lua_pushstring(L, key);
        lt_file_meta_at(lt__check_handle(L, file_class), i, &key, &value);
        lua_pushstring(L, value);
        lua_rawset(L, -3);
    }
    return 1;
}

static const luaL_Reg file_methods[] = {LT_METHOD(file, names),  LT_METHOD(file, shape),
                                        LT_METHOD(file, read),   LT_METHOD(file, read_into),
                                        LT_METHOD(file, verify), LT_METHOD(file, has_digest),
                                        LT_METHOD(file, meta),   {NULL, NULL}};

/* save(names, tensors, path, meta): meta is a list {key, value, key, value, ...}. In a pipeline,
 * all ranks must call it; rank 0 writes the file, and the others need no path and meta. */
static int save(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    if (s->profile) /* the script runs before the training */
        return 0;
    if (s->pipeline && s->on_root)
        lt__refuse(L, s,
                   "in a pipeline, saving requires all ranks, but lt.on_root runs on rank 0 "
                   "only");
    if (s->pipeline && lua_gettop(L) == 2) {
        lua_pushliteral(L, "");
        lua_newtable(L);
    }
    int n_meta;
    const char **names, **meta = lt__check_strings(L, 4, &n_meta);
    const char *path = lt__check_path(L, s, 3, "lt.save");
    lt_tensor **tensors;
    int n = lt__check_named(L, s, 1, "lt.save", &names, &tensors);
    return lt__done(
        L, s->pipeline ? lt_pipeline_save(s->pipeline, path, n, names, tensors, n_meta / 2, meta)
                       : lt_file_save(path, n, names, tensors, n_meta / 2, meta));
}

static const luaL_Reg functions[] = {LT_FN(open_file), LT_FN(save), {NULL, NULL}};

void lt__open_file(lua_State *L)
{
    lt__register(L, functions);
    lt__new_class(L, file_class, file_methods, file_gc);
}
