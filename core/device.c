/* device.c - finds devices by name and moves bytes between their memory.
 *
 * The CPU may be unable to read the addresses of an accelerator. All copies between the two go
 * through the accelerator's copy(), which accepts both kinds of addresses, and the host waits for
 * them to finish. Afterwards the caller may change its own memory.
 */
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"

const char *lt_device_name(const lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, NULL);
    return ctx->device->name;
}

const char *lt_device_of(const lt_tensor *x)
{
    bool is_planned = x->pending || x->meta;
    return x->storage ? x->storage->device->name : is_planned ? x->ctx->device->name : NULL;
}

int lt__cuda_index(const char *text)
{
    if (strncmp(text, "cuda", 4) != 0)
        return -1;
    const char *digits = text + 5;
    if (!text[4])
        return 0;
    size_t n = text[4] == ':' ? strspn(digits, "0123456789") : 0;
    return n > 0 && n < 4 && !digits[n] ? atoi(digits) : -1;
}

/* "cuda" without a number matches any CUDA device: a context has at most one. */
static bool is_called(const lt_device *device, const char *name)
{
    size_t n = strlen(name);
    return strncmp(device->name, name, n) == 0 && (!device->name[n] || device->name[n] == ':');
}

lt_device *lt__device_find(lt_ctx *ctx, const char *name)
{
    const lt_device *other = ctx->devices[1];
    for (int i = 0; i < LT_MAX_DEVICES; i++)
        if (ctx->devices[i] && *name && is_called(ctx->devices[i], name))
            return ctx->devices[i];
    lt_fail(LT_EENV, "device '%s' is not available; this context has 'cpu'%s%s%s", name,
            other ? " and '" : "", other ? other->name : "", other ? "'" : "");
    return NULL;
}

lt_status lt__move(lt_device *to, void *dst, lt_device *from, const void *src, size_t bytes)
{
    if (to != from && !to->is_host && !from->is_host)
        return lt_fail(LT_EINVAL,
                       "cannot copy from %s of one context to %s of another; copy through the CPU",
                       from->name, to->name);
    lt_device *device = to->is_host ? from : to;
    LT_TRY(device->copy(device, dst, src, bytes));
    return to == from ? LT_OK : device->sync(device);
}
