/* snapshots.c - copies of the server's values at the ends of epochs; see snapshots.h. */
#include <stdlib.h>

#include "dist/async/snapshots.h"

typedef struct lt_snapshot {
    struct lt_snapshot *next;
    int64_t ticket; /* taken when all below it are done */
    char *data;     /* NULL before that moment */
} snapshot;

lt_status lt__snapshots_plan(lt_snapshots *list, int64_t ticket)
{
    snapshot *s = calloc(1, sizeof *s);
    if (!s)
        return lt_fail(LT_ENOMEM, "out of memory for the weights of an epoch");
    *s = (snapshot){.next = list->first, .ticket = ticket};
    list->first = s;
    return LT_OK;
}

lt_status lt__snapshots_take(lt_snapshots *list, const lt_layout *from, int64_t done)
{
    for (snapshot *s = list->first; s; s = s->next) {
        if (s->data || done < s->ticket)
            continue;
        if (!(s->data = malloc(from->bytes + 1)))
            return lt_fail(LT_ENOMEM, "out of memory for the weights of an epoch");
        LT_TRY(lt__layout_pack(from, s->data));
    }
    return LT_OK;
}

static void drop(snapshot **link)
{
    snapshot *s = *link;
    *link = s->next;
    free(s->data);
    free(s);
}

lt_status lt__snapshots_read(lt_snapshots *list, int64_t ticket, const lt_layout *to)
{
    snapshot **link = &list->first;
    while (*link && !((*link)->ticket == ticket && (*link)->data))
        link = &(*link)->next;
    if (!*link)
        return lt_fail(LT_EINVAL, "the values of ticket %lld were not kept", (long long)ticket);
    lt_status status = lt__layout_unpack(to, (*link)->data);
    drop(link);
    return status;
}

void lt__snapshots_free(lt_snapshots *list)
{
    while (list->first)
        drop(&list->first);
}
