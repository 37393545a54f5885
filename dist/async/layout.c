/* layout.c - parameters, buffers and gradients in messages; see layout.h. */
#include <stdlib.h>
#include <string.h>

#include "core/hash.h"
#include "core/tensor.h"
#include "dist/async/layout.h"

static size_t padded(size_t bytes) { return (bytes + 7) & ~(size_t)7; }

static size_t bytes_of(const lt_tensor *x) { return padded(lt__tensor_bytes(x)); }

/* ==== Opening ================================================================================= */

/* Adds the bytes of the slots of parameter i, and of its number of steps. */
static lt_status count_slots(lt_layout *l, int i)
{
    l->slot_bytes += sizeof(int64_t);
    for (int k = 0; lt_optim_slot_name(l->optim, k); k++) {
        lt_tensor *slot = lt_optim_slot(l->optim, k, lt_optim_param(l->optim, i));
        if (!slot)
            return lt_errcode();
        l->slot_bytes += bytes_of(slot);
        lt_release(slot);
    }
    return LT_OK;
}

static lt_status open_layout(lt_layout *l, lt_tensor *const *buffers)
{
    bool *all = malloc((size_t)l->n + 1);
    lt_optim_range r = {0};
    lt_status status = LT_OK;
    l->param = calloc((size_t)l->n + 1, sizeof *l->param);
    l->buffer = calloc((size_t)l->n_buffers + 1, sizeof *l->buffer);
    if (!all || !l->param || !l->buffer) {
        free(all);
        return lt_fail(LT_ENOMEM, "out of memory for asynchronous training");
    }
    memset(all, true, (size_t)l->n + 1);
    for (int i = 0; status == LT_OK && lt_optim_next_range(l->optim, NULL, all, true, &r); i++) {
        l->param[i] = r;
        l->n_groups = r.group >= l->n_groups ? r.group + 1 : l->n_groups;
        l->bytes += bytes_of(lt_optim_param(l->optim, i));
        status = count_slots(l, i);
    }
    for (int i = 0; i < l->n_buffers; i++) {
        l->buffer[i] = lt_retain(buffers[i]);
        l->bytes += bytes_of(buffers[i]);
    }
    free(all);
    return status;
}

lt_status lt__layout_open(lt_layout *l, lt_ctx *ctx, lt_optim *optim, lt_tensor *const *buffers,
                          int n_buffers)
{
    *l =
        (lt_layout){.ctx = ctx, .optim = optim, .n = lt_optim_count(optim), .n_buffers = n_buffers};
    lt_status status = open_layout(l, buffers);
    if (status != LT_OK)
        lt__layout_close(l);
    return status;
}

void lt__layout_close(lt_layout *l)
{
    for (int i = 0; l->buffer && i < l->n_buffers; i++)
        lt_release(l->buffer[i]);
    free(l->buffer);
    free(l->param);
    *l = (lt_layout){0};
}

/* ==== Values ================================================================================== */

lt_status lt__layout_pack(const lt_layout *l, char *to)
{
    for (int i = 0; i < l->n + l->n_buffers; i++) {
        lt_tensor *x = i < l->n ? lt_optim_param(l->optim, i) : l->buffer[i - l->n];
        LT_TRY(lt_read(x, to));
        to += bytes_of(x);
    }
    return LT_OK;
}

lt_status lt__layout_unpack(const lt_layout *l, const char *from)
{
    for (int i = 0; i < l->n + l->n_buffers; i++) {
        lt_tensor *x = i < l->n ? lt_optim_param(l->optim, i) : l->buffer[i - l->n];
        LT_TRY(lt_write(x, from));
        if (i < l->n)
            lt_optim_updated(l->optim, &l->param[i]);
        from += bytes_of(x);
    }
    return LT_OK;
}

lt_status lt__layout_digest(const lt_layout *l, int64_t *digest)
{
    char *values = calloc(l->bytes + 1, 1); /* the padding is zero */
    if (!values)
        return lt_fail(LT_ENOMEM, "out of memory for asynchronous training");
    lt_status status = lt__layout_pack(l, values);
    *digest = (int64_t)lt__fnv64(LT_FNV64_START, values, l->bytes);
    free(values);
    return status;
}

/* Copies the number of steps of a parameter to memory, or from it. */
static lt_status copy_steps(const lt_layout *l, const lt_tensor *param, char *memory, bool out)
{
    int64_t steps = out ? lt_optim_steps(l->optim, param) : 0;
    memcpy(out ? memory : (char *)&steps, out ? (char *)&steps : memory, sizeof steps);
    return out ? LT_OK : lt_optim_set_steps(l->optim, param, steps);
}

/* Copies all slots and numbers of steps to memory, or from it. */
static lt_status copy_slots(const lt_layout *l, char *memory, bool out)
{
    for (int i = 0; i < l->n; i++) {
        lt_tensor *param = lt_optim_param(l->optim, i);
        LT_TRY(copy_steps(l, param, memory, out));
        memory += sizeof(int64_t);
        for (int k = 0; lt_optim_slot_name(l->optim, k); k++) {
            lt_tensor *slot = lt_optim_slot(l->optim, k, param);
            if (!slot)
                return lt_errcode();
            lt_status status = out ? lt_read(slot, memory) : lt_write(slot, memory);
            memory += bytes_of(slot);
            lt_release(slot);
            LT_TRY(status);
        }
    }
    return LT_OK;
}

lt_status lt__layout_pack_slots(const lt_layout *l, char *to) { return copy_slots(l, to, true); }

lt_status lt__layout_unpack_slots(const lt_layout *l, const char *from)
{
    return copy_slots(l, (char *)from, false); /* only read */
}

/* ==== Gradients =============================================================================== */

/* A message contains, each padded to 8 bytes: whether each parameter has a gradient; the options;
 * the heads of the batch-norm statistics; their means and variances; the gradients. */
enum { SKIP, N_GROUPS, N_BN }; /* numbers of the message */

typedef struct bn_head {
    int64_t mean, var, count; /* indices of the running statistics in the buffers */
    double momentum;
} bn_head;

/* The index of a buffer. -1, with the message set, if x is not a buffer. */
static int64_t index_of(const lt_layout *l, const lt_tensor *x)
{
    for (int i = 0; i < l->n_buffers; i++)
        if (l->buffer[i] == x)
            return i;
    lt_fail(LT_EUSAGE,
            "a batch norm updates running statistics that are not buffers of the net; give "
            "the net with all its layers to lt.run, or to the optimizer if the loop is "
            "your own");
    return -1;
}

static size_t gradient_bytes(const lt_gradient *g, const lt_layout *l)
{
    size_t bytes = padded((size_t)l->n) + (size_t)g->n_groups * LT_MAX_OPT * sizeof(lt_opt) +
                   (size_t)g->n_bn * sizeof(bn_head);
    for (int i = 0; i < g->n_bn; i++)
        bytes += bytes_of(g->bn[i].mean) + bytes_of(g->bn[i].var);
    for (int i = 0; i < l->n; i++)
        if (g->present[i])
            bytes += bytes_of(lt_optim_param(l->optim, i));
    return bytes;
}

static lt_status pack_bn(const lt_gradient *g, const lt_layout *l, char **to)
{
    for (int i = 0; i < g->n_bn; i++, *to += sizeof(bn_head)) {
        const lt_bn_stats *s = &g->bn[i];
        bn_head head = {index_of(l, s->running_mean), index_of(l, s->running_var), s->count,
                        s->momentum};
        if (head.mean < 0 || head.var < 0)
            return LT_EUSAGE;
        memcpy(*to, &head, sizeof head);
    }
    for (int i = 0; i < g->n_bn; i++) {
        LT_TRY(lt_read(g->bn[i].mean, *to));
        *to += bytes_of(g->bn[i].mean);
        LT_TRY(lt_read(g->bn[i].var, *to));
        *to += bytes_of(g->bn[i].var);
    }
    return LT_OK;
}

/* Copies the elements of a range of a flat to memory, or from it. */
static lt_status copy_range(const lt_flat *flat, const lt_optim_range *r, char *memory, bool out)
{
    lt_tensor *x = lt__flat_range(flat, r);
    if (!x)
        return LT_ENOMEM;
    lt_status status = out ? lt_read(x, memory) : lt_write(x, memory);
    lt_release(x);
    return status;
}

static lt_status pack_gradient(const lt_gradient *g, const lt_layout *l, char *to)
{
    size_t options = (size_t)g->n_groups * LT_MAX_OPT * sizeof(lt_opt);
    memcpy(to, g->present, (size_t)l->n);
    to += padded((size_t)l->n);
    memcpy(to, g->opt, options);
    to += options;
    LT_TRY(pack_bn(g, l, &to));
    for (int i = 0; i < l->n; i++)
        if (g->present[i]) {
            LT_TRY(copy_range(&g->flat, &l->param[i], to, true));
            to += bytes_of(lt_optim_param(l->optim, i));
        }
    return LT_OK;
}

lt_message *lt__gradient_pack(const lt_gradient *g, const lt_layout *l, int kind)
{
    lt_message *m = lt__message_new(kind, g->skip ? 0 : gradient_bytes(g, l));
    if (!m)
        return NULL;
    m->number[SKIP] = g->skip;
    m->number[N_GROUPS] = g->n_groups;
    m->number[N_BN] = g->n_bn;
    if (g->skip || pack_gradient(g, l, m->data) == LT_OK)
        return m;
    lt__message_free(m);
    return NULL;
}

/* The next bytes of a message; NULL if there are not as many. */
static const char *take(const char **from, const char *end, size_t bytes)
{
    if ((size_t)(end - *from) < bytes)
        return NULL;
    *from += bytes;
    return *from - bytes;
}

static lt_status does_not_fit(const lt_message *m)
{
    return lt_fail(LT_EDESYNC, "the gradient of rank %d does not fit the server's net", m->from);
}

/* A tensor with the dims of a buffer and these values. New. */
static lt_tensor *like_buffer(const lt_layout *l, int64_t i, const char *values)
{
    lt_tensor *x = lt__tensor_copy(l->buffer[i], (lt_dtype)l->buffer[i]->dtype);
    if (x && lt_write(x, values) == LT_OK)
        return x;
    lt_release(x);
    return NULL;
}

static bool is_buffer(const lt_layout *l, int64_t i) { return i >= 0 && i < l->n_buffers; }

static lt_status unpack_bn(lt_gradient *g, const lt_layout *l, const lt_message *m,
                           const char **from, const char *end)
{
    int n = (int)m->number[N_BN];
    const char *heads = take(from, end, (size_t)n * sizeof(bn_head));
    if (!heads)
        return does_not_fit(m);
    LT_TRY(lt__gradient_reserve_bn(g, n));
    for (int i = 0; i < n; i++) {
        bn_head h;
        memcpy(&h, heads + (size_t)i * sizeof h, sizeof h);
        const char *mean = NULL, *var = NULL;
        if (is_buffer(l, h.mean) && is_buffer(l, h.var)) {
            mean = take(from, end, bytes_of(l->buffer[h.mean]));
            var = mean ? take(from, end, bytes_of(l->buffer[h.var])) : NULL;
        }
        if (!var)
            return does_not_fit(m);
        lt_bn_stats *s = &g->bn[g->n_bn];
        *s = (lt_bn_stats){.running_mean = lt_retain(l->buffer[h.mean]),
                           .running_var = lt_retain(l->buffer[h.var]),
                           .mean = like_buffer(l, h.mean, mean),
                           .var = like_buffer(l, h.var, var),
                           .count = h.count,
                           .momentum = h.momentum};
        g->n_bn++;
        if (!s->mean || !s->var)
            return LT_ENOMEM;
    }
    return LT_OK;
}

static lt_status unpack_gradient(lt_gradient *g, const lt_layout *l, const lt_message *m)
{
    const char *from = m->data, *end = m->data + m->bytes, *at;
    if (!(at = take(&from, end, padded((size_t)l->n))))
        return does_not_fit(m);
    memcpy(g->present, at, (size_t)l->n);
    if (!(at = take(&from, end, (size_t)g->n_groups * LT_MAX_OPT * sizeof(lt_opt))))
        return does_not_fit(m);
    memcpy(g->opt, at, (size_t)g->n_groups * LT_MAX_OPT * sizeof(lt_opt));
    LT_TRY(unpack_bn(g, l, m, &from, end));
    for (int i = 0; i < l->n; i++)
        if (g->present[i]) {
            if (!(at = take(&from, end, bytes_of(lt_optim_param(l->optim, i)))))
                return does_not_fit(m);
            LT_TRY(copy_range(&g->flat, &l->param[i], (char *)at, false)); /* only read */
        }
    return LT_OK;
}

lt_status lt__gradient_unpack(lt_gradient *g, const lt_layout *l, const lt_message *m)
{
    int64_t groups = m->number[N_GROUPS], bn = m->number[N_BN];
    g->skip = m->number[SKIP] != 0;
    if (g->skip)
        return LT_OK;
    if (groups < 0 || groups > l->n_groups || bn < 0 || bn > l->n_buffers)
        return does_not_fit(m);
    LT_TRY(lt__gradient_reserve(g, l->optim, (int)groups));
    return unpack_gradient(g, l, m);
}
