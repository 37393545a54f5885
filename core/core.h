/* core.h - the door of core: status, log, dtypes, context, tensors, scopes, random numbers,
 * files.
 *
 * Nothing here knows any maths beyond copy, fill and cast. There are no globals: everything
 * hangs off an lt_ctx, so that ranks can be threads and two trainers can live in one program.
 *
 * Errors. A function that can fail returns an lt_status that must be looked at; a maker returns
 * NULL instead. Either way lt_errmsg() holds one sentence for the user, per thread. The library
 * never prints, exits or aborts.
 *
 * Locale. Messages and files have decimal points in any locale; see lua/luatrain.h.
 *
 * Ownership, in four words used by every header:
 *   new       the caller owns the result and gives it back with the matching release, free or close
 *   borrowed  the result lives as long as its owner; do not release it
 *   kept      the callee takes a reference of its own; the caller still owns its one
 *   taken     the callee owns the argument from now on, also when it fails
 */
#ifndef LUATRAIN_CORE_H
#define LUATRAIN_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LT_VERSION "0.1.0"

#define LT_API __attribute__((visibility("default")))
#define LT_MUST LT_API __attribute__((warn_unused_result))
#define LT_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

/* ==== Status ================================================================================== */

/*    name               exit  what it means */
#define LT_STATUS_LIST(X)                                                                          \
    X(LT_OK,              0, "ok")                                                                 \
    X(LT_EINVAL,          1, "invalid argument")         /* shape, dtype, option, misuse */        \
    X(LT_ESCRIPT,         1, "script error")                                                       \
    X(LT_EUSAGE,          2, "usage error")                                                        \
    X(LT_EENV,            3, "missing from this machine") /* library, device, package */           \
    X(LT_EDATA,           4, "bad data")                                                           \
    X(LT_EFILE,           5, "bad checkpoint")           /* or any other file of tensors */        \
    X(LT_ENUMERIC,        6, "non-finite number")                                                  \
    X(LT_ENOMEM,          7, "out of memory")                                                      \
    X(LT_EPEER,           8, "peer lost")                                                          \
    X(LT_EDESYNC,         9, "ranks disagree")                                                     \
    X(LT_EUNSUPPORTED,    1, "not supported")            /* a kernel says so: try another one */   \
    X(LT_EDONE,           0, "done early")               /* on purpose: nothing is wrong */        \
    X(LT_ESTOPPED,       75, "stopped by a signal")      /* all is saved: run it again */

typedef enum lt_status {
#define X(name, exit, text) name,
    LT_STATUS_LIST(X)
#undef X
    LT_STATUS_COUNT
} lt_status;

/* LT_EXIT + code is the status of a script that ends the program with a code of its own, from 1 to
 * 255. */
enum { LT_EXIT = 256 };

/* Process exit code for a status, and its generic text. */
LT_API int lt_exit_code(lt_status status);
LT_API const char *lt_status_text(lt_status status);

/* Sets this thread's message and code; returns code, so that `return lt_fail(...)` reads well. */
LT_API lt_status lt_fail(lt_status code, const char *fmt, ...) LT_PRINTF(2, 3);
/* Puts "prefix: " before this thread's message; returns its code. */
LT_API lt_status lt_fail_prefix(const char *fmt, ...) LT_PRINTF(1, 2);
/* This thread's last message and code. Borrowed; valid until the next failure in this thread. */
LT_API const char *lt_errmsg(void);
LT_API lt_status lt_errcode(void);

/* Returns upward if expr fails. For functions that own nothing at that point. */
#define LT_TRY(expr)                                                                               \
    do {                                                                                           \
        lt_status lt_try_ = (expr);                                                                \
        if (lt_try_ != LT_OK)                                                                      \
            return lt_try_;                                                                        \
    } while (0)

/* Index in names[0..n) of the name nearest to word, or -1 when none is near. For "did you mean".
 * When no spelling is near, a name that ends with the word will do: weight_decay for decay. */
LT_API int lt_nearest(const char *word, const char *const *names, int n);

/* ==== Dtypes ================================================================================== */

/*    name  bytes  text */
#define LT_DTYPE_LIST(X)                                                                           \
    X(LT_F32, 4, "f32") X(LT_F64, 8, "f64") X(LT_F16, 2, "f16") X(LT_BF16, 2, "bf16")              \
    X(LT_I64, 8, "i64") X(LT_I32, 4, "i32") X(LT_U8, 1, "u8")

typedef enum lt_dtype {
#define X(name, bytes, text) name,
    LT_DTYPE_LIST(X)
#undef X
    LT_DTYPE_COUNT
} lt_dtype;

LT_API size_t lt_dtype_bytes(lt_dtype dtype);
LT_API const char *lt_dtype_name(lt_dtype dtype);
/* The dtype called name, or -1. */
LT_API int lt_dtype_find(const char *name);

/* Converts n elements between any two dtypes on the CPU; dst and src do not overlap. To a float
 * dtype: round to nearest even, overflow of f16 to inf, gradual underflow, NaN stays NaN. From a
 * float to an integer dtype: truncation toward zero, saturated at the ends; NaN gives 0. Between
 * integers: wraps. */
LT_API void lt_convert(void *dst, lt_dtype dst_dtype, const void *src, lt_dtype src_dtype,
                       size_t n);

/* ==== Context ================================================================================= */

typedef struct lt_ctx lt_ctx;
typedef struct lt_tensor lt_tensor;

typedef struct lt_config { /* zero means default */
    uint64_t seed;
    int threads;           /* for kernels; default: the CPUs this process may run on. A context has
                            * at most lt_thread_limit() threads: lt_threads() tells */
    bool reference;        /* only the plain reference kernels */
    bool poison; /* fill fresh memory with NaN patterns: finds kernels that forget to write */
    const char *device;    /* where tensors go: "cpu", the default; for lt_open() of ops.h also
                            * "cuda", "cuda:1", and "auto": what there is of these */
    int local_rank;        /* this one's number among the ranks of its machine: the device that
                            * "cuda" and "auto" mean, counted round those that there are */
    bool deterministic;    /* an accelerator takes no algorithm whose sums have no fixed order, or
                            * that rounds where it need not. What the CPU does has always the bits
                            * that it has with so many threads */
    bool tf32;             /* an accelerator may round the factors of f32 products to 10 bits */
    /* What goes wrong, for tests: "alloc:n=5": the 5th allocation fails; "kill:rank=1:step=3": of
     * ranks that train together, rank 1 kills its process as step 3 goes backward; leave: it ends
     * its part then, as LT_EDONE; hang: it sleeps from then on; "delay:rank=1:ms=100": it sleeps so
     * long in each step; "inf:rank=0:step=7:param=conv1.w": an inf gets into that parameter's
     * gradient. NULL: $LUATRAIN_FAULT */
    const char *fault;
} lt_config;

/* A bare context: memory and a CPU device, no ops and no other device (lt_open() of ops.h adds
 * those). config may be NULL. New. NULL with LT_ENOMEM, LT_EENV (a device that is not the CPU) or
 * LT_EUSAGE (a fault or device text it does not know). */
LT_API lt_ctx *lt_ctx_new(const lt_config *config);
/* Closes the context: its scopes and graphs end. NULL is fine. Do not use ctx afterwards. Whatever
 * was made in it may outlive it and is freed as usual, in any order: tensors, tapes, parameters,
 * optimizers, loss scales, reducers, sources, batches, files, Lua states. The memory of the context
 * goes with the last of them. Until then tensors can still be read, written, copied and viewed,
 * files and batches can be read, and gradients and optimizer slots keep their values. Ops,
 * backward, optimizer steps and new scopes fail with LT_EINVAL. */
LT_API void lt_ctx_free(lt_ctx *ctx);

LT_API uint64_t lt_seed(const lt_ctx *ctx);
/* Another seed; the draws of LT_RNG_USER start over. */
LT_API void lt_set_seed(lt_ctx *ctx, uint64_t seed);
LT_API int lt_threads(const lt_ctx *ctx);
/* Where new tensors go: "cpu", "cuda:0". Borrowed. */
LT_API const char *lt_device_name(const lt_ctx *ctx);
/* The number of CPUs in this process's affinity mask. */
LT_API int lt_cpu_count(void);
/* The most threads that OpenMP gives a kernel here: OMP_THREAD_LIMIT, and 1 where
 * OMP_MAX_ACTIVE_LEVELS is 0. INT_MAX without a limit. */
LT_API int lt_thread_limit(void);

/* Optimizer steps taken, applied or skipped. Random numbers of a step are a function of it. */
LT_API int64_t lt_step(const lt_ctx *ctx);
LT_API void lt_set_step(lt_ctx *ctx, int64_t step);

/* A request to stop, for whoever trains in ctx: it saves, clears the request by lt_stop(ctx, 0),
 * and leaves with LT_ESTOPPED. Safe in a signal handler and in other threads. reason is a signal's
 * number. False, and nothing happens, while nobody listens; false for 0. */
LT_API bool lt_stop(lt_ctx *ctx, int reason);
/* One listener more, or one less. A request that comes too late for the last one waits for the
 * next, so it is not lost between two trainings, nor when it comes just as that one leaves. */
LT_API void lt_listen(lt_ctx *ctx, bool on);
/* The reason of the request, 0 when there is none. */
LT_API int lt_stop_reason(const lt_ctx *ctx);

typedef struct lt_memory { /* bytes of one context */
    size_t live;           /* in use now */
    size_t peak;           /* highest live so far */
    size_t cached;         /* taken from the system and free */
    uint64_t allocations;  /* requests so far */
} lt_memory;
LT_API lt_memory lt_memory_stats(const lt_ctx *ctx); /* of all devices together */
/* Of the device that new tensors go to, alone. */
LT_API lt_memory lt_memory_of_device(const lt_ctx *ctx);
/* Returns cached memory to the system. */
LT_API void lt_memory_trim(lt_ctx *ctx);

typedef enum lt_log_level { LT_LOG_DEBUG, LT_LOG_INFO, LT_LOG_WARN } lt_log_level;
typedef void (*lt_log_fn)(void *ud, lt_log_level level, const char *line);
/* Where notes of the library go; silent until set. line has no newline. */
LT_API void lt_log_to(lt_ctx *ctx, lt_log_fn fn, void *ud);
LT_API void lt_log(lt_ctx *ctx, lt_log_level level, const char *fmt, ...) LT_PRINTF(3, 4);

/* A trace for chrome://tracing or https://ui.perfetto.dev: begins the file, which is no FIFO.
 * LT_EENV. */
LT_MUST lt_status lt_trace_create(const char *path);
/* From now on spans of ctx are added to that file, as those of a rank, and no longer to a file of
 * an earlier call. Before other threads use ctx. LT_EENV or LT_ENOMEM. */
LT_MUST lt_status lt_trace_to(lt_ctx *ctx, const char *path, int rank);
/* A span, from any thread. start is a reading of the monotonic clock, in seconds; name is without
 * quotes and control codes. Nothing happens without lt_trace_to(). */
typedef enum lt_track { LT_TRACK_STEP, LT_TRACK_COMPUTE, LT_TRACK_COMM } lt_track;
LT_API void lt_trace(lt_ctx *ctx, lt_track track, const char *name, double start, double seconds);

/* ==== Tensors ================================================================================= */

#define LT_MAX_DIMS 8

/* A tensor is dense, row major (the last axis is contiguous); images are (n, h, w, c). A tensor
 * with 0 dims holds one element. References are counted atomically; tensors may be released in any
 * thread, but one that an op has recorded, or that has a gradient or hooks, only in the context's
 * own. A tensor is on one device, at first the context's, and stays there. Ops compute on
 * the device of their inputs, which must be the same for all of them. */

/* Uninitialised memory. New. NULL with LT_EINVAL (dims) or LT_ENOMEM. */
LT_API lt_tensor *lt_tensor_new(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims);
/* All elements value, as by lt_fill(). New. */
LT_API lt_tensor *lt_tensor_full(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims,
                                 double value);
/* A copy of data, which holds the elements in row-major order. New. */
LT_API lt_tensor *lt_tensor_from(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims,
                                 const void *data);

LT_API lt_tensor *lt_retain(lt_tensor *x); /* one more reference; returns x */
LT_API void lt_release(lt_tensor *x);      /* one less; NULL is fine */

LT_API lt_ctx *lt_tensor_ctx(const lt_tensor *x);
LT_API lt_dtype lt_tensor_dtype(const lt_tensor *x);
LT_API int lt_ndim(const lt_tensor *x);
LT_API int64_t lt_dim(const lt_tensor *x,
                      int axis); /* axis from 0, or from the end with negatives */
LT_API const int64_t *lt_dims(const lt_tensor *x);   /* borrowed, lt_ndim() of them */
LT_API int64_t lt_count(const lt_tensor *x);         /* elements */
/* The elements. Borrowed. NULL with LT_EINVAL when the step that made x is over, x is a parameter
 * without memory yet, or x is on another device than the CPU, which could not read them there. */
LT_API void *lt_data(lt_tensor *x);
/* The elements, wherever they are, to memory of the caller, or from there; in x's dtype. LT_EINVAL
 * for a dead or pending tensor. */
LT_MUST lt_status lt_read(lt_tensor *x, void *data);
LT_MUST lt_status lt_write(lt_tensor *x, const void *data);
/* Where x is: "cpu", "cuda:0"; of a parameter without memory where it is going to be; NULL when x
 * is dead. Borrowed. */
LT_API const char *lt_device_of(const lt_tensor *x);
/* x's values without its history on the device of that name, "cpu", "cuda" or "cuda:0": a view if x
 * is there, else a copy. New. NULL with LT_EENV (no such device), LT_EINVAL or LT_ENOMEM. */
LT_API lt_tensor *lt_to(lt_tensor *x, const char *device);
/* Element index (row major, from 0) as a double. LT_EINVAL outside the tensor. */
LT_MUST lt_status lt_item(lt_tensor *x, int64_t index, double *value);
/* The same of the one element of x, as it is now, read when it is wanted: from an accelerator,
 * which may come to it much later, it is fetched meanwhile. New. NULL with LT_EINVAL or
 * LT_ENOMEM. */
typedef struct lt_deferred lt_deferred;
LT_API lt_deferred *lt_item_deferred(lt_tensor *x);
/* Waits until it is there. What went wrong on the accelerator until then fails here. */
LT_MUST lt_status lt_deferred_item(lt_deferred *deferred, double *value);
LT_API void lt_deferred_free(lt_deferred *deferred); /* NULL is fine */
/* lt_item() as an integer, exact for i64. */
LT_MUST lt_status lt_item_integer(lt_tensor *x, int64_t index, int64_t *value);

/* The same elements under other dims of the same count. A view: writing one writes the other.
 * New. */
LT_API lt_tensor *lt_view(lt_tensor *x, int ndim, const int64_t *dims);
/* Rows [first, first + count) of the leading axis. A view. New. LT_EINVAL outside. */
LT_API lt_tensor *lt_rows(lt_tensor *x, int64_t first, int64_t count);
/* Copies src over dst, converting the dtype, from any device to any. Same count of elements, or
 * LT_EINVAL. Not recorded. */
LT_MUST lt_status lt_copy(lt_tensor *dst, lt_tensor *src);
/* All elements become value, rounded to a float dtype. LT_EINVAL if an integer dtype does not hold
 * it: a fraction, out of range, NaN. Not recorded. */
LT_MUST lt_status lt_fill(lt_tensor *dst, double value);
/* The same for an integer, which an i64 tensor takes exactly. */
LT_MUST lt_status lt_fill_integer(lt_tensor *dst, int64_t value);

/* "32x32x32x3 f32" into buffer; returns buffer. For messages. */
LT_API char *lt_describe(const lt_tensor *x, char *buffer, size_t bytes);

/* ==== Scopes ================================================================================== */

/* Tensors made between push and pop lose their memory at pop, whoever still holds a handle: a
 * dead tensor is an error that says so. Kept tensors, parameters, optimizer slots and buffers
 * survive. Scopes nest. */
LT_MUST lt_status lt_scope_push(lt_ctx *ctx);
LT_API void lt_scope_pop(lt_ctx *ctx);
/* x outlives all scopes; its history on the tape ends with the scope that made it. */
LT_API void lt_keep(lt_tensor *x);
/* x moves from the innermost scope to the one around it, without its history: what a step returns
 * to its caller. Nothing happens to tensors of other scopes. */
LT_API void lt_keep_outer(lt_tensor *x);
LT_API bool lt_is_dead(const lt_tensor *x);

/* ==== Random numbers ========================================================================== */

/* Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). There is
 * no hidden state: a number is a function of (seed, purpose, stream, index). stream is an epoch,
 * a step or a sample id; say in each use which. key = splitmix64(seed + purpose *
 * 0x9e3779b97f4a7c15); counter = (index, stream). */
typedef enum lt_purpose {
    LT_RNG_USER = 1, LT_RNG_INIT, LT_RNG_DROPOUT, LT_RNG_SHUFFLE, LT_RNG_AUGMENT,
    LT_RNG_SYNTHETIC, LT_RNG_MIXUP
} lt_purpose;

LT_API void lt_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
/* Four 32-bit words. */
LT_API void lt_random(uint64_t seed, lt_purpose purpose, uint64_t stream, uint64_t index,
                      uint32_t out[4]);
/* Fills x (a float dtype) with numbers uniform in [low, high), element i from index first + i. */
LT_MUST lt_status lt_fill_uniform(lt_tensor *x, lt_purpose purpose, uint64_t stream, uint64_t first,
                                  double low, double high);
/* Normal with the given mean and deviation (Box-Muller, in double). */
LT_MUST lt_status lt_fill_normal(lt_tensor *x, lt_purpose purpose, uint64_t stream, uint64_t first,
                                 double mean, double deviation);
/* order[0..n) = a permutation of 0..n-1, a function of (seed, LT_RNG_SHUFFLE, epoch) alone. */
LT_API void lt_shuffle(uint64_t seed, uint64_t epoch, int64_t *order, int64_t n);
/* The number of the next draw of LT_RNG_USER in this context, counted from 0: the stream of
 * lt.randn. */
LT_API uint64_t lt_next_draw(lt_ctx *ctx);
/* The next draws go on from this number, as when a run is resumed. */
LT_API void lt_set_next_draw(lt_ctx *ctx, uint64_t draw);

/* ==== Files of tensors: safetensors =========================================================== */

/* The format: https://huggingface.co/docs/safetensors (u64 header length, JSON header, raw
 * little-endian data). Every size is checked against the file before anything is allocated for
 * it. */
typedef struct lt_file lt_file;

/* Reads and checks the header. New. NULL with LT_EFILE (path and reason) or LT_ENOMEM. */
LT_API lt_file *lt_file_open(lt_ctx *ctx, const char *path);
LT_API void lt_file_close(lt_file *file);
LT_API int lt_file_count(const lt_file *file);
LT_API const char *lt_file_name(const lt_file *file, int i); /* borrowed; in file order */
LT_API int lt_file_find(const lt_file *file, const char *name); /* index or -1 */
/* dtype and dims of tensor i; dims holds LT_MAX_DIMS. */
LT_API void lt_file_shape(const lt_file *file, int i, lt_dtype *dtype, int *ndim, int64_t *dims);
/* The value under key in __metadata__, or NULL. Borrowed. */
LT_API const char *lt_file_meta(const lt_file *file, const char *key);
/* Entry i of __metadata__ in file order, without our digest; false past the end. Borrowed. */
LT_API bool lt_file_meta_at(const lt_file *file, int i, const char **key, const char **value);
/* Reads tensor i to the context's device. New. NULL with LT_EINVAL if there is no tensor i, such as
 * for the -1 of lt_file_find(), LT_EFILE or LT_ENOMEM. */
LT_API lt_tensor *lt_file_read(lt_file *file, int i);
/* Reads tensor i over dst: same dims, any dtype (converted). LT_EINVAL as above. LT_EFILE
 * also when the file was written to since it was opened: what lt_file_verify() found may no longer
 * hold. */
LT_MUST lt_status lt_file_read_into(lt_file *file, int i, lt_tensor *dst);

/* Reads the whole file and compares its digest with the one that lt_file_save() put into it.
 * LT_EFILE when they differ: one bit anywhere is enough. LT_OK for a file of others, which has
 * none. */
LT_MUST lt_status lt_file_verify(lt_file *file);

/* Whether the file has such a digest: false for a file of others, and for one of ours in which two
 * or more of the characters around it are damaged. */
LT_API bool lt_file_has_digest(const lt_file *file);

/* Writes n named tensors and n_meta metadata pairs (key, value, key, value, ...) as
 * lt_file_replace() writes. The digest of it all goes into its metadata as sha256. LT_EFILE with
 * the system's reason; LT_EINVAL for a name given twice, or one that is taken. */
LT_MUST lt_status lt_file_save(const char *path, int n, const char *const *names,
                               lt_tensor *const *tensors, int n_meta, const char *const *meta);

/* Writes a file of any format, these bytes: into a temporary file beside path, fsync, rename, fsync
 * of the folder. path then holds the old file or the whole new one. A link stays, and its target is
 * replaced; permissions stay too. LT_EFILE with the system's reason. */
LT_MUST lt_status lt_file_replace(const char *path, const void *data, size_t bytes);

/* ==== SHA-256 (FIPS 180-4) ==================================================================== */

typedef struct lt_sha256 { uint32_t h[8]; uint64_t bytes; uint8_t block[64]; } lt_sha256;
LT_API void lt_sha256_begin(lt_sha256 *s);
LT_API void lt_sha256_add(lt_sha256 *s, const void *data, size_t bytes);
LT_API void lt_sha256_end(lt_sha256 *s, char hex[65]);

#ifdef __cplusplus
}
#endif
#endif
