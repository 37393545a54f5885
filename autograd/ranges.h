/* ranges.h - the state of an optimizer, and the flat ranges of its parameters. Private to autograd.
 */
#ifndef LT_AUTOGRAD_RANGES_H
#define LT_AUTOGRAD_RANGES_H

#include "autograd/tape.h"

enum { LT_MAX_SLOTS = LT_MAX_IN - 2 };

typedef struct lt_optim_item { /* a parameter */
    lt_tensor *x;              /* kept */
    int arena, group;
    int64_t steps;   /* steps applied so far */
    bool is_pending; /* its last step is pending, and `steps` does not include it yet */
    int index;       /* index in lt_optim_new(), which is the same on all stages of a pipeline */
} lt_optim_item;

typedef struct lt_optim_slots {
    lt_segment *segment;
    lt_storage *slot[LT_MAX_SLOTS];
} lt_optim_slots;

struct lt_optim {
    lt_ctx *ctx;
    const lt_def *def;
    uint32_t number;                          /* number of the optimizer in its context, from 1 */
    int step;                                 /* index of the op's option `step`, or -1 */
    int n_slots, n_items, n_arenas, capacity; /* capacity of both arrays */
    lt_optim_item *items;                     /* sorted by arena, then offset */
    lt_optim_slots *arenas;
    uint64_t backwards;   /* count of the context's backwards at the last step */
    lt_pending_step last; /* the last step */
    lt_tensor *mixed;     /* see lt_optim_mixed() */
    lt_tensor *squares;   /* (capacity) f64: sum of squares of each gradient; NULL before use */
    double *numbers;      /* (capacity) the same on the host; NULL before use */
};

/* The item of a parameter. Borrowed. NULL with LT_EINVAL if the optimizer does not have it. */
lt_optim_item *lt__optim_item(lt_optim *o, const lt_tensor *x);
/* LT_EINVAL unless options has complete options for each group in use, without `step`, which the
 * optimizer sets. */
LT_NODISCARD lt_status lt__check_settings(const lt_optim *o, const lt_opt *const *options,
                                          int n_groups);
/* Called in each step: sets o->mixed, and records that this step uses the newest backward. */
void lt__optim_use_grads(lt_optim *o);
/* Counts the last step for its parameters if it was pending and is applied. Blocks until the
 * accelerator has decided. */
void lt__optim_count_pending(lt_optim *o);
/* squares.c: adds the sum of squares of the gradients that the next step would use to total, an f64
 * scalar. LT_ENOMEM, or the errors of the device and of lt_sum_over_net(). */
LT_NODISCARD lt_status lt__optim_add_squares(lt_optim *optim, lt_tensor *total);

#endif
