/* alloc.h - memory of the system, which is released with free(). Included by context.h. Memory of a
 * context is in device.h.
 *
 * On failure, these functions set the message "out of memory WHAT". what: the text after "out of
 * memory ", such as "for a reducer", and its arguments as for printf(). A count of 0 is allowed.
 */
#ifndef LT_CORE_ALLOC_H
#define LT_CORE_ALLOC_H

#include "core/core.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LT_MIN(a, b) ((a) < (b) ? (a) : (b))
#define LT_MAX(a, b) ((a) > (b) ? (a) : (b))

/* Allocates n elements of `size` bytes, all zero. New. NULL with LT_ENOMEM. */
void *lt__calloc(size_t n, size_t size, const char *what, ...) LT_PRINTF(3, 4);
/* Resizes *list, a pointer to an array or to NULL, to n elements, and keeps the contents. New
 * elements have any value. After a failure with LT_ENOMEM, *list is as before. */
LT_NODISCARD lt_status lt__resize(void *list, size_t n, size_t size, const char *what, ...)
    LT_PRINTF(4, 5);
/* Makes room for n elements in *list, which has room for *capacity, in the same way. It grows to
 * twice its size at least. */
LT_NODISCARD lt_status lt__reserve(void *list, size_t n, size_t *capacity, size_t size,
                                   const char *what, ...) LT_PRINTF(5, 6);

/* The same for `list`, a variable of the array's type. Each returns an lt_status. */
#define LT_CALLOC(list, n, ...)                                                                    \
    (((list) = lt__calloc((size_t)(n), sizeof *(list), __VA_ARGS__)) ? LT_OK : LT_ENOMEM)
#define LT_RESIZE(list, n, ...) lt__resize(&(list), (size_t)(n), sizeof *(list), __VA_ARGS__)
#define LT_RESERVE(list, n, capacity, ...)                                                         \
    lt__reserve(&(list), (size_t)(n), (capacity), sizeof *(list), __VA_ARGS__)

#ifdef __cplusplus
}
#endif
#endif
