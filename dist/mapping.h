/* mapping.h - memory of one process that other processes of its node can map. Private to dist.
 *
 * A mapping is a memfd, which other processes open as /proc/PID/fd/N. It has no name in a file
 * system and needs no cleanup, and its size is limited only by the memory available. A handle is a
 * 64-bit word by which other processes find one byte of a mapping. A process maps the whole memfd
 * when it first uses such a handle, and keeps this view. The memory exists as long as any process
 * has it mapped.
 */
#ifndef LT_DIST_MAPPING_H
#define LT_DIST_MAPPING_H

#include "core/core.h"

/* The mappings that this process has made, and its views of mappings of other processes. */
typedef struct lt_mappings lt_mappings;

lt_mappings *lt__mappings_new(void); /* new; NULL with LT_ENOMEM */
/* Unmaps all views. The process's own mappings live until each is freed. NULL is allowed. */
void lt__mappings_free(lt_mappings *mappings);

/* Makes a mapping of `bytes` > 0 bytes: zeroed, page-aligned memory. New. NULL with LT_ENOMEM.
 * Thread-safe. */
void *lt__mapping_new(lt_mappings *mappings, size_t bytes);
/* Frees a mapping that this process has made, even after lt__mappings_free(). Thread-safe. */
void lt__mapping_free(lt_mappings *mappings, void *data);

/* The handle of a byte, or 0 if it is in no mapping of this process. Thread-safe. */
uint64_t lt__mapping_handle(lt_mappings *mappings, const void *data);
/* The address in this process of the byte with handle `place`, a handle made by process pid.
 * Borrowed until that process frees the mapping. NULL with LT_EENV if it cannot be mapped.
 * Thread-safe. */
void *lt__mapping_find(lt_mappings *mappings, int pid, uint64_t place);

#endif
