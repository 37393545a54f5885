/* depthwise.h - depthwise 3x3 convolutions, for which oneDNN reaches only a fraction of the memory
 * bandwidth. In f32 and bf16; sums are in f32. For conv2d.c. */
#ifndef LT_OPS_CPU_DEPTHWISE_H
#define LT_OPS_CPU_DEPTHWISE_H

#include "ops/cpu/dnnl.h"

/* Whether lt__depthwise_run() supports the convolution: each channel is its own group, kernel 3x3,
 * stride 1 or 2 and pad 0 or 1 along both axes; x, w and y are all f32 or all bf16, but the
 * gradient of w may be f32 with bf16 inputs. Not supported are the gradient of the bias, and
 * results of fewer than 32 channels in bf16 with stride 1. */
bool lt__depthwise_accepts(const lt_conv_task *task);
/* Runs the task. Uses lt__depthwise_scratch() bytes of the call's scratch. */
void lt__depthwise_run(const lt_call *c, const lt_conv_task *task);
/* Bytes of scratch; 0 for convolutions that are not supported. */
size_t lt__depthwise_scratch(const lt_conv *v, bool backward);

#endif
