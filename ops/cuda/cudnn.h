/* cudnn.h - convolutions with cuDNN's graph API. Only cudnn.c, cudnn_graph.c and cudnn_engine.c
 * call cuDNN; cudnn_calls.c turns calls of conv2d into tasks. Only libluatrain-cuda.so contains
 * these files.
 *
 * Tensors are dense: images (n, h, w, c), weights (out, kh, kw, in/groups), in f32, f16 or bf16.
 * Sums are in f32. LT_EUNSUPPORTED means that our own kernel must compute the task. No result that
 * is to be added to has changed then. This applies to
 *   - f64, integers, and tensors of different dtypes
 *   - empty tensors
 *   - tasks for which every engine of cuDNN fails or needs more workspace than allowed
 *   - tasks for which cuDNN refuses to run several engines; the first refusal is a warning
 *
 * Images of 1 to 3 channels are not padded here. cuDNN's engines pad them in their workspace, which
 * is as large as the padded images (for 256 x 224x224x3: 102.8 MB in f16, with 4 channels; 205.5 MB
 * in bf16, with 8 channels). With images padded beforehand, the same engines need no workspace.
 */
#ifndef LT_OPS_CUDA_CUDNN_H
#define LT_OPS_CUDA_CUDNN_H

#include "ops/cuda/env.h"
#include "ops/cuda/libraries.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lt_cudnn_config {
    /* excludes engines that down-convert inputs, that use Winograd or FFT, or whose sums have no
     * fixed order. Otherwise, engines of the last kind are used only if there is no other */
    bool deterministic;
    bool tf32;        /* f32 factors may be rounded to 10 mantissa bits, for tensor cores */
    size_t workspace; /* maximum bytes of workspace per plan; 0 means lt__cudnn_workspace() */
    /* path of the plan file, or NULL. Read when the first plan is requested, replaced by
     * lt__cudnn_free(). Borrowed until then */
    const char *plans;
    /* NULL, or the properties of an absent device, as returned by lt__cudnn_properties(). Then
     * plans can be made but not run. Borrowed */
    const char *json;
} lt_cudnn_config;

/* The maximum bytes of workspace on a device with this memory: a fiftieth, but at least 512 MiB and
 * at most 1.5 GiB. For our networks, the best engines need at most 212 MB in f16. In f32 without
 * TF32, the fast ones transpose images in the workspace. */
static inline size_t lt__cudnn_workspace(size_t memory)
{
    const size_t min = (size_t)512 << 20, max = (size_t)1536 << 20, share = memory / 50;
    return share < min ? min : share > max ? max : share;
}

/* A cuDNN handle and its plan cache, for one device and one stream. Not thread-safe. */
typedef struct lt_cudnn lt_cudnn;

/* Returns a new object, or NULL with a message in text. Table and config are copied; env is
 * borrowed. */
lt_cudnn *lt__cudnn_new(const lt_cudnn_table *table, const lt_cuda_env *env,
                        const lt_cudnn_config *config, char *text, size_t bytes);
/* Tries to write the plan file, then frees d. Accepts NULL. */
void lt__cudnn_free(lt_cudnn *d);

/* ==== Tasks =================================================================================== */

typedef enum lt_cudnn_kind {
    LT_CUDNN_CONV,         /* y from x, w and, if task->bias is set, b */
    LT_CUDNN_CONV_DATA,    /* the gradient of x, written to x; from w and the gradient of y, in y */
    LT_CUDNN_CONV_WEIGHTS, /* the gradient of w, written to w; from x and the gradient of y, in y */
    LT_CUDNN_KINDS
} lt_cudnn_kind;

enum { LT_CUDNN_X, LT_CUDNN_W, LT_CUDNN_Y, LT_CUDNN_B, LT_CUDNN_OPERANDS };

/* All members are 64-bit words, so that equal tasks have equal bytes. Pairs are (height, width). */
typedef struct lt_cudnn_task {
    int64_t kind, dtype;        /* lt_cudnn_kind; lt_dtype of all operands */
    int64_t bias, add;          /* 0 or 1 each; add: add to the existing gradient */
    int64_t aligned;            /* 1 if all operands are aligned to 16 bytes */
    int64_t n, in, out, groups; /* images; channels of x; channels of y */
    int64_t size[2], out_size[2], kernel[2], stride[2], pad[2], dilation[2];
} lt_cudnn_task;

/* Makes a plan for the task and sets *workspace to the bytes it needs. Fails with LT_EUNSUPPORTED,
 * LT_ENOMEM, or the failure of an earlier kernel. Plans are cached, and so is LT_EUNSUPPORTED.
 * Notes are logged to ctx. */
lt_status lt__cudnn_plan(lt_cudnn *d, lt_ctx *ctx, const lt_cudnn_task *task, size_t *workspace);
/* Enqueues the task in the stream. operand contains device addresses, indexed by LT_CUDNN_X etc.
 * workspace has `bytes` bytes. Also LT_EENV, if cuDNN fails and may have changed a result that is
 * added to. */
lt_status lt__cudnn_run(lt_cudnn *d, lt_ctx *ctx, const lt_cudnn_task *task,
                        void *const operand[LT_CUDNN_OPERANDS], void *workspace, size_t bytes);
/* Returns the engine of a planned task in the format of the plan file: "62 314368 2=8 17=1" is
 * engine 62, its workspace in bytes, and its knobs; "none" if no engine supports the task; "" if
 * the engine cannot be described. NULL if the task was not planned. Borrowed until the next
 * plan. */
const char *lt__cudnn_choice(const lt_cudnn *d, const lt_cudnn_task *task);
/* Returns the device's properties as JSON, or NULL on failure. New; release with free(). */
char *lt__cudnn_properties(lt_cudnn *d);

/* ==== Calls of ops ============================================================================ */

/* Bytes of call->scratch for the functions below. LT_SCRATCH_FAILED if planning failed with an
 * error other than LT_EUNSUPPORTED. */
size_t lt__cudnn_conv2d_scratch(lt_cudnn *d, const lt_call *c, bool backward);
lt_status lt__cudnn_conv2d_fwd(lt_cudnn *d, lt_call *c);
/* Computes the gradient of input i, which is 0 (x) or 1 (w), and writes or adds it as the call
 * requests. The caller computes the gradient of the bias. */
lt_status lt__cudnn_conv2d_grad(lt_cudnn *d, lt_call *c, int i);
/* Whether it would, for a call that has no d_in[i] yet, into a tensor like input i. */
bool lt__cudnn_conv2d_computes(lt_cudnn *d, const lt_call *c, int i);

#ifdef __cplusplus
}
#endif
#endif
