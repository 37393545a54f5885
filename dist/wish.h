/* wish.h - what a rank wants of the others in a collective. All must want the same. Private to this
 * room.
 */
#ifndef LT_DIST_WISH_H
#define LT_DIST_WISH_H

#include "dist/dist.h"

enum { LT_WHAT_BYTES = 48 };
enum { LT_SEEN_BYTES = 128 }; /* for "; it was last seen at train.lua:31, step 7" */

typedef enum lt_wish_kind { LT_NOTHING, LT_SUM, LT_BROADCAST, LT_BARRIER } lt_wish_kind;

typedef struct lt_wish { /* travels between processes as it is */
    lt_wish_kind kind;
    int root;            /* of a broadcast */
    lt_dtype dtype, wire;
    int64_t count;       /* elements of a sum; bytes of a broadcast */
    char what[LT_WHAT_BYTES];
} lt_wish;

lt_wish lt__wish(lt_wish_kind kind, const char *what, int64_t count);
lt_wish lt__wish_of_sum(const lt_sum *sum);
bool lt__wishes_agree(const lt_wish *a, const lt_wish *b);
/* Sets the sentence about two ranks that do not agree, the smaller rank first. LT_EDESYNC. */
lt_status lt__wishes_differ(const lt_wish *a, int rank_a, const lt_wish *b, int rank_b);

#endif
