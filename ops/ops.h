/* ops.h - the door of ops: a context with every op in it. The ops themselves are reached by
 * name: lt_run(), lt_op_find() and lt_apply() of autograd.h. list.h has their names, each .c its
 * signature and formula. */
#ifndef LUATRAIN_OPS_H
#define LUATRAIN_OPS_H

#include "autograd/autograd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* lt_ctx_new(config) with all ops registered: what a program starts with. config->device may be an
 * accelerator, whose plugin libluatrain-cuda.so is in the folder that the variable LUATRAIN_PLUGINS
 * names, or where it was built or installed; new tensors then go there, and ops compute where their
 * inputs are. What loaders and files hold before they hand it out stays on the CPU. New. NULL
 * with what lt_ctx_new() fails with; LT_EENV when the accelerator cannot be used, with the reason,
 * which "auto" only gives the log, as a debug note. */
LT_API lt_ctx *lt_open(const lt_config *config);

/* What computes in ctx, into buffer (96 bytes do): "oneDNN 3.2.0 (AVX512_CORE_BF16)", "reference
 * kernels", or the accelerator's name and versions; returns buffer. ctx NULL: of the CPU. */
LT_API char *lt_backend(const lt_ctx *ctx, char *buffer, size_t bytes);

/* What lt_rescale() has seen in the elements it went through, all calls together. */
typedef struct lt_found {
    double largest;      /* magnitude of those that are finite, as they were; 0: there are none */
    int64_t not_finite;
} lt_found;

/* x *= by, for a float x, in one pass in which it looks at the elements. Not recorded. by is a
 * power of two: then f32 and f64 are not rounded, but where they leave their range. */
LT_MUST lt_status lt_rescale(lt_tensor *x, double by, lt_found *found);

#ifdef __cplusplus
}
#endif
#endif
