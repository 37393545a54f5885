/* check.c - measures how half precision changes the tensors of a pass, for amp_check.lua.
 *
 * A dry run calls the function of a training step. The first backward in it raises an error value
 * that no script can create, which ends the function. The rest of the function, such as the
 * optimizer's step, runs only in the real call.
 */
#include <math.h>

#include "lua/bind/bind.h"
#include "lua/bind/field.h"

static const char class[] = "luatrain.PrecisionCheck";
static const char key_cut; /* its address is the error value that ends a dry run */

void lt__dry_run_loss(lt_lua *s, lt_tensor *loss)
{
    double *value = &s->dry_run.loss;
    if (s->dry_run.done || lt_count(loss) != 1 || lt_item(loss, 0, value) != LT_OK)
        *value = s->dry_run.done ? *value : NAN;
}

noreturn void lt__end_dry_run(lua_State *L, lt_lua *s)
{
    s->dry_run.done = true;
    lua_pushlightuserdata(L, (void *)&key_cut);
    lua_error(L);
    __builtin_unreachable();
}

LT_FINALIZER(precision_check_gc, lt_precision_check_free)

/* new_precision_check() */
static int new_precision_check(lua_State *L)
{
    void **handle = lt__push_handle(L, class);
    lt__fill_handle(L, handle, lt_precision_check_new(lt__lua(L)->ctx));
    return 1;
}

/* check:pass(second, fn, ...): calls fn(...) up to the end of its first backward, with the loss
 * scale in use, and returns the loss. If second is true, computes in f32 and ignores
 * lt.autocast. */
static int pass(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_precision_check *check = lt__check_handle(L, class);
    bool second = lua_toboolean(L, 2);
    int k = s->scale ? lt_loss_scale_scaler(s->scale)->k : 0;
    lt__check(L, s, lt_precision_check_begin(check, k, second));
    s->dry_run.on = true;
    s->dry_run.in_f32 = second;
    s->dry_run.done = false;
    int rc = lua_pcall(L, lua_gettop(L) - 3, 0, 0);
    bool done = s->dry_run.done;
    s->dry_run.on = s->dry_run.in_f32 = false;
    lt_status status = lt_precision_check_end(check);
    if (rc != LUA_OK && !done)
        return lua_error(L);
    lt__check(L, s, status);
    if (!done)
        lt__refuse(L, s, "amp check: the function returned without calling backward");
    return lt__return_number(L, s->dry_run.loss);
}

/* check:rows(): returns a list with one table for each compared tensor: {where = , op = , of = ,
 * leaf = , count = , underflows = , overflows = , norm = , error = }; see lt_precision. */
static int rows(lua_State *L)
{
    const lt_precision_check *check = lt__check_handle(L, class);
    lt_precision row;
    lua_newtable(L);
    for (int i = 0; lt_precision_check_row(check, i, &row); i++) {
        lua_createtable(L, 0, 9);
        lt__set_string(L, "where", row.where);
        lt__set_string(L, "op", row.op);
        lt__set_string(L, "of", row.of);
        lt__set_boolean(L, "leaf", row.leaf);
        lt__set_number(L, "count", (double)row.count);
        lt__set_number(L, "underflows", (double)row.underflows);
        lt__set_number(L, "overflows", (double)row.overflows);
        lt__set_number(L, "norm", row.norm);
        lt__set_number(L, "error", row.error);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* check:half(): whether the first pass computed anything in half precision. */
static int half(lua_State *L)
{
    return lt__return_boolean(L, lt_precision_check_half(lt__check_handle(L, class)) != LT_F32);
}

static const luaL_Reg methods[] = {LT_FN(pass), LT_FN(rows), LT_FN(half), {NULL, NULL}};

static const luaL_Reg functions[] = {LT_FN(new_precision_check), {NULL, NULL}};

void lt__open_check(lua_State *L)
{
    lt__register(L, functions);
    lt__new_class(L, class, methods, precision_check_gc);
}
