/* window.h - the geometry of a kernel that slides over an image, for conv2d and the pools.
 *
 * Arrays of two are (height, width). Output o and tap k of an axis meet input
 * o * stride - pad + k * dilation, or padding when that is outside [0, in).
 */
#ifndef LT_OPS_WINDOW_H
#define LT_OPS_WINDOW_H

#include "ops/kernel.h"

typedef struct lt_window {
    int64_t in[2], out[2], kernel[2], stride[2], pad[2], dilation[2];
} lt_window;

/* Fills w->in from x (n, h, w, c), and w->out; the rest is set and at least 1 (pad: 0). LT_EINVAL
 * when no output fits. */
static inline lt_status lt__window_fit(lt_window *w, const lt_tensor *x)
{
    bool fits = true;
    for (int i = 0; i < 2; i++) {
        int64_t reach;
        w->in[i] = x->dims[1 + i];
        if (w->pad[i] > INT32_MAX)
            return lt_fail(LT_EINVAL, "pad wants at most %d, it is %lld", INT32_MAX,
                           (lt_ll)w->pad[i]);
        int64_t free = w->in[i] + 2 * w->pad[i] - 1;
        if (__builtin_mul_overflow(w->kernel[i] - 1, w->dilation[i], &reach) || reach > free)
            fits = false;
        else
            w->out[i] = (free - reach) / w->stride[i] + 1;
    }
    if (fits)
        return LT_OK;
    return lt_fail(LT_EINVAL,
                   "the kernel, %lldx%lld with dilation %lldx%lld, is larger than x padded to "
                   "%lldx%lld (x %s, pad %lldx%lld)",
                   (lt_ll)w->kernel[0], (lt_ll)w->kernel[1], (lt_ll)w->dilation[0],
                   (lt_ll)w->dilation[1], (lt_ll)(x->dims[1] + 2 * w->pad[0]),
                   (lt_ll)(x->dims[2] + 2 * w->pad[1]), LT_TEXT(x), (lt_ll)w->pad[0],
                   (lt_ll)w->pad[1]);
}

/* The input that output o and tap k meet; it may be outside. */
static inline int64_t lt__window_in(const lt_window *w, int axis, int64_t o, int64_t k)
{
    return o * w->stride[axis] - w->pad[axis] + k * w->dilation[axis];
}

/* The output whose tap k meets input i, or -1. */
static inline int64_t lt__window_out(const lt_window *w, int axis, int64_t i, int64_t k)
{
    int64_t at = i + w->pad[axis] - k * w->dilation[axis];
    if (at < 0 || at % w->stride[axis] != 0 || at / w->stride[axis] >= w->out[axis])
        return -1;
    return at / w->stride[axis];
}

/* The outputs [*first, *end) whose tap k meets an input inside. */
static inline void lt__window_range(const lt_window *w, int axis, int64_t k, int64_t *first,
                                    int64_t *end)
{
    int64_t stride = w->stride[axis], shift = w->pad[axis] - k * w->dilation[axis];
    int64_t past = w->in[axis] + shift;
    *first = shift > 0 ? (shift - 1) / stride + 1 : 0;
    *end = past > 0 ? (past - 1) / stride + 1 : 0;
    if (*end > w->out[axis])
        *end = w->out[axis];
    if (*first > *end)
        *first = *end;
}

#endif
