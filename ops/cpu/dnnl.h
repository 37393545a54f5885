/* dnnl.h - fast f32 and bf16 kernels from oneDNN for the op files. Only dnnl.c includes oneDNN's
 * own header. A build without oneDNN has the same functions, which return LT_EUNSUPPORTED.
 *
 * All tensors are dense: images (n, h, w, c), weights (out, kh, kw, in/groups). Operands are f32 or
 * bf16, and may differ: bf16 factors can have an f32 result. Sums are always in f32.
 * LT_EUNSUPPORTED is returned before anything is written; it means that oneDNN has no optimised
 * code for the task and that the caller must use its portable kernel.
 */
#ifndef LT_OPS_CPU_DNNL_H
#define LT_OPS_CPU_DNNL_H

#include "ops/cpu/product.h"
#include "ops/window.h"

typedef struct lt_conv {
    lt_window window;
    int64_t n, in, out, groups; /* images; channels of x; channels of y */
} lt_conv;

/* A task computes one result from the other operands. data is NULL for operands that are not used:
 *   LT_PRODUCT       y = x w + bias; bias only for a batch of one
 *   LT_CONV          y = x * w + bias
 *   LT_CONV_DATA     the gradient of x, written to x; from w and the gradient of y, in y
 *   LT_CONV_WEIGHTS  the gradient of w, written to w; from x and the gradient of y, in y
 * add: add to the existing result instead of overwriting it; there is no bias then. */
typedef enum lt_conv_task_kind {
    LT_PRODUCT,
    LT_CONV,
    LT_CONV_DATA,
    LT_CONV_WEIGHTS
} lt_conv_task_kind;
typedef struct lt_conv_task {
    lt_conv_task_kind kind;
    const lt_product *product; /* sizes of a product */
    const lt_conv *conv;       /* sizes of a convolution */
    lt_operand x, w, bias, y;
    bool add;
} lt_conv_task;

#ifdef LT_WITH_DNNL
/* Returns LT_OK if lt__dnnl_run() has code for the task. Lets a caller check all parts of a call
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
