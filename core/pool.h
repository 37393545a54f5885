/* pool.h - internals of a device's memory pool; private to core. */
#ifndef LT_CORE_POOL_H
#define LT_CORE_POOL_H

#include "core/tensor.h"

/* Returns all cached blocks to the system and frees the pool's own lists. */
void lt__pool_close(lt_ctx *ctx, lt_device *device);

/* Large blocks of whole pages. The caller holds ctx->lock. */
void *lt__large_block_alloc(lt_device *device, size_t bytes); /* NULL if out of memory */
void lt__large_block_free(lt_device *device, void *p, size_t bytes);
/* Gives unused regions back to the system. Returns their total size in bytes. */
size_t lt__large_block_trim(lt_device *device);

/* Tells AddressSanitizer that memory which is free in the pool must not be accessed. */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define LT_FORBID(p, bytes) ASAN_POISON_MEMORY_REGION((p), (bytes))
#define LT_ALLOW(p, bytes) ASAN_UNPOISON_MEMORY_REGION((p), (bytes))
#else
#define LT_FORBID(p, bytes) ((void)(p), (void)(bytes))
#define LT_ALLOW(p, bytes) ((void)(p), (void)(bytes))
#endif

lt_device *lt__cpu_device_new(int threads); /* new, freed by its close(); NULL if out of memory */

/* Starts the n - 1 threads that compute together with the calling thread. LT_ENOMEM if the system
 * cannot start that many. */
lt_status lt__start_threads(int n);

#endif
