/* scale.h - the state of a loss scale. Private to this room. */
#ifndef LT_AMP_SCALE_H
#define LT_AMP_SCALE_H

#include "amp/amp.h"

enum { LT_ANOMALY_BYTES = 512 };

/* Rows of the table of gradient statistics: for the gradient of a leaf without an optimizer; for
 * one that an earlier step left and this one adds to; and from LT_ROW_FIRST on for the parameters
 * in `measured`, as of the last backward. */
enum { LT_ROW_UNOWNED, LT_ROW_LEFTOVER, LT_ROW_FIRST };
enum { LT_STEPS_KEPT = 8 }; /* for lt_loss_scale_step_at() */

struct lt_loss_scale {
    lt_ctx *ctx;
    lt_scaler scaler;
    lt_grad_table *table;
    lt_tensor **measured;       /* parameters that have a row in this step; kept */
    int n_measured, room, at;   /* at: index in `measured` where the next search starts */
    int last;                   /* row of the gradient that was completed last */
    lt_grad_stats reduced;      /* of this step's buckets, from all ranks */
    bool is_reduced;            /* `reduced` decides, not what this rank found */
    bool has_backward;          /* a backward has run since the last decision */
    lt_step_status step_status; /* the last decision, or LT_PENDING */
    lt_scaled_step step, recent[LT_STEPS_KEPT]; /* the last step; recent ones, at number % 8 */
    bool found_inf_here;      /* this rank has a gradient in this step that is not finite */
    bool found_inf_elsewhere; /* only other ranks have */
    bool detects_anomaly;     /* in this step: see anomaly.h */
    /* describes the first result in this step that was not finite; "" if all were */
    char anomaly[LT_ANOMALY_BYTES];
};

/* The exponent of a magnitude, clamped to the range of a vote. LT_NO_EXPONENT for 0. */
int lt__exponent_of(double magnitude);

#endif
