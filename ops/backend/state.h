/* state.h - the state that ops/ keeps in a context: oneDNN and the accelerator. Op files do not
 * need this header. */
#ifndef LT_OPS_STATE_H
#define LT_OPS_STATE_H

#include "core/tensor.h"
#include "ops/ops.h"

/* Freed with the context. */
struct lt_ops {
    struct lt_dnnl *dnnl;               /* oneDNN engine and plans; NULL until the first use */
    struct lt_accelerator *accelerator; /* filled by the plugin; NULL if none is open */
};
void lt__dnnl_free(struct lt_dnnl *dnnl); /* NULL is fine */
/* The CPU part of lt_backend(): writes the backend's name to buffer and returns buffer. */
char *lt__cpu_backend(char *buffer, size_t bytes);

/* Whether device, which may be NULL, is "auto" or names an accelerator. */
bool lt__is_accelerator(const char *device);
/* Opens the accelerator and makes it the device of new tensors in ctx. The ops of ctx must be
 * registered already. LT_ENOMEM, or LT_EENV if it cannot be used. With "auto", returns LT_OK
 * instead of LT_EENV and writes the reason to ctx->note. */
lt_status lt__accelerator_open(lt_ctx *ctx, const char *device);
/* Frees the struct but not the device, which the context closes. NULL is fine. */
void lt__accelerator_free(lt_ctx *ctx, struct lt_accelerator *accelerator);
/* The accelerator of ctx, or NULL. Borrowed. */
const struct lt_accelerator *lt__accelerator(const lt_ctx *ctx);

#endif
