/* cudnn.h - convolutions by cuDNN's graph API. cudnn.c, cudnn_graph.c and cudnn_engine.c alone call
 * cuDNN; cudnn_calls.c makes tasks of the calls of ops. Part of libluatrain-cuda.so, and of no
 * other library.
 *
 * Tensors are dense, images (n, h, w, c), weights (out, kh, kw, in/groups), f32, f16 or bf16; sums
 * are in f32. The answer LT_EUNSUPPORTED comes before anything is written: cuDNN has no engine for
 * that, and an own kernel has to do it. Those are
 *   - f64, and integers
 *   - empty tensors
 *   - what every engine of cuDNN refuses, or wants more workspace for than it may have
 *
 * Images of 1 to 3 channels are not widened here: cuDNN's engines do it in their workspace, which
 * is as large as the widened images are (of 256 x 224x224x3 in f16: 102.8 MB, 4 channels; in bf16:
 * 205.5 MB, 8 channels; none of either with so many channels, by the same engines).
 */
#ifndef LT_OPS_CUDA_CUDNN_H
#define LT_OPS_CUDA_CUDNN_H

#include "ops/cuda/env.h"
#include "ops/cuda/libraries.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lt_cudnn_config {
    bool deterministic; /* no engine that rounds where it need not; those whose sums have no fixed
                         * order are the last choice otherwise, and none here */
    bool tf32;          /* f32 convolutions may round their factors to 10 bits, on tensor cores */
    size_t workspace;   /* bytes that a plan may want; 0: LT_CUDNN_WORKSPACE */
    const char *plans;  /* the file that remembers plans, or NULL. Read when the first plan is
                         * wanted, replaced by lt__cudnn_free(). Borrowed until then */
    const char *json;   /* NULL, or the properties of a device that need not be here, as
                         * lt__cudnn_properties() gives them: plans are made, nothing can be run.
                         * Borrowed */
} lt_cudnn_config;

#define LT_CUDNN_WORKSPACE ((size_t)512 << 20) /* the networks' top engines want 210 MB at most */

/* What cuDNN knows for one device and one stream: its handle, and plans by task. For one thread at
 * a time. */
typedef struct lt_cudnn lt_cudnn;

/* table is copied, env borrowed. New. NULL with a sentence in text. */
lt_cudnn *lt__cudnn_new(const lt_cudnn_table *table, const lt_cuda_env *env,
                        const lt_cudnn_config *config, char *text, size_t bytes);
/* Writes the file of plans, if it can. NULL is fine. */
void lt__cudnn_free(lt_cudnn *d);

const lt_cuda_env *lt__cudnn_env(const lt_cudnn *d); /* borrowed */

/* ==== Tasks =================================================================================== */

typedef enum lt_cudnn_kind {
    LT_CUDNN_CONV,         /* y from x, w and, if task->bias, b */
    LT_CUDNN_CONV_DATA,    /* x, the gradient of that x, from w and y, the gradient of that y */
    LT_CUDNN_CONV_WEIGHTS, /* w, the gradient of that w, from x and y, the gradient of that y */
    LT_CUDNN_KINDS
} lt_cudnn_kind;

enum { LT_CUDNN_X, LT_CUDNN_W, LT_CUDNN_Y, LT_CUDNN_B, LT_CUDNN_OPERANDS };

/* All members are 64-bit words: equal tasks have equal bytes. Pairs are (height, width). */
typedef struct lt_cudnn_task {
    int64_t kind, dtype;        /* lt_cudnn_kind; lt_dtype of all operands */
    int64_t bias, add;          /* 0 or 1; add: to the gradient that is there */
    int64_t aligned;            /* 1: all operands lie at multiples of 16 bytes */
    int64_t n, in, out, groups; /* images; channels of x and of y */
    int64_t size[2], out_size[2], kernel[2], stride[2], pad[2], dilation[2];
} lt_cudnn_task;

/* LT_OK and how many bytes of workspace the task wants; LT_EUNSUPPORTED; LT_ENOMEM; LT_EENV. Plans
 * are kept, answers of LT_EUNSUPPORTED too. Notes go to ctx's log. */
lt_status lt__cudnn_plan(lt_cudnn *d, lt_ctx *ctx, const lt_cudnn_task *task, size_t *workspace);
/* Puts the task into the stream. operand: addresses on the device, by LT_CUDNN_X and so on. */
lt_status lt__cudnn_run(lt_cudnn *d, lt_ctx *ctx, const lt_cudnn_task *task,
                        void *const operand[LT_CUDNN_OPERANDS], void *workspace);
/* The engine that a planned task has, as the file says it: "62 314368 2=8 17=1" is engine 62, bytes
 * of workspace, and its knobs; "none". NULL: there is no plan. Borrowed until the next plan. */
const char *lt__cudnn_choice(const lt_cudnn *d, const lt_cudnn_task *task);
/* The device's properties as JSON. New, free() ends it. NULL on failure. */
char *lt__cudnn_properties(lt_cudnn *d);

/* ==== Calls of ops ============================================================================ */

/* Bytes of call->scratch for all that follows. LT_NO_SCRATCH when a plan has failed otherwise than
 * by LT_EUNSUPPORTED. */
size_t lt__cudnn_conv2d_scratch(lt_cudnn *d, const lt_call *c, bool backward);
lt_status lt__cudnn_conv2d_fwd(lt_cudnn *d, lt_call *c);
/* The gradient of input i, which is 0 (x) or 1 (w), written or added as the call says. It may be
 * f32 beside halves: then it is rounded to halves on its way. That of the bias is the caller's. */
lt_status lt__cudnn_conv2d_grad(lt_cudnn *d, lt_call *c, int i);

#ifdef __cplusplus
}
#endif
#endif
