/* conv.h - the description of a convolution, shared by the .cu files that compute one. */
#ifndef LT_OPS_CUDA_CONV_H
#define LT_OPS_CUDA_CONV_H

#include "ops/cuda/cuda.h"
#include "ops/window.h"

typedef struct lt_cuda_conv {
    lt_window w;
    int64_t n, in, out, groups; /* images; channels of x; channels of y */
    int64_t in_each, out_each;  /* channels per group */
} lt_cuda_conv;

/* ==== depthwise.cu: 3x3 convolutions in which each channel is its own group =================== */

/* Whether the functions below support the convolution: stride 1 or 2 and pad 0 or 1, both the same
 * along both axes, no dilation, and sizes whose indices fit an int. Any alignment and any number of
 * channels work. The functions are fastest if the channels form whole, aligned vectors. */
bool lt__cuda_is_depthwise(const lt_cuda_conv *v);
/* For calls of conv2d: compute y, or the gradient of input i, which is 0 (x) or 1 (w). The gradient
 * of w may be f32 when the inputs are f16 or bf16. */
lt_status lt__cuda_depthwise_fwd(const lt_cuda_conv *v, lt_call *c);
lt_status lt__cuda_depthwise_grad(const lt_cuda_conv *v, lt_call *c, int i);
/* Bytes of call->scratch that the gradient of w needs. */
size_t lt__cuda_depthwise_scratch(const lt_cuda_conv *v);

#endif
