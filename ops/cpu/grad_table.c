/* grad_table.c - rows of gradient statistics, on the CPU or the accelerator. */
#include <stdlib.h>

#include "ops/backend/plugin.h"
#include "ops/backend/state.h"

struct lt_grad_table {
    lt_ctx *ctx;
    lt_device *device;        /* the accelerator, or NULL */
    lt_grad_stats *on_host;   /* rows on the CPU */
    lt_grad_row *parts;       /* rows on the accelerator, in parts, or NULL */
    lt_grad_stats *on_device; /* joined rows on the accelerator, or NULL */
    bool *is_on_device;
    int capacity;
};

static void free_rows(lt_grad_table *table)
{
    size_t rows = (size_t)table->capacity;
    lt__free(table->ctx, table->on_host, rows * sizeof *table->on_host);
    lt__free(table->ctx, table->is_on_device, rows * sizeof *table->is_on_device);
    if (table->parts)
        lt__device_free(table->ctx, table->device, table->parts, rows * sizeof *table->parts);
    if (table->on_device)
        lt__device_free(table->ctx, table->device, table->on_device,
                        rows * sizeof *table->on_device);
}

/* Allocates rows on the accelerator, without parts, and copies the rows of `from` to them. */
static lt_status make_parts(lt_grad_table *table, const lt_grad_table *from)
{
    lt_device *device = table->device;
    size_t bytes = (size_t)table->capacity * sizeof *table->parts;
    table->parts = lt__device_alloc(table->ctx, device, bytes);
    table->on_device =
        lt__device_alloc(table->ctx, device, (size_t)table->capacity * sizeof *table->on_device);
    if (!table->parts || !table->on_device)
        return LT_ENOMEM;
    LT_TRY(device->fill(device, table->parts, LT_U8, bytes, 0));
    return from->capacity == 0 ? LT_OK
                               : device->copy(device, table->parts, from->parts,
                                              (size_t)from->capacity * sizeof *table->parts);
}

/* Grows the table to hold `row`. Keeps the existing rows. */
static lt_status reserve(lt_grad_table *table, int row)
{
    int capacity = table->capacity ? table->capacity : 64;
    while (capacity <= row)
        capacity *= 2;
    if (capacity == table->capacity)
        return LT_OK;
    size_t rows = (size_t)capacity, before = (size_t)table->capacity;
    lt_grad_table more = {.ctx = table->ctx, .device = table->device, .capacity = capacity};
    more.on_host = lt__alloc_zero(table->ctx, rows * sizeof *more.on_host);
    more.is_on_device = lt__alloc_zero(table->ctx, rows * sizeof *more.is_on_device);
    bool done = more.on_host && more.is_on_device &&
                (!table->device || make_parts(&more, table) == LT_OK);
    if (done && before > 0) {
        memcpy(more.on_host, table->on_host, before * sizeof *table->on_host);
        memcpy(more.is_on_device, table->is_on_device, before * sizeof *table->is_on_device);
    }
    free_rows(done ? table : &more);
    if (done)
        *table = more;
    return done ? LT_OK : lt_errcode();
}

lt_grad_table *lt_grad_table_new(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, NULL);
    lt_grad_table *table = lt__alloc_zero(ctx, sizeof *table);
    if (!table)
        return NULL;
    table->ctx = lt__ctx_retain(ctx);
    table->device = ctx->devices[1];
    if (reserve(table, 0) == LT_OK)
        return table;
    lt_grad_table_free(table);
    return NULL;
}

void lt_grad_table_free(lt_grad_table *table)
{
    if (!table)
        return;
    lt_ctx *ctx = table->ctx;
    free_rows(table);
    lt__free(ctx, table, sizeof *table);
    lt__ctx_release(ctx);
}

lt_status lt_grad_table_rescale(lt_grad_table *table, int row, lt_tensor *x, lt_tensor *from,
                                double by)
{
    LT_TRY(reserve(table, row));
    LT_TRY(lt__check_alive(x));
    LT_TRY(lt__check_alive(from));
    table->is_on_device[row] = !x->storage->device->is_host;
    table->on_host[row] = (lt_grad_stats){0};
    if (!table->is_on_device[row]) {
        if (from != x)
            LT_TRY(lt_copy(x, from));
        return lt_rescale(x, by, &table->on_host[row]);
    }
    lt__bump_version(x);
    return lt__accelerator(table->ctx)->rescale(x, from, by, &table->parts[row]);
}

lt_status lt_grad_table_measure(lt_grad_table *table, int row, lt_tensor *x, double by)
{
    LT_TRY(reserve(table, row));
    LT_TRY(lt__check_alive(x));
    table->is_on_device[row] = !x->storage->device->is_host;
    if (table->is_on_device[row])
        return lt__accelerator(table->ctx)->measure(x, by, &table->parts[row]);
    table->on_host[row] = lt_grad_stats_of(x);
    table->on_host[row].largest *= by;
    return LT_OK;
}

lt_status lt_grad_table_clear(lt_grad_table *table, int row)
{
    LT_TRY(reserve(table, row));
    table->on_host[row] = (lt_grad_stats){0};
    if (!table->is_on_device[row])
        return LT_OK;
    int64_t *parts = &table->parts[row].parts;
    return table->device->fill(table->device, parts, LT_U8, sizeof *parts, 0);
}

/* Joins the parts of rows first..first+n-1 on the accelerator. */
static lt_status join(lt_grad_table *table, int first, int n)
{
    return lt__accelerator(table->ctx)
        ->join(table->device, table->parts + first, n, table->on_device + first);
}

static int count_on_device(const lt_grad_table *table, int first, int n)
{
    int count = 0;
    for (int i = first; i < first + n; i++)
        count += table->is_on_device[i];
    return count;
}

bool lt_grad_table_is_on_device(const lt_grad_table *table, int first, int n)
{
    return n > 0 && count_on_device(table, first, n) == n;
}

lt_status lt_grad_table_read(lt_grad_table *table, int first, int n, lt_grad_stats *stats)
{
    lt_grad_stats *come = NULL;
    size_t bytes = (size_t)n * sizeof *come;
    *stats = (lt_grad_stats){0};
    if (count_on_device(table, first, n) > 0) {
        LT_TRY(join(table, first, n));
        if (!(come = lt__alloc(table->ctx, bytes)))
            return LT_ENOMEM;
        lt_status status =
            lt__move(table->ctx->devices[0], come, table->device, table->on_device + first, bytes);
        if (status != LT_OK) {
            lt__free(table->ctx, come, bytes);
            return status;
        }
    }
    for (int i = 0; i < n; i++)
        *stats = lt__grad_stats_join(
            *stats, table->is_on_device[first + i] ? come[i] : table->on_host[first + i]);
    lt__free(table->ctx, come, bytes);
    return LT_OK;
}

lt_status lt_grad_table_check(lt_grad_table *table, int first, int n)
{
    LT_TRY(join(table, first, n));
    return lt__accelerator(table->ctx)
        ->check_grads(table->device, table->on_device + first, n, lt_step_check_of(table->ctx));
}

/* Waits for the accelerator if the rows are on both devices. */
lt_status lt_grad_table_zero_leftover(lt_grad_table *table, lt_tensor *x, int left, int first,
                                      int n)
{
    lt_grad_stats of_x, all;
    if (table->is_on_device[left] && (n == 0 || lt_grad_table_is_on_device(table, first, n))) {
        LT_TRY(join(table, left, 1));
        LT_TRY(join(table, first, n));
        lt__bump_version(x);
        return lt__accelerator(table->ctx)
            ->zero_leftover(x, &table->on_device[left], table->on_device + first, n);
    }
    LT_TRY(lt_grad_table_read(table, left, 1, &of_x));
    if (of_x.not_finite == 0)
        return LT_OK;
    LT_TRY(lt_grad_table_read(table, first, n, &all));
    return all.not_finite == 0 ? lt_fill(x, 0) : LT_OK;
}
