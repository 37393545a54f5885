/* conv_thin.h - convolutions of images of a few channels, as the first of a network is, and the
 * gradients of their weights. For conv2d.c, in f32. */
#ifndef LT_OPS_CPU_CONV_THIN_H
#define LT_OPS_CPU_CONV_THIN_H

#include "ops/cpu/dnnl.h"

/* Whether lt__conv_thin_run() takes the task, and is faster than oneDNN on this machine. */
bool lt__conv_thin_accepts(const lt_conv_task *task);
/* Runs it in the call's scratch, lt__conv_thin_scratch() bytes. */
void lt__conv_thin_run(const lt_call *c, const lt_conv_task *task);
/* 0 when it is another convolution. */
size_t lt__conv_thin_scratch(const lt_call *c, const lt_conv *v, bool backward);

#endif
