/* async.c - asynchronous training for the embedded Lua files. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "lua/bind/bind.h"
#include "lua/bind/field.h"

static const char async_class[] = "luatrain.Async";

/* Returns argument `index`, which must be an int. */
static int check_int(lua_State *L, int index)
{
    lua_Integer value = luaL_checkinteger(L, index);
    luaL_argcheck(L, value >= INT_MIN && value <= INT_MAX, index, "out of range");
    return (int)value;
}

/* Reads the arguments that all kinds of asynchronous training have. Argument 2 is a table of
 * options: rule, a string; steps; and staleness, drop, max_lead and lam, which may be nil. Argument
 * 3 is the list of the net's buffers. See async.h. rule is borrowed from the table. Pushes the
 * memory of the array of buffers, which must stay on the stack while the result is in use. */
static lt_async_config read_config(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    int n;
    lt_tensor **buffers = lt__check_tensors(L, s, 3, "async", "a buffer", &n);
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_getfield(L, 2, "rule");
    lt_async_config config = {.rule = luaL_checkstring(L, -1),
                              .buffers = buffers,
                              .n_buffers = n,
                              .lam = lt__number_field(L, 2, "lam", 0),
                              .staleness = lt__integer_field(L, 2, "staleness", LT_ASYNC_UNBOUNDED),
                              .drop = lt__integer_field(L, 2, "drop", LT_ASYNC_UNBOUNDED),
                              .max_lead = lt__integer_field(L, 2, "max_lead", 0),
                              .steps = lt__integer_field(L, 2, "steps", 0)};
    lua_pop(L, 1);
    return config;
}

/* Starts asynchronous training. handle, on top of the stack, gets the methods below. */
static int start(lua_State *L, void **handle, lt_optim *optim, const lt_async_config *config)
{
    lt_lua *s = lt__lua(L);
    lt_async *async = lt_async_new(s->ctx, optim, config);
    if (!async)
        lt__raise(L, s);
    lt__fill_handle(L, handle, async);
    s->is_async = true;
    return 1;
}

/* Reads the options of a simulation from the table at o: workers, sigma, service and server_rate,
 * which may be nil, and the lists times, rates and latencies, whose memory belongs to the stack. */
static void read_simulation(lua_State *L, int o, lt_async_config *config)
{
    config->workers = (int)lt__integer_field(L, o, "workers", 1);
    config->sigma = lt__number_field(L, o, "sigma", 0);
    config->service = lt__number_field(L, o, "service", 0);
    config->server_rate = lt__number_field(L, o, "server_rate", 0);
    lua_getfield(L, o, "times");
    config->times = lt__check_numbers(L, lua_gettop(L), &config->n_times);
    lua_getfield(L, o, "rates");
    config->rates = lt__check_numbers(L, lua_gettop(L), &config->n_rates);
    lua_getfield(L, o, "latencies");
    config->latencies = lt__check_numbers(L, lua_gettop(L), &config->n_latencies);
}

/* simulate(optim, o, buffers): starts a simulation. optim is a handle of new_optim(); o has the
 * options: see read_config() and read_simulation(). */
static int simulate(lua_State *L)
{
    lt_optim *optim = lt__check_handle(L, lt__optim_class);
    lt_async_config config = read_config(L);
    read_simulation(L, 2, &config);
    return start(L, lt__push_handle(L, async_class), optim, &config);
}

/* replay(optim, o, buffers, workers, trace): replays a trace, a flat list of worker, ticket and
 * read for each step. The rest is as for simulate(). */
static int replay(lua_State *L)
{
    lt_optim *optim = lt__check_handle(L, lt__optim_class);
    lt_async_config config = read_config(L);
    lua_Integer n = luaL_len(L, 5) / 3;
    lt_async_step *trace = lua_newuserdatauv(L, (size_t)(n + 1) * sizeof *trace, 0);
    for (lua_Integer i = 0; i < n; i++) {
        for (int k = 1; k <= 3; k++)
            lua_rawgeti(L, 5, 3 * i + k);
        trace[i] = (lt_async_step){.worker = check_int(L, lua_gettop(L) - 2),
                                   .ticket = luaL_checkinteger(L, -2),
                                   .read = luaL_checkinteger(L, -1)};
        lua_pop(L, 3);
    }
    config.workers = check_int(L, 4);
    config.trace = trace;
    config.n_trace = n;
    return start(L, lt__push_handle(L, async_class), optim, &config);
}

/* Reads a list of ranks, or nil, as lt_async_config.lost. The array belongs to the stack. */
static const bool *check_lost(lua_State *L, int index, int ranks)
{
    if (lua_isnoneornil(L, index))
        return NULL;
    int n = (int)luaL_len(L, index);
    bool *lost = lua_newuserdatauv(L, (size_t)ranks * sizeof *lost, 0);
    memset(lost, 0, (size_t)ranks * sizeof *lost);
    for (int i = 1; i <= n; i++) {
        lua_rawgeti(L, index, i);
        lua_Integer rank = luaL_checkinteger(L, -1);
        luaL_argcheck(L, rank > 0 && rank < ranks, index, "a rank is out of range");
        lost[rank] = true;
        lua_pop(L, 1);
    }
    return lost;
}

/* live(optim, o, buffers, lost): starts asynchronous training on the ranks of the group. lost: nil,
 * or a list of the ranks that were lost before. The rest is as for simulate(). Until the handle is
 * closed, there are no collectives. */
static int live(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_optim *optim = lt__check_handle(L, lt__optim_class);
    lt_async_config config = read_config(L);
    config.prefetch = (int)lt__integer_field(L, 2, "prefetch", 1);
    config.lost = check_lost(L, 4, lt_group_size(s->group));
    config.group = s->group;
    void **handle = lt__push_handle(L, async_class); /* this may fail, so the server comes later */
    if (lt_group_rank(s->group) == 0 &&
        !(config.server = lt_open(&(lt_config){.device = "cpu", .threads = lt_threads(s->ctx)})))
        lt__raise(L, s);
    return start(L, handle, optim, &config);
}

/* needs_async(rule): checks the rule. From then on, optimizer steps outside of asynchronous
 * training are errors. */
static int needs_async(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_status status = lt_async_check_rule(luaL_checkstring(L, 1));
    lt__check(L, s, status == LT_OK ? LT_OK : lt_fail_prefix("--parallel"));
    s->needs_async = true;
    return 0;
}

/* async_issued(order): the number of tickets issued before a state was saved, from its tensor
 * "order"; -1 if that is damaged. */
static int async_issued(lua_State *L)
{
    lt_tensor *order = lt__check_tensor(L, lt__lua(L), 1, "async_issued", "order");
    return lt__return_integer(L, lt_async_issued(order));
}

/* joins_async(): whether the ranks train asynchronously. */
static int joins_async(lua_State *L) { return lt__return_boolean(L, lt__lua(L)->joins_async); }

/* is_elastic(): whether workers join and leave the job: see lt_serve_open(). */
static int is_elastic(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    return lt__return_boolean(L, s->group && lt_group_is_elastic(s->group));
}

/* write_key(path): on the server of an elastic job, writes its key to a file, unless it is in one
 * that the user has named. Returns the address at which workers join. */
static int write_key(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt__check(L, s, lt_serve_write_key(s->group, luaL_checkstring(L, 1)));
    lua_pushstring(L, lt_serve_address(s->group));
    return 1;
}

/* ==== Methods that call one function of async.h, which describes them ========================= */

static lt_async *self(lua_State *L) { return lt__check_handle(L, async_class); }

static int snapshot_at(lua_State *L)
{
    return lt__done(L, lt_async_snapshot_at(self(L), luaL_checkinteger(L, 2)));
}

static int load_snapshot(lua_State *L)
{
    return lt__done(L, lt_async_load_snapshot(self(L), luaL_checkinteger(L, 2)));
}

static int set_limit(lua_State *L)
{
    return lt__done(L, lt_async_set_limit(self(L), luaL_checkinteger(L, 2)));
}

static int read_server(lua_State *L) { return lt__done(L, lt_async_read(self(L))); }
static int release(lua_State *L) { return lt__done(L, lt_async_release(self(L))); }
static int finish(lua_State *L) { return lt__done(L, lt_async_finish(self(L))); }
static int is_written(lua_State *L) { return lt__return_boolean(L, lt_async_is_written(self(L))); }
static int steps(lua_State *L) { return lt__return_integer(L, lt_async_steps(self(L))); }
static int done_below(lua_State *L) { return lt__return_integer(L, lt_async_done_below(self(L))); }

static int free_snapshot(lua_State *L)
{
    lt_async_free_snapshot(self(L), luaL_checkinteger(L, 2));
    return 0;
}

static int accept_writes(lua_State *L)
{
    lt_async_accept_writes(self(L));
    return 0;
}

static int pause_server(lua_State *L)
{
    lt_async_pause(self(L), lua_toboolean(L, 2));
    return 0;
}

/* async:stop([code]) */
static int stop(lua_State *L)
{
    lt_async_stop(self(L), lua_isnoneornil(L, 2) ? 0 : check_int(L, 2));
    return 0;
}

/* async:stop_at(version, code) */
static int stop_at(lua_State *L)
{
    lt_async_stop_at(self(L), luaL_checkinteger(L, 2), check_int(L, 3));
    return 0;
}

/* async:push(lr) */
static int push(lua_State *L)
{
    lt_async_set_lr(self(L), luaL_checknumber(L, 2));
    return lt__done(L, lt_async_push(self(L)));
}

/* ==== Events and state ======================================================================== */

/* Pushes a table with the fields of an event. */
static int push_event(lua_State *L, const lt_async_event *e)
{
    static const char *const kinds[] = {
        [LT_ASYNC_EVENT_COMPUTE] = "compute", [LT_ASYNC_EVENT_PUSH] = "push",
        [LT_ASYNC_EVENT_LOST] = "lost",       [LT_ASYNC_EVENT_JOINED] = "joined",
        [LT_ASYNC_EVENT_STOP] = "stop",       [LT_ASYNC_EVENT_DONE] = "done"};
    lua_createtable(L, 0, 15);
    lt__set_string(L, "kind", kinds[e->kind]);
    lt__set_integer(L, "worker", e->worker);
    lt__set_integer(L, "ticket", e->ticket);
    if (e->applied > 0)
        lt__set_integer(L, "applied", e->applied);
    lt__set_integer(L, "delay", e->delay);
    lt__set_boolean(L, "dropped", e->dropped);
    lt__set_number(L, "loss", e->loss == e->loss ? e->loss : (double)NAN); /* without a sign */
    lt__set_number(L, "lr", e->lr);
    lt__set_number(L, "time", e->time);
    lt__set_integer(L, "done_below", e->done_below);
    lt__set_boolean(L, "timed_out", e->timed_out);
    lt__set_string(L, "host", e->host);
    lt__set_integer(L, "code", e->code);
    lt__push_dim_list(L, e->prefetched, e->n_prefetched);
    lua_setfield(L, -2, "prefetched");
    return 1;
}

/* async:next(): returns the next event, a table: kind = "compute", "push", "lost", "joined", "stop"
 * or "done"; and worker, host, ticket, applied, delay, dropped, loss, lr, time, done_below,
 * timed_out, code and prefetched: see lt_async_event. applied is nil if the push was skipped or
 * dropped. */
static int next(lua_State *L)
{
    lt_async_event e;
    lt__check(L, lt__lua(L), lt_async_next(self(L), &e));
    return push_event(L, &e);
}

/* async:poll(): returns an event like next(), or nothing. */
static int poll(lua_State *L)
{
    lt_async_event e;
    return lt_async_poll(self(L), &e) ? push_event(L, &e) : 0;
}

/* async:state(): returns a list of names and a list of tensors: the state for a checkpoint. */
static int state(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_async *async = self(L);
    char name[LT_ASYNC_NAME];
    lua_newtable(L);
    lua_newtable(L);
    for (int i = 0;; i++) {
        lt_tensor **box = lt__push_box(L, s);
        if (!(*box = lt_async_state(async, i, name))) {
            if (name[0])
                lt__raise(L, s);
            break;
        }
        lua_rawseti(L, 3, i + 1);
        lua_pushstring(L, name);
        lua_rawseti(L, 2, i + 1);
    }
    lua_settop(L, 3);
    return 2;
}

/* async:restore(names, tensors): restores a state. Returns how many tensors start at zero because
 * the lists do not have them. */
static int restore(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_async *async = self(L);
    const char **names;
    lt_tensor **tensors;
    int n = lt__check_named(L, s, 2, "async", &names, &tensors), fresh;
    lt__check(L, s, lt_async_restore(async, names, tensors, n, &fresh));
    return lt__return_integer(L, fresh);
}

/* async:stats(n): returns the memory per worker, the bytes on the wire, two lists with an item for
 * each of the n groups of the optimizer, strength and capped, and then server_busy, link_share and
 * queue_share; see lt_async_stats. */
static int stats(lua_State *L)
{
    lt_async *async = self(L);
    int n = check_int(L, 2);
    lt_async_stats all = {0};
    lua_settop(L, 2);
    lua_createtable(L, n, 0);
    lua_createtable(L, n, 0);
    for (int i = 0; i < n; i++) {
        lt__check(L, lt__lua(L), lt_async_read_stats(async, i, &all));
        lua_pushnumber(L, all.strength);
        lua_rawseti(L, 3, i + 1);
        lua_pushnumber(L, all.capped);
        lua_rawseti(L, 4, i + 1);
    }
    lua_pushinteger(L, (lua_Integer)all.worker_bytes);
    lua_pushinteger(L, all.wire_bytes);
    lua_rotate(L, 3, 2);
    lua_pushnumber(L, all.server_busy);
    lua_pushnumber(L, all.link_share);
    lua_pushnumber(L, all.queue_share);
    return 7;
}

static int async_gc(lua_State *L)
{
    lt_async **async = lua_touserdata(L, 1);
    if (*async)
        lt__lua(L)->is_async = false;
    lt_async_free(*async);
    *async = NULL;
    return 0;
}

/* ==== A simulated synchronous parameter server ================================================ */

static const char clock_class[] = "luatrain.ServerClock";

/* server_clock(o, bytes, time): a virtual clock; see lt_server_clock_new(). o has the options of
 * read_simulation(). */
static int server_clock(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_async_config config = {0};
    size_t bytes = (size_t)luaL_checkinteger(L, 2);
    double time = luaL_checknumber(L, 3);
    luaL_checktype(L, 1, LUA_TTABLE);
    read_simulation(L, 1, &config);
    void **handle = lt__push_handle(L, clock_class);
    lt__fill_handle(L, handle, lt_server_clock_new(s->ctx, &config, bytes, time));
    return 1;
}

/* clock:step(step): the time at the end of a step. */
static int clock_step(lua_State *L)
{
    lt_server_clock *clock = lt__check_handle(L, clock_class);
    lua_pushnumber(L, lt_server_clock_step(clock, luaL_checkinteger(L, 2)));
    return 1;
}

/* clock:stats(): returns server_busy, link_share and queue_share. */
static int clock_stats(lua_State *L)
{
    lt_async_stats all;
    lt_server_clock_stats(lt__check_handle(L, clock_class), &all);
    lua_pushnumber(L, all.server_busy);
    lua_pushnumber(L, all.link_share);
    lua_pushnumber(L, all.queue_share);
    return 3;
}

static int clock_gc(lua_State *L)
{
    lt_server_clock **clock = lua_touserdata(L, 1);
    lt_server_clock_free(*clock);
    *clock = NULL;
    return 0;
}

static const luaL_Reg functions[] = {LT_FN(simulate),    LT_FN(live),        LT_FN(replay),
                                     LT_FN(needs_async), LT_FN(joins_async), LT_FN(async_issued),
                                     LT_FN(is_elastic),  LT_FN(write_key),   LT_FN(server_clock),
                                     {NULL, NULL}};
static const luaL_Reg clock_methods[] = {
    {"step", clock_step}, {"stats", clock_stats}, {NULL, NULL}};
static const luaL_Reg methods[] = {
    LT_FN(set_limit),      LT_FN(next),          LT_FN(push),
    LT_FN(release),        LT_FN(finish),        LT_FN(done_below),
    LT_FN(snapshot_at),    LT_FN(load_snapshot), LT_FN(free_snapshot),
    {"read", read_server}, LT_FN(is_written),    LT_FN(accept_writes),
    LT_FN(stop),           LT_FN(stop_at),       {"pause", pause_server},
    LT_FN(poll),           LT_FN(state),         LT_FN(restore),
    LT_FN(stats),          LT_FN(steps),         {"close", async_gc},
    {NULL, NULL}};

void lt__open_async(lua_State *L)
{
    lt__register(L, functions);
    lt__new_class(L, async_class, methods, async_gc);
    lt__new_class(L, clock_class, clock_methods, clock_gc);
}
