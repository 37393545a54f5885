/* conv.h - the sizes of a convolution, for the .cu files that compute one. */
#ifndef LT_OPS_CUDA_CONV_H
#define LT_OPS_CUDA_CONV_H

#include "ops/cuda/cuda.h"
#include "ops/window.h"

typedef struct lt_cuda_conv {
    lt_window w;
    int64_t n, in, out, groups; /* images; channels of x and of y */
    int64_t in_each, out_each;  /* of a group */
} lt_cuda_conv;

/* ==== depthwise.cu: each channel a group of its own, 3x3 ====================================== */

/* Whether the functions below have kernels for it: stride 1 or 2 along both axes, no dilation, and
 * pad 0 or 1. All shapes and addresses will do; those of whole vectors are faster. */
bool lt__cuda_is_depthwise(const lt_cuda_conv *v);
/* Of conv2d's call: y; the gradient of input i, 0 (x) or 1 (w), of which that of w may be f32
 * beside halves. */
lt_status lt__cuda_depthwise_fwd(const lt_cuda_conv *v, lt_call *c);
lt_status lt__cuda_depthwise_grad(const lt_cuda_conv *v, lt_call *c, int i);
/* Bytes of call->scratch for the gradient of w. */
size_t lt__cuda_depthwise_scratch(const lt_cuda_conv *v);

#endif
