/* deadline.h - how long a rank waits for another one. Private to this room.
 *
 * A job may be stopped as a whole, as by Ctrl-Z, and go on later: nobody was late then. Who waits
 * looks at the time all the while, so time in which it did not look is none that it has waited.
 */
#ifndef LT_DIST_DEADLINE_H
#define LT_DIST_DEADLINE_H

#include "core/tensor.h"

typedef struct lt_deadline {
    double at, looked; /* now, in the beginning */
} lt_deadline;

/* To be asked several times a second. */
static inline bool lt__deadline_is_over(lt_deadline *d)
{
    double before = d->looked;
    d->looked = lt__seconds();
    if (d->looked > before + 1)
        d->at += d->looked - before;
    return d->looked >= d->at;
}

#endif
