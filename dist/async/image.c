/* image.c - the values of a net in one block of memory, and copies of a net; see image.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/hash.h"
#include "core/tensor.h"
#include "dist/async/image.h"

static size_t bytes_of(const lt_tensor *x) { return (lt__tensor_bytes(x) + 7) & ~(size_t)7; }

static int count_tensors(const lt_image *im) { return im->n * (1 + im->n_slots) + im->n_buffers; }

/* ==== Opening ================================================================================= */

static lt_status add_slots(lt_image *im, lt_tensor **to)
{
    im->slot_bytes = (size_t)im->n * sizeof(int64_t);
    for (int i = 0; i < im->n; i++)
        for (int k = 0; k < im->n_slots; k++, to++) {
            if (!(*to = lt_optim_slot(im->optim, k, im->tensor[i])))
                return lt_errcode();
            lt_keep(*to);
            im->slot_bytes += bytes_of(*to);
        }
    return LT_OK;
}

static lt_status open_image(lt_image *im, lt_tensor *const *buffers)
{
    bool *all;
    lt_optim_range r = {0};
    LT_TRY(LT_CALLOC(im->param, im->n, "for asynchronous training"));
    LT_TRY(LT_CALLOC(im->tensor, count_tensors(im), "for asynchronous training"));
    LT_TRY(LT_CALLOC(all, im->n, "for asynchronous training"));
    memset(all, true, (size_t)im->n);
    for (int i = 0; lt_optim_next_range(im->optim, NULL, all, true, &r); i++) {
        im->param[i] = r;
        im->n_groups = r.group >= im->n_groups ? r.group + 1 : im->n_groups;
    }
    free(all);
    for (int i = 0; i < im->n + im->n_buffers; i++) {
        im->tensor[i] = lt_retain(i < im->n ? lt_optim_param(im->optim, i) : buffers[i - im->n]);
        im->bytes += bytes_of(im->tensor[i]);
    }
    return add_slots(im, im->tensor + im->n + im->n_buffers);
}

lt_status lt__image_open(lt_image *im, lt_ctx *ctx, lt_optim *optim, lt_tensor *const *buffers,
                         int n_buffers)
{
    *im =
        (lt_image){.ctx = ctx, .optim = optim, .n = lt_optim_count(optim), .n_buffers = n_buffers};
    while (lt_optim_slot_name(optim, im->n_slots))
        im->n_slots++;
    lt_status status = open_image(im, buffers);
    if (status != LT_OK)
        lt__image_close(im);
    return status;
}

void lt__image_close(lt_image *im)
{
    for (int i = 0; im->tensor && i < count_tensors(im); i++)
        lt_release(im->tensor[i]);
    free(im->tensor);
    free(im->param);
    *im = (lt_image){0};
}

/* ==== Copying ================================================================================= */

/* Copies tensors [first, end) to memory, with zeros as padding, or from it. */
static lt_status copy_tensors(const lt_image *im, int first, int end, char *memory, bool out)
{
    for (int i = first; i < end; i++) {
        size_t bytes = lt__tensor_bytes(im->tensor[i]);
        LT_TRY(out ? lt_read(im->tensor[i], memory) : lt_write(im->tensor[i], memory));
        if (out)
            memset(memory + bytes, 0, bytes_of(im->tensor[i]) - bytes);
        memory += bytes_of(im->tensor[i]);
    }
    return LT_OK;
}

/* Copies slots and counts of steps to memory, or from it. */
static lt_status copy_slots(const lt_image *im, char *memory, bool out)
{
    for (int i = 0; i < im->n; i++, memory += sizeof(int64_t)) {
        int64_t steps = out ? lt_optim_steps(im->optim, im->tensor[i]) : 0;
        memcpy(out ? memory : (char *)&steps, out ? (char *)&steps : memory, sizeof steps);
        if (!out)
            LT_TRY(lt_optim_set_steps(im->optim, im->tensor[i], steps));
    }
    return copy_tensors(im, im->n + im->n_buffers, count_tensors(im), memory, out);
}

/* Reports that the values of all parameters were written. */
static void count_writes(const lt_image *im)
{
    for (int i = 0; i < im->n; i++)
        lt_optim_updated(im->optim, &im->param[i]);
}

lt_status lt__image_pack(const lt_image *im, bool with_slots, char *to)
{
    LT_TRY(copy_tensors(im, 0, im->n + im->n_buffers, to, true));
    return with_slots ? copy_slots(im, to + im->bytes, true) : LT_OK;
}

lt_status lt__image_unpack(const lt_image *im, bool with_slots, const char *from)
{
    char *memory = (char *)from; /* only read */
    LT_TRY(copy_tensors(im, 0, im->n + im->n_buffers, memory, false));
    count_writes(im);
    return with_slots ? copy_slots(im, memory + im->bytes, false) : LT_OK;
}

lt_status lt__image_copy(const lt_image *to, const lt_image *from)
{
    for (int i = 0; i < count_tensors(from); i++)
        LT_TRY(lt_copy(to->tensor[i], from->tensor[i]));
    count_writes(to);
    for (int i = 0; i < from->n; i++)
        LT_TRY(lt_optim_set_steps(to->optim, to->tensor[i],
                                  lt_optim_steps(from->optim, from->tensor[i])));
    return LT_OK;
}

lt_status lt__image_digest(const lt_image *im, int64_t *digest)
{
    char *values;
    LT_TRY(LT_CALLOC(values, im->bytes, "for asynchronous training"));
    lt_status status = lt__image_pack(im, false, values);
    *digest = (int64_t)lt__fnv64(LT_FNV64_START, values, im->bytes);
    free(values);
    return status;
}

/* ==== Replicas ================================================================================ */

/* Adds a pending parameter or buffer like x to the tree. New. */
static lt_tensor *add_like(lt_replica *r, lt_ctx *ctx, const lt_tensor *x, bool buffer)
{
    char name[24];
    lt_init init = {LT_INIT_CONSTANT, 0, 0};
    lt_tensor *own = buffer ? lt_buffer_new(ctx, (lt_dtype)x->dtype, x->ndim, x->dims, init)
                            : lt_param_new(ctx, (lt_dtype)x->dtype, x->ndim, x->dims, init);
    if (!own)
        return NULL;
    lt_keep(own);
    snprintf(name, sizeof name, "%d", lt_params_count(r->params));
    if (lt_params_add(r->params, name, own) == LT_OK)
        return own;
    lt_release(own);
    return NULL;
}

static lt_status open_optim(lt_replica *r, lt_ctx *ctx, lt_tensor **params, const lt_image *of)
{
    LT_TRY(lt_params_place(r->params));
    r->optim = lt_optim_new(ctx, lt_optim_def(of->optim)->schema.name, params, of->n);
    if (!r->optim)
        return lt_errcode();
    for (int i = 0; i < of->n; i++)
        LT_TRY(lt_optim_set_group(r->optim, params[i], of->param[i].group));
    LT_TRY(lt__image_open(&r->image, ctx, r->optim, params + of->n, of->n_buffers));
    return lt__image_copy(&r->image, of);
}

lt_status lt__replica_open(lt_replica *r, lt_ctx *ctx, const lt_image *of)
{
    int n = of->n + of->n_buffers, made = 0;
    lt_tensor **x = calloc((size_t)n + 1, sizeof *x);
    *r = (lt_replica){.params = lt_params_new(ctx)};
    lt_status status = x && r->params ? LT_OK : lt_fail(LT_ENOMEM, "out of memory for the server");
    for (; status == LT_OK && made < n; made += status == LT_OK)
        status = (x[made] = add_like(r, ctx, of->tensor[made], made >= of->n)) ? LT_OK
                                                                               : lt_errcode();
    if (status == LT_OK)
        status = open_optim(r, ctx, x, of);
    for (int i = 0; i < made; i++)
        lt_release(x[i]); /* the tree and the optimizer keep them */
    free(x);
    if (status != LT_OK)
        lt__replica_close(r);
    return status;
}

void lt__replica_close(lt_replica *r)
{
    lt__image_close(&r->image);
    lt_optim_free(r->optim);
    lt_params_free(r->params);
    *r = (lt_replica){0};
}
