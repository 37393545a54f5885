/* later.c - numbers that are read later, and waiting for an accelerator. */
#include "core/tensor.h"
#include "lua/bind/bind.h"

static const char class[] = "luatrain.Later";

static int gone(lua_State *L)
{
    void **h = lua_touserdata(L, 1);
    lt_later_free(*h);
    *h = NULL;
    return 0;
}

/* later(tensor): its one element, as it is now. */
static int later(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    void **h = lt__push_handle(L, class);
    lt__fill_handle(L, h, lt_item_later(lt__check_tensor(L, s, 1, "later", "a number")));
    return 1;
}

/* later:number(): waits until it is there. */
static int number(lua_State *L)
{
    double value;
    lt__check(L, lt__lua(L), lt_later_item(lt__check_handle(L, class), &value));
    lua_pushnumber(L, value);
    return 1;
}

/* sync(): waits until all that was begun is done. */
static int sync(lua_State *L)
{
    lt_ctx *ctx = lt__lua(L)->ctx;
    lt__check(L, lt__lua(L), lt_settle(ctx));
    lt__check(L, lt__lua(L), ctx->device->sync(ctx->device));
    return 0;
}

static const luaL_Reg methods[] = {{"number", number}, {NULL, NULL}};
static const luaL_Reg functions[] = {{"later", later}, {"sync", sync}, {NULL, NULL}};

void lt__open_later(lua_State *L)
{
    int core = lua_gettop(L);
    lt__register(L, functions);
    lt__new_class(L, class, methods, gone);
    lua_settop(L, core);
}
