/* scale.h - the state of a loss scale, and the votes of several ranks. Private to amp. */
#ifndef LT_AMP_SCALE_H
#define LT_AMP_SCALE_H

#include "amp/amp.h"

enum { LT_ANOMALY_BYTES = 512 };

/* Rows of the table of gradient statistics: one for the gradient of a leaf without an optimizer;
 * one for a leftover gradient that this step adds to; and from LT_ROW_FIRST on, one for each
 * parameter in `measured`, as of the last backward. */
enum { LT_ROW_UNOWNED, LT_ROW_LEFTOVER, LT_ROW_FIRST };
enum { LT_STEPS_KEPT = 8 }; /* steps that lt_loss_scale_step_at() can return */

struct lt_loss_scale {
    lt_ctx *ctx;
    lt_scaler scaler;
    lt_grad_table *table;
    lt_tensor **measured;         /* parameters that have a row in this step; kept */
    int n_measured, capacity, at; /* at: index in `measured` where the next search starts */
    int last;                     /* row of the gradient that was completed last */
    lt_wire_scales *wires;        /* wire scales, if buckets travel in f16; borrowed */
    lt_grad_stats reduced;        /* statistics of this step's buckets, over all ranks */
    bool is_reduced;              /* `reduced` decides, not what this rank found */
    bool has_backward;            /* a backward has run since the last decision */
    lt_step_status step_status;   /* the last decision, or LT_PENDING */
    lt_scaled_step step, recent[LT_STEPS_KEPT]; /* the last step; recent ones, at number % 8 */
    bool found_inf_here;  /* this rank has a gradient in this step that is not finite */
    bool detects_anomaly; /* anomaly detection is on in this step; see anomaly.h */
    /* describes the first result in this step that was not finite; "" if all were finite */
    char anomaly[LT_ANOMALY_BYTES];
};

/* The exponent of a magnitude, clamped to the range of a vote. LT_NO_EXPONENT for 0. */
int lt__exponent_of(double magnitude);
/* Statistics of the gradient that was completed last, unscaled, as its hooks left it. Call it on
 * the rank's thread. */
lt_grad_stats lt__loss_scale_last(const lt_loss_scale *scale);

/* ==== Votes: see lt_reducer_use_loss_scale() ================================================== */

enum {
    LT_EXPONENT_LOW = -40,
    LT_EXPONENT_HIGH = 80, /* range of the exponents in a vote */
    LT_EXPONENTS = LT_EXPONENT_HIGH - LT_EXPONENT_LOW + 1,
    LT_VOTE_NUMBERS = 1 + LT_EXPONENTS,
    LT_VOTE_NOT_FINITE = 0, /* index of the number of ranks with a gradient that is not finite */
    LT_WIRE_SCALE_NUMBERS = LT_EXPONENTS
};
/* Starts the vote on a step; its first bucket follows. Discards the votes of an earlier
 * exchange. */
void lt__vote_start(lt_loss_scale *scale);
/* Writes this rank's vote on a bucket, given the statistics of its unscaled gradients. numbers
 * (LT_VOTE_NUMBERS) must be 0 before. */
void lt__vote_pack(lt_loss_scale *scale, const lt_grad_stats *stats, float *numbers);
/* Reads the sums of all votes on a bucket. */
void lt__vote_unpack(lt_loss_scale *scale, const float *numbers);

/* Returns the exponent for a bucket, and writes this rank's numbers for it. largest: the largest
 * finite magnitude of this rank's unscaled gradients. numbers (LT_WIRE_SCALE_NUMBERS) must be 0
 * before. */
int lt__wire_scales_pack(const lt_wire_scales *wires, int bucket, double largest, float *numbers);
/* Reads the sums of the numbers of all ranks, and adjusts the exponent. True if the bucket must be
 * sent again, because it may have overflowed or has underflowed more than necessary. */
bool lt__wire_scales_unpack(lt_wire_scales *wires, int bucket, const float *numbers);

#endif
