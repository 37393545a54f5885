/* shards.c - the shards and micro-batches of a batch, for the embedded Lua files. */
#include <limits.h>
#include <stdlib.h>

#include "core/tensor.h"
#include "lua/bind/bind.h"
#include "lua/bind/field.h"

/* Reads argument `index` of functions that split batches: the grain, the number of adjacent rows
 * that are never split. The default is 1. */
static int64_t grain_at(lua_State *L, int index) { return luaL_optinteger(L, index, 1); }

typedef struct part { /* a part of a batch: a shard, or in a pipeline a micro-batch */
    int64_t first, rows;
    int64_t of; /* rows of all parts of this rank in a pipeline, else of the batch */
    int n;      /* number of parts of this rank */
} part;

/* Finds shard i, from 0, of all shards of a batch. */
static void find_shard(const lt_lua *s, int64_t rows, int64_t grain, int i, int64_t *first,
                       int64_t *count)
{
    int n = lt__size_of(s) * lt__shards(s);
    if (s->share)
        lt_shard_parts(rows, grain, s->share[i], s->share[i + 1] - s->share[i], s->share[n], first,
                       count);
    else
        lt_shard(rows, grain, i, n, first, count);
}

/* Divides a batch of `rows` rows. Returns part i, from 0, of this rank. */
static part find_part(const lt_lua *s, int64_t rows, int64_t grain, int i)
{
    part p = {.of = rows, .n = lt__shards(s)};
    if (!s->pipeline) {
        find_shard(s, rows, grain, (s->is_async ? 0 : lt__rank_of(s)) * p.n + i, &p.first, &p.rows);
        return p;
    }
    int64_t before;
    int replicas = lt_pipeline_replicas(s->pipeline);
    lt_shard(rows, grain, lt_pipeline_replica(s->pipeline), replicas, &before, &p.of);
    p.n = lt_micro_batches(rows, grain, replicas, s->micro);
    lt_shard(p.of, grain, i, p.n, &p.first, &p.rows);
    p.first += before;
    return p;
}

/* shards(): returns the largest number of shards of a batch that this rank computes in turn.
 * shards(rows, grain): returns their number for a batch of `rows` rows. */
static int shards(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    int64_t rows = luaL_optinteger(L, 1, -1);
    return lt__return_integer(L,
                              rows < 0 ? lt__shards(s) : find_part(s, rows, grain_at(L, 2), 0).n);
}

/* shard(rows, part, grain): splits a batch of `rows` rows. For this rank's shard number `part`,
 * from 1, returns the number of rows before it, the number of its rows, and the number of rows that
 * its share refers to: the rows of the batch, or in a pipeline of this replica. */
static int shard(lua_State *L)
{
    part p = find_part(lt__lua(L), luaL_checkinteger(L, 1), grain_at(L, 3),
                       (int)luaL_checkinteger(L, 2) - 1);
    return lt__return_integers(L, p.first, p.rows, p.of);
}

/* Returns the rows of the smallest shard, or in a pipeline of this rank's smallest micro-batch. At
 * least 1: an empty shard computes one row with weight 0. */
static int64_t least_of(const lt_lua *s, int64_t rows, int64_t grain)
{
    int n = s->pipeline ? find_part(s, rows, grain, 0).n : lt__size_of(s) * lt__shards(s);
    int64_t min = rows, first, count;
    for (int i = 0; i < n; i++) {
        if (s->pipeline)
            count = find_part(s, rows, grain, i).rows;
        else
            find_shard(s, rows, grain, i, &first, &count);
        min = LT_MIN(min, count);
    }
    return LT_MAX(min, 1);
}

/* smallest_shard(rows, grain): see least_of(). */
static int smallest_shard(lua_State *L)
{
    return lt__return_integer(L, least_of(lt__lua(L), luaL_checkinteger(L, 1), grain_at(L, 2)));
}

/* An argument error unless the list at 1 has n positive integers whose sum fits in an int. */
static void check_parts(lua_State *L, int n)
{
    luaL_argcheck(L, luaL_len(L, 1) == n, 1, "one number per rank is required");
    for (int i = 1; i <= n; i++) {
        lua_Integer parts = lua_rawgeti(L, 1, i) == LUA_TNUMBER ? lua_tointeger(L, -1) : 0;
        luaL_argcheck(L, parts >= 1 && parts <= INT_MAX / n, 1, "a number is out of range");
        lua_pop(L, 1);
    }
}

/* set_share(parts): from the next batch on, rank i gets parts[i + 1] parts of each batch; a list of
 * one positive integer per rank. nil: the shards are equal. All ranks must make the same call, and
 * then open their passes again. */
static int set_share(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    int n = lt__size_of(s), *share = NULL;
    if (!lua_isnil(L, 1)) {
        luaL_argcheck(L, n > 1 && lt__shards(s) == 1 && !s->pipeline, 1, "not in this mode");
        check_parts(L, n);
        if (!(share = lt__calloc((size_t)n + 1, sizeof *share, "for the shares of the ranks")))
            lt__raise(L, s);
        for (int i = 0; i < n; i++) {
            lua_rawgeti(L, 1, i + 1);
            share[i + 1] = share[i] + (int)lua_tointeger(L, -1);
            lua_pop(L, 1);
        }
    }
    free(s->share);
    s->share = share;
    s->share_changes++;
    return 0;
}

/* share_changes(): returns the number of calls of set_share() so far. */
static int share_changes(lua_State *L) { return lt__return_integer(L, lt__lua(L)->share_changes); }

void lt__check_micro_batches(lua_State *L, lt_lua *s, const char *what, const char *at)
{
    if (s->has_grads && s->micro_batch < s->micro_batches)
        lt__refuse(L, s,
                   "%s%s after %d of the %d micro-batches of a batch; leave a loop over "
                   "lt.micro_batches only after the last one, and then take the optimizer's step",
                   at, what, s->micro_batch, s->micro_batches);
}

/* Raises if the script has left a batch after some of its parts. Arguments: see
 * lt__check_micro_batches(). */
static void check_whole_batch(lua_State *L, lt_lua *s, const char *what, const char *at)
{
    if (s->done_parts > 0 || (s->has_grads && s->part < s->parts))
        lt__refuse(L, s,
                   "%s%s after %d of the %d %s of a batch; leave a loop over batches only after "
                   "the last one, when the optimizer has taken its step",
                   at, what, s->done_parts > 0 ? s->done_parts : s->part,
                   s->part > 0 ? s->parts : lt__shards(s),
                   s->pipeline ? "micro-batches" : "shards");
    lt__check_micro_batches(L, s, what, at);
}

/* end_script(): raises if the script has ended within a batch. */
static int end_script(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    check_whole_batch(L, s, "the script has ended", s->batch_line);
    return 0;
}

/* take_shard(rows, part, grain, data): makes shard `part` (from 1) of a batch of `rows` rows the
 * one that this rank computes. data is the digest of the data set, or nil. Does nothing inside
 * lt.on_root, where rank 0 reads rows that belong to no step. */
static int take_shard(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    if (s->on_root)
        return 0;
    int64_t all = luaL_checkinteger(L, 1), data = luaL_optinteger(L, 4, 0), grain = grain_at(L, 3);
    int i = (int)luaL_checkinteger(L, 2) - 1;
    part p = find_part(s, all, grain, i);
    s->first_row = p.first;
    s->shard_rows = p.rows > 0 ? p.rows : 1;
    s->least_rows = s->pipeline ? s->shard_rows : least_of(s, all, grain);
    lt_tape_set_first_row(lt_tape_current(s->ctx), s->first_row);
    if (s->pipeline)
        lt__check(L, s,
                  lt_pipeline_set_micro_batch(s->pipeline, i, p.n,
                                              p.of > 0 ? (double)p.rows / (double)p.of : 1));
    if (i == 0)
        check_whole_batch(L, s, "a batch begins", "");
    s->has_grads &= i > 0;
    s->micro_batch = s->micro_batches = 0;
    lt__where(s, s->batch_line, sizeof s->batch_line);
    s->part = i + 1;
    s->parts = p.n;
    if (s->reducer) {
        lt_reducer_set_share(s->reducer, s->pipeline ? p.of : p.rows, all);
        lt_reducer_set_data(s->reducer, (uint32_t)data);
    }
    return 0;
}

/* end_shard(): in a pipeline, ends the micro-batch that take_shard() began. */
static int end_shard(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    if (s->pipeline && !s->on_root)
        lt_pipeline_end_micro_batch(s->pipeline);
    return 0;
}

/* least_rows(rows): if `rows` is the size of the shard taken last, returns the size of the smallest
 * shard of its batch. Otherwise returns rows. */
static int least_rows(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    lua_Integer rows = luaL_checkinteger(L, 1);
    return lt__return_integer(L, rows == s->shard_rows ? s->least_rows : rows);
}

static const luaL_Reg functions[] = {LT_FN(shards),    LT_FN(shard),         LT_FN(smallest_shard),
                                     LT_FN(set_share), LT_FN(share_changes), LT_FN(take_shard),
                                     LT_FN(end_shard), LT_FN(end_script),    LT_FN(least_rows),
                                     {NULL, NULL}};

void lt__open_shards(lua_State *L) { lt__register(L, functions); }
