/* tensor.h - the inside of contexts and tensors, for the rooms above core and for kernel
 * authors. Not installed.
 *
 * Invariants.
 *   A tensor is dense; data points into its storage, or is NULL when the tensor is dead (its scope
 * is over) or pending (a parameter before its arena exists). Views share the storage. A storage is
 * returned to the pool when its last tensor goes. node, leaf and out_index belong to autograd; core
 * only calls ctx->slots.forget when such a tensor ends. Links of a scope are written under
 * ctx->lock.
 */
#ifndef LT_CORE_TENSOR_H
#define LT_CORE_TENSOR_H

#include <pthread.h>

#include "core/core.h"
#include "core/device_comm.h"
#include "core/simd.h"

/* CUDA sources are C++, which has no such words; they only read these structs. */
#ifdef __cplusplus
typedef int lt_atomic_int;
typedef unsigned lt_atomic_uint;
#define LT_ATOMIC
extern "C" {
#else
#include <stdatomic.h>
typedef atomic_int lt_atomic_int;
typedef atomic_uint lt_atomic_uint;
#define LT_ATOMIC _Atomic
#endif

typedef struct lt_range { char *start; size_t bytes; } lt_range;
typedef struct lt_ranges { lt_range *at; size_t n, room; } lt_ranges; /* by address */

typedef struct lt_large_blocks {           /* large blocks: large_blocks.c */
    lt_ranges all, free;
    size_t bytes, taken;              /* of all; blocks that are in use */
} lt_large_blocks;

#define LT_POOL_CLASSES 49

typedef struct lt_pool {
    struct lt_free_list { void **blocks; size_t n, room, total; } list[LT_POOL_CLASSES];
    lt_large_blocks large;
    lt_memory memory;                 /* of this device alone */
} lt_pool;

/* What a device must supply. Addresses are the device's own; calls may be asynchronous in its
 * stream until sync. copy() of an accelerator takes addresses of the CPU too, on either side; they
 * are left alone until sync() has returned. What free() gives back may be in use by what is in the
 * stream still. The pool above alloc and free is the same for all devices (pool.c).
 *
 * Calls come from the thread of the context, but for those that say otherwise: wait, download and
 * upload may come from one more thread at the same time. */
typedef struct lt_device {
    const char *name;                                             /* "cpu", "cuda:0" */
    void *(*alloc)(struct lt_device *device,
                   size_t bytes); /* 64-byte aligned; NULL when there is none */
    void (*free)(struct lt_device *device, void *p, size_t bytes);
    lt_status (*copy)(struct lt_device *device, void *dst, const void *src, size_t bytes);
    lt_status (*convert)(struct lt_device *device, void *dst, lt_dtype dst_dtype, const void *src,
                         lt_dtype src_dtype, size_t n);
    lt_status (*fill)(struct lt_device *device, void *dst, lt_dtype dtype, size_t n, double value);
    lt_status (*add)(struct lt_device *device, void *dst, const void *src, lt_dtype dtype,
                     size_t n);                  /* dst += src */
    /* dst[i] = table[i % channels][src[i]]: elements of so many bytes each (1, 2, 4 or 8), moved.
     * dst and src lie at multiples of 32 bytes. */
    lt_status (*look_up)(struct lt_device *device, void *dst, const uint8_t *src, const void *table,
                         size_t each, int64_t n, int64_t channels);
    lt_status (*sync)(struct lt_device *device); /* waits, and brings late errors */
    void (*close)(struct lt_device *device);                      /* the context ends */

    /* Of an accelerator alone, as the CPU is never behind. A mark is behind all that is in the
     * stream; they are counted from 1. In the place of one that is older than the last LT_MARKS all
     * there is by now is waited for. */
    uint64_t (*mark)(struct lt_device *device);
    lt_status (*wait)(struct lt_device *device, uint64_t mark); /* brings late errors too. From
                                                                  * either thread */
    /* Memory of the CPU that copy() reads and writes while the host goes on: until a mark behind it
     * was waited for, it is left alone. NULL when there is none. Both may wait; free_host does, for
     * all that copies. */
    void *(*alloc_host)(struct lt_device *device, size_t bytes);
    void (*free_host)(struct lt_device *device, void *p);
    /* Copies from such memory to the device's, behind the mark `after`, but beside all else that is
     * in the stream and comes into it: that may use dst behind a call of stream_wait(). *mark is
     * behind the copy. Uploads come one after the other. From either thread. */
    lt_status (*upload)(struct lt_device *device, void *dst, const void *src, size_t bytes,
                        uint64_t after, uint64_t *mark);
    /* The way back, to such memory, in an order of its own; mark may be NULL. Until *mark was
     * waited for nothing is put into the stream that writes to src. From either thread. */
    lt_status (*download)(struct lt_device *device, void *dst, const void *src, size_t bytes,
                          uint64_t after, uint64_t *mark);
    lt_status (*stream_wait)(struct lt_device *device, uint64_t mark);
    const lt_device_comm_calls *comm_calls;  /* sums with those of other ranks; NULL: never */
    bool is_host; /* the CPU can read its addresses */
    int threads;                                                  /* of a CPU */
    lt_pool pool;                                                 /* under ctx->lock */
} lt_device;

enum { LT_MARKS = 256 };

#define LT_MAX_DEVICES 2              /* of one context: the CPU, and one accelerator */

typedef struct lt_storage {
    lt_atomic_int refs;
    lt_atomic_uint
        version; /* counts writes in place, so that backward can tell that a saved tensor changed */
    lt_ctx *ctx;
    lt_device *device;
    void *data;
    size_t bytes;
    void (*deleter)(void *ud, void *data); /* of memory that is not the pool's: gives it back */
    void *ud;
} lt_storage;

struct lt_tensor {
    lt_atomic_int refs;
    uint8_t dtype, ndim, out_index;
    bool dead, kept;
    bool pending;                     /* a parameter that has no memory yet */
    int64_t count;
    int64_t dims[LT_MAX_DIMS];
    void *data;
    lt_storage *storage;
    lt_ctx *ctx;
    struct lt_node *node;             /* autograd: the op that made it; NULL outside the tape */
    struct lt_leaf *leaf; /* autograd: where its gradient goes; NULL if none is wanted */
    struct lt_scope *scope;           /* the scope that will end it, or NULL */
    struct lt_tensor *next, *prev;    /* in that scope */
};

typedef struct lt_scope {
    struct lt_scope *outer;
    lt_tensor *first;
} lt_scope;

/* What the rooms above hang into a context. Each pointer is set once, by the room that it names. */
typedef struct lt_slots {
    void (*forget)(lt_tensor *x,
                   bool gone);     /* autograd: drop x's history; when gone, its gradient too */
    void (*closed)(lt_ctx *ctx);   /* autograd: lt_ctx_free() was called; ends all graphs */
    void (*ctx_freed)(lt_ctx *ctx); /* autograd: the last reference is gone; frees autograd */
    struct lt_autograd *autograd;
    void (*ops_freed)(lt_ctx *ctx); /* ops: likewise */
    struct lt_ops *ops;
} lt_slots;

typedef enum lt_fault_kind {
    LT_FAULT_NONE, LT_FAULT_KILL, LT_FAULT_LEAVE, LT_FAULT_HANG, LT_FAULT_DELAY
} lt_fault_kind;

typedef struct lt_fault { /* of a rank, for tests: dist acts on it */
    lt_fault_kind kind;
    int rank;
    int64_t number;       /* of the step, from 1; of a delay: milliseconds */
} lt_fault;

typedef struct lt_inf_fault { /* likewise, in a gradient: autograd acts on it */
    int rank;
    int64_t step;         /* from 1; 0: there is none */
    char param[96];
    bool armed;           /* lt_grad_fault() was called */
    bool injected;          /* the inf is in */
} lt_inf_fault;

struct lt_ctx {
    lt_atomic_int refs; /* one for the owner, one for each object that was made in it */
    bool closed;        /* the owner has called lt_ctx_free(); the objects may still be there */
    lt_config config;
    int threads;
    int64_t step;
    uint64_t draws;
    lt_atomic_int listeners, stop_reason; /* lock-free: a signal handler uses them */
    lt_scope *LT_ATOMIC scope;          /* innermost, or NULL; written by the owner's thread */
    lt_slots slots;
    lt_device *devices[LT_MAX_DEVICES]; /* [0] is the CPU */
    lt_device *device;                /* where new tensors go */
    lt_log_fn log;
    void *log_ud;
    char note[256];                   /* for the log, from before there was one, */
    lt_log_level note_level;
    struct lt_trace *trace;           /* or NULL */
    struct lt_deferred_pool *deferred_pool;         /* of deferred.c, or NULL */
    lt_fault fault;
    lt_inf_fault inf;

    pthread_mutex_t lock;             /* guards all below, and the links of scopes */
    lt_memory memory;
    uint64_t fail_at;                 /* the allocation that fails; 0: none */
};

/* The one seam for memory: 64-byte aligned, from the pool of ctx for a device, uninitialised. NULL
 * with LT_ENOMEM, or with what an accelerator has failed with before. Give it back with the same
 * byte count. Safe in any thread. 0 bytes is a valid request. */
void *lt__device_alloc(lt_ctx *ctx, lt_device *device, size_t bytes);
/* Of an accelerator, as its alloc_host(), with such errors. */
void *lt__host_alloc(lt_device *device, size_t bytes);
void lt__device_free(lt_ctx *ctx, lt_device *device, void *p, size_t bytes);
/* The same for the CPU. */
void *lt__alloc(lt_ctx *ctx, size_t bytes);
void *lt__alloc_zero(lt_ctx *ctx, size_t bytes);
void lt__free(lt_ctx *ctx, void *p, size_t bytes);

/* The number in "cuda:1", 0 of "cuda"; -1 when text is neither. */
int lt__cuda_index(const char *text);
/* The device of ctx that is called so: "cpu", "cuda:0", or "cuda". NULL with LT_EENV. */
lt_device *lt__device_find(lt_ctx *ctx, const char *name);
/* Bytes from memory of one device to that of another, or of the same; at least one of two is the
 * CPU. Between two it waits: the CPU's side may be changed afterwards. */
lt_status lt__move(lt_device *to, void *dst, lt_device *from, const void *src, size_t bytes);

/* Whether a dtype can hold a number: an integer dtype one that is whole and in range, a float dtype
 * any, rounded. */
bool lt__dtype_holds(lt_dtype dtype, double value);
bool lt__dtype_holds_integer(lt_dtype dtype, int64_t value);
bool lt__is_exact_double(int64_t value);

/* Uninitialised memory on a device of ctx; kept: outside every scope. New. */
lt_tensor *lt__tensor_new(lt_ctx *ctx, lt_device *device, lt_dtype dtype, int ndim,
                          const int64_t *dims, bool kept);
/* x's values in a dtype, where x is, outside every scope. New. */
lt_tensor *lt__tensor_copy(lt_tensor *x, lt_dtype dtype);
/* x, or a copy outside every scope of one that is not on the CPU. New. */
lt_tensor *lt__on_host(lt_tensor *x);
/* lt_copy() between two devices, for tensors that it has checked. */
lt_status lt__copy_across(lt_tensor *dst, lt_tensor *src);
/* A tensor over elements [offset, offset + count(dims)) of storage, which is kept. In the
 * current scope. New. */
lt_tensor *lt__tensor_over(lt_storage *storage, lt_dtype dtype, int ndim, const int64_t *dims,
                           int64_t offset, bool kept);
/* A view of the living x, from its element offset on. New. */
lt_tensor *lt__tensor_view(lt_tensor *x, int ndim, const int64_t *dims, int64_t offset, bool kept);
/* A tensor with dims and dtype but no memory (pending). Outside every scope. New. */
lt_tensor *lt__tensor_pending(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims);
/* Gives a pending tensor its memory: elements from offset of storage, which is kept. */
void lt__tensor_place(lt_tensor *x, lt_storage *storage, int64_t offset);
/* New; uninitialised. */
lt_storage *lt__storage_new(lt_ctx *ctx, lt_device *device, size_t bytes);
/* A storage on the CPU over memory that someone else has made: deleter(ud, data) is called at its
 * end. New. NULL with LT_ENOMEM, then data is the caller's still. */
lt_storage *lt__storage_over(lt_ctx *ctx, void *data, size_t bytes,
                             void (*deleter)(void *ud, void *data), void *ud);
void lt__storage_release(lt_storage *storage);
void lt__trace_close(lt_ctx *ctx);
void lt__deferred_pool_close(lt_ctx *ctx);
lt_ctx *lt__ctx_retain(lt_ctx *ctx);
void lt__ctx_release(lt_ctx *ctx);
/* LT_EINVAL after lt_ctx_free(): "backward: the context was closed by lt_ctx_free()". */
lt_status lt__check_open(const lt_ctx *ctx, const char *who);
/* dims valid and their product in *count, or LT_EINVAL. */
lt_status lt__count_dims(int ndim, const int64_t *dims, int64_t *count);

/* LT_OK, or LT_EINVAL with the sentence about dead or pending tensors. */
lt_status lt__check_alive(const lt_tensor *x);

/* A result of so many bytes is not to be found in a cache by who reads it next: it is streamed. */
static inline bool lt__bypasses_cache(size_t bytes) { return bytes >= (size_t)4 << 20; }
/* to = from, which is near, without a way through the caches. A thread's last one is followed by
 * lt__nontemporal_fence(), before others read. From pieces of 2 KB memory is the busiest. */
void lt__copy_nontemporal(void *to, const void *from, size_t bytes);
void lt__nontemporal_fence(void);

/* The monotonic clock, in seconds. */
double lt__seconds(void);

/* Whether this process can map that many more bytes. Libraries crash or end the process when a
 * small allocation fails, so we check first. */
bool lt__has_room(size_t bytes);

#ifndef __cplusplus
static inline void lt__wrote(lt_tensor *x)
{
    atomic_fetch_add_explicit(&x->storage->version, 1, memory_order_relaxed);
}
#endif

static inline bool lt__same_dims(const lt_tensor *a, const lt_tensor *b)
{
    if (a->ndim != b->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->dims[i] != b->dims[i])
            return false;
    return true;
}

static inline bool lt__is_float(lt_dtype t) { return t <= LT_BF16; }
static inline bool lt__is_half(lt_dtype t) { return t == LT_F16 || t == LT_BF16; }

/* What lt_random() makes of a seed and a purpose, and lt_philox(): inline, for CUDA kernels too.
 * The mixing is that of Steele, Lea and Flood, Fast splittable pseudorandom number generators,
 * OOPSLA 2014. */
static inline void lt__random_key(uint64_t seed, lt_purpose purpose, uint32_t key[2])
{
    uint64_t x = seed + ((uint64_t)purpose + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    x ^= x >> 31;
    key[0] = (uint32_t)x;
    key[1] = (uint32_t)(x >> 32);
}

LT_BOTH static inline void lt__philox(const uint32_t counter[4], const uint32_t key[2],
                                      uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xd2511f53 * c0, p1 = (uint64_t)0xcd9e8d57 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9e3779b9; /* the golden ratio, and sqrt(3) - 1 */
        k1 += 0xbb67ae85;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* h after `blocks` blocks of 64 bytes, in plain C; for the test of its fast version. */
void lt__sha256_plain(uint32_t h[8], const uint8_t *from, size_t blocks);
/* Adds x's values, copied to the host if need be. LT_ENOMEM, or the device's error. */
lt_status lt__sha256_add_tensor(lt_sha256 *s, lt_tensor *x);

/* Single values; the vector loops are in dtype.c. */
float lt__f16_to_f32(uint16_t h);
uint16_t lt__f32_to_f16(float f);
uint16_t lt__f64_to_f16(double d);
uint16_t lt__f32_to_bf16(float f);
uint16_t lt__f64_to_bf16(double d);
static inline float lt__bf16_to_f32(uint16_t h)
{
    union { uint32_t u; float f; } v = {(uint32_t)h << 16};
    return v.f;
}

#ifdef __cplusplus
}
#endif
#endif
