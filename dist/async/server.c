/* server.c - the server of asynchronous training; see server.h. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/async/server.h"
#include "dist/dist.h"

lt_status lt__server_open(lt_server *s, const lt_image *net, const lt_async_config *c)
{
    const lt_order_config order = {.workers = c->workers,
                                   .prefetch = c->prefetch == 0 ? 1 : c->prefetch,
                                   .staleness = c->staleness,
                                   .drop = c->drop,
                                   .max_lead = c->max_lead == 0 ? LT_UNBOUNDED : c->max_lead};
    lt_rule_config rule = {.workers = c->workers, .lam = c->lam, .follow = true};
    rule.late = c->group && lt_group_is_elastic(c->group);
    LT_TRY(lt__rule_find(c->rule, &rule.rule));
    if (rule.late && rule.rule == LT_RULE_ORMO)
        return lt_fail(LT_EUSAGE, "the rule ormo requires a fixed number of workers, but workers "
                                  "join and leave this job (--serve); choose another rule");
    *s = (lt_server){.net = net, .order = lt__order_new(&order), .base = c->steps};
    if (!s->order)
        return lt_errcode() == LT_EINVAL ? lt_fail(LT_EUSAGE, "%s", lt_errmsg()) : lt_errcode();
    if ((s->rule = lt__rule_new(net->optim, &rule)))
        return LT_OK;
    lt__server_close(s);
    return lt_errcode();
}

void lt__server_close(lt_server *s)
{
    lt__rule_free(s->rule);
    lt__order_free(s->order);
    lt__snapshots_free(&s->snapshots);
    *s = (lt_server){0};
}

lt_status lt__server_grant(lt_server *s, lt_grant *grant, bool *any)
{
    *any = lt__order_grant(s->order, grant);
    return *any && grant->n > 0 ? lt__rule_pull(s->rule, grant->worker) : LT_OK;
}

lt_status lt__server_apply(lt_server *s, int worker, const lt_gradient *g, int64_t version,
                           int64_t delay)
{
    const lt_rule_push push = {.worker = worker, .version = version, .delay = delay, .gradient = g};
    LT_TRY(lt__rule_apply(s->rule, &push));
    return lt__gradient_commit_bn(g);
}

lt_status lt__server_push(lt_server *s, int worker, int64_t number, const lt_gradient *gradient,
                          lt_push *push)
{
    LT_TRY(lt__order_push(s->order, worker, number, gradient->skip, push));
    s->done_below = lt__order_done_below(s->order);
    if (push->kind == LT_PUSH_APPLIED)
        LT_TRY(lt__server_apply(s, worker, gradient, push->version - 1, push->delay));
    return lt__snapshots_take(&s->snapshots, s->net, s->done_below);
}

lt_async_event lt__server_event(const lt_server *s, const lt_push *push, int worker, int64_t read,
                                const lt_gradient *g)
{
    return (lt_async_event){.kind = LT_ASYNC_EVENT_PUSH,
                            .worker = worker,
                            .ticket = push->ticket,
                            .read = read,
                            .applied = push->version,
                            .delay = push->delay,
                            .dropped = push->kind == LT_PUSH_DROPPED,
                            .done_below = s->done_below,
                            .loss = g->loss,
                            .lr = g->lr};
}

int64_t lt__server_steps(const lt_server *s) { return s->base + lt__order_version(s->order); }

lt_status lt__server_stats(lt_server *s, int group, lt_async_stats *stats)
{
    lt_rule_stats sums;
    LT_TRY(lt__rule_stats(s->rule, group, &sums));
    stats->worker_bytes = lt__rule_bytes_per_worker(s->rule);
    stats->strength = sums.n > 0 ? sums.strength / sums.n : 0;
    stats->capped = sums.n > 0 ? sums.capped / sums.n : 0;
    return LT_OK;
}

/* ==== Checkpoints ============================================================================= */

enum { TIME = LT_RULE_NUMBERS, NUMBERS }; /* indices in the tensor `numbers`, after the rule's */
static const char KEPT[] = "kept/";       /* prefix of a snapshot's name; the ticket follows */

static lt_tensor *order_tensor(const lt_server *s)
{
    size_t n;
    int64_t *state = lt__order_save(s->order, &n);
    if (!state)
        return NULL;
    lt_tensor *x = lt_tensor_from(s->net->ctx, LT_I64, 1, &(int64_t){(int64_t)n}, state);
    free(state);
    return x;
}

static lt_tensor *numbers_tensor(const lt_server *s)
{
    double numbers[NUMBERS] = {[TIME] = s->time};
    lt__rule_save(s->rule, numbers);
    return lt_tensor_from(s->net->ctx, LT_F64, 1, &(int64_t){NUMBERS}, numbers);
}

/* Whether a flat is saved. Backups are not: after a restart, all workers pull again. */
static bool is_saved(const char *name) { return strncmp(name, "backup", 6) != 0; }

/* Snapshot i, and its name. New. NULL as for lt_async_state(). */
static lt_tensor *snapshot_tensor(const lt_server *s, int i, char name[LT_ASYNC_NAME])
{
    int64_t ticket;
    lt_tensor *x = lt__snapshots_state(&s->snapshots, s->net->ctx, s->net->bytes, i, &ticket);
    if (ticket > 0)
        snprintf(name, LT_ASYNC_NAME, "%s%" PRId64, KEPT, ticket);
    return x;
}

lt_tensor *lt__server_state(const lt_server *s, int i, char name[LT_ASYNC_NAME])
{
    const lt_flat_buffers *flat;
    char of[32];
    if (i < 2) {
        snprintf(name, LT_ASYNC_NAME, i == 0 ? "order" : "numbers");
        return i == 0 ? order_tensor(s) : numbers_tensor(s);
    }
    i -= 2;
    for (int k = 0; lt__rule_flat(s->rule, k, of, &flat); k++) {
        if (!is_saved(of))
            continue;
        if (i < flat->n) {
            snprintf(name, LT_ASYNC_NAME, "%s/%d", of, i);
            return lt_retain(flat->arena[i]);
        }
        i -= flat->n;
    }
    return snapshot_tensor(s, i, name);
}

typedef struct saved { /* the tensors of a checkpoint */
    const char *const *names;
    lt_tensor *const *tensors;
    int n;
} saved;

static lt_tensor *find_saved(const saved *s, const char *name)
{
    for (int i = 0; i < s->n; i++)
        if (strcmp(s->names[i], name) == 0)
            return s->tensors[i];
    return NULL;
}

static lt_status damaged(const char *name)
{
    return lt_fail(LT_EFILE, "the asynchronous state in this checkpoint has no valid '%s'", name);
}

/* The numbers of tensor "order", which may be on any device. New. NULL after an error. */
static int64_t *read_order(lt_tensor *x)
{
    int64_t *state;
    if (LT_CALLOC(state, x->count, "the state of the asynchronous workers") != LT_OK)
        return NULL;
    if (lt_read(x, state) == LT_OK)
        return state;
    free(state);
    return NULL;
}

int64_t lt_async_issued(lt_tensor *x)
{
    int64_t *state = x->dtype == LT_I64 ? read_order(x) : NULL;
    int64_t issued = state ? lt__order_saved_issued(state, (size_t)x->count) : -1;
    free(state);
    return issued;
}

static lt_status restore_order(lt_server *s, const saved *from)
{
    lt_tensor *x = find_saved(from, "order");
    lt_order_config config = lt__order_config(s->order);
    if (!x || x->dtype != LT_I64)
        return damaged("order");
    int64_t *state = read_order(x);
    if (!state)
        return lt_errcode();
    lt_order *order = lt__order_load(state, (size_t)x->count);
    free(state);
    if (!order)
        return lt_errcode() == LT_EINVAL ? damaged("order") : lt_errcode();
    if (config.limit < lt__order_issued(order))
        config.limit = lt__order_issued(order);
    lt_status status = lt__order_restart(order, &config);
    if (status != LT_OK) {
        lt__order_free(order);
        return status;
    }
    lt__order_free(s->order);
    s->order = order;
    s->base -= lt__order_version(order);
    s->done_below = lt__order_done_below(order);
    return LT_OK;
}

/* Copies a saved flat. *found is false, and the flat stays zero, if the checkpoint does not have
 * it. */
static lt_status restore_flat(const saved *s, const char *of, const lt_flat_buffers *flat,
                              bool *found)
{
    for (int k = 0; k < flat->n; k++) {
        char name[LT_ASYNC_NAME];
        snprintf(name, sizeof name, "%s/%d", of, k);
        lt_tensor *x = find_saved(s, name);
        *found = x != NULL;
        if (!x)
            return LT_OK;
        if (x->count != flat->arena[k]->count || x->dtype != flat->arena[k]->dtype)
            return damaged(name);
        LT_TRY(lt_copy(flat->arena[k], x));
    }
    return LT_OK;
}

/* Allocates the flats of the worker in `of`, such as "velocity.3", if they were saved. */
static lt_status open_saved(lt_server *s, const saved *from, const char *of)
{
    char name[LT_ASYNC_NAME];
    const char *worker = strrchr(of, '.');
    snprintf(name, sizeof name, "%s/0", of);
    return worker && find_saved(from, name) ? lt__rule_open_worker(s->rule, atoi(worker + 1))
                                            : LT_OK;
}

/* Restores the snapshots among the tensors of a state. */
static lt_status restore_snapshots(lt_server *s, const saved *from)
{
    for (int i = 0; i < from->n; i++) {
        const char *name = from->names[i];
        const lt_tensor *x = from->tensors[i];
        if (strncmp(name, KEPT, strlen(KEPT)) != 0)
            continue;
        char *end;
        int64_t ticket = strtoll(name + strlen(KEPT), &end, 10);
        if (*end || ticket <= 0 || ticket > s->done_below || x->dtype != LT_U8 ||
            (size_t)x->count != s->net->bytes)
            return damaged(name);
        LT_TRY(lt__snapshots_restore(&s->snapshots, ticket, from->tensors[i]));
    }
    return LT_OK;
}

lt_status lt__server_restore(lt_server *s, const char *const *names, lt_tensor *const *tensors,
                             int n, bool with_snapshots, int *fresh)
{
    const saved from = {names, tensors, n};
    const lt_flat_buffers *flat;
    char of[32];
    double numbers[NUMBERS];
    lt_tensor *x = find_saved(&from, "numbers");
    if (!x || x->dtype != LT_F64 || x->count != NUMBERS)
        return damaged("numbers");
    LT_TRY(lt_read(x, numbers));
    LT_TRY(restore_order(s, &from));
    lt__rule_load(s->rule, numbers);
    s->time = numbers[TIME];
    *fresh = 0;
    for (int k = 0; lt__rule_flat(s->rule, k, of, &flat); k++) {
        bool found = true;
        if (is_saved(of) && flat->n == 0)
            LT_TRY(open_saved(s, &from, of));
        if (is_saved(of))
            LT_TRY(restore_flat(&from, of, flat, &found));
        *fresh += !found;
    }
    return with_snapshots ? restore_snapshots(s, &from) : LT_OK;
}
