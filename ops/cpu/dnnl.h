/* dnnl.h - fast f32 and bf16 kernels from oneDNN for the op files. Only dnnl.c includes oneDNN's
 * own header. A build without oneDNN has the same functions, which return LT_EUNSUPPORTED.
 *
 * All tensors are dense: images (n, h, w, c), weights (out, kh, kw, in/groups). Operands are f32 or
 * bf16, and their dtypes may differ: the result of bf16 factors can be f32. Sums are always in f32.
 * LT_EUNSUPPORTED is returned before anything is written, and the caller must use its portable
 * kernel. It means that oneDNN has no optimised code for the task or is known to compute it
 * wrongly, that an operand has another dtype, that a tensor is empty, or that a size exceeds
 * INT32_MAX.
 */
#ifndef LT_OPS_CPU_DNNL_H
#define LT_OPS_CPU_DNNL_H

#include "ops/cpu/conv.h"

#ifdef LT_WITH_DNNL
/* Returns LT_OK if lt__dnnl_run() supports the task. Allows a caller to check all tasks of a call
 * before it runs the first. */
lt_status lt__dnnl_ready(const lt_call *c, const lt_conv_task *task);
lt_status lt__dnnl_run(const lt_call *c, const lt_conv_task *task);
#else
static inline lt_status lt__dnnl_ready(const lt_call *c, const lt_conv_task *task)
{
    (void)c, (void)task;
    return LT_EUNSUPPORTED;
}
static inline lt_status lt__dnnl_run(const lt_call *c, const lt_conv_task *task)
{
    (void)c, (void)task;
    return LT_EUNSUPPORTED;
}
#endif

#endif
