/* snapshots.h - copies of the server's values and buffers at the ends of epochs, to be evaluated
 * while training continues. Private to dist.
 */
#ifndef LT_DIST_ASYNC_SNAPSHOTS_H
#define LT_DIST_ASYNC_SNAPSHOTS_H

#include "dist/async/image.h"

typedef struct lt_snapshots { /* all zeros: no snapshots */
    struct lt_snapshot *first;
} lt_snapshots;

/* Plans a snapshot for the moment when all tickets below `ticket` are done, unless the list has it.
 * LT_ENOMEM. */
LT_NODISCARD lt_status lt__snapshots_plan(lt_snapshots *list, int64_t ticket);
/* Takes the planned snapshots whose moment has come: all tickets below `done` are done. LT_ENOMEM,
 * or the device's error. */
LT_NODISCARD lt_status lt__snapshots_take(lt_snapshots *list, const lt_image *from, int64_t done);
/* Writes the snapshot that was planned for `ticket` to a net. LT_EINVAL if it was not taken; or the
 * device's error. */
LT_NODISCARD lt_status lt__snapshots_read(const lt_snapshots *list, int64_t ticket,
                                          const lt_image *to);
/* Forgets the snapshot that was planned for `ticket`, if there is one. */
void lt__snapshots_forget(lt_snapshots *list, int64_t ticket);
/* For a checkpoint: the values of snapshot i of those that were taken, as bytes, and its ticket.
 * New. NULL past the last one, with *ticket = 0, or with LT_ENOMEM. */
lt_tensor *lt__snapshots_state(const lt_snapshots *list, lt_ctx *ctx, size_t bytes, int i,
                               int64_t *ticket);
/* Adds a saved snapshot. LT_ENOMEM, or the device's error. */
LT_NODISCARD lt_status lt__snapshots_restore(lt_snapshots *list, int64_t ticket, lt_tensor *values);
void lt__snapshots_free(lt_snapshots *list);

#endif
