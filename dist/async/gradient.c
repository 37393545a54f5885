/* gradient.c - the packed gradient of a step, on the worker that computes it; see gradient.h. */
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/async/flat.h"
#include "dist/async/gradient.h"

static const char TRAINING[] = "for asynchronous training";

/* ==== Opening ================================================================================= */

lt_status lt__gradient_open(lt_gradient *g, const lt_image *net, bool is_live)
{
    *g = (lt_gradient){.net = net, .is_live = is_live};
    lt_status status = LT_CALLOC(g->present, net->n, TRAINING);
    if (status == LT_OK)
        status = LT_CALLOC(g->at, net->n, TRAINING);
    if (status != LT_OK)
        lt__gradient_close(g);
    return status;
}

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

void lt__gradient_close(lt_gradient *g)
{
    release_bn(g);
    lt__storage_release(g->storage);
    lt__message_free(g->message);
    free(g->present);
    free(g->at);
    free(g->opt);
    free(g->options);
    free(g->bn);
    *g = (lt_gradient){0};
}

static lt_status reserve_groups(lt_gradient *g, int n)
{
    LT_TRY(LT_RESIZE(g->opt, n * LT_MAX_OPT, TRAINING));
    LT_TRY(LT_RESIZE(g->options, n, TRAINING));
    if (n > 0)
        memset(g->opt, 0, (size_t)n * LT_MAX_OPT * sizeof *g->opt);
    for (int i = 0; i < n; i++)
        g->options[i] = g->opt + i * LT_MAX_OPT;
    return LT_OK;
}

lt_status lt__gradient_reserve(lt_gradient *g, int n_groups, int n_bn)
{
    release_bn(g);
    g->n_groups = n_groups;
    LT_TRY(LT_RESIZE(g->bn, n_bn, TRAINING));
    return reserve_groups(g, n_groups);
}

static void keep_data(void *ud, void *data) { (void)ud, (void)data; }

lt_status lt__gradient_set_message(lt_gradient *g, const lt_message *m)
{
    lt__storage_release(g->storage);
    g->storage = lt__storage_over(g->net->ctx, (char *)m->data, m->bytes, keep_data, NULL);
    return g->storage ? LT_OK : LT_ENOMEM;
}

/* ==== Options and batch norm ================================================================== */

int lt__gradient_count_groups(const lt_gradient *g)
{
    lt_optim_range r = {0};
    int n = 0;
    while (lt_optim_next_range(g->net->optim, NULL, g->present, false, &r))
        n = r.group >= n ? r.group + 1 : n;
    return n;
}

static void store_bn(lt_gradient *g, int n)
{
    for (; g->n_bn < n && lt_bn_stats_at(g->net->ctx, g->n_bn, &g->bn[g->n_bn]); g->n_bn++) {
        const lt_bn_stats *s = &g->bn[g->n_bn];
        lt_retain(s->running_mean);
        lt_retain(s->running_var);
        lt_retain(s->mean);
        lt_retain(s->var);
    }
}

/* ==== Messages ================================================================================ */

static size_t padded_bytes(const lt_tensor *x) { return lt__gradient_padded(lt__tensor_bytes(x)); }

/* The bytes of a message before its gradients. */
static size_t bytes_before(const lt_gradient *g)
{
    size_t bytes = lt__gradient_padded((size_t)g->net->n) +
                   lt__gradient_padded((size_t)g->n_groups * LT_MAX_OPT * sizeof(lt_opt)) +
                   lt__gradient_padded((size_t)g->n_bn * sizeof(lt_bn_entry));
    for (int i = 0; i < g->n_bn; i++)
        bytes += padded_bytes(g->bn[i].mean) + padded_bytes(g->bn[i].var);
    return bytes;
}

size_t lt__gradient_message_bytes(const lt_gradient *g)
{
    return g->skip ? 0 : g->end + (g->is_live ? 0 : bytes_before(g));
}

/* The index of a buffer. -1, with the message set, if x is not a buffer. */
static int64_t index_of(const lt_image *net, const lt_tensor *x)
{
    for (int i = 0; i < net->n_buffers; i++)
        if (net->tensor[net->n + i] == x)
            return i;
    lt_fail(LT_EUSAGE,
            "a batch norm updates running statistics that are not buffers of the net; give "
            "the net with all its layers to lt.run, or to the optimizer if the loop is "
            "your own");
    return -1;
}

static lt_status write_bn(const lt_gradient *g, char *to)
{
    char *data = to + lt__gradient_padded((size_t)g->n_bn * sizeof(lt_bn_entry));
    for (int i = 0; i < g->n_bn; i++) {
        const lt_bn_stats *s = &g->bn[i];
        lt_bn_entry entry = {index_of(g->net, s->running_mean), index_of(g->net, s->running_var),
                             s->count, s->momentum};
        if (entry.mean < 0 || entry.var < 0)
            return LT_EUSAGE;
        memcpy(to + (size_t)i * sizeof entry, &entry, sizeof entry);
        LT_TRY(lt_read(s->mean, data));
        data += padded_bytes(s->mean);
        LT_TRY(lt_read(s->var, data));
        data += padded_bytes(s->var);
    }
    return LT_OK;
}

/* Writes all parts of the message but the gradients. */
static lt_status write_before(const lt_gradient *g)
{
    size_t options = (size_t)g->n_groups * LT_MAX_OPT * sizeof(lt_opt);
    char *to = g->message->data;
    memcpy(to, g->present, (size_t)g->net->n);
    to += lt__gradient_padded((size_t)g->net->n);
    memcpy(to, g->opt, options);
    return write_bn(g, to + lt__gradient_padded(options));
}

/* Replaces g->message by one for g, or for a skipped step. */
static lt_status open_message(lt_gradient *g)
{
    lt__message_free(g->message);
    if (!(g->message = lt__message_new(LT_MSG_PUSH, g->skip ? 0 : g->end)))
        return LT_ENOMEM;
    g->message->as.push.skip = g->skip;
    g->message->as.push.n_groups = g->n_groups;
    g->message->as.push.n_bn = g->n_bn;
    return g->skip ? LT_OK : lt__gradient_set_message(g, g->message);
}

/* ==== Gradients =============================================================================== */

void lt__gradient_set_places(lt_gradient *g, size_t begin)
{
    g->end = begin;
    for (int i = 0; i < g->net->n; i++)
        if (g->present[i]) {
            g->at[i] = g->end;
            g->end += padded_bytes(g->net->tensor[i]);
        }
}

lt_status lt__gradient_place(lt_gradient *g)
{
    size_t begin = g->is_live ? bytes_before(g) : 0;
    lt__gradient_set_places(g, begin);
    if (g->is_live) {
        LT_TRY(open_message(g));
        memset(g->message->data, 0, begin); /* the padding */
    } else if (!g->storage || g->storage->bytes < g->end) {
        lt__storage_release(g->storage);
        g->storage = lt__storage_new(g->net->ctx, g->net->ctx->device, g->end);
        if (!g->storage)
            return LT_ENOMEM;
    }
    lt_device *device = g->storage->device;
    return device->fill(device, (char *)g->storage->data + begin, LT_U8, g->end - begin, 0);
}

/* x times factor. x is taken. New. NULL with LT_ENOMEM, or the device's error. */
static lt_tensor *multiply(lt_tensor *x, double factor)
{
    lt_ctx *ctx = x->ctx;
    const lt_def *mul = lt_op_find(ctx, "mul");
    lt_tensor *product = NULL;
    lt_tensor *by = lt__tensor_new(ctx, x->storage->device, (lt_dtype)x->dtype, 0, NULL, true);
    if (mul && by && lt_fill(by, factor) == LT_OK &&
        lt_apply(ctx, mul, (lt_tensor *[]){x, by}, 2, NULL, &product) != LT_OK)
        product = NULL;
    lt_release(x);
    lt_release(by);
    return product;
}

lt_tensor *lt__gradient_range(const lt_gradient *g, const lt_optim_range *r)
{
    lt_dtype dtype = (lt_dtype)g->net->tensor[r->first]->dtype;
    int64_t offset = (int64_t)(g->at[r->first] / lt_dtype_bytes(dtype));
    return lt__tensor_over(g->storage, dtype, 1, &r->count, offset, true);
}

static lt_status store_range(const lt_gradient *g, const lt_optim_range *r, double factor)
{
    lt_tensor *to = lt__gradient_range(g, r);
    lt_tensor *from = lt__optim_range(g->net->optim, LT_OPTIM_GRADS, r);
    if (from && factor != 1)
        from = multiply(from, factor);
    lt_status status = to && from ? lt_copy(to, from) : lt_errcode();
    lt_release(to);
    lt_release(from);
    return status;
}

lt_status lt__gradient_store(lt_gradient *g, const lt_opt *const *options,
                             lt_step_status step_status, double factor)
{
    size_t n_opt = (size_t)lt_optim_def(g->net->optim)->schema.n_opt;
    g->skip = step_status == LT_SKIPPED;
    if (g->skip)
        return g->is_live ? open_message(g) : LT_OK;
    for (int i = 0; i < g->net->n; i++)
        g->present[i] = lt_optim_has_grad(g->net->optim, i);
    int n_bn = lt_bn_stats_pending(g->net->ctx);
    LT_TRY(lt__gradient_reserve(g, lt__gradient_count_groups(g), n_bn));
    for (int i = 0; i < g->n_groups; i++)
        memcpy(g->opt + i * LT_MAX_OPT, options[i], n_opt * sizeof *g->opt);
    store_bn(g, n_bn);
    LT_TRY(lt__gradient_place(g));
    if (g->is_live)
        LT_TRY(write_before(g));
    for (lt_optim_range r = {0}; lt_optim_next_range(g->net->optim, NULL, g->present, false, &r);)
        LT_TRY(store_range(g, &r, factor));
    return LT_OK;
}
