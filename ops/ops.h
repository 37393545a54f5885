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

/* x *= by, for a float x, in one pass in which it looks at the elements, as they were, and adds to
 * *stats, which may be NULL. Not recorded. by is a power of two: then f32 and f64 are not rounded,
 * but where they leave their range. On an accelerator what is found is waited for. */
LT_MUST lt_status lt_rescale(lt_tensor *x, double by, lt_grad_stats *stats);

/* What is in x, which is on the CPU, in this thread alone. */
LT_API lt_grad_stats lt_grad_stats_of(const lt_tensor *x);

/* A table has rows of what was found, numbered from 0, which lie where the tensors are that it was
 * found in: on an accelerator nobody waits for them before they are read. */
typedef struct lt_grad_table lt_grad_table;
LT_API lt_grad_table *lt_grad_table_new(lt_ctx *ctx); /* new */
LT_API void lt_grad_table_free(lt_grad_table *table); /* NULL is fine */
/* lt_rescale(); the row has what was found in this call. */
LT_MUST lt_status lt_grad_table_rescale(lt_grad_table *table, int row, lt_tensor *x, double by);
/* The row has what is in x, multiplied by `by`, a power of two; x stays as it is. */
LT_MUST lt_status lt_grad_table_measure(lt_grad_table *table, int row, lt_tensor *x, double by);
/* Nothing was found. */
LT_MUST lt_status lt_grad_table_clear(lt_grad_table *table, int row);
/* *stats = all that is in n rows from the first. Waits for those on an accelerator. */
LT_MUST lt_status lt_grad_table_read(lt_grad_table *table, int first, int n, lt_grad_stats *stats);
/* Whether all of these rows, and there are some, are on an accelerator. Then */
LT_API bool lt_grad_table_is_on_device(const lt_grad_table *table, int first, int n);
/* they can be checked there: all that is in them goes into lt_step_check_of(). */
LT_MUST lt_status lt_grad_table_check(lt_grad_table *table, int first, int n);
/* x = 0, if something in the row `left`, which is about x, is not finite, and nothing in n rows
 * from the first. */
LT_MUST lt_status lt_grad_table_zero_leftover(lt_grad_table *table, lt_tensor *x, int left,
                                              int first, int n);

#ifdef __cplusplus
}
#endif
#endif
