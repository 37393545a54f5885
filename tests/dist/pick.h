/* pick.h - random numbers for tests. Include it in one file of a test. */
#ifndef LT_TESTS_DIST_PICK_H
#define LT_TESTS_DIST_PICK_H

#include <stdint.h>

static uint64_t seed = 1;

static inline int64_t pick(int64_t n) /* from 0 to n - 1 */
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((seed >> 33) % (uint64_t)n);
}

#endif
