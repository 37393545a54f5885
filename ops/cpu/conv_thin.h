/* conv_thin.h - f32 convolutions of images with few channels, as in the first layer of a network,
 * and the gradients of their weights. For conv2d.c. */
#ifndef LT_OPS_CPU_CONV_THIN_H
#define LT_OPS_CPU_CONV_THIN_H

#include "ops/cpu/dnnl.h"

/* Whether lt__conv_thin_run() supports the task and is faster than oneDNN on this machine. */
bool lt__conv_thin_accepts(const lt_conv_task *task);
/* Runs the task. Uses lt__conv_thin_scratch() bytes of the call's scratch. */
void lt__conv_thin_run(const lt_call *c, const lt_conv_task *task);
/* Bytes of scratch; 0 for convolutions that are not supported. */
size_t lt__conv_thin_scratch(const lt_call *c, const lt_conv *v, bool backward);

#endif
