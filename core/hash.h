/* hash.h - the FNV-1a hash by Fowler, Noll and Vo: http://www.isthe.com/chongo/tech/comp/fnv
 *
 * For hash tables, and for digests that detect accidental differences. Not cryptographic.
 */
#ifndef LT_CORE_HASH_H
#define LT_CORE_HASH_H

#include <stddef.h>
#include <stdint.h>

#define LT_FNV32_START 2166136261u
#define LT_FNV64_START 14695981039346656037u

/* Extends a hash by bytes of data. Start with LT_FNV32_START or LT_FNV64_START. */
static inline uint32_t lt__fnv32(uint32_t hash, const void *data, size_t bytes)
{
    const uint8_t *at = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * 16777619u;
    return hash;
}

static inline uint64_t lt__fnv64(uint64_t hash, const void *data, size_t bytes)
{
    const uint8_t *at = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * 1099511628211u;
    return hash;
}

#endif
