/* run.c - training steps (backward, hooks, scopes) and the progress of a run (seed, steps, random
 * draws).
 *
 * Functions that are not tensor methods are called only by the embedded Lua files, so they take
 * plain lists.
 */
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "lua/bind/bind.h"
#include "lua/bind/field.h"

/* ==== Autograd ================================================================================ */

static int requires_grad(lua_State *L)
{
    lt_tensor *x = lt__self(L, "requires_grad");
    if (!lua_isnoneornil(L, 2) && !lua_isboolean(L, 2))
        lt__refuse(L, lt__lua(L), "requires_grad requires true or false, but got %s",
                   lt__text(L, 2));
    lt__check(L, lt__lua(L), lt_set_requires_grad(x, lua_isnoneornil(L, 2) || lua_toboolean(L, 2)));
    lua_settop(L, 1);
    return 1;
}

static int zero_grad(lua_State *L)
{
    lt_zero_grad(lt__self(L, "zero_grad"));
    lt__lua(L)->has_grads = false;
    return 0;
}

static int detach(lua_State *L)
{
    lua_settop(L, 1); /* else the box could become argument 1 */
    lt_tensor **box = lt__push_box(L, lt__lua(L));
    lt__fill_box(L, lt__lua(L), box, lt_detach(lt__self(L, "detach")));
    return 1;
}

static int keep(lua_State *L)
{
    lt_keep(lt__self(L, "keep"));
    lua_settop(L, 1);
    return 1;
}

/* Warns once if a backward pass precedes all batches that luatrain divides into micro-batches. */
static void warn_of_micro(lt_lua *s)
{
    if (!s->pipeline || s->micro < 2 || s->shard_rows > 0 || s->micro_warned)
        return;
    s->micro_warned = true;
    if (lt_group_rank(s->group) == 0)
        lt_log(
            s->ctx, LT_LOG_WARN,
            "a backward pass does not use a batch of set:batches or run:batches, so its batch is "
            "not divided into micro-batches, and the stages of the pipeline compute in turn");
}

/* Hooks run Lua code, which may close the loss or its gradient, so this keeps a reference to both
 * until backward returns. */
static int backward(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt__collect_for_backward(L, s);
    lt_tensor *x = lt__self(L, "backward");
    lt_tensor *grad = NULL;
    if (!lua_isnoneornil(L, 2))
        grad = lt__check_tensor(L, s, 2, "backward", "the gradient");
    lua_State *outer = s->running;
    double start = lt__seconds();
    s->running = L;
    s->has_grads |= !s->dry_run.on;
    if (s->dry_run.on) /* a dry run involves no other rank */
        lt__dry_run_loss(s, x);
    else
        lt__group_set_location(L);
    warn_of_micro(s);
    lt_retain(x);
    lt_retain(grad);
    lt_status status = lt_backward(x, grad);
    lt_release(grad);
    lt_release(x);
    s->running = outer;
    s->backward_s += lt__seconds() - start;
    lt_trace(s->ctx, LT_TRACK_STEP, "backward", start, lt__seconds() - start);
    lt__check(L, s, lt__name_line(L, status));
    if (s->dry_run.on)
        lt__end_dry_run(L, s);
    return 0;
}

/* ==== Hooks =================================================================================== */

/* A Lua gradient hook. A leaf may outlive the Lua state, so the hook is a C object that knows
 * whether its state still exists. */
typedef struct lt_lua_hook {
    struct lt_lua_hook *next, *prev;
    lt_lua *owner; /* NULL once the state is closed */
    int function;  /* reference in the registry */
} lt_lua_hook;

static int call_function(lua_State *L)
{
    const lt_lua_hook *h = lua_touserdata(L, 1);
    lua_rawgeti(L, LUA_REGISTRYINDEX, h->function);
    lt_tensor **box = lt__push_box(L, h->owner);
    lt__box_retain(L, box, lua_touserdata(L, 2));
    lua_call(L, 1, 0);
    return 0;
}

/* Keeps references to x and grad during the call, because the function may close them. The hook
 * lives as long as the leaf x. */
static lt_status run_hook(void *ud, lt_tensor *x, lt_tensor *grad)
{
    lt_lua_hook *h = ud;
    if (!h->owner)
        return LT_OK;
    lua_State *L = h->owner->running;
    if (!lua_checkstack(L, 4))
        return lt_fail(LT_ENOMEM, "out of memory for the Lua stack");
    lua_pushcfunction(L, call_function);
    lua_pushlightuserdata(L, h);
    lua_pushlightuserdata(L, grad);
    lt_retain(x);
    lt_retain(grad);
    lt_status status = lt_lua_call(L, 2, 0);
    h->owner->running = L;
    lt_release(grad);
    lt_release(x);
    return status;
}

static void free_hook(void *ud)
{
    lt_lua_hook *h = ud;
    if (h->owner) {
        if (h->prev)
            h->prev->next = h->next;
        else
            h->owner->hooks = h->next;
        if (h->next)
            h->next->prev = h->prev;
        luaL_unref(h->owner->running, LUA_REGISTRYINDEX, h->function);
    }
    free(h);
}

void lt__drop_hooks(lt_lua *s)
{
    for (lt_lua_hook *h = s->hooks; h; h = h->next)
        h->owner = NULL;
    s->hooks = NULL;
}

static int on_grad(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    lt_tensor *x = lt__self(L, "on_grad");
    if (!lua_isfunction(L, 2))
        lt__refuse(L, s, "on_grad: the hook must be a function, but is %s", lt__text(L, 2));
    lua_settop(L, 2);
    int function = luaL_ref(L, LUA_REGISTRYINDEX);
    lt_lua_hook *h = calloc(1, sizeof *h);
    lt_status status = h ? lt_on_grad(x, run_hook, h, free_hook)
                         : lt_fail(LT_ENOMEM, "out of memory for a hook");
    if (status != LT_OK) { /* lt_on_grad() took h and freed it */
        luaL_unref(L, LUA_REGISTRYINDEX, function);
        lt__raise(L, s);
    }
    *h = (lt_lua_hook){.next = s->hooks, .owner = s, .function = function};
    if (s->hooks)
        s->hooks->prev = h;
    s->hooks = h;
    return 1;
}

/* ==== Scopes ================================================================================== */

/* Ends a scope, no_grad or autocast when its function returns or raises an error. A guard is a Lua
 * to-be-closed value. Lua does not close these in a coroutine that fails, so there call_guarded()
 * catches the error and raises it again. */
typedef struct guard {
    uint64_t serial; /* 0: closed */
    int place;
} guard;

static void pop_scope(lt_lua *s)
{
    if (s->pipeline)
        lt_pipeline_pop_scope(s->pipeline);
    else
        lt_scope_pop(s->ctx);
}

static void close_last(lt_lua *s)
{
    switch (s->open[--s->n_open].what) {
    case LT_OPEN_SCOPE: pop_scope(s); break;
    case LT_OPEN_NO_GRAD: lt_grad_on(s->ctx); break;
    case LT_OPEN_AUTOCAST: lt_set_autocast(s->ctx, s->open[s->n_open].before); break;
    }
}

static void close_from(lt_lua *s, guard *g)
{
    if (g->serial && g->place < s->n_open && s->open[g->place].serial == g->serial)
        while (s->n_open > g->place)
            close_last(s);
    g->serial = 0;
}

static int close_guard(lua_State *L)
{
    close_from(lt__lua(L), lua_touserdata(L, 1));
    return 0;
}

/* Calls the function in slot 2, whose guard is in slot 1. On the main thread, where Lua closes the
 * guard, errors are not caught, so that the traceback shows where they were raised. */
static void call_guarded(lua_State *L, lt_lua *s, guard *g)
{
    int n_args = lua_gettop(L) - 2;
    bool is_main = lua_pushthread(L);
    lua_pop(L, 1);
    if (is_main) {
        lua_call(L, n_args, LUA_MULTRET);
    } else if (lua_pcall(L, n_args, LUA_MULTRET, 0) != LUA_OK) {
        close_from(s, g);
        lua_error(L);
    }
}

/* Moves the results of a step, from index first on, out of its scope: tensors, and tensors that are
 * direct items of tables. */
static void keep_results(lua_State *L, lt_lua *s, int first)
{
    for (int i = first; i <= lua_gettop(L); i++) {
        lt_tensor *x = lt__to_tensor(L, s, i);
        if (x)
            lt_keep_outer(x);
        if (!lua_istable(L, i))
            continue;
        lua_pushnil(L);
        while (lua_next(L, i)) {
            x = lt__to_tensor(L, s, lua_gettop(L));
            if (x)
                lt_keep_outer(x);
            lua_pop(L, 1);
        }
    }
}

static bool is_callable(lua_State *L, int index)
{
    if (lua_isfunction(L, index))
        return true;
    if (luaL_getmetafield(L, index, "__call") == LUA_TNIL)
        return false;
    lua_pop(L, 1);
    return true;
}

/* Calls the function or module in argument 1 with the arguments that follow, inside a scope,
 * no_grad or autocast. dtype: for autocast. */
static int call_within(lua_State *L, const char *who, lt_open_kind what, lt_dtype dtype)
{
    lt_lua *s = lt__lua(L);
    bool scope = what == LT_OPEN_SCOPE;
    if (!is_callable(L, 1))
        lt__refuse(L, s, "%s requires a function, but got %s", who, lt__text(L, 1));
    if (s->n_open == LT_MAX_OPEN)
        lt__refuse(L, s, "%s: more than %d of lt.step, lt.no_grad and lt.autocast are open", who,
                   LT_MAX_OPEN);
    guard *g = lua_newuserdatauv(L, sizeof *g, 0);
    g->serial = 0;
    luaL_setmetatable(L, "luatrain.Guard");
    lua_insert(L, 1);
    lua_toclose(L, 1);
    s->open[s->n_open].before = lt_autocast(s->ctx);
    if (scope)
        lt__check(L, s, lt_scope_push(s->ctx));
    else if (what == LT_OPEN_NO_GRAD)
        lt_grad_off(s->ctx);
    else
        lt_set_autocast(s->ctx, dtype);
    g->serial = s->open[s->n_open].serial = ++s->serial;
    s->open[s->n_open].what = what;
    g->place = s->n_open++;
    call_guarded(L, s, g);
    if (scope)
        keep_results(L, s, 2);
    return lua_gettop(L) - 1;
}

static int step(lua_State *L) { return call_within(L, "lt.step", LT_OPEN_SCOPE, LT_F32); }
static int no_grad(lua_State *L) { return call_within(L, "lt.no_grad", LT_OPEN_NO_GRAD, LT_F32); }

static const struct {
    const char *word;
    lt_dtype dtype;
} precisions[] = {{"off", LT_F32}, {"bf16", LT_BF16}, {"fp16", LT_F16}, {NULL, LT_F32}};

/* autocast(precision, function, ...): precision is "off", "bf16" or "fp16". */
static int autocast(lua_State *L)
{
    const char *word = lua_type(L, 1) == LUA_TSTRING ? lua_tostring(L, 1) : "";
    int i = 0;
    while (precisions[i].word && strcmp(word, precisions[i].word) != 0)
        i++;
    if (!precisions[i].word)
        lt__refuse(L, lt__lua(L),
                   "lt.autocast: precision must be 'off', 'bf16' or 'fp16', but is %s",
                   lt__text(L, 1));
    lua_remove(L, 1);
    bool in_f32 = lt__lua(L)->dry_run.in_f32;
    return call_within(L, "lt.autocast", LT_OPEN_AUTOCAST, in_f32 ? LT_F32 : precisions[i].dtype);
}

/* amp(): returns the precision that lt.autocast has set: "off", "bf16" or "fp16". */
static int amp(lua_State *L)
{
    lt_dtype dtype = lt_autocast(lt__lua(L)->ctx);
    int i = 0;
    while (precisions[i].dtype != dtype)
        i++;
    return lt__return_string(L, precisions[i].word);
}

static int bn_stats_synchronize(lua_State *L)
{
    return lt__done(L, lt_bn_stats_synchronize(lt__lua(L)->ctx));
}

/* ==== Progress of a run ======================================================================= */

/* Reads argument 1, a count of at least 0. */
static int64_t check_count(lua_State *L, const char *who)
{
    int whole;
    lua_Integer n = lua_tointegerx(L, 1, &whole);
    if (!whole || n < 0)
        lt__refuse(L, lt__lua(L), "%s requires a non-negative integer, but got %s", who,
                   lt__text(L, 1));
    return n;
}

/* seed(n): if n is not nil, sets the seed to n and restarts all random numbers. LUATRAIN_SEED has
 * precedence over n. Returns the seed. */
static int seed(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    const char *fixed = getenv("LUATRAIN_SEED");
    if (!lua_isnoneornil(L, 1)) {
        int64_t value = check_count(L, "lt.seed");
        if (s->is_async)
            lt__refuse(L, s,
                       "lt.seed: in asynchronous training, random numbers depend on the ticket; "
                       "call it before the run or after its end");
        lt_set_seed(s->ctx, fixed && *fixed ? lt_seed(s->ctx) : (uint64_t)value);
    }
    return lt__return_integer(L, (lua_Integer)lt_seed(s->ctx));
}

/* steps(): returns the number of optimizer steps taken in this context. */
static int steps(lua_State *L) { return lt__return_integer(L, lt_step(lt__lua(L)->ctx)); }

/* random_step(): returns the number of optimizer steps since the seed was set. */
static int random_step(lua_State *L)
{
    return lt__return_integer(L, lt_random_step(lt__lua(L)->ctx));
}

/* set_step(n[, random]): sets the number of steps taken to n and, if `random` is given, the result
 * of random_step() to it. The next step starts at row 0 of the batch. */
static int set_step(lua_State *L)
{
    lt_ctx *ctx = lt__lua(L)->ctx;
    lt_set_step(ctx, check_count(L, "set_step"));
    if (!lua_isnoneornil(L, 2))
        lt_set_random_step(ctx, luaL_checkinteger(L, 2));
    lt_tape_set_first_row(lt_tape_current(ctx), 0);
    return 0;
}

/* draws(): returns how often lt.rand and lt.randn have drawn since the seed was set. */
static int draws(lua_State *L)
{
    lt_ctx *ctx = lt__lua(L)->ctx;
    uint64_t next = lt_next_draw(ctx);
    lt_set_next_draw(ctx, next);
    return lt__return_integer(L, (lua_Integer)next);
}

static int set_draws(lua_State *L)
{
    lt_set_next_draw(lt__lua(L)->ctx, (uint64_t)check_count(L, "set_draws"));
    return 0;
}

/* set_first_row(n): declares that the next pass starts at row n, from 0, of this rank's shard. */
static int set_first_row(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    int64_t row = check_count(L, "set_first_row");
    lt_tape_set_first_row(lt_tape_current(s->ctx), s->first_row + row);
    return 0;
}

/* take_micro_batch(i, n): begins micro-batch i of the n that lt.micro_batches makes of this rank's
 * shard. */
static int take_micro_batch(lua_State *L)
{
    lt_lua *s = lt__lua(L);
    int i = (int)luaL_checkinteger(L, 1);
    if (i == 1)
        lt__check_micro_batches(L, s, "another loop over lt.micro_batches begins", "");
    s->micro_batch = i;
    s->micro_batches = (int)luaL_checkinteger(L, 2);
    lt__where(s, s->batch_line, sizeof s->batch_line);
    return 0;
}

/* times(): returns {backward = , optimizer = }, the seconds spent so far in backward and in
 * optimizer steps. */
static int times(lua_State *L)
{
    const lt_lua *s = lt__lua(L);
    lua_createtable(L, 0, 2);
    lt__set_number(L, "backward", s->backward_s);
    lt__set_number(L, "optimizer", s->optimizer_s);
    return 1;
}

static const luaL_Reg tensor_methods[] = {
    {"Tensor:requires_grad(on?: boolean) -> Tensor "
     "-- Makes it a leaf that collects a gradient.",
     requires_grad},
    {"Tensor:zero_grad() -- Drops the gradient.", zero_grad},
    {"Tensor:detach() -> Tensor -- A view that is not on the tape.", detach},
    {"Tensor:keep() -> Tensor -- Keeps the tensor beyond the step that made it.", keep},
    {"Tensor:backward(gradient?: Tensor) "
     "-- Computes the gradients of the leaves and adds them to leaf.grad.",
     backward},
    {"Tensor:on_grad(hook: fun(gradient: Tensor)) "
     "-- Calls hook when backward has computed the gradient of a leaf.",
     on_grad},
    {NULL, NULL}};

static const luaL_Reg functions[] = {
    {"lt.step(fn: function; ...: any) -> any ... "
     "-- lt.step(fn, ...): calls fn, frees its temporaries",
     step},
    {"lt.no_grad(fn: function; ...: any) -> any ... "
     "-- lt.no_grad(fn, ...): calls fn without recording the tape",
     no_grad},
    {"lt.autocast(precision: Precision; fn: function; ...: any) -> any ... "
     "-- lt.autocast(\"bf16\", fn, ...): mixed precision; \"off\": none",
     autocast},
    {"lt.steps() -> integer -- The number of optimizer steps that were taken.", steps},
    LT_FN(amp),
    LT_FN(bn_stats_synchronize),
    LT_FN(seed),
    LT_FN(random_step),
    LT_FN(set_step),
    LT_FN(draws),
    LT_FN(set_draws),
    LT_FN(set_first_row),
    LT_FN(take_micro_batch),
    LT_FN(times),
    {NULL, NULL}};

void lt__open_run(lua_State *L)
{
    lt__register(L, functions);
    lua_getfield(L, -1, "tensor_methods");
    lt__register(L, tensor_methods);
    lua_pop(L, 1);
    lt__new_class(L, "luatrain.Guard", NULL, close_guard);
}
