/* gradient.c - a stored gradient; see gradient.h. */
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/async/gradient.h"

static void release_bn(lt_gradient *g)
{
    for (int i = 0; i < g->n_bn; i++) {
        lt_release(g->bn[i].running_mean);
        lt_release(g->bn[i].running_var);
        lt_release(g->bn[i].mean);
        lt_release(g->bn[i].var);
    }
    g->n_bn = 0;
}

void lt__gradient_free(lt_gradient *g)
{
    release_bn(g);
    lt__flat_free(&g->flat);
    free(g->present);
    free(g->opt);
    free(g->options);
    free(g->bn);
    *g = (lt_gradient){0};
}

static lt_status out_of_memory(void)
{
    return lt_fail(LT_ENOMEM, "out of memory for asynchronous training");
}

static int groups_of(const lt_optim *optim, const bool *present)
{
    lt_optim_range r = {0};
    int n = 0;
    while (lt_optim_next_range(optim, NULL, present, false, &r))
        n = r.group >= n ? r.group + 1 : n;
    return n;
}

lt_status lt__gradient_reserve(lt_gradient *g, lt_optim *optim, int n_groups)
{
    if (!g->present && !(g->present = malloc((size_t)lt_optim_count(optim) + 1)))
        return out_of_memory();
    if (!g->flat.arena)
        LT_TRY(lt__flat_new(optim, &g->flat));
    int room = n_groups > 0 ? n_groups : 1; /* without gradients there are no groups */
    if (room > g->capacity) {
        lt_opt *opt = realloc(g->opt, (size_t)room * LT_MAX_OPT * sizeof *opt);
        g->opt = opt ? opt : g->opt;
        const lt_opt **list = realloc(g->options, (size_t)room * sizeof *list);
        g->options = list ? list : g->options;
        if (!opt || !list)
            return out_of_memory();
        g->capacity = room;
    }
    g->n_groups = n_groups;
    for (int i = 0; i < n_groups; i++)
        g->options[i] = g->opt + i * LT_MAX_OPT;
    return LT_OK;
}

lt_status lt__gradient_reserve_bn(lt_gradient *g, int n)
{
    release_bn(g);
    if (n <= g->bn_capacity)
        return LT_OK;
    lt_bn_stats *bn = realloc(g->bn, (size_t)n * sizeof *bn);
    if (!bn)
        return out_of_memory();
    g->bn = bn;
    g->bn_capacity = n;
    return LT_OK;
}

static lt_status store_bn(lt_gradient *g, lt_ctx *ctx)
{
    int n = lt_bn_stats_pending(ctx);
    LT_TRY(lt__gradient_reserve_bn(g, n));
    for (; g->n_bn < n && lt_bn_stats_at(ctx, g->n_bn, &g->bn[g->n_bn]); g->n_bn++) {
        const lt_bn_stats *s = &g->bn[g->n_bn];
        lt_retain(s->running_mean);
        lt_retain(s->running_var);
        lt_retain(s->mean);
        lt_retain(s->var);
    }
    return LT_OK;
}

/* Multiplies the stored gradients by factor. */
static lt_status multiply(const lt_gradient *g, lt_ctx *ctx, double factor)
{
    const lt_def *mul = lt_op_find(ctx, "mul");
    lt_status status = mul ? LT_OK : LT_EINVAL;
    for (int a = 0; a < g->flat.n && status == LT_OK; a++) {
        lt_tensor *x = g->flat.arena[a], *product = NULL;
        lt_tensor *by = lt__tensor_new(ctx, x->storage->device, (lt_dtype)x->dtype, 0, NULL, true);
        status = by ? lt_fill(by, factor) : LT_ENOMEM;
        if (status == LT_OK)
            status = lt_apply(ctx, mul, (lt_tensor *[]){x, by}, 2, NULL, &product);
        if (status == LT_OK)
            status = lt_copy(x, product);
        lt_release(product);
        lt_release(by);
    }
    return status;
}

static lt_status store_grads(const lt_gradient *g, lt_optim *optim)
{
    lt_flat grads;
    LT_TRY(lt__flat_over(optim, LT_OPTIM_GRADS, &grads));
    lt_status status = lt__flat_copy(&g->flat, &grads);
    lt__flat_free(&grads);
    return status;
}

lt_status lt__gradient_store(lt_gradient *g, lt_ctx *ctx, lt_optim *optim,
                             const lt_opt *const *options, lt_step_status step_status,
                             double factor)
{
    int n_opt = lt_optim_def(optim)->schema.n_opt;
    g->skip = step_status == LT_SKIPPED;
    if (g->skip)
        return LT_OK;
    LT_TRY(lt__gradient_reserve(g, optim, 0));
    for (int i = 0; i < lt_optim_count(optim); i++)
        g->present[i] = lt_optim_has_grad(optim, i);
    LT_TRY(lt__gradient_reserve(g, optim, groups_of(optim, g->present)));
    for (int i = 0; i < g->n_groups; i++)
        memcpy(g->opt + i * LT_MAX_OPT, options[i], (size_t)n_opt * sizeof *g->opt);
    LT_TRY(store_bn(g, ctx));
    LT_TRY(store_grads(g, optim));
    return factor == 1 ? LT_OK : multiply(g, ctx, factor);
}

lt_status lt__gradient_load(const lt_gradient *g, lt_optim *optim)
{
    lt_flat grads;
    LT_TRY(lt__flat_over(optim, LT_OPTIM_GRADS, &grads));
    lt_status status = lt__flat_copy(&grads, &g->flat);
    lt__flat_free(&grads);
    return status;
}

lt_status lt__gradient_commit_bn(const lt_gradient *g, lt_ctx *ctx)
{
    for (int i = 0; i < g->n_bn; i++) {
        const lt_bn_stats *s = &g->bn[i];
        LT_TRY(lt_bn_stats_add(ctx, s->running_mean, s->running_var, s->mean, s->var, s->count,
                               s->momentum));
    }
    return lt_bn_stats_commit(ctx);
}
