/* amp.h - the door of amp: mixed precision. Ops that consist of multiply-adds run in half precision
 * and add up in f32; parameters, their gradients and their updates stay f32, and so do losses and
 * statistics.
 */
#ifndef LUATRAIN_AMP_H
#define LUATRAIN_AMP_H

#include "autograd/autograd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* LT_BF16 or LT_F16: from now on each op of ctx brings its inputs to this half or to f32, as its
 * policy in lt_op.cast says. Any other dtype: ops take what comes, as at first. It is forward that
 * counts; backward follows it, wherever it is called. Who switches for a while puts back what
 * lt_autocast() gave before. In f16 small gradients become 0 unless the loss is scaled up. */
LT_API void lt_set_autocast(lt_ctx *ctx, lt_dtype dtype);
/* The half that ops run in now; LT_F32 when it is off. */
LT_API lt_dtype lt_autocast(const lt_ctx *ctx);

#ifdef __cplusplus
}
#endif
#endif
