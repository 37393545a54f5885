/* conv.h - convolutions of depthwise.cu, which conv2d.cu calls. */
#ifndef LT_OPS_CUDA_CONV_H
#define LT_OPS_CUDA_CONV_H

#include "ops/cuda/cuda.h"
#include "ops/window.h"

/* Whether the functions below support the convolution: 3x3, each channel its own group, stride 1 or
 * 2 and pad 0 or 1, both the same along both axes, no dilation, and sizes whose indices fit an int.
 * Any alignment and any number of channels work. The functions are fastest if the channels form
 * whole, aligned vectors. */
bool lt__cuda_is_depthwise(const lt_conv *v);
/* For calls of conv2d: compute y, or the gradient of input i, which is 0 (x) or 1 (w). The gradient
 * of w may be f32 when the inputs are f16 or bf16. */
lt_status lt__cuda_depthwise_fwd(const lt_conv *v, lt_call *c);
lt_status lt__cuda_depthwise_grad(const lt_conv *v, lt_call *c, int i);
/* Bytes of call->scratch that the gradient of w needs. */
size_t lt__cuda_depthwise_scratch(const lt_conv *v);

#endif
