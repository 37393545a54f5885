/* record.h - the step record: numbers that are summed over the ranks before the buckets of a step.
 * Private to dist. reducer.h declares its functions.
 *
 * It contains the loss, a few separate numbers for each rank, the batch-norm statistics, and for
 * each parameter one number that shows whether some rank uses it and whether some rank has added to
 * its gradient.
 */
#ifndef LT_DIST_RECORD_H
#define LT_DIST_RECORD_H

#include "dist/bn_layers.h"

typedef struct lt_record { /* all zeros: nothing written yet */
    double *data;          /* (count) */
    size_t count;
    int parameters;
    lt_bn_layers bn_layers;
    double loss;          /* loss of this rank in this step, without deferred losses */
    lt_deferred **losses; /* (n_losses) deferred losses of this step, from an accelerator */
    int n_losses;
    size_t capacity;
    char where[LT_WHERE_BYTES]; /* location of the first deferred loss, for messages */
    double share;               /* weight of this rank's loss in the loss of the global batch */
    int64_t step;               /* step of this record, for messages */
} lt_record;

#endif
