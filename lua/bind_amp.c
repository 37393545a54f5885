/* bind_amp.c - the loss scale, for scaler.lua; and the fault that puts it to the test. */
#include "core/tensor.h"
#include "lua/bind.h"

static const char class[] = "luatrain.LossScale";
static const char key_used; /* its address is the key in the registry of the one in use */

/* What is saved of a scaler: X(field, type to push it as). */
#define FIELDS(X)                                                                                  \
    X(policy, integer) X(k, integer) X(interval, integer) X(good, integer) X(since, integer)       \
    X(steps, integer) X(skipped, integer) X(in_a_row, integer) X(mean, number) X(variance, number) \
    X(old_mean, number) X(old_variance, number)

/* The one in use is in the registry: it goes when the state does. */
static int gone(lua_State *L)
{
    void **handle = lua_touserdata(L, 1);
    lt_lua *s = lt__lua(L);
    if (*handle && *handle == s->scale) {
        s->scale = NULL;
        lt_status status = lt_use_loss_scale(s->ctx, NULL); /* no backward is running */
        (void)status;
    }
    lt_loss_scale_free(*handle);
    *handle = NULL;
    return 0;
}

/* new_loss_scale(policy, k, interval): policy is "adaptive", "dynamic" or "static". */
static int new_loss_scale(lua_State *L)
{
    static const char *const policies[] = {"adaptive", "dynamic", "static", NULL};
    lt_lua *s = lt__lua(L);
    lt_scaler scaler = lt_scaler_begin((lt_scale_policy)luaL_checkoption(L, 1, NULL, policies),
                                       (int)luaL_checkinteger(L, 2), (int)luaL_checkinteger(L, 3));
    void **handle = lt__push_handle(L, class);
    lt__fill_handle(L, handle, lt_loss_scale_new(s->ctx, &scaler));
    return 1;
}

/* use_loss_scale(scale or nil): the one that was in use before, or nil. */
static int use_loss_scale(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lua_settop(L, 1);
    lt_loss_scale *scale = lua_isnil(L, 1) ? NULL : lt__check_handle(L, class);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &key_used);
    lt__check(L, s, lt_use_loss_scale(s->ctx, scale));
    s->scale = scale;
    lua_pushvalue(L, 1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &key_used);
    return 1;
}

/* scale:state(): its scaler, by the names of the fields. */
static int state(lua_State *L)
{
    const lt_scaler *scaler = lt_loss_scale_scaler(lt__check_handle(L, class));
    lua_newtable(L);
#define X(field, kind)                                                                             \
    lua_push##kind(L, scaler->field);                                                              \
    lua_setfield(L, -2, #field);
    FIELDS(X)
#undef X
    return 1;
}

/* scale:load(table): such a table, whole. */
static int load(lua_State *L)
{
    lt_scaler *scaler = lt_loss_scale_scaler(lt__check_handle(L, class));
    lt_scaler from = {0};
#define X(field, kind)                                                                             \
    lua_getfield(L, 2, #field);                                                                    \
    from.field = luaL_check##kind(L, -1);                                                          \
    lua_pop(L, 1);
    FIELDS(X)
#undef X
    *scaler = from;
    return 0;
}

/* scale:last(): of the last step the exponent of its scale; the bits that gradients had to spare,
 * or nil if they were all zero or not finite; how many numbers were lost. */
static int last(lua_State *L)
{
    lt_scaled_step step = lt_loss_scale_step(lt__check_handle(L, class));
    lua_pushinteger(L, step.k);
    if (step.finite && step.exponent != LT_NO_EXPONENT)
        lua_pushinteger(L, 15 - step.exponent);
    else
        lua_pushnil(L);
    lua_pushinteger(L, (lua_Integer)step.lost);
    return 3;
}

/* fault(): the name of the parameter whose gradient is to get an inf, and the rank; or nothing. */
static int fault(lua_State *L)
{
    const lt_inf_fault *inf = &lt__lua(L)->ctx->inf;
    if (inf->step == 0)
        return 0;
    lua_pushstring(L, inf->param);
    lua_pushinteger(L, inf->rank);
    return 2;
}

/* find_fault(parameter, rank): it is that one, on this rank. */
static int find_fault(lua_State *L)
{
    lt_grad_fault(lt__self(L, "find_fault"), (int)luaL_checkinteger(L, 2));
    return 0;
}

static const luaL_Reg methods[] = {{"state", state}, {"load", load}, {"last", last}, {NULL, NULL}};
static const luaL_Reg functions[] = {
    {"new_loss_scale", new_loss_scale}, {"use_loss_scale", use_loss_scale},
    {"fault", fault}, {"find_fault", find_fault}, {NULL, NULL}};

void lt__open_amp(lua_State *L)
{
    int core = lua_gettop(L);
    lt__register(L, functions);
    lt__new_class(L, class, methods, gone);
    lua_settop(L, core);
}
