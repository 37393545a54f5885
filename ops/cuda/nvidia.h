/* nvidia.h - cuDNN, cuBLASLt and NCCL of an accelerator, for the .cu files, which do not include
 * the headers of these libraries.
 *
 * The libraries are opened with the accelerator: this is cheap and provides the versions that the
 * accelerator's name contains. The first call that needs a library creates its handle, because a
 * handle loads kernel code and takes device memory. Every library is optional. If cuDNN or cuBLASLt
 * is missing or too old, or fails to initialize, or if its headers were missing at build time, our
 * own kernels run instead, without tensor cores, and the first call that would have used the
 * library logs one warning. Without NCCL, ranks sum their gradients on the host. A library may also
 * refuse single calls: see cublas.h and cudnn.h.
 */
#ifndef LT_OPS_CUDA_NVIDIA_H
#define LT_OPS_CUDA_NVIDIA_H

#include "ops/cuda/env.h"
#include "ops/cuda/nccl.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Not thread-safe. */
typedef struct lt_nvidia lt_nvidia;

/* Returns a new object, or NULL if out of memory. env is borrowed; only the calls of ops need it,
 * and it may be NULL otherwise. cuDNN's plans are stored in the file named by $LUATRAIN_PLANS, if
 * that is set. */
lt_nvidia *lt__nvidia_new(const lt_cuda_env *env);
/* Accepts NULL. */
void lt__nvidia_free(lt_nvidia *n);
/* Writes "cuDNN 9.19.0, NCCL 2.28.9", or "without cuDNN", to text, and returns text. */
const char *lt__nvidia_version(const lt_nvidia *n, char text[72]);
/* Writes a line for each library: its version, its file, and the files that were skipped. */
void lt__nvidia_report(const lt_nvidia *n, char *text, size_t bytes);
/* Returns NCCL's table, with its version in *text: "2.28.9". Or NULL, with the reason in *text.
 * Both are borrowed. */
const lt_nccl_table *lt__nvidia_nccl(const lt_nvidia *n, const char **text);

/* Calls of conv2d, linear and matmul, as in cudnn.h and cublas.h. LT_EUNSUPPORTED means that
 * our own kernels must run. No result that is to be added to has changed then. */
size_t lt__nvidia_conv2d_scratch(lt_nvidia *n, const lt_call *c, bool backward);
lt_status lt__nvidia_conv2d_fwd(lt_nvidia *n, lt_call *c);
lt_status lt__nvidia_conv2d_grad(lt_nvidia *n, lt_call *c, int i);
bool lt__nvidia_conv2d_computes(lt_nvidia *n, const lt_call *c, int i);

size_t lt__nvidia_linear_scratch(lt_nvidia *n, const lt_call *c, bool backward);
lt_status lt__nvidia_linear_fwd(lt_nvidia *n, lt_call *c);
lt_status lt__nvidia_linear_grad(lt_nvidia *n, lt_call *c, int i, bool *summed);

size_t lt__nvidia_matmul_scratch(lt_nvidia *n, const lt_call *c, bool backward);
lt_status lt__nvidia_matmul_fwd(lt_nvidia *n, lt_call *c);
lt_status lt__nvidia_matmul_grad(lt_nvidia *n, lt_call *c, int i);

#ifdef __cplusplus
}
#endif
#endif
