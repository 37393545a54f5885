/* tree_sum.h - the sum of shards that are added one after the other. Private to dist.
 *
 * The order is a balanced tree, as in sum.h. A partial sum whose sibling exists is added to it;
 * otherwise it is stored at its level of the tree until the sibling arrives. If 2^k ranks sum 2^m
 * shards each and then sum over the ranks, the result depends only on k + m, bit for bit.
 */
#ifndef LT_DIST_TREE_SUM_H
#define LT_DIST_TREE_SUM_H

#include "core/core.h"

enum { LT_TREE_SUM_LEVELS = 8 }; /* enough for 256 shards */

typedef struct lt_tree_sum { /* all zeros: nothing added yet */
    char *level[LT_TREE_SUM_LEVELS];
    size_t bytes; /* size of each level */
} lt_tree_sum;

/* 0 shards are always valid. Any other number must be a power of two up to 256 and a multiple of
 * the number of ranks n, and wire must be f32; LT_EUSAGE otherwise. */
LT_NODISCARD lt_status lt__tree_sum_check(int shards, int n, lt_dtype wire);
/* Adds scale * data[0..count) to the tree sum, as shard number `shard`, from 0, of `shards`, which
 * is a power of two. data is overwritten; after the last shard it contains the sum. A later shard
 * may have more elements; earlier shards then count as zero there. LT_ENOMEM. */
LT_NODISCARD lt_status lt__tree_sum_add(lt_tree_sum *sum, int shard, int shards, void *data,
                                        int64_t count, lt_dtype dtype, double scale);
void lt__tree_sum_free(lt_tree_sum *sum);

#endif
