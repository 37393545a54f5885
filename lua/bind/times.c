/* times.c - measures the time of each op, forward and backward, summed over calls with the same
 * shapes. The callers are the embedded files that measure speed.
 *
 * The library calls the timer where no Lua error may be raised. So a hash table in C stores the
 * sums until op_times() reads them. If there was no memory for a row, op_times() raises the error.
 */
#include <stdlib.h>
#include <string.h>

#include "core/hash.h"
#include "core/tensor.h"
#include "lua/bind/bind.h"
#include "lua/bind/field.h"

enum { FIRST_ROOM = 256, SHAPES = 3 };

/* Calls with equal keys are summed. The key consists of the op, its direction, the gradients that
 * were computed, and the dtype and dims of the first two inputs and of the first output. Keys are
 * hashed and compared as bytes, so padding must be zero. */
typedef struct key {
    const lt_schema *schema;
    uint64_t wanted; /* bit i: the gradient of input i was computed */
    int64_t dims[SHAPES][LT_MAX_DIMS];
    int8_t ndim[SHAPES]; /* -1 if there is no such tensor */
    uint8_t dtype[SHAPES];
    bool backward;
} key;

typedef struct row {
    key key;
    int64_t calls, bytes; /* calls is 0 in an empty row */
    double seconds;
} row;

typedef struct lt_lua_times {
    row *rows;          /* hash table with open addressing */
    size_t n, capacity; /* rows in use, and allocated: a power of 2 */
    bool lost;          /* a call was not counted because memory ran out */
} lt_lua_times;

/* ==== The table =============================================================================== */

static size_t hash(const key *k)
{
    uint64_t h = lt__fnv64(LT_FNV64_START, k, sizeof *k);
    return (size_t)(h ^ h >> 32);
}

/* Returns the row of k, or the empty row to use for it. */
static row *find_row(row *rows, size_t capacity, const key *k)
{
    size_t i = hash(k) & (capacity - 1);
    while (rows[i].calls > 0 && memcmp(&rows[i].key, k, sizeof *k) != 0)
        i = (i + 1) & (capacity - 1);
    return &rows[i];
}

/* Grows the table so that a quarter of the rows stays empty after one more is added. False if out
 * of memory. */
static bool grow(lt_lua_times *t)
{
    if (4 * (t->n + 1) <= 3 * t->capacity)
        return true;
    size_t capacity = t->capacity > 0 ? 2 * t->capacity : FIRST_ROOM;
    row *rows = calloc(capacity, sizeof *rows);
    if (!rows)
        return false;
    for (size_t i = 0; i < t->capacity; i++)
        if (t->rows[i].calls > 0)
            *find_row(rows, capacity, &t->rows[i].key) = t->rows[i];
    free(t->rows);
    t->rows = rows;
    t->capacity = capacity;
    return true;
}

void lt__drop_times(lt_lua *s)
{
    if (!s->times)
        return;
    lt_set_timer(s->ctx, NULL, NULL);
    free(s->times->rows);
    free(s->times);
    s->times = NULL;
}

/* ==== The timer =============================================================================== */

static void set_shape(key *k, int i, const lt_tensor *x)
{
    k->ndim[i] = -1;
    if (!x)
        return;
    k->ndim[i] = (int8_t)x->ndim;
    k->dtype[i] = x->dtype;
    memcpy(k->dims[i], x->dims, (size_t)x->ndim * sizeof *x->dims);
}

/* Returns tensor i of a list, or NULL if the list is NULL or shorter. */
static const lt_tensor *at(lt_tensor *const *list, int n, int i)
{
    return list && i < n ? list[i] : NULL;
}

/* A tensor that was not saved for backward is NULL; its gradient has the same shape. */
static const lt_tensor *either(const lt_tensor *x, const lt_tensor *grad) { return x ? x : grad; }

static void set_key(key *k, const lt_call *c, bool backward)
{
    int n = c->n_in;
    lt_tensor **d_in = backward ? c->d_in : NULL, **d_out = backward ? c->d_out : NULL;
    memset(k, 0, sizeof *k);
    k->schema = c->schema;
    k->backward = backward;
    set_shape(k, 0, either(at(c->in, n, 0), at(d_in, n, 0)));
    set_shape(k, 1, either(at(c->in, n, 1), at(d_in, n, 1)));
    set_shape(k, 2, either(at(c->out, LT_MAX_OUT, 0), at(d_out, LT_MAX_OUT, 0)));
    for (int i = 0; i < n && backward; i++)
        k->wanted |= (uint64_t)(d_in[i] != NULL) << i;
}

static int64_t bytes_of(lt_tensor *const *list, int n, uint64_t mask)
{
    int64_t bytes = 0;
    for (int i = 0; list && i < n; i++)
        if (list[i] && mask >> i & 1)
            bytes += list[i]->count * (int64_t)lt_dtype_bytes((lt_dtype)list[i]->dtype);
    return bytes;
}

/* Returns the bytes that a call reads and writes. A tensor that is updated in place or accumulated
 * into counts twice. */
static int64_t traffic(const lt_call *c, bool backward)
{
    int n_out = c->op->n_out ? c->op->n_out : !c->op->in_place, n = c->n_in;
    int64_t bytes = bytes_of(c->in, n, ~0ull) + bytes_of(c->out, n_out + c->op->n_aux, ~0ull);
    if (!backward)
        return bytes + bytes_of(c->in, n, c->op->in_place);
    return bytes + bytes_of(c->d_out, n_out, ~0ull) + bytes_of(c->d_in, n, ~0ull) +
           bytes_of(c->d_in, n, c->add);
}

static void add_call(void *ud, const lt_call *call, bool backward, double seconds)
{
    lt_lua_times *t = ud;
    key k;
    if (!grow(t)) {
        t->lost = true;
        return;
    }
    set_key(&k, call, backward);
    row *r = find_row(t->rows, t->capacity, &k);
    if (r->calls == 0) {
        r->key = k;
        t->n++;
    }
    r->calls++;
    r->seconds += seconds;
    r->bytes += traffic(call, backward);
}

/* ==== For Lua ================================================================================= */

/* time_ops(on): starts or pauses the timing of ops. */
static int time_ops(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    if (!s->times && !(s->times = calloc(1, sizeof *s->times)))
        lt__error(L, s, LT_ENOMEM, "out of memory for op times");
    lt_set_timer(s->ctx, lua_toboolean(L, 1) ? add_call : NULL, s->times);
    return 0;
}

static void push_shape(lua_State *L, const key *k, int i)
{
    if (k->ndim[i] < 0)
        lua_pushboolean(L, 0);
    else
        lt__push_dim_list(L, k->dims[i], k->ndim[i]);
}

static void push_row(lua_State *L, const row *r)
{
    const key *k = &r->key;
    const lt_schema *schema = k->schema;
    lua_createtable(L, 0, 8);
    lt__set_string(L, "op", schema->name);
    lt__set_boolean(L, "backward", k->backward);
    lt__set_string(L, "dtype", lt_dtype_name((lt_dtype)k->dtype[k->ndim[0] < 0 ? 2 : 0]));
    lua_createtable(L, SHAPES, 0);
    for (int i = 0; i < SHAPES; i++) {
        push_shape(L, k, i);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "shapes");
    lua_newtable(L);
    for (int i = 0, n = 0; i < LT_MAX_LIST; i++)
        if (k->wanted >> i & 1) {
            lua_pushstring(L, schema->in[i < schema->n_in ? i : schema->n_in - 1].name);
            lua_rawseti(L, -2, ++n);
        }
    lua_setfield(L, -2, "wanted");
    lt__set_integer(L, "calls", r->calls);
    lt__set_number(L, "seconds", r->seconds);
    lt__set_integer(L, "bytes", r->bytes);
}

/* op_times(): ends the timing and returns all sums as a list, in no particular order. Each item has
 * op, backward, dtype (of the first input), shapes (of the first two inputs and the first output;
 * false for a missing tensor), wanted (the names of the inputs whose gradients were computed),
 * calls, seconds, and bytes (read and written). Discards the sums. */
static int op_times(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_lua_times *t = s->times;
    lua_newtable(L);
    if (!t)
        return 1;
    lt_set_timer(s->ctx, NULL, NULL);
    for (size_t i = 0, n = 0; i < t->capacity; i++)
        if (t->rows[i].calls > 0) {
            push_row(L, &t->rows[i]);
            lua_rawseti(L, -2, (lua_Integer)++n);
        }
    bool lost = t->lost;
    lt__drop_times(s);
    if (lost)
        lt__error(L, s, LT_ENOMEM, "out of memory for op times");
    return 1;
}

static const luaL_Reg functions[] = {LT_FN(time_ops), LT_FN(op_times), {NULL, NULL}};

void lt__open_times(lua_State *L) { lt__register(L, functions); }
