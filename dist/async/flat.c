/* flat.c - tensors in the layout of an optimizer's arenas; see flat.h. */
#include <stdlib.h>

#include "core/tensor.h"
#include "dist/async/flat.h"

static lt_tensor *new_arena(lt_optim *optim, int a, int part)
{
    lt_tensor *x = lt_optim_arena(optim, a, part == LT_FLAT_NEW ? LT_OPTIM_VALUES : part);
    if (!x || part != LT_FLAT_NEW)
        return x;
    lt_tensor *own =
        lt__tensor_new(x->ctx, x->storage->device, (lt_dtype)x->dtype, 1, &x->count, true);
    lt_release(x);
    if (own && lt_fill(own, 0) == LT_OK)
        return own;
    lt_release(own);
    return NULL;
}

lt_status lt__flat_open(lt_optim *optim, int part, lt_flat_buffers *flat)
{
    int n = lt_optim_arenas(optim);
    *flat = (lt_flat_buffers){.n = n, .arena = calloc((size_t)n + 1, sizeof *flat->arena)};
    bool ok = flat->arena != NULL;
    for (int a = 0; ok && a < n; a++)
        ok = (flat->arena[a] = new_arena(optim, a, part)) != NULL;
    if (ok)
        return LT_OK;
    lt__flat_buffers_free(flat);
    return lt_fail(LT_ENOMEM, "out of memory for asynchronous training");
}

void lt__flat_buffers_free(lt_flat_buffers *flat)
{
    for (int a = 0; flat->arena && a < flat->n; a++)
        lt_release(flat->arena[a]);
    free(flat->arena);
    *flat = (lt_flat_buffers){0};
}

lt_status lt__flat_buffers_copy(const lt_flat_buffers *to, const lt_flat_buffers *from)
{
    for (int a = 0; a < to->n; a++)
        LT_TRY(lt_copy(to->arena[a], from->arena[a]));
    return LT_OK;
}

lt_tensor *lt__flat_buffers_range(const lt_flat_buffers *flat, const lt_optim_range *r)
{
    return lt__tensor_view(flat->arena[r->arena], 1, &r->count, r->offset, true);
}

lt_tensor *lt__optim_range(lt_optim *optim, int part, const lt_optim_range *r)
{
    lt_tensor *arena = lt_optim_arena(optim, r->arena, part);
    lt_tensor *x = arena ? lt__tensor_view(arena, 1, &r->count, r->offset, true) : NULL;
    lt_release(arena);
    return x;
}

size_t lt__flat_buffers_bytes(const lt_flat_buffers *flat)
{
    size_t bytes = 0;
    for (int a = 0; a < flat->n; a++)
        bytes += lt__tensor_bytes(flat->arena[a]);
    return bytes;
}
