/* plugin.h - what the library and the plugin of an accelerator tell each other.
 *
 * libluatrain-cuda.so is opened at run time, so that neither program nor library needs CUDA. It
 * exports lt_accelerator_open(), and calls nothing of the library but what the host table has.
 * Both sides see the same structs: versions that differ are refused.
 */
#ifndef LT_OPS_PLUGIN_H
#define LT_OPS_PLUGIN_H

#include <stdio.h>
#include <string.h>

#include "core/tensor.h"
#include "ops/list.h"
#include "ops/ops.h"

typedef enum lt_op_id {
#define X(name) LT_OP_##name,
    LT_OP_LIST(X)
#undef X
    LT_OPS
} lt_op_id;

typedef struct lt_host {       /* of the library: what a plugin may call */
    lt_status (*fail)(lt_status code, const char *fmt, ...);
    void (*log)(lt_ctx *ctx, lt_log_level level, const char *fmt, ...);
} lt_host;

typedef struct lt_accelerator {
    lt_device *device;         /* new; its close() ends it, after the last tensor */
    lt_kernels op[LT_OPS];     /* fwd and bwd NULL: it has none for this op. Views have no kernel,
                                * and the total of add_squares is f64 */
    /* Beside ops; all of it in the stream, and what is pointed to is on the device.
     * lt_rescale() of a tensor that is there: *stats is what it has seen in this call. It may be
     * NULL. */
    lt_status (*rescale)(lt_tensor *x, double by, lt_grad_stats *stats);
    /* *stats = what is in x, multiplied by `by`. */
    lt_status (*measure)(const lt_tensor *x, double by, lt_grad_stats *stats);
    /* check->grads = all that is in rows[0..n); something not finite sets skip. */
    lt_status (*check_grads)(lt_device *device, const lt_grad_stats *rows, int n,
                             lt_step_check *check);
    /* x = 0, if something in *left is not finite, and nothing in rows[0..n). */
    lt_status (*zero_leftover)(lt_tensor *x, const lt_grad_stats *leftover,
                               const lt_grad_stats *rows, int n);
    lt_check_loss_fn check_loss;
    lt_clip_fn clip;
    char name[96];             /* what computes: "NVIDIA H200 (cuDNN 9.19.0, CUDA 13.0)" */
} lt_accelerator;

typedef struct lt_accelerator_config {
    int index;                 /* of the device, from 0; or LT_ANY_DEVICE */
    int local_rank;            /* of any: the one of this number, counted round those there are */
    bool deterministic, tf32;  /* as in lt_config */
} lt_accelerator_config;

enum { LT_ANY_DEVICE = -1 };
enum { LT_NO_ACCELERATOR = -2 };

/* host lives as long as the process. 0; or, with a sentence in text, LT_NO_ACCELERATOR, when this
 * machine has none, or -1, when what it has cannot be used. */
typedef int (*lt_accelerator_open_fn)(const char *version, const lt_host *host,
                                      const lt_accelerator_config *config,
                                      lt_accelerator *accelerator, char *text, size_t bytes);

/* For a plugin: false, with the sentence, when the library is of another version. */
static inline bool lt__same_version(const char *version, char *text, size_t bytes)
{
    if (strcmp(version, LT_VERSION) == 0)
        return true;
    snprintf(text, bytes, "libluatrain-cuda.so is of luatrain %s, this is luatrain %s; take both "
             "from one build", LT_VERSION, version);
    return false;
}

#endif
