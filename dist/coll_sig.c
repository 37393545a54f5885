/* coll_sig.c - compares and describes signatures of collectives; see coll_sig.h. */
#include <stdio.h>
#include <string.h>

#include "dist/coll_sig.h"

lt_coll_sig lt__coll_sig(lt_coll_kind kind, const char *what, int64_t count)
{
    lt_coll_sig w = {.kind = kind, .count = count};
    snprintf(w.what, sizeof w.what, "%s", what);
    return w;
}

lt_coll_sig lt__coll_sig_of_sum(const lt_sum *sum)
{
    lt_coll_sig w = lt__coll_sig(LT_COLL_ALLREDUCE, sum->what, sum->count);
    w.dtype = sum->dtype;
    w.wire = sum->wire;
    return w;
}

bool lt__coll_sigs_match(const lt_coll_sig *a, const lt_coll_sig *b)
{
    return a->kind == b->kind && a->root == b->root && a->dtype == b->dtype && a->wire == b->wire &&
           a->count == b->count && strcmp(a->what, b->what) == 0;
}

static const char *describe(const lt_coll_sig *w, char *text, size_t bytes)
{
    char wire[32] = "";
    if (w->kind == LT_COLL_ALLREDUCE && w->wire != w->dtype)
        snprintf(wire, sizeof wire, " as %s", lt_dtype_name(w->wire));
    if (w->kind == LT_COLL_ALLREDUCE)
        snprintf(text, bytes, "the allreduce of %s (%lld %s%s)", w->what, (long long)w->count,
                 lt_dtype_name(w->dtype), wire);
    else if (w->kind == LT_COLL_BROADCAST)
        snprintf(text, bytes, "a broadcast of %s (%lld bytes from rank %d)", w->what,
                 (long long)w->count, w->root);
    else
        snprintf(text, bytes, "the barrier for %s", w->what);
    return text;
}

lt_status lt__coll_sigs_fail(const lt_coll_sig *a, int rank_a, const lt_coll_sig *b, int rank_b)
{
    char first[160], other[160];
    if (rank_a > rank_b)
        return lt__coll_sigs_fail(b, rank_b, a, rank_a);
    return lt_fail(LT_EDESYNC, "the ranks disagree: rank %d is in %s, rank %d in %s", rank_a,
                   describe(a, first, sizeof first), rank_b, describe(b, other, sizeof other));
}
