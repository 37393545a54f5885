/* ops.h - the door of ops: a context with every op in it. The ops themselves are reached by
 * name: lt_run(), lt_op_find() and lt_apply() of autograd.h. list.h has their names, each .c its
 * signature and formula. */
#ifndef LUATRAIN_OPS_H
#define LUATRAIN_OPS_H

#include "autograd/autograd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* lt_ctx_new(config) with all ops registered: what a program starts with. New. */
LT_API lt_ctx *lt_open(const lt_config *config);

/* What computes, into buffer (64 bytes do): "oneDNN 3.2.0 (AVX512_CORE_BF16)" or "reference
 * kernels"; returns buffer. */
LT_API char *lt_backend(char *buffer, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
