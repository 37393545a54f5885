/* nvidia.h - cuDNN, cuBLASLt and NCCL as an accelerator has them, for the .cu files, which do
 * not see NVIDIA's headers.
 *
 * All are looked for when the accelerator opens: that costs little, and tells versions for its
 * name. A handle, which loads the code of kernels and takes memory of the device, is made by the
 * first call that wants it. No library is a must: where one is missing, too old or does not start,
 * or was not there when this was built, own kernels run in its place, and the first call that would
 * have used it warns of that, once. They know no tensor cores.
 */
#ifndef LT_OPS_CUDA_NVIDIA_H
#define LT_OPS_CUDA_NVIDIA_H

#include "ops/cuda/env.h"
#include "ops/cuda/nccl.h"

#ifdef __cplusplus
extern "C" {
#endif

/* For one thread at a time. */
typedef struct lt_nvidia lt_nvidia;

/* Plans of cuDNN are remembered in the file that the variable LUATRAIN_PLANS names, if it names
 * one. env is borrowed. New. NULL: out of memory. */
lt_nvidia *lt__nvidia_new(const lt_cuda_env *env);
/* NULL is fine. */
void lt__nvidia_free(lt_nvidia *n);
/* "cuDNN 9.19.0, NCCL 2.28.9", or "without cuDNN", in a buffer of the caller. */
const char *lt__nvidia_version(const lt_nvidia *n, char text[48]);
/* Borrowed. NULL, with the sentence of what is missing in *why, which is borrowed too. */
const lt_nccl_table *lt__nvidia_nccl(const lt_nvidia *n, const char **why);

/* Calls of conv2d, linear and matmul, as in cudnn.h and cublas.h. LT_EUNSUPPORTED, before anything
 * is written: own kernels have to do it. */
size_t lt__nvidia_conv2d_scratch(lt_nvidia *n, const lt_call *c, bool backward);
lt_status lt__nvidia_conv2d_fwd(lt_nvidia *n, lt_call *c);
lt_status lt__nvidia_conv2d_grad(lt_nvidia *n, lt_call *c, int i);

size_t lt__nvidia_linear_scratch(lt_nvidia *n, const lt_call *c, bool backward);
lt_status lt__nvidia_linear_fwd(lt_nvidia *n, lt_call *c);
lt_status lt__nvidia_linear_bwd(lt_nvidia *n, lt_call *c);

size_t lt__nvidia_matmul_scratch(lt_nvidia *n, const lt_call *c, bool backward);
lt_status lt__nvidia_matmul_fwd(lt_nvidia *n, lt_call *c);
lt_status lt__nvidia_matmul_bwd(lt_nvidia *n, lt_call *c);

#ifdef __cplusplus
}
#endif
#endif
