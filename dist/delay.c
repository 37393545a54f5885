/* delay.c - a reducer with a delay: an optimizer step applies the sums of the step before; see
 * dist.h.
 *
 * The next backward pass adds to the arenas while the gradients of this step are summed. So they
 * are summed elsewhere, in memory with the layout of the arenas. A step swaps both: its own
 * gradients leave the arenas, and the sums of the step before take their place.
 */
#include <stdlib.h>
#include <string.h>

#include "dist/group.h"
#include "dist/reducer.h"

lt_status lt__delay_check(const lt_ctx *ctx, const lt_reducer_config *config, int ranks)
{
    if (!config->delay)
        return LT_OK;
    if (ranks == 1)
        return lt_fail(LT_EUSAGE, "a delay requires several ranks: with one rank, there is no sum "
                                  "that it could hide");
    if (config->server || config->vranks > 0)
        return lt_fail(LT_EUSAGE, "a delay cannot be combined with %s",
                       config->server ? "a synchronous parameter server" : "vranks");
    if (!ctx->device->is_host)
        return lt_fail(LT_EUSAGE,
                       "a delay requires the CPU, but this rank computes on %s; use the device cpu "
                       "(--device cpu)",
                       lt_device_name(ctx));
    return LT_OK;
}

/* The memory of an item's arena. New. NULL with LT_ENOMEM. */
static lt_storage *alloc(lt_reducer *r, const lt_bucket_item *it)
{
    size_t bytes = (size_t)it->place.end * lt_dtype_bytes(it->place.dtype) + LT_GRAD_SPARE_BYTES;
    lt_external_memory memory;
    if (lt__group_alloc_shared(r->group, bytes, &memory)) {
        lt_storage *shared =
            lt__storage_over(r->ctx, memory.data, bytes, memory.deleter, memory.ud);
        if (!shared)
            memory.deleter(memory.ud, memory.data);
        return shared;
    }
    lt_storage *own = lt__storage_new(r->ctx, r->ctx->device, bytes);
    if (own)
        memset(own->data, 0, bytes);
    return own;
}

lt_status lt__delay_prepare(lt_reducer *r)
{
    if (!r->config.delay)
        lt__delay_close(r);
    for (int i = 0; r->config.delay && i < r->plan.n_items; i++) {
        lt_bucket_item *it = &r->plan.items[i];
        if (it->held)
            continue;
        if (!r->held[it->arena] && !(r->held[it->arena] = alloc(r, it)))
            return LT_ENOMEM;
        it->held = (char *)r->held[it->arena]->data +
                   (size_t)it->place.offset * lt_dtype_bytes(it->place.dtype);
    }
    return LT_OK;
}

void lt__delay_close(lt_reducer *r)
{
    for (int i = 0; i < r->plan.n_items; i++) {
        r->plan.items[i].held = NULL;
        r->plan.items[i].is_held = false;
    }
    for (int arena = 0; arena < r->plan.n_arenas; arena++) {
        if (r->held[arena])
            lt__storage_release(r->held[arena]);
        r->held[arena] = NULL;
    }
}

static void swap(char *a, char *b, size_t bytes)
{
    enum { CHUNK = 4096 };
    char chunk[CHUNK];
    for (size_t done = 0, some; done < bytes; done += some) {
        some = LT_MIN(bytes - done, (size_t)CHUNK);
        memcpy(chunk, a + done, some);
        memcpy(a + done, b + done, some);
        memcpy(b + done, chunk, some);
    }
}

static lt_status swap_all(lt_reducer *r)
{
    for (int i = 0; i < r->plan.n_items; i++) {
        lt_bucket_item *it = &r->plan.items[i];
        bool has_sum = it->is_held;
        swap(lt__bucket_item_grad(it), it->held, lt__bucket_item_bytes(it));
        it->is_held = it->used;
        if (has_sum)
            LT_TRY(lt_grad_set(it->x, true));
        else if (it->state != LT_GRAD_NONE)
            lt_zero_grad(it->x);
    }
    return LT_OK;
}

lt_status lt__delay_wait(lt_reducer *r)
{
    int optims = lt_optims_made(r->ctx);
    if (optims > 1)
        return lt_fail(LT_EUSAGE,
                       "a delay requires that one optimizer has all parameters, but %d optimizers "
                       "were made; make one, or remove the delay",
                       optims);
    LT_TRY(lt_group_wait(r->group));
    r->last.buckets = r->n_sent;
    return LT_OK;
}

lt_status lt__delay_take(lt_reducer *r)
{
    LT_TRY(lt__record_write(r));
    LT_TRY(lt__record_sum(r));
    return r->disagrees ? lt__agree_find_difference(r) : swap_all(r);
}

/* ==== Saving and restoring the sums =========================================================== */

/* The item of a parameter, while no exchange runs. NULL with an error. */
static lt_bucket_item *item_at_rest(lt_reducer *r, const lt_tensor *param, const char *who)
{
    lt_bucket_item *it = lt__bucket_plan_find(&r->plan, param);
    if (!it || !it->held) {
        lt_fail(LT_EINVAL, "%s: %s", who,
                it ? "the reducer has no delay" : "the reducer does not have this parameter");
        return NULL;
    }
    return lt_group_wait(r->group) == LT_OK ? it : NULL;
}

lt_tensor *lt_reducer_delayed(lt_reducer *r, lt_tensor *param, bool *is_set)
{
    const lt_bucket_item *it = item_at_rest(r, param, "lt_reducer_delayed");
    if (!it)
        return NULL;
    *is_set = it->is_held;
    return lt__tensor_over(r->held[it->arena], it->place.dtype, param->ndim, param->dims,
                           it->place.offset, false);
}

lt_status lt_reducer_set_delayed(lt_reducer *r, lt_tensor *param, bool is_set)
{
    lt_bucket_item *it = item_at_rest(r, param, "lt_reducer_set_delayed");
    if (!it)
        return lt_errcode();
    it->is_held = is_set;
    return LT_OK;
}
