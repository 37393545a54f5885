/* delay.h - how asynchronous training corrects delayed gradients and updates weights with them, for
 * the CPU (delay.c) and CUDA (delay.cu): the positions of inputs and options, the numbers computed
 * from the options, and the steps for one element, as in update.h.
 *
 * A worker computed the gradient g at the weights `backup`. Since then the gradients of other
 * workers have changed the weights to w. Where w equals backup, there is nothing to correct, and
 * the bits of g do not change.
 */
#ifndef LT_OPS_DELAY_H
#define LT_OPS_DELAY_H

#include "ops/update.h"

/* root: a function that returns the square root of a T. */

/* ==== dc_grad ================================================================================= */

enum { LT_DC_G, LT_DC_W, LT_DC_BACKUP, LT_DC_MS }; /* inputs */
enum { DC_LAM, DC_RHO, DC_ADAPTIVE, DC_WEIGHT_DECAY };

#define LT_DC_EPS 1e-7 /* added to a mean square before its root is taken */

#define LT_DC_NUMBERS(N)                                                                           \
    N(T, lam, lt__number(c, DC_LAM))                                                               \
    N(T, weight_decay, lt__number(c, DC_WEIGHT_DECAY))

#define LT_DC_ADAPTIVE_NUMBERS(N)                                                                  \
    LT_DC_NUMBERS(N)                                                                               \
    N(T, rho, lt__number(c, DC_RHO))                                                               \
    N(T, one_minus_rho, 1 - lt__number(c, DC_RHO))

#define LT_DC_STEP(g, w, backup)                                                                   \
    T d = g + weight_decay * w;                                                                    \
    g = w == backup ? g : g + lam * (d * d) * (w - backup);

#define LT_DC_ADAPTIVE_STEP(g, w, backup, ms, root)                                                \
    T d = g + weight_decay * w;                                                                    \
    ms = rho * ms + one_minus_rho * (d * d);                                                       \
    g = w == backup ? g : g + lam / root(ms + (T)LT_DC_EPS) * (d * d) * (w - backup);

/* ==== gap_grad ================================================================================ */

enum { LT_GAP_G, LT_GAP_W, LT_GAP_BACKUP, LT_GAP_V, LT_GAP_MS }; /* inputs */
enum { GAP_LR, GAP_CORRECTION, GAP_RHO, GAP_WEIGHT_DECAY };

#define LT_GAP_NUMBERS(N)                                                                          \
    N(T, lr, lt__number(c, GAP_LR))                                                                \
    N(T, correction, lt__number(c, GAP_CORRECTION))                                                \
    N(T, rho, lt__number(c, GAP_RHO))                                                              \
    N(T, one_minus_rho, 1 - lt__number(c, GAP_RHO))                                                \
    N(T, weight_decay, lt__number(c, GAP_WEIGHT_DECAY))

/* v may be g itself, so it is read first. */
#define LT_GAP_STEP(g, w, backup, v, ms, root)                                                     \
    ms = rho * ms + one_minus_rho * (v * v);                                                       \
    T gap = w > backup ? w - backup : backup - w;                                                  \
    T penalty = 1 + gap / (lr * root(ms / correction) + (T)1e-8);                                  \
    g = w == backup ? g : (g + weight_decay * w) / penalty - weight_decay * w;

/* ==== ddc_step ================================================================================ */

enum { LT_DDC_W, LT_DDC_G, LT_DDC_V, LT_DDC_S, LT_DDC_BACKUP, LT_DDC_STATS }; /* inputs */
enum { DDC_LR, DDC_MOMENTUM, DDC_WEIGHT_DECAY, DDC_R, DDC_Q, DDC_LAM, DDC_CAP, DDC_RHO };

enum { LT_DDC_N_STATS = 3 }; /* elements of stats */

/* The numbers of LT_DDC_COMPENSATION. `scale` becomes the clipping factor, as in update.h. */
#define LT_DDC_COMPENSATION_NUMBERS(N)                                                             \
    N(T, lam, lt__number(c, DDC_LAM))                                                              \
    N(T, rho, lt__number(c, DDC_RHO))                                                              \
    N(T, one_minus_rho, 1 - lt__number(c, DDC_RHO))                                                \
    N(T, scale, 1)

#define LT_DDC_NUMBERS(N)                                                                          \
    LT_DDC_COMPENSATION_NUMBERS(N)                                                                 \
    N(T, lr, lt__number(c, DDC_LR))                                                                \
    N(T, momentum, lt__number(c, DDC_MOMENTUM))                                                    \
    N(T, weight_decay, lt__number(c, DDC_WEIGHT_DECAY))                                            \
    N(T, r, lt__number(c, DDC_R))                                                                  \
    N(T, q, lt__number(c, DDC_Q))

/* Declares scaled, the gradient after clipping; mean, the new value of s; and compensation, before
 * it is limited. */
#define LT_DDC_COMPENSATION(w, g, s, backup, root)                                                 \
    T scaled = g * scale;                                                                          \
    T mean = rho * s + one_minus_rho * (scaled * scaled);                                          \
    T compensation =                                                                               \
        w == backup ? 0 : lam * (scaled * scaled) * (w - backup) / root(mean + (T)LT_DC_EPS);

/* limit: the result of lt__ddc_limit(). If w == backup, r == 1 and q == 1, the arithmetic is that
 * of LT_MOMENTUM_STEP. */
#define LT_DDC_STEP(w, g, v, s, backup, limit, root)                                               \
    LT_DDC_COMPENSATION(w, g, s, backup, root)                                                     \
    T compensated = w == backup ? scaled : scaled + limit * compensation;                          \
    T d = q * (compensated + weight_decay * w);                                                    \
    T velocity = momentum * v + d;                                                                 \
    s = mean;                                                                                      \
    v = momentum * v + r * d;                                                                      \
    w -= lr * velocity;

/* The factor that limits the compensation, whose norm is c, to cap times the norm g of the
 * gradient. NaN if a norm is NaN. */
LT_BOTH static inline double lt__ddc_limit(double c, double g, double cap)
{
    double limit = cap * g / (c + 1e-7);
    return c == 0 || limit >= 1 ? 1 : limit;
}

/* The norm of the limited compensation, relative to the norm of the gradient. */
LT_BOTH static inline double lt__ddc_ratio(double c, double g, double limit)
{
    return g == 0 ? 0 : limit * c / g;
}

/* ==== ordered_step ============================================================================ */

enum { ORDERED_LR, ORDERED_MOMENTUM, ORDERED_WEIGHT_DECAY, LATE, OPENS };

/* The sum of lr momentum^j for j = 0..late. If the gradient had not been late, v would have moved w
 * by that much of it. */
static inline double lt__late_lr(double lr, double momentum, double late)
{
    return lr * ((1 - pow(momentum, late + 1)) / (1 - momentum));
}

/* late_decay: how much of a gradient is left in v after `late` more momentum buckets. */
#define LT_ORDERED_NUMBERS(N)                                                                      \
    N(bool, opens, lt__flag(c, OPENS))                                                             \
    N(T, lr, lt__number(c, ORDERED_LR))                                                            \
    N(T, momentum, lt__number(c, ORDERED_MOMENTUM))                                                \
    N(T, weight_decay, lt__number(c, ORDERED_WEIGHT_DECAY))                                        \
    N(T, late_decay, pow(lt__number(c, ORDERED_MOMENTUM), lt__number(c, LATE)))                    \
    N(T, late_lr,                                                                                  \
      lt__late_lr(lt__number(c, ORDERED_LR), lt__number(c, ORDERED_MOMENTUM),                      \
                  lt__number(c, LATE)))                                                            \
    N(T, scale, 1)

#define LT_ORDERED_STEP(w, g, v)                                                                   \
    T d = g * scale + weight_decay * w;                                                            \
    T old = opens ? momentum * v : v;                                                              \
    T moved = opens ? w - lr * old : w;                                                            \
    v = old + late_decay * d;                                                                      \
    w = moved - late_lr * d;

#endif
