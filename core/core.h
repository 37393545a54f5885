/* core.h - public header of core: status codes, log, dtypes, contexts, tensors, scopes, random
 * numbers, files of tensors and SHA-256.
 *
 * core has no math except copy, fill and dtype conversion. There are no globals: all state belongs
 * to an lt_ctx, so ranks can be threads and one program can run several training runs.
 *
 * Errors. A function that can fail returns an lt_status, which the caller must check. A constructor
 * returns NULL instead. In both cases lt_errmsg() returns a one-sentence message for the user; it
 * is per thread. The library never prints, exits or aborts.
 *
 * Locale. Numbers in messages and files have a decimal point in any locale; see lua/luatrain.h.
 *
 * Threads. Only one thread at a time may use a context and the objects made in it. Functions that
 * any thread may call say so.
 *
 * Ownership. All headers use four words:
 *   new       the caller owns the result and releases it with the matching release, free or close
 *   borrowed  the result lives as long as its owner; the caller must not release it
 *   kept      the callee adds its own reference; the caller still owns the one it had
 *   taken     the callee owns the argument from now on, even if the call fails
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
#define LT_NODISCARD __attribute__((warn_unused_result))
#define LT_MUST LT_API LT_NODISCARD
#define LT_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

/* ==== Status ================================================================================== */

/* The number in each comment is the exit code of a program that ends with this status; see
 * lt_exit_code(). */
typedef enum lt_status {
    LT_OK,           /* 0 */
    LT_EINVAL,       /* 1: invalid argument: shape, dtype, option or misuse */
    LT_ESCRIPT,      /* 1: error in a Lua script */
    LT_EUSAGE,       /* 2: wrong command line or setting */
    LT_EENV,         /* 3: missing library, device or package */
    LT_EDATA,        /* 4: bad data */
    LT_EFILE,        /* 5: bad checkpoint or other safetensors file */
    LT_ENUMERIC,     /* 6: non-finite number */
    LT_ENOMEM,       /* 7: out of memory */
    LT_EPEER,        /* 8: another rank is lost */
    LT_EDESYNC,      /* 9: the ranks disagree */
    LT_EUNSUPPORTED, /* 1: a kernel does not support the call; another kernel may */
    LT_EDONE,        /* 0: deliberate early end, no error */
    LT_ESTOPPED,     /* 75: stopped by a signal; the state is saved and the run can be resumed */
    LT_STATUS_COUNT
} lt_status;

/* LT_EXIT + code, with code from 1 to 255, is the status of a script that ends the program with
 * that exit code. */
enum { LT_EXIT = 256 };

/* lt_exit_code() returns the exit code of a process that ends with this status. lt_status_text()
 * returns a generic text for the status, as a static string. For a number that is not a status,
 * they return 1 and "unknown status". */
LT_API int lt_exit_code(lt_status status);
LT_API const char *lt_status_text(lt_status status);

/* Sets this thread's error code and message, which is truncated to 2047 bytes. Returns code, so
 * callers can write `return lt_fail(...)`. */
LT_API lt_status lt_fail(lt_status code, const char *fmt, ...) LT_PRINTF(2, 3);
/* Prepends "prefix: " to this thread's error message. Returns this thread's error code. */
LT_API lt_status lt_fail_prefix(const char *fmt, ...) LT_PRINTF(1, 2);
/* This thread's last error message and code; "" and LT_OK before the first failure. Borrowed; valid
 * until the next failure in this thread. */
LT_API const char *lt_errmsg(void);
LT_API lt_status lt_errcode(void);

/* Returns the status to the caller if expr fails. Use it only where the function has nothing to
 * release. */
#define LT_TRY(expr)                                                                               \
    do {                                                                                           \
        lt_status lt_try_ = (expr);                                                                \
        if (lt_try_ != LT_OK)                                                                      \
            return lt_try_;                                                                        \
    } while (0)

/* For "did you mean" hints: returns the index in names[0..n) of the name closest to word, without
 * regard to case, or -1. If no name is close, returns a name whose last word, after a - or _, is
 * equal to word: weight_decay for decay. */
LT_API int lt_nearest(const char *word, const char *const *names, int n);

/* ==== Dtypes ================================================================================== */

typedef enum lt_dtype {
    LT_F32,
    LT_F64,
    LT_F16,
    LT_BF16,
    LT_I64,
    LT_I32,
    LT_U8,
    LT_DTYPE_COUNT
} lt_dtype;

/* The size of an element in bytes, and the name of the dtype, a static string such as "f32". For a
 * number that is not a dtype, the results are 0 and "unknown". */
LT_API size_t lt_dtype_bytes(lt_dtype dtype);
LT_API const char *lt_dtype_name(lt_dtype dtype);
/* The dtype with this name, or -1. */
LT_API int lt_dtype_find(const char *name);

/* Converts n elements between any two dtypes on the CPU. dst and src must not overlap. To a float
 * dtype: rounds to nearest even, overflow becomes inf, results may be subnormal, NaN stays NaN.
 * Float to integer: truncates toward zero and saturates; NaN becomes 0. Integer to integer:
 * wraps. */
LT_API void lt_convert(void *dst, lt_dtype dst_dtype, const void *src, lt_dtype src_dtype,
                       size_t n);

/* ==== Context ================================================================================= */

typedef struct lt_ctx lt_ctx;
typedef struct lt_tensor lt_tensor;

typedef struct lt_config { /* zero selects the default */
    uint64_t seed;
    /* number of threads for kernels, at most 1024. The default is lt_omp_threads(), or
     * lt_cpu_count() if that is 0. A context uses at most lt_thread_limit() threads; lt_threads()
     * returns the actual number */
    int threads;
    bool reference; /* use only the reference kernels */
    bool poison;    /* fill new memory with NaN, to find kernels that skip elements */
    /* device of new tensors: "cpu" (default) or "auto". lt_open() in ops.h uses an accelerator for
     * "auto" if there is one, and also accepts "cuda" and "cuda:1". lt_ctx_new() uses the CPU for
     * "auto" */
    const char *device;
    /* rank number on this machine. It selects the device for "cuda" and "auto", modulo the number
     * of devices */
    int local_rank;
    /* an accelerator uses only algorithms that sum in a fixed order and do not round more than
     * necessary. CPU results always depend only on the inputs and the number of threads */
    bool deterministic;
    bool tf32; /* an accelerator may round operands of f32 products to 10 mantissa bits */
    /* Fault to inject, for tests. "alloc:n=5": the 5th allocation fails. "kill:rank=1:step=3": in
     * distributed training, rank 1 kills its process in the backward pass of step 3.
     * "leave:rank=1:step=3": rank 1 stops in that pass with LT_EDONE. "hang:rank=1:step=3": rank 1
     * sleeps forever in that pass. "delay:rank=1:ms=100": rank 1 sleeps 100 ms in each step.
     * "latency:rank=1:us=500": the messages of asynchronous training and of pipelines between rank
     * 1 and other ranks arrive 500 us later.
     * "inf:rank=0:step=7:param=conv1.w": in step 7, rank 0 writes an inf into the gradient of the
     * parameter conv1.w. NULL: use $LUATRAIN_FAULT */
    const char *fault;
} lt_config;

/* Creates a bare context with memory and a CPU device, but without ops or other devices; lt_open()
 * in ops.h adds those. config is copied and may be NULL. New. NULL with LT_ENOMEM, LT_EENV (a
 * device other than the CPU) or LT_EUSAGE (unknown device or fault, invalid number of threads). */
LT_API lt_ctx *lt_ctx_new(const lt_config *config);
/* Closes the context and ends its scopes and graphs. NULL is allowed. Do not use ctx afterwards.
 * Objects made in ctx may outlive it and are freed as usual, in any order: tensors, tapes,
 * parameters, optimizers, loss scales, reducers, sources, batches, files, deferred scalars, Lua
 * states. The memory of the context is freed with the last of them. Until then tensors can be read,
 * written, copied and viewed, files and batches can be read, and gradients and optimizer slots keep
 * their values. Ops, backward, optimizer steps and new scopes fail with LT_EINVAL. */
LT_API void lt_ctx_free(lt_ctx *ctx);

LT_API uint64_t lt_seed(const lt_ctx *ctx);
/* Sets the seed and resets all counters that random numbers depend on: lt_random_step(), the draws
 * of LT_RNG_USER, the count of random calls in a pass, and the count of trees for
 * lt_params_place(). The same calls then give the same results again. */
LT_API void lt_set_seed(lt_ctx *ctx, uint64_t seed);
LT_API int lt_threads(const lt_ctx *ctx);
/* The device of new tensors: "cpu", "cuda:0". Borrowed. */
LT_API const char *lt_device_name(const lt_ctx *ctx);
/* The number of CPUs that this process may use: the number of CPUs in its affinity mask or the CPU
 * quota of its container (cgroup v1 or v2), rounded up, whichever is smaller. */
LT_API int lt_cpu_count(void);
/* The value of OMP_NUM_THREADS, at most 1024. If it is a list, the first number counts. 0 if it is
 * not set or not a positive number. */
LT_API int lt_omp_threads(void);
/* The maximum number of threads OpenMP allows a kernel: OMP_THREAD_LIMIT, or 1 if
 * OMP_MAX_ACTIVE_LEVELS is 0. INT_MAX if there is no limit. */
LT_API int lt_thread_limit(void);

/* The number of optimizer steps so far, applied or skipped. */
LT_API int64_t lt_step(const lt_ctx *ctx);
LT_API void lt_set_step(lt_ctx *ctx, int64_t step);
/* The number of steps since lt_set_seed(). The random numbers of a step depend on it. To resume a
 * run, call lt_set_random_step() after lt_set_step(). */
LT_API int64_t lt_random_step(const lt_ctx *ctx);
LT_API void lt_set_random_step(lt_ctx *ctx, int64_t step);

/* Requests a stop of the training run in ctx. That run saves its state, clears the request with
 * lt_stop(ctx, 0) and returns LT_ESTOPPED. Safe in signal handlers and from any thread. reason is
 * the signal number. If reason is 0, the call clears the request and returns false. If there is no
 * listener, it does nothing and returns false. */
LT_API bool lt_stop(lt_ctx *ctx, int reason);
/* Adds or removes a listener for stop requests. A request that arrives while the last listener is
 * being removed stays set for the next listener, so no request is lost between two training
 * runs. */
LT_API void lt_stop_listen(lt_ctx *ctx, bool on);
/* The reason of the pending stop request, or 0. */
LT_API int lt_stop_reason(const lt_ctx *ctx);

typedef struct lt_memory { /* memory of one context, in bytes */
    size_t live;           /* memory in use now */
    size_t peak;           /* highest value of live so far */
    size_t cached;         /* memory allocated from the system but unused */
    uint64_t allocations;  /* number of allocations so far */
} lt_memory;
LT_API lt_memory lt_memory_stats(const lt_ctx *ctx); /* sum over all devices */
/* Like lt_memory_stats(), but only for the device of new tensors. */
LT_API lt_memory lt_device_memory_stats(const lt_ctx *ctx);
/* Returns cached memory to the system. */
LT_API void lt_memory_trim(lt_ctx *ctx);

typedef enum lt_log_level { LT_LOG_DEBUG, LT_LOG_INFO, LT_LOG_WARN } lt_log_level;
typedef void (*lt_log_fn)(void *ud, lt_log_level level, const char *line);
/* Sets the log callback; NULL removes it. Without one the library logs nothing. line has no newline
 * and is borrowed during the call. If lt_open() could not use an accelerator, the first callback
 * gets the reason at once. */
LT_API void lt_set_log(lt_ctx *ctx, lt_log_fn fn, void *ud);
/* Logs one line, cut off after 1023 bytes. */
LT_API void lt_log(lt_ctx *ctx, lt_log_level level, const char *fmt, ...) LT_PRINTF(3, 4);

/* Creates a trace file for chrome://tracing or https://ui.perfetto.dev. path must not be a FIFO.
 * LT_EENV if it cannot be written. */
LT_MUST lt_status lt_trace_create(const char *path);
/* Appends the spans of ctx to path from now on, labelled with rank. path is a file that
 * lt_trace_create() made. An earlier trace file of ctx is closed. Call it before other threads use
 * ctx. LT_EENV or LT_ENOMEM. */
LT_MUST lt_status lt_trace_open(lt_ctx *ctx, const char *path, int rank);
typedef enum lt_track { LT_TRACK_STEP, LT_TRACK_COMPUTE, LT_TRACK_COMM } lt_track;
/* Records a span. Any thread may call it. start is a reading of the monotonic clock; `seconds` is
 * the duration. Both are in seconds. name must not contain quotes or control characters. Does
 * nothing without lt_trace_open(). */
LT_API void lt_trace(lt_ctx *ctx, lt_track track, const char *name, double start, double seconds);

/* ==== Tensors ================================================================================= */

#define LT_MAX_DIMS 8

/* A tensor is dense and row major (the last axis is contiguous); images are (n, h, w, c). A tensor
 * with 0 dims has one element. Reference counts are atomic. Any thread may release a tensor, but a
 * tensor with an autograd history, a gradient or hooks may only be released by the context's own
 * thread. A tensor stays on the device where it was created, by default the context's. An op runs
 * on the device of its inputs; all inputs must be on the same device.
 *
 * A tensor is dead once its scope has ended, see lt_scope_push(). A parameter or buffer is pending
 * until lt_params_place() allocates its memory. All functions that read, write or view elements
 * fail with LT_EINVAL if a tensor is dead or pending. On an accelerator they may also fail with
 * LT_ENOMEM or the device's error. */

/* Creates a tensor with uninitialised elements. New. NULL with LT_EINVAL (invalid dims or
 * dtype) or LT_ENOMEM. */
LT_API lt_tensor *lt_tensor_new(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims);
/* Creates a tensor with all elements set to value, as by lt_fill(). New. NULL with the errors of
 * lt_tensor_new() and lt_fill(). */
LT_API lt_tensor *lt_tensor_full(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims,
                                 double value);
/* Creates a tensor from a copy of data, the elements in row-major order. New. NULL with the errors
 * of lt_tensor_new() or of the device. */
LT_API lt_tensor *lt_tensor_from(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims,
                                 const void *data);

LT_API lt_tensor *lt_retain(lt_tensor *x); /* adds a reference; returns x, which may be NULL */
LT_API void lt_release(lt_tensor *x);      /* drops a reference; NULL is allowed */

LT_API lt_ctx *lt_tensor_ctx(const lt_tensor *x); /* borrowed */
LT_API lt_dtype lt_tensor_dtype(const lt_tensor *x);
LT_API int lt_ndim(const lt_tensor *x);
/* The length of an axis. Axes count from 0, or from the end if negative. axis is not checked. */
LT_API int64_t lt_dim(const lt_tensor *x, int axis);
LT_API const int64_t *lt_dims(const lt_tensor *x); /* borrowed; lt_ndim() values */
LT_API int64_t lt_count(const lt_tensor *x);       /* number of elements */
/* The elements. Borrowed. NULL with LT_EINVAL if x is dead or pending, or on a device whose memory
 * the CPU cannot read. */
LT_API void *lt_data(lt_tensor *x);
/* Copies all elements of x, on any device, to data (lt_read) or from data (lt_write). data has the
 * dtype of x and is in row-major order. Blocks until the copy is done. LT_EINVAL for a dead or
 * pending tensor, or the device's error. */
LT_MUST lt_status lt_read(lt_tensor *x, void *data);
LT_MUST lt_status lt_write(lt_tensor *x, const void *data);
/* The device of x: "cpu", "cuda:0". For a parameter without memory, the device where it will be
 * placed. NULL if x is dead. Borrowed. */
LT_API const char *lt_device_of(const lt_tensor *x);
/* Returns x on the named device ("cpu", "cuda" or "cuda:0"), without its autograd history: a view
 * if x is already there, otherwise a copy. New. NULL with LT_EENV (no such device), LT_EINVAL or
 * LT_ENOMEM. */
LT_API lt_tensor *lt_to(lt_tensor *x, const char *device);
/* Reads one element as a double; index is row major, from 0. LT_EINVAL if it is out of range or x
 * is dead or pending. */
LT_MUST lt_status lt_item(lt_tensor *x, int64_t index, double *value);
/* Starts reading the only element of x. On an accelerator the copy is queued behind the work
 * submitted so far and runs in the background. New; release it with lt_deferred_free(). NULL with
 * LT_EINVAL if x does not have exactly one element or is dead or pending, with LT_ENOMEM, or with
 * the device's error. */
typedef struct lt_deferred lt_deferred;
LT_API lt_deferred *lt_item_deferred(lt_tensor *x);
/* Blocks until the value has arrived. Also returns pending errors of the accelerator. One thread
 * other than the context's may also call it. */
LT_MUST lt_status lt_deferred_item(lt_deferred *deferred, double *value);
LT_API void lt_deferred_free(lt_deferred *deferred); /* NULL is allowed */
/* Like lt_item(), but reads the element as an integer, without rounding i64. */
LT_MUST lt_status lt_item_integer(lt_tensor *x, int64_t index, int64_t *value);

/* Returns a view of x with other dims and the same number of elements. The view shares memory with
 * x. Not recorded by autograd. New. NULL with LT_EINVAL (a different number of elements, or x is
 * dead or pending) or LT_ENOMEM. */
LT_API lt_tensor *lt_view(lt_tensor *x, int ndim, const int64_t *dims);
/* Returns a view of rows [first, first + count) of the leading axis. Not recorded by autograd. New.
 * NULL with LT_EINVAL (rows out of range, or x is dead or pending) or LT_ENOMEM. */
LT_API lt_tensor *lt_rows(lt_tensor *x, int64_t first, int64_t count);
/* Copies src into dst and converts the dtype. The tensors may be on different devices. LT_EINVAL if
 * the numbers of elements differ, or if the devices are accelerators of two contexts. Not recorded
 * by autograd. */
LT_MUST lt_status lt_copy(lt_tensor *dst, lt_tensor *src);
/* Sets all elements to value, which is rounded if dst has a float dtype. LT_EINVAL if dst has an
 * integer dtype and value is a fraction, out of range or NaN. Not recorded by autograd. */
LT_MUST lt_status lt_fill(lt_tensor *dst, double value);
/* Like lt_fill(), but for an integer value, which an i64 tensor stores exactly. */
LT_MUST lt_status lt_fill_integer(lt_tensor *dst, int64_t value);

/* Writes a description such as "32x32x32x3 f32" into buffer, for messages. Returns buffer. */
LT_API char *lt_describe(const lt_tensor *x, char *buffer, size_t bytes);

/* ==== Scopes ================================================================================== */

/* A tensor made between push and pop loses its memory at pop, even if handles to it remain. Using
 * such a dead tensor is an error with a clear message. Parameters, buffers, optimizer slots and
 * tensors passed to lt_keep() survive. Scopes nest. LT_EINVAL after lt_ctx_free(), LT_ENOMEM. */
LT_MUST lt_status lt_scope_push(lt_ctx *ctx);
LT_API void lt_scope_pop(lt_ctx *ctx);
/* Makes x outlive all scopes. Its history on the tape still ends with the scope in which x was
 * made. */
LT_API void lt_keep(lt_tensor *x);
/* Moves x from the innermost scope to the enclosing scope, and drops its history. If there is no
 * enclosing scope, x outlives all scopes. lt.step in Lua calls this function for the tensors that
 * it returns. Does nothing if x is not in the innermost scope. */
LT_API void lt_keep_outer(lt_tensor *x);
LT_API bool lt_is_dead(const lt_tensor *x);

/* ==== Random numbers ========================================================================== */

/* Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). There is no
 * hidden state: each number is a function of (seed, purpose, stream, index). stream is an epoch, a
 * step or a sample id, as documented at each use. key = splitmix64(seed + purpose *
 * 0x9e3779b97f4a7c15); counter = (index, stream). */
typedef enum lt_purpose {
    LT_RNG_USER = 1,
    LT_RNG_INIT,
    LT_RNG_DROPOUT,
    LT_RNG_SHUFFLE,
    LT_RNG_AUGMENT,
    LT_RNG_SYNTHETIC,
    LT_RNG_MIXUP,
    LT_RNG_DELAY
} lt_purpose;

/* Computes one Philox block: 128 random bits from a counter and a key. */
LT_API void lt_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
/* Writes four random 32-bit words to out. */
LT_API void lt_random(uint64_t seed, lt_purpose purpose, uint64_t stream, uint64_t index,
                      uint32_t out[4]);
/* Fills x with uniform numbers in [low, high). low and high are first rounded to the dtype of x; if
 * that makes them equal, all elements are low. The seed of the context is used. Element i is number
 * first + i of the stream. Numbers 2j and 2j + 1 are computed from the lt_random() words of index
 * j. LT_EINVAL if x is not of a float dtype, if low > high, if low or high is not finite in that
 * dtype, or if high - low overflows in double. */
LT_MUST lt_status lt_fill_uniform(lt_tensor *x, lt_purpose purpose, uint64_t stream, uint64_t first,
                                  double low, double high);
/* Like lt_fill_uniform(), but for a normal distribution with this mean and standard deviation,
 * which are not rounded (Box-Muller, in double). LT_EINVAL if one of them is not finite or
 * deviation is negative. */
LT_MUST lt_status lt_fill_normal(lt_tensor *x, lt_purpose purpose, uint64_t stream, uint64_t first,
                                 double mean, double deviation);
/* Writes a permutation of 0..n-1 to order[0..n). It depends only on (seed, LT_RNG_SHUFFLE,
 * epoch). */
LT_API void lt_shuffle(uint64_t seed, uint64_t epoch, int64_t *order, int64_t n);
/* Returns the number of the next LT_RNG_USER draw in this context, counted from 0, and advances the
 * count. lt.randn uses the number as stream. */
LT_API uint64_t lt_next_draw(lt_ctx *ctx);
/* Sets the number of the next draw, for resuming a run. */
LT_API void lt_set_next_draw(lt_ctx *ctx, uint64_t draw);

/* ==== Files of tensors: safetensors =========================================================== */

/* The format is https://huggingface.co/docs/safetensors: u64 header length, JSON header, raw
 * little-endian data. Every size is checked against the file size before memory is allocated for
 * it. */
typedef struct lt_file lt_file;

/* Opens a file, then reads and checks its header. New. NULL with LT_EFILE (path and reason) or
 * LT_ENOMEM. */
LT_API lt_file *lt_file_open(lt_ctx *ctx, const char *path);
LT_API void lt_file_close(lt_file *file); /* NULL is allowed */
LT_API int lt_file_count(const lt_file *file);
/* The name of tensor i; tensors are numbered in the order of their data. i must be in range.
 * Borrowed. */
LT_API const char *lt_file_name(const lt_file *file, int i);
LT_API int lt_file_find(const lt_file *file, const char *name); /* index, or -1 */
/* dtype and dims of tensor i, which must be in range. dims must have room for LT_MAX_DIMS
 * values. */
LT_API void lt_file_shape(const lt_file *file, int i, lt_dtype *dtype, int *ndim, int64_t *dims);
/* The value of key in __metadata__, or NULL. Borrowed. */
LT_API const char *lt_file_meta(const lt_file *file, const char *key);
/* Gets entry i of __metadata__, in file order. The digest is not counted as an entry. Returns false
 * past the end. Borrowed. */
LT_API bool lt_file_meta_at(const lt_file *file, int i, const char **key, const char **value);
/* Reads tensor i to the context's device. New. NULL with LT_EINVAL if i is out of range (such as -1
 * from lt_file_find()), LT_EFILE, LT_ENOMEM or the device's error. */
LT_API lt_tensor *lt_file_read(lt_file *file, int i);
/* Reads tensor i into dst, which must have the same dims. Converts the elements to the dtype of
 * dst. The errors of lt_file_read(); also LT_EFILE if the dims differ, or if the file was modified
 * after it was opened, because the result of lt_file_verify() may then be out of date. On failure
 * dst may be partly overwritten. */
LT_MUST lt_status lt_file_read_into(lt_file *file, int i, lt_tensor *dst);

/* Reads the whole file and compares its digest with the digest that lt_file_save() stored. LT_EFILE
 * if they differ; a single flipped bit is detected. LT_OK for a file without a digest, such as a
 * file written by another program. */
LT_MUST lt_status lt_file_verify(lt_file *file);

/* Whether the file has a digest that lt_file_save() stored. False for a file written by another
 * program, and for a file in which two or more of the characters around the digest are damaged. */
LT_API bool lt_file_has_digest(const lt_file *file);

/* Writes n named tensors and n_meta metadata pairs (key, value, key, value, ...), atomically like
 * lt_file_replace(). A SHA-256 digest of the file is stored in the metadata under "sha256".
 * LT_EFILE with the system's reason; LT_EINVAL for a name that is duplicate or reserved, text that
 * is not UTF-8, more than 16384 names or pairs, a header of more than 100 MB, or a dead or pending
 * tensor. LT_ENOMEM; or, for a tensor that is not on the CPU, the device's error. */
LT_MUST lt_status lt_file_save(const char *path, int n, const char *const *names,
                               lt_tensor *const *tensors, int n_meta, const char *const *meta);

/* Atomically replaces a file of any format with these bytes: writes a temporary file next to path,
 * calls fsync, renames the file, and calls fsync on the folder. At any time path names either the
 * old file or the complete new file. If path is a symbolic link, its target is replaced.
 * Permissions are preserved. Only regular files are replaced. LT_EFILE with the reason. */
LT_MUST lt_status lt_file_replace(const char *path, const void *data, size_t bytes);

/* ==== SHA-256 (FIPS 180-4) ==================================================================== */

typedef struct lt_sha256 {
    uint32_t h[8];
    uint64_t bytes;
    uint8_t block[64];
} lt_sha256;
LT_API void lt_sha256_begin(lt_sha256 *s);
LT_API void lt_sha256_add(lt_sha256 *s, const void *data, size_t bytes);
/* Finishes the digest and writes it as 64 lower-case hex digits and a NUL. */
LT_API void lt_sha256_end(lt_sha256 *s, char hex[65]);

#ifdef __cplusplus
}
#endif
#endif
