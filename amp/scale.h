/* scale.h - the loss scale in use. Private to this room. */
#ifndef LT_AMP_SCALE_H
#define LT_AMP_SCALE_H

#include "amp/amp.h"

enum { LT_FIRST_BYTES = 512 };

/* What was found in a parameter's gradient, as it was after the last backward. */
typedef struct lt_finding {
    lt_tensor *x;             /* held */
    lt_found found;
} lt_finding;

struct lt_loss_scale {
    lt_ctx *ctx;
    lt_scaler scaler;
    lt_finding *findings;     /* of this step, of what optimizers have; */
    int n_findings, room, at; /* at: where the next is looked for */
    lt_found last;            /* in the gradient that was completed last */
    lt_found heard;           /* from all ranks, of this step's buckets */
    int wire[LT_SCALE_WIRES]; /* of a bucket: the exponent for its way in f16 */
    int wires;                /* of them that have moved */
    int64_t sent_again;       /* buckets, so far */
    bool agreed;              /* it holds for this step, and not what this rank has found */
    bool fresh;               /* a backward has come since the last decision, */
    lt_outcome outcome;       /* which was this one */
    lt_scaled_step step;
    bool here;                /* in this step a gradient was not finite on this rank, */
    bool elsewhere;           /* or on another one only */
    bool watched;             /* this step is: see watch.h */
    char first[LT_FIRST_BYTES]; /* about what was not finite first, in the step; "": nothing was */
};

/* In all gradients of this step that are still there. */
lt_found lt__found_in(const lt_loss_scale *s);

/* Of a magnitude; the nearest that ranks can tell each other. LT_NO_EXPONENT for 0. */
int lt__exponent_of(double magnitude);

#endif
