/* coll_sig.h - the signature of a collective, which must be equal on all ranks. Private to dist. */
#ifndef LT_DIST_COLL_SIG_H
#define LT_DIST_COLL_SIG_H

#include "dist/dist.h"

enum { LT_WHAT_BYTES = 48 };
enum { LT_SEEN_BYTES = 128 }; /* size of a text like "; it was last seen at train.lua:31, step 7" */

typedef enum lt_coll_kind { LT_COLL_ALLREDUCE, LT_COLL_BROADCAST, LT_COLL_BARRIER } lt_coll_kind;

typedef struct lt_coll_sig { /* sent between processes as raw bytes */
    lt_coll_kind kind;
    int root; /* root rank of a broadcast */
    lt_dtype dtype, wire;
    int64_t count;            /* elements of a sum; bytes of a broadcast */
    char what[LT_WHAT_BYTES]; /* name for messages, such as "bucket 3"; truncated if too long */
} lt_coll_sig;

lt_coll_sig lt__coll_sig(lt_coll_kind kind, const char *what, int64_t count);
lt_coll_sig lt__coll_sig_of_sum(const lt_sum *sum);
bool lt__coll_sigs_match(const lt_coll_sig *a, const lt_coll_sig *b);
/* Fails with LT_EDESYNC and a message about two ranks whose signatures differ, lower rank first. */
lt_status lt__coll_sigs_fail(const lt_coll_sig *a, int rank_a, const lt_coll_sig *b, int rank_b);

#endif
