/* winograd.h - 3x3 convolutions of stride 1 with less than half of the multiplications: Winograd's
 * minimal filtering F(2x2, 3x3). In f32 and bf16. For conv2d.c. */
#ifndef LT_OPS_CPU_WINOGRAD_H
#define LT_OPS_CPU_WINOGRAD_H

#include "ops/cpu/dnnl.h"

/* Whether lt__winograd_run() is the fastest implementation of the task on this machine. All tensors
 * are f32 or all bf16, but the gradient of w may be f32 with bf16 inputs. The gradient of the bias
 * is not supported. */
bool lt__winograd_accepts(const lt_conv_task *task);
/* Whether lt__winograd_run() supports the task. */
bool lt__winograd_can(const lt_conv_task *task);
/* Runs the task. Uses lt__winograd_scratch() bytes of the call's scratch. */
void lt__winograd_run(const lt_call *c, const lt_conv_task *task);
/* Bytes of scratch, for x and y in bf16 if half is set, otherwise f32. 0 for convolutions that are
 * not supported. */
size_t lt__winograd_scratch(const lt_call *c, const lt_conv *v, bool half, bool backward);

#endif
