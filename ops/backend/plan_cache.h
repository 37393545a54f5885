/* plan_cache.h - a cache of plans, for the files that call oneDNN, cuBLASLt and cuDNN. A plan
 * contains what is prepared for one task, such as a oneDNN primitive or a cuDNN execution plan. Its
 * key describes the task. Not thread-safe: each context has its own caches.
 *
 * All functions are inline, because the CUDA plugin does not link to libluatrain.
 */
#ifndef LT_OPS_PLAN_CACHE_H
#define LT_OPS_PLAN_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LT_PLAN_BUCKETS = 256, LT_MAX_PLANS = 1024 };

/* The first member of a plan. */
typedef struct lt_plan {
    struct lt_plan *next; /* next plan of its bucket */
    const void *key;
} lt_plan;

typedef struct lt_plan_cache {
    size_t key_bytes; /* keys are 64-bit words only, so that equal keys have equal bytes */
    int n;
    lt_plan *bucket[LT_PLAN_BUCKETS];
} lt_plan_cache;

static inline size_t lt__plan_bucket(const lt_plan_cache *cache, const void *key)
{
    uint64_t hash = 0, word;
    for (size_t i = 0; i < cache->key_bytes; i += sizeof word) {
        memcpy(&word, (const char *)key + i, sizeof word);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15;
        hash ^= hash >> 32;
    }
    return hash % LT_PLAN_BUCKETS;
}

/* The plan of the key, or NULL. Borrowed until lt__plan_pop(). */
static inline lt_plan *lt__plan_find(const lt_plan_cache *cache, const void *key)
{
    lt_plan *plan = cache->bucket[lt__plan_bucket(cache, key)];
    while (plan && memcmp(plan->key, key, cache->key_bytes) != 0)
        plan = plan->next;
    return plan;
}

/* Whether the cache is full. The caller must then remove all plans before it adds one. A full cache
 * means that sizes keep changing, so starting over is better than growing. */
static inline bool lt__plan_cache_is_full(const lt_plan_cache *cache)
{
    return cache->n == LT_MAX_PLANS;
}

/* Adds a plan (taken until lt__plan_pop()) for a key that is not in the cache. key must point into
 * the plan. */
static inline void lt__plan_add(lt_plan_cache *cache, lt_plan *plan, const void *key)
{
    lt_plan **bucket = &cache->bucket[lt__plan_bucket(cache, key)];
    plan->key = key;
    plan->next = *bucket;
    *bucket = plan;
    cache->n++;
}

/* Removes a plan and returns it, for the caller to free; NULL if the cache is empty. */
static inline lt_plan *lt__plan_pop(lt_plan_cache *cache)
{
    int i = 0;
    while (i < LT_PLAN_BUCKETS - 1 && !cache->bucket[i])
        i++;
    lt_plan *plan = cache->bucket[i];
    if (plan) {
        cache->bucket[i] = plan->next;
        cache->n--;
    }
    return plan;
}

#endif
