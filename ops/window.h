/* window.h - the geometry of a window that slides over an image, for conv2d and pooling, on the CPU
 * and CUDA.
 *
 * Arrays of two are (height, width). A tap is one position in the window. Along an axis, tap k of
 * output o reads input o * stride - pad + k * dilation, or padding if that is outside [0, in).
 */
#ifndef LT_OPS_WINDOW_H
#define LT_OPS_WINDOW_H

#include "ops/kernel.h"

typedef struct lt_window {
    int64_t in[2], out[2], kernel[2], stride[2], pad[2], dilation[2];
} lt_window;

/* value = option k, one integer for both or (height, width). Does not check it: the shape rule has
 * done so with lt__pair(). */
static inline void lt__pair_of(const lt_call *c, int k, int64_t value[2])
{
    value[0] = c->opt[k].i[0];
    value[1] = c->opt[k].n > 1 ? c->opt[k].i[1] : value[0];
}

#ifndef __cplusplus
/* LT_EINVAL if the value of option `name` exceeds INT32_MAX. */
static inline lt_status lt__window_limit(const char *name, int64_t value)
{
    return value <= INT32_MAX ? LT_OK
                              : lt_fail(LT_EINVAL, "%s must be at most %d, but is %lld", name,
                                        INT32_MAX, (lt_ll)value);
}

/* Computes w->in, from x (n, h, w, c), and w->out. The caller sets all other members first, each to
 * at least 1 (pad: at least 0). LT_EINVAL if the window is larger than the padded image, or if pad,
 * stride or dilation is so large that offsets could overflow. */
static inline lt_status lt__window_fit(lt_window *w, const lt_tensor *x)
{
    bool fits = true;
    for (int i = 0; i < 2; i++) {
        int64_t reach;
        w->in[i] = x->dims[1 + i];
        LT_TRY(lt__window_limit("pad", w->pad[i]));
        int64_t free = w->in[i] + 2 * w->pad[i] - 1;
        if (__builtin_mul_overflow(w->kernel[i] - 1, w->dilation[i], &reach) || reach > free)
            fits = false;
        else
            w->out[i] = (free - reach) / w->stride[i] + 1;
    }
    for (int i = 0; i < 2 && fits; i++) {
        LT_TRY(lt__window_limit("stride", w->stride[i]));
        LT_TRY(lt__window_limit("dilation", w->dilation[i]));
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
#endif

/* The input that tap k of output o reads. It may be outside the image. */
LT_BOTH static inline int64_t lt__window_in(const lt_window *w, int axis, int64_t o, int64_t k)
{
    return o * w->stride[axis] - w->pad[axis] + k * w->dilation[axis];
}

/* The output whose tap k reads input i, or -1 if there is none. */
LT_BOTH static inline int64_t lt__window_out(const lt_window *w, int axis, int64_t i, int64_t k)
{
    int64_t at = i + w->pad[axis] - k * w->dilation[axis];
    if (at < 0 || at % w->stride[axis] != 0 || at / w->stride[axis] >= w->out[axis])
        return -1;
    return at / w->stride[axis];
}

/* The outputs [*first, *end) whose tap k is inside the image. */
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

/* ==== Convolutions ============================================================================ */

enum { LT_CONV_STRIDE, LT_CONV_PAD, LT_CONV_DILATION, LT_CONV_GROUPS }; /* options of conv2d */

typedef struct lt_conv {
    lt_window window;
    int64_t n, in, out, groups; /* images; channels of x; channels of y */
} lt_conv;

/* The convolution of a call of conv2d, which the shape rule has checked. x, w and y: the tensors,
 * or their gradients. */
static inline lt_conv lt__conv_of(const lt_call *c, const lt_tensor *x, const lt_tensor *w,
                                  const lt_tensor *y)
{
    lt_conv v;
    lt__pair_of(c, LT_CONV_STRIDE, v.window.stride);
    lt__pair_of(c, LT_CONV_PAD, v.window.pad);
    lt__pair_of(c, LT_CONV_DILATION, v.window.dilation);
    for (int i = 0; i < 2; i++) {
        v.window.in[i] = x->dims[1 + i];
        v.window.out[i] = y->dims[1 + i];
        v.window.kernel[i] = w->dims[1 + i];
    }
    v.n = x->dims[0];
    v.in = x->dims[3];
    v.out = w->dims[0];
    v.groups = c->opt[LT_CONV_GROUPS].i[0];
    return v;
}

/* ==== Pooling windows, which have no dilation ================================================= */

typedef struct lt_extent {
    int64_t first, end;
} lt_extent;

/* The taps of output o that are inside the image. There is at least one, because pad is at most
 * half the kernel. */
LT_BOTH static inline lt_extent lt__window_taps(const lt_window *w, int axis, int64_t o)
{
    int64_t at = o * w->stride[axis] - w->pad[axis], left = w->in[axis] - at;
    lt_extent taps = {at < 0 ? -at : 0, w->kernel[axis] < left ? w->kernel[axis] : left};
    return taps;
}

/* The outputs whose windows contain input i. */
LT_BOTH static inline lt_extent lt__window_outputs(const lt_window *w, int axis, int64_t i)
{
    int64_t at = i + w->pad[axis], before = at - w->kernel[axis], last = at / w->stride[axis];
    lt_extent outputs = {before < 0 ? 0 : before / w->stride[axis] + 1,
                         w->out[axis] < last + 1 ? w->out[axis] : last + 1};
    return outputs;
}

/* The row-major index of the tap of output (oh, ow) that reads input (ih, iw). */
LT_BOTH static inline int64_t lt__window_tap(const lt_window *w, int64_t ih, int64_t iw, int64_t oh,
                                             int64_t ow)
{
    return (ih + w->pad[0] - oh * w->stride[0]) * w->kernel[1] + iw + w->pad[1] - ow * w->stride[1];
}

/* Whether v replaces `max`, the maximum so far. A NaN replaces any number and is never replaced.
 * Among equal values, the first one stays. */
#define LT_IS_GREATER(v, max) (!((v) <= (max)) && (max) == (max))

#endif
