/* reducer.c - averages the gradients of all ranks; see dist.h.
 *
 * The gradient exchange of a step consists of the step record and then, in the same order on all
 * ranks, each bucket with a parameter that some rank uses. It runs on the group's own thread.
 * Meanwhile the rank's thread runs backward and reports each gradient that is complete. Which
 * gradients to wait for is known from the tape when backward begins.
 *
 * The allreduce multiplies each rank's gradient by the rank's share of the batch, so the result is
 * the gradient of the global batch. If another backward pass adds to a gradient that was already
 * exchanged, it is exchanged again. The part that was already summed is equal on all ranks and does
 * not change, because the shares add up to 1. With a delay, see delay.c.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dist/fault.h"
#include "dist/group.h"
#include "dist/reducer.h"
#include "dist/sum.h"

/* ==== Open and close ========================================================================== */

static lt_status begin(void *ud, lt_ctx *ctx, lt_tensor *loss, lt_tensor *grad);
static lt_status grad_ready(void *ud, lt_tensor *x, lt_tensor *grad);
static lt_status end(void *ud, lt_ctx *ctx, lt_status status);
static lt_status reduce(void *ud, lt_ctx *ctx, lt_step_status *step_status);
static void synchronize(void *ud);

static bool alloc_arena(void *ud, size_t bytes, lt_external_memory *memory)
{
    const lt_reducer *r = ud;
    return r->ctx->device->is_host && lt__group_alloc_shared(r->group, bytes, memory);
}

/* Whether the exchange does not begin before the optimizer step. */
static bool waits_for_step(const lt_reducer *r)
{
    return r->config.blocking || r->config.delay || r->shards > 0;
}

static lt_status set_part(lt_reducer *r)
{
    lt_step_part part = {.ud = r, .alloc_arena = alloc_arena};
    if (!r->config.no_sync)
        part = (lt_step_part){.ud = r,
                              .is_exclusive = !waits_for_step(r),
                              .begin = begin,
                              .grad_ready = grad_ready,
                              .end = end,
                              .reduce = reduce,
                              .synchronize = synchronize,
                              .alloc_arena = alloc_arena};
    return lt_set_part(r->ctx, LT_PART_EXCHANGE, &part);
}

static lt_status check_server(const lt_reducer_config *config, int size)
{
    if (config->sum_backend == LT_SUM_BACKEND_NCCL)
        return lt_fail(LT_EUSAGE,
                       "a synchronous parameter server sums on the CPU, not by NCCL; choose "
                       "another sum_backend");
    return size <= LT_MAX_SUMMANDS
               ? LT_OK
               : lt_fail(LT_EUSAGE,
                         "a synchronous parameter server sums the gradients of at most %d ranks, "
                         "but there are %d; use fewer ranks, or an allreduce",
                         LT_MAX_SUMMANDS, size);
}

lt_reducer *lt_reducer_new(lt_ctx *ctx, lt_group *group, const lt_reducer_config *config)
{
    LT_NEED_CTX(ctx, NULL);
    static const lt_reducer_config defaults;
    int size = lt_group_size(group);
    if (lt_check_no_part(ctx, LT_PART_EXCHANGE, "lt_reducer_new") != LT_OK ||
        (config && lt__tree_sum_check(config->vranks, size, config->wire) != LT_OK) ||
        (config && config->server && check_server(config, size) != LT_OK) ||
        (config && lt__delay_check(ctx, config, size) != LT_OK) ||
        (config && config->vranks > 0 && lt__group_add_as_tree(group) != LT_OK) ||
        lt__fault_check(ctx, lt__group_size_of_job(group)) != LT_OK ||
        (size == lt__group_size_of_job(group) && lt__fault_refuse_latency(ctx) != LT_OK))
        return NULL;
    if (!ctx->device->is_host && config && config->vranks > 0) {
        lt_fail(
            LT_EUSAGE,
            "a deterministic run (with vranks) requires the CPU, but this rank computes on %s; use "
            "the device cpu (--device cpu)",
            lt_device_name(ctx));
        return NULL;
    }
    lt_reducer *r = lt__calloc(1, sizeof *r, "for a reducer");
    if (!r)
        return NULL;
    r->ctx = lt__ctx_retain(ctx);
    r->group = group;
    r->staging.device = ctx->device;
    r->config = config ? *config : defaults;
    r->filter.has_server = r->config.server;
    r->shards = r->config.vranks / size;
    r->rank = lt_group_rank(group);
    r->share = 1.0 / (r->size = size);
    pthread_mutex_init(&r->lock, NULL);
    pthread_cond_init(&r->ready, NULL);
    if (set_part(r) == LT_OK)
        return r;
    lt_reducer_free(r);
    return NULL;
}

void lt_reducer_free(lt_reducer *r)
{
    if (!r)
        return;
    lt_ctx *ctx = r->ctx;
    lt_status status = lt_set_part(ctx, LT_PART_EXCHANGE, NULL);
    status = lt_group_wait(r->group);
    (void)status; /* the optimizer step that needs the result reports a failure */
    lt__record_free(&r->record);
    lt__device_exchange_free(&r->device_exchange, ctx, r->group);
    lt__staging_free(&r->staging);
    pthread_cond_destroy(&r->ready);
    pthread_mutex_destroy(&r->lock);
    for (int i = 0; i < r->plan.n_arenas; i++)
        lt__tree_sum_free(&r->tree_sums[i]);
    lt__tree_sum_free(&r->record_sum);
    lt__delay_close(r);
    lt__filter_free(&r->filter);
    lt__bucket_plan_free(&r->plan);
    free(r->tree_sums);
    free(r->sent);
    free(r->written);
    free(r->held);
    free(r);
    lt__ctx_release(ctx);
}

lt_ctx *lt_reducer_ctx(const lt_reducer *r) { return r->ctx; }
lt_dtype lt_reducer_wire(const lt_reducer *r) { return r->config.wire; }
bool lt_reducer_has_delay(const lt_reducer *r) { return r->config.delay; }

void lt_reducer_set_share(lt_reducer *r, int64_t rows, int64_t total)
{
    r->share = (double)rows / (double)total;
    r->rows = total;
    r->has_share = true;
}

void lt_reducer_set_data(lt_reducer *r, uint32_t digest) { r->data = digest; }

lt_status lt_reducer_set_filter(lt_reducer *r, const lt_bucket_filter *filter)
{
    static const lt_bucket_filter none;
    if (filter && (filter->tail < 0 || filter->tail > LT_MAX_TAIL))
        return lt_fail(LT_EINVAL, "a filter can add 0 to %d numbers to a bucket, not %d",
                       LT_MAX_TAIL, filter->tail);
    lt_status status = lt_group_wait(r->group);
    (void)status; /* likewise */
    r->filter.callbacks = filter ? *filter : none;
    return LT_OK;
}

void lt_reducer_expect_backwards(lt_reducer *r, int backwards)
{
    r->expected_backwards = backwards;
}

lt_reduced_step lt_reducer_last(const lt_reducer *r) { return r->last; }

bool lt_reducer_bucket(const lt_reducer *r, int i, lt_bucket *out)
{
    if (i < 0 || i >= r->plan.n_buckets)
        return false;
    const lt_bucket *b = &r->plan.buckets[i].times;
    *out = (lt_bucket){b->bytes, b->ready - r->began, b->began - r->began, b->ended - r->began};
    return true;
}

/* ==== Buckets ================================================================================= */

static lt_status cut(lt_reducer *r)
{
    size_t first = r->config.first_bucket > 0 ? r->config.first_bucket : LT_FIRST_BUCKET;
    size_t max = r->config.bucket > 0 ? r->config.bucket : LT_BUCKET;
    return lt__bucket_plan_cut(&r->plan, first, max);
}

/* Grows the arrays with an entry per item or arena of the plan, before x is added to it. */
static lt_status reserve(lt_reducer *r, const lt_tensor *x)
{
    int n = r->plan.n_arenas;
    LT_TRY(LT_RESIZE(r->written, n + 1, "for a reducer"));
    LT_TRY(LT_RESIZE(r->tree_sums, n + 1, "for a reducer"));
    LT_TRY(LT_RESIZE(r->held, n + 1, "for a reducer"));
    LT_TRY(LT_RESIZE(r->sent, r->plan.n_items + 1, "for a reducer"));
    r->tree_sums[n] = (lt_tree_sum){0};
    r->held[n] = NULL;
    r->written[n] = atomic_load_explicit(&x->storage->version, memory_order_relaxed);
    return LT_OK;
}

/* Broadcasts x from rank 0. */
static lt_status broadcast(lt_reducer *r, lt_tensor *x)
{
    lt_tensor *here = lt__on_host(x);
    if (!here)
        return lt_errcode();
    lt_status status =
        lt_group_broadcast(r->group, "the initial weights", here->data, lt__tensor_bytes(x), 0);
    if (status == LT_OK && here != x)
        status = lt_write(x, here->data);
    lt__bump_version(x);
    lt_release(here);
    return status;
}

static lt_status add_item(lt_reducer *r, lt_tensor *x)
{
    LT_TRY(reserve(r, x));
    LT_TRY(lt__bucket_plan_add(&r->plan, x));
    LT_TRY(broadcast(r, x));
    r->more = true; /* if a record was already sent in this step, it did not have x */
    return LT_OK;
}

/* Where gradients on accelerators are summed. */
static lt_sum_backend backend_of(const lt_reducer_config *config)
{
    return config->server ? LT_SUM_BACKEND_HOST : config->sum_backend;
}

/* LT_EDESYNC unless all ranks have the same wire, sum_backend, server, delay and vranks. */
static lt_status compare_sums(const lt_reducer *r)
{
    static const char *const sums[] = {[LT_SUM_BACKEND_AUTO] = "auto",
                                       [LT_SUM_BACKEND_HOST] = "host",
                                       [LT_SUM_BACKEND_NCCL] = "nccl"};
    lt_dtype wire = r->config.wire;
    char text[96];
    snprintf(text, sizeof text, "--wire %s\n--sums %s\n--vranks %d%s%s",
             wire == LT_F16    ? "fp16"
             : wire == LT_BF16 ? "bf16"
                               : "fp32",
             sums[r->config.sum_backend], r->config.vranks,
             r->config.server ? "\n--parallel sync-server" : "",
             r->config.delay ? "\n--parallel with delay=1" : "");
    return lt_group_compare(r->group, "the gradient exchange", text);
}

lt_status lt_reducer_add(lt_reducer *r, lt_tensor *const *params, int n)
{
    int before = r->plan.n_items, shards_done = r->shard + r->summed;
    LT_TRY(lt_group_wait(r->group)); /* with a delay, an exchange may use the plan */
    if (!r->device_exchange.chosen)
        LT_TRY(compare_sums(r));
    LT_TRY(
        lt__device_exchange_choose(&r->device_exchange, r->ctx, r->group, backend_of(&r->config)));
    for (int i = 0; i < n; i++) {
        if (lt__bucket_plan_find(&r->plan, params[i]))
            continue;
        if (shards_done > 0 && shards_done < r->shards) /* earlier records have no place for it */
            return lt_fail(
                LT_EUSAGE,
                "with vranks, a parameter must be added before the first shard of a batch, not "
                "between its shards");
        LT_TRY(add_item(r, params[i]));
    }
    LT_TRY(lt__delay_prepare(r));
    return r->plan.n_items > before ? cut(r) : LT_OK;
}

lt_status lt_reducer_configure(lt_reducer *r, const lt_reducer_config *config)
{
    lt_reducer_config next = *config;
    LT_TRY(lt_group_wait(r->group));
    next.wire = r->config.wire;
    next.sum_backend = r->config.sum_backend;
    next.server = r->config.server;
    next.vranks = r->config.vranks;
    LT_TRY(lt__delay_check(r->ctx, &next, r->size));
    r->config = next;
    LT_TRY(lt__delay_prepare(r));
    LT_TRY(set_part(r));
    return cut(r);
}

/* ==== The exchange: on the group's thread ===================================================== */

static lt_status sum_buckets(void *ud)
{
    lt_reducer *r = ud;
    if (r->filter.callbacks.start)
        r->filter.callbacks.start(r->filter.callbacks.ud);
    for (int i = 0; i < r->plan.n_buckets; i++)
        LT_TRY(lt__bucket_reduce(r, i));
    return LT_OK;
}

static lt_status exchange(void *ud)
{
    lt_reducer *r = ud;
    LT_TRY(lt__record_sum(r));
    /* If they disagree, the rank's thread finds the difference: see finish_exchange(). */
    return r->disagrees ? LT_OK : sum_buckets(r);
}

/* ==== The part of the step: on the rank's thread ============================================== */

/* Sets the state of each gradient: absent, complete, or pending in the new backward pass. */
static void note_grad_states(lt_reducer *r)
{
    pthread_mutex_lock(&r->lock);
    for (int k = 0; k < r->plan.n_buckets; k++)
        r->plan.buckets[k].pending = 0;
    for (int i = 0; i < r->plan.n_items; i++) {
        lt_bucket_item *it = &r->plan.items[i];
        it->state = lt_grad_uses(it->x) > 0 ? LT_GRAD_PENDING
                    : lt_grad(it->x)        ? LT_GRAD_READY
                                            : LT_GRAD_NONE;
        it->has_optim = lt_has_optim(it->x);
        r->plan.buckets[it->bucket].pending += it->state == LT_GRAD_PENDING;
    }
    pthread_mutex_unlock(&r->lock);
}

/* A mark after all work submitted to the accelerator so far; 0 on the CPU. */
static uint64_t mark_now(const lt_reducer *r)
{
    lt_device *device = r->ctx->device;
    return device->is_host ? 0 : device->mark(device);
}

/* Starts the exchange on the group's thread. The record must have been written. */
static lt_status start_exchange(lt_reducer *r)
{
    if (r->device_exchange.comm)
        LT_TRY(lt__device_exchange_reserve(&r->device_exchange, r->ctx, &r->plan, r->config.wire));
    else if (!r->ctx->device->is_host)
        LT_TRY(lt__staging_reserve(&r->staging, &r->plan));
    uint64_t mark = mark_now(r); /* after the operations that have filled the arenas */
    for (int k = 0; k < r->plan.n_buckets; k++)
        r->plan.buckets[k].mark = mark;
    r->n_sent = 0;
    r->exchanged = true;
    r->synchronized = r->more = false;
    return lt_group_start(r->group, exchange, r);
}

/* Adds the record of this shard, and all gradients times its share, to the tree sums. After the
 * last shard, the arenas and the record contain the sums over all shards of this rank. */
static lt_status add_to_tree_sums(lt_reducer *r)
{
    bool last = r->shard == r->shards - 1;
    LT_TRY(lt__tree_sum_add(&r->record_sum, r->shard, r->shards, r->record.data,
                            (int64_t)r->record.count, LT_F64, 1));
    for (int i = 0; i < r->plan.n_items; i++) {
        lt_bucket_item *it = &r->plan.items[i];
        if (it->state == LT_GRAD_NONE || r->share == 0)
            memset(lt__bucket_item_data(it), 0, lt__bucket_item_bytes(it));
        else
            lt__grad_stats_add(&it->stats_before, lt__filter_measure(&r->filter.callbacks, it,
                                                                     lt__bucket_item_data(it)));
        it->stats = (lt_grad_stats){0};
        it->measured = true;
        it->summed = it->state != LT_GRAD_NONE || (it->summed && r->shard > 0);
        it->state = it->summed ? LT_GRAD_READY : LT_GRAD_NONE;
    }
    for (int arena = 0, i = 0; i < r->plan.n_items; i++) {
        const lt_grad_place *place = &r->plan.items[i].place;
        if (r->plan.items[i].arena != arena)
            continue;
        LT_TRY(lt__tree_sum_add(&r->tree_sums[arena], r->shard, r->shards, place->arena,
                                lt__bucket_plan_arena_end(&r->plan, arena), place->dtype,
                                r->share));
        arena++;
    }
    if (!last) {
        LT_TRY(lt__bucket_plan_restore_leftover(&r->plan));
        lt_bn_stats_clear(r->ctx);
    }
    r->summed = true;
    r->has_share = false;
    lt__record_discard_losses(&r->record);
    r->backwards = 0;
    return LT_OK;
}

/* Waits for the exchange. Then marks each gradient that any rank had as present: this rank now has
 * its average. This is done once per exchange, because a caller may discard gradients afterwards.
 * They are marked in the order in which backward completes them, because the loss scale looks
 * them up in that order. */
static lt_status finish_exchange(lt_reducer *r)
{
    LT_TRY(lt_group_wait(r->group));
    if (r->disagrees)
        return lt__agree_find_difference(r);
    r->last.buckets = r->n_sent;
    LT_TRY(lt__staging_stream_wait(&r->staging));
    for (int i = r->plan.n_items - 1; i >= 0 && !r->synchronized; i--) {
        lt_bucket_item *it = &r->plan.items[i];
        it->measured = false;
        if (it->used)
            LT_TRY(lt_grad_set(it->x, it->accumulated));
    }
    r->synchronized = true;
    return LT_OK;
}

static void synchronize(void *ud)
{
    lt_reducer *r = ud;
    lt_status status = r->exchanged ? finish_exchange(r) : LT_OK;
    (void)status; /* the optimizer step fails with the same error */
}

static lt_status begin(void *ud, lt_ctx *ctx, lt_tensor *loss, lt_tensor *grad)
{
    lt_reducer *r = ud;
    (void)grad;
    if (r->begun_step != ctx->step + 1) {
        r->begun_step = ctx->step + 1;
        LT_TRY(lt__fault_trigger(ctx, lt__group_rank_in_job(r->group, r->rank), ctx->step + 1));
    }
    if (r->broken)
        return lt_fail(LT_EPEER, "an earlier backward failed, and so did the other ranks");
    if (r->summed && r->shards > 1 && !r->has_share)
        return lt_fail(
            LT_EUSAGE,
            "with vranks, all backward passes of a shard must run before its optimizer steps; "
            "this one runs between those and the next shard");
    if (r->exchanged) /* by an earlier backward pass: let it end before gradients change */
        LT_TRY(finish_exchange(r));
    LT_TRY(lt__record_add_loss(&r->record, loss));
    if (r->backwards++ == 0)
        lt__agree_record_frozen(r);
    r->more = true;
    r->began = lt__seconds();
    if (r->config.delay) /* the buckets of the step before may be on their way */
        return LT_OK;
    note_grad_states(r);
    for (int k = 0; k < r->plan.n_buckets; k++)
        r->plan.buckets[k].times.ready = r->began;
    if (r->summed) {
        r->summed = false;
        r->shard = (r->shard + 1) % r->shards;
    }
    if (r->shards > 1 && r->shard == 0 && r->backwards == 1)
        LT_TRY(lt__bucket_plan_save_leftover(&r->plan));
    int last = r->expected_backwards > 0 ? r->expected_backwards : r->most_backwards;
    if (!lt_pass_is_last(ctx, r->backwards == last) || waits_for_step(r))
        return LT_OK;
    LT_TRY(lt__record_write(r));
    return start_exchange(r);
}

static lt_status grad_ready(void *ud, lt_tensor *x, lt_tensor *grad)
{
    lt_reducer *r = ud;
    lt_bucket_item *it = lt__bucket_plan_find(&r->plan, x);
    if (!it)
        return LT_OK;
    if (!lt_grad(x))
        return lt_fail(
            LT_EINVAL,
            "a hook discarded the gradient that it was called with, but the other ranks need it; "
            "fill it with zeros instead");
    lt_planned_bucket *b = &r->plan.buckets[it->bucket];
    it->added = true;
    if (r->config.delay)
        return LT_OK;
    if (lt_grad_uses(x) > 0) /* the second half of another backward pass adds to it later */
        return LT_OK;
    it->measured = r->filter.callbacks.measure && r->share > 0 && r->ctx->device->is_host;
    if (it->measured)
        it->stats = r->filter.callbacks.measure(r->filter.callbacks.ud, x, grad);
    pthread_mutex_lock(&r->lock);
    if (it->state == LT_GRAD_PENDING && --b->pending == 0) {
        b->times.ready = lt__seconds();
        b->mark = mark_now(r);
        pthread_cond_signal(&r->ready);
    }
    it->state = LT_GRAD_READY;
    pthread_mutex_unlock(&r->lock);
    return LT_OK;
}

static lt_status end(void *ud, lt_ctx *ctx, lt_status status)
{
    lt_reducer *r = ud;
    (void)ctx;
    if (r->config.delay)
        return status;
    bool failed = status != LT_OK && r->exchanged;
    if (failed)
        lt_group_fail(r->group);
    pthread_mutex_lock(&r->lock);
    r->broken = failed;
    for (int i = 0; i < r->plan.n_items; i++) /* expected gradients that did not arrive */
        if (r->plan.items[i].state == LT_GRAD_PENDING)
            r->plan.items[i].state = lt_grad(r->plan.items[i].x) ? LT_GRAD_READY : LT_GRAD_NONE;
    for (int k = 0; k < r->plan.n_buckets; k++) {
        if (r->plan.buckets[k].pending > 0)
            r->plan.buckets[k].mark = mark_now(r);
        r->plan.buckets[k].pending = 0;
    }
    pthread_cond_signal(&r->ready);
    pthread_mutex_unlock(&r->lock);
    return status;
}

/* Completes the gradients. *step_status is LT_ACCUMULATING if more shards follow. */
static lt_status complete(lt_reducer *r, lt_step_status *step_status)
{
    if (r->config.delay) {
        LT_TRY(lt__delay_wait(r));
        note_grad_states(r);
        return lt__delay_take(r);
    }
    if (r->exchanged)
        LT_TRY(finish_exchange(r));
    if (r->exchanged && !r->more)
        return LT_OK;
    note_grad_states(r);
    LT_TRY(lt__record_write(r));
    if (r->shards > 0)
        LT_TRY(add_to_tree_sums(r));
    if (r->shard < r->shards - 1) {
        *step_status = LT_ACCUMULATING;
        return LT_OK;
    }
    LT_TRY(start_exchange(r));
    return finish_exchange(r);
}

static lt_status reduce(void *ud, lt_ctx *ctx, lt_step_status *step_status)
{
    lt_reducer *r = ud;
    double before = lt__seconds();
    if (r->summed) { /* a second optimizer in the same step */
        *step_status = r->step_status;
        return LT_OK;
    }
    LT_TRY(lt_synchronize(ctx)); /* no step if a loss is not finite */
    r->step_status = LT_APPLIED;
    LT_TRY(complete(r, &r->step_status));
    *step_status = r->step_status;
    if (*step_status == LT_ACCUMULATING)
        return LT_OK;
    LT_TRY(lt__record_read(r));
    r->last.waited = lt__seconds() - before;
    r->last.total_waited += r->last.waited;
    lt_trace(ctx, LT_TRACK_COMPUTE, "wait for the ranks", before, r->last.waited);
    lt__record_discard_losses(&r->record);
    r->backwards = 0;
    r->exchanged = r->more = r->frozen_recorded = false;
    for (int i = 0; i < r->plan.n_items; i++) {
        r->plan.items[i].stats_before = (lt_grad_stats){0};
        r->plan.items[i].added = false;
    }
    lt__bucket_plan_drop_leftover(&r->plan);
    r->n_sent = 0;
    return r->config.delay ? lt_group_start(r->group, sum_buckets, r) : LT_OK;
}

/* In backward, numbers[1..n) are sums of the gradient of this rank's own loss. The global loss is
 * the sum of the ranks' losses, each times the rank's share. So the numbers are multiplied by the
 * share before the allreduce. The results are divided by the share, because the exchange will
 * multiply the gradients computed from them by it. A rank without rows contributes zeros. */
lt_status lt_reducer_allreduce(void *ud, double *numbers, int64_t n, bool backward)
{
    lt_reducer *r = ud;
    lt_sum sum = {.what = backward ? "the gradients of batch norm" : "the statistics of batch norm",
                  .data = numbers,
                  .count = n,
                  .dtype = LT_F64,
                  .wire = LT_F64,
                  .scale = 1};
    double before = lt__seconds(), weight = backward && r->share > 0 ? r->share : 1;
    if (r->shards > 1)
        return lt_fail(
            LT_EUSAGE,
            "sync requires the whole batch at once, but with vranks a rank computes %d shards of "
            "it one after the other",
            r->shards);
    if (r->config.no_sync)
        return LT_OK;
    if (r->share == 0)
        memset(numbers, 0, (size_t)n * sizeof *numbers);
    for (int64_t i = 1; i < n; i++)
        numbers[i] *= weight;
    LT_TRY(lt_group_allreduce_side(r->group, &sum));
    for (int64_t i = 1; i < n; i++)
        numbers[i] /= weight;
    double seconds = lt__seconds() - before;
    r->last.total_waited += seconds;
    lt_trace(r->ctx, LT_TRACK_COMPUTE, sum.what, before, seconds);
    return LT_OK;
}
