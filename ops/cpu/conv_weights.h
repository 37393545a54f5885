/* conv_weights.h - the gradient of the weights of convolutions with few channels and many pixels,
 * which oneDNN is slow at. For conv2d.c, in f32 and bf16. */
#ifndef LT_OPS_CPU_CONV_WEIGHTS_H
#define LT_OPS_CPU_CONV_WEIGHTS_H

#include "ops/cpu/dnnl.h"

/* Whether lt__conv_weights_run() takes the task, and is faster than oneDNN on this machine. Images
 * are f32 or bf16, the gradient is f32, and so are sums. */
bool lt__conv_weights_accepts(const lt_call *c, const lt_conv_task *task);
/* Runs it in the call's scratch, lt__conv_weights_scratch() bytes. */
void lt__conv_weights_run(const lt_call *c, const lt_conv_task *task);
/* 0 when it is another convolution. */
size_t lt__conv_weights_scratch(const lt_call *c, const lt_conv *v);

#endif
