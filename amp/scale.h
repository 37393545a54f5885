/* scale.h - the loss scale in use. Private to this room. */
#ifndef LT_AMP_SCALE_H
#define LT_AMP_SCALE_H

#include "amp/amp.h"

enum { LT_FIRST_BYTES = 512 };

struct lt_loss_scale {
    lt_ctx *ctx;
    lt_scaler scaler;
    lt_found found, last;     /* in this step; in the gradient that was completed last */
    lt_found heard;           /* from all ranks, of this step's buckets */
    int wire[LT_SCALE_WIRES]; /* of a bucket: the exponent for its way in f16 */
    int wires;                /* of them that have moved */
    int64_t sent_again;       /* buckets, so far */
    bool fresh;               /* a backward has come since the last decision, */
    lt_outcome outcome;       /* which was this one */
    lt_scaled_step step;
    bool elsewhere;           /* in this step gradients are finite here, but not on all ranks */
    bool watched;             /* this step is: see watch.h */
    char first[LT_FIRST_BYTES]; /* about what was not finite first, in the step; "": nothing was */
};

/* Of a magnitude; the nearest that ranks can tell each other. LT_NO_EXPONENT for 0. */
int lt__exponent_of(double magnitude);

#endif
