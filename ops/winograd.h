/* winograd.h - 3x3 convolutions of stride 1 with less than half of the multiplications: Winograd's
 * minimal filtering F(2x2, 3x3). For conv2d.c, in f32. */
#ifndef LT_OPS_WINOGRAD_H
#define LT_OPS_WINOGRAD_H

#include "ops/dnnl.h"

/* Whether lt__winograd_run() takes the convolution and repays its transforms on this machine. A
 * gradient of the bias is not made. */
bool lt__winograd_takes(const lt_job *job);
/* Runs it in the call's scratch, lt__winograd_scratch() bytes. */
void lt__winograd_run(const lt_call *c, const lt_job *job);
/* 0 when it is another convolution. */
size_t lt__winograd_scratch(const lt_call *c, const lt_conv *v, bool backward);

#endif
