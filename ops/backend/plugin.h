/* plugin.h - the interface between the library and an accelerator's plugin.
 *
 * libluatrain-cuda.so is loaded at run time, so that neither the program nor the library depends on
 * CUDA. It exports lt_accelerator_open() and lt_accelerator_libraries(), and calls only those
 * functions of the library that are in lt_host. Both sides share these structs, so a plugin of
 * another version is refused.
 */
#ifndef LT_OPS_PLUGIN_H
#define LT_OPS_PLUGIN_H

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/tensor.h"
#include "ops/list.h"
#include "ops/ops.h"

/* An op's index in lt_accelerator.op: its position in list.h. */
typedef enum lt_op_id {
#define X(name) LT_OP_##name,
    LT_OP_LIST(X)
#undef X
        LT_OPS
} lt_op_id;

typedef struct lt_host { /* the functions of the library that a plugin may call */
    lt_status (*fail)(lt_status code, const char *fmt, ...);
    void (*log)(lt_ctx *ctx, lt_log_level level, const char *fmt, ...);
} lt_host;

/* The statistics of both sets of elements together. */
static inline lt_grad_stats lt__grad_stats_join(lt_grad_stats a, lt_grad_stats b)
{
    lt_grad_stats both = {fmax(a.largest, b.largest), a.not_finite + b.not_finite};
    return both;
}

/* The statistics of one gradient in device memory. A kernel writes them in parts. Later, one kernel
 * joins the parts of all gradients. */
enum { LT_GRAD_PARTS = 512 };
typedef struct lt_grad_row {
    int64_t parts; /* number of parts in use */
    double by;     /* the joined magnitude is multiplied by it */
    lt_grad_stats part[LT_GRAD_PARTS];
} lt_grad_row;

typedef struct lt_accelerator { /* filled by lt_accelerator_open() */
    lt_device *device;          /* new; its close() frees it, once all tensors are freed */
    /* fwd and bwd are NULL if there is no kernel for an op. Views need none. add_squares must
     * accept an f64 total */
    lt_kernels op[LT_OPS];
    /* The functions below enqueue their work in the device's stream. Statistics and checks are in
     * device memory. */
    /* x = by * from, where from is x, or an f16 or bf16 tensor while x is f32; *row = the
     * statistics of from. row may be NULL. */
    lt_status (*rescale)(lt_tensor *x, const lt_tensor *from, double by, lt_grad_row *row);
    /* *row = the statistics that by * x would have; x is unchanged. */
    lt_status (*measure)(const lt_tensor *x, double by, lt_grad_row *row);
    /* stats[i] = the parts of rows[i] joined. */
    lt_status (*join)(lt_device *device, const lt_grad_row *rows, int n, lt_grad_stats *stats);
    /* check->grads = stats[0..n) combined. Sets check->skip if any value is not finite. */
    lt_status (*check_grads)(lt_device *device, const lt_grad_stats *stats, int n,
                             lt_step_check *check);
    /* Sets x to zero if *leftover has non-finite values and stats[0..n) have none. */
    lt_status (*zero_leftover)(lt_tensor *x, const lt_grad_stats *leftover,
                               const lt_grad_stats *stats, int n);
    lt_check_loss_fn check_loss;
    lt_clip_fn clip;
    char name[96]; /* for lt_backend(): "NVIDIA H200 (cuDNN 9.19.0, CUDA 13.0)" */
} lt_accelerator;

typedef struct lt_accelerator_config {
    int index;                /* device number, from 0, or LT_ANY_DEVICE */
    int local_rank;           /* LT_ANY_DEVICE selects device local_rank % number of devices */
    bool deterministic, tf32; /* as in lt_config */
} lt_accelerator_config;

enum { LT_ANY_DEVICE = -1 };
enum { LT_NO_ACCELERATOR = -2 };

/* Opens a device and fills *accelerator. version: the library's LT_VERSION. host is borrowed for
 * the lifetime of the process. Returns 0 on success, LT_NO_ACCELERATOR if the machine has no
 * accelerator, or -1 if it has one that cannot be used. On failure writes the reason to
 * text[0..bytes). */
typedef int (*lt_accelerator_open_fn)(const char *version, const lt_host *host,
                                      const lt_accelerator_config *config,
                                      lt_accelerator *accelerator, char *text, size_t bytes);
/* Writes which libraries of the accelerator's vendor the plugin finds: see lt_libraries(). */
typedef void (*lt_accelerator_libraries_fn)(char *text, size_t bytes);

/* For plugins. Returns false, with the reason in text, if the library has another version. */
static inline bool lt__same_version(const char *version, char *text, size_t bytes)
{
    if (strcmp(version, LT_VERSION) == 0)
        return true;
    snprintf(text, bytes,
             "libluatrain-cuda.so is from luatrain %s, but this is luatrain %s; use both from the "
             "same build",
             LT_VERSION, version);
    return false;
}

#endif
