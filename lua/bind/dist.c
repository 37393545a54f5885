/* dist.c - data parallelism for the embedded Lua files. A state that has not joined a group is rank
 * 0 of 1, and its collectives do nothing.
 *
 * A collective that only one rank calls waits until the timeout and fails. So collectives raise at
 * once inside lt.on_root().
 */
#include <string.h>

#include "autograd/stages.h"
#include "core/tensor.h"
#include "lua/bind/bind.h"
#include "lua/bind/embedded.h"
#include "lua/bind/field.h"

/* Returns the group for a collective, borrowed; NULL if there are no other ranks or no_sync is set.
 * Raises inside lt.on_root. */
static lt_group *others(lua_State *L, const char *who)
{
    lt_lua *s = lt__lua(L);
    if (s->on_root)
        lt__refuse(L, s, "%s requires all ranks, but lt.on_root runs on rank 0 only", who);
    return s->no_sync || s->is_async ? NULL : s->group;
}

void lt__group_set_location(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    char where[64] = "", stage[16] = "";
    if (!others(L, "a training step"))
        return;
    if (s->pipeline)
        snprintf(stage, sizeof stage, ", stage %d", lt_pipeline_stage(s->pipeline));
    lt__where(s, where, sizeof where - strlen(stage));
    size_t end = strlen(where);
    while (end > 0 && (where[end - 1] == ' ' || where[end - 1] == ':'))
        where[--end] = '\0';
    strcat(where, stage);
    lt_group_set_location(s->group, where, lt_step(s->ctx) + 1);
}

int lt__rank_of(const lt_lua *s) { return s->group ? lt_group_rank(s->group) : 0; }

int lt__size_of(const lt_lua *s) { return s->group && !s->is_async ? lt_group_size(s->group) : 1; }

/* rank(): returns this rank, from 0, and the number of ranks. That is 1 during asynchronous
 * training, in which a rank computes whole batches. */
static int rank(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    return lt__return_integers(L, lt__rank_of(s), lt__size_of(s));
}

/* job_rank(): returns this rank, from 0, and the number of all ranks, in asynchronous training too,
 * and in a profile, whose state has not joined the group. */
static int job_rank(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    if (s->profile)
        return lt__return_integers(L, s->profile_rank, s->profile_ranks);
    return lt__return_integers(L, lt__rank_of(s), s->group ? lt_group_size(s->group) : 1);
}

/* on_root(is_on): sets whether collectives raise, and returns the previous setting. */
static int on_root(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lua_pushboolean(L, s->on_root);
    s->on_root = lua_toboolean(L, 1);
    return 1;
}

/* barrier(): waits until all ranks of the job have called it. */
static int barrier(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_group *group = others(L, "lt.barrier");
    if (s->is_async)
        lt__refuse(
            L, s,
            "lt.barrier: in asynchronous training, ranks do not wait for each other; call it "
            "before the run or after its end");
    if (group && lt_group_is_elastic(group))
        lt__refuse(L, s,
                   "lt.barrier cannot wait for workers that join and leave the job (--serve)");
    group = s->profile ? s->job_group : group;
    if (group)
        lt__check(L, s, lt_group_barrier(group, "lt.barrier"));
    return 0;
}

/* compare(what, text): raises if text differs between ranks. The error names the first line that
 * differs. */
static int compare(lua_State *L)
{
    const char *what = luaL_checkstring(L, 1), *text = luaL_checkstring(L, 2);
    lt_group *group = others(L, what);
    if (group)
        lt__check(L, lt__lua(L), lt_group_compare(group, what, text));
    return 0;
}

/* compare_numbers(what, list, tolerance): raises if numbers differ between ranks; see
 * lt_group_compare_numbers(). */
static int compare_numbers(lua_State *L)
{
    const char *what = luaL_checkstring(L, 1);
    lt_group *group = others(L, what);
    int n;
    double *numbers = lt__check_numbers(L, 2, &n);
    if (group)
        lt__check(L, lt__lua(L),
                  lt_group_compare_numbers(group, what, numbers, n, luaL_checknumber(L, 3)));
    return 0;
}

/* broadcast_text(what, text): returns the text of rank 0 on every rank. */
static int broadcast_text(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    const char *what = luaL_checkstring(L, 1);
    lt_group *group = others(L, what);
    size_t bytes = 0;
    const char *mine = lua_tolstring(L, 2, &bytes);
    if (!group) {
        lua_settop(L, 2);
        return 1;
    }
    lt__check(L, s, lt_group_broadcast(group, what, &bytes, sizeof bytes, 0));
    char *text = lua_newuserdatauv(L, bytes + 1, 0);
    if (lt_group_rank(group) == 0)
        memcpy(text, mine, bytes);
    lt__check(L, s, lt_group_broadcast(group, what, text, bytes, 0));
    lua_pushlstring(L, text, bytes);
    return 1;
}

/* sum(what, a, b, ...): returns the sum of each number over all ranks. */
static int sum(lua_State *L)
{
    const char *what = luaL_checkstring(L, 1);
    lt_group *group = others(L, what);
    int n = lua_gettop(L) - 1;
    if (!group)
        return n;
    double *numbers = lua_newuserdatauv(L, (size_t)n * sizeof *numbers, 0);
    for (int i = 0; i < n; i++)
        numbers[i] = luaL_checknumber(L, i + 2);
    lt_sum all = {
        .what = what, .data = numbers, .count = n, .dtype = LT_F64, .wire = LT_F64, .scale = 1};
    luaL_checkstack(L, n, what);
    lt__check(L, lt__lua(L), lt_group_allreduce(group, &all));
    for (int i = 0; i < n; i++)
        lt__push_number(L, numbers[i]);
    return n;
}

/* reduce(parameters): adds parameters to the gradient exchange and gives them the values of rank
 * 0. In a pipeline, leaves out parameters of other stages. */
static int reduce(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_group *group = others(L, "making an optimizer");
    int n, own = 0;
    if (!group || !s->reducer)
        return 0;
    lt_tensor **params = lt__check_tensors(L, s, 1, "optim", "a parameter", &n);
    for (int i = 0; i < n; i++)
        if (!lt_is_meta(params[i]))
            params[own++] = params[i];
    return lt__done(L, lt__name_line(L, lt_reducer_add(s->reducer, params, own)));
}

int lt__shards(const lt_lua *s)
{
    bool split = s->group && s->reducer_config.vranks > 0;
    if (s->pipeline)
        return s->micro;
    return split ? s->reducer_config.vranks / lt_group_size(s->group) : 1;
}

/* is_alone(): whether no gradient exchange is needed: there is one shard, and the user did not
 * request sums by NCCL. */
static int is_alone(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    bool is_only = lt__size_of(s) * lt__shards(s) == 1 && !s->pipeline;
    lua_pushboolean(L,
                    !s->group || (is_only && s->reducer_config.sum_backend != LT_SUM_BACKEND_NCCL));
    return 1;
}

/* deterministic(): whether the run must be bit-identical for any number of ranks (--vranks). */
static int deterministic(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    return lt__return_boolean(L, s->group && s->reducer_config.vranks > 0);
}

/* settings_digest(): a number that differs if the settings of optimizer steps so far do. */
static int settings_digest(lua_State *L)
{
    return lt__return_integer(L, lt_settings_digest(lt__lua(L)->ctx));
}

/* compare_step(): raises an error if another rank used different settings in the last step. */
static int compare_step(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    if (others(L, "the last optimizer step") && (s->reducer || s->pipeline))
        lt__check(L, s, lt_group_compare_settings(s->group, s->ctx));
    return 0;
}

/* complete(optim): completes the optimizer's gradients, including their exchange. Returns whether
 * its next step will be applied. */
static int complete(lua_State *L)
{
    lt_step_status step_status;
    lt_optim *o = lt__check_handle(L, "luatrain.Optim");
    lt__group_set_location(L);
    lt__check(L, lt__lua(L), lt_optim_complete_grads(o, &step_status));
    return lt__return_boolean(L, step_status == LT_APPLIED);
}

/* digest(tensor): returns the first 16 hexadecimal digits of the SHA-256 of its values. */
static int digest(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_sha256 sha;
    char hex[65];
    lt_sha256_begin(&sha);
    lt__check(L, s, lt__sha256_add_tensor(&sha, lt__self(L, "digest")));
    lt_sha256_end(&sha, hex);
    lua_pushlstring(L, hex, 16);
    return 1;
}

/* expect_backwards(n): declares that each step calls backward n times; 0 if that is unknown. */
static int expect_backwards(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    if (s->reducer)
        lt_reducer_expect_backwards(s->reducer, (int)luaL_checkinteger(L, 1));
    return 0;
}

/* reduced(): returns, for the last step, the seconds that the optimizer waited for other ranks and
 * the number of buckets sent; then the bytes that this rank has sent so far; then the signal that
 * requested a stop on some rank, or 0; then the seconds that this rank has waited for others so
 * far, in optimizer steps and passes. */
static int reduced(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    lt_reduced_step last = {0};
    uint64_t bytes = s->group ? lt_group_bytes(s->group) : 0;
    if (s->reducer)
        last = lt_reducer_last(s->reducer);
    if (s->pipeline)
        bytes += lt_pipeline_bytes(s->pipeline);
    lua_pushnumber(L, last.waited);
    lua_pushinteger(L, last.buckets);
    lua_pushinteger(L, (lua_Integer)bytes);
    lua_pushinteger(L, last.stop_reason);
    lua_pushnumber(L, last.total_waited);
    return 5;
}

/* configure(no_sync, blocking, bucket[, delay]): configures the gradient exchange from the next
 * step on. no_sync disables it, and without a pipeline all other collectives, too; blocking begins
 * it in the optimizer's step; bucket is the size of a bucket in bytes, 0 for the default; delay:
 * steps apply the sums of the step before. */
static int configure(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_reducer_config config = s->reducer_config;
    config.no_sync = lua_toboolean(L, 1);
    s->no_sync = config.no_sync && !s->pipeline;
    config.blocking = lua_toboolean(L, 2);
    config.bucket = config.first_bucket = (size_t)luaL_checkinteger(L, 3);
    config.delay = lua_toboolean(L, 4);
    return lt__done(L, lt_reducer_configure(s->reducer, &config));
}

/* has_delay(): whether steps apply the sums of the step before. */
static int has_delay(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    return lt__return_boolean(L, s->reducer && lt_reducer_has_delay(s->reducer));
}

/* delayed(parameter): returns the memory of the sum of its gradient, see lt_reducer_delayed(), as a
 * tensor, and an i64 scalar: 1 if the next step applies the sum, else 0. In a pipeline, both are on
 * the stage of the parameter. */
static int delayed(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    bool is_set;
    lt_tensor **sum = lt__push_box(L, s), **flag = lt__push_box(L, s);
    lt_tensor *x = lt__check_tensor(L, s, 1, "delayed", "a parameter");
    if (lt_is_meta(x)) {
        lt__fill_box(L, s, sum, lt__tensor_remote(x, (lt_dtype)x->dtype, x->ndim, x->dims, false));
        lt__fill_box(L, s, flag, lt__tensor_remote(x, LT_I64, 0, NULL, false));
        return 2;
    }
    lt__fill_box(L, s, sum, lt__tensor_inherit(lt_reducer_delayed(s->reducer, x, &is_set), x));
    int64_t number = is_set;
    lt__fill_box(L, s, flag,
                 lt__tensor_inherit(lt_tensor_from(s->ctx, LT_I64, 0, NULL, &number), x));
    return 2;
}

/* set_delayed(parameter, is_set): the sum of its gradient was restored. */
static int set_delayed(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_tensor *x = lt__check_tensor(L, s, 1, "set_delayed", "a parameter");
    return lt__done(L, lt_reducer_set_delayed(s->reducer, x, lua_toboolean(L, 2)));
}

/* buckets(): returns a list of the last step's buckets, each {bytes = , ready = , began = ,
 * ended = }; see lt_bucket. */
static int buckets(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    lt_bucket b;
    lua_newtable(L);
    for (int i = 0; lt_reducer_bucket(s->reducer, i, &b); i++) {
        lua_createtable(L, 0, 4);
        lt__set_integer(L, "bytes", (lua_Integer)b.bytes);
        lt__set_number(L, "ready", b.ready);
        lt__set_number(L, "began", b.began);
        lt__set_number(L, "ended", b.ended);
        lua_rawseti(L, -2, i + 1);
    }
    return 1;
}

/* time_sums(count, n, by_mpi): runs n allreduces of count f32 elements and returns a list of their
 * seconds. by_mpi selects MPI_Allreduce; returns nothing if that is missing, as for threads. */
static int time_sums(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lua_Integer count = luaL_checkinteger(L, 1), n = luaL_checkinteger(L, 2);
    bool by_mpi = lua_toboolean(L, 3);
    double *seconds = lua_newuserdatauv(L, (size_t)n * sizeof *seconds, 0);
    lt_status status =
        lt_group_time_allreduce(s->group, count, s->reducer_config.wire, by_mpi, seconds, (int)n);
    if (status == LT_EENV)
        return 0;
    lt__check(L, s, status);
    lt__push_number_list(L, seconds, (int)n);
    return 1;
}

/* wire(): returns the name of the dtype in which gradients travel, and its size in bytes. */
static int wire(lua_State *L)
{
    lt_dtype dtype = lt__lua(L)->reducer_config.wire;
    lua_pushstring(L, lt_dtype_name(dtype));
    lua_pushinteger(L, (lua_Integer)lt_dtype_bytes(dtype));
    return 2;
}

/* The lt_allreduce_fn of the context; ud is the lt_lua. */
static lt_status sum_in_pass(void *ud, double *numbers, int64_t n, bool backward)
{
    lt_lua *s = ud;
    if (s->on_root)
        return lt_fail(LT_EINVAL, "sync requires all ranks, but lt.on_root runs on rank 0 only");
    return lt_reducer_allreduce(s->reducer, numbers, n, backward);
}

lt_status lt__use_reducer(lt_lua *s, lt_group *group)
{
    if (!(s->reducer = lt_reducer_new(s->ctx, group, &s->reducer_config)))
        return lt_errcode();
    s->wire_scales = lt_wire_scales_init();
    lt_set_allreduce(s->ctx, sum_in_pass, s);
    return lt_reducer_use_loss_scale(s->reducer, s->scale, &s->wire_scales);
}

static const luaL_Reg functions[] = {LT_FN(rank),
                                     LT_FN(job_rank),
                                     LT_FN(on_root),
                                     LT_FN(barrier),
                                     LT_FN(compare),
                                     LT_FN(compare_numbers),
                                     LT_FN(broadcast_text),
                                     LT_FN(sum),
                                     LT_FN(reduce),
                                     LT_FN(is_alone),
                                     LT_FN(deterministic),
                                     LT_FN(compare_step),
                                     LT_FN(settings_digest),
                                     LT_FN(complete),
                                     LT_FN(digest),
                                     LT_FN(expect_backwards),
                                     LT_FN(reduced),
                                     LT_FN(configure),
                                     LT_FN(has_delay),
                                     LT_FN(delayed),
                                     LT_FN(set_delayed),
                                     LT_FN(buckets),
                                     LT_FN(time_sums),
                                     LT_FN(wire),
                                     {NULL, NULL}};

void lt__open_dist(lua_State *L) { lt__register(L, functions); }

lt_status lt__begin_rank(lua_State *L)
{
    static const char begin[] = "require('luatrain.train.ranks').begin()";
    if (luaL_loadbuffer(L, begin, sizeof begin - 1, LT_EMBEDDED "ranks") != LUA_OK)
        return lt_fail(LT_ENOMEM, "out of memory for a Lua state"); /* not a syntax error */
    return lt_lua_call(L, 0, 0);
}

/* The lt_allreduce_fn of asynchronous training, in which workers do not wait for each other.
 * NOLINTNEXTLINE(readability-non-const-parameter) */
static lt_status refuse_sum(void *ud, double *numbers, int64_t n, bool backward)
{
    (void)ud, (void)numbers, (void)n, (void)backward;
    return lt_fail(LT_EUSAGE, "sync_batch_norm cannot be used in asynchronous training");
}

lt_status lt_lua_join_async(lua_State *L, lt_group *group)
{
    lt_lua *s = lt__lua_of(L);
    lt_set_allreduce(s->ctx, refuse_sum, NULL);
    s->group = group;
    s->joins_async = true;
    return lt__begin_rank(L);
}

lt_status lt_lua_join(lua_State *L, lt_group *group, const lt_reducer_config *config)
{
    lt_lua *s = lt__lua_of(L);
    if (config)
        s->reducer_config = *config;
    if (lt_group_size(group) == 1 && s->reducer_config.vranks == 0 &&
        s->reducer_config.sum_backend != LT_SUM_BACKEND_NCCL)
        return LT_OK;
    s->group = group;
    LT_TRY(lt__use_reducer(s, group));
    return lt__begin_rank(L);
}
