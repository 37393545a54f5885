/* scale.h - the loss scale in use. Private to this room. */
#ifndef LT_AMP_SCALE_H
#define LT_AMP_SCALE_H

#include "amp/amp.h"

enum { LT_ANOMALY_BYTES = 512 };

/* Rows of the table: what was found in the gradient of a leaf that no optimizer has; in one that
 * more is added to; and from LT_ROW_FIRST on in those of parameters, as they were after the last
 * backward. */
enum { LT_ROW_UNOWNED, LT_ROW_LEFTOVER, LT_ROW_FIRST };
enum { LT_STEPS_KEPT = 8 };

struct lt_loss_scale {
    lt_ctx *ctx;
    lt_scaler scaler;
    lt_grad_table *table;
    lt_tensor **measured;     /* parameters that have a row in this step; held */
    int n_measured, room, at; /* at: where the next is looked for */
    int last;                 /* row of the gradient that was completed last */
    lt_grad_stats reduced;           /* from all ranks, of this step's buckets */
    bool is_reduced;              /* it holds for this step, and not what this rank has found */
    bool has_backward;               /* a backward has come since the last decision, */
    lt_step_status step_status;       /* which was this one, or is LT_PENDING */
    lt_scaled_step step, recent[LT_STEPS_KEPT]; /* the last one; the last ones, by their number */
    bool found_inf_here;                /* in this step a gradient was not finite on this rank, */
    bool found_inf_elsewhere;           /* or on another one only */
    bool detects_anomaly;             /* in this step: see anomaly.h */
    char anomaly[LT_ANOMALY_BYTES]; /* about what was not finite first, in the step; "": nothing was
                                     */
};

/* Of a magnitude; the nearest that ranks can tell each other. LT_NO_EXPONENT for 0. */
int lt__exponent_of(double magnitude);

#endif
