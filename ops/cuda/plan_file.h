/* plan_file.h - a file that stores choices made for a device, so that the next run can reuse them.
 * It contains a stamp, and keys and values, which are strings without tabs or newlines. */
#ifndef LT_OPS_CUDA_PLAN_FILE_H
#define LT_OPS_CUDA_PLAN_FILE_H

#include <stdbool.h>
#include <stddef.h>

typedef struct lt_plan_file lt_plan_file;

/* Reads the file at path. The stamp names what the choices depend on: versions and device. A file
 * that is missing or damaged, or that has another stamp, counts as empty. note (512 bytes are
 * enough) receives a warning if an existing file is not used or if the file cannot be replaced;
 * otherwise "". Returns a new object, or NULL if out of memory. */
lt_plan_file *lt__plan_file_read(const char *path, const char *stamp, char *note, size_t bytes);
/* Returns the value of a key, or NULL if the file does not have it. Borrowed until the next put. */
const char *lt__plan_file_find(const lt_plan_file *plans, const char *key);
/* Sets the value of a key, replacing an earlier one. Both are copied. Returns false if out of
 * memory. */
bool lt__plan_file_put(lt_plan_file *plans, const char *key, const char *value);
/* Replaces the file atomically if a value was put since it was read. The file's folder must exist.
 * Returns false with a note on failure. */
bool lt__plan_file_write(lt_plan_file *plans, char *note, size_t bytes);
/* Frees the plans without writing the file. NULL is allowed. */
void lt__plan_file_free(lt_plan_file *plans);

#endif
