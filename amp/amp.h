/* amp.h - the door of amp: mixed precision. Ops that consist of multiply-adds run in half precision
 * and add up in f32; parameters, their gradients and their updates stay f32, and so do losses and
 * statistics.
 */
#ifndef LUATRAIN_AMP_H
#define LUATRAIN_AMP_H

#include "ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* LT_BF16 or LT_F16: from now on each op of ctx brings its inputs to this half or to f32, as its
 * policy in lt_op.cast says. Any other dtype: ops take what comes, as at first. It is forward that
 * counts; backward follows it, wherever it is called. Who switches for a while puts back what
 * lt_autocast() gave before. In f16 small gradients become 0 unless the loss is scaled up. */
LT_API void lt_set_autocast(lt_ctx *ctx, lt_dtype dtype);
/* The half that ops run in now; LT_F32 when it is off. */
LT_API lt_dtype lt_autocast(const lt_ctx *ctx);

/* ==== The scaler: by what to multiply the loss ================================================ */

/* f16 ends at 65504, below 2^16, and at 2^-24. So that gradients fit between these ends, the loss,
 * and with it all of them, is multiplied by a scale. It is always 2^k: then nothing is rounded by
 * it. After each step the scaler is told how large gradients were, and moves k:
 *
 * static    never.
 * dynamic   as PyTorch's GradScaler: k - 1 when a gradient is not finite, which costs the step, and
 *           k + 1 after `interval` finite steps in a row.
 * adaptive  An overflow lowers k by the excess, as far as it shows in what is finite, and by 1, 2,
 *           4, 8... when overflows follow each other. k grows after `interval` steps in a row that
 *           had 2 bits to spare: by half of what the worst of them had beyond these, or by 1. With
 *           10 bits to spare it grows after 10 steps. The interval is 20 at first, and doubles,
 *           up to 2000, with each growth into the last of them, and with an overflow that comes
 *           within an interval of a growth, which was a mistake then, not to be made again so
 *           soon. After any other overflow, which may have been a moment's, it is 20 again.
 *           And k is lowered before there is an overflow: to what fits 99.9 % of a normal
 *           distribution of the gradients' exponents, with mean and deviation averaged over
 *           the last steps (LogMax, of automatic_loss_scaler.py in NVIDIA's OpenSeq2Seq). There the
 *           variance is the difference of two averages over times of different lengths, which is
 *           none while gradients grow or shrink; here it is twice the mean square of the distances
 *           above the mean, so that gradients that shrink do not lower the scale, and one step
 *           is no more than a hundredth of it, so that it does not lower the scale for long.
 *
 * A scaler knows no tensors. Of n equal histories come n equal scalers, bit for bit. */
typedef enum lt_scale_policy {
    LT_SCALE_ADAPTIVE, LT_SCALE_DYNAMIC, LT_SCALE_STATIC
} lt_scale_policy;

enum {
    LT_SCALE_LOW = -14, /* of k: the gradient that backward begins with, 1, is then still a normal
                         * number of f16 (they end at 2^-14), as precise as any */
    LT_SCALE_HIGH = 24, /* brings the smallest number of f16, 2^-24, up to 1. More would cost range
                         * for what is smaller still beside gradients of 1 and above */
    LT_NO_EXPONENT = -10000 /* that of a step whose gradients are all zero */
};

typedef struct lt_scaler { /* all of it is to be saved with a training */
    lt_scale_policy policy;
    int k;
    int interval;          /* see above; */
    int good;              /* so many of such steps there were in a row, */
    int spare;             /* adaptive: and the least bits to spare that they had */
    int since;             /* steps since the last growth, counted up to 2000 */
    int64_t steps, skipped; /* so far; of these, */
    int64_t in_a_row;      /* skipped by now without a break; */
    int at_floor;          /* of those, the ones whose scale could not have been lower */
    double mean, variance; /* adaptive: of exponents of true gradients, in the last steps */
    double old_mean, old_variance; /* weights of steps before the first in these: 1 at first */
} lt_scaler;

/* Begins with a scale of 2^k. interval: that of dynamic; 0: 2000. */
LT_API lt_scaler lt_scaler_init(lt_scale_policy policy, int k, int interval);
/* LT_EINVAL, with the name of what is out of its range: such a state comes of no history. */
LT_MUST lt_status lt_scaler_check(const lt_scaler *scaler);
/* What came of a step whose loss was multiplied by 2^k: the largest magnitude of its gradients, of
 * those that are finite, was in [2^exponent, 2^(exponent + 1)), with the scale still in it; finite:
 * all were. Moves k. Returns whether the step is to be applied; else it is to be skipped. */
LT_API bool lt_scaler_update(lt_scaler *scaler, int exponent, bool finite);

/* ==== The scale in use ======================================================================== */

/* Ten skipped steps in a row whose scale could not have been lower, as it was static or 2^-14, end
 * the training with LT_ENUMERIC: no scale helps. In the last of them what ops make is looked at,
 * and the message says which was the first to make a number that is not finite, where, and whether
 * because of f16. So does a backward whose loss is not finite, at once, as far as that can be told
 * from what is kept for it. Of several ranks one that has such a number says it: others go on until
 * the failure reaches them.
 *
 * Backward's first gradient is multiplied by the scale, and the gradient of each leaf divided by it
 * as soon as it is complete, before its hooks are called: all others see true gradients. The scale
 * is the same in all backwards of a step. An optimizer's step asks the scaler: when the gradient of
 * a parameter is not finite that an optimizer had in backward, whichever, as its hooks have left
 * it, and it was not forgotten since, the steps of all optimizers until the next backward are
 * skipped. They leave weights, slots and running statistics as they were. Of several ranks the
 * others may have heard of it in backward already: then it counts, forgotten or not. On an
 * accelerator it is decided there, see lt_synchronize(). */
typedef struct lt_loss_scale lt_loss_scale;

/* Not in use yet; scaler is copied. New. */
LT_API lt_loss_scale *lt_loss_scale_new(lt_ctx *ctx, const lt_scaler *scaler);
/* Once it is no longer in use. NULL is fine. */
LT_API void lt_loss_scale_free(lt_loss_scale *scale);
/* From the next backward in ctx on; NULL: none. LT_EINVAL within a backward. */
LT_MUST lt_status lt_use_loss_scale(lt_ctx *ctx, lt_loss_scale *scale);
/* For reading, saving and putting back between steps. Borrowed. A decision that is pending is
 * waited for, see lt_synchronize(), as in all that follows. */
LT_API lt_scaler *lt_loss_scale_scaler(lt_loss_scale *scale);

typedef struct lt_scaled_step { /* one that was decided on */
    int k;               /* its scale was 2^k */
    int exponent;        /* of its largest finite gradient, scaled, or LT_NO_EXPONENT: 15 less this
                          * are the bits it had to spare */
    bool finite;         /* and applied */
    int64_t number;      /* steps up to it, as in lt_scaler; */
    int64_t skipped;     /* of these */
} lt_scaled_step;
/* The last one. */
LT_API lt_scaled_step lt_loss_scale_step(lt_loss_scale *scale);
/* The number of the last one that was asked for, which is not waited for. */
LT_API int64_t lt_loss_scale_latest(const lt_loss_scale *scale);
/* That of this number, if it is one of the last eight; else the last one. */
LT_API lt_scaled_step lt_loss_scale_step_at(lt_loss_scale *scale, int64_t number);

/* ==== Several ranks =========================================================================== */

/* They have to decide alike, so each tells the others what it has found: some whole numbers go with
 * each bucket of gradients and come back as sums over the ranks. What comes back replaces what a
 * rank has found itself. In dist these functions are at home in a bucket filter: measure() has
 * lt_loss_scale_last(), pack() tells, unpack() hears, done() agrees. */
enum {
    LT_EXPONENT_LOW = -40, LT_EXPONENT_HIGH = 80, /* that can be told */
    LT_EXPONENTS = LT_EXPONENT_HIGH - LT_EXPONENT_LOW + 1,
    LT_SCALE_NUMBERS = 1 + LT_EXPONENTS
};
/* What was found in the gradient that was completed last, as its hooks have left it: it is true.
 * On the rank's thread. */
LT_API lt_grad_stats lt_loss_scale_last(const lt_loss_scale *scale);
/* What this rank has found in a bucket, in true gradients of the step. numbers (LT_SCALE_NUMBERS)
 * are 0. */
LT_API void lt_loss_scale_pack(lt_loss_scale *scale, const lt_grad_stats *stats, float *numbers);
/* Buckets are going to be heard, from the first on: those of before count no more. */
LT_API void lt_loss_scale_start(lt_loss_scale *scale);
/* The sums. */
LT_API void lt_loss_scale_unpack(lt_loss_scale *scale, const float *numbers);
/* All buckets were heard; before an optimizer asks, as in lt_grad_slots.update. */
LT_API void lt_loss_scale_finish(lt_loss_scale *scale);

/* Where a bucket travels in f16, with or without a loss scale, it does so multiplied by 2^exponent,
 * which leaves 2 bits for gradients that grow from step to step. If they have grown more, or have
 * shrunk by more than 12, that shows in numbers that go with the bucket, and it is to be sent
 * again: overflow on the wire costs no step and moves no scale. */
enum {
    LT_WIRE_SCALE_LOW = -120,
    LT_WIRE_SCALE_HIGH = 100, /* of f32, with bits to spare for shares: true gradients
                               * below 2^-112 or so become 0 on their way */
    LT_WIRE_SCALE_NUMBERS = LT_EXPONENTS,
    LT_WIRE_SCALES = 256
};
typedef struct lt_wire_scales {    /* all of it is to be saved with a training */
    int exponent[LT_WIRE_SCALES];  /* of a bucket; those beyond share it with others */
    int used;                /* the first so many, by now */
    int64_t resends;      /* buckets, so far */
} lt_wire_scales;
LT_API lt_wire_scales lt_wire_scales_init(void);
/* The exponent for a bucket, in which this rank has true gradients up to `largest`, of those that
 * are finite. numbers (LT_WIRE_SCALE_NUMBERS) are 0. */
LT_API int lt_wire_scales_pack(const lt_wire_scales *wires, int bucket, double largest,
                               float *numbers);
/* The sums. True: the bucket is to be sent again, as it may have overflowed, or underflowed more
 * than it has to. */
LT_API bool lt_wire_scales_unpack(lt_wire_scales *wires, int bucket, const float *numbers);

/* ==== What half precision does to a pass ====================================================== */

/* A pass, forward and backward, is gone through twice, in half precision and in f32, and each
 * tensor that an op makes is compared. Both are dry runs, see lt_dry_run_begin(): the training
 * does not change by them, and both draw the same random numbers as the pass that follows. Until
 * the second is over, what ops make in the first is kept.
 *
 *     lt_precision_check_begin(check, k, false);
 *     forward and backward
 *     lt_precision_check_end(check);
 *     and the same with true
 */
typedef struct lt_precision_check lt_precision_check;

/* New. */
LT_API lt_precision_check *lt_precision_check_new(lt_ctx *ctx);
LT_API void lt_precision_check_free(lt_precision_check *check); /* NULL is fine */
/* Backward begins with 2^k times the gradient that it is given: the loss scale in use, or k = 0.
 * The first pass is computed as lt_autocast() says; the second without autocast. The first forgets
 * what was found before. LT_EINVAL as in lt_dry_run_begin(). */
LT_MUST lt_status lt_precision_check_begin(lt_precision_check *check, int k, bool second);
/* Follows each begin that came well, whatever happens in between. LT_ENOMEM, or why something could
 * not be compared. */
LT_MUST lt_status lt_precision_check_end(lt_precision_check *check);
/* That of the first pass; LT_F32: nothing was computed in a half. */
LT_API lt_dtype lt_precision_check_half(const lt_precision_check *check);

typedef struct lt_precision {    /* of one tensor, over its numbers that are not 0 in f32 */
    const char *where, *op;      /* as lt_op_hook_fn has it, "train.lua:9: net.4 "; "conv2d".
                                  * Borrowed, as `of` is, until the next begin */
    const char *of;              /* the input whose gradient this is; NULL: it is an output */
    bool leaf;                   /* that input is a leaf, as parameters are */
    int64_t count;               /* such numbers */
    int64_t underflows;          /* that are 0 in the half, and in f32 below its smallest normal
                                  * number: others are 0 for what they were computed from */
    int64_t overflows;           /* that are not finite in the half */
    double norm, error;          /* of the rest: |f32|, a 2-norm, and |half - f32| / |f32| */
} lt_precision;
/* Number i of the tensors that were compared, in the order of the first pass; false past the
 * last. Those that only one of the passes has are left out, and so are results of cast, views,
 * and gradients that are handed on as they are. */
LT_API bool lt_precision_check_row(const lt_precision_check *check, int i, lt_precision *row);

#ifdef __cplusplus
}
#endif
#endif
