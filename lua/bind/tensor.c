/* tensor.c - tensors in Lua: creation, properties, element access, metamethods.
 *
 * A tensor is a userdata that holds one reference to an lt_tensor. Several userdata may refer to
 * the same lt_tensor (each x.grad creates one), so == compares the lt_tensor.
 */
#include <math.h>
#include <string.h>

#include "autograd/stages.h"
#include "core/tensor.h"
#include "lua/bind/bind.h"

/* ==== Arguments =============================================================================== */

lt_dtype lt__check_dtype(lua_State *L, lt_lua *s, int index, const char *who)
{
    static const char *const names[] = {
#define X(name, bytes, text) text,
        LT_DTYPE_LIST(X)
#undef X
    };
    if (lua_type(L, index) != LUA_TSTRING)
        lt__refuse(L, s, "%s: dtype must be a name such as 'f32', but is %s", who,
                   lt__text(L, index));
    const char *name = lua_tostring(L, index);
    int dtype = lt_dtype_find(name);
    if (dtype >= 0)
        return (lt_dtype)dtype;
    lt__refuse(
        L, s, "%s: unknown dtype '%s'%s", who, name,
        lt__hint(L, name, names, LT_DTYPE_COUNT, " (known: f32, f64, f16, bf16, i64, i32, u8)"));
}

int lt__check_dims(lua_State *L, lt_lua *s, int index, const char *who, int64_t dims[LT_MAX_DIMS])
{
    if (!lua_istable(L, index))
        lt__refuse(L, s, "%s: the shape must be a table such as {2, 3}, but is %s", who,
                   lt__text(L, index));
    lua_Unsigned n = lua_rawlen(L, index);
    if (n > LT_MAX_DIMS)
        lt__refuse(L, s, "%s: a tensor has at most %d axes, but the shape has %llu", who,
                   LT_MAX_DIMS, (unsigned long long)n);
    for (int i = 0; i < (int)n; i++) {
        int whole;
        lua_rawgeti(L, index, i + 1);
        dims[i] = lua_tointegerx(L, -1, &whole);
        if (!whole || dims[i] < 0)
            lt__refuse(L, s, "%s: axis %d of the shape must be a count, but is %s", who, i + 1,
                       lt__text(L, -1));
        lua_pop(L, 1);
    }
    lt__check_keys(L, s, index, n, lua_pushfstring(L, "%s: the shape", who), LT_OPTIONS_FOLLOW);
    lua_pop(L, 1);
    return (int)n;
}

void lt__push_dims(lua_State *L, const lt_tensor *x)
{
    int64_t dims[LT_MAX_DIMS];
    int n = lt_ndim(x);
    for (int i = 0; i < n; i++) /* Lua's allocation may run a finalizer that closes x */
        dims[i] = lt_dims(x)[i];
    lt__push_dim_list(L, dims, n);
}

/* Reads the name of a device of this context. Returns the device, borrowed. */
static lt_device *check_device(lua_State *L, lt_lua *s, int index, const char *who)
{
    if (lua_type(L, index) != LUA_TSTRING)
        lt__refuse(L, s, "%s: device must be a name such as 'cpu', but is %s", who,
                   lt__text(L, index));
    lt_device *device = lt__device_find(s->ctx, lua_tostring(L, index));
    if (!device) {
        lt_fail_prefix("%s", who);
        lt__raise(L, s);
    }
    return device;
}

lt_dtype lt__check_constructor_options(lua_State *L, lt_lua *s, int index, const char *who,
                                       struct lt_device **device)
{
    lt_dtype dtype = LT_F32;
    *device = s->ctx->device;
    if (lua_isnoneornil(L, index))
        return dtype;
    if (!lua_istable(L, index))
        lt__refuse(L, s, "%s: options must be a table such as {dtype = 'f64'}, but got %s", who,
                   lt__text(L, index));
    lua_pushnil(L);
    while (lua_next(L, index)) {
        const char *key = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "";
        if (strcmp(key, "dtype") == 0) {
            dtype = lt__check_dtype(L, s, lua_gettop(L), who);
        } else if (strcmp(key, "device") == 0) {
            *device = check_device(L, s, lua_gettop(L), who);
        } else {
            static const char *const names[] = {"dtype", "device"};
            const char *text = *key ? key : lt__text(L, -2);
            lt__refuse(L, s, "%s: unknown option '%s'%s", who, text,
                       lt__hint(L, key, names, 2, " (known: dtype, device)"));
        }
        lua_pop(L, 1);
    }
    return dtype;
}

/* ==== Constructors ============================================================================ */

/* Creates a tensor of the shape in argument 1, filled with the number at stack index value. */
static int make_full(lua_State *L, const char *who, int value, int options)
{
    lt_lua *s = lt__lua(L);
    int64_t dims[LT_MAX_DIMS];
    lt_device *device;
    int ndim = lt__check_dims(L, s, 1, who, dims);
    lt_dtype dtype = lt__check_constructor_options(L, s, options, who, &device);
    lt__check_element(L, s, value, who, dtype);
    lt_tensor **box = lt__push_box(L, s);
    lt__fill_box(L, s, box, lt__tensor_new(s->ctx, device, dtype, ndim, dims, false));
    lt__check(L, s, lt__fill_with(L, value, *box));
    return 1;
}

static int make_constant(lua_State *L, const char *who, int value)
{
    lua_settop(L, 2);
    lua_pushinteger(L, value);
    return make_full(L, who, 3, 2);
}

static int zeros(lua_State *L) { return make_constant(L, "lt.zeros", 0); }
static int ones(lua_State *L) { return make_constant(L, "lt.ones", 1); }
static int full(lua_State *L) { return make_full(L, "lt.full", 2, 3); }

typedef lt_status (*lt_fill_fn)(lt_tensor *x, lt_purpose purpose, uint64_t stream, uint64_t first,
                                double a, double b);

static int make_random(lua_State *L, const char *who, lt_fill_fn fill)
{
    lt_lua *s = lt__lua(L);
    int64_t dims[LT_MAX_DIMS];
    lt_device *device;
    int ndim = lt__check_dims(L, s, 1, who, dims);
    lt_dtype dtype = lt__check_constructor_options(L, s, 2, who, &device);
    if (dtype > LT_BF16)
        lt__refuse(L, s, "%s: dtype must be a float dtype, but is %s", who, lt_dtype_name(dtype));
    lt_tensor **box = lt__push_box(L, s);
    lt__fill_box(L, s, box, lt__tensor_new(s->ctx, device, dtype, ndim, dims, false));
    lt__check(L, s, fill(*box, LT_RNG_USER, lt_next_draw(s->ctx), 0, 0, 1));
    return 1;
}

static int rand_uniform(lua_State *L) { return make_random(L, "lt.rand", lt_fill_uniform); }
static int rand_normal(lua_State *L) { return make_random(L, "lt.randn", lt_fill_normal); }

/* State of the conversion of a nested table to a tensor. */
typedef struct nest {
    lt_lua *s;
    lt_dtype dtype;
    int ndim;
    int64_t dims[LT_MAX_DIMS];
    char *next; /* destination of the next element */
} nest;

/* Sets t->ndim and t->dims from the first item of each nesting level. */
static void measure(lua_State *L, nest *t)
{
    int top = lua_gettop(L);
    lua_pushvalue(L, 1);
    for (t->ndim = 0; lua_istable(L, -1); t->ndim++) {
        if (t->ndim == LT_MAX_DIMS)
            lt__refuse(L, t->s,
                       "lt.tensor: a tensor has at most %d axes, but the table is nested deeper",
                       LT_MAX_DIMS);
        t->dims[t->ndim] = (int64_t)lua_rawlen(L, -1);
        lua_rawgeti(L, -1, 1);
    }
    lua_settop(L, top);
}

/* Reads the value on top, at nesting level depth, and everything nested in it. */
static void read_nested(lua_State *L, nest *t, int depth)
{
    bool table = lua_istable(L, -1);
    if (depth < t->ndim && (!table || (int64_t)lua_rawlen(L, -1) != t->dims[depth]))
        lt__refuse(L, t->s, "lt.tensor: ragged table: at depth %d, expected %lld values, got %s",
                   depth + 1, (long long)t->dims[depth],
                   table ? lua_pushfstring(L, "%I", (LUAI_UACINT)lua_rawlen(L, -1))
                         : lt__text(L, -1));
    if (depth == t->ndim) {
        lt__check_element(L, t->s, lua_gettop(L), "lt.tensor", t->dtype);
        lt__store_number(L, -1, t->dtype, t->next);
        t->next += lt_dtype_bytes(t->dtype);
        return;
    }
    luaL_checkstack(L, 4, NULL);
    for (int64_t i = 1; i <= t->dims[depth]; i++) {
        lua_rawgeti(L, -1, i);
        read_nested(L, t, depth + 1);
        lua_pop(L, 1);
    }
    lt__check_keys(L, t->s, -1, (lua_Unsigned)t->dims[depth], "lt.tensor: the table",
                   LT_OPTIONS_FOLLOW);
}

static int tensor(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_device *device;
    nest t = {.s = s, .dtype = lt__check_constructor_options(L, s, 2, "lt.tensor", &device)};
    if (!lua_istable(L, 1))
        lt__check_element(L, s, 1, "lt.tensor", t.dtype);
    measure(L, &t);
    double count = 1; /* elements of the tensor; a ragged table may hold fewer */
    for (int i = 0; i < t.ndim; i++)
        count *= (double)t.dims[i];
    if (count > 0x1p40)
        lt__refuse(L, s, "lt.tensor: the table is too large or ragged");
    void *data = lua_newuserdatauv(L, (size_t)count * lt_dtype_bytes(t.dtype), 0);
    t.next = data;
    lua_pushvalue(L, 1);
    read_nested(L, &t, 0);
    lt_tensor **box = lt__push_box(L, s);
    lt__fill_box(L, s, box, lt__tensor_new(s->ctx, device, t.dtype, t.ndim, t.dims, false));
    lt__check(L, s, lt_write(*box, data));
    return 1;
}

/* ==== Elements ================================================================================ */

void lt__box_retain_on_host(lua_State *L, lt_lua *s, lt_tensor **box, lt_tensor *x)
{
    if (x->storage && !x->storage->device->is_host)
        lt__fill_box(L, s, box, lt__on_host(x));
    else
        lt__box_retain(L, box, x);
}

static void push_element(lua_State *L, lt_lua *s, lt_tensor *x, int64_t index)
{
    double value;
    int64_t integer;
    if (lt_tensor_dtype(x) > LT_BF16) {
        lt__check(L, s, lt_item_integer(x, index, &integer));
        lua_pushinteger(L, integer);
    } else {
        lt__check(L, s, lt_item(x, index, &value));
        lt__push_number(L, value);
    }
}

/* Returns the row-major offset, in elements, of the element whose n indices start at argument 2. */
static int64_t check_indices(lua_State *L, lt_lua *s, const lt_tensor *x, int n, const char *who)
{
    char text[96];
    int64_t place = 0;
    if (n != lt_ndim(x))
        lt__refuse(L, s, "%s requires %d indices, but got %d (%s)", who, lt_ndim(x), n,
                   lt_describe(x, text, sizeof text));
    for (int i = 0; i < n; i++) {
        int whole;
        int64_t dim = lt_dims(x)[i], index = lua_tointegerx(L, 2 + i, &whole);
        if (!whole || index < 1 || index > dim) {
            lt_describe(x, text, sizeof text);
            lt__refuse(L, s, "%s: index %d must be 1 to %lld, but is %s (%s)", who, i + 1,
                       (long long)dim, lt__text(L, 2 + i), text);
        }
        place = place * dim + index - 1;
    }
    return place;
}

static int get(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_tensor *x = lt__self(L, "get");
    int64_t place = check_indices(L, s, x, lua_gettop(L) - 1, "get");
    push_element(L, s, lt__here(L, s, x), place);
    return 1;
}

/* own_get(tensor, indices...): like get(), for a tensor that this rank has. In a pipeline, the
 * other ranks take no part. */
static int own_get(lua_State *L)
{
    lt_tensor *x = lt__self(L, "get");
    push_element(L, lt__lua(L), x, check_indices(L, lt__lua(L), x, lua_gettop(L) - 1, "get"));
    return 1;
}

static int set(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_tensor *x = lt__self(L, "set");
    int64_t count = lt_count(x), place = check_indices(L, s, x, lua_gettop(L) - 2, "set");
    lt__check_element(L, s, lua_gettop(L), "set", lt_tensor_dtype(x));
    if (!lt__begin_write(L, s, x))
        return 0;
    lt_tensor *flat = lt_view(x, 1, &count);
    lt_tensor *one = flat ? lt_rows(flat, place, 1) : NULL;
    lt_status status = one ? lt__fill_with(L, lua_gettop(L), one) : lt_errcode();
    lt_release(one);
    lt_release(flat);
    return lt__done(L, status);
}

static int item(lua_State *L)
{
    lt_tensor *x = lt__self(L, "item");
    char text[96];
    if (lt_count(x) != 1)
        lt__refuse(L, lt__lua(L), "item requires a tensor of one element, but got %s",
                   lt_describe(x, text, sizeof text));
    push_element(L, lt__lua(L), lt__here(L, lt__lua(L), x), 0);
    return 1;
}

static void push_nested(lua_State *L, lt_lua *s, lt_tensor *x, int depth, int64_t *next)
{
    if (depth == lt_ndim(x)) {
        push_element(L, s, x, (*next)++);
        return;
    }
    int64_t n = lt_dims(x)[depth];
    luaL_checkstack(L, 4, NULL);
    lua_createtable(L, n < 1 << 20 ? (int)n : 0, 0);
    for (int64_t i = 1; i <= n; i++) {
        push_nested(L, s, x, depth + 1, next);
        lua_rawseti(L, -2, i);
    }
}

static int totable(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    int64_t next = 0;
    lua_settop(L, 1);                     /* else the box could become argument 1 */
    lt_tensor **box = lt__push_box(L, s); /* a second reference: a finalizer may close the first */
    lt__box_retain_on_host(L, s, box, lt__here(L, s, lt__self(L, "totable")));
    push_nested(L, s, *box, 0, &next);
    return 1;
}

static int fill(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_tensor *x = lt__self(L, "fill");
    lt__check_element(L, s, 2, "fill", lt_tensor_dtype(x));
    if (lt__begin_write(L, s, x))
        lt__check(L, s, lt__fill_with(L, 2, x));
    lua_settop(L, 1);
    return 1;
}

static int copy(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_tensor *x = lt__self(L, "copy");
    lt_tensor *source = lt__check_tensor(L, s, 2, "copy", "the source");
    if (lt__begin_write(L, s, x))
        lt__check(L, s, lt_copy(x, source));
    lua_settop(L, 1);
    return 1;
}

/* ==== Properties ============================================================================== */

static int dim(lua_State *L)
{
    lt_tensor *x = lt__self(L, "dim");
    int whole, n = lt_ndim(x);
    char text[96];
    lua_Integer axis = lua_tointegerx(L, 2, &whole);
    if (!whole || axis == 0 || axis > n || axis < -n) {
        lt_describe(x, text, sizeof text);
        lt__refuse(L, lt__lua(L),
                   "dim requires an axis from 1 to %d, or from the end if negative, but got %s "
                   "(%s)",
                   n, lt__text(L, 2), text);
    }
    return lt__return_integer(L, lt_dim(x, (int)(axis > 0 ? axis - 1 : axis)));
}

static int count_elements(lua_State *L)
{
    return lt__return_integer(L, lt_count(lt__self(L, "count")));
}

/* Returns a description such as "2x3 f32" and, if there are no values to print, "dead", "pending",
 * or "meta" if only another stage of the pipeline has them. */
static int describe(lua_State *L)
{
    lt_tensor *x = lt__self(L, "tostring");
    char text[96];
    const char *why = lt_is_dead(x)   ? "dead"
                      : x->pending    ? "pending"
                      : lt_is_meta(x) ? "meta"
                                      : NULL;
    lua_pushstring(L, lt_describe(x, text, sizeof text));
    lua_pushstring(L, why);
    return 2;
}

/* to(device): returns a view if x is on that device already, else a copy. */
static int to(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lua_settop(L, 2);
    lt_tensor **box = lt__push_box(L, s);
    lt_tensor *x = lt__self(L, "to");
    lt__fill_box(L, s, box, lt_to(x, check_device(L, s, 2, "to")->name));
    return 1;
}

static int is_tensor(lua_State *L)
{
    return lt__return_boolean(L, lt__to_tensor(L, lt__lua(L), 1) != NULL);
}

/* ==== Metamethods ============================================================================= */

static int tensor_gc(lua_State *L)
{
    lt_tensor **box = lua_touserdata(L, 1);
    lt_release(*box);
    *box = NULL;
    return 0;
}

static int length(lua_State *L)
{
    lt_tensor *x = lt__self(L, "#");
    if (lt_ndim(x) == 0)
        lt__refuse(L, lt__lua(L), "# requires a tensor with axes, but this one has none");
    return lt__return_integer(L, lt_dim(x, 0));
}

static int same(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    return lt__return_boolean(L, lt__to_tensor(L, s, 1) == lt__to_tensor(L, s, 2));
}

/* Pushes x.grad. Usually it is nil; then no box is created. */
static int push_grad(lua_State *L, lt_lua *s)
{
    if (lt_is_meta(lt__self(L, "grad")))
        lt__refuse(L, s, "only another stage of the pipeline has the gradient of this tensor");
    if (!lt_grad(lt__self(L, "grad")))
        return 0;
    lt_tensor **box = lt__push_box(L, s);
    lt__box_retain(L, box, lt_grad(lt__self(L, "grad")));
    return 1;
}

/* Raises "tensor: unknown method or field 'name' (did you mean 'near'?)". The candidates are the
 * string keys of the table on top. */
static noreturn void unknown_field(lua_State *L, lt_lua *s, const char *name)
{
    enum { MOST = 256 };
    const char *names[MOST];
    int n = 0;
    if (lt__foreign(name))
        lt__refuse(L, s, "tensor: unknown method or field '%s' (use %s)", name, lt__foreign(name));
    lua_pushnil(L);
    while (lua_next(L, -2)) {
        lua_pop(L, 1);
        if (lua_type(L, -1) == LUA_TSTRING && n < MOST)
            names[n++] = lua_tostring(L, -1);
    }
    lt__refuse(L, s, "tensor: unknown method or field '%s'%s", name,
               lt__hint(L, name, names, n, ""));
}

enum property { SHAPE, DTYPE, DEVICE, GRAD, ON_TAPE };
static const char *const properties[] = {"shape", "dtype", "device", "grad", "on_tape", NULL};

/* x.name. Upvalue 2 is the table of methods. It also maps each property to its number. */
static int index_tensor(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_tensor *x = *(lt_tensor **)lua_touserdata(L, 1);
    lua_settop(L, 2);
    lua_pushvalue(L, 2);
    int kind = lua_rawget(L, lua_upvalueindex(2));
    if (kind != LUA_TNUMBER && kind != LUA_TNIL)
        return 1;
    if (lua_type(L, 2) == LUA_TNUMBER)
        lt__refuse(L, s, "tensor: x[%s] is not an element; use x:get(...) and x:set(..., value)",
                   lt__text(L, 2));
    if (kind == LUA_TNIL) {
        const char *name = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : lt__text(L, 2);
        lua_pushvalue(L, lua_upvalueindex(2));
        unknown_field(L, s, name);
    }
    if (!x)
        lt__refuse(L, s, "this tensor was closed");
    switch ((enum property)lua_tointeger(L, -1)) {
    case SHAPE: lt__push_dims(L, x); break;
    case DTYPE: lua_pushstring(L, lt_dtype_name(lt_tensor_dtype(x))); break;
    case DEVICE: lua_pushstring(L, lt_device_of(x)); break;
    case GRAD: return push_grad(L, s);
    case ON_TAPE: lua_pushboolean(L, lt_requires_grad(x)); break;
    }
    return 1;
}

/* x.name = value */
static int assign(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    if (lua_type(L, 2) == LUA_TNUMBER)
        lt__refuse(L, s, "tensor: cannot assign to x[%s]; use x:set(..., value)", lt__text(L, 2));
    const char *name = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : lt__text(L, 2);
    const char *use = strcmp(name, "requires_grad") == 0 ? "; use x:requires_grad(true)"
                      : strcmp(name, "grad") == 0        ? "; use x:zero_grad()"
                                                         : "";
    lt__refuse(L, s, "tensor: the field '%s' cannot be set%s", name, use);
}

static const luaL_Reg constructors[] = {
    {"lt.tensor(value: number|table; options?: TensorOptions) -> Tensor "
     "-- From nested lists of numbers.",
     tensor},
    {"lt.zeros(shape: integer[]; options?: TensorOptions) -> Tensor -- Every element is 0.", zeros},
    {"lt.ones(shape: integer[]; options?: TensorOptions) -> Tensor -- Every element is 1.", ones},
    {"lt.full(shape: integer[]; value: number; options?: TensorOptions) -> Tensor "
     "-- Every element is value.",
     full},
    {"lt.rand(shape: integer[]; options?: TensorOptions) -> Tensor "
     "-- Uniform from 0 to 1.",
     rand_uniform},
    {"lt.randn(shape: integer[]; options?: TensorOptions) -> Tensor "
     "-- Normal with mean 0 and deviation 1.",
     rand_normal},
    {NULL, NULL}};

static const luaL_Reg methods[] = {
    {"Tensor:get(...: integer) -> number -- The element at these indices, from 1.", get},
    {"Tensor:set(...: number) "
     "-- Sets the element at the indices, from 1, to the last argument.",
     set},
    {"Tensor:item() -> number -- The value of a tensor of one element.", item},
    {"Tensor:totable() -> any -- The elements as nested lists, or one number.", totable},
    {"Tensor:fill(value: number) -> Tensor -- Sets every element; returns the tensor.", fill},
    {"Tensor:copy(source: Tensor) -> Tensor -- Overwrites the elements; returns the tensor.", copy},
    {"Tensor:to(device: string) -> Tensor "
     "-- A copy on a device; a view if it is there already.",
     to},
    {"Tensor:dim(axis: integer) -> integer -- The length of an axis; -1 is the last.", dim},
    {"Tensor:count() -> integer -- The number of elements.", count_elements},
    {NULL, NULL}};

static const luaL_Reg metamethods[] = {
    {"__len", length}, {"__eq", same}, {"__newindex", assign}, {NULL, NULL}};

static const luaL_Reg helpers[] = {LT_FN(describe), LT_FN(is_tensor), LT_FN(own_get), {NULL, NULL}};

/* Adds constructors, helpers, tensor_methods and tensor_meta to the core table. */
void lt__open_tensor(lua_State *L, lt_lua *s)
{
    lt__register(L, helpers);
    lua_newtable(L);
    lt__register(L, constructors);
    lua_setfield(L, -2, "constructors");
    lt__new_class(L, "luatrain.Tensor", methods, tensor_gc);
    luaL_getmetatable(L, "luatrain.Tensor");
    s->tensor_meta = lua_topointer(L, -1);
    lua_pushvalue(L, -1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, s->tensor_meta);
    lt__register(L, metamethods);
    lt__push_lua(L);
    lua_getfield(L, -2, "__index");
    for (int i = 0; properties[i]; i++) {
        lua_pushinteger(L, i);
        lua_setfield(L, -2, properties[i]);
    }
    lua_pushvalue(L, -1);
    lua_setfield(L, -5, "tensor_methods");
    lua_pushcclosure(L, index_tensor, 2);
    lua_setfield(L, -2, "__index");
    lua_setfield(L, -2, "tensor_meta");
}
