/* loss.h - the formulas of softmax, log_softmax, cross_entropy and mse_loss, for the CPU
 * (softmax.c, loss.c) and CUDA (softmax.cu, loss.cu). */
#ifndef LT_OPS_LOSS_H
#define LT_OPS_LOSS_H

#include "ops/kernel.h"

/* e^x for x <= 0, within 2 ulp, in plain arithmetic that compilers can vectorise: 2^k e^r, with the
 * Taylor series of e^r up to r^7 for |r| <= ln(2) / 2. For x < -87.3, where results are near the
 * smallest normal f32 or below, returns 0. NaN gives NaN. */
LT_BOTH LT_INLINE float lt__exp_f32(float x)
{
    const float lowest = -87.3f, round = 12582912.0f; /* 1.5 * 2^23, whose ulp is 1 */
    const float ln2_high = 0x1.63p-1f, ln2_low = -0x1.bd0106p-13f;
    union {
        float f;
        uint32_t u;
    } k, power;
    float t = x < lowest ? lowest : x;
    k.f = t * 1.44269504f + round;
    power.u = (k.u + 127u) << 23;
    float whole = k.f - round, r = t - whole * ln2_high - whole * ln2_low;
    float series = 1.0f / 720 + r * (1.0f / 5040);
    series = 1.0f / 24 + r * (1.0f / 120 + r * series);
    series = 1.0f + r * (1.0f + r * (0.5f + r * (1.0f / 6 + r * series)));
    return x < lowest ? 0.0f : series * power.f;
}

/* dx of softmax, y of log_softmax, and dx of log_softmax. sum: the sum over the row of dy * y for
 * softmax, of dy for log_softmax. largest: the largest x of the row. log_total: the log of the sum
 * of exp(x - largest). */
#define LT_SOFTMAX_BACK(dy, y, sum) ((y) * ((dy) - (sum)))
#define LT_LOG_SOFTMAX(x, largest, log_total) ((x) - (largest) - (log_total))
#define LT_LOG_SOFTMAX_BACK(dy, exp_y, sum) ((dy) - (exp_y) * (sum))

/* The cross-entropy of a row. exps and offsets: the sums over the row of exp(x - largest) and of
 * x - largest. offset: x - largest at the row's label. */
LT_BOTH static inline double lt__row_loss(double exps, double offsets, double offset,
                                          double label_smoothing, int64_t classes)
{
    if (label_smoothing > 0) /* not for 0: a class with x = -inf would give NaN */
        offset = (1 - label_smoothing) * offset + label_smoothing * offsets / (double)classes;
    return log(exps) - offset;
}

/* The gradient of a row of cross_entropy is g * (p - q), with p the probabilities and q the
 * smoothed labels. It is computed as exp(x - largest) * factor + shift, minus `hit` at the label.
 * g: the gradient of the mean loss, divided by the number of rows. inverse: 1 divided by the sum of
 * exp(x - largest). */
typedef struct lt_row_gradient {
    double factor, shift, hit;
} lt_row_gradient;

LT_BOTH static inline lt_row_gradient lt__row_gradient(double g, double inverse,
                                                       double label_smoothing, int64_t classes)
{
    lt_row_gradient r = {g * inverse, -g * label_smoothing / (double)classes,
                         g * (1 - label_smoothing)};
    return r;
}

/* dx of mse_loss is this factor times x - y. n: number of elements; g: the gradient of the loss. */
LT_BOTH static inline double lt__mse_factor(double g, int64_t n) { return 2.0 * g / (double)n; }

#endif
