/* loss.h - the formulas of softmax, cross_entropy and mse_loss, for the CPU (softmax.c, loss.c) and
 * for CUDA (softmax.cu, loss.cu). */
#ifndef LT_OPS_LOSS_H
#define LT_OPS_LOSS_H

#include "ops/kernel.h"

/* e^x for x <= 0, within 2 ulp, by plain arithmetic that compilers vectorise: 2^k e^r with
 * |r| <= ln(2) / 2 and the series of e^r to r^7. Where f32 has no normal number it is 0; a NaN
 * stays one. */
LT_BOTH LT_INLINE float lt__exp_f32(float x)
{
    const float lowest = -87.3f, round = 12582912.0f; /* 1.5 * 2^23: its last bit is worth 1 */
    const float ln2_high = 0x1.63p-1f, ln2_low = -0x1.bd0106p-13f;
    union { float f; uint32_t u; } k, power;
    float t = x < lowest ? lowest : x;
    k.f = t * 1.44269504f + round;
    power.u = (k.u + 127u) << 23;
    float whole = k.f - round, r = t - whole * ln2_high - whole * ln2_low;
    float series = 1.0f / 720 + r * (1.0f / 5040);
    series = 1.0f / 24 + r * (1.0f / 120 + r * series);
    series = 1.0f + r * (1.0f + r * (0.5f + r * (1.0f / 6 + r * series)));
    return x < lowest ? 0.0f : series * power.f;
}

/* sum: of dy y, or of dy; total: of exp(x - largest). */
#define LT_SOFTMAX_BACK(dy, y, sum) ((y) * ((dy) - (sum)))
#define LT_LOG_SOFTMAX(x, largest, log_total) ((x) - (largest) - (log_total))
#define LT_LOG_SOFTMAX_BACK(dy, exp_y, sum) ((dy) - (exp_y) * (sum))

/* The loss of a row: of its sums of exp(x - largest) and of x - largest, and of x - largest at its
 * label. */
LT_BOTH static inline double lt__row_loss(double exps, double offsets, double offset,
                                          double label_smoothing, int64_t classes)
{
    if (label_smoothing > 0) /* else a class that is ruled out by -inf would give NaN */
        offset = (1 - label_smoothing) * offset + label_smoothing * offsets / (double)classes;
    return log(exps) - offset;
}

/* What the gradient of a row is made of: (p - q) g / rows = exp(x - largest) factor + shift, and at
 * its label less by `hit`. inverse: 1 / sum exp(x - largest). */
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

/* Of n pairs; g: the gradient of their mean. */
LT_BOTH static inline double lt__mse_factor(double g, int64_t n) { return 2.0 * g / (double)n; }

#endif
