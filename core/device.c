/* device.c - finds devices by name and copies between their memory.
 *
 * The CPU may be unable to read the addresses of an accelerator. All copies between the two go
 * through the accelerator's copy(), which accepts both kinds of addresses, and the host waits for
 * them to finish. Afterwards the caller may change its own memory.
 */
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"

const char *lt_device_name(const lt_ctx *ctx) { return ctx->device->name; }

const char *lt_device_of(const lt_tensor *x)
{
    return x->storage ? x->storage->device->name : x->pending ? x->ctx->device->name : NULL;
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

static size_t bytes_of(const lt_tensor *x)
{
    return (size_t)x->count * lt_dtype_bytes((lt_dtype)x->dtype);
}

lt_status lt_read(lt_tensor *x, void *data)
{
    LT_TRY(lt__check_alive(x));
    return lt__move(x->ctx->devices[0], data, x->storage->device, x->data, bytes_of(x));
}

lt_status lt_write(lt_tensor *x, const void *data)
{
    LT_TRY(lt__check_alive(x));
    lt__wrote(x);
    return lt__move(x->storage->device, x->data, x->ctx->devices[0], data, bytes_of(x));
}

lt_status lt__copy_across(lt_tensor *dst, lt_tensor *src)
{
    lt_device *to = dst->storage->device, *from = src->storage->device;
    if (dst->dtype == src->dtype)
        return lt__move(to, dst->data, from, src->data, bytes_of(dst));
    /* Convert on the side where the smaller of the two representations crosses. */
    bool first = bytes_of(dst) < bytes_of(src);
    lt_tensor *between = lt__tensor_new(dst->ctx, first ? from : to,
                                        (lt_dtype)(first ? dst : src)->dtype, src->ndim, src->dims,
                                        true);
    if (!between)
        return lt_errcode();
    lt_status status = lt_copy(between, src);
    if (status == LT_OK)
        status = lt_copy(dst, between);
    lt_release(between);
    return status;
}

/* Copies x to a device. New. */
static lt_tensor *copy_on(lt_tensor *x, lt_device *device, bool kept)
{
    lt_tensor *y = lt__tensor_new(x->ctx, device, (lt_dtype)x->dtype, x->ndim, x->dims, kept);
    if (y && lt_copy(y, x) != LT_OK) {
        lt_release(y);
        return NULL;
    }
    return y;
}

lt_tensor *lt_to(lt_tensor *x, const char *name)
{
    lt_device *device = lt__device_find(x->ctx, name);
    if (!device || lt__check_alive(x) != LT_OK)
        return NULL;
    return x->storage->device == device ? lt_view(x, x->ndim, x->dims) : copy_on(x, device, false);
}

lt_tensor *lt__on_host(lt_tensor *x)
{
    if (lt__check_alive(x) != LT_OK)
        return NULL;
    return x->storage->device->is_host ? lt_retain(x) : copy_on(x, x->ctx->devices[0], true);
}

lt_status lt__sha256_add_tensor(lt_sha256 *s, lt_tensor *x)
{
    lt_tensor *here = lt__on_host(x);
    if (!here)
        return lt_errcode();
    lt_sha256_add(s, here->data, (size_t)x->count * lt_dtype_bytes((lt_dtype)x->dtype));
    lt_release(here);
    return LT_OK;
}
