/* dnnl.h - the fast f32 and bf16 paths that oneDNN gives to the op files of this room. dnnl.c alone
 * includes oneDNN's own header; a build without it has the same names, and LT_EUNSUPPORTED as the
 * answer.
 *
 * All tensors are dense, images (n, h, w, c), weights (out, kh, kw, in/groups). Operands are f32 or
 * bf16, and may differ: bf16 factors can have a sum in f32. Sums are in f32 either way.
 * LT_EUNSUPPORTED comes before anything is written: oneDNN has no optimised code for this task, and
 * the caller goes on with its portable kernel.
 */
#ifndef LT_OPS_CPU_DNNL_H
#define LT_OPS_CPU_DNNL_H

#include "ops/cpu/product.h"
#include "ops/window.h"

typedef struct lt_conv {
    lt_window window;
    int64_t n, in, out, groups; /* images, channels */
} lt_conv;

/* One result, computed from the other operands; data is NULL where one is not wanted:
 *   LT_PRODUCT       y = x w + bias; bias only with a batch of one
 *   LT_CONV          y = x * w + bias
 *   LT_CONV_DATA     x, the gradient of that x, from w and y, the gradient of that y
 *   LT_CONV_WEIGHTS  w, the gradient of that w, from x and y, the gradient of that y
 * add: to the result that is there, instead of over it; then there is no bias. */
typedef enum lt_conv_task_kind {
    LT_PRODUCT,
    LT_CONV,
    LT_CONV_DATA,
    LT_CONV_WEIGHTS
} lt_conv_task_kind;
typedef struct lt_conv_task {
    lt_conv_task_kind kind;
    const lt_product *product;  /* sizes, of a product */
    const lt_conv *conv;        /* and of the others */
    lt_operand x, w, bias, y;
    bool add;
} lt_conv_task;

#ifdef LT_WITH_DNNL
/* LT_OK when lt__dnnl_run() has code for it: to ask about all parts of a call before the first. */
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
