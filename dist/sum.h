/* sum.h - element-wise sums over arrays of several ranks. Private to dist.
 *
 * The arrays are added in the order of a balanced tree over the ranks, ((0 + 1) + (2 + 3)) + ...,
 * where the left subtree of n ranks has the largest power of two below n. The result has the same
 * bits whichever rank computes it. A rank that has the sum of a whole subtree of shards contributes
 * the same bits as that many ranks with one shard each.
 */
#ifndef LT_DIST_SUM_H
#define LT_DIST_SUM_H

#include "core/core.h"

typedef struct lt_summand { /* the array of one rank, borrowed, and its factor */
    void *data;
    double scale;
} lt_summand;

enum { LT_MAX_SUMMANDS = 256 }; /* in one sum: the maximum number of ranks on a node */

/* Whether sums of this dtype are supported. */
bool lt__sum_supports(lt_dtype dtype);
/* Sets elements [first, first + count) of all n shares to the sum of scale * data over the shares.
 * Elements are scaled in f32 (f64 in f64; i64 is not scaled), rounded to wire if dtype is f32, and
 * added in f32 (f64, i64). The sum is rounded in the same way. */
void lt__sum_arrays(const lt_summand *share, int n, lt_dtype dtype, lt_dtype wire, int64_t first,
                    int64_t count);
/* to[0..count) += from[0..count). `to` has dtype `dtype`, `from` has dtype `wire`. If wire is f16
 * or bf16 and dtype f32, the values of `to` must already be rounded to wire, and so is the sum. */
void lt__sum_add(void *to, lt_dtype dtype, const void *from, lt_dtype wire, int64_t count);

#endif
