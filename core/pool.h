/* pool.h - memory of a device through its pool; private to core. lt__alloc() of tensor.h is this
 * for the CPU. */
#ifndef LT_CORE_POOL_H
#define LT_CORE_POOL_H

#include "core/tensor.h"

void *lt__device_alloc(lt_ctx *ctx, lt_device *device, size_t bytes);
void lt__device_free(lt_ctx *ctx, lt_device *device, void *p, size_t bytes);
/* Returns every cached block and the pool's own lists to the system. */
void lt__pool_close(lt_ctx *ctx, lt_device *device);

lt_device *
lt__cpu_device_new(int threads); /* new; close() gives it back. NULL when out of memory */

#endif
