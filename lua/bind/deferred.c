/* deferred.c - deferred scalars, and synchronization with the device. */
#include "core/tensor.h"
#include "lua/bind/bind.h"

static const char class[] = "luatrain.Deferred";

LT_FINALIZER(deferred_gc, lt_deferred_free)

/* deferred(tensor): starts to copy the tensor's only element to the host, with its current value.
 * Returns a deferred scalar. */
static int deferred(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    void **h = lt__push_handle(L, class);
    lt__fill_handle(L, h, lt_item_deferred(lt__check_tensor(L, s, 1, "deferred", "the number")));
    return 1;
}

/* deferred:number(): waits until the copy is done and returns the number. */
static int number(lua_State *L)
{
    double value;
    lt__check(L, lt__lua(L), lt_deferred_item(lt__check_handle(L, class), &value));
    lt__push_number(L, value);
    return 1;
}

/* sync(): waits until all work on the device is done and all deferred checks are known. */
static int sync(lua_State *L)
{
    lt_ctx *ctx = lt__lua(L)->ctx;
    lt__check(L, lt__lua(L), lt_synchronize(ctx));
    return lt__done(L, ctx->device->sync(ctx->device));
}

static const luaL_Reg methods[] = {LT_FN(number), {NULL, NULL}};

static const luaL_Reg functions[] = {LT_FN(deferred), LT_FN(sync), {NULL, NULL}};

void lt__open_deferred(lua_State *L)
{
    lt__register(L, functions);
    lt__new_class(L, class, methods, deferred_gc);
}
