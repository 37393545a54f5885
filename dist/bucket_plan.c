/* bucket_plan.c - sorts parameters into buckets; see bucket_plan.h. */
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/bucket_plan.h"

void *lt__bucket_item_grad(const lt_bucket_item *it)
{
    return (char *)it->place.arena + (size_t)it->place.offset * lt_dtype_bytes(it->place.dtype);
}

void *lt__bucket_item_data(const lt_bucket_item *it)
{
    return it->held ? it->held : lt__bucket_item_grad(it);
}

size_t lt__bucket_item_bytes(const lt_bucket_item *it)
{
    return (size_t)it->x->count * lt_dtype_bytes(it->place.dtype);
}

lt_bucket_item *lt__bucket_plan_find(const lt_bucket_plan *p, const lt_tensor *x)
{
    int i = 0;
    while (i < p->n_items && p->items[i].x != x)
        i++;
    return i < p->n_items ? &p->items[i] : NULL;
}

int64_t lt__bucket_plan_span(const lt_bucket_plan *p, int first, int end)
{
    const lt_bucket_item *last = &p->items[end - 1];
    return last->place.offset + last->x->count - p->items[first].place.offset;
}

/* Whether a gap of that many elements is padding: parameters are aligned to 64 bytes. */
static bool is_padding(const lt_bucket_item *it, int64_t elements)
{
    return (size_t)elements * lt_dtype_bytes(it->place.dtype) < 64;
}

bool lt__bucket_plan_owns_after(const lt_bucket_plan *p, int end, int64_t count)
{
    const lt_bucket_item *it = &p->items[end - 1];
    int64_t at = it->place.offset + it->x->count, limit = at + count;
    for (int i = end; i < p->n_items && p->items[i].arena == it->arena && at < limit; i++) {
        if (!is_padding(it, p->items[i].place.offset - at))
            return false;
        at = p->items[i].place.offset + p->items[i].x->count;
    }
    return at >= limit || is_padding(it, it->place.end - at);
}

int64_t lt__bucket_plan_arena_end(const lt_bucket_plan *p, int arena)
{
    int64_t end = 0;
    for (int i = 0; i < p->n_items; i++)
        if (p->items[i].arena == arena)
            end = p->items[i].place.offset + p->items[i].x->count;
    return end;
}

static int arena_of(lt_bucket_plan *p, const void *arena)
{
    for (int i = 0; i < p->n_items; i++)
        if (p->items[i].place.arena == arena)
            return p->items[i].arena;
    return p->n_arenas++;
}

lt_status lt__bucket_plan_add(lt_bucket_plan *p, lt_tensor *x)
{
    lt_bucket_item fresh = {.x = x};
    LT_TRY(lt_grad_find(x, &fresh.place));
    LT_TRY(LT_RESIZE(p->items, p->n_items + 1, "for a reducer"));
    fresh.arena = arena_of(p, fresh.place.arena);
    lt_retain(x);
    p->items[p->n_items++] = fresh;
    return LT_OK;
}

static int by_place(const void *a, const void *b)
{
    const lt_bucket_item *p = a, *q = b;
    if (p->arena != q->arena)
        return p->arena < q->arena ? -1 : 1;
    return p->place.offset < q->place.offset ? -1 : p->place.offset > q->place.offset;
}

size_t lt__bucket_capacity(bool is_first, size_t left, size_t first, size_t max)
{
    size_t half = left / 2;
    return is_first || half < first ? first : half < max ? half : max;
}

lt_status lt__bucket_plan_cut(lt_bucket_plan *p, size_t first_bucket, size_t max)
{
    if (p->n_items == 0)
        return LT_OK;
    LT_TRY(LT_RESIZE(p->buckets, p->n_items, "for a reducer"));
    qsort(p->items, (size_t)p->n_items, sizeof *p->items, by_place);
    p->n_buckets = 0;
    for (int end = p->n_items, first; end > 0; end = first) {
        const lt_bucket_item *last = &p->items[end - 1];
        size_t each = lt_dtype_bytes(last->place.dtype);
        size_t left = (size_t)(last->place.offset + last->x->count) * each;
        size_t capacity = lt__bucket_capacity(p->n_buckets == 0, left, first_bucket, max);
        for (first = end - 1; first > 0 && p->items[first - 1].arena == last->arena; first--)
            if ((size_t)lt__bucket_plan_span(p, first - 1, end) * each > capacity)
                break;
        for (int i = first; i < end; i++)
            p->items[i].bucket = p->n_buckets;
        p->buckets[p->n_buckets++] = (lt_planned_bucket){.first = first, .end = end};
    }
    return LT_OK;
}

void lt__bucket_plan_drop_leftover(lt_bucket_plan *p)
{
    for (int i = 0; i < p->n_items; i++) {
        free(p->items[i].leftover);
        p->items[i].leftover = NULL;
    }
}

lt_status lt__bucket_plan_save_leftover(lt_bucket_plan *p)
{
    lt__bucket_plan_drop_leftover(p);
    for (int i = 0; i < p->n_items; i++) {
        lt_bucket_item *it = &p->items[i];
        if (!lt_grad(it->x))
            continue;
        it->leftover = lt__calloc(1, lt__bucket_item_bytes(it), "for a leftover gradient");
        if (!it->leftover)
            return LT_ENOMEM;
        memcpy(it->leftover, lt__bucket_item_data(it), lt__bucket_item_bytes(it));
    }
    return LT_OK;
}

lt_status lt__bucket_plan_restore_leftover(lt_bucket_plan *p)
{
    for (int i = 0; i < p->n_items; i++) {
        lt_bucket_item *it = &p->items[i];
        if (!it->leftover) {
            lt_zero_grad(it->x);
            continue;
        }
        memcpy(lt__bucket_item_data(it), it->leftover, lt__bucket_item_bytes(it));
        if (!lt_grad(it->x))
            LT_TRY(lt_grad_set(it->x, false));
    }
    return LT_OK;
}

void lt__bucket_plan_free(lt_bucket_plan *p)
{
    lt__bucket_plan_drop_leftover(p);
    for (int i = 0; i < p->n_items; i++)
        lt_release(p->items[i].x);
    free(p->items);
    free(p->buckets);
}
