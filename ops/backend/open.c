/* open.c - opens a context with all ops registered. */
#include <stdio.h>

#include "ops/list.h"
#include "ops/backend/state.h"

#define X(name) extern const lt_op lt__op_##name;
LT_OP_LIST(X)
#undef X

#ifndef LT_WITH_DNNL
void lt__dnnl_free(struct lt_dnnl *dnnl) { (void)dnnl; }

char *lt__cpu_backend(char *buffer, size_t bytes)
{
    snprintf(buffer, bytes, "reference kernels");
    return buffer;
}

#endif

static void ops_freed(lt_ctx *ctx)
{
    struct lt_ops *ops = ctx->slots.ops;
    lt__dnnl_free(ops->dnnl);
    lt__accelerator_free(ctx, ops->accelerator);
    lt__free(ctx, ops, sizeof *ops);
}

lt_ctx *lt_open(const lt_config *config)
{
    static const lt_op *const table[] = {
#define X(name) &lt__op_##name,
        LT_OP_LIST(X)
#undef X
    };
    lt_config own = config ? *config : (lt_config){0};
    const char *device = own.device;
    if (lt__is_accelerator(device))
        own.device = "cpu"; /* lt__accelerator_open() adds the accelerator below */
    lt_ctx *ctx = lt_ctx_new(&own);
    if (!ctx)
        return NULL;
    if (!(ctx->slots.ops = lt__alloc_zero(ctx, sizeof *ctx->slots.ops)))
        goto fail;
    ctx->slots.ops_freed = ops_freed;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (lt_op_register(ctx, table[i]) != LT_OK)
            goto fail;
    if (lt__is_accelerator(device) && lt__accelerator_open(ctx, device) != LT_OK)
        goto fail;
    return ctx;
fail:
    lt_ctx_free(ctx);
    return NULL;
}
