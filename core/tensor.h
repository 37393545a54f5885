/* tensor.h - internals of contexts, devices and tensors, for the rooms above core and for kernel
 * authors. Not installed.
 *
 * Invariants. A tensor is dense. Its data points into its storage; it is NULL if the tensor is dead
 * (its scope has ended) or pending (a parameter whose arena does not exist yet). Views share the
 * storage. A storage returns to the pool with its last tensor. node, leaf and out_index belong to
 * autograd; core only calls ctx->slots.forget when such a tensor ends. The links of a scope are
 * written under ctx->lock.
 */
#ifndef LT_CORE_TENSOR_H
#define LT_CORE_TENSOR_H

#include <pthread.h>

#include "core/core.h"
#include "core/device_comm.h"
#include "core/simd.h"

/* CUDA sources are C++, which lacks _Atomic and stdatomic.h. They only read these structs. */
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

typedef struct lt_range {
    char *start;
    size_t bytes;
} lt_range;
typedef struct lt_ranges {
    lt_range *at;
    size_t n, room;
} lt_ranges; /* sorted by address */

typedef struct lt_large_blocks { /* implemented in large_blocks.c */
    lt_ranges all, free;
    size_t bytes, taken; /* total size of all regions; number of blocks in use */
} lt_large_blocks;

#define LT_POOL_CLASSES 49

typedef struct lt_pool {
    struct lt_free_list {
        void **blocks;
        size_t n, room, total;
    } list[LT_POOL_CLASSES];
    lt_large_blocks large;
    lt_memory memory; /* statistics of this device only */
} lt_pool;

/* The functions a device supplies. Addresses are device addresses. Calls may be asynchronous in the
 * device's stream until sync(). copy() of an accelerator also accepts CPU addresses on either side;
 * the CPU must not touch that memory until sync() has returned. Work in the stream may still use
 * memory that was passed to free(). The pool above alloc and free is the same for all devices
 * (pool.c).
 *
 * Only the context's thread makes these calls, with one exception: wait, download and upload may
 * also be called by one other thread at the same time. */
typedef struct lt_device {
    const char *name; /* "cpu", "cuda:0" */
    void *(*alloc)(struct lt_device *device,
                   size_t bytes); /* 64-byte aligned; NULL if out of memory */
    void (*free)(struct lt_device *device, void *p, size_t bytes);
    lt_status (*copy)(struct lt_device *device, void *dst, const void *src, size_t bytes);
    lt_status (*convert)(struct lt_device *device, void *dst, lt_dtype dst_dtype, const void *src,
                         lt_dtype src_dtype, size_t n);
    lt_status (*fill)(struct lt_device *device, void *dst, lt_dtype dtype, size_t n, double value);
    lt_status (*add)(struct lt_device *device, void *dst, const void *src, lt_dtype dtype,
                     size_t n); /* dst += src */
    /* dst[i] = table[i % channels][src[i]], table (channels, 256). Copies n elements of `each`
     * bytes (1, 2, 4 or 8). dst and src are aligned to 32 bytes. */
    lt_status (*look_up)(struct lt_device *device, void *dst, const uint8_t *src, const void *table,
                         size_t each, int64_t n, int64_t channels);
    lt_status (*sync)(struct lt_device *device); /* blocks; returns pending errors */
    void (*close)(struct lt_device *device);     /* frees the device */

    /* For accelerators only; the CPU is synchronous. mark() records a mark behind all work
     * submitted to the stream so far; marks count from 1. Only the last LT_MARKS are remembered.
     * Waiting for an older mark waits for all work submitted so far. */
    uint64_t (*mark)(struct lt_device *device);
    /* blocks; returns pending errors too. Either thread */
    lt_status (*wait)(struct lt_device *device, uint64_t mark);
    /* Pinned CPU memory that copy() reads and writes asynchronously. Do not touch it until wait()
     * has returned for a mark behind the copy. alloc_host returns NULL if out of memory. Both may
     * block; free_host waits for all pending copies. */
    void *(*alloc_host)(struct lt_device *device, size_t bytes);
    void (*free_host)(struct lt_device *device, void *p);
    /* Copies from pinned memory to the device after the mark `after`, concurrently with all other
     * work in the stream. Work that uses dst must be submitted after a call of stream_wait(*mark);
     * *mark is behind the copy. Uploads run one after the other. Either thread may call it. */
    lt_status (*upload)(struct lt_device *device, void *dst, const void *src, size_t bytes,
                        uint64_t after, uint64_t *mark);
    /* Copies from the device to pinned memory, in the same way. Downloads run in order,
     * independently of uploads. mark may be NULL. Until wait(*mark) has returned, do not submit
     * work that writes to src. Either thread may call it. */
    lt_status (*download)(struct lt_device *device, void *dst, const void *src, size_t bytes,
                          uint64_t after, uint64_t *mark);
    /* Makes work submitted to the stream from now on wait for the mark of an upload. */
    lt_status (*stream_wait)(struct lt_device *device, uint64_t mark);
    const lt_device_comm_calls *comm_calls; /* sums over ranks; NULL if unsupported */
    bool is_host;                           /* the CPU can access its memory */
    int threads;                            /* CPU only */
    lt_pool pool;                           /* guarded by ctx->lock */
} lt_device;

enum { LT_MARKS = 256 };

#define LT_MAX_DEVICES 2 /* per context: the CPU and one accelerator */

typedef struct lt_storage {
    lt_atomic_int refs;
    lt_atomic_uint
        version; /* counts in-place writes, so that backward detects a modified saved tensor */
    lt_ctx *ctx;
    lt_device *device;
    void *data;
    size_t bytes;
    void (*deleter)(void *ud, void *data); /* releases external memory; NULL for pool memory */
    void *ud;
} lt_storage;

struct lt_tensor {
    lt_atomic_int refs;
    uint8_t dtype, ndim, out_index;
    bool dead, kept;
    bool pending; /* a parameter without memory yet */
    int64_t count;
    int64_t dims[LT_MAX_DIMS];
    void *data;
    lt_storage *storage;
    lt_ctx *ctx;
    struct lt_node *node;          /* autograd: the op that produced it; NULL if not recorded */
    struct lt_leaf *leaf;          /* autograd: holds its gradient; NULL if it requires none */
    struct lt_scope *scope;        /* the scope that will end it, or NULL */
    struct lt_tensor *next, *prev; /* linked list of that scope */
};

typedef struct lt_scope {
    struct lt_scope *outer;
    lt_tensor *first;
} lt_scope;

/* Callbacks and state of the rooms above core. Each pointer is set once by the room named here. */
typedef struct lt_slots {
    void (*forget)(lt_tensor *x,
                   bool gone);      /* autograd: drops x's history; if gone, also its gradient */
    void (*closed)(lt_ctx *ctx);    /* autograd: ends all graphs; called by lt_ctx_free() */
    void (*ctx_freed)(lt_ctx *ctx); /* autograd: frees its state; called with the last reference */
    struct lt_autograd *autograd;
    void (*ops_freed)(lt_ctx *ctx); /* ops: the same */
    struct lt_ops *ops;
} lt_slots;

typedef enum lt_fault_kind {
    LT_FAULT_NONE,
    LT_FAULT_KILL,
    LT_FAULT_LEAVE,
    LT_FAULT_HANG,
    LT_FAULT_DELAY
} lt_fault_kind;

typedef struct lt_fault { /* fault of a rank, for tests; dist triggers it */
    lt_fault_kind kind;
    int rank;
    int64_t number; /* step, from 1; for a delay, milliseconds */
} lt_fault;

typedef struct lt_inf_fault { /* inf in a gradient, for tests; autograd injects it */
    int rank;
    int64_t step; /* from 1; 0 if no inf is to be injected */
    char param[96];
    bool armed;    /* lt_grad_fault() was called */
    bool injected; /* the inf has been injected */
} lt_inf_fault;

struct lt_ctx {
    lt_atomic_int refs; /* one for the owner, one for each object made in the context */
    bool closed;        /* the owner has called lt_ctx_free(); objects may still exist */
    lt_config config;
    int threads;
    int64_t step;
    uint64_t draws;
    lt_atomic_int listeners, stop_reason; /* lock-free, for signal handlers */
    lt_scope *LT_ATOMIC scope; /* innermost, or NULL; written only by the owner's thread */
    lt_slots slots;
    lt_device *devices[LT_MAX_DEVICES]; /* [0] is the CPU; [1] the accelerator or NULL */
    lt_device *device;                  /* device of new tensors */
    lt_log_fn log;
    void *log_ud;
    char note[256]; /* logged once a log callback is set */
    lt_log_level note_level;
    struct lt_trace *trace;               /* or NULL */
    struct lt_pinned_slots *pinned_slots; /* see pinned.c; or NULL */
    lt_fault fault;
    lt_inf_fault inf;

    pthread_mutex_t lock; /* guards the fields below, the pools and scope links */
    lt_memory memory;
    uint64_t fail_at; /* number of the allocation that fails; 0 if none */
};

/* Allocates memory from the pool of ctx for a device: 64-byte aligned, uninitialised. NULL with
 * LT_ENOMEM, or with the pending error of an accelerator. Free it with the same byte count.
 * Thread-safe. 0 bytes is a valid request. */
void *lt__device_alloc(lt_ctx *ctx, lt_device *device, size_t bytes);
/* Pinned memory from the alloc_host() of an accelerator; errors as above. */
void *lt__host_alloc(lt_device *device, size_t bytes);
void lt__device_free(lt_ctx *ctx, lt_device *device, void *p, size_t bytes);
/* Slots of 8 bytes of pinned memory of an accelerator, allocated at once at the first request. take
 * returns the number of a free slot, or -1 if there is none or no pinned memory; for the context's
 * thread. Another thread may use and give back the slot. */
int lt__pinned_slot_take(lt_ctx *ctx, lt_device *device);
void *lt__pinned_slot(const lt_ctx *ctx, int slot); /* its address */
void lt__pinned_slot_give(lt_ctx *ctx, int slot);
void lt__pinned_slots_close(lt_ctx *ctx);
/* The same for the CPU. */
void *lt__alloc(lt_ctx *ctx, size_t bytes);
void *lt__alloc_zero(lt_ctx *ctx, size_t bytes);
void lt__free(lt_ctx *ctx, void *p, size_t bytes);

/* The device number in "cuda:1"; 0 for "cuda"; -1 for any other text. */
int lt__cuda_index(const char *text);
/* The device of ctx with this name: "cpu", "cuda:0", or "cuda". NULL with LT_EENV. */
lt_device *lt__device_find(lt_ctx *ctx, const char *name);
/* Copies bytes between two devices or within one; at least one of two different devices must be the
 * CPU, else LT_EINVAL. Between two devices it blocks until the copy is done, so the caller may
 * change the CPU memory afterwards. */
lt_status lt__move(lt_device *to, void *dst, lt_device *from, const void *src, size_t bytes);

/* Whether a dtype can hold a number. An integer dtype holds whole numbers in its range; a float
 * dtype holds any number, rounded. */
bool lt__dtype_holds(lt_dtype dtype, double value);
bool lt__dtype_holds_integer(lt_dtype dtype, int64_t value);
bool lt__is_exact_double(int64_t value);

/* Creates an uninitialised tensor on a device of ctx. With kept it belongs to no scope, otherwise
 * to the current scope. New. */
lt_tensor *lt__tensor_new(lt_ctx *ctx, lt_device *device, lt_dtype dtype, int ndim,
                          const int64_t *dims, bool kept);
/* Copies x into a tensor of this dtype on the same device, outside any scope. New. */
lt_tensor *lt__tensor_copy(lt_tensor *x, lt_dtype dtype);
/* Returns x if it is on the CPU, otherwise a copy on the CPU outside any scope. New. */
lt_tensor *lt__on_host(lt_tensor *x);
/* Creates a tensor over elements [offset, offset + count(dims)) of storage. storage is kept. The
 * tensor is in the current scope unless kept. New. */
lt_tensor *lt__tensor_over(lt_storage *storage, lt_dtype dtype, int ndim, const int64_t *dims,
                           int64_t offset, bool kept);
/* A view of x starting at its element offset. x must be alive. New. */
lt_tensor *lt__tensor_view(lt_tensor *x, int ndim, const int64_t *dims, int64_t offset, bool kept);
/* Creates a pending tensor: dims and dtype but no memory. Outside any scope. New. */
lt_tensor *lt__tensor_pending(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims);
/* Assigns memory to a pending tensor: elements of storage from offset. storage is kept. */
void lt__tensor_place(lt_tensor *x, lt_storage *storage, int64_t offset);
/* Creates an uninitialised storage. New. */
lt_storage *lt__storage_new(lt_ctx *ctx, lt_device *device, size_t bytes);
/* Creates a CPU storage over memory of the caller. deleter(ud, data) is called when the storage is
 * freed. New. NULL with LT_ENOMEM; then the caller still owns data. */
lt_storage *lt__storage_over(lt_ctx *ctx, void *data, size_t bytes,
                             void (*deleter)(void *ud, void *data), void *ud);
void lt__storage_release(lt_storage *storage);
void lt__trace_close(lt_ctx *ctx);
lt_ctx *lt__ctx_retain(lt_ctx *ctx);
void lt__ctx_release(lt_ctx *ctx);
/* LT_EINVAL after lt_ctx_free(): "backward: the context was closed by lt_ctx_free()". */
lt_status lt__check_open(const lt_ctx *ctx, const char *who);
/* Checks dims and stores their product in *count. LT_EINVAL if they are invalid. */
lt_status lt__count_dims(int ndim, const int64_t *dims, int64_t *count);

/* LT_EINVAL, with a message, if x is dead or pending. */
lt_status lt__check_alive(const lt_tensor *x);

/* Whether a result of this size is written with non-temporal stores: it will not be in a cache when
 * it is next read. */
static inline bool lt__bypasses_cache(size_t bytes) { return bytes >= (size_t)4 << 20; }
/* Copies with non-temporal stores; src should be in a cache. After its last copy a thread must
 * call lt__nontemporal_fence() before other threads read. Pieces of 2 KB and more saturate memory
 * bandwidth. */
void lt__copy_nontemporal(void *dst, const void *src, size_t bytes);
void lt__nontemporal_fence(void);

/* The monotonic clock, in seconds. */
double lt__seconds(void);

/* Whether the process can map this many more bytes. Libraries crash or exit when a small allocation
 * fails, so the library checks first. */
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

/* The key that lt_random() derives from seed and purpose, and lt_philox(); inline so that CUDA
 * kernels can use them too. Mixing function: Steele, Lea and Flood, Fast splittable pseudorandom
 * number generators, OOPSLA 2014. */
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

/* Updates h with `blocks` blocks of 64 bytes, in plain C. Exported so that tests can compare the
 * fast version with it. */
void lt__sha256_plain(uint32_t h[8], const uint8_t *from, size_t blocks);
/* Adds the elements of x to the digest, via a copy on the CPU if x is elsewhere. LT_ENOMEM, or the
 * device's error. */
lt_status lt__sha256_add_tensor(lt_sha256 *s, lt_tensor *x);

/* Conversions of single values; the vector loops are in dtype.c. */
float lt__f16_to_f32(uint16_t h);
uint16_t lt__f32_to_f16(float f);
uint16_t lt__f64_to_f16(double d);
uint16_t lt__f32_to_bf16(float f);
uint16_t lt__f64_to_bf16(double d);
static inline float lt__bf16_to_f32(uint16_t h)
{
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)h << 16};
    return v.f;
}

#ifdef __cplusplus
}
#endif
#endif
