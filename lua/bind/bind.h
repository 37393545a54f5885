/* bind.h - declarations shared by the files of the Lua binding. Private to lua.
 *
 * A Lua error is a longjmp. It must never jump over C code that owns something. Also, any Lua
 * allocation, even of a string, may run the collector, and a finalizer may close any tensor or
 * handle. A pointer fetched earlier may then be stale. So every function here works in this order:
 *   1. Create the empty userdata that will own the result. Buffers of unknown size are userdata.
 *   2. Check the arguments and fetch their pointers.
 *   3. Call the library.
 *   4. Store the result in the userdata.
 *   5. Only then raise an error if the call failed, or push further results.
 */
#ifndef LT_LUA_BIND_BIND_H
#define LT_LUA_BIND_BIND_H

#include <lauxlib.h>
#include <math.h>
#include <stdnoreturn.h>

#include "lua/luatrain.h"

enum { LT_MAX_OPEN = 64, LT_KEPT_ERRORS = 8, LT_MIN_GC_THRESHOLD = 128 << 20 };
typedef enum lt_open_kind { LT_OPEN_SCOPE, LT_OPEN_NO_GRAD, LT_OPEN_AUTOCAST } lt_open_kind;

/* The binding's data for one Lua state. It is a userdata that lives as long as the state, and
 * upvalue 1 of every bound function. */
typedef struct lt_lua {
    lt_ctx *ctx;               /* NULL once the state closes */
    bool owned;                /* closing the state frees ctx */
    lua_State *running;        /* the coroutine that called the library, else the main thread */
    const void *tensor_meta;   /* address of the tensors' metatable; also its registry key */
    struct lt_lua_hook *hooks; /* list of the Lua hooks of leaves of ctx */
    lt_status raised[LT_KEPT_ERRORS]; /* ring buffer of the latest statuses; see error.c */
    unsigned n_raised;                /* errors raised so far */
    struct {
        uint64_t serial;
        lt_open_kind what;
        lt_dtype before;            /* autocast dtype to restore */
    } open[LT_MAX_OPEN];            /* stack of active lt.step, lt.no_grad and lt.autocast calls */
    int n_open;                     /* depth of the stack */
    uint64_t serial;                /* serial of the latest entry ever pushed */
    size_t fresh;                   /* bytes of tensors given to Lua since the last collection */
    size_t limit;                   /* a collection starts when fresh exceeds this */
    double backward_s, optimizer_s; /* seconds spent in lt_backward() and lt_optim_step() */
    struct lt_lua_times *times;     /* op timings until op_times() returns them, or NULL */
    lt_loss_scale *scale;           /* the scale in use, which the registry keeps; or NULL */
    struct {
        bool on, in_f32, done; /* done: the first backward has run and ended the function */
        double loss;           /* loss of that backward, or NAN */
    } dry_run;                 /* see check.c */
    lt_group *group;           /* this rank's group, borrowed; NULL without other ranks */
    lt_reducer_config reducer_config;
    lt_reducer *reducer; /* owned; NULL without a group */
    /* (ranks + 1) for unequal shards: for each rank, the number of parts of a batch that the ranks
     * before it have; then the number of all parts. Owned; NULL for equal shards */
    int *share;
    int share_changes;                      /* calls of set_share(); see dist.c */
    lt_wire_scales wire_scales;             /* used if buckets travel in f16 */
    const lt_lua_pipeline *joined_pipeline; /* borrowed; NULL unless the ranks train in one */
    lt_pipeline *pipeline;                  /* owned; NULL until it is opened */
    struct lt_lua_plan *plan;               /* owned; see pipeline.c */
    lt_profile *profile; /* profile of the net that the script makes; borrowed, or NULL */
    int profile_rank, profile_ranks; /* in a profile: this rank, and the number of ranks */
    lt_group *job_group;             /* in a profile: the group of lt.barrier; borrowed, or NULL */
    int micro;                       /* micro-batches of a batch and replica */
    bool joins_async;    /* the ranks train asynchronously, without a reducer; see async.c */
    bool needs_async;    /* optimizer steps require asynchronous training, perhaps simulated */
    bool is_async;       /* the training is asynchronous: no collectives, shards or other ranks */
    bool no_sync;        /* bench dist: this rank skips the gradient exchange for now */
    bool on_root;        /* inside lt.on_root, which only rank 0 runs; see dist.c */
    int n_cross_entropy; /* calls of cross_entropy; see calls_of_cross_entropy() in ops.c */
    bool micro_warned;   /* see warn_of_micro() in run.c */
    int part, parts;     /* current shard or micro-batch of the batch, from 1, and their number;
                         * part is 0 outside of batches */
    int done_parts;      /* parts that had their optimizer step; 0 after the last one */
    int micro_batch, micro_batches; /* the same for lt.micro_batches; 0, 0 outside of it */
    bool has_grads; /* a backward pass has run since the batch began or the last step */
    char batch_line[LT_WHERE_BYTES]; /* the script's line that took the part or micro-batch */
    int64_t first_row;               /* this shard's first row in the batch, from 0 */
    int64_t shard_rows;              /* rows of this shard, at least 1; 0 before the first batch */
    int64_t least_rows;              /* rows of the smallest shard, at least 1 */
} lt_lua;

static inline lt_lua *lt__lua(lua_State *L)
{
    lt_lua *s = lua_touserdata(L, lua_upvalueindex(1));
    if (!s->ctx) /* called by the finalizer of an object that is older than the lt_lua */
        luaL_error(L, "luatrain is already closed");
    return s;
}

/* Pops the lt_lua of a new state and stores it in the registry. */
void lt__set_lua(lua_State *L);
/* Pushes the lt_lua, to build a closure with further upvalues. */
void lt__push_lua(lua_State *L);
/* Returns the lt_lua from the registry, for functions without upvalues; NULL before it exists. */
lt_lua *lt__lua_of(lua_State *L);
/* Adds functions, with the lt_lua as upvalue 1, to the table on top. The name of a public function
 * is its signature, "Tensor:fill(value: number) -> Tensor -- What it does."; it is added as "fill".
 * Only the signature names the parameters: the check for excess arguments and the annotations for
 * editors are derived from it. tools/annotation_types.lua describes the types. */
void lt__register(lua_State *L, const luaL_Reg *functions);
#define LT_SIGNATURES "luatrain.signatures" /* registry key of the signatures by path, "lt.zeros" */
/* Rows of luaL_Reg: LT_FN(rank) adds rank(); LT_METHOD(file, read) adds file_read() as "read". */
/* clang-format off */
#define LT_FN(name) {#name, name}
#define LT_METHOD(class, name) {#name, class##_##name}
/* clang-format on */
/* Creates the metatable of a userdata class. Its methods, or NULL, get the lt_lua as upvalue 1; gc
 * becomes both __gc and __close. */
void lt__new_class(lua_State *L, const char *name, const luaL_Reg *methods, lua_CFunction gc);

/* ==== Errors ================================================================================== */

/* Raises this thread's message. Prefixes it with the script's line and the module's path if the
 * error has a place in the script; see error.c. */
noreturn void lt__raise(lua_State *L, lt_lua *s);
/* Sets the message and raises it: lt__error(L, s, LT_EINVAL, "...", ...). */
#define lt__error(L, s, ...) (lt_fail(__VA_ARGS__), lt__raise((L), (s)))
/* Like lt__error() with LT_EINVAL, the most common status. */
#define lt__refuse(L, s, ...) lt__error((L), (s), LT_EINVAL, __VA_ARGS__)
static inline void lt__check(lua_State *L, lt_lua *s, lt_status status)
{
    if (status != LT_OK)
        lt__raise(L, s);
}
/* Pushes " (did you mean 'near'?)" if one of names[0..n) is close to word, else `otherwise`.
 * Returns the string. */
const char *lt__hint(lua_State *L, const char *word, const char *const *names, int n,
                     const char *otherwise);
/* What to use instead of a name of PyTorch or NumPy, such as "x:count()" for "numel"; a static
 * string. NULL for other names. */
const char *lt__foreign(const char *name);
/* Raises if the script has left lt.micro_batches early, after a backward pass. what: what it does
 * now; at: its line, or "" for the one that is running. */
void lt__check_micro_batches(lua_State *L, lt_lua *s, const char *what, const char *at);
/* Whether a function is defined in an embedded Lua file. ar->source must be set. */
bool lt__is_embedded(const lua_Debug *ar);
/* The lt_where_fn of the binding: writes the location that a tape node stores. ud is the lt_lua. */
void lt__where(void *ud, char *where, size_t bytes);
/* Adds the script's line to the usage error of an op, a backward or an optimizer. lt__raise() does
 * not, since the cause of most usage errors is a flag. Returns status. */
lt_status lt__name_line(lua_State *L, lt_status status);

/* Pushes an element of a tensor, or a sum, without the sign of a nan: Lua would print "-nan". */
static inline void lt__push_number(lua_State *L, double value)
{
    lua_pushnumber(L, value == value ? value : (double)NAN);
}

/* ==== Results ================================================================================= */

/* Push one value, and return the number of results of a bound function: 1. */
static inline int lt__return_boolean(lua_State *L, bool value)
{
    lua_pushboolean(L, value);
    return 1;
}

static inline int lt__return_integer(lua_State *L, lua_Integer value)
{
    lua_pushinteger(L, value);
    return 1;
}

static inline int lt__return_number(lua_State *L, double value)
{
    lua_pushnumber(L, value);
    return 1;
}

static inline int lt__return_string(lua_State *L, const char *value) /* NULL is nil */
{
    lua_pushstring(L, value);
    return 1;
}

/* Pushes several integers and returns their number. */
#define lt__return_integers(L, ...)                                                                \
    lt__push_integers((L), (lua_Integer[]){__VA_ARGS__},                                           \
                      sizeof(lua_Integer[]){__VA_ARGS__} / sizeof(lua_Integer))
int lt__push_integers(lua_State *L, const lua_Integer *values, size_t n);
/* Raises unless status is LT_OK. Returns 0, for a function without results. */
static inline int lt__done(lua_State *L, lt_status status)
{
    lt__check(L, lt__lua(L), status);
    return 0;
}

/* Push a list of n values. */
void lt__push_dim_list(lua_State *L, const int64_t *dims, int n);
void lt__push_number_list(lua_State *L, const double *numbers, int n);
void lt__push_string_list(lua_State *L, const char *const *strings, int n);

/* ==== Tensors ================================================================================= */

/* Pushes an empty box, a userdata that can own a reference to a tensor. First runs the collector if
 * that is due; see bind.c. */
lt_tensor **lt__push_box(lua_State *L, lt_lua *s);
/* Moves the new tensor x into box; x is taken. Raises this thread's message if x is NULL. */
void lt__fill_box(lua_State *L, lt_lua *s, lt_tensor **box, lt_tensor *x);
/* Runs the collector if enough bytes of tensors may be garbage. */
void lt__collect_for_backward(lua_State *L, lt_lua *s);
/* Puts x, kept, into the empty box on top. If x is NULL, replaces the box with nil. */
void lt__box_retain(lua_State *L, lt_tensor **box, lt_tensor *x);
/* Like lt__box_retain(), but stores a CPU copy of x if x is on another device. x must not be NULL.
 * Raises if the copy fails. */
void lt__box_retain_on_host(lua_State *L, lt_lua *s, lt_tensor **box, lt_tensor *x);
/* Returns the tensor at index, borrowed, or NULL if the value is not a tensor. Raises if the tensor
 * was closed. */
lt_tensor *lt__to_tensor(lua_State *L, lt_lua *s, int index);
/* Like lt__to_tensor(), but raises "who: what must be a tensor, but is 5" for other values. */
lt_tensor *lt__check_tensor(lua_State *L, lt_lua *s, int index, const char *who, const char *what);

/* Returns argument 1 of a method, a tensor. Raises "x:who must be called with a colon: x:who(...)"
 * for other values. */
lt_tensor *lt__self(lua_State *L, const char *who);

/* Describes the value at index for a message: "2", "'abc'", "nil", "a table". Pushes the string. */
const char *lt__text(lua_State *L, int index);
/* Reads a table of axis lengths. Returns the number of axes. Raises LT_EINVAL for other values, as
 * do all functions named lt__check_... in this section. */
int lt__check_dims(lua_State *L, lt_lua *s, int index, const char *who, int64_t dims[LT_MAX_DIMS]);
/* Reads the name of a dtype, such as "f32". */
lt_dtype lt__check_dtype(lua_State *L, lt_lua *s, int index, const char *who);
/* Raises "who has a key 0; its items count from 1" followed by hint, if the table at index has a
 * key other than 1 to n. */
void lt__check_keys(lua_State *L, lt_lua *s, int index, lua_Unsigned n, const char *who,
                    const char *hint);
/* The hint of functions that create tensors. */
#define LT_OPTIONS_FOLLOW ", and options are the next argument"
/* Reads the options of a function that creates a tensor: {dtype = "f64", device = "cpu"} or nil.
 * The defaults are f32 and the context's device. *device is borrowed. Also raises LT_EENV for a
 * device that the context does not have. */
lt_dtype lt__check_constructor_options(lua_State *L, lt_lua *s, int index, const char *who,
                                       struct lt_device **device);
/* Reads a number, or raises "who: what must be a number, but is 'a'". Does not convert strings. */
double lt__check_number(lua_State *L, lt_lua *s, int index, const char *who, const char *what);
/* Raises unless the value at index is a number that fits dtype. */
void lt__check_element(lua_State *L, lt_lua *s, int index, const char *who, lt_dtype dtype);
/* Whether dtype can represent the number at index. An integer dtype can represent whole numbers in
 * its range. */
bool lt__number_fits(lua_State *L, int index, lt_dtype dtype);
/* Writes the number at index, which must fit dtype, as one element of dtype. */
void lt__store_number(lua_State *L, int index, lt_dtype dtype, void *element);
/* Fills x with the number at index: calls lt_fill_integer() for a Lua integer, else lt_fill(). */
lt_status lt__fill_with(lua_State *L, int index, lt_tensor *x);
/* Pushes the shape of x as a table. */
void lt__push_dims(lua_State *L, const lt_tensor *x);

/* Sets opts[0..n_opt) to the defaults of schema, overridden by the named values in the table at
 * index. */
void lt__check_options(lua_State *L, lt_lua *s, const lt_schema *schema, int index, lt_opt *opts);

/* Returns the path at index, borrowed from the Lua string. Raises if it is not a string or contains
 * a zero byte. */
const char *lt__check_path(lua_State *L, lt_lua *s, int index, const char *who);
/* Read the list at index into an array, userdata on top of the stack. *n: its length. Strings and
 * tensors are borrowed from the list. Raise for an item of another type. */
double *lt__check_numbers(lua_State *L, int index, int *n);
const char **lt__check_strings(lua_State *L, int index, int *n);
lt_tensor **lt__check_tensors(lua_State *L, lt_lua *s, int index, const char *who, const char *what,
                              int *n);
/* Reads argument `first`, a list of names, and the next argument, a list with a tensor for each,
 * into arrays, userdata on top of the stack. Returns their length. */
int lt__check_named(lua_State *L, lt_lua *s, int first, const char *who, const char ***names,
                    lt_tensor ***tensors);

/* ==== Handles: userdata that store one pointer ================================================ */

/* Pushes an empty handle of a class. */
void **lt__push_handle(lua_State *L, const char *class);
/* Moves object into handle; taken. Raises this thread's message if object is NULL. */
void lt__fill_handle(lua_State *L, void **handle, void *object);
/* Returns the object of the handle in argument 1, borrowed. Raises if the argument is not a handle
 * of this class or was closed. */
void *lt__check_handle(lua_State *L, const char *class);
extern const char lt__optim_class[]; /* class of handles to an lt_optim */
/* Defines the finalizer of a class of handles. free_object(object) must accept NULL. */
#define LT_FINALIZER(name, free_object)                                                            \
    static int name(lua_State *L)                                                                  \
    {                                                                                              \
        void **handle = lua_touserdata(L, 1);                                                      \
        free_object(*handle);                                                                      \
        *handle = NULL;                                                                            \
        return 0;                                                                                  \
    }

/* ==== Loading Lua code ======================================================================== */

/* Like luaL_loadfile(), but refuses compiled code. If path is NULL, reads stdin. */
int lt__load_file(lua_State *L, const char *path);
/* Makes the standard functions that load code refuse compiled code. Call after luaL_openlibs(). */
void lt__open_load(lua_State *L);

/* ==== Parts: each adds its functions to the core table, which is on top ======================= */

void lt__open_error(lua_State *L);
void lt__open_hint(lua_State *L);
void lt__open_tensor(lua_State *L, lt_lua *s);
void lt__open_arange(lua_State *L);         /* after lt__open_tensor(): adds to its constructors */
void lt__open_ops(lua_State *L, lt_lua *s); /* after lt__open_tensor(): ops are also methods */
void lt__open_run(lua_State *L);
void lt__open_optim(lua_State *L);
void lt__open_file(lua_State *L);
void lt__open_data(lua_State *L);
void lt__open_system(lua_State *L);
void lt__open_times(lua_State *L);
void lt__open_dist(lua_State *L);
void lt__open_shards(lua_State *L);
void lt__open_async(lua_State *L);
void lt__open_pipeline(lua_State *L);
void lt__open_plan(lua_State *L);
void lt__open_amp(lua_State *L);
void lt__open_deferred(lua_State *L);
void lt__open_check(lua_State *L);
void lt__open_locale(lua_State *L);

/* ==== Used by several parts =================================================================== */

/* In a dry run, before backward: records the value of loss, or NAN if it has no single value. A
 * second backward changes nothing. */
void lt__dry_run_loss(lt_lua *s, lt_tensor *loss);
/* In a dry run, after backward: raises the error that ends the function of the dry run. */
noreturn void lt__end_dry_run(lua_State *L, lt_lua *s);
/* When the state closes: detaches it from the hooks of leaves that still exist. They then do
 * nothing. */
void lt__drop_hooks(lt_lua *s);
/* Ends the timing of ops and discards the results. */
void lt__drop_times(lt_lua *s);
/* The rank of this state in its group, from 0, and the number of ranks that train together with it:
 * 1 in asynchronous training. */
int lt__rank_of(const lt_lua *s);
int lt__size_of(const lt_lua *s);
/* The number of shards of each batch that this rank computes, one after the other. */
int lt__shards(const lt_lua *s);
/* Returns x, or in a pipeline a tensor on top of the stack that has its values on all ranks. The
 * ranks must call it together. Raises its errors. */
lt_tensor *lt__here(lua_State *L, lt_lua *s, lt_tensor *x);
/* Called before the script writes to x. Returns whether this rank has x. If not, the rank that has
 * it must make the same write, which check_writes() in pipeline_mode.lua verifies later. Raises
 * inside lt.on_root if x belongs to a stage of a pipeline. */
bool lt__begin_write(lua_State *L, lt_lua *s, const lt_tensor *x);
/* Prepares the state of a rank that has joined its group for the first script. */
LT_NODISCARD lt_status lt__begin_rank(lua_State *L);
/* Trains with data parallelism on all ranks of a group. */
LT_NODISCARD lt_status lt__use_reducer(lt_lua *s, lt_group *group);
void lt__close_pipeline(lt_lua *s); /* without a pipeline it does nothing */
/* Records where this rank is in its script, for the messages of ranks that wait for it in a
 * collective. Raises inside lt.on_root. */
void lt__group_set_location(lua_State *L);

#endif
