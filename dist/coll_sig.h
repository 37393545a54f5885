/* coll_sig.h - what a rank wants of the others in a collective. All must want the same. Private to
 * this room.
 */
#ifndef LT_DIST_COLL_SIG_H
#define LT_DIST_COLL_SIG_H

#include "dist/dist.h"

enum { LT_WHAT_BYTES = 48 };
enum { LT_SEEN_BYTES = 128 }; /* for "; it was last seen at train.lua:31, step 7" */

typedef enum lt_coll_kind {
    LT_COLL_NONE,
    LT_COLL_ALLREDUCE,
    LT_COLL_BROADCAST,
    LT_COLL_BARRIER
} lt_coll_kind;

typedef struct lt_coll_sig { /* travels between processes as it is */
    lt_coll_kind kind;
    int root;            /* of a broadcast */
    lt_dtype dtype, wire;
    int64_t count;       /* elements of a sum; bytes of a broadcast */
    char what[LT_WHAT_BYTES];
} lt_coll_sig;

lt_coll_sig lt__coll_sig(lt_coll_kind kind, const char *what, int64_t count);
lt_coll_sig lt__coll_sig_of_sum(const lt_sum *sum);
bool lt__coll_sigs_match(const lt_coll_sig *a, const lt_coll_sig *b);
/* Sets the sentence about two ranks that do not agree, the smaller rank first. LT_EDESYNC. */
lt_status lt__coll_sigs_fail(const lt_coll_sig *a, int rank_a, const lt_coll_sig *b, int rank_b);

#endif
