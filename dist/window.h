/* window.h - memory of one process that the others of its node can map. Private to this room.
 *
 * A window is a memfd, which others open as /proc/PID/fd/N: no file anywhere, nothing to be cleaned
 * up, no limit but the memory itself. A place, one word, names a byte of a window to other
 * processes; they map the window when they first meet its name, and keep it mapped. It is
 * memory as long as anyone has it mapped.
 */
#ifndef LT_DIST_WINDOW_H
#define LT_DIST_WINDOW_H

#include "core/core.h"

typedef struct lt_windows lt_windows; /* those of this process, and its views of those of others */

lt_windows *lt__windows_new(void);    /* new; NULL with LT_ENOMEM */
/* Views are unmapped; windows live until they are freed. NULL is fine. */
void lt__windows_free(lt_windows *windows);

/* Memory of zeros from the start of a page on. New. NULL with LT_ENOMEM. Safe in any thread, as
 * giving it back is, which may be later than windows was freed. */
void *lt__window_new(lt_windows *windows, size_t bytes);
void lt__window_free(lt_windows *windows, void *data);

/* The name of a byte for other processes; 0 if it lies in no window. Safe in any thread. */
uint64_t lt__window_place(lt_windows *windows, const void *data);
/* Where this process has what process pid calls so. NULL with LT_EENV when it cannot be mapped.
 * Safe in any thread. */
void *lt__window_find(lt_windows *windows, int pid, uint64_t place);

#endif
