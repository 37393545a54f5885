/* device.h - devices, their memory and copies between them. Included by tensor.h. */
#ifndef LT_CORE_DEVICE_H
#define LT_CORE_DEVICE_H

#include "core/core.h"
#include "core/device_comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lt_range { /* a range of device memory */
    char *start;
    size_t bytes;
} lt_range;
typedef struct lt_ranges { /* ranges, sorted by address */
    lt_range *at;
    size_t n, capacity; /* entries in use and allocated */
} lt_ranges;

typedef struct lt_large_blocks { /* implemented in large_blocks.c */
    lt_ranges all, free;
    size_t bytes, taken; /* total size of all regions; number of blocks in use */
} lt_large_blocks;

#define LT_POOL_CLASSES 49

typedef struct lt_pool {
    struct lt_free_list {
        void **blocks;
        size_t n, capacity, total;
    } list[LT_POOL_CLASSES];
    lt_large_blocks large;
    lt_memory memory; /* statistics of this device only */
} lt_pool;

/* The functions a device supplies. Addresses are device addresses. A call may return while its work
 * is still queued in the device's stream; sync() waits for it. copy() of an accelerator also
 * accepts CPU addresses on either side; the CPU must not touch that memory until sync() has
 * returned. Work in the stream may still use memory that was passed to free(). The memory pool that
 * calls alloc and free is the same code for all devices (pool.c).
 *
 * Only the context's thread makes these calls, except that other threads may call wait, download
 * and upload at the same time. */
typedef struct lt_device {
    const char *name; /* "cpu", "cuda:0" */
    void *(*alloc)(struct lt_device *device,
                   size_t bytes); /* memory aligned to 64 bytes; NULL if out of memory */
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

    /* For accelerators only; the CPU is synchronous. mark() records a mark after all work submitted
     * to the stream so far; marks are numbered from 1. Only the last LT_MAX_MARKS are remembered.
     * Waiting for an older mark waits for all work submitted so far. */
    uint64_t (*mark)(struct lt_device *device);
    /* Blocks; returns pending errors too. Any thread may call it. */
    lt_status (*wait)(struct lt_device *device, uint64_t mark);
    /* Pinned CPU memory that copy() reads and writes asynchronously. Do not touch it until wait()
     * has returned for a mark after the copy. alloc_host returns NULL if out of memory. Both may
     * block; free_host waits for all pending copies. */
    void *(*alloc_host)(struct lt_device *device, size_t bytes);
    void (*free_host)(struct lt_device *device, void *p);
    /* Copies from pinned memory to the device after the mark `after`, concurrently with all other
     * work in the stream. Work that uses dst must be submitted after a call to stream_wait(*mark).
     * *mark is recorded after the copy. Uploads run one after the other. Any thread may call
     * it. */
    lt_status (*upload)(struct lt_device *device, void *dst, const void *src, size_t bytes,
                        uint64_t after, uint64_t *mark);
    /* Copies from the device to pinned memory, in the same way. Downloads run in order,
     * independently of uploads. mark may be NULL. Until wait(*mark) has returned, do not submit
     * work that writes to src. Any thread may call it. */
    lt_status (*download)(struct lt_device *device, void *dst, const void *src, size_t bytes,
                          uint64_t after, uint64_t *mark);
    /* Makes work submitted to the stream from now on wait for the mark of an upload. */
    lt_status (*stream_wait)(struct lt_device *device, uint64_t mark);
    const lt_device_comm_calls *comm_calls; /* sums over ranks; NULL if unsupported */
    bool is_host;                           /* the CPU can access its memory */
    int threads;                            /* CPU only */
    lt_pool pool;                           /* guarded by ctx->lock */
} lt_device;

enum { LT_MAX_MARKS = 256 };

#define LT_MAX_DEVICES 2 /* per context: the CPU and one accelerator */

/* Allocates memory from the pool of ctx for a device: 64-byte aligned, uninitialised. NULL with
 * LT_ENOMEM, or with the pending error of an accelerator. Free it with the same byte count.
 * Thread-safe. 0 bytes is a valid request. */
void *lt__device_alloc(lt_ctx *ctx, lt_device *device, size_t bytes);
/* Allocates pinned memory with alloc_host() of an accelerator. Fails with the same errors. */
void *lt__host_alloc(lt_device *device, size_t bytes);
void lt__device_free(lt_ctx *ctx, lt_device *device, void *p, size_t bytes);
/* The same for the CPU. */
void *lt__alloc(lt_ctx *ctx, size_t bytes);
void *lt__alloc_zero(lt_ctx *ctx, size_t bytes);
void lt__free(lt_ctx *ctx, void *p, size_t bytes);
/* Makes room for one more element in *list, a pointer to an array of `size` bytes each in this
 * memory, or to NULL. It has n elements and room for *capacity. LT_ENOMEM. */
LT_NODISCARD lt_status lt__grow(lt_ctx *ctx, void *list, int n, int *capacity, size_t size);

/* The CPU quota of this process's cgroup in CPUs, rounded up; 0 if it has no quota. root: where
 * cgroups are mounted, "/sys/fs/cgroup"; self: the file that names the cgroup,
 * "/proc/self/cgroup". */
int lt__cgroup_cpus(const char *root, const char *self);

/* The device number in "cuda:1"; 0 for "cuda"; -1 for any other text. */
int lt__cuda_index(const char *text);
/* The device of ctx with this name: "cpu", "cuda:0", or "cuda". NULL with LT_EENV. */
lt_device *lt__device_find(lt_ctx *ctx, const char *name);
/* Copies bytes between two devices or within one. LT_EINVAL if the devices differ and neither is
 * the CPU. Between two devices it blocks until the copy is done, so the caller may change the CPU
 * memory afterwards. */
lt_status lt__move(lt_device *to, void *dst, lt_device *from, const void *src, size_t bytes);

/* 8-byte slots in an accelerator's pinned memory. The first request allocates all of them.
 * lt__pinned_slot_take() returns the number of a free slot, or -1 if there is none or no pinned
 * memory. Only the context's thread takes slots; another thread may use one and give it back. */
int lt__pinned_slot_take(lt_ctx *ctx, lt_device *device);
void *lt__pinned_slot(const lt_ctx *ctx, int slot); /* its address */
void lt__pinned_slot_give(lt_ctx *ctx, int slot);
void lt__pinned_slots_close(lt_ctx *ctx);

/* Whether a result of this size is written with non-temporal stores. It is then not in a cache when
 * it is next read. */
static inline bool lt__bypasses_cache(size_t bytes) { return bytes >= (size_t)4 << 20; }
/* Copies with non-temporal stores; src should be in a cache. After its last copy a thread must call
 * lt__nontemporal_fence() before other threads read dst. Pieces of 2 KB and more saturate memory
 * bandwidth. */
void lt__copy_nontemporal(void *dst, const void *src, size_t bytes);
void lt__nontemporal_fence(void);

/* Whether the process can map `bytes` more bytes. Some libraries crash or exit when a small
 * allocation fails, so luatrain checks first. */
bool lt__can_map(size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
