/* ops.h - the public header of ops: opens a context with all ops registered. Call ops by name, with
 * lt_run() of autograd.h, or with lt_op_find() and lt_apply(). list.h lists the names; the op files
 * ops/NAME.c define the signatures and document the formulas. */
#ifndef LUATRAIN_OPS_H
#define LUATRAIN_OPS_H

#include "autograd/autograd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Opens a context like lt_ctx_new(), and registers all ops in it. Programs start here.
 * config->device may also name an accelerator, on which new tensors are then allocated. Each op
 * runs on the device of its inputs. Data loaders and safetensors I/O keep their internal buffers on
 * the CPU. The accelerator's plugin, libluatrain-cuda.so, is searched for in the folder
 * $LUATRAIN_PLUGINS, then where it was built or installed. New. NULL with the errors of
 * lt_ctx_new(), or LT_EENV if the accelerator cannot be used. With "auto" this is not an error: the
 * context uses the CPU and logs the reason, at debug level if the plugin is missing or the machine
 * has no accelerator, otherwise as a warning. */
LT_API lt_ctx *lt_open(const lt_config *config);

/* Writes the name of the compute backend of ctx to buffer (96 bytes suffice) and returns buffer:
 * "oneDNN 3.2.0 (AVX512_CORE_BF16)", "reference kernels", or the accelerator's name and versions.
 * ctx must be from lt_open(), or NULL for the CPU backend. */
LT_API char *lt_backend(const lt_ctx *ctx, char *buffer, size_t bytes);

/* Lists the NVIDIA libraries that the CUDA plugin finds. Writes one line for each to buffer (4096
 * bytes suffice) and returns buffer: "cuDNN 9.19.0: /opt/libcudnn.so.9 (skipped: /usr/lib/...)". No
 * device is needed. Without the plugin, buffer becomes "". */
LT_API char *lt_libraries(char *buffer, size_t bytes);

/* Multiplies x by `by`. In the same pass, merges the statistics of the old values of x into *stats.
 * LT_EINVAL unless x has a float dtype and `by` is a power of two. A power of two scales f32 and
 * f64 exactly unless they overflow or underflow. stats may be NULL. If x is on an accelerator and
 * stats is not NULL, the call blocks until the statistics are known. Not recorded for backward. */
LT_MUST lt_status lt_rescale(lt_tensor *x, double by, lt_grad_stats *stats);

/* The statistics of a float tensor x, which must be on the CPU. Single-threaded. */
LT_API lt_grad_stats lt_grad_stats_of(const lt_tensor *x);

/* A table of gradient statistics. Rows are numbered from 0 and created when they are first written,
 * which may fail with LT_ENOMEM. Only written rows may be read. A row is stored on the device of
 * the tensor that was measured, so only reading it waits for an accelerator; writing it does
 * not. */
typedef struct lt_grad_table lt_grad_table;
LT_API lt_grad_table *lt_grad_table_new(lt_ctx *ctx); /* new; NULL with LT_ENOMEM */
LT_API void lt_grad_table_free(lt_grad_table *table); /* NULL is allowed */
/* Like lt_rescale(), but sets the row to the statistics of the old values of x. If `from` is a
 * tensor other than x, sets x to by * from, and the row to the statistics of from. In this case
 * from is f16 or bf16, x is f32, and both have the same number of elements. */
LT_MUST lt_status lt_grad_table_rescale(lt_grad_table *table, int row, lt_tensor *x,
                                        lt_tensor *from, double by);
/* Sets the row to the statistics of by * x, without changing x. `by` is a power of two. */
LT_MUST lt_status lt_grad_table_measure(lt_grad_table *table, int row, lt_tensor *x, double by);
/* Sets the row to the statistics of an empty tensor. */
LT_MUST lt_status lt_grad_table_clear(lt_grad_table *table, int row);
/* Combines rows first..first+n-1 into *stats. Blocks until rows on an accelerator are complete. */
LT_MUST lt_status lt_grad_table_read(lt_grad_table *table, int first, int n, lt_grad_stats *stats);
/* Whether n > 0 and all of rows first..first+n-1 are stored on an accelerator. */
LT_API bool lt_grad_table_is_on_device(const lt_grad_table *table, int first, int n);
/* Combines rows first..first+n-1, all on the accelerator, and stores the result in the step check
 * that lt_step_check_of() returns. Asynchronous. If a value is not finite, the step is skipped. */
LT_MUST lt_status lt_grad_table_check(lt_grad_table *table, int first, int n);
/* Sets x, a leftover gradient, to zero if it has non-finite values and the gradients of this step
 * are all finite. Row `left` has the statistics of x; rows first..first+n-1 have the statistics of
 * the gradients of this step. May block if only some of these rows are on an accelerator. */
LT_MUST lt_status lt_grad_table_zero_leftover(lt_grad_table *table, lt_tensor *x, int left,
                                              int first, int n);

#ifdef __cplusplus
}
#endif
#endif
