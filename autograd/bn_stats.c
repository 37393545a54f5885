/* bn_stats.c - batch-norm running statistics, which are updated once per step. The ops
 * batch_norm_merge and batch_norm_update do the arithmetic. */
#include "autograd/tape.h"

enum { AT_ONCE = 64 }; /* largest number of calls at once */

typedef struct row { /* the arguments of a call */
    lt_tensor *in[4];
    double options[2];
} row;

/* Runs an op once for each of n rows. */
static lt_status run(lt_ctx *ctx, const char *name, row *rows, int n)
{
    const lt_def *def = lt_op_find(ctx, name);
    lt_call calls[AT_ONCE];
    lt_opt opts[AT_ONCE][2];
    if (!def)
        return LT_EINVAL;
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < 2; k++)
            opts[i][k] = (lt_opt){.kind = LT_KIND_NUMBER, .n = 1, .f = rows[i].options[k]};
        calls[i] = (lt_call){.opt = opts[i], .n_in = 4, .in = rows[i].in};
    }
    return lt__apply_all(ctx, def, calls, n);
}

/* Copies the statistics of s, so that others can be merged into them; does nothing if they are
 * copies. At first they are the tensors given to lt_bn_stats_add(), which backward reads. */
static lt_status own_statistics(lt_bn_entry *s)
{
    lt_tensor **of[] = {&s->mean, &s->var};
    for (int i = 0; i < 2 && !s->is_merged; i++) {
        lt_tensor *own = lt__tensor_copy(*of[i], (lt_dtype)(*of[i])->dtype);
        if (!own)
            return lt_errcode();
        lt_release(*of[i]);
        *of[i] = own;
    }
    s->is_merged = true;
    return LT_OK;
}

lt_status lt_bn_stats_add(lt_ctx *ctx, lt_tensor *running_mean, lt_tensor *running_var,
                          lt_tensor *mean, lt_tensor *var, int64_t count, double momentum)
{
    LT_NEED_CTX(ctx, LT_EINVAL);
    struct lt_autograd *ag = ctx->slots.autograd;
    lt_bn_entry **end = &ag->bn_stats, *s;
    LT_TRY(lt__check_open(ctx, "batch norm statistics"));
    if (count < 0)
        return lt_fail(LT_EINVAL, "batch norm statistics: count must be at least 0, but is %lld",
                       (long long)count);
    if (count == 0 || ag->dry_run.on)
        return LT_OK;
    for (; (s = *end); end = &s->next) {
        if (s->running_mean != running_mean || s->running_var != running_var)
            continue;
        if (count > INT64_MAX - s->count)
            return lt_fail(
                LT_EINVAL,
                "batch norm statistics: count must be at most %lld, or the sum overflows, but is "
                "%lld",
                (long long)(INT64_MAX - s->count), (long long)count);
        LT_TRY(own_statistics(s));
        row merge = {{s->mean, s->var, mean, var}, {(double)s->count, (double)count}};
        LT_TRY(run(ctx, "batch_norm_merge", &merge, 1));
        s->count += count;
        s->momentum = momentum;
        return LT_OK;
    }
    LT_TRY(lt__check_alive(mean));
    LT_TRY(lt__check_alive(var));
    s = lt__alloc_zero(ctx, sizeof *s);
    if (!s)
        return LT_ENOMEM;
    s->running_mean = lt_retain(running_mean);
    s->running_var = lt_retain(running_var);
    s->mean = lt__tensor_view(mean, mean->ndim, mean->dims, 0, true); /* it outlives its scope */
    s->var = lt__tensor_view(var, var->ndim, var->dims, 0, true);
    s->count = count;
    s->momentum = momentum;
    if (!s->mean || !s->var) {
        lt__bn_entry_free(ctx, s);
        return lt_errcode();
    }
    *end = s;
    return LT_OK;
}

void lt__bn_stats_keep(struct lt_autograd *ag)
{
    for (lt_bn_entry *s = ag->bn_stats; s; s = s->next)
        s->backward_period = ag->period + 1;
}

/* Frees n pending entries. list has them in the order in which they are pending. */
static void discard(lt_ctx *ctx, lt_bn_entry *const *list, int n)
{
    lt_bn_entry **link = &ctx->slots.autograd->bn_stats;
    for (int i = 0; i < n;) {
        if (*link != list[i]) {
            link = &(*link)->next;
            continue;
        }
        *link = list[i]->next;
        lt__bn_entry_free(ctx, list[i++]);
    }
}

/* Updates the running statistics from the pending ones: from all of them, or only from those that
 * no backward of this period followed. */
static lt_status commit(lt_ctx *ctx, bool all)
{
    const struct lt_autograd *ag = ctx->slots.autograd;
    lt_bn_entry *list[AT_ONCE];
    row rows[AT_ONCE];
    int n;
    do {
        n = 0;
        for (lt_bn_entry *s = ag->bn_stats; s && n < AT_ONCE; s = s->next) {
            if (!all && s->backward_period == ag->period + 1)
                continue;
            rows[n] = (row){{s->running_mean, s->running_var, s->mean, s->var},
                            {(double)s->count, s->momentum}};
            list[n++] = s;
        }
        lt_status status = n > 0 ? run(ctx, "batch_norm_update", rows, n) : LT_OK;
        discard(ctx, list, n); /* also after a failure: some may have been applied */
        LT_TRY(status);
    } while (n == AT_ONCE);
    return LT_OK;
}

lt_status lt__bn_stats_commit(lt_ctx *ctx) { return commit(ctx, true); }

lt_status lt_bn_stats_commit(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, LT_EINVAL);
    LT_TRY(lt_synchronize(ctx));
    return commit(ctx, true);
}

lt_status lt_bn_stats_synchronize(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, LT_EINVAL);
    LT_TRY(lt_synchronize(ctx));
    return commit(ctx, false);
}

int lt_bn_stats_pending(const lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, 0);
    int n = 0;
    for (const lt_bn_entry *s = ctx->slots.autograd->bn_stats; s; s = s->next)
        n++;
    return n;
}

bool lt_bn_stats_at(const lt_ctx *ctx, int i, lt_bn_stats *stats)
{
    LT_NEED_CTX(ctx, false);
    const lt_bn_entry *s = ctx->slots.autograd->bn_stats;
    while (s && i-- > 0)
        s = s->next;
    if (s)
        *stats =
            (lt_bn_stats){s->running_mean, s->running_var, s->mean, s->var, s->count, s->momentum};
    return s != NULL;
}
