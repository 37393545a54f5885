/* bucket_plan.h - which parameters a reducer has, and the buckets in which their gradients travel.
 * Private to this room.
 */
#ifndef LT_DIST_BUCKET_PLAN_H
#define LT_DIST_BUCKET_PLAN_H

#include "dist/dist.h"

typedef enum lt_grad_state {
    LT_GRAD_NONE,
    LT_GRAD_PENDING,
    LT_GRAD_READY
} lt_grad_state; /* of a gradient, on a rank */

typedef struct lt_bucket_item {  /* a parameter */
    lt_tensor *x;
    lt_grad_place place;
    int arena;          /* arenas are numbered as they come: addresses differ between ranks */
    int bucket;
    lt_grad_state state; /* written by the rank's thread before an exchange, or under the lock */
    bool frozen;        /* at the first backward of the step */
    bool has_optim;        /* an optimizer has it, so what is found in it counts */
    bool measured;      /* this is of its gradient as it is now: */
    lt_grad_stats stats;
    lt_grad_stats stats_before;    /* in those in the tree sums of this step */
    bool summed;        /* a shard of this step had it */
    void *leftover;         /* what earlier steps have left, for each shard anew; NULL: nothing */
    bool added;         /* this rank has added to it in this step */
    bool used;        /* some rank has it, in the last exchange, */
    bool accumulated;         /* and some rank has added to it */
} lt_bucket_item;

typedef struct lt_planned_bucket {
    int first, end;     /* items, all of one arena */
    int pending;         /* of them, in the running backward; under the lock */
    uint64_t mark;      /* likewise: in the stream of an accelerator, behind the last one */
    lt_bucket times;    /* but from no beginning */
} lt_planned_bucket;

typedef struct lt_bucket_plan {  /* zero: nothing to send */
    lt_bucket_item *items;     /* by arena, then offset */
    lt_planned_bucket *buckets; /* in the order of sending: the last items first */
    int n_items, n_buckets, n_arenas;
} lt_bucket_plan;

/* One more, which is kept. LT_ENOMEM, or what lt_grad_find() says. lt__bucket_plan_cut() is to
 * follow. */
LT_MUST lt_status lt__bucket_plan_add(lt_bucket_plan *plan, lt_tensor *x);
/* Cuts the items into buckets, of which the first has at most so many bytes, and others `most`; but
 * none is more than half of what is left, as the last ones, which no backward hides, had better be
 * small. LT_ENOMEM. */
LT_MUST lt_status lt__bucket_plan_cut(lt_bucket_plan *plan, size_t first, size_t most);
void lt__bucket_plan_free(lt_bucket_plan *plan);

/* NULL: it is none of them. */
lt_bucket_item *lt__bucket_plan_find(const lt_bucket_plan *plan, const lt_tensor *x);
/* The elements of the arena that items [first, end) span. */
int64_t lt__bucket_plan_span(const lt_bucket_plan *plan, int first, int end);
/* Whether the `count` elements behind a bucket that ends before item `end` are nobody else's: those
 * of items behind it, padding, or the room behind the arena. */
bool lt__bucket_plan_owns_behind(const lt_bucket_plan *plan, int end, int64_t count);
/* Where an arena's items end, in elements of it. */
int64_t lt__bucket_plan_arena_end(const lt_bucket_plan *plan, int arena);
/* Before the first of several shards: keeps the gradients that there are, as earlier steps have
 * left them for optimizers that have not come since. All ranks have the same, so that they stay
 * what they are if each shard has them, for the shards' shares add up to 1. LT_ENOMEM. */
LT_MUST lt_status lt__bucket_plan_save_leftover(lt_bucket_plan *plan);
/* Before another shard: these gradients are there again, and no others. */
LT_MUST lt_status lt__bucket_plan_restore_leftover(lt_bucket_plan *plan);
void lt__bucket_plan_drop_leftover(lt_bucket_plan *plan);
void *lt__bucket_item_data(const lt_bucket_item *item);
size_t lt__bucket_item_bytes(const lt_bucket_item *item);

#endif
