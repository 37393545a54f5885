/* ops.c - binds every op of the registry as a function and as a method, in one loop over the
 * registry.
 *
 *     lt.conv2d(x, w, b, 2, 1)
 *     lt.conv2d(x, w, b, {stride = 2, pad = 1})
 *     x:conv2d(w, b, {stride = 2, pad = 1})
 * are equivalent. Inputs are passed by position, in the order of the signature. Options follow, by
 * position or in one table at the end. A number in place of a required tensor becomes a tensor
 * without axes, with the dtype and device of the last tensor among the inputs. A variadic op takes
 * its tensors in a list:
 *     lt.cat({a, b}, 1)
 */
#include <string.h>

#include "autograd/stages.h"
#include "core/tensor.h"
#include "lua/bind/bind.h"

/* ==== Options ================================================================================= */

/* Converts a position (an axis or index option) from Lua, which counts from 1, to C. Negative
 * values count from the end in both. */
static int64_t to_position(lua_State *L, lt_lua *s, const lt_schema *schema, int k, int64_t value)
{
    if (value == 0)
        lt__refuse(L, s, "%s: option '%s' counts from 1, or from the end if negative, but is 0",
                   schema->name, schema->opt[k].name);
    return value > 0 ? value - 1 : value;
}

static void read_integers(lua_State *L, lt_lua *s, const lt_schema *schema, int k, int index,
                          lt_opt *opt)
{
    bool list = lua_istable(L, index);
    lua_Unsigned n = list ? lua_rawlen(L, index) : 1;
    if (n > LT_MAX_DIMS || (list && n == 0))
        lt__refuse(L, s, "%s: option '%s' must have 1 to %d integers, but has %llu", schema->name,
                   schema->opt[k].name, LT_MAX_DIMS, (unsigned long long)n);
    for (int i = 0; i < (int)n; i++) {
        int whole = 0;
        if (list)
            lua_rawgeti(L, index, i + 1);
        else
            lua_pushvalue(L, index);
        if (lua_type(L, -1) == LUA_TNUMBER)
            opt->i[i] = lua_tointegerx(L, -1, &whole);
        if (!whole)
            lt__refuse(L, s, "%s: option '%s' requires integers, but got %s", schema->name,
                       schema->opt[k].name, lt__text(L, -1));
        if (schema->opt[k].position)
            opt->i[i] = to_position(L, s, schema, k, opt->i[i]);
        lua_pop(L, 1);
    }
    if (list) {
        lt__check_keys(L, s, index, n,
                       lua_pushfstring(L, "%s: option '%s'", schema->name, schema->opt[k].name),
                       "");
        lua_pop(L, 1);
    }
    opt->n = (uint8_t)n;
}

/* Sets opts[k] to the value at index. */
static void read_option(lua_State *L, lt_lua *s, const lt_schema *schema, int k, int index,
                        lt_opt *opts)
{
    lt_opt *opt = &opts[k];
    const char *name = schema->opt[k].name;
    if (opt->n > 0)
        lt__refuse(L, s, "%s: option '%s' is given twice", schema->name, name);
    switch ((lt_kind)opt->kind) {
    case LT_KIND_INTS: read_integers(L, s, schema, k, index, opt); return;
    case LT_KIND_NUMBER:
        if (lua_type(L, index) != LUA_TNUMBER)
            lt__refuse(L, s, "%s: option '%s' must be a number, but is %s", schema->name, name,
                       lt__text(L, index));
        if (lua_isinteger(L, index) && !lt__is_exact_double(lua_tointeger(L, index)))
            lt__refuse(L, s, "%s: option '%s' is a double, which cannot hold %s exactly",
                       schema->name, name, lt__text(L, index));
        opt->f = lua_tonumber(L, index);
        break;
    case LT_KIND_BOOL:
        if (!lua_isboolean(L, index))
            lt__refuse(L, s, "%s: option '%s' must be true or false, but is %s", schema->name, name,
                       lt__text(L, index));
        opt->i[0] = lua_toboolean(L, index);
        break;
    case LT_KIND_DTYPE: opt->i[0] = lt__check_dtype(L, s, index, schema->name); break;
    case LT_KIND_WORD:
        opt->i[0] = lt_schema_word(schema, k,
                                   lua_type(L, index) == LUA_TSTRING ? lua_tostring(L, index)
                                                                     : lt__text(L, index));
        if (opt->i[0] < 0)
            lt__raise(L, s);
        break;
    }
    opt->n = 1;
}

static void read_table(lua_State *L, lt_lua *s, const lt_schema *schema, int index, lt_opt *opts)
{
    lua_pushnil(L);
    while (lua_next(L, index)) {
        if (lua_type(L, -2) != LUA_TSTRING)
            lt__refuse(L, s, "%s: options in a table must have names, but got key %s", schema->name,
                       lt__text(L, -2));
        int k = lt_schema_find(schema, lua_tostring(L, -2));
        if (k < 0)
            lt__raise(L, s);
        read_option(L, s, schema, k, lua_gettop(L), opts);
        lua_pop(L, 1);
    }
}

void lt__check_options(lua_State *L, lt_lua *s, const lt_schema *schema, int index, lt_opt *opts)
{
    lt_opts_clear(schema, opts);
    read_table(L, s, schema, index, opts);
    lt__check(L, s, lt_opts_complete(schema, opts));
}

/* Whether the table at index contains options, not a list: it has a string key or no items. */
static bool has_names(lua_State *L, int index)
{
    bool names = lua_rawlen(L, index) == 0;
    lua_pushnil(L);
    while (lua_next(L, index)) {
        names |= lua_type(L, -2) == LUA_TSTRING;
        lua_pop(L, 1);
    }
    return names;
}

/* For a call with too many options, from argument `first` on. If they are integers and the op's
 * only option is a list, a hint such as "; write a list: {4, 12}"; else "". Pushes the string. */
static const char *list_hint(lua_State *L, const lt_schema *schema, int first)
{
    int top = lua_gettop(L);
    luaL_Buffer b;
    if (schema->n_opt != 1 || schema->opt[0].value.kind != LT_KIND_INTS ||
        strcmp(schema->opt[0].name, "axis") == 0)
        return "";
    for (int i = first; i <= top; i++)
        if (!lua_isinteger(L, i))
            return "";
    luaL_buffinit(L, &b);
    luaL_addstring(&b, "; write a list: {");
    for (int i = first; i <= top; i++) {
        luaL_addstring(&b, i > first ? ", " : "");
        lua_pushvalue(L, i);
        luaL_addvalue(&b);
    }
    luaL_addchar(&b, '}');
    luaL_pushresult(&b);
    return lua_tostring(L, -1);
}

/* Reads the options from argument first on. Returns false if there are none. */
static bool read_options(lua_State *L, lt_lua *s, const lt_schema *schema, int first, lt_opt *opts)
{
    int top = lua_gettop(L), n = top - first + 1;
    if (n <= 0)
        return false;
    lt_opts_clear(schema, opts);
    if (lua_istable(L, top) && has_names(L, top)) {
        read_table(L, s, schema, top, opts);
        n--;
    }
    if (n > schema->n_opt)
        lt__refuse(L, s, "%s: expected at most %d option%s, got %d%s", schema->name, schema->n_opt,
                   schema->n_opt == 1 ? "" : "s", n, list_hint(L, schema, first));
    for (int k = 0; k < n; k++)
        if (!lua_isnil(L, first + k))
            read_option(L, s, schema, k, first + k, opts);
    lt__check(L, s, lt_opts_complete(schema, opts));
    return true;
}

/* ==== Inputs ================================================================================== */

typedef struct inputs {
    int n;                     /* arguments that are inputs */
    lt_tensor *x[LT_MAX_LIST]; /* borrowed; NULL if absent or a number */
    uint64_t number;           /* bit i: input i is a number */
    lt_dtype dtype;    /* for numbers: dtype of the last tensor as the op reads it, or f32 */
    lt_device *device; /* for numbers: device of the last tensor, or the context's */
} inputs;

/* Whether the script itself calls this function by name. False if a file of luatrain, such as
 * nn.lua, calls it, and for an operator, as in {} - x. */
static bool is_called_by_script(lua_State *L)
{
    lua_Debug own, ar;
    return lua_getstack(L, 0, &own) && lua_getinfo(L, "n", &own) &&
           strcmp(own.namewhat, "metamethod") != 0 && lua_getstack(L, 1, &ar) &&
           lua_getinfo(L, "S", &ar) && !lt__is_embedded(&ar);
}

noreturn static void bad_input(lua_State *L, lt_lua *s, const lt_schema *schema, int i)
{
    const char *name = schema->in[i].name;
    if (schema->in[i].optional)
        lt__refuse(L, s,
                   "%s: %s must be a tensor or nil, but is %s; pass options in a table: {name = "
                   "value}",
                   schema->name, name, lt__text(L, i + 1));
    if (i == 0 && !lua_isnil(L, 1) && !schema->variadic && is_called_by_script(L))
        lt__refuse(L, s,
                   "%s: %s must be a tensor, but is %s; call a method with a colon, as in x:%s()",
                   schema->name, name, lt__text(L, 1), schema->name);
    lt__refuse(L, s, "%s: %s must be a tensor, but is %s", schema->name, name, lt__text(L, i + 1));
}

static void read_inputs(lua_State *L, lt_lua *s, const lt_def *def, inputs *in)
{
    const lt_schema *schema = &def->schema;
    int top = lua_gettop(L);
    bool any = false;
    in->n = 0;
    in->number = 0;
    in->dtype = LT_F32;
    in->device = s->ctx->device;
    for (int i = 0; i < (schema->variadic ? LT_MAX_LIST : schema->n_in); i++) {
        lt_tensor *x = lt__to_tensor(L, s, i + 1);
        bool optional = i >= schema->n_in || schema->in[i].optional;
        if (!x && i >= schema->n_in)
            break;
        if (!x && optional && (i >= top || (i + 1 == top && lua_istable(L, top))))
            break;
        in->x[in->n] = x;
        if (x) {
            any = true;
            in->dtype = lt_tensor_dtype(x);
            in->device = x->storage ? x->storage->device : in->device;
        } else if (!optional && lua_type(L, i + 1) == LUA_TNUMBER) {
            in->number |= 1ull << i;
        } else if (!optional || !lua_isnil(L, i + 1)) {
            bad_input(L, s, schema, i);
        }
        in->n++;
    }
    if (in->number && !any) /* x.sum(1) would be the sum of 1 */
        bad_input(L, s, schema, 0);
    if (def->op->to_floats && !lt__is_float(in->dtype))
        in->dtype = LT_F32;
    for (int i = 0; i < in->n; i++)
        if (in->number >> i & 1 && !lt__number_fits(L, i + 1, in->dtype))
            lt__refuse(L, s,
                       "%s: %s does not fit into the other tensor's %s; cast that tensor, e.g. "
                       "x:cast('f32')",
                       schema->name, lt__text(L, i + 1), lt_dtype_name(in->dtype));
}

/* For a variadic op: replaces a list of tensors in argument 1 by its items. A single tensor without
 * a list is an error, because it may be the truncated result of table.unpack(). */
static void spread_list(lua_State *L, lt_lua *s, const lt_schema *schema)
{
    const char *name = schema->name;
    if (lt__to_tensor(L, s, 1) && !lt__to_tensor(L, s, 2))
        lt__refuse(L, s,
                   "%s requires a list of tensors, as in lt.%s({a, b}, 1), but got one tensor "
                   "(table.unpack(t) before other arguments gives only t[1])",
                   name, name);
    if (lt__to_tensor(L, s, 1) && lt__to_tensor(L, s, lua_gettop(L)) && !schema->opt[0].value.n)
        lt__refuse(L, s,
                   "%s: option '%s' is missing; pass the tensors in a list, as in lt.%s({a, b}, 1)",
                   name, schema->opt[0].name, name);
    if (!lua_istable(L, 1))
        return;
    lua_Unsigned n = lua_rawlen(L, 1);
    if (n == 0 || n > LT_MAX_LIST)
        lt__refuse(L, s, "%s requires a list of 1 to %d tensors, but got %llu", name, LT_MAX_LIST,
                   (unsigned long long)n);
    int max = (int)n;
    for (lua_pushnil(L); lua_next(L, 1); lua_pop(L, 1)) {
        if (lua_type(L, -2) != LUA_TNUMBER)
            lt__refuse(L, s,
                       "%s: the list of tensors has a key %s; options follow the list, as in "
                       "lt.%s({a, b}, {...})",
                       name, lt__text(L, -2), name);
        if (!lua_isinteger(L, -2) || lua_tointeger(L, -2) < 1)
            lt__refuse(L, s, "%s: the list of tensors has a key %s; its items count from 1", name,
                       lt__text(L, -2));
        if (lua_tonumber(L, -2) > max) /* the list has a hole */
            max++;
    }
    luaL_checkstack(L, max + 1, NULL);
    for (int i = 1; i <= max; i++) {
        lua_rawgeti(L, 1, i);
        if (!lt__to_tensor(L, s, lua_gettop(L)))
            lt__refuse(L, s, "%s: item %d of the list must be a tensor, but is %s", name, i,
                       lt__text(L, lua_gettop(L)));
    }
    lua_rotate(L, 2, (int)n);
    lua_remove(L, 1);
}

/* Fetches the input pointers again: pushing the outputs may have run a finalizer that closed an
 * input. Raises in that case. */
static void refetch_inputs(lua_State *L, lt_lua *s, inputs *in)
{
    for (int i = 0; i < in->n; i++)
        if (in->x[i])
            in->x[i] = lt__to_tensor(L, s, i + 1);
}

/* Creates tensors for the inputs that are numbers; release_numbers() releases them. On failure,
 * in->number has only the bits of those already created. */
static lt_status make_numbers(lua_State *L, lt_lua *s, inputs *in)
{
    for (int i = 0; i < in->n; i++) {
        if (!(in->number >> i & 1))
            continue;
        lt_tensor *x = lt__tensor_new(s->ctx, in->device, in->dtype, 0, NULL, false);
        if (!x || lt__fill_with(L, i + 1, x) != LT_OK) {
            lt_release(x);
            in->number &= (1ull << i) - 1;
            return lt_errcode();
        }
        in->x[i] = x;
    }
    return LT_OK;
}

static void release_numbers(inputs *in)
{
    for (int i = 0; in->number >> i; i++)
        if (in->number >> i & 1)
            lt_release(in->x[i]);
}

/* ==== The call ================================================================================ */

static const char key_observer; /* its address is the registry key of the observer */

/* Reports a finished op to the observer, if there is one. The stack contains the arguments, from
 * index 1, and then the outputs. */
static void call_observer(lua_State *L, const char *name, int n_args, int n_out)
{
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &key_observer) != LUA_TFUNCTION) {
        lua_pop(L, 1);
        return;
    }
    luaL_checkstack(L, n_args + 2, NULL);
    lua_pushstring(L, name);
    if (n_out > 0)
        lua_pushvalue(L, n_args + 1);
    else
        lua_pushnil(L);
    for (int i = 1; i <= n_args; i++)
        lua_pushvalue(L, i);
    lua_call(L, n_args + 2, 0);
}

/* calls_of_cross_entropy(): returns the number of calls of cross_entropy since this function was
 * last called. */
static int calls_of_cross_entropy(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lua_pushinteger(L, s->n_cross_entropy);
    s->n_cross_entropy = 0;
    return 1;
}

/* LT_EINVAL inside lt.on_root if the op would move a value to another stage of the pipeline. */
static lt_status check_on_root(const lt_lua *s, const lt_def *def, const inputs *in)
{
    if (!s->on_root || !lt_moves_values(s->ctx, in->x, in->n))
        return LT_OK;
    return lt_fail(LT_EINVAL,
                   "%s: in a pipeline, computing on another stage requires all ranks, but "
                   "lt.on_root runs on rank 0 only",
                   def->schema.name);
}

/* Calls the op of upvalue 2, an lt_def. */
static int call(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    const lt_def *def = lua_touserdata(L, lua_upvalueindex(2));
    inputs in;
    lt_opt opts[LT_MAX_OPT];
    lt_tensor **box[LT_MAX_OUT], *out[LT_MAX_OUT];
    if (def->schema.variadic)
        spread_list(L, s, &def->schema);
    int n_out = lt_op_outputs(def->op), n_args = lua_gettop(L);
    read_inputs(L, s, def, &in);
    bool options = read_options(L, s, &def->schema, in.n + 1, opts);
    luaL_checkstack(L, LT_MAX_OUT + 4, NULL);
    for (int i = 0; i < n_out; i++)
        box[i] = lt__push_box(L, s);
    refetch_inputs(L, s, &in);

    lua_State *outer = s->running;
    s->running = L;
    lt_status status = make_numbers(L, s, &in);
    if (status == LT_OK)
        status = check_on_root(s, def, &in);
    if (status == LT_OK)
        status = lt_apply(s->ctx, def, in.x, in.n, options ? opts : NULL, out);
    release_numbers(&in);
    s->running = outer;
    lt__check(L, s, lt__name_line(L, status));
    for (int i = 0; i < n_out; i++)
        lt__fill_box(L, s, box[i], out[i]);
    call_observer(L, def->schema.name, n_args, n_out);
    return n_out;
}

/* Lua calls __unm with x twice. */
static int negate(lua_State *L)
{
    lua_settop(L, 1);
    return call(L);
}

static int cross_entropy(lua_State *L)
{
    lt__lua(L)->n_cross_entropy++;
    return call(L);
}

static void push_op(lua_State *L, const lt_def *def, lua_CFunction function)
{
    lt__push_lua(L);
    lua_pushlightuserdata(L, (void *)def);
    lua_pushcclosure(L, function, 2);
}

/* Ops that write their inputs, as optimizers use them, are not part of the Lua API. */
static bool is_public(const lt_def *def) { return !def->op->in_place; }

/* The public op of this name. Raises an error with a suggestion if there is none. */
static const lt_def *public_op(lua_State *L, lt_lua *s, const char *name)
{
    enum { ROOM = 400 };
    const char *names[ROOM];
    const lt_def *def;
    int n = 0;
    for (int i = 0; n < ROOM && (def = lt_op_at(s->ctx, i)) != NULL; i++) {
        if (!is_public(def))
            continue;
        if (strcmp(def->schema.name, name) == 0)
            return def;
        names[n++] = def->schema.name;
    }
    lt__refuse(L, s, "unknown op '%s'%s", name, lt__hint(L, name, names, n, ""));
}

/* help(name): returns the signature and the description of an op. */
static int help(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    const char *name = lua_tostring(L, 1);
    if (!name)
        lt__refuse(L, s, "help requires the name of an op, but got %s", lt__text(L, 1));
    const lt_def *def = public_op(L, s, name);
    lua_pushfstring(L, "%s\n%s", def->op->sig, def->op->doc);
    return 1;
}

/* ==== Inspection ============================================================================== */

/* observe(f): calls f(name, first output, arguments...) after each op; nil removes the observer. */
static int observe(lua_State *L)
{
    lua_settop(L, 1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &key_observer);
    return 0;
}

/* saved(x, i): returns tensor i, from 1, that the op which made x saved for backward; or nil. */
static int saved(lua_State *L)
{
    int i = (int)luaL_checkinteger(L, 2) - 1;
    lt_tensor **box = lt__push_box(L, lt__lua(L));
    lt__box_retain(L, box, lt_saved(lt__self(L, "saved"), i));
    return 1;
}

/* memory_of(x): returns the storage of x as a light userdata, equal for tensors that share it, and
 * its size in bytes. */
static int memory_of(lua_State *L)
{
    const lt_tensor *x = lt__self(L, "memory_of");
    lua_pushlightuserdata(L, x->storage);
    lua_pushinteger(L, x->storage ? (lua_Integer)x->storage->bytes : 0);
    return 2;
}

static const luaL_Reg functions[] = {{"lt.help(name: string) -> string "
                                      "-- lt.help \"conv2d\": the op's signature and description",
                                      help},
                                     LT_FN(observe),
                                     LT_FN(saved),
                                     LT_FN(memory_of),
                                     LT_FN(calls_of_cross_entropy),
                                     {NULL, NULL}};

/* Adds the ops to the table ops of the core and to the tensor methods, the ops that are not public
 * to the table in_place_ops of the core, and the operators to the metatable. */
void lt__open_ops(lua_State *L, lt_lua *s)
{
    static const char *const operators[][2] = {
        {"__add", "add"},           {"__sub", "sub"}, {"__mul", "mul"}, {"__div", "div"},
        {"__idiv", "floor_divide"}, {"__pow", "pow"}, {"__unm", "neg"}};
    const lt_def *def;
    int core = lua_gettop(L);
    lt__register(L, functions);
    lua_getfield(L, core, "tensor_methods");
    lua_newtable(L);
    lua_newtable(L);
    for (int i = 0; (def = lt_op_at(s->ctx, i)) != NULL; i++) {
        const char *name = def->schema.name;
        push_op(L, def, strcmp(name, "cross_entropy") == 0 ? cross_entropy : call);
        if (is_public(def)) {
            lua_pushvalue(L, -1);
            lua_setfield(L, -5, name); /* a method */
        }
        lua_setfield(L, is_public(def) ? -3 : -2, name);
    }
    lua_setfield(L, core, "in_place_ops");
    lua_setfield(L, core, "ops");
    lua_getfield(L, core, "tensor_meta");
    for (size_t i = 0; i < sizeof operators / sizeof *operators; i++) {
        def = lt_op_find(s->ctx, operators[i][1]);
        if (!def)
            lt__raise(L, s);
        push_op(L, def, strcmp(operators[i][1], "neg") == 0 ? negate : call);
        lua_setfield(L, -2, operators[i][0]);
    }
    lua_settop(L, core);
}
