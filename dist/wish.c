/* wish.c - wishes, compared and in words; see wish.h. */
#include <stdio.h>
#include <string.h>

#include "dist/wish.h"

lt_wish lt__wish(lt_wish_kind kind, const char *what, int64_t count)
{
    lt_wish w = {.kind = kind, .count = count};
    snprintf(w.what, sizeof w.what, "%s", what);
    return w;
}

lt_wish lt__wish_of_sum(const lt_sum *sum)
{
    lt_wish w = lt__wish(LT_SUM, sum->what, sum->count);
    w.dtype = sum->dtype;
    w.wire = sum->wire;
    return w;
}

bool lt__wishes_agree(const lt_wish *a, const lt_wish *b)
{
    return a->kind == b->kind && a->root == b->root && a->dtype == b->dtype &&
           a->wire == b->wire && a->count == b->count && strcmp(a->what, b->what) == 0;
}

static const char *describe(const lt_wish *w, char *text, size_t bytes)
{
    char wire[32] = "";
    if (w->kind == LT_SUM && w->wire != w->dtype)
        snprintf(wire, sizeof wire, " as %s", lt_dtype_name(w->wire));
    if (w->kind == LT_SUM)
        snprintf(text, bytes, "the sum of %s (%lld %s%s)", w->what, (long long)w->count,
                 lt_dtype_name(w->dtype), wire);
    else if (w->kind == LT_BROADCAST)
        snprintf(text, bytes, "a broadcast of %s (%lld bytes from rank %d)", w->what,
                 (long long)w->count, w->root);
    else
        snprintf(text, bytes, "a barrier, %s", w->what);
    return text;
}

lt_status lt__wishes_differ(const lt_wish *a, int rank_a, const lt_wish *b, int rank_b)
{
    char first[160], other[160];
    if (rank_a > rank_b)
        return lt__wishes_differ(b, rank_b, a, rank_a);
    return lt_fail(LT_EDESYNC, "the ranks disagree: rank %d wants %s, rank %d %s", rank_a,
                   describe(a, first, sizeof first), rank_b, describe(b, other, sizeof other));
}
