/* depthwise.h - depthwise 3x3 convolution, which oneDNN runs at a fraction of the memory's speed.
 * In f32 and bf16; sums are in f32. For conv2d.c. */
#ifndef LT_OPS_CPU_DEPTHWISE_H
#define LT_OPS_CPU_DEPTHWISE_H

#include "ops/cpu/dnnl.h"

/* Whether lt__depthwise_run() takes the convolution: each channel a group of its own, kernel 3x3,
 * stride 1 or 2 and pad 0 or 1 along both axes; x, w and y all f32 or all bf16, but a gradient of
 * w may be f32 beside bf16. A gradient of the bias is not made. Nor are results of fewer than 32
 * channels in bf16 with stride 1. */
bool lt__depthwise_accepts(const lt_conv_task *task);
/* Runs it in the call's scratch, lt__depthwise_scratch() bytes. */
void lt__depthwise_run(const lt_call *c, const lt_conv_task *task);
/* 0 when it is another convolution. */
size_t lt__depthwise_scratch(const lt_conv *v, bool backward);

#endif
