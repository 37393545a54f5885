/* pool.c - the one seam for memory: a caching allocator with accounting, the same for every
 * device.
 *
 * A request is rounded up to a size class; a freed block goes to its class's list and serves the
 * next request of that class, so that a training loop allocates nothing from the system after
 * its first steps. Classes are four to a power of two: at most a fifth is wasted. When the
 * system has no more, the cache is given back and the request tried again. Callers remember the
 * size, so blocks carry no header, keep their alignment and may lie where the CPU cannot write.
 * A list has room for every block of its class that exists, so that giving one back cannot fail.
 */
#include <stdlib.h>
#include <string.h>

#include "core/pool.h"

/* For AddressSanitizer a block that lies in a list is as good as given back to the system. */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define FORBID(p, bytes) ASAN_POISON_MEMORY_REGION((p), (bytes))
#define ALLOW(p, bytes) ASAN_UNPOISON_MEMORY_REGION((p), (bytes))
#else
#define FORBID(p, bytes) ((void)(p), (void)(bytes))
#define ALLOW(p, bytes) ((void)(p), (void)(bytes))
#endif

/* Class 4k + q - 1 for q = 1..4 holds 64 * 2^k * (4 + q) / 4 bytes; class 0 (k = 0, q = 0) holds
 * 64. */
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
    int k = 63 - __builtin_clzll((bytes - 1) / 64);     /* 64 * 2^k < bytes <= 64 * 2^(k + 1) */
    size_t quarter = (size_t)16 << k;
    size_t q = (bytes - ((size_t)64 << k) + quarter - 1) / quarter;
    return 4 * k + (int)q;
}

static size_t trim(lt_ctx *ctx, lt_device *device)
{
    size_t freed = 0;
    for (int i = 0; i < LT_POOL_CLASSES; i++) {
        struct lt_free_list *list = &device->pool.list[i];
        for (; list->n > 0; list->total--) {
            void *p = list->blocks[--list->n];
            if (device->is_host)
                ALLOW(p, class_bytes(i));
            device->free(device, p, class_bytes(i));
            freed += class_bytes(i);
        }
    }
    ctx->memory.cached -= freed;
    return freed;
}

void lt__pool_close(lt_ctx *ctx, lt_device *device)
{
    trim(ctx, device);
    for (int i = 0; i < LT_POOL_CLASSES; i++)
        free(device->pool.list[i].blocks);
}

/* A block from the system, and room for it in its list. */
static void *fresh(lt_device *device, int i)
{
    struct lt_free_list *list = &device->pool.list[i];
    if (list->total == list->room) {
        size_t room = list->room ? 2 * list->room : 8;
        void **blocks = realloc(list->blocks, room * sizeof *blocks);
        if (!blocks)
            return NULL;
        list->blocks = blocks;
        list->room = room;
    }
    void *p = device->alloc(device, class_bytes(i));
    list->total += p != NULL;
    return p;
}

void *lt__device_alloc(lt_ctx *ctx, lt_device *device, size_t bytes)
{
    if (bytes > (size_t)1 << 46) {
        lt_fail(LT_ENOMEM, "a request for %zu bytes is more than any machine has", bytes);
        return NULL;
    }
    int i = class_of(bytes);
    size_t size = class_bytes(i);
    struct lt_free_list *list = &device->pool.list[i];
    void *p = NULL;
    pthread_mutex_lock(&ctx->lock);
    bool fault = ++ctx->memory.allocations == ctx->fail_at;
    if (!fault && list->n > 0) {
        p = list->blocks[--list->n];
        ctx->memory.cached -= size;
        if (device->is_host)
            ALLOW(p, size);
    } else if (!fault) {
        p = fresh(device, i);
        if (!p && trim(ctx, device) > 0)
            p = fresh(device, i);
    }
    lt_memory m = ctx->memory;
    if (p) {
        ctx->memory.live = m.live += size;
        if (m.live > m.peak)
            ctx->memory.peak = m.live;
    }
    pthread_mutex_unlock(&ctx->lock);
    if (!p)
        lt_fail(LT_ENOMEM, "out of memory on %s: %.1f MiB wanted, %.1f MiB in use%s", device->name,
                (double)bytes / 1048576, (double)m.live / 1048576,
                fault ? " (fault alloc)" : "; try a smaller batch");
    else if (ctx->config.poison && device->is_host)
        memset(p, 0xff, size);
    return p;
}

void lt__device_free(lt_ctx *ctx, lt_device *device, void *p, size_t bytes)
{
    if (!p)
        return;
    int i = class_of(bytes);
    struct lt_free_list *list = &device->pool.list[i];
    pthread_mutex_lock(&ctx->lock);
    list->blocks[list->n++] = p;
    if (device->is_host)
        FORBID(p, class_bytes(i));
    ctx->memory.live -= class_bytes(i);
    ctx->memory.cached += class_bytes(i);
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

lt_memory lt_memory_stats(const lt_ctx *ctx)
{
    lt_ctx *c = (lt_ctx *)ctx; /* the lock is the only thing written */
    pthread_mutex_lock(&c->lock);
    lt_memory m = c->memory;
    pthread_mutex_unlock(&c->lock);
    return m;
}

void lt_memory_trim(lt_ctx *ctx)
{
    pthread_mutex_lock(&ctx->lock);
    for (int i = 0; i < LT_MAX_DEVICES; i++)
        if (ctx->devices[i])
            trim(ctx, ctx->devices[i]);
    pthread_mutex_unlock(&ctx->lock);
}
