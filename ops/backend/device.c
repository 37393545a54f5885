/* device.c - the accelerator of a context: opens its plugin, adds its device and kernels to the
 * context, and names the backend.
 */
#include <stdio.h>

#include "core/plugin.h"
#include "ops/backend/plugin.h"
#include "ops/backend/state.h"

bool lt__is_accelerator(const char *device)
{
    return device && (strcmp(device, "auto") == 0 || lt__cuda_index(device) >= 0);
}

/* Fills *a. On failure returns LT_EENV with the reason, and *none is true if this machine or this
 * build has no accelerator at all. */
static lt_status open_plugin(const lt_ctx *ctx, const char *device, lt_accelerator *a, bool *none)
{
    lt_accelerator_config config = {.index = LT_ANY_DEVICE,
                                    .local_rank = ctx->config.local_rank,
                                    .deterministic = ctx->config.deterministic,
                                    .tf32 = ctx->config.tf32};

    static const lt_host host = {lt_fail, lt_log};
    char file[LT_PLUGIN_PATH], text[512] = "";
    lt_accelerator_open_fn open_accelerator;
    if (strchr(device, ':'))
        config.index = lt__cuda_index(device);
    *none = !lt__plugin_find("cuda", file);
    if (*none)
        return lt_fail(LT_EENV, "libluatrain-cuda.so is missing; it is built if nvcc is installed");
    LT_TRY(lt__plugin_open(file, "lt_accelerator_open", &open_accelerator));
    int rc = open_accelerator(LT_VERSION, &host, &config, a, text, sizeof text);
    *none = rc == LT_NO_ACCELERATOR;
    return rc == 0 ? LT_OK : lt_fail(LT_EENV, "%s", text);
}

lt_status lt__accelerator_open(lt_ctx *ctx, const char *device)
{
    struct lt_ops *ops = ctx->slots.ops;
    bool is_auto = strcmp(device, "auto") == 0, none;
    lt_accelerator *a = lt__alloc_zero(ctx, sizeof *a);
    if (!a)
        return LT_ENOMEM;
    if (open_plugin(ctx, device, a, &none) != LT_OK) {
        lt__free(ctx, a, sizeof *a);
        if (!is_auto)
            return lt_fail(LT_EENV, "device %s: %s; use the device cpu (--device cpu)", device,
                           lt_errmsg());
        snprintf(ctx->note, sizeof ctx->note, "computing on the CPU: %s", lt_errmsg());
        ctx->note_level = none ? LT_LOG_DEBUG : LT_LOG_WARN;
        return LT_OK;
    }
    ops->accelerator = a;
    ctx->device = ctx->devices[1] = a->device;
    lt_set_kernels(ctx, a->op, LT_OPS, a->check_loss, a->clip);
    return LT_OK;
}

void lt__accelerator_free(lt_ctx *ctx, struct lt_accelerator *a)
{
    lt__free(ctx, a, sizeof *a); /* the context closes the device, after the last tensor */
}

char *lt_backend(const lt_ctx *ctx, char *buffer, size_t bytes)
{
    const lt_accelerator *a = ctx ? ctx->slots.ops->accelerator : NULL;
    if (!a)
        return lt__cpu_backend(buffer, bytes);
    snprintf(buffer, bytes, "%s", a->name);
    return buffer;
}

char *lt_libraries(char *buffer, size_t bytes)
{
    char file[LT_PLUGIN_PATH];
    lt_accelerator_libraries_fn list;
    buffer[0] = 0;
    if (lt__plugin_find("cuda", file) &&
        lt__plugin_open(file, "lt_accelerator_libraries", &list) == LT_OK)
        list(buffer, bytes);
    return buffer;
}

const lt_accelerator *lt__accelerator(const lt_ctx *ctx) { return ctx->slots.ops->accelerator; }
