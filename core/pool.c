/* pool.c - a caching allocator with accounting, the same for every device.
 *
 * A small request is rounded up to a size class; a freed block goes to the list of its class and
 * serves the next request of that class. There are four classes per power of two, so at most a
 * fifth of a block above 256 bytes is wasted. A large request is rounded up to whole pages and cut
 * from a region (large_blocks.c). Either way a training loop allocates nothing from the system
 * after its first steps. When the system is out of memory, the cached blocks are returned to it and
 * the request is retried.
 *
 * Callers pass the size when they free. Blocks therefore have no header, stay aligned and may be in
 * memory that the CPU cannot write. Each list has room for every existing block of its class, so
 * freeing cannot fail.
 */
#include <stdlib.h>
#include <string.h>

#include "core/pool.h"

/* The guard lets AddressSanitizer detect an overrun of a large block when the next block is
 * adjacent. */
#ifdef __SANITIZE_ADDRESS__
enum { PAGE = 4096, GUARD = 64 };
#else
enum { PAGE = 4096, GUARD = 0 };
#endif

/* Blocks of class 4k + q, with q = 1..4, have 64 * 2^k * (4 + q) / 4 bytes, rounded up to a
 * multiple of 64; blocks of class 0 have 64 bytes. Requests beyond the last class are large. */
static size_t class_bytes(int i)
{
    if (i == 0)
        return 64;
    int k = (i - 1) / 4, q = (i - 1) % 4 + 1;
    size_t bytes = ((size_t)16 << k) * (size_t)(4 + q);
    return (bytes + 63) & ~(size_t)63;
}

static int class_of(size_t bytes)
{
    if (bytes <= 64)
        return 0;
    int k = 63 - __builtin_clzll((bytes - 1) / 64); /* 64 * 2^k < bytes <= 64 * 2^(k + 1) */
    size_t quarter = (size_t)16 << k;
    size_t q = (bytes - ((size_t)64 << k) + quarter - 1) / quarter;
    return 4 * k + (int)q;
}

/* The size of the block for a request. It depends only on bytes, since freeing computes it
 * again. */
static size_t block_bytes(size_t bytes)
{
    int i = class_of(bytes);
    return i < LT_POOL_CLASSES ? class_bytes(i) : (bytes + GUARD + PAGE - 1) & ~(size_t)(PAGE - 1);
}

/* Adds to the statistics of the device and of ctx: live to the bytes in use, cached to the bytes of
 * free blocks. */
static void account(lt_ctx *ctx, lt_device *device, size_t live, size_t cached)
{
    lt_memory *of[] = {&device->pool.memory, &ctx->memory};
    for (int i = 0; i < 2; i++) {
        of[i]->live += live; /* unsigned differences; a negative one wraps around */
        of[i]->cached += cached;
        if (of[i]->live > of[i]->peak)
            of[i]->peak = of[i]->live;
    }
}

static size_t trim(lt_ctx *ctx, lt_device *device)
{
    size_t freed = lt__large_block_trim(device);
    for (int i = 0; i < LT_POOL_CLASSES; i++) {
        struct lt_free_list *list = &device->pool.list[i];
        for (; list->n > 0; list->total--) {
            device->free(device, list->blocks[--list->n], class_bytes(i));
            freed += class_bytes(i);
        }
    }
    account(ctx, device, 0, -freed);
    return freed;
}

void lt__pool_close(lt_ctx *ctx, lt_device *device)
{
    trim(ctx, device);
    for (int i = 0; i < LT_POOL_CLASSES; i++)
        free(device->pool.list[i].blocks);
    free(device->pool.large.all.at);
    free(device->pool.large.free.at);
}

/* Allocates a block of class i from the system and makes room for it in its list. */
static void *fresh(lt_device *device, int i)
{
    struct lt_free_list *list = &device->pool.list[i];
    if (LT_RESERVE(list->blocks, list->total + 1, &list->capacity, "for free blocks") != LT_OK)
        return NULL;
    void *p = device->alloc(device, class_bytes(i));
    list->total += p != NULL;
    if (p && device->is_host)
        LT_FORBID(p, class_bytes(i));
    return p;
}

/* Returns a block for the request, or NULL if the system is out of memory. */
static void *take(lt_ctx *ctx, lt_device *device, size_t bytes)
{
    int i = class_of(bytes);
    size_t size = block_bytes(bytes);
    if (i >= LT_POOL_CLASSES) {
        size_t before = device->pool.large.bytes;
        void *p = lt__large_block_alloc(device, size);
        size_t more = device->pool.large.bytes - before;
        account(ctx, device, 0, more - (p ? size : 0));
        return p;
    }
    struct lt_free_list *list = &device->pool.list[i];
    if (list->n == 0)
        return fresh(device, i);
    account(ctx, device, 0, -size);
    return list->blocks[--list->n];
}

/* Returns false if the accelerator has failed. Allocations on it then return NULL although memory
 * is left, and sync() has set the error message. */
static bool has_not_failed(lt_device *device)
{
    return device->is_host || device->sync(device) == LT_OK;
}

void *lt__device_alloc(lt_ctx *ctx, lt_device *device, size_t bytes)
{
    if (bytes > (size_t)1 << 46) {
        lt_fail(LT_ENOMEM, "a request for %zu bytes is more than any machine has", bytes);
        return NULL;
    }
    void *p = NULL;
    pthread_mutex_lock(&ctx->lock);
    bool fault = ++ctx->memory.allocations == ctx->fail_at;
    if (!fault) {
        p = take(ctx, device, bytes);
        if (!p && trim(ctx, device) > 0)
            p = take(ctx, device, bytes);
    }
    size_t live = device->pool.memory.live;
    device->pool.memory.allocations++;
    if (p) {
        if (device->is_host)
            LT_ALLOW(p, bytes);
        account(ctx, device, block_bytes(bytes), 0);
    }
    pthread_mutex_unlock(&ctx->lock);
    if (!p && (fault || has_not_failed(device)))
        lt_fail(LT_ENOMEM, "out of memory on %s: %.1f MiB requested, %.1f MiB in use%s",
                device->name, (double)bytes / 1048576, (double)live / 1048576,
                fault ? " (fault alloc)" : "; try a smaller batch");
    else if (p && ctx->config.poison && device->is_host)
        memset(p, 0xff, bytes);
    else if (p && ctx->config.poison)
        (void)device->fill(device, p, LT_U8, bytes, 0xff); /* a later call reports the failure */
    return p;
}

void *lt__host_alloc(lt_device *device, size_t bytes)
{
    void *p = device->alloc_host(device, bytes);
    if (!p && has_not_failed(device))
        lt_fail(LT_ENOMEM, "out of host memory for copies from %s", device->name);
    return p;
}

void lt__device_free(lt_ctx *ctx, lt_device *device, void *p, size_t bytes)
{
    if (!p)
        return;
    int i = class_of(bytes);
    size_t size = block_bytes(bytes);
    pthread_mutex_lock(&ctx->lock);
    if (device->is_host)
        LT_FORBID(p, size);
    if (i < LT_POOL_CLASSES) {
        struct lt_free_list *list = &device->pool.list[i];
        list->blocks[list->n++] = p;
    } else {
        lt__large_block_free(device, p, size);
    }
    account(ctx, device, -size, size);
    pthread_mutex_unlock(&ctx->lock);
}

void *lt__alloc(lt_ctx *ctx, size_t bytes) { return lt__device_alloc(ctx, ctx->devices[0], bytes); }
void lt__free(lt_ctx *ctx, void *p, size_t bytes)
{
    lt__device_free(ctx, ctx->devices[0], p, bytes);
}

void *lt__alloc_zero(lt_ctx *ctx, size_t bytes)
{
    void *p = lt__alloc(ctx, bytes);
    return p ? memset(p, 0, bytes) : NULL;
}

lt_status lt__grow(lt_ctx *ctx, void *list, int n, int *capacity, size_t size)
{
    int room = *capacity > 0 ? 2 * *capacity : 64;
    void *old, *p;
    if (n < *capacity)
        return LT_OK;
    if (!(p = lt__alloc(ctx, (size_t)room * size)))
        return LT_ENOMEM;
    memcpy(&old, list, sizeof old); /* a pointer of any type */
    if (n > 0)
        memcpy(p, old, (size_t)n * size);
    lt__free(ctx, old, (size_t)*capacity * size);
    memcpy(list, &p, sizeof p);
    *capacity = room;
    return LT_OK;
}

static lt_memory read_stats(const lt_ctx *ctx, const lt_memory *at)
{
    lt_ctx *c = (lt_ctx *)ctx; /* the lock is the only thing written */
    pthread_mutex_lock(&c->lock);
    lt_memory m = *at;
    pthread_mutex_unlock(&c->lock);
    return m;
}

lt_memory lt_memory_stats(const lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, (lt_memory){0});
    return read_stats(ctx, &ctx->memory);
}

lt_memory lt_device_memory_stats(const lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, (lt_memory){0});
    return read_stats(ctx, &ctx->device->pool.memory);
}

void lt_memory_trim(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, );
    pthread_mutex_lock(&ctx->lock);
    for (int i = 0; i < LT_MAX_DEVICES; i++)
        if (ctx->devices[i])
            trim(ctx, ctx->devices[i]);
    pthread_mutex_unlock(&ctx->lock);
}
