/* winograd.h - 3x3 convolutions of stride 1 with less than half of the multiplications: Winograd's
 * minimal filtering F(2x2, 3x3). For conv2d.c, in f32 and bf16. */
#ifndef LT_OPS_CPU_WINOGRAD_H
#define LT_OPS_CPU_WINOGRAD_H

#include "ops/cpu/dnnl.h"

/* Whether lt__winograd_run() is the fastest way to do the task on this machine. All is f32 or all
 * bf16, but a gradient of w may be f32 beside bf16. A gradient of the bias is not made. */
bool lt__winograd_accepts(const lt_conv_task *task);
/* Whether it is a way. */
bool lt__winograd_can(const lt_conv_task *task);
/* Runs it in the call's scratch, lt__winograd_scratch() bytes. */
void lt__winograd_run(const lt_call *c, const lt_conv_task *task);
/* For x and y in f32 or in bf16 (half); 0 when it is another convolution. */
size_t lt__winograd_scratch(const lt_call *c, const lt_conv *v, bool half, bool backward);

#endif
