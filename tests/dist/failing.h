/* failing.h - lets one allocation fail. CMakeLists.txt lists the tests that use it. Include it in
 * the only source file of a test program.
 */
#ifndef LT_TEST_DIST_FAILING_H
#define LT_TEST_DIST_FAILING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

/* The linker replaces calls of malloc() by __wrap_malloc(), and __real_malloc() by malloc(). */
void *__real_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__real_realloc(void *p, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);

static atomic_int left;     /* allocations up to the one that fails; 0 or less: none fails */
static atomic_bool reached; /* it has failed */

static bool fails(void)
{
    if (atomic_load(&left) <= 0 || atomic_fetch_sub(&left, 1) != 1)
        return false;
    return atomic_exchange(&reached, true) == false;
}

void *__wrap_malloc(size_t bytes) { return fails() ? NULL : __real_malloc(bytes); }
void *__wrap_calloc(size_t n, size_t bytes) { return fails() ? NULL : __real_calloc(n, bytes); }
void *__wrap_realloc(void *p, size_t bytes) { return fails() ? NULL : __real_realloc(p, bytes); }
void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    return fails() ? NULL : __real_aligned_alloc(alignment, bytes);
}

/* The n-th allocation from now on fails. */
static inline void fail_at(int n)
{
    reached = false;
    left = n;
}

/* Ends this. Returns whether the allocation was reached. */
static inline bool end_failing(void)
{
    left = 0;
    return reached;
}

#endif
