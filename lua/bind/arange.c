/* arange.c - lt.arange(n) = 0, 1, ..., n - 1, and lt.arange(first, stop, step = 1) = first,
 * first + step, ..., excluding stop.
 *
 * If first, stop and step are all integers, the elements are computed as integers, so i64 is exact.
 */
#include <math.h>

#include "core/tensor.h"
#include "lua/bind/bind.h"

/* The arguments of lt.arange. The integers are valid if whole is set. */
typedef struct range {
    bool whole;
    double first, stop, step;
    lua_Integer i_first, i_stop, i_step;
} range;

/* Returns the number of elements; a result below 0 means none. It is a double because it may be
 * huge. Integers are subtracted in unsigned arithmetic to avoid overflow. */
static double count_of(const range *r)
{
    uint64_t first = (uint64_t)r->i_first, stop = (uint64_t)r->i_stop, step = (uint64_t)r->i_step;
    if (!r->whole || r->i_step == 0)
        return ceil((r->stop - r->first) / r->step);
    if (r->i_step > 0)
        return r->i_first < r->i_stop ? (double)((stop - first - 1) / step + 1) : 0;
    return r->i_first > r->i_stop ? (double)((first - stop - 1) / (0 - step) + 1) : 0;
}

static void push_value(lua_State *L, const range *r, int64_t i)
{
    if (r->whole)
        lua_pushinteger(L, (lua_Integer)((uint64_t)r->i_first + (uint64_t)i * (uint64_t)r->i_step));
    else
        lua_pushnumber(L, r->first + (double)i * r->step);
}

/* Reads the leading arguments that are numbers. *n_numbers is their count. */
static range read_range(lua_State *L, lt_lua *s, int *n_numbers)
{
    range r = {.whole = true, .step = 1, .i_step = 1};
    int n = 0;
    for (; n < 3 && lua_type(L, n + 1) == LUA_TNUMBER; n++)
        r.whole = r.whole && lua_isinteger(L, n + 1);
    int stop = n > 1 ? 2 : 1;
    r.stop = lt__check_number(L, s, stop, "lt.arange", "stop");
    r.i_stop = lua_tointeger(L, stop);
    if (n > 1) {
        r.first = lua_tonumber(L, 1);
        r.i_first = lua_tointeger(L, 1);
    }
    if (n > 2) {
        r.step = lua_tonumber(L, 3);
        r.i_step = lua_tointeger(L, 3);
    }
    *n_numbers = n;
    return r;
}

static int arange(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    int n_numbers;
    range r = read_range(L, s, &n_numbers);
    lt_device *device;
    lt_dtype dtype = lt__check_constructor_options(L, s, n_numbers + 1, "lt.arange", &device);
    if (!lua_isnoneornil(L, n_numbers + 2))
        lt__refuse(L, s, "lt.arange accepts no arguments after the options, got %s",
                   lt__text(L, n_numbers + 2));
    double count = count_of(&r);
    if (!(count < 0x1p40))
        lt__refuse(L, s, "lt.arange: too many elements: %g, in steps of %g from %g to %g", count,
                   r.step, r.first, r.stop);
    int64_t n = count > 0 ? (int64_t)count : 0;
    size_t bytes = lt_dtype_bytes(dtype);
    char *data = lua_newuserdatauv(L, (size_t)n * bytes, 0);
    for (int64_t i = 0; i < n; i++) {
        push_value(L, &r, i);
        lt__check_element(L, s, lua_gettop(L), "lt.arange", dtype);
        lt__store_number(L, lua_gettop(L), dtype, data + (size_t)i * bytes);
        lua_pop(L, 1);
    }
    lt_tensor **box = lt__push_box(L, s);
    lt__fill_box(L, s, box, lt__tensor_new(s->ctx, device, dtype, 1, &n, false));
    lt__check(L, s, lt_write(*box, data));
    return 1;
}

static const luaL_Reg functions[] = {
    {"lt.arange(first: number; stop?: number|TensorOptions; step?: number|TensorOptions; "
     "options?: TensorOptions) -> Tensor -- arange(n) counts from 0 to n - 1; stop is excluded.",
     arange},
    {NULL, NULL}};

void lt__open_arange(lua_State *L)
{
    lua_getfield(L, -1, "constructors");
    lt__register(L, functions);
    lua_pop(L, 1);
}
