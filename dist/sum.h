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

enum { LT_MAX_SUMMANDS = 256 }; /* the maximum number of ranks on a node */

/* Whether sums of this dtype are supported. */
bool lt__sum_supports(lt_dtype dtype);
/* Sets elements [first, first + count) of all n arrays to the sum of scale * data over the arrays.
 * f64 and i64 are added in their own dtype, all others in f32. Elements are scaled in that dtype,
 * except i64, which is not scaled. If dtype is f32, the scaled elements and the sum are rounded to
 * wire. */
void lt__sum_arrays(const lt_summand *share, int n, lt_dtype dtype, lt_dtype wire, int64_t first,
                    int64_t count);
/* to[0..count) += from[0..count). `to` has dtype `dtype`, `from` has dtype `wire`. If wire is f16
 * or bf16 and dtype is f32, the values of `to` must already be rounded to wire, and the sum is
 * rounded to wire as well. */
void lt__sum_add(void *to, lt_dtype dtype, const void *from, lt_dtype wire, int64_t count);

#endif
