/* optim.c - parameters and optimizers.
 *
 * Functions that are not methods are called only by the embedded Lua files, so they take plain
 * lists.
 */
#include "autograd/stages.h"
#include "core/tensor.h"
#include "lua/bind/bind.h"

/* ==== Parameters ============================================================================== */

/* new_parameter(dims, kind, a, b, buffer): kind is "constant", "uniform" or "normal", with a and b
 * as in lt_init. If buffer is true, creates a buffer. */
static int new_parameter(lua_State *L)
{
    static const char *const kinds[] = {"constant", "uniform", "normal", NULL};
    lt_lua *s = lt__lua(L);
    int64_t dims[LT_MAX_DIMS];
    int ndim = lt__check_dims(L, s, 1, "nn.parameter", dims);
    lt_init init = {(lt_init_kind)luaL_checkoption(L, 2, NULL, kinds), luaL_checknumber(L, 3),
                    luaL_optnumber(L, 4, 0)};
    bool buffer = lua_toboolean(L, 5);
    lt_tensor **box = lt__push_box(L, s);
    lt_tensor *x = buffer ? lt_buffer_new(s->ctx, LT_F32, ndim, dims, init)
                          : lt_param_new(s->ctx, LT_F32, ndim, dims, init);
    if (!x)
        lt__raise(L, s);
    *box = x;
    return 1;
}

/* role(value): returns "parameter", "buffer" or nil, for a value of any type. */
static int role(lua_State *L)
{
    lt_tensor *x = lt__to_tensor(L, lt__lua(L), 1);
    return lt__return_string(L, !x                ? NULL
                                : lt_is_param(x)  ? "parameter"
                                : lt_is_buffer(x) ? "buffer"
                                                  : NULL);
}

/* tensor_version(tensor): returns the number of in-place writes to its memory. */
static int tensor_version(lua_State *L)
{
    const lt_tensor *x = lt__self(L, "tensor_version");
    return lt__return_integer(L, x->storage ? (lua_Integer)atomic_load(&x->storage->version) : 0);
}

static int set_dtype(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    return lt__done(L, lt_param_set_dtype(lt__self(L, "to"), lt__check_dtype(L, s, 2, "to")));
}

/* Builds an lt_params from the names at 1 and the tensors at 2. New; NULL on failure. */
static lt_params *named_params(lua_State *L, lt_lua *s, const char *who)
{
    const char **names;
    lt_tensor **tensors;
    int n = lt__check_named(L, s, 1, who, &names, &tensors);
    lt_params *p = lt_params_new(s->ctx);
    for (int i = 0; p && i < n; i++)
        if (lt_params_add(p, names[i], tensors[i]) != LT_OK) {
            lt_params_free(p);
            p = NULL;
        }
    return p;
}

/* place(names, tensors): allocates memory for all pending tensors. */
static int place(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_params *p = named_params(L, s, "net");
    lt_status status = p ? lt_params_place(p) : lt_errcode();
    lt_params_free(p);
    return lt__done(L, status);
}

static int sha256(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    char hex[65];
    if (s->profile) { /* the script runs before the training, and the net has no values */
        lua_pushliteral(L, "0000000000000000000000000000000000000000000000000000000000000000");
        return 1;
    }
    if (s->pipeline && s->on_root)
        lt__refuse(L, s,
                   "in a pipeline, sha256 requires all ranks, but lt.on_root runs on rank 0 "
                   "only");
    lt_params *p = named_params(L, s, "sha256");
    lt_status status = !p            ? lt_errcode()
                       : s->pipeline ? lt_pipeline_sha256(s->pipeline, p, hex)
                                     : lt_params_sha256(p, hex);
    lt_params_free(p);
    lt__check(L, s, status);
    return lt__return_string(L, hex);
}

/* freeze(names, tensors, on): freezes or unfreezes parameters. */
static int freeze(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_params *p = named_params(L, s, "freeze");
    lt_status status = p ? LT_OK : lt_errcode();
    for (int i = 0; status == LT_OK && i < lt_params_count(p); i++)
        status = lt_params_freeze(p, i, lua_toboolean(L, 3));
    lt_params_free(p);
    return lt__done(L, status);
}

/* ==== Optimizers ============================================================================== */

const char lt__optim_class[] = "luatrain.Optim";

LT_FINALIZER(optim_gc, lt_optim_free)

/* new_optim(update, parameters) */
static int new_optim(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    const char *update = luaL_checkstring(L, 1);
    int n;
    void **h = lt__push_handle(L, lt__optim_class);
    lt_tensor **params = lt__check_tensors(L, s, 2, "optim", "a parameter", &n);
    lt__fill_handle(L, h, lt_optim_new(s->ctx, update, params, n));
    lua_pop(L, 1); /* the array */
    return 1;
}

/* optim:set_group(parameter, group): groups count from 1. */
static int optim_set_group(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_optim *o = lt__check_handle(L, lt__optim_class);
    lt_tensor *x = lt__check_tensor(L, s, 2, "optim", "a parameter");
    return lt__done(L, lt_optim_set_group(o, x, (int)luaL_checkinteger(L, 3) - 1));
}

static const char *const step_statuses[] = {[LT_APPLIED] = "applied",
                                            [LT_SKIPPED] = "skipped",
                                            [LT_ACCUMULATING] = "accumulating",
                                            [LT_PENDING] = "pending"};

/* optim:step({options of group 1, options of group 2, ...}, clip): takes a step and returns its
 * step status: "applied", "skipped", "accumulating" if more of the batch follows, or "pending" if
 * the device has not decided yet. clip is the maximum norm of the gradients, 0 for none. With clip,
 * also returns the square of the norm before clipping, as a tensor of one element. */
static int optim_step(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    int n = (int)luaL_len(L, 2);
    lt_opt *values = lua_newuserdatauv(L, (size_t)n * LT_MAX_OPT * sizeof *values, 0);
    const lt_opt **options = lua_newuserdatauv(L, (size_t)n * sizeof *options, 0);
    lt_optim *o = lt__check_handle(L, lt__optim_class);
    const lt_schema *schema = &lt_optim_def(o)->schema;
    for (int g = 0; g < n; g++) {
        lua_rawgeti(L, 2, g + 1);
        options[g] = values + (size_t)g * LT_MAX_OPT;
        lt__check_options(L, s, schema, lua_gettop(L), values + (size_t)g * LT_MAX_OPT);
        lua_pop(L, 1);
    }
    if (s->needs_async && !s->is_async)
        lt__refuse(
            L, s,
            "with --parallel async=RULE, an optimizer step requires a batch of run:batches() "
            "or set:batches{shuffle = true}, but this one has none");
    if (s->joined_pipeline && !s->pipeline && !s->reducer)
        lt__refuse(L, s,
                   "--parallel pipe=P: the script called os.exit() in the profile, before its "
                   "first backward pass, so there is no plan");
    lt__check_micro_batches(L, s, "an optimizer step", "");
    lt_step_status step_status = LT_APPLIED;
    double clip = luaL_checknumber(L, 3);
    lt_tensor **box = lt__push_box(L, s), *squares = NULL;
    double start = lt__seconds();
    lt__group_set_location(L);
    lt_status status = lt_optim_step_clipped(o, options, n, clip, &squares, &step_status);
    s->optimizer_s += lt__seconds() - start;
    lt_trace(s->ctx, LT_TRACK_STEP, "optimizer", start, lt__seconds() - start);
    lt__check(L, s, lt__name_line(L, status));
    if (step_status == LT_ACCUMULATING) {
        s->done_parts = s->part > 0 ? s->part : 1;
    } else {
        s->part = s->parts = s->done_parts = 0;
        s->has_grads = false;
    }
    lua_pushstring(L, step_statuses[step_status]);
    if (!squares)
        return 1;
    lt__fill_box(L, s, box, squares);
    lua_rotate(L, -2, 1);
    return 2;
}

/* optim:mixed([parameter]): whether lt_optim_mixed() is the parameter, or any parameter. */
static int optim_mixed(lua_State *L)
{
    const lt_tensor *x = lt_optim_mixed(lt__check_handle(L, lt__optim_class));
    return lt__return_boolean(
        L, x && (lua_isnoneornil(L, 2) ||
                 x == lt__check_tensor(L, lt__lua(L), 2, "optim", "a parameter")));
}

/* optim:has_grads(): whether a parameter has a gradient. */
static int optim_has_grads(lua_State *L)
{
    const lt_optim *o = lt__check_handle(L, lt__optim_class);
    bool any = false;
    for (int i = 0; i < lt_optim_count(o); i++)
        any |= lt_optim_has_grad(o, i);
    return lt__return_boolean(L, any);
}

/* optim:step_status(): returns the status of the last step. Waits for the device, so it is never
 * "pending". */
static int optim_step_status(lua_State *L)
{
    return lt__return_string(
        L, step_statuses[lt_optim_step_status(lt__check_handle(L, lt__optim_class))]);
}

/* optim:slot(k, parameter): returns slot k, from 1, of the parameter, and the name of the slot;
 * nothing after the last. */
static int optim_slot(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    int k = (int)luaL_checkinteger(L, 2) - 1;
    lt_tensor **box = lt__push_box(L, s);
    lt_optim *o = lt__check_handle(L, lt__optim_class);
    const char *name = lt_optim_slot_name(o, k);
    lt_tensor *x = lt__check_tensor(L, s, 3, "optim", "a parameter");
    if (!name)
        return 0;
    lt__fill_box(L, s, box, lt_optim_slot(o, k, x));
    lua_pushstring(L, name);
    return 2;
}

/* optim:steps(parameter): returns the number of steps of the parameter, as an i64 scalar. In a
 * pipeline, the scalar is on the stage of the parameter. */
static int optim_steps(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_tensor **box = lt__push_box(L, s);
    lt_optim *o = lt__check_handle(L, lt__optim_class);
    lt_tensor *x = lt__check_tensor(L, s, 2, "optim", "a parameter");
    int64_t steps = lt_optim_steps(o, x);
    if (steps < 0)
        lt__raise(L, s);
    lt__fill_box(L, s, box,
                 lt_is_meta(x)
                     ? lt__tensor_remote(x, LT_I64, 0, NULL, false)
                     : lt__tensor_inherit(lt_tensor_from(s->ctx, LT_I64, 0, NULL, &steps), x));
    return 1;
}

/* optim:set_steps(parameter, n) */
static int optim_set_steps(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_optim *o = lt__check_handle(L, lt__optim_class);
    lt_tensor *x = lt__check_tensor(L, s, 2, "optim", "a parameter");
    return lt__done(L, lt_optim_set_steps(o, x, luaL_checkinteger(L, 3)));
}

static const luaL_Reg methods[] = {
    LT_METHOD(optim, set_group), LT_METHOD(optim, steps),       LT_METHOD(optim, set_steps),
    LT_METHOD(optim, mixed),     LT_METHOD(optim, has_grads),   LT_METHOD(optim, step),
    LT_METHOD(optim, slot),      LT_METHOD(optim, step_status), {NULL, NULL}};

static const luaL_Reg functions[] = {LT_FN(new_parameter), LT_FN(role),      LT_FN(tensor_version),
                                     LT_FN(set_dtype),     LT_FN(place),     LT_FN(sha256),
                                     LT_FN(freeze),        LT_FN(new_optim), {NULL, NULL}};

void lt__open_optim(lua_State *L)
{
    lt__register(L, functions);
    lt__new_class(L, lt__optim_class, methods, optim_gc);
}
