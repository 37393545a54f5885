/* sum.h - sums over the same elements of several ranks. Private to this room.
 *
 * The order is a balanced tree over the ranks, ((0 + 1) + (2 + 3)) + ..., whoever adds up: the left
 * half of n ranks is the largest power of two below n. So all ranks get the same bits, and a rank
 * that holds a whole subtree of shards gives what its parts would have given.
 */
#ifndef LT_DIST_SUM_H
#define LT_DIST_SUM_H

#include "core/core.h"

typedef struct lt_share { /* of one rank */
    void *data;
    double scale;
} lt_share;

enum { LT_MAX_SHARES = 256 };

/* Whether there are sums of the dtype. */
bool lt__sum_knows(lt_dtype dtype);
/* Elements [first, first + count) of all n shares become the sum of scale * data over the shares.
 * Each is scaled in f32 (f64 in f64; i64 is not scaled), rounded to wire if dtype is f32, and
 * added in f32 (f64, i64). The sum is rounded like what it was made of. */
void lt__sum_shares(const lt_share *share, int n, lt_dtype dtype, lt_dtype wire, int64_t first,
                    int64_t count);
/* to += from, which has travelled as wire; to is what the wire can hold, and is so afterwards. */
void lt__sum_add(void *to, lt_dtype dtype, const void *from, lt_dtype wire, int64_t count);

#endif
