/* gradient_view.c - the packed gradient of a step, on the server; see gradient.h. */
#include <string.h>

#include "core/tensor.h"
#include "dist/async/gradient.h"

/* The start of the next part of a message; NULL if the message is too short for it. *at: where the
 * part starts, and then where it ends. */
static const char *take(const lt_message *m, size_t *at, size_t bytes)
{
    size_t begin = *at;
    *at += lt__gradient_padded(bytes);
    return *at <= m->bytes ? m->data + begin : NULL;
}

static lt_status does_not_fit(const lt_message *m)
{
    return lt_fail(LT_EDESYNC, "the gradient of rank %d does not fit the server's net", m->from);
}

/* A running statistic, or NULL if the net has no such buffer. Borrowed. */
static lt_tensor *find_buffer(const lt_image *net, int64_t i)
{
    return i >= 0 && i < net->n_buffers ? net->tensor[net->n + i] : NULL;
}

/* A tensor like x over the storage, at *at, which is moved to its end. New. NULL with LT_ENOMEM, or
 * if the storage is too small. */
static lt_tensor *view_like(const lt_gradient *g, const lt_tensor *x, size_t *at)
{
    size_t begin = *at, size = lt_dtype_bytes((lt_dtype)x->dtype);
    *at += lt__gradient_padded(lt__tensor_bytes(x));
    return *at <= g->storage->bytes ? lt__tensor_over(g->storage, (lt_dtype)x->dtype, x->ndim,
                                                      x->dims, (int64_t)(begin / size), true)
                                    : NULL;
}

/* Whether all bytes are valid as bool. */
static bool are_bools(const char *data, int n)
{
    bool ok = true;
    for (int i = 0; i < n; i++)
        ok &= data[i] == 0 || data[i] == 1;
    return ok;
}

/* Whether these are options (n_groups, LT_MAX_OPT) of the optimizer. */
static bool are_options(const lt_gradient *g, const char *data, int n_groups)
{
    const lt_schema *schema = &lt_optim_def(g->net->optim)->schema;
    bool ok = true;
    for (int i = 0; i < n_groups * LT_MAX_OPT; i++) {
        lt_opt o;
        int k = i % LT_MAX_OPT;
        memcpy(&o, data + (size_t)i * sizeof o, sizeof o);
        int most = o.kind == LT_KIND_INTS ? LT_MAX_DIMS : 1;
        ok &= k >= schema->n_opt || (o.kind == schema->opt[k].value.kind && o.n <= most);
    }
    return ok;
}

/* Whether a server can update the running statistics mean and var, which may be NULL. The sum of
 * the counts of all entries fits in an int64_t. */
static bool is_bn(const lt_bn_entry *e, const lt_tensor *mean, const lt_tensor *var)
{
    static const int64_t MOST = (int64_t)1 << 40;
    return mean && var && mean != var && lt__is_float((lt_dtype)mean->dtype) &&
           mean->dtype == var->dtype && mean->ndim == 1 && var->ndim == 1 &&
           mean->count == var->count && e->count > 0 && e->count <= MOST && e->momentum >= 0 &&
           e->momentum <= 1;
}

static lt_status view_bn(lt_gradient *g, const lt_message *m, const char *entries, size_t *at)
{
    for (int n = m->as.push.n_bn; g->n_bn < n; entries += sizeof(lt_bn_entry)) {
        lt_bn_entry e;
        memcpy(&e, entries, sizeof e);
        lt_tensor *mean = find_buffer(g->net, e.mean), *var = find_buffer(g->net, e.var);
        if (!is_bn(&e, mean, var))
            return does_not_fit(m);
        lt_bn_stats *s = &g->bn[g->n_bn++];
        *s = (lt_bn_stats){.running_mean = lt_retain(mean),
                           .running_var = lt_retain(var),
                           .mean = view_like(g, mean, at),
                           .var = view_like(g, var, at),
                           .count = e.count,
                           .momentum = e.momentum};
        if (*at > m->bytes)
            return does_not_fit(m);
        if (!s->mean || !s->var)
            return LT_ENOMEM;
    }
    return LT_OK;
}

lt_status lt__gradient_view(lt_gradient *g, const lt_message *m)
{
    int n_groups = m->as.push.n_groups, n_bn = m->as.push.n_bn;
    g->loss = m->as.push.loss;
    g->lr = m->as.push.lr;
    g->skip = m->as.push.skip;
    if (g->skip)
        return LT_OK;
    if (n_groups < 0 || n_groups > g->net->n_groups || n_bn < 0 || n_bn > g->net->n_buffers)
        return does_not_fit(m);
    size_t at = 0, option_bytes = (size_t)n_groups * LT_MAX_OPT * sizeof(lt_opt);
    const char *present = take(m, &at, (size_t)g->net->n), *options = take(m, &at, option_bytes);
    const char *entries = take(m, &at, (size_t)n_bn * sizeof(lt_bn_entry));
    if (!entries || !are_bools(present, g->net->n) || !are_options(g, options, n_groups))
        return does_not_fit(m);
    memcpy(g->present, present, (size_t)g->net->n);
    if (lt__gradient_count_groups(g) > n_groups)
        return does_not_fit(m);
    LT_TRY(lt__gradient_reserve(g, n_groups, n_bn));
    LT_TRY(lt__gradient_set_message(g, m));
    memcpy(g->opt, options, option_bytes);
    LT_TRY(view_bn(g, m, entries, &at));
    lt__gradient_set_places(g, at);
    return g->end == m->bytes ? LT_OK : does_not_fit(m);
}

lt_status lt__gradient_commit_bn(const lt_gradient *g)
{
    for (int i = 0; i < g->n_bn; i++) {
        const lt_bn_stats *s = &g->bn[i];
        LT_TRY(lt_bn_stats_add(g->net->ctx, s->running_mean, s->running_var, s->mean, s->var,
                               s->count, s->momentum));
    }
    return lt_bn_stats_commit(g->net->ctx);
}
