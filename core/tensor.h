/* tensor.h - internals of tensors, for other modules and for kernel authors. Includes the internals
 * of contexts (context.h), devices (device.h) and numbers (number.h). Not installed.
 *
 * Invariants. A tensor is dense. Its data points into its storage; it is NULL if the tensor is dead
 * (its scope has ended), pending (a parameter whose arena does not exist yet) or meta (only its
 * dtype and dims are known here). Views share the storage. A storage is freed with its last tensor.
 * node, leaf, home and out_index belong to autograd; core only calls ctx->slots.forget when such a
 * tensor is freed or its scope ends, and ctx->slots.inherit for its views and copies. The links of
 * a scope are written under ctx->lock.
 */
#ifndef LT_CORE_TENSOR_H
#define LT_CORE_TENSOR_H

#include "core/context.h"
#include "core/number.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lt_storage {
    lt_atomic_int refs;
    lt_atomic_uint
        version; /* number of in-place writes, so that backward detects a modified saved tensor */
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
    bool dead, kept; /* dead: its scope has ended; kept: see lt_keep() */
    bool pending;    /* a parameter without memory yet */
    bool meta;       /* without memory: it only has a dtype and dims */
    int64_t count;
    int64_t dims[LT_MAX_DIMS];
    void *data;
    lt_storage *storage;
    lt_ctx *ctx;
    struct lt_node *node;          /* autograd: the op that produced it; NULL if not recorded */
    struct lt_leaf *leaf;          /* autograd: its gradient and hooks; NULL if it has none */
    struct lt_home *home;          /* autograd: which ranks have its values; NULL if all have */
    struct lt_scope *scope;        /* its scope, or NULL if it is in none */
    struct lt_tensor *next, *prev; /* linked list of that scope */
};

struct lt_scope { /* tensors that lose their memory together */
    lt_scope *outer;
    lt_tensor *first;
};

/* Creates an uninitialised tensor on a device of ctx. If kept is true, it belongs to no scope,
 * otherwise to the current scope. New. */
lt_tensor *lt__tensor_new(lt_ctx *ctx, lt_device *device, lt_dtype dtype, int ndim,
                          const int64_t *dims, bool kept);
/* The same with the dims of x, outside any scope. New. */
lt_tensor *lt__tensor_like(const lt_tensor *x, lt_device *device, lt_dtype dtype);
/* Returns x, which is taken, or NULL if status is an error. */
lt_tensor *lt__tensor_if(lt_status status, lt_tensor *x);
/* Copies x into a tensor of this dtype on the same device, outside any scope. New. */
lt_tensor *lt__tensor_copy(lt_tensor *x, lt_dtype dtype);
/* Returns x if it is on the CPU, otherwise a copy on the CPU outside any scope. New. */
lt_tensor *lt__on_host(lt_tensor *x);
/* Creates a tensor over elements [offset, offset + count(dims)) of storage. storage is kept. The
 * argument kept has the same meaning as in lt__tensor_new(). New. */
lt_tensor *lt__tensor_over(lt_storage *storage, lt_dtype dtype, int ndim, const int64_t *dims,
                           int64_t offset, bool kept);
/* A view of x that starts at element `offset`. x must be alive. New. */
lt_tensor *lt__tensor_view(lt_tensor *x, int ndim, const int64_t *dims, int64_t offset, bool kept);
/* Gives y, a view or copy of x outside of any op, the home of x. Returns y, which is taken and may
 * be NULL; NULL with LT_ENOMEM. */
lt_tensor *lt__tensor_inherit(lt_tensor *y, const lt_tensor *x);
/* Creates a pending tensor: dims and dtype but no memory. Outside any scope. New. */
lt_tensor *lt__tensor_pending(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims);
/* Creates a meta tensor in the current scope, or outside any scope if kept. New. */
lt_tensor *lt__tensor_meta(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims, bool kept);
/* Gives a meta tensor uninitialised memory, on the device of new tensors. LT_ENOMEM. */
LT_NODISCARD lt_status lt__tensor_arrive(lt_tensor *x);
/* Assigns memory to a pending tensor: elements of storage from offset. storage is kept. */
void lt__tensor_place(lt_tensor *x, lt_storage *storage, int64_t offset);
/* Ends the innermost scope, but its tensors live until lt__scope_end(). NULL if there is none. */
lt_scope *lt__scope_take(lt_ctx *ctx);
void lt__scope_end(lt_ctx *ctx, lt_scope *scope); /* NULL is allowed */
/* Creates an uninitialised storage. New. */
lt_storage *lt__storage_new(lt_ctx *ctx, lt_device *device, size_t bytes);
/* Creates a CPU storage over the caller's memory. deleter(ud, data) is called when the storage is
 * freed. New. NULL with LT_ENOMEM; then the caller still owns data. */
lt_storage *lt__storage_over(lt_ctx *ctx, void *data, size_t bytes,
                             void (*deleter)(void *ud, void *data), void *ud);
void lt__storage_release(lt_storage *storage);
lt_status lt__dtype_check(lt_dtype dtype); /* LT_EINVAL unless it is one of lt_dtype */
/* Checks dims and stores their product in *count. LT_EINVAL if they are invalid. */
lt_status lt__count_dims(int ndim, const int64_t *dims, int64_t *count);

/* LT_EINVAL, with a message, if x is dead, pending or meta. */
lt_status lt__check_alive(const lt_tensor *x);

#ifndef __cplusplus
/* Call it for each in-place write to x. See lt_storage.version. */
static inline void lt__bump_version(lt_tensor *x)
{
    atomic_fetch_add_explicit(&x->storage->version, 1, memory_order_relaxed);
}
#endif

/* The bytes of the elements of x. */
static inline size_t lt__tensor_bytes(const lt_tensor *x)
{
    return (size_t)x->count * lt_dtype_bytes((lt_dtype)x->dtype);
}

static inline bool lt__same_dims(const lt_tensor *a, const lt_tensor *b)
{
    if (a->ndim != b->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->dims[i] != b->dims[i])
            return false;
    return true;
}

/* lt_file_save() with meta tensors: read(ud, x) returns the values of x on the CPU, new; or NULL if
 * it fails. It is called for each meta tensor, in their order. */
typedef lt_tensor *(*lt_read_fn)(void *ud, lt_tensor *x);
LT_NODISCARD lt_status lt__file_save_with(const char *path, int n, const char *const *names,
                                          lt_tensor *const *tensors, int n_meta,
                                          const char *const *meta, lt_read_fn read, void *ud);

/* Adds the elements of x to the digest, via a copy on the CPU if x is elsewhere. LT_ENOMEM, or the
 * device's error. */
lt_status lt__sha256_add_tensor(lt_sha256 *s, lt_tensor *x);

#ifdef __cplusplus
}
#endif
#endif
