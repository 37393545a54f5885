/* bind.h - what the files of the binding share. Private to this room.
 *
 * An error of Lua is a longjmp. It must never cross C that owns something. And whatever Lua makes,
 * a string too, may run the collector, and a finalizer may close any tensor or handle: a pointer
 * that was fetched before may be stale. So every function here works in this order: make the
 * userdata that will own the result, empty, and buffers of unknown size, which are userdata too;
 * check the arguments and fetch their pointers; call the library; put the result into the userdata;
 * only then raise, if the call failed, or push what else is given back.
 */
#ifndef LT_LUA_BIND_BIND_H
#define LT_LUA_BIND_BIND_H

#include <lauxlib.h>
#include <stdnoreturn.h>

#include "lua/luatrain.h"

enum { LT_MAX_OPEN = 64, LT_KEPT_ERRORS = 8 };
typedef enum lt_opened { LT_OPEN_SCOPE, LT_OPEN_NO_GRAD, LT_OPEN_AUTOCAST } lt_opened;

/* What a Lua state knows of luatrain: a userdata that lives as long as the state, and upvalue 1 of
 * every function. */
typedef struct lt_lua {
    lt_ctx *ctx;               /* NULL once the state closes */
    bool owned;                /* ctx ends with the state */
    lua_State *running;        /* the coroutine that is inside the library, else the main one */
    const void *tensor_meta;   /* the metatable of tensors, and its key in the registry */
    struct lt_lua_hook *hooks; /* all that leaves of ctx hold */
    lt_status raised[LT_KEPT_ERRORS]; /* the last errors, in a ring; see error.c */
    unsigned n_raised;         /* so far */
    struct {
        uint64_t serial;
        lt_opened what;
        lt_dtype before;       /* of autocast, to be put back */
    } open[LT_MAX_OPEN];
    int n_open;                /* what lt.step, lt.no_grad and lt.autocast have opened */
    uint64_t serial;           /* of the last */
    size_t fresh;              /* bytes of tensors given to Lua since its last collection */
    size_t limit;              /* how many of them start the next */
    double backward_s, optimizer_s; /* seconds spent in lt_backward() and lt_optim_step() */
    struct lt_lua_times *times; /* of ops, while they are taken and not asked for; or NULL */
    lt_loss_scale *scale;      /* in use, held by the registry; or NULL */
    struct {
        bool on, in_f32, done; /* done: a backward has come, and cut the function off */
        double loss;           /* its own, or nan */
    } dry_run;               /* see check.c */
    lt_group *group;           /* of this rank; NULL: there are no others */
    lt_reducer_config reducer_config;
    lt_reducer *reducer;       /* or NULL, without a group */
    lt_wire_scales wire_scales;            /* if buckets travel in f16 */
    bool no_sync;                /* bench dist: this rank goes its own way for some steps */
    bool on_root;              /* the others are not here: see dist.c */
    int64_t first_row;         /* of this rank in the batch, */
    int64_t shard_rows;        /* which has so many of it, */
    int64_t least_rows;        /* and every rank as many as that */
} lt_lua;

static inline lt_lua *lt__lua(lua_State *L)
{
    lt_lua *s = lua_touserdata(L, lua_upvalueindex(1));
    if (!s->ctx) /* in a finalizer of an object that is older than us */
        luaL_error(L, "luatrain is closed already");
    return s;
}

/* Pushes the lt_lua: for a closure with more upvalues than that. */
void lt__push_lua(lua_State *L);
/* The same where there is no upvalue; NULL before it is made. */
lt_lua *lt__lua_of(lua_State *L);
/* Puts functions, with the lt_lua as upvalue 1, into the table on top. */
void lt__register(lua_State *L, const luaL_Reg *functions);
/* Pushes the metatable of one kind of userdata: methods with the lt_lua as upvalue 1, and gc as
 * __gc and __close. */
void lt__new_class(lua_State *L, const char *name, const luaL_Reg *methods, lua_CFunction gc);

/* ==== Errors ================================================================================== */

/* Raises this thread's message, with the script's line and the module's path before it. */
noreturn void lt__raise(lua_State *L, lt_lua *s);
/* Sets the message and raises it: lt__error(L, s, LT_EINVAL, "...", ...). */
#define lt__error(L, s, ...) (lt_fail(__VA_ARGS__), lt__raise((L), (s)))
/* The same for LT_EINVAL, which is most of them. */
#define lt__refuse(L, s, ...) lt__error((L), (s), LT_EINVAL, __VA_ARGS__)
static inline void lt__check(lua_State *L, lt_lua *s, lt_status status)
{
    if (status != LT_OK)
        lt__raise(L, s);
}
/* Raises "who: unknown what 'word' (did you mean 'near'?)"; the candidates are the string keys of
 * the table on top. */
noreturn void lt__unknown(lua_State *L, lt_lua *s, const char *who, const char *what,
                          const char *word);
/* lt_where_fn: what a node of the tape remembers; ud is the lt_lua. */
void lt__where(void *ud, char *where, size_t bytes);

/* ==== Tensors ================================================================================= */

/* Pushes an empty tensor. Runs the collector first when that is due: see bind.c. */
lt_tensor **lt__push_box(lua_State *L, lt_lua *s);
/* box owns x, a new tensor; raises if x is NULL. */
void lt__fill_box(lua_State *L, lt_lua *s, lt_tensor **box, lt_tensor *x);
/* Collects garbage that holds tensors, when there may be enough of it. */
void lt__collect_for_backward(lua_State *L, lt_lua *s);
/* The empty box on top holds x, which others hold too; it becomes nil for NULL. */
void lt__share_box(lua_State *L, lt_tensor **box, lt_tensor *x);
/* The same for x, or for a copy of one that is not on the CPU. */
void lt__share_on_host(lua_State *L, lt_lua *s, lt_tensor **box, lt_tensor *x);
/* The tensor at index, or NULL when the value there is none. One that was closed is an error. */
lt_tensor *lt__to_tensor(lua_State *L, lt_lua *s, int index);
/* The same, and no tensor is an error: "who: what wants a tensor, it is a number". */
lt_tensor *lt__check_tensor(lua_State *L, lt_lua *s, int index, const char *who, const char *what);

/* The same for argument 1 of a method. */
static inline lt_tensor *lt__self(lua_State *L, const char *who)
{
    return lt__check_tensor(L, lt__lua(L), 1, who, "self");
}

/* "2", "'abc'", "nil", "a table": a value in a message, in a buffer on top of the stack. */
const char *lt__text(lua_State *L, int index);
/* A table of axis lengths. Returns how many. */
int lt__check_dims(lua_State *L, lt_lua *s, int index, const char *who, int64_t dims[LT_MAX_DIMS]);
lt_dtype lt__check_dtype(lua_State *L, lt_lua *s, int index, const char *who);
/* Raises if the table at index has keys other than 1 to n: "who has a key 0; its items count from
 * 1", and then `hint`. */
void lt__check_keys(lua_State *L, lt_lua *s, int index, lua_Unsigned n, const char *who,
                    const char *hint);
/* What such a hint says to makers of tensors. */
#define LT_OPTIONS_FOLLOW ", and options are the next argument"
/* The last argument of a maker: {dtype = "f64", device = "cpu"} or nothing. */
lt_dtype lt__check_maker_options(lua_State *L, lt_lua *s, int index, const char *who,
                                 struct lt_device **device);
/* The number at index; no number is an error: "who: what wants a number, it is 'a'". */
double lt__check_number(lua_State *L, lt_lua *s, int index, const char *who, const char *what);
/* The value at index is a number, and dtype can hold it. */
void lt__check_element(lua_State *L, lt_lua *s, int index, const char *who, lt_dtype dtype);
/* Whether dtype can hold the number at index: an integer dtype one that is whole and in range. */
bool lt__number_fits(lua_State *L, int index, lt_dtype dtype);
/* The number at index as one element of dtype, which can hold it. */
void lt__store_number(lua_State *L, int index, lt_dtype dtype, void *element);
/* x filled with the number at index; a whole one exactly. */
lt_status lt__fill_with(lua_State *L, int index, lt_tensor *x);
void lt__push_dims(lua_State *L, const lt_tensor *x);
int lt__arange(lua_State *L);

/* opts[0..n_opt) = the defaults of schema with the named values of the table at index over them. */
void lt__check_options(lua_State *L, lt_lua *s, const lt_schema *schema, int index, lt_opt *opts);

/* A path to a file. */
const char *lt__check_path(lua_State *L, lt_lua *s, int index, const char *who);
/* Arguments 1 and 2 are lists of names and of tensors of one length. Returns it. */
int lt__check_named(lua_State *L, lt_lua *s, const char *who);

/* ==== Handles: userdata that hold one pointer ================================================= */

/* Pushes an empty one; then it owns object, or raises if that is NULL. */
void **lt__push_handle(lua_State *L, const char *class);
void lt__fill_handle(lua_State *L, void **handle, void *object);
/* The object of argument 1. */
void *lt__check_handle(lua_State *L, const char *class);

/* ==== Loading Lua code ======================================================================== */

/* luaL_loadfile() of source text alone; path NULL is stdin. */
int lt__load_file(lua_State *L, const char *path);
/* After luaL_openlibs(): the standard functions that load code refuse what is compiled. */
void lt__open_load(lua_State *L);

/* ==== Parts: each adds to the table of the core, which is on top ============================== */

void lt__open_error(lua_State *L);
void lt__open_tensor(lua_State *L, lt_lua *s);
void lt__open_ops(lua_State *L, lt_lua *s); /* after lt__open_tensor: ops are methods too */
void lt__open_run(lua_State *L);
void lt__open_file(lua_State *L);
void lt__open_data(lua_State *L);
void lt__open_system(lua_State *L);
void lt__open_times(lua_State *L);
void lt__open_dist(lua_State *L);
void lt__open_amp(lua_State *L);
/* Buckets of s->reducer travel in f16: each times a power of two of its own, scale or none. */
lt_status lt__send_in_f16(lt_lua *s);
void lt__open_deferred(lua_State *L);
void lt__open_check(lua_State *L);
void lt__open_locale(lua_State *L);
/* Before a backward of loss in a dry run; and after it: the function of the dry run ends. */
void lt__dry_run_loss(lt_lua *s, lt_tensor *loss);
noreturn void lt__end_dry_run(lua_State *L, lt_lua *s);
/* The state closes: hooks that leaves still hold must not call it. */
void lt__drop_hooks(lt_lua *s);
/* Ends the timing of ops and forgets what was timed. */
void lt__drop_times(lt_lua *s);
/* How many parts of each batch this rank goes through, one after the other. */
int lt__shards(const lt_lua *s);
/* Where this rank is in its script, for others that may miss it: at what they do together. Raises
 * in lt.on_root. */
void lt__group_set_location(lua_State *L);

#endif
