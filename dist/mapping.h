/* mapping.h - memory of one process that the others of its node can map. Private to this room.
 *
 * A window is a memfd, which others open as /proc/PID/fd/N: no file anywhere, nothing to be cleaned
 * up, no limit but the memory itself. A place, one word, names a byte of a window to other
 * processes; they map the window when they first meet its name, and keep it mapped. It is
 * memory as long as anyone has it mapped.
 */
#ifndef LT_DIST_MAPPING_H
#define LT_DIST_MAPPING_H

#include "core/core.h"

typedef struct lt_mappings
    lt_mappings; /* those of this process, and its views of those of others */

lt_mappings *lt__mappings_new(void);    /* new; NULL with LT_ENOMEM */
/* Views are unmapped; windows live until they are freed. NULL is fine. */
void lt__mappings_free(lt_mappings *mappings);

/* Memory of zeros from the start of a page on. New. NULL with LT_ENOMEM. Safe in any thread, as
 * giving it back is, which may be later than windows was freed. */
void *lt__mapping_new(lt_mappings *mappings, size_t bytes);
void lt__mapping_free(lt_mappings *mappings, void *data);

/* The name of a byte for other processes; 0 if it lies in no window. Safe in any thread. */
uint64_t lt__mapping_handle(lt_mappings *mappings, const void *data);
/* Where this process has what process pid calls so. NULL with LT_EENV when it cannot be mapped.
 * Safe in any thread. */
void *lt__mapping_find(lt_mappings *mappings, int pid, uint64_t place);

#endif
