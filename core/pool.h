/* pool.h - the inside of a device's pool; private to core. */
#ifndef LT_CORE_POOL_H
#define LT_CORE_POOL_H

#include "core/tensor.h"

/* Returns every cached block and the pool's own lists to the system. */
void lt__pool_close(lt_ctx *ctx, lt_device *device);

/* Large blocks of whole pages; the caller has the lock. */
void *lt__large_block_alloc(lt_device *device, size_t bytes); /* NULL when the system has no more */
void lt__large_block_free(lt_device *device, void *p, size_t bytes);
/* Gives regions back that are free as a whole. Returns how many bytes that was. */
size_t lt__large_block_trim(lt_device *device);

/* For AddressSanitizer memory that is free in the pool is as good as given back to the system. */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define LT_FORBID(p, bytes) ASAN_POISON_MEMORY_REGION((p), (bytes))
#define LT_ALLOW(p, bytes) ASAN_UNPOISON_MEMORY_REGION((p), (bytes))
#else
#define LT_FORBID(p, bytes) ((void)(p), (void)(bytes))
#define LT_ALLOW(p, bytes) ((void)(p), (void)(bytes))
#endif

lt_device *
lt__cpu_device_new(int threads); /* new; close() gives it back. NULL when out of memory */

/* Starts the n - 1 threads that will compute together with this one. LT_ENOMEM: the system has no
 * room for that many. */
lt_status lt__start_threads(int n);

#endif
