/* tree_sum.h - the sum of shards that come one after the other. Private to this room.
 *
 * Its order is a balanced tree, as in sum.h: what has a sibling is added to it, and what has none
 * waits on its level. So where 2^k ranks add up 2^m shards each and then sum over the ranks, the
 * bits are the same for every k of one k + m.
 */
#ifndef LT_DIST_TREE_SUM_H
#define LT_DIST_TREE_SUM_H

#include "core/core.h"

enum { LT_TREE_SUM_LEVELS = 8 }; /* for up to 256 shards */

typedef struct lt_tree_sum { /* zero: nothing has come */
    void *level[LT_TREE_SUM_LEVELS];
    size_t bytes;        /* of each */
} lt_tree_sum;

/* Whether n ranks can share `shards` shards, whose gradients travel as wire: LT_EUSAGE. */
LT_MUST lt_status lt__tree_sum_check(int shards, int n, lt_dtype wire);
/* Number `shard` of `shards`, a power of two: scale * data[0..count) goes into the tree sum. After
 * the last one data is the sum. Data may become longer, by what counts as zeros before. LT_ENOMEM.
 * */
LT_MUST lt_status lt__tree_sum_add(lt_tree_sum *sum, int shard, int shards, void *data,
                                   int64_t count, lt_dtype dtype, double scale);
void lt__tree_sum_free(lt_tree_sum *sum);

#endif
