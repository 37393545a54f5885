/* server.c - the server of asynchronous training; see server.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/async/server.h"

lt_status lt__server_open(lt_server *s, lt_ctx *ctx, lt_optim *optim, const lt_async_config *c)
{
    const lt_order_config order = {.workers = c->workers,
                                   .held = c->held == 0 ? 1 : c->held,
                                   .staleness = c->staleness,
                                   .drop = c->drop,
                                   .window = c->window == 0 ? LT_UNBOUNDED : c->window};
    lt_rule_config rule = {.workers = c->workers, .lam = c->lam, .follow = true};
    LT_TRY(lt__rule_find(c->rule, &rule.rule));
    *s = (lt_server){.ctx = ctx, .optim = optim, .order = lt__order_new(&order), .base = c->steps};
    if (!s->order)
        return lt_errcode() == LT_EINVAL ? lt_fail(LT_EUSAGE, "%s", lt_errmsg()) : lt_errcode();
    if ((s->rule = lt__rule_new(optim, &rule)))
        return LT_OK;
    lt__server_close(s);
    return lt_errcode();
}

void lt__server_close(lt_server *s)
{
    lt__rule_free(s->rule);
    lt__order_free(s->order);
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
    const lt_rule_push push = {.worker = worker,
                               .version = version,
                               .delay = delay,
                               .present = g->present,
                               .options = g->options};
    LT_TRY(lt__gradient_load(g, s->optim));
    LT_TRY(lt__rule_apply(s->rule, &push));
    return lt__gradient_commit_bn(g, s->ctx);
}

lt_status lt__server_push(lt_server *s, int worker, int64_t number, const lt_gradient *gradient,
                          lt_push *push)
{
    LT_TRY(lt__order_push(s->order, worker, number, gradient->skip, push));
    if (push->kind != LT_PUSH_APPLIED)
        return LT_OK;
    return lt__server_apply(s, worker, gradient, lt__order_version(s->order) - 1, push->delay);
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

enum { MAX_NUMBERS = LT_RULE_NUMBERS + 4 };

static lt_tensor *order_tensor(const lt_server *s)
{
    size_t n;
    int64_t *state = lt__order_save(s->order, &n);
    if (!state)
        return NULL;
    lt_tensor *x = lt_tensor_from(s->ctx, LT_I64, 1, &(int64_t){(int64_t)n}, state);
    free(state);
    return x;
}

static lt_tensor *numbers_tensor(const lt_server *s, const double *more, int n)
{
    double numbers[MAX_NUMBERS];
    lt__rule_save(s->rule, numbers);
    memcpy(numbers + LT_RULE_NUMBERS, more, (size_t)n * sizeof *more);
    return lt_tensor_from(s->ctx, LT_F64, 1, &(int64_t){LT_RULE_NUMBERS + n}, numbers);
}

/* Whether a flat is saved. Backups are not: after a restart, all workers pull again. */
static bool is_saved(const char *name) { return strncmp(name, "backup", 6) != 0; }

int lt__server_state_count(const lt_server *s)
{
    const lt_flat *flat;
    char of[32];
    int n = 2;
    for (int k = 0; lt__rule_flat(s->rule, k, of, &flat); k++)
        n += is_saved(of) ? flat->n : 0;
    return n;
}

lt_tensor *lt__server_state(const lt_server *s, int i, const double *numbers, int n_numbers,
                            char name[LT_ASYNC_NAME])
{
    const lt_flat *flat;
    char of[32];
    if (i < 2) {
        snprintf(name, LT_ASYNC_NAME, i == 0 ? "order" : "numbers");
        return i == 0 ? order_tensor(s) : numbers_tensor(s, numbers, n_numbers);
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
    return NULL;
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

lt_status lt__server_damaged(const char *name)
{
    return lt_fail(LT_EFILE, "the asynchronous state in this checkpoint has no valid '%s'", name);
}

static lt_status restore_order(lt_server *s, const saved *from)
{
    lt_tensor *x = find_saved(from, "order");
    lt_order_config config = lt__order_config(s->order);
    if (!x || x->dtype != LT_I64)
        return lt__server_damaged("order");
    lt_order *order = lt__order_load(lt_data(x), (size_t)x->count);
    if (!order)
        return lt_errcode() == LT_EINVAL ? lt__server_damaged("order") : lt_errcode();
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
    return LT_OK;
}

/* Copies a saved flat. *found is false, and the flat stays zero, if the checkpoint does not have
 * it. */
static lt_status restore_flat(const saved *s, const char *of, const lt_flat *flat, bool *found)
{
    for (int k = 0; k < flat->n; k++) {
        char name[LT_ASYNC_NAME];
        snprintf(name, sizeof name, "%s/%d", of, k);
        lt_tensor *x = find_saved(s, name);
        *found = x != NULL;
        if (!x)
            return LT_OK;
        if (x->count != flat->arena[k]->count || x->dtype != flat->arena[k]->dtype)
            return lt__server_damaged(name);
        LT_TRY(lt_copy(flat->arena[k], x));
    }
    return LT_OK;
}

lt_status lt__server_restore(lt_server *s, const char *const *names, lt_tensor *const *tensors,
                             int n, double *numbers, int n_numbers, int *fresh)
{
    const saved from = {names, tensors, n};
    const lt_flat *flat;
    char of[32];
    double all[MAX_NUMBERS];
    lt_tensor *x = find_saved(&from, "numbers");
    if (!x || x->dtype != LT_F64 || x->count != LT_RULE_NUMBERS + n_numbers)
        return lt__server_damaged("numbers");
    LT_TRY(lt_read(x, all));
    LT_TRY(restore_order(s, &from));
    lt__rule_load(s->rule, all);
    memcpy(numbers, all + LT_RULE_NUMBERS, (size_t)n_numbers * sizeof *numbers);
    *fresh = 0;
    for (int k = 0; lt__rule_flat(s->rule, k, of, &flat); k++) {
        bool found = true;
        if (is_saved(of))
            LT_TRY(restore_flat(&from, of, flat, &found));
        *fresh += !found;
    }
    return LT_OK;
}
