/* mirror.c - a copy of a worker's parameters for the server; see mirror.h. */
#include <stdio.h>
#include <stdlib.h>

#include "core/tensor.h"
#include "dist/async/mirror.h"

/* Adds a pending tensor like x to the tree. New. */
static lt_tensor *add_like(lt_mirror *m, const lt_tensor *x, bool buffer)
{
    char name[24];
    lt_init init = {LT_INIT_CONSTANT, 0, 0};
    lt_tensor *own = buffer ? lt_buffer_new(m->ctx, (lt_dtype)x->dtype, x->ndim, x->dims, init)
                            : lt_param_new(m->ctx, (lt_dtype)x->dtype, x->ndim, x->dims, init);
    if (!own)
        return NULL;
    lt_keep(own);
    snprintf(name, sizeof name, "%d", lt_params_count(m->params));
    if (lt_params_add(m->params, name, own) == LT_OK)
        return own;
    lt_release(own);
    return NULL;
}

static lt_status open_optim(lt_mirror *m, lt_tensor **params, const lt_layout *of)
{
    LT_TRY(lt_params_place(m->params));
    m->optim = lt_optim_new(m->ctx, lt_optim_def(of->optim)->schema.name, params, of->n);
    if (!m->optim)
        return lt_errcode();
    for (int i = 0; i < of->n; i++)
        LT_TRY(lt_optim_set_group(m->optim, params[i], of->param[i].group));
    LT_TRY(lt__layout_open(&m->layout, m->ctx, m->optim, params + of->n, of->n_buffers));
    return lt__mirror_copy(&m->layout, of);
}

lt_status lt__mirror_open(lt_mirror *m, lt_ctx *ctx, const lt_layout *of)
{
    int n = of->n + of->n_buffers, made = 0;
    lt_tensor **x = calloc((size_t)n + 1, sizeof *x);
    *m = (lt_mirror){.ctx = ctx, .params = lt_params_new(ctx)};
    lt_status status = x && m->params ? LT_OK : lt_fail(LT_ENOMEM, "out of memory for the server");
    for (; status == LT_OK && made < n; made += status == LT_OK) {
        bool buffer = made >= of->n;
        x[made] = add_like(m, buffer ? of->buffer[made - of->n] : lt_optim_param(of->optim, made),
                           buffer);
        status = x[made] ? LT_OK : lt_errcode();
    }
    if (status == LT_OK)
        status = open_optim(m, x, of);
    for (int i = 0; i < made; i++)
        lt_release(x[i]); /* the tree and the optimizer keep them */
    free(x);
    if (status != LT_OK)
        lt__mirror_close(m);
    return status;
}

void lt__mirror_close(lt_mirror *m)
{
    lt__layout_close(&m->layout);
    lt_optim_free(m->optim);
    lt_params_free(m->params);
    *m = (lt_mirror){0};
}

static lt_status copy_slots(lt_optim *to, lt_optim *from, int i)
{
    lt_status status = LT_OK;
    for (int k = 0; status == LT_OK && lt_optim_slot_name(from, k); k++) {
        lt_tensor *a = lt_optim_slot(to, k, lt_optim_param(to, i));
        lt_tensor *b = lt_optim_slot(from, k, lt_optim_param(from, i));
        status = a && b ? lt_copy(a, b) : LT_ENOMEM;
        lt_release(a);
        lt_release(b);
    }
    return status;
}

lt_status lt__mirror_copy(const lt_layout *to, const lt_layout *from)
{
    for (int i = 0; i < from->n; i++) {
        LT_TRY(lt_copy(lt_optim_param(to->optim, i), lt_optim_param(from->optim, i)));
        lt_optim_updated(to->optim, &to->param[i]);
        LT_TRY(copy_slots(to->optim, from->optim, i));
        int64_t steps = lt_optim_steps(from->optim, lt_optim_param(from->optim, i));
        LT_TRY(lt_optim_set_steps(to->optim, lt_optim_param(to->optim, i), steps));
    }
    for (int i = 0; i < from->n_buffers; i++)
        LT_TRY(lt_copy(to->buffer[i], from->buffer[i]));
    return LT_OK;
}
