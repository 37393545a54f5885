/* update.h - how each optimizer updates a weight, for the CPU (update.c) and CUDA (update.cu): the
 * positions of the ops' options, the numbers computed from them, and the steps.
 *
 * LT_..._NUMBERS(N) is a list of rows N(type, name, value): the variables that LT_..._STEP uses by
 * name, as formulas of the call c. Kernels also multiply `scale` by the clipping factor,
 * lt_call.factor, if there is one. The arguments w, g, v and m of a step are lvalues of type T: the
 * weight, its gradient and its slots.
 */
#ifndef LT_OPS_UPDATE_H
#define LT_OPS_UPDATE_H

#include "ops/kernel.h"

enum { LT_UPDATE_W, LT_UPDATE_G, LT_UPDATE_SLOT, LT_UPDATE_SLOT2 }; /* inputs */

enum { LR }; /* the first option of every update op */
enum { SGD_WEIGHT_DECAY = 1, SGD_SCALE };
enum { MOMENTUM = 1, NESTEROV, MOMENTUM_WEIGHT_DECAY, MOMENTUM_SCALE };
enum { LARS_MOMENTUM = 1, LARS_WEIGHT_DECAY, TRUST, LARS_EPS, ADAPT, LARS_SCALE };
enum { STEP = 1, BETA1, BETA2, ADAM_EPS, ADAM_WEIGHT_DECAY, DECOUPLED, ADAM_SCALE };

/* ==== Helpers of update.c and delay.c, on the CPU ============================================ */

enum { LT_UPDATE_BLOCK = 16384 }; /* elements */

/* LT_EINVAL unless all inputs 0..n-1 that are present have one float dtype and the same number of
 * elements as input 0. */
lt_status lt__check_arenas(const lt_call *c, int n);
/* Checks the options. ranges has a character for each of the first ones:
 *   +  at least 0
 *   1  from 0 to 1
 *   <  at least 0 and below 1
 *   >  above 0 and at most 1
 *   n  an integer, at least 0
 *   s  the step: an integer, at least 1, which must be given
 *   .  any value */
lt_status lt__check_ranges(const lt_call *c, const char *ranges);
/* Checks the options, then all inputs with lt__check_arenas(). */
lt_status lt__check_update(const lt_call *c, const char *ranges);
/* Runs block over all elements of input 0. Each element is updated independently, so the result
 * does not depend on how they are divided into blocks. */
lt_status lt__for_blocks(lt_call *c, void (*block)(const lt_call *c, int64_t first, int64_t n));
/* The factor of the gradients from clipping, or 1. */
static inline double lt__grad_factor(const lt_call *c) { return c->factor ? *c->factor : 1; }

/* The square root of a float or a double. */
#define LT_SQRT(x) _Generic((x), float : sqrtf, double : sqrt)(x)

/* Defines name(c), which runs `step` for each element i. The other arguments declare arrays with
 * LT_ARRAY, and apply the factor of the gradients with LT_CLIP. Arrays may be the same tensor. */
#define LT_UPDATE(name, numbers, step, ...)                                                        \
    LT_SIMD static void name##_block(const lt_call *c, int64_t first, int64_t n)                   \
    {                                                                                              \
        LT_FLOATS(                                                                                 \
            c->in[0]->dtype, T, numbers(LT_DECLARE) __VA_ARGS__ LT_IVDEP                           \
            for (int64_t i = 0; i < n; i++) { step });       \
    }                                                                                              \
    static lt_status name(lt_call *c) { return lt__for_blocks(c, name##_block); }
#define LT_DECLARE(type, name, value) type name = (type)(value);
#define LT_ARRAY(name, input) T *name = (T *)c->in[input]->data + first;
#define LT_CLIP scale *= (T)lt__grad_factor(c);

/* ==== Numbers and steps ====================================================================== */

#define LT_SGD_NUMBERS(N)                                                                          \
    N(T, lr, lt__number(c, LR))                                                                    \
    N(T, weight_decay, lt__number(c, SGD_WEIGHT_DECAY))                                            \
    N(T, scale, lt__number(c, SGD_SCALE))

#define LT_SGD_STEP(w, g) w -= lr * (g * scale + weight_decay * w);

#define LT_MOMENTUM_NUMBERS(N)                                                                     \
    N(bool, nesterov, lt__flag(c, NESTEROV))                                                       \
    N(T, lr, lt__number(c, LR))                                                                    \
    N(T, momentum, lt__number(c, MOMENTUM))                                                        \
    N(T, weight_decay, lt__number(c, MOMENTUM_WEIGHT_DECAY))                                       \
    N(T, scale, lt__number(c, MOMENTUM_SCALE))

#define LT_MOMENTUM_STEP(w, g, v)                                                                  \
    T d = g * scale + weight_decay * w;                                                            \
    v = momentum * v + d;                                                                          \
    w -= lr * (nesterov ? d + momentum * v : v);

#define LT_LARS_NUMBERS(N)                                                                         \
    N(T, lr, lt__number(c, LR))                                                                    \
    N(T, momentum, lt__number(c, LARS_MOMENTUM))                                                   \
    N(T, weight_decay, lt__number(c, LARS_WEIGHT_DECAY))                                           \
    N(T, scale, lt__number(c, LARS_SCALE))

#define LT_LARS_STEP(w, g, v, ratio)                                                               \
    v = momentum * v + ratio * (g * scale + weight_decay * w);                                     \
    w -= lr * v;

/* The trust ratio of LARS. w: the norm of the parameter; g: the norm of its scaled gradient. */
LT_BOTH static inline double lt__lars_ratio(double w, double g, double trust, double weight_decay,
                                            double eps)
{
    return w == 0 || g == 0 ? 1 /* else weights that start at 0 would stay 0 */
                            : trust * w / (g + weight_decay * w + eps);
}

#define LT_ADAM_NUMBERS(N)                                                                         \
    N(T, scale, lt__number(c, ADAM_SCALE))                                                         \
    N(T, keep,                                                                                     \
      lt__flag(c, DECOUPLED) ? 1 - lt__number(c, LR) * lt__number(c, ADAM_WEIGHT_DECAY) : 1)       \
    N(T, coupled, lt__flag(c, DECOUPLED) ? 0 : lt__number(c, ADAM_WEIGHT_DECAY))                   \
    N(T, new1, 1 - lt__number(c, BETA1))                                                           \
    N(T, old2, lt__number(c, BETA2))                                                               \
    N(T, new2, 1 - lt__number(c, BETA2))                                                           \
    N(T, step_size, lt__number(c, LR) / (1 - pow(lt__number(c, BETA1), lt__number(c, STEP))))      \
    N(T, unbias, sqrt(1 - pow(lt__number(c, BETA2), lt__number(c, STEP))))                         \
    N(T, eps, lt__number(c, ADAM_EPS))

/* root: a function that returns the square root of a T. */
#define LT_ADAM_STEP(w, g, m, v, root)                                                             \
    T kept = w * keep;                                                                             \
    T d = g * scale + coupled * kept;                                                              \
    m += new1 * (d - m);                                                                           \
    v = v * old2 + new2 * d * d;                                                                   \
    w = kept - step_size * m / (root(v) / unbias + eps);

#endif
