/* deadline.h - a deadline for waiting for another rank. Private to dist.
 *
 * The whole job may be suspended, for example by Ctrl-Z, and resumed later. That time must not
 * count. A waiting rank checks its deadline several times a second. So a gap of more than a second
 * between two checks means that the process did not run, and the deadline moves by that gap.
 */
#ifndef LT_DIST_DEADLINE_H
#define LT_DIST_DEADLINE_H

#include "core/tensor.h"

typedef struct lt_deadline {
    double at, last_check; /* lt__seconds(): the deadline, and the last check, initially now */
} lt_deadline;

/* Whether the deadline has passed. Call it several times a second. */
static inline bool lt__deadline_is_over(lt_deadline *d)
{
    double before = d->last_check;
    d->last_check = lt__seconds();
    if (d->last_check > before + 1)
        d->at += d->last_check - before;
    return d->last_check >= d->at;
}

#endif
