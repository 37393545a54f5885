/* plan_file.h - a file of choices that were made for a device, so that the next run need not make
 * them again: keys and values, both texts without tabs and newlines, under one stamp. */
#ifndef LT_OPS_CUDA_PLAN_FILE_H
#define LT_OPS_CUDA_PLAN_FILE_H

#include <stdbool.h>
#include <stddef.h>

typedef struct lt_plan_file lt_plan_file;

/* What the file at path holds. stamp says what its choices depend on: versions and device. A file
 * that is damaged, or has another stamp, is as good as none, and note (say 512 bytes) says so, or
 * that it cannot be replaced; else note is "". New. NULL: out of memory. */
lt_plan_file *lt__plan_file_read(const char *path, const char *stamp, char *note, size_t bytes);
/* The value; NULL: there is none. Borrowed until the next put. */
const char *lt__plan_file_find(const lt_plan_file *plans, const char *key);
/* Sets a value, over another one of that key. False: out of memory. */
bool lt__plan_file_put(lt_plan_file *plans, const char *key, const char *value);
/* Replaces the file in one step if anything was put since it was read, so that a reader sees the
 * old one or the new one. Its folder must be there. False with a note when it cannot. */
bool lt__plan_file_write(lt_plan_file *plans, char *note, size_t bytes);
void lt__plan_file_free(lt_plan_file *plans); /* does not write. NULL is fine */

#endif
