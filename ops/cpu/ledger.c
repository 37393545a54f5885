/* ledger.c - rows of what was found in gradients, on either device. */
#include <stdlib.h>

#include "ops/kernel.h"
#include "ops/plugin.h"

struct lt_ledger {
    lt_ctx *ctx;
    lt_device *device;        /* the accelerator, or NULL */
    lt_found *here, *there;   /* rows: on the CPU, and on the accelerator, made when one is there */
    bool *is_there;
    int room;
};

lt_found lt__join_found(lt_found a, lt_found b)
{
    return (lt_found){fmax(a.largest, b.largest), a.not_finite + b.not_finite};
}

static void free_rows(lt_ledger *l)
{
    size_t rows = (size_t)l->room;
    lt__free(l->ctx, l->here, rows * sizeof *l->here);
    lt__free(l->ctx, l->is_there, rows * sizeof *l->is_there);
    if (l->there)
        lt__device_free(l->ctx, l->device, l->there, rows * sizeof *l->there);
}

/* Larger ones take over what there is. */
static lt_status make_room(lt_ledger *l, int row)
{
    int room = l->room ? l->room : 64;
    while (room <= row)
        room *= 2;
    if (room == l->room)
        return LT_OK;
    size_t rows = (size_t)room, before = (size_t)l->room;
    lt_ledger more = {.ctx = l->ctx, .device = l->device, .room = room};
    more.here = lt__alloc_zero(l->ctx, rows * sizeof *more.here);
    more.is_there = lt__alloc_zero(l->ctx, rows * sizeof *more.is_there);
    if (l->device)
        more.there = lt__device_alloc(l->ctx, l->device, rows * sizeof *more.there);
    bool done = more.here && more.is_there && (more.there || !l->device);
    if (done && before > 0) {
        memcpy(more.here, l->here, before * sizeof *l->here);
        memcpy(more.is_there, l->is_there, before * sizeof *l->is_there);
        done = !l->there || l->device->copy(l->device, more.there, l->there,
                                            before * sizeof *l->there) == LT_OK;
    }
    free_rows(done ? l : &more);
    if (done)
        *l = more;
    return done ? LT_OK : lt_errcode();
}

lt_ledger *lt_ledger_new(lt_ctx *ctx)
{
    lt_ledger *l = lt__alloc_zero(ctx, sizeof *l);
    if (!l)
        return NULL;
    l->ctx = lt__ctx_retain(ctx);
    l->device = ctx->devices[1];
    if (make_room(l, 0) == LT_OK)
        return l;
    lt_ledger_free(l);
    return NULL;
}

void lt_ledger_free(lt_ledger *l)
{
    if (!l)
        return;
    lt_ctx *ctx = l->ctx;
    free_rows(l);
    lt__free(ctx, l, sizeof *l);
    lt__ctx_release(ctx);
}

lt_status lt_ledger_rescale(lt_ledger *l, int row, lt_tensor *x, double by)
{
    LT_TRY(make_room(l, row));
    LT_TRY(lt__check_alive(x));
    l->is_there[row] = !x->storage->device->is_host;
    l->here[row] = (lt_found){0};
    if (!l->is_there[row])
        return lt_rescale(x, by, &l->here[row]);
    lt__wrote(x);
    return lt__accelerator(l->ctx)->rescale(x, by, &l->there[row]);
}

lt_status lt_ledger_find(lt_ledger *l, int row, lt_tensor *x, double by)
{
    LT_TRY(make_room(l, row));
    LT_TRY(lt__check_alive(x));
    l->is_there[row] = !x->storage->device->is_host;
    if (l->is_there[row])
        return lt__accelerator(l->ctx)->find(x, by, &l->there[row]);
    l->here[row] = lt_find(x);
    l->here[row].largest *= by;
    return LT_OK;
}

lt_status lt_ledger_strike(lt_ledger *l, int row)
{
    LT_TRY(make_room(l, row));
    l->here[row] = (lt_found){0};
    return l->is_there[row] ? l->device->fill(l->device, &l->there[row], LT_U8,
                                              sizeof *l->there, 0)
                            : LT_OK;
}

static bool some_are_there(const lt_ledger *l, int first, int n)
{
    bool some = false;
    for (int i = first; i < first + n; i++)
        some |= l->is_there[i];
    return some;
}

bool lt_ledger_is_late(const lt_ledger *l, int first, int n)
{
    bool all = n > 0;
    for (int i = first; i < first + n; i++)
        all &= l->is_there[i];
    return all;
}

lt_status lt_ledger_read(lt_ledger *l, int first, int n, lt_found *found)
{
    lt_found *come = NULL;
    size_t bytes = (size_t)n * sizeof *come;
    *found = (lt_found){0};
    if (some_are_there(l, first, n)) {
        if (!(come = lt__alloc(l->ctx, bytes)))
            return LT_ENOMEM;
        lt_status status = lt__move(l->ctx->devices[0], come, l->device, l->there + first, bytes);
        if (status != LT_OK) {
            lt__free(l->ctx, come, bytes);
            return status;
        }
    }
    for (int i = 0; i < n; i++)
        *found = lt__join_found(*found, l->is_there[first + i] ? come[i] : l->here[first + i]);
    lt__free(l->ctx, come, bytes);
    return LT_OK;
}

lt_status lt_ledger_judge(lt_ledger *l, int first, int n)
{
    return lt__accelerator(l->ctx)->judge(l->device, l->there + first, n, lt_step_check_of(l->ctx));
}

/* What lies on both devices is waited for. */
lt_status lt_ledger_pardon(lt_ledger *l, lt_tensor *x, int left, int first, int n)
{
    lt_found of_x, all;
    if (l->is_there[left] && (n == 0 || lt_ledger_is_late(l, first, n))) {
        lt__wrote(x);
        return lt__accelerator(l->ctx)->pardon(x, &l->there[left], l->there + first, n);
    }
    LT_TRY(lt_ledger_read(l, left, 1, &of_x));
    if (of_x.not_finite == 0)
        return LT_OK;
    LT_TRY(lt_ledger_read(l, first, n, &all));
    return all.not_finite == 0 ? lt_fill(x, 0) : LT_OK;
}
