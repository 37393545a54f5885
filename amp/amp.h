/* amp.h - public header of amp: mixed precision. Ops that multiply and add, such as conv2d, run in
 * half precision and accumulate in f32. Parameters, their gradients, updates, losses and statistics
 * stay f32. Contexts must be from lt_open().
 */
#ifndef LUATRAIN_AMP_H
#define LUATRAIN_AMP_H

#include "dist/dist.h"
#include "ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Turns autocast on if dtype is LT_BF16 or LT_F16: each op of ctx converts its inputs to this dtype
 * or to f32, as its policy in lt_op.cast says, unless an input is f64. Any other dtype turns
 * autocast off, so that ops do not convert their inputs. Autocast is off by default. Backward
 * follows the setting that was in effect during forward. To change it temporarily, save
 * lt_autocast() and restore it. In f16, small gradients become 0 unless the loss is scaled. */
LT_API void lt_set_autocast(lt_ctx *ctx, lt_dtype dtype);
/* The half-precision dtype that ops run in; LT_F32 while autocast is off. */
LT_API lt_dtype lt_autocast(const lt_ctx *ctx);

/* ==== The scaler: how the loss scale is chosen ================================================ */

/* The magnitudes of f16 range from 2^-24 to 65504, just below 2^16. The loss, and with it every
 * gradient, is multiplied by a scale so that gradients fit this range. The scale is always 2^k, so
 * scaling never rounds. After each step the scaler learns how large the gradients were, and
 * adjusts k:
 *
 * static    k never changes.
 * dynamic   Like PyTorch's GradScaler. If a gradient is not finite, the step is skipped and k
 *           decreases by 1. After `interval` finite steps in a row, k increases by 1.
 * adaptive  The headroom of a step is the number of exponent bits that were left before its largest
 *           gradient would have overflowed.
 *           An overflow lowers k by the number of bits by which the largest finite gradient exceeds
 *           the range of f16, but at least by a minimum. The minimum is 1, and doubles with each
 *           further overflow in a row, up to 64.
 *           k grows after `interval` steps in a row with a headroom of 2 bits or more, or after 10
 *           steps in a row with 10 bits or more. Let h be the smallest headroom of these steps: k
 *           grows by (h - 2) / 2, rounded down, but at least by 1.
 *           The interval starts at 20. It doubles, up to 2000, when k grows with a headroom of only
 *           2 or 3 bits. It also doubles when gradients overflow less than an interval after k
 *           grew: that growth was a mistake and should not be repeated too soon. Any other overflow
 *           may be temporary and resets the interval to 20.
 *           k is also lowered ahead of an overflow, so that the range of f16 covers 99.9 % of a
 *           normal distribution of the gradients' exponents. Its mean and deviation are averages
 *           over recent steps (LogMax, of automatic_loss_scaler.py in NVIDIA's OpenSeq2Seq). LogMax
 *           uses the difference of two averages over different spans as the variance, which is
 *           wrong while gradients grow or shrink. Here the variance is twice the mean square of the
 *           distances above the mean, so that shrinking gradients do not lower the scale. One step
 *           has a weight of at most 1 % in the variance, so that it does not lower the scale for
 *           long.
 *
 * A scaler does not refer to tensors. Equal histories give bit-identical scalers. */
typedef enum lt_scale_policy {
    LT_SCALE_ADAPTIVE,
    LT_SCALE_DYNAMIC,
    LT_SCALE_STATIC
} lt_scale_policy;

enum {
    /* minimum of k. Backward starts with the gradient 1. Multiplied by 2^-14, it is still a normal
     * f16 number and keeps full precision */
    LT_SCALE_MIN = -14,
    /* maximum of k. With this scale the smallest f16 number, 2^-24, becomes 1. A larger scale would
     * lose range at the top in order to keep gradients that are negligible */
    LT_SCALE_MAX = 24,
    LT_NO_EXPONENT = -10000 /* the exponent of a step whose gradients are all zero */
};

typedef struct lt_scaler { /* checkpoints must save all of it */
    lt_scale_policy policy;
    int k;
    int interval;           /* see above */
    int good;               /* steps in a row that count towards the interval */
    int headroom;           /* adaptive: smallest headroom in these steps, in bits */
    int since;              /* steps since the last growth, at most 2000 */
    int64_t steps, skipped; /* steps so far; how many of them were skipped */
    int64_t in_a_row; /* steps skipped in a row, including the last; 0 if the last was applied */
    int at_floor;     /* how many of these steps had the lowest possible scale */
    double mean, variance; /* adaptive: statistics of the exponents of recent unscaled gradients */
    /* bias corrections of mean and variance: decay^n after n updates */
    double old_mean, old_variance;
} lt_scaler;

/* A scaler that starts with 2^k; k is clamped to LT_SCALE_MIN..LT_SCALE_MAX. interval is for the
 * dynamic policy; 0 means 2000. */
LT_API lt_scaler lt_scaler_init(lt_scale_policy policy, int k, int interval);
/* LT_EINVAL, with the name of the field, if a field is out of range. lt_scaler_update() never
 * produces such a state. */
LT_MUST lt_status lt_scaler_check(const lt_scaler *scaler);
/* Reports a step whose loss was multiplied by 2^k, and adjusts k. exponent is the exponent of the
 * largest finite magnitude m of the scaled gradients: 2^exponent <= m < 2^(exponent + 1). It is
 * LT_NO_EXPONENT if all gradients are 0. `finite` says whether all gradients are finite. Returns
 * whether the step must be applied; otherwise it must be skipped. */
LT_API bool lt_scaler_update(lt_scaler *scaler, int exponent, bool finite);

/* ==== Loss scaling ============================================================================ */

/* A loss scale applies a scaler to the training in a context. Backward multiplies the gradient of
 * the loss by the scale. When the gradient of a leaf is complete, backward divides it by the scale,
 * before the hooks of the leaf run. All other code sees unscaled gradients. The scale is the same
 * in all backwards of a step.
 *
 * At an optimizer step the scaler decides whether the step is applied. The decision covers all
 * parameters that belonged to an optimizer during backward. It uses the gradients of these
 * parameters after all hooks have run, except gradients that were discarded after backward. If a
 * gradient is not finite, the steps of all optimizers until the next backward are skipped: weights,
 * slots and running statistics stay as they are. With several ranks, a discarded gradient still
 * counts if backward has already announced it to the other ranks. An accelerator makes the decision
 * itself; see lt_synchronize().
 *
 * After ten skipped steps in a row with the lowest possible scale (a static one, or 2^-14),
 * training ends with LT_ENUMERIC, because no scale helps. During the tenth, all results of ops are
 * checked, and the message names the first op whose result was not finite, its place in the user's
 * code, and whether f16 is the cause. If a loss is not finite, backward fails at once with such a
 * message, as far as the saved tensors show the cause. With several ranks, only the ranks whose own
 * results are not finite fail in this way. The other ranks continue until they learn of the
 * failure. */
typedef struct lt_loss_scale lt_loss_scale;

/* Makes a loss scale, which is not in use yet. scaler is copied. New. NULL with LT_ENOMEM. */
LT_API lt_loss_scale *lt_loss_scale_new(lt_ctx *ctx, const lt_scaler *scaler);
/* Frees scale, which must not be in use. NULL is allowed. */
LT_API void lt_loss_scale_free(lt_loss_scale *scale);
/* Uses scale from the next backward in ctx on, or no loss scale if scale is NULL. scale is borrowed
 * until the next call. LT_EINVAL in backward and in a dry run. */
LT_MUST lt_status lt_use_loss_scale(lt_ctx *ctx, lt_loss_scale *scale);
/* The scaler, to read, save or restore between steps. Borrowed. This function and
 * lt_loss_scale_step() block while the last decision is pending, see lt_synchronize(). */
LT_API lt_scaler *lt_loss_scale_scaler(lt_loss_scale *scale);

typedef struct lt_scaled_step { /* a step after its decision */
    int k;                      /* its scale was 2^k */
    /* exponent of its largest finite gradient, scaled; or LT_NO_EXPONENT. The headroom of the step,
     * in bits, is 15 - exponent */
    int exponent;
    bool finite;     /* all gradients were finite, so the step was applied */
    int64_t number;  /* number of the step, counted from 1 as in lt_scaler */
    int64_t skipped; /* number of steps skipped so far, including this one */
} lt_scaled_step;
/* The last step. Its number is 0 before the first step. */
LT_API lt_scaled_step lt_loss_scale_step(lt_loss_scale *scale);
/* The number of the last step, even if its decision is pending. Does not block. */
LT_API int64_t lt_loss_scale_latest_number(const lt_loss_scale *scale);
/* The step with this number if it is one of the last eight, otherwise the last step. Blocks while
 * the decision on it is pending. */
LT_API lt_scaled_step lt_loss_scale_step_at(lt_loss_scale *scale, int64_t number);

/* ==== Several ranks =========================================================================== */

/* All ranks must make the same decision, so they vote. Each bucket of gradients carries the votes
 * in its allreduce. The votes count the ranks with a gradient that is not finite, and for each
 * exponent the ranks whose largest gradient has that exponent. Each rank then uses the sums instead
 * of its own statistics.
 *
 * A bucket that is sent in f16, with or without a loss scale, is multiplied by its wire scale
 * 2^exponent, which leaves 2 bits of headroom. If the largest gradient grows by more than 2 bits or
 * shrinks by more than 12 from one step to the next, the numbers sent with the bucket show it and
 * the bucket is sent again. So overflow on the wire costs no step and changes no loss scale. */
enum {
    LT_WIRE_SCALE_MIN = -120,
    /* 2^100 fits f32, even after it is multiplied by the share of a rank. With this scale, an
     * unscaled gradient becomes 0 on the wire if its product with the share of the rank is below
     * 2^-125 */
    LT_WIRE_SCALE_MAX = 100,
    LT_WIRE_SCALE_COUNT = 256
};
/* Bucket i uses exponent[i % LT_WIRE_SCALE_COUNT]. Checkpoints must save all fields. */
typedef struct lt_wire_scales {
    int exponent[LT_WIRE_SCALE_COUNT];
    int used;        /* the first `used` exponents are in use */
    int64_t resends; /* number of times that a bucket was sent again, so far */
} lt_wire_scales;
/* The initial wire scales, 2^24 each. If that is too high for a bucket, the first step sends the
 * bucket again with a lower scale. */
LT_API lt_wire_scales lt_wire_scales_init(void);

/* Like lt_use_loss_scale(), but for all ranks of a reducer. From the next backward on, all ranks
 * make the same decision about each step, and their scalers stay equal. scale may be NULL. All
 * ranks must make the same call, with scalers in equal states.
 *
 *     scale = lt_loss_scale_new(ctx, &scaler);
 *     reducer = lt_reducer_new(ctx, group, NULL);
 *     lt_reducer_use_loss_scale(reducer, scale, NULL);
 *
 * wires: the wire scales. They are required if gradients travel in f16, with or without a loss
 * scale; otherwise they are ignored and may be NULL. A rank must call lt_group_wait() before it
 * reads or writes wires or its scaler. scale and wires are borrowed until the next call or the end
 * of the reducer. Waits for a running exchange; the previous scale and wires are not used
 * afterwards. LT_EINVAL as from lt_use_loss_scale(), or if wires is required but NULL. LT_EUSAGE
 * for a scale with a reducer that has a delay. */
LT_MUST lt_status lt_reducer_use_loss_scale(lt_reducer *reducer, lt_loss_scale *scale,
                                            lt_wire_scales *wires);

/* ==== Precision check ========================================================================= */

/* Runs a forward and backward pass twice, in half precision and in f32, and compares each tensor
 * that an op makes. Both are dry runs, see lt_dry_run_begin(): they do not change the training, and
 * draw the same random numbers as the pass that follows. The results of the first pass stay in
 * memory until the second pass ends.
 *
 *     lt_precision_check_begin(check, k, false);
 *     forward and backward
 *     lt_precision_check_end(check);
 *     the same three steps with true instead of false
 */
typedef struct lt_precision_check lt_precision_check;

/* New. NULL with LT_ENOMEM. */
LT_API lt_precision_check *lt_precision_check_new(lt_ctx *ctx);
LT_API void lt_precision_check_free(lt_precision_check *check); /* NULL is allowed */
/* Starts a pass, the first or the second. Backward multiplies the gradient of the loss by 2^k; pass
 * the k of the loss scale in use, or 0. The first pass runs under the current autocast and discards
 * the earlier results; the second runs without autocast. LT_EINVAL or LT_ENOMEM as from
 * lt_dry_run_begin(). */
LT_MUST lt_status lt_precision_check_begin(lt_precision_check *check, int k, bool second);
/* Ends a pass. Must follow each successful begin, even after errors. LT_ENOMEM, or the error of a
 * comparison. */
LT_MUST lt_status lt_precision_check_end(lt_precision_check *check);
/* The half-precision dtype of the first pass; LT_F32 if no op used one. */
LT_API lt_dtype lt_precision_check_half(const lt_precision_check *check);

typedef struct lt_precision { /* comparison of one tensor */
    /* the place in the user's code (see lt_where_fn), such as "train.lua:9: net.4 ", and the name
     * of the op, such as "conv2d". where, op and of are borrowed until the next first pass
     * begins */
    const char *where, *op;
    const char *of; /* the input whose gradient this is; NULL for an output */
    bool leaf;      /* the input is a leaf, such as a parameter */
    int64_t count;  /* elements that are finite and not 0 in f32 */
    /* how many of these elements are 0 in half precision. An element only counts if its f32 value
     * is below the smallest normal number of that dtype; otherwise wrong inputs made it 0 */
    int64_t underflows;
    int64_t overflows;  /* how many of these elements are not finite in half precision */
    double norm, error; /* 2-norms without overflows: |f32|; |half - f32| / |f32| */
} lt_precision;
/* Sets *row to the comparison of tensor i, in the order of the first pass. Returns false past the
 * last tensor, and before the second pass. Only tensors that both passes made are compared. The
 * comparison leaves out views, the results of cast, of in-place ops and of ops that run with
 * gradients off, and gradients that an op passes on unchanged. */
LT_API bool lt_precision_check_row(const lt_precision_check *check, int i, lt_precision *row);

#ifdef __cplusplus
}
#endif
#endif
