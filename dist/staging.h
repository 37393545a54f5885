/* staging.h - buckets of an accelerator, brought over to the CPU to be summed there, and back.
 * Private to this room.
 *
 * A bucket comes over when it is complete, while the accelerator goes on, into memory that nobody
 * else uses; it goes back while the next one is summed.
 */
#ifndef LT_DIST_STAGING_H
#define LT_DIST_STAGING_H

#include "core/tensor.h"
#include "dist/bucket_plan.h"

typedef struct lt_staging { /* zero, but for the device */
    lt_device *device;
    struct lt_stage {
        void *at;
        size_t room;
        uint64_t mark;      /* behind what went back from it; 0: nothing is on its way */
    } stage[2];             /* used in turn */
    int turn;
    uint64_t last;          /* mark behind all that went back; 0: it was followed */
} lt_staging;

/* *at = memory of the CPU that device can copy to, of `bytes` at least, if *room is less; what was
 * in it is gone. LT_ENOMEM; what the device has failed with before. */
LT_MUST lt_status lt__staging_grow(lt_device *device, void **at, size_t *room, size_t bytes);

/* On the rank's thread, while nothing comes or goes: room for all buckets of a plan, and as much
 * behind each as a tail may take. LT_ENOMEM. */
LT_MUST lt_status lt__staging_make_room(lt_staging *s, const lt_bucket_plan *plan);
/* On the group's thread: *at = a copy of so many bytes as they are behind a mark. Borrowed until
 * they are sent back. */
LT_MUST lt_status lt__staging_fetch(lt_staging *s, const void *from, size_t bytes, uint64_t after,
                                    void **at);
/* What was fetched last goes back. */
LT_MUST lt_status lt__staging_send(lt_staging *s, void *to, size_t bytes, uint64_t after);
/* On the rank's thread: all that went back is there for what comes into the stream from now on. */
LT_MUST lt_status lt__staging_stream_wait(lt_staging *s);
/* While nothing comes or goes but what was sent. */
void lt__staging_free(lt_staging *s);

#endif
