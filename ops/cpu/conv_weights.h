/* conv_weights.h - the gradient of the weights of convolutions with few channels and many pixels,
 * for which oneDNN is slow. In f32 and bf16. For conv2d.c. */
#ifndef LT_OPS_CPU_CONV_WEIGHTS_H
#define LT_OPS_CPU_CONV_WEIGHTS_H

#include "ops/cpu/dnnl.h"

/* Whether lt__conv_weights_run() supports the task and is faster than oneDNN on this machine.
 * Images are f32 or bf16; the gradient is f32, and sums are in f32. */
bool lt__conv_weights_accepts(const lt_call *c, const lt_conv_task *task);
/* Runs the task. Uses lt__conv_weights_scratch() bytes of the call's scratch. */
void lt__conv_weights_run(const lt_call *c, const lt_conv_task *task);
/* Bytes of scratch; 0 for convolutions that are not supported. */
size_t lt__conv_weights_scratch(const lt_call *c, const lt_conv *v);

#endif
