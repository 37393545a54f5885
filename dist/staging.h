/* staging.h - copies the buckets of an accelerator to the CPU, where they are summed, and back.
 * Private to dist.
 *
 * A bucket is downloaded when it is complete, while the accelerator continues to compute. It is
 * uploaded while the next bucket is summed, so there are two buffers.
 */
#ifndef LT_DIST_STAGING_H
#define LT_DIST_STAGING_H

#include "core/tensor.h"
#include "dist/bucket_plan.h"

typedef struct lt_staging { /* initially all zeros, except the device */
    lt_device *device;
    struct lt_stage {
        void *at; /* (capacity) bytes of pinned CPU memory */
        size_t capacity;
        uint64_t mark; /* mark of the upload from it; 0 if no upload is pending */
    } stage[2];        /* two buffers, used in turn */
    int turn;
    uint64_t last; /* mark of the last upload; 0 if the stream already waits for it */
} lt_staging;

/* If *capacity is less than `bytes`, replaces *at with `bytes` bytes of pinned CPU memory, and
 * sets *capacity. The contents are lost. LT_ENOMEM, or an earlier failure of the device. */
LT_NODISCARD lt_status lt__staging_grow(lt_device *device, void **at, size_t *capacity,
                                        size_t bytes);

/* Allocates buffers for the largest bucket of a plan and its tail. On the rank's thread, while no
 * exchange runs. Returns the same errors as lt__staging_grow(). */
LT_NODISCARD lt_status lt__staging_reserve(lt_staging *s, const lt_bucket_plan *plan);
/* Waits for the mark `after` and downloads a bucket to *at, borrowed until lt__staging_send().
 * Blocks. Fails only if the device does. On the group's thread, like lt__staging_send(). */
LT_NODISCARD lt_status lt__staging_fetch(lt_staging *s, const void *from, size_t bytes,
                                         uint64_t after, void **at);
/* Starts to upload the bucket that was fetched last, after the mark `after`. */
LT_NODISCARD lt_status lt__staging_send(lt_staging *s, void *to, size_t bytes, uint64_t after);
/* Makes the device's stream wait for all uploads. On the rank's thread. */
LT_NODISCARD lt_status lt__staging_stream_wait(lt_staging *s);
/* Not while an exchange runs; uploads may be pending. */
void lt__staging_free(lt_staging *s);

#endif
