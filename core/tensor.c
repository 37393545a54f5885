/* tensor.c - tensors, their storages and scopes.
 *
 * A scope is a list of the tensors made while it was innermost. Popping it releases the memory of
 * each tensor even if references remain: the garbage collector of a script runs too late for large
 * tensors, and it does not see a device's memory at all. A tensor survives only if it is kept
 * explicitly (lt_keep) or was never put into the list (parameters, buffers, optimizer slots).
 */
#include <stdio.h>
#include <string.h>

#include "core/pool.h"

/* ==== Storages ================================================================================ */

static lt_storage *storage_of(lt_ctx *ctx, lt_device *device, void *data, size_t bytes)
{
    lt_storage *s = lt__alloc_zero(ctx, sizeof *s);
    if (!s)
        return NULL;
    atomic_init(&s->refs, 1);
    atomic_init(&s->version, 0);
    s->ctx = ctx;
    s->device = device;
    s->data = data;
    s->bytes = bytes;
    return s;
}

lt_storage *lt__storage_new(lt_ctx *ctx, lt_device *device, size_t bytes)
{
    lt_storage *s = storage_of(ctx, device, NULL, bytes);
    if (s && !(s->data = lt__device_alloc(ctx, device, bytes))) {
        lt__free(ctx, s, sizeof *s);
        return NULL;
    }
    return s;
}

lt_storage *lt__storage_over(lt_ctx *ctx, void *data, size_t bytes,
                             void (*deleter)(void *ud, void *data), void *ud)
{
    lt_storage *s = storage_of(ctx, ctx->devices[0], data, bytes);
    if (s) {
        s->deleter = deleter;
        s->ud = ud;
    }
    return s;
}

void lt__storage_release(lt_storage *s)
{
    if (!s || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) != 1)
        return;
    if (s->deleter)
        s->deleter(s->ud, s->data);
    else
        lt__device_free(s->ctx, s->device, s->data, s->bytes);
    lt__free(s->ctx, s, sizeof *s);
}

static lt_storage *storage_retain(lt_storage *s)
{
    atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
    return s;
}

/* ==== Scopes ================================================================================== */

static void link_scope(lt_tensor *x, lt_scope *scope)
{
    x->scope = scope;
    x->prev = NULL;
    x->next = scope->first;
    if (x->next)
        x->next->prev = x;
    scope->first = x;
}

static void unlink_scope(lt_tensor *x)
{
    if (!x->scope)
        return;
    if (x->prev)
        x->prev->next = x->next;
    else
        x->scope->first = x->next;
    if (x->next)
        x->next->prev = x->prev;
    x->scope = NULL;
}

lt_status lt_scope_push(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, LT_EINVAL);
    LT_TRY(lt__check_open(ctx, "a scope"));
    lt_scope *scope = lt__alloc_zero(ctx, sizeof *scope);
    if (!scope)
        return LT_ENOMEM;
    scope->outer = ctx->scope;
    ctx->scope = scope;
    return LT_OK;
}

/* Marks x dead and releases its memory, unless it is kept. The caller has a reference to x. */
static void end_in_scope(lt_tensor *x)
{
    lt_ctx *ctx = x->ctx;
    if (ctx->slots.forget && (x->node || x->leaf || x->home))
        ctx->slots.forget(x, !x->kept);
    if (x->kept)
        return;
    x->dead = true;
    x->data = NULL;
    lt__storage_release(x->storage);
    x->storage = NULL;
}

/* Ends the tensors of a scope, and frees it. */
static void end_scope(lt_ctx *ctx, lt_scope *scope)
{
    for (;;) {
        pthread_mutex_lock(&ctx->lock);
        lt_tensor *x = scope->first;
        int refs = 0;
        if (x) {
            unlink_scope(x);
            refs = atomic_load_explicit(&x->refs, memory_order_relaxed);
            /* 0: another thread is about to free x and is waiting for the lock */
            while (refs > 0 && !atomic_compare_exchange_weak(&x->refs, &refs, refs + 1))
                ;
        }
        pthread_mutex_unlock(&ctx->lock);
        if (!x)
            break;
        if (refs > 0) {
            end_in_scope(x);
            lt_release(x);
        }
    }
    lt__free(ctx, scope, sizeof *scope);
}

void lt_scope_pop(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, );
    lt_scope *scope = ctx->scope;
    if (!scope)
        return;
    lt_scope *outer = scope->outer;
    end_scope(ctx, scope);
    ctx->scope = outer;
}

lt_scope *lt__scope_take(lt_ctx *ctx)
{
    lt_scope *scope = ctx->scope;
    if (!scope)
        return NULL;
    atomic_fetch_add(&ctx->taken_scopes, 1);
    ctx->scope = scope->outer;
    scope->outer = NULL;
    return scope;
}

void lt__scope_end(lt_ctx *ctx, lt_scope *scope)
{
    if (!scope)
        return;
    end_scope(ctx, scope);
    atomic_fetch_sub(&ctx->taken_scopes, 1);
}

void lt_keep(lt_tensor *x) { x->kept = true; }

void lt_keep_outer(lt_tensor *x)
{
    lt_ctx *ctx = x->ctx;
    lt_scope *inner = ctx->scope;
    if (!inner || x->scope != inner)
        return;
    if (ctx->slots.forget && (x->node || x->home))
        ctx->slots.forget(x, false);
    pthread_mutex_lock(&ctx->lock);
    unlink_scope(x);
    if (inner->outer)
        link_scope(x, inner->outer);
    pthread_mutex_unlock(&ctx->lock);
}

bool lt_is_dead(const lt_tensor *x) { return x->dead; }

lt_status lt__check_alive(const lt_tensor *x)
{
    if (x->dead)
        return lt_fail(LT_EINVAL, "this tensor belongs to a step that is over; keep it within "
                                  "the step, with x:keep() or lt_keep(x)");
    if (x->pending)
        return lt_fail(LT_EINVAL, "this parameter has no memory yet; call its model, load it or "
                                  "make an optimizer first, or in C call lt_params_place()");
    if (x->meta)
        return x->home ? x->ctx->slots.refuse_meta(x)
                       : lt_fail(LT_EINVAL, "this tensor has dims, but no values");
    return LT_OK;
}

/* ==== Making tensors ========================================================================== */

lt_status lt__count_dims(int ndim, const int64_t *dims, int64_t *count)
{
    if (ndim < 0 || ndim > LT_MAX_DIMS)
        return lt_fail(LT_EINVAL, "a tensor can have at most %d axes, got %d", LT_MAX_DIMS, ndim);
    int64_t n = 1, nonzero = 1; /* a dim of 0 must not hide an overflow */
    for (int i = 0; i < ndim; i++) {
        if (dims[i] < 0)
            return lt_fail(LT_EINVAL, "dim %d is %lld, but dims cannot be negative", i + 1,
                           (long long)dims[i]);
        if (__builtin_mul_overflow(nonzero, dims[i] ? dims[i] : 1, &nonzero) ||
            nonzero > INT64_MAX / 16)
            return lt_fail(LT_EINVAL, "the product of %d dims is too large", ndim);
        n *= dims[i] != 0;
    }
    *count = n * nonzero;
    return LT_OK;
}

lt_status lt__dtype_check(lt_dtype dtype)
{
    return (unsigned)dtype < LT_DTYPE_COUNT
               ? LT_OK
               : lt_fail(LT_EINVAL, "%d is not a dtype; see lt_dtype", (int)dtype);
}

/* Creates a tensor struct without memory, in the current scope unless kept. */
static lt_tensor *header(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims, bool kept)
{
    int64_t count;
    if (lt__dtype_check(dtype) != LT_OK || lt__count_dims(ndim, dims, &count) != LT_OK)
        return NULL;
    lt_tensor *x = lt__alloc(ctx, sizeof *x);
    if (!x)
        return NULL;
    memset(x, 0, offsetof(lt_tensor, dims));
    atomic_init(&x->refs, 1);
    x->dtype = (uint8_t)dtype;
    x->ndim = (uint8_t)ndim;
    x->count = count;
    for (int i = 0; i < ndim; i++)
        x->dims[i] = dims[i];
    x->data = NULL;
    x->storage = NULL;
    x->ctx = lt__ctx_retain(ctx);
    x->node = NULL;
    x->leaf = NULL;
    x->home = NULL;
    x->scope = NULL;
    if (ctx->scope && !kept) {
        pthread_mutex_lock(&ctx->lock);
        link_scope(x, ctx->scope);
        pthread_mutex_unlock(&ctx->lock);
    }
    return x;
}

/* Gives x uninitialised memory. LT_ENOMEM. */
static lt_status give_memory(lt_tensor *x, lt_device *device)
{
    x->storage = lt__storage_new(x->ctx, device, lt__tensor_bytes(x));
    x->data = x->storage ? x->storage->data : NULL;
    return x->storage ? LT_OK : LT_ENOMEM;
}

lt_tensor *lt__tensor_if(lt_status status, lt_tensor *x)
{
    if (status == LT_OK)
        return x;
    lt_release(x);
    return NULL;
}

lt_tensor *lt__tensor_new(lt_ctx *ctx, lt_device *device, lt_dtype dtype, int ndim,
                          const int64_t *dims, bool kept)
{
    lt_tensor *x = header(ctx, dtype, ndim, dims, kept);
    return x ? lt__tensor_if(give_memory(x, device), x) : NULL;
}

lt_tensor *lt__tensor_like(const lt_tensor *x, lt_device *device, lt_dtype dtype)
{
    return lt__tensor_new(x->ctx, device, dtype, x->ndim, x->dims, true);
}

lt_tensor *lt_tensor_new(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims)
{
    LT_NEED_CTX(ctx, NULL);
    return lt__tensor_new(ctx, ctx->device, dtype, ndim, dims, false);
}

lt_tensor *lt__tensor_over(lt_storage *storage, lt_dtype dtype, int ndim, const int64_t *dims,
                           int64_t offset, bool kept)
{
    lt_tensor *x = header(storage->ctx, dtype, ndim, dims, kept);
    if (x)
        lt__tensor_place(x, storage, offset);
    return x;
}

lt_tensor *lt__tensor_pending(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims)
{
    lt_tensor *x = header(ctx, dtype, ndim, dims, true);
    if (x)
        x->pending = true;
    return x;
}

lt_tensor *lt__tensor_meta(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims, bool kept)
{
    lt_tensor *x = header(ctx, dtype, ndim, dims, kept);
    if (x)
        x->meta = true;
    return x;
}

lt_status lt__tensor_arrive(lt_tensor *x)
{
    LT_TRY(give_memory(x, x->ctx->device));
    x->meta = false;
    return LT_OK;
}

void lt__tensor_place(lt_tensor *x, lt_storage *storage, int64_t offset)
{
    x->storage = storage_retain(storage);
    x->data = (char *)storage->data + (size_t)offset * lt_dtype_bytes((lt_dtype)x->dtype);
    x->pending = false;
}

lt_tensor *lt_retain(lt_tensor *x)
{
    if (x)
        atomic_fetch_add_explicit(&x->refs, 1, memory_order_relaxed);
    return x;
}

void lt_release(lt_tensor *x)
{
    if (!x || atomic_fetch_sub_explicit(&x->refs, 1, memory_order_acq_rel) != 1)
        return;
    lt_ctx *ctx = x->ctx;
    if (ctx->scope || atomic_load_explicit(&ctx->taken_scopes, memory_order_relaxed) > 0) {
        pthread_mutex_lock(&ctx->lock);
        unlink_scope(x);
        pthread_mutex_unlock(&ctx->lock);
    }
    if (x->node || x->leaf || x->home)
        ctx->slots.forget(x, true);
    lt__storage_release(x->storage);
    lt__free(ctx, x, sizeof *x);
    lt__ctx_release(ctx);
}

/* ==== Reading tensors ========================================================================= */

lt_ctx *lt_tensor_ctx(const lt_tensor *x) { return x->ctx; }
lt_dtype lt_tensor_dtype(const lt_tensor *x) { return (lt_dtype)x->dtype; }
int lt_ndim(const lt_tensor *x) { return x->ndim; }
const int64_t *lt_dims(const lt_tensor *x) { return x->dims; }
int64_t lt_count(const lt_tensor *x) { return x->count; }
int64_t lt_dim(const lt_tensor *x, int axis) { return x->dims[axis < 0 ? axis + x->ndim : axis]; }

void *lt_data(lt_tensor *x)
{
    if (lt__check_alive(x) != LT_OK)
        return NULL;
    if (x->storage->device->is_host)
        return x->data;
    lt_fail(LT_EINVAL,
            "the CPU cannot read a tensor on %s; copy it with lt_to(x, \"cpu\") or lt_read()",
            x->storage->device->name);
    return NULL;
}

/* Reads one element and converts it to dtype. */
static lt_status element(lt_tensor *x, int64_t index, void *value, lt_dtype dtype)
{
    char one[8];
    LT_TRY(lt__check_alive(x));
    if (index < 0 || index >= x->count)
        return lt_fail(LT_EINVAL, "element %lld is out of range for a tensor of %lld",
                       (long long)index, (long long)x->count);
    size_t size = lt_dtype_bytes((lt_dtype)x->dtype);
    LT_TRY(lt__move(x->ctx->devices[0], one, x->storage->device,
                    (char *)x->data + (size_t)index * size, size));
    lt_convert(value, dtype, one, (lt_dtype)x->dtype, 1);
    return LT_OK;
}

lt_status lt_item(lt_tensor *x, int64_t index, double *value)
{
    return element(x, index, value, LT_F64);
}

lt_status lt_item_integer(lt_tensor *x, int64_t index, int64_t *value)
{
    return element(x, index, value, LT_I64);
}

char *lt_describe(const lt_tensor *x, char *buffer, size_t bytes)
{
    size_t used = 0;
    for (int i = 0; i < x->ndim && used < bytes; i++)
        used += (size_t)snprintf(buffer + used, bytes - used, i ? "x%lld" : "%lld",
                                 (long long)x->dims[i]);
    if (used < bytes)
        snprintf(buffer + used, bytes - used, "%s%s", x->ndim ? " " : "scalar ",
                 lt_dtype_name((lt_dtype)x->dtype));
    return buffer;
}

/* ==== Views =================================================================================== */

lt_tensor *lt__tensor_view(lt_tensor *x, int ndim, const int64_t *dims, int64_t offset, bool kept)
{
    size_t size = lt_dtype_bytes((lt_dtype)x->dtype);
    if (x->meta)
        return lt__tensor_meta(x->ctx, (lt_dtype)x->dtype, ndim, dims, kept);
    int64_t base = (int64_t)((size_t)((char *)x->data - (char *)x->storage->data) / size);
    return lt__tensor_over(x->storage, (lt_dtype)x->dtype, ndim, dims, base + offset, kept);
}

lt_tensor *lt__tensor_inherit(lt_tensor *y, const lt_tensor *x)
{
    return y && x->home ? lt__tensor_if(x->ctx->slots.inherit(y, x), y) : y;
}

/* Whether a view of x can be made. */
static lt_status check_view(const lt_tensor *x)
{
    return x->meta && !x->dead ? LT_OK : lt__check_alive(x);
}

/* A view outside of any op. */
static lt_tensor *view_here(lt_tensor *x, int ndim, const int64_t *dims, int64_t offset)
{
    return lt__tensor_inherit(lt__tensor_view(x, ndim, dims, offset, false), x);
}

lt_tensor *lt_view(lt_tensor *x, int ndim, const int64_t *dims)
{
    int64_t count;
    char text[96];
    if (check_view(x) != LT_OK || lt__count_dims(ndim, dims, &count) != LT_OK)
        return NULL;
    if (count != x->count) {
        lt_fail(LT_EINVAL, "a view of %s has %lld elements, but the dims require %lld",
                lt_describe(x, text, sizeof text), (long long)x->count, (long long)count);
        return NULL;
    }
    return view_here(x, ndim, dims, 0);
}

lt_tensor *lt_rows(lt_tensor *x, int64_t first, int64_t count)
{
    char text[96];
    if (check_view(x) != LT_OK)
        return NULL;
    if (x->ndim == 0 || first < 0 || count < 0 || first > x->dims[0] - count) {
        lt_fail(LT_EINVAL, "%lld rows from row %lld (counted from 0) are outside %s",
                (long long)count, (long long)first, lt_describe(x, text, sizeof text));
        return NULL;
    }
    int64_t dims[LT_MAX_DIMS], row = x->dims[0] ? x->count / x->dims[0] : 0;
    memcpy(dims, x->dims, sizeof dims);
    dims[0] = count;
    return view_here(x, x->ndim, dims, first * row);
}
