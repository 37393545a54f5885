/* snapshots.c - copies of the server's values at the ends of epochs; see snapshots.h. */
#include <stdlib.h>

#include "core/tensor.h"
#include "dist/async/snapshots.h"

typedef struct lt_snapshot {
    struct lt_snapshot *next;
    int64_t ticket; /* the snapshot is taken when all tickets below are done */
    char *data;     /* NULL before that moment */
} snapshot;

static const char WEIGHTS[] = "for the weights of an epoch";

/* The snapshot for a ticket, or NULL. */
static snapshot *find(const lt_snapshots *list, int64_t ticket)
{
    snapshot *s = list->first;
    while (s && s->ticket != ticket)
        s = s->next;
    return s;
}

lt_status lt__snapshots_plan(lt_snapshots *list, int64_t ticket)
{
    if (find(list, ticket))
        return LT_OK;
    snapshot *s;
    LT_TRY(LT_CALLOC(s, 1, WEIGHTS));
    *s = (snapshot){.next = list->first, .ticket = ticket};
    list->first = s;
    return LT_OK;
}

lt_status lt__snapshots_take(lt_snapshots *list, const lt_image *from, int64_t done)
{
    for (snapshot *s = list->first; s; s = s->next) {
        if (s->data || done < s->ticket)
            continue;
        LT_TRY(LT_CALLOC(s->data, from->bytes, WEIGHTS));
        LT_TRY(lt__image_pack(from, false, s->data));
    }
    return LT_OK;
}

lt_status lt__snapshots_read(const lt_snapshots *list, int64_t ticket, const lt_image *to)
{
    const snapshot *s = find(list, ticket);
    if (!s || !s->data)
        return lt_fail(LT_EINVAL, "the values of ticket %lld were not kept", (long long)ticket);
    return lt__image_unpack(to, false, s->data);
}

void lt__snapshots_forget(lt_snapshots *list, int64_t ticket)
{
    snapshot **link = &list->first;
    while (*link && (*link)->ticket != ticket)
        link = &(*link)->next;
    snapshot *s = *link;
    if (!s)
        return;
    *link = s->next;
    free(s->data);
    free(s);
}

lt_tensor *lt__snapshots_state(const lt_snapshots *list, lt_ctx *ctx, size_t bytes, int i,
                               int64_t *ticket)
{
    *ticket = 0;
    for (const snapshot *s = list->first; s; s = s->next)
        if (s->data && i-- == 0) {
            *ticket = s->ticket;
            return lt_tensor_from(ctx, LT_U8, 1, &(int64_t){(int64_t)bytes}, s->data);
        }
    return NULL;
}

lt_status lt__snapshots_restore(lt_snapshots *list, int64_t ticket, lt_tensor *values)
{
    LT_TRY(lt__snapshots_plan(list, ticket));
    snapshot *s = find(list, ticket);
    LT_TRY(LT_RESIZE(s->data, values->count, WEIGHTS));
    return lt_read(values, s->data);
}

void lt__snapshots_free(lt_snapshots *list)
{
    while (list->first)
        lt__snapshots_forget(list, list->first->ticket);
}
