/* amp.c - the loss scale and the wire scales for scaler.lua, and the injected fault that tests
 * them.
 */
#include <math.h>

#include "core/tensor.h"
#include "lua/bind/bind.h"
#include "lua/bind/field.h"

static const char class[] = "luatrain.LossScale";
static const char key_used; /* its address is the registry key of the loss scale in use */

/* The saved fields of a scaler: X(field, Lua type). */
/* clang-format off */
#define FIELDS(X)                                                                                  \
    X(policy, integer) X(k, integer) X(interval, integer) X(good, integer) X(headroom, integer)  \
    X(since, integer) X(steps, integer) X(skipped, integer) X(in_a_row, integer)                   \
    X(at_floor, integer)                                                                           \
    X(mean, number) X(variance, number) X(old_mean, number) X(old_variance, number)
/* clang-format on */

static const char *const policies[] = {[LT_SCALE_ADAPTIVE] = "adaptive",
                                       [LT_SCALE_DYNAMIC] = "dynamic",
                                       [LT_SCALE_STATIC] = "static",
                                       NULL};

/* new_loss_scale(policy, k, interval): a scale of 2^k; policy is one of core.policies. */
static int new_loss_scale(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_scaler scaler = lt_scaler_init((lt_scale_policy)luaL_checkoption(L, 1, NULL, policies),
                                      (int)luaL_checkinteger(L, 2), (int)luaL_checkinteger(L, 3));
    void **handle = lt__push_handle(L, class);
    lt__fill_handle(L, handle, lt_loss_scale_new(s->ctx, &scaler));
    return 1;
}

/* Makes scale the loss scale in use; NULL for none. */
static lt_status use(lt_lua *s, lt_loss_scale *scale)
{
    LT_TRY(s->reducer ? lt_reducer_use_loss_scale(s->reducer, scale, &s->wire_scales)
                      : lt_use_loss_scale(s->ctx, scale));
    s->scale = scale;
    return LT_OK;
}

/* The registry keeps the scale in use, so it is collected only when the state closes. */
static int loss_scale_gc(lua_State *L)
{
    void **handle = lua_touserdata(L, 1);
    lt_lua *s = lt__lua(L);
    if (*handle && *handle == s->scale) {
        lt_status status = use(s, NULL); /* no backward is running */
        (void)status;
    }
    lt_loss_scale_free(*handle);
    *handle = NULL;
    return 0;
}

/* use_loss_scale(scale or nil): returns the scale that was in use before, or nil. */
static int use_loss_scale(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lua_settop(L, 1);
    lt_loss_scale *scale = lua_isnil(L, 1) ? NULL : lt__check_handle(L, class);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &key_used);
    lt__check(L, s, lt__name_line(L, use(s, scale)));
    lua_pushvalue(L, 1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &key_used);
    return 1;
}

/* Waits until no bucket is in flight: the group's thread reads and writes the scales. */
static void wait_for_buckets(const lt_lua *s)
{
    lt_group *replicas = s->pipeline ? lt_pipeline_group(s->pipeline) : NULL;
    lt_group *group = replicas ? replicas : s->group;
    lt_status status = group ? lt_group_wait(group) : LT_OK;
    (void)status; /* the next step reports the failure */
}

/* scale:state(): returns the fields of the scaler as a table. */
static int state(lua_State *L)
{
    lt_loss_scale *scale = lt__check_handle(L, class);
    const lt_scaler *scaler = lt_loss_scale_scaler(scale);
    lua_newtable(L);
#define X(field, kind)                                                                             \
    lua_push##kind(L, scaler->field);                                                              \
    lua_setfield(L, -2, #field);
    FIELDS(X)
#undef X
    return 1;
}

typedef lua_Integer value_integer;
typedef lua_Number value_number;

/* scale:load(table): restores a table from scale:state(); no field may be missing. */
static int load(lua_State *L)
{
    lt_loss_scale *scale = lt__check_handle(L, class);
    lt_scaler from = {0};
    int is;
#define X(field, kind)                                                                             \
    if (lua_getfield(L, 2, #field) == LUA_TNIL)                                                    \
        lt__refuse(L, lt__lua(L), "scaler:load: the state has no '%s'", #field);                   \
    value_##kind field = lua_to##kind##x(L, -1, &is);                                              \
    from.field = field;                                                                            \
    if (!is || (value_##kind)from.field != field)                                                  \
        lt__refuse(L, lt__lua(L), "'%s' of a scaler is out of range", #field);                     \
    lua_pop(L, 1);
    FIELDS(X)
#undef X
    lt__check(L, lt__lua(L), lt_scaler_check(&from));
    wait_for_buckets(lt__lua(L));
    *lt_loss_scale_scaler(scale) = from;
    return 0;
}

/* scale:latest(): returns the number of the last step, without waiting for the device. */
static int latest(lua_State *L)
{
    return lt__return_integer(L, lt_loss_scale_latest_number(lt__check_handle(L, class)));
}

/* scale:last(number): describes the step with this number; without a number, the last step. Returns
 * the exponent of its scale; its headroom in bits, or nil if the gradients were all zero or not
 * finite; and the number of steps skipped so far, up to this one. */
static int last(lua_State *L)
{
    lt_loss_scale *scale = lt__check_handle(L, class);
    lt_scaled_step step = lua_isnoneornil(L, 2)
                              ? lt_loss_scale_step(scale)
                              : lt_loss_scale_step_at(scale, luaL_checkinteger(L, 2));
    lua_pushinteger(L, step.k);
    if (step.finite && step.exponent != LT_NO_EXPONENT)
        lua_pushinteger(L, 15 - step.exponent);
    else
        lua_pushnil(L);
    lua_pushinteger(L, step.skipped);
    return 3;
}

/* loss_scale(): returns the loss scale in use as a number, or 1 if there is none. */
static int loss_scale(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    return lt__return_number(L, s->scale ? ldexp(1, lt_loss_scale_scaler(s->scale)->k) : 1);
}

/* fault(): describes the fault that LUATRAIN_FAULT sets: the name of the parameter whose gradient
 * gets an inf, the rank, the step (from 1), and whether the inf was injected. Returns nothing
 * without a fault. */
static int fault(lua_State *L)
{
    const lt_inf_fault *inf = &lt__lua(L)->ctx->inf;
    if (inf->step == 0)
        return 0;
    lua_pushstring(L, inf->param);
    lua_pushinteger(L, inf->rank);
    lua_pushinteger(L, inf->step);
    lua_pushboolean(L, inf->injected);
    return 4;
}

/* arm_fault(parameter, rank): registers the parameter that the fault names, and this rank. */
static int arm_fault(lua_State *L)
{
    lt_grad_fault(lt__self(L, "arm_fault"), (int)luaL_checkinteger(L, 2));
    return 0;
}

/* scale:now(): returns the exponent of the scale, the number of steps so far, and how many of them
 * were skipped. */
static int now(lua_State *L)
{
    lt_loss_scale *scale = lt__check_handle(L, class);
    const lt_scaler *scaler = lt_loss_scale_scaler(scale);
    return lt__return_integers(L, scaler->k, scaler->steps, scaler->skipped);
}

/* wire_scales(): returns the state of the wire scales as a table to save; empty if buckets do not
 * travel in f16. */
static int wire_scales(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    lua_newtable(L);
    if (s->reducer_config.wire != LT_F16)
        return 1;
    wait_for_buckets(s);
    for (int i = 0; i < s->wire_scales.used; i++) {
        lua_pushfstring(L, "bucket%d", i + 1);
        lua_pushinteger(L, s->wire_scales.exponent[i]);
        lua_rawset(L, -3);
    }
    lt__set_integer(L, "resends", s->wire_scales.resends);
    return 1;
}

/* If the field of the table at 1 is an integer from low to high, stores it in *value and returns
 * true. */
static bool get_within(lua_State *L, const char *name, lua_Integer low, lua_Integer high,
                       lua_Integer *value)
{
    int is_integer;
    lua_getfield(L, 1, name);
    lua_Integer got = lua_tointegerx(L, -1, &is_integer);
    lua_pop(L, 1);
    if (!is_integer || got < low || got > high)
        return false;
    *value = got;
    return true;
}

/* restore_wire_scales(table): restores a table from wire_scales(). Missing or invalid entries get
 * their initial values. */
static int restore_wire_scales(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_wire_scales next = lt_wire_scales_init();
    lua_Integer value;
    for (int i = 0; i < LT_WIRE_SCALE_COUNT; i++) {
        char name[20];
        snprintf(name, sizeof name, "bucket%d", i + 1);
        if (!get_within(L, name, LT_WIRE_SCALE_MIN, LT_WIRE_SCALE_MAX, &value))
            continue;
        next.exponent[i] = (int)value;
        next.used = i + 1;
    }
    if (get_within(L, "resends", 0, (lua_Integer)1 << 53, &value))
        next.resends = value;
    wait_for_buckets(s);
    s->wire_scales = next;
    return 0;
}

static const luaL_Reg methods[] = {LT_FN(now),    LT_FN(state), LT_FN(load),
                                   LT_FN(latest), LT_FN(last),  {NULL, NULL}};

static const luaL_Reg functions[] = {
    LT_FN(new_loss_scale),      LT_FN(use_loss_scale), LT_FN(loss_scale), LT_FN(wire_scales),
    LT_FN(restore_wire_scales), LT_FN(fault),          LT_FN(arm_fault),  {NULL, NULL}};

void lt__open_amp(lua_State *L)
{
    lt__register(L, functions);
    lt__push_string_list(L, policies, LT_SCALE_STATIC + 1);
    lua_setfield(L, -2, "policies");
    lt__new_class(L, class, methods, loss_scale_gc);
}
