/* test_plan_cache.c - the cache of plans finds a plan by its whole key, and gives each back. */
#include "ops/backend/plan_cache.h"
#include "tests/lt_test.h"

enum { WORDS = 3 };

typedef struct plan {
    lt_plan cached;
    int64_t key[WORDS];
    int taken;
} plan;

/* Keys that differ in a single word, and there in one bit or in all of them. */
static void make_key(int i, int64_t key[WORDS])
{
    memset(key, 0, WORDS * sizeof *key);
    key[i % WORDS] = i % 2 ? i : -i - 1;
}

TEST(plans_are_found_by_their_keys)
{
    static plan plans[LT_MAX_PLANS]; /* as many as fit, more than there are buckets */
    lt_plan_cache cache = {.key_bytes = sizeof plans->key};
    CHECK(!lt__plan_pop(&cache));
    for (int i = 0; i < LT_MAX_PLANS; i++) {
        CHECK(!lt__plan_cache_is_full(&cache));
        make_key(i, plans[i].key);
        CHECK(!lt__plan_find(&cache, plans[i].key));
        lt__plan_add(&cache, &plans[i].cached, plans[i].key);
    }
    CHECK(lt__plan_cache_is_full(&cache));
    for (int i = 0; i < LT_MAX_PLANS; i++) {
        int64_t key[WORDS];
        make_key(i, key);
        CHECK(lt__plan_find(&cache, key) == &plans[i].cached);
    }
    for (lt_plan *p; (p = lt__plan_pop(&cache));) {
        CHECK_EQ(((plan *)p)->taken++, 0);
        CHECK(!lt__plan_find(&cache, ((plan *)p)->key));
    }
    for (int i = 0; i < LT_MAX_PLANS; i++)
        CHECK_EQ(plans[i].taken, 1);
    CHECK(!lt__plan_cache_is_full(&cache));
}
