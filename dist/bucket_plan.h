/* bucket_plan.h - the parameters of a reducer and the buckets in which their gradients travel.
 * Private to dist.
 */
#ifndef LT_DIST_BUCKET_PLAN_H
#define LT_DIST_BUCKET_PLAN_H

#include "dist/dist.h"

enum { LT_FIRST_BUCKET = 1 << 20, LT_BUCKET = 8 << 20 }; /* default sizes in bytes */

/* The state of a gradient on this rank. PENDING: the running backward will add to it. */
typedef enum lt_grad_state { LT_GRAD_NONE, LT_GRAD_PENDING, LT_GRAD_READY } lt_grad_state;

typedef struct lt_bucket_item { /* a parameter */
    lt_tensor *x;               /* kept */
    lt_grad_place place;
    int arena; /* number of its arena, in the order of first use, so it is equal on all ranks */
    int bucket;
    lt_grad_state state; /* during an exchange, only written under the lock */
    bool frozen;         /* x was frozen at the first backward of the step */
    bool has_optim;      /* x has an optimizer, so stats may decide whether the step is applied */
    bool measured;       /* stats are up to date */
    lt_grad_stats stats; /* statistics of the gradient, if measured */
    lt_grad_stats stats_before; /* statistics of the shards in the tree sums of this step */
    bool summed;                /* some shard of this step had a gradient */
    void *leftover;   /* copy of the leftover gradient, restored for each shard; or NULL */
    bool added;       /* this rank has added to the gradient in this step */
    bool used;        /* in the last exchange, some rank had a gradient */
    bool accumulated; /* in the last exchange, some rank had added to it */
    void *held;       /* with a delay: where the gradient is summed, see delay.c; else NULL */
    bool is_held;     /* held has the sum of the last step, which no step has applied yet */
} lt_bucket_item;

typedef struct lt_planned_bucket {
    int first, end;  /* items [first, end), all in one arena */
    int pending;     /* number of items that are pending; under the lock */
    uint64_t mark;   /* mark in the accelerator's stream, after the last gradient; under the lock */
    lt_bucket times; /* values of lt__seconds(), not relative to the start of backward */
} lt_planned_bucket;

typedef struct lt_bucket_plan { /* all zeros: no parameters */
    lt_bucket_item *items;      /* sorted by arena, then offset */
    lt_planned_bucket *buckets; /* buckets as they are sent: the last items first */
    int n_items, n_buckets, n_arenas;
} lt_bucket_plan;

/* Adds parameter x; kept. Call lt__bucket_plan_cut() after the last one. LT_ENOMEM, or the error of
 * lt_grad_find(). */
LT_NODISCARD lt_status lt__bucket_plan_add(lt_bucket_plan *plan, lt_tensor *x);
/* Sorts the items and cuts them into buckets of at most lt__bucket_capacity() bytes. A larger
 * parameter gets a bucket of its own. Pointers to items become invalid. Not while an exchange runs.
 * LT_ENOMEM. */
LT_NODISCARD lt_status lt__bucket_plan_cut(lt_bucket_plan *plan, size_t first, size_t max);
/* The capacity of the next bucket if `left` bytes are left in its arena. The first bucket has at
 * most `first` bytes, the others at most `max`. A bucket also takes at most half of the bytes
 * left, unless that is less than `first`: sending the last buckets does not overlap with backward,
 * so they should be small. */
size_t lt__bucket_capacity(bool is_first, size_t left, size_t first, size_t max);
void lt__bucket_plan_free(lt_bucket_plan *plan);

/* The item of parameter x, or NULL. */
lt_bucket_item *lt__bucket_plan_find(const lt_bucket_plan *plan, const lt_tensor *x);
/* The number of arena elements that items [first, end) span, including the padding between them. */
int64_t lt__bucket_plan_span(const lt_bucket_plan *plan, int first, int end);
/* Whether an exchange may overwrite and restore the `count` elements after a bucket that ends
 * before item `end`. It may if they belong to later items of this plan, to padding, or to the spare
 * memory after the arena. */
bool lt__bucket_plan_owns_after(const lt_bucket_plan *plan, int end, int64_t count);
/* The end of the last item of an arena, in elements from the beginning of the arena. */
int64_t lt__bucket_plan_arena_end(const lt_bucket_plan *plan, int arena);
/* Before the first of several shards: copies the leftover gradients. All ranks have the same
 * leftover gradients. If each shard starts with them, the sum leaves them unchanged, because the
 * shares of the shards add up to 1. LT_ENOMEM. */
LT_NODISCARD lt_status lt__bucket_plan_save_leftover(lt_bucket_plan *plan);
/* Before the next shard: restores the leftover gradients and clears all others. */
LT_NODISCARD lt_status lt__bucket_plan_restore_leftover(lt_bucket_plan *plan);
/* After the last shard: frees the copies. */
void lt__bucket_plan_drop_leftover(lt_bucket_plan *plan);
/* The gradient of an item in its arena. Borrowed. */
void *lt__bucket_item_grad(const lt_bucket_item *item);
/* The gradient as an exchange sums it: in its arena, or in item->held. Borrowed. */
void *lt__bucket_item_data(const lt_bucket_item *item);
/* Its size in bytes. */
size_t lt__bucket_item_bytes(const lt_bucket_item *item);

#endif
