/* copy.c - reads, writes, copies and fills whole tensors, on any device. */
#include "core/tensor.h"

lt_status lt_read(lt_tensor *x, void *data)
{
    LT_TRY(lt__check_alive(x));
    return lt__move(x->ctx->devices[0], data, x->storage->device, x->data, lt__tensor_bytes(x));
}

lt_status lt_write(lt_tensor *x, const void *data)
{
    LT_TRY(lt__check_alive(x));
    lt__bump_version(x);
    return lt__move(x->storage->device, x->data, x->ctx->devices[0], data, lt__tensor_bytes(x));
}

lt_tensor *lt_tensor_full(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims, double value)
{
    LT_NEED_CTX(ctx, NULL);
    lt_tensor *x = lt_tensor_new(ctx, dtype, ndim, dims);
    return x ? lt__tensor_if(lt_fill(x, value), x) : NULL;
}

lt_tensor *lt_tensor_from(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims,
                          const void *data)
{
    LT_NEED_CTX(ctx, NULL);
    lt_tensor *x = lt_tensor_new(ctx, dtype, ndim, dims);
    return x ? lt__tensor_if(lt_write(x, data), x) : NULL;
}

/* ==== Copies ================================================================================== */

/* lt_copy() between two devices. */
static lt_status copy_across(lt_tensor *dst, lt_tensor *src)
{
    lt_device *to = dst->storage->device, *from = src->storage->device;
    if (dst->dtype == src->dtype)
        return lt__move(to, dst->data, from, src->data, lt__tensor_bytes(dst));
    /* Convert on the side that makes the transfer smaller. */
    bool first = lt__tensor_bytes(dst) < lt__tensor_bytes(src);
    lt_tensor *between =
        lt__tensor_like(src, first ? from : to, (lt_dtype)(first ? dst : src)->dtype);
    if (!between)
        return lt_errcode();
    lt_status status = lt_copy(between, src);
    if (status == LT_OK)
        status = lt_copy(dst, between);
    lt_release(between);
    return status;
}

lt_status lt_copy(lt_tensor *dst, lt_tensor *src)
{
    char a[96], b[96];
    LT_TRY(lt__check_alive(dst));
    LT_TRY(lt__check_alive(src));
    if (dst->count != src->count)
        return lt_fail(LT_EINVAL, "copy requires the same number of elements: %s and %s differ",
                       lt_describe(src, a, sizeof a), lt_describe(dst, b, sizeof b));
    lt_device *device = dst->storage->device;
    lt__bump_version(dst);
    if (device != src->storage->device && !(device->is_host && src->storage->device->is_host))
        return copy_across(dst, src);
    if (dst->dtype == src->dtype)
        return device->copy(device, dst->data, src->data, lt__tensor_bytes(dst));
    return device->convert(device, dst->data, (lt_dtype)dst->dtype, src->data, (lt_dtype)src->dtype,
                           (size_t)dst->count);
}

lt_tensor *lt__tensor_copy(lt_tensor *x, lt_dtype dtype)
{
    lt_tensor *y = lt__tensor_like(x, x->storage->device, dtype);
    return y ? lt__tensor_if(lt_copy(y, x), y) : NULL;
}

/* Copies x to a device. New. */
static lt_tensor *copy_on(lt_tensor *x, lt_device *device, bool kept)
{
    lt_tensor *y = lt__tensor_new(x->ctx, device, (lt_dtype)x->dtype, x->ndim, x->dims, kept);
    return y ? lt__tensor_if(lt_copy(y, x), y) : NULL;
}

lt_tensor *lt_to(lt_tensor *x, const char *name)
{
    lt_device *device = lt__device_find(x->ctx, name);
    if (!device)
        return NULL;
    if (x->meta || (x->storage && x->storage->device == device))
        return lt_view(x, x->ndim, x->dims);
    return lt__check_alive(x) == LT_OK ? lt__tensor_inherit(copy_on(x, device, false), x) : NULL;
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
    lt_sha256_add(s, here->data, lt__tensor_bytes(x));
    lt_release(here);
    return LT_OK;
}

/* ==== Fills =================================================================================== */

lt_status lt_fill(lt_tensor *dst, double value)
{
    lt_dtype dtype = (lt_dtype)dst->dtype;
    LT_TRY(lt__check_alive(dst));
    if (!lt__dtype_can_represent(dtype, value))
        return lt_fail(LT_EINVAL, "%g does not fit into %s", value, lt_dtype_name(dtype));
    lt__bump_version(dst);
    lt_device *device = dst->storage->device;
    return device->fill(device, dst->data, dtype, (size_t)dst->count, value);
}

/* Devices fill with a double. A value that a double cannot represent is written once and then
 * copied repeatedly, doubling the filled part each time. */
lt_status lt_fill_integer(lt_tensor *dst, int64_t value)
{
    lt_dtype dtype = (lt_dtype)dst->dtype;
    if (!lt__dtype_can_represent_integer(dtype, value))
        return lt_fail(LT_EINVAL, "%lld does not fit into %s", (long long)value,
                       lt_dtype_name(dtype));
    if (lt__is_exact_double(value))
        return lt_fill(dst, (double)value);
    LT_TRY(lt__check_alive(dst));
    lt__bump_version(dst);
    lt_device *device = dst->storage->device;
    char one[8], *to = dst->data;
    size_t size = lt_dtype_bytes(dtype), n = (size_t)dst->count;
    lt_convert(one, dtype, &value, LT_I64, 1);
    if (n > 0)
        LT_TRY(lt__move(device, to, dst->ctx->devices[0], one, size));
    for (size_t done = 1, more; done < n; done += more) {
        more = LT_MIN(done, n - done);
        LT_TRY(device->copy(device, to + done * size, to, more * size));
    }
    return LT_OK;
}
