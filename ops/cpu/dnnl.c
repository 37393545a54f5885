/* dnnl.c - the only file that uses oneDNN (its C API, version 3.2 or later).
 *
 * A plan is what oneDNN built for one kind of call: a primitive, and memory objects whose addresses
 * each run sets to the current tensors. Plans are cached in the context by kind, dtypes, sizes and
 * threads. The cache also records the calls for which oneDNN has no optimised code. A context
 * belongs to one thread, so nothing is locked here. Contexts share only oneDNN's own cache of
 * compiled code, which is thread-safe.
 *
 * Activations stay dense and channels last: oneDNN is about as fast on them as in a layout of its
 * own choice, except for depthwise convolutions. oneDNN chooses the layout of a convolution's
 * weights, because it has no optimised code for ours. They are packed before a run, or unpacked
 * after a run that computes their gradient. That takes a few percent of a run, and about a sixth
 * for small batches of small images with many channels. Weights change at every step, so packed
 * weights are not kept.
 *
 * The workspace is all the memory that a run needs besides its tensors: one block per context, as
 * large as the largest run so far required. In the steady state nothing is allocated, and the
 * context counts and limits this memory like any other.
 */
#include <dnnl.h>
#include <dnnl_debug.h>
#include <omp.h>
#include <stdio.h>

#include "ops/cpu/dnnl.h"
#include "ops/backend/plan_cache.h"
#include "ops/backend/state.h"

/* Operands of a task. */
enum { X, W, BIAS, Y, OPERANDS };

/* oneDNN's names for the operands of each kind of task, and the operand that is the result. */
static const struct {
    int arg[OPERANDS], result;
} role[] = {
    [LT_PRODUCT] = {{DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_BIAS, DNNL_ARG_DST}, Y},
    [LT_CONV] = {{DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_BIAS, DNNL_ARG_DST}, Y},
    [LT_CONV_DATA] = {{DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, 0, DNNL_ARG_DIFF_DST}, X},
    [LT_CONV_WEIGHTS] = {{DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, 0, DNNL_ARG_DIFF_DST}, W},
};

/* All members are 64-bit words, so that equal keys have equal bytes. */
typedef struct {
    int64_t kind, threads;
    int64_t type[OPERANDS]; /* dnnl_data_type_t; dnnl_data_type_undef if absent */
    union {
        lt_product product;
        lt_conv conv;
    };
} key;

/* Parts of the workspace: scratchpads of the primitive and of the packer, packed weights, and a
 * result that is added to the caller's tensor after the run. */
enum { OWN, PACKER_OWN, PACKED, ADDED, PARTS };

typedef struct plan {
    lt_plan cached;
    key key;
    dnnl_primitive_t primitive;      /* NULL if oneDNN has no optimised code */
    dnnl_primitive_t packer;         /* NULL if weights are used as they are */
    dnnl_memory_t operand[OPERANDS]; /* operands in the caller's layout; NULL if absent */
    /* NULL if unused. ADDED is always NULL: operand[result] points there instead */
    dnnl_memory_t part[PARTS];
    size_t bytes[PARTS];
    dnnl_exec_arg_t arg[OPERANDS + 1], packer_arg[3];
    int n_args, n_packer_args;
} plan;

struct lt_dnnl {
    lt_ctx *ctx;
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    dnnl_primitive_attr_t attr; /* user-provided scratchpads */
    void *workspace;
    size_t workspace_bytes;
    lt_plan_cache plans;
};

char *lt__cpu_backend(char *buffer, size_t bytes)
{
    const dnnl_version_t *version = dnnl_version();
    const char *isa = dnnl_cpu_isa2str(dnnl_get_effective_cpu_isa());
    if (strncmp(isa, "cpu_isa_", 8) == 0)
        isa += 8;
    snprintf(buffer, bytes, "oneDNN %d.%d.%d (%s)", version->major, version->minor, version->patch,
             isa);
    for (char *p = strchr(buffer, '('); p && *p; p++)
        if (*p >= 'a' && *p <= 'z') /* toupper() depends on the locale */
            *p = (char)(*p - 'a' + 'A');
    return buffer;
}

/* ==== Making a plan =========================================================================== */

#define DNNL_TRY(expr)                                                                             \
    do {                                                                                           \
        dnnl_status_t dnnl_try_ = (expr);                                                          \
        if (dnnl_try_ != dnnl_success)                                                             \
            return dnnl_try_;                                                                      \
    } while (0)

static lt_status failed(dnnl_status_t status)
{
    if (status == dnnl_out_of_memory)
        return lt_fail(LT_ENOMEM, "out of memory in oneDNN; try a smaller batch");
    char backend[64];
    return lt_fail(LT_EENV, "%s failed: %s", lt__cpu_backend(backend, sizeof backend),
                   dnnl_status2str(status));
}

/* oneDNN 3.2 does not check all allocations for the code that it generates. It crashes, or throws
 * an exception that C cannot catch. So this fails first if memory is short. */
static lt_status check_memory(void)
{
    enum { ROOM = 64 << 20 }; /* several times what oneDNN needs */
    return lt__can_map(ROOM) ? LT_OK
                             : lt_fail(LT_ENOMEM,
                                       "out of memory: oneDNN may need %d MiB for its code, but "
                                       "less is left",
                                       ROOM >> 20);
}

/* Descriptors that are needed only while a plan is made. */
typedef struct {
    dnnl_memory_desc_t operand[OPERANDS];
    dnnl_memory_desc_t free_w; /* W in a layout of oneDNN's choice; NULL for products */
    dnnl_memory_desc_t hint_w; /* the same with the dtype of the forward pass */
    dnnl_primitive_desc_t hint, primitive, packer;
} drafts;

static void drafts_free(drafts *m)
{
    for (int i = 0; i < OPERANDS; i++)
        dnnl_memory_desc_destroy(m->operand[i]);
    dnnl_memory_desc_destroy(m->free_w);
    dnnl_memory_desc_destroy(m->hint_w);
    dnnl_primitive_desc_destroy(m->hint);
    dnnl_primitive_desc_destroy(m->primitive);
    dnnl_primitive_desc_destroy(m->packer);
}

static dnnl_data_type_t type_of(const key *k, int operand)
{
    return (dnnl_data_type_t)k->type[operand];
}

/* A batch of one is described as a plain matrix. */
static dnnl_status_t matrix(dnnl_memory_desc_t *desc, dnnl_data_type_t type, int64_t batch,
                            int64_t rows, int64_t cols, int64_t each, int64_t row, int64_t col)
{
    dnnl_dims_t flat = {rows, cols}, flat_strides = {row, col};
    dnnl_dims_t deep = {batch, rows, cols}, deep_strides = {each, row, col};
    return batch == 1 ? dnnl_memory_desc_create_with_strides(desc, 2, flat, type, flat_strides)
                      : dnnl_memory_desc_create_with_strides(desc, 3, deep, type, deep_strides);
}

static dnnl_status_t draft_product(struct lt_dnnl *d, const key *k, drafts *m)
{
    const lt_product *p = &k->product;
    dnnl_dims_t one_row = {1, p->n}; /* only batches of one have a bias */
    DNNL_TRY(matrix(&m->operand[X], type_of(k, X), p->batch, p->m, p->k, p->a_batch, p->a_row,
                    p->a_col));
    DNNL_TRY(matrix(&m->operand[W], type_of(k, W), p->batch, p->k, p->n, p->b_batch, p->b_row,
                    p->b_col));
    DNNL_TRY(matrix(&m->operand[Y], type_of(k, Y), p->batch, p->m, p->n, p->out_batch, p->out_row,
                    p->out_col));
    if (k->type[BIAS])
        DNNL_TRY(dnnl_memory_desc_create_with_tag(&m->operand[BIAS], 2, one_row, type_of(k, BIAS),
                                                  dnnl_ab));
    return dnnl_matmul_primitive_desc_create(&m->primitive, d->engine, m->operand[X], m->operand[W],
                                             m->operand[BIAS], m->operand[Y], d->attr);
}

static dnnl_status_t draft_conv(struct lt_dnnl *d, const key *k, drafts *m)
{
    const lt_conv *v = &k->conv;
    const lt_window *w = &v->window;
    int64_t groups = v->groups;
    /* logical order; the tag gives the layout */
    dnnl_dims_t x_dims = {v->n, v->in, w->in[0], w->in[1]};
    dnnl_dims_t y_dims = {v->n, v->out, w->out[0], w->out[1]}, bias_dims = {v->out};
    dnnl_dims_t dense = {v->out, v->in, w->kernel[0], w->kernel[1]};
    dnnl_dims_t grouped = {groups, v->out / groups, v->in / groups, w->kernel[0], w->kernel[1]};
    dnnl_dims_t stride = {w->stride[0], w->stride[1]}, pad = {w->pad[0], w->pad[1]};
    dnnl_dims_t skip = {w->dilation[0] - 1, w->dilation[1] - 1};
    int64_t *w_dims = groups == 1 ? dense : grouped;
    int n_w = groups == 1 ? 4 : 5;
    bool weights = k->kind == LT_CONV_WEIGHTS;

    DNNL_TRY(dnnl_memory_desc_create_with_tag(&m->operand[X], 4, x_dims, type_of(k, X), dnnl_nhwc));
    DNNL_TRY(dnnl_memory_desc_create_with_tag(&m->operand[Y], 4, y_dims, type_of(k, Y), dnnl_nhwc));
    DNNL_TRY(dnnl_memory_desc_create_with_tag(&m->operand[W], n_w, w_dims, type_of(k, W),
                                              groups == 1 ? dnnl_ohwi : dnnl_gohwi));
    DNNL_TRY(dnnl_memory_desc_create_with_tag(&m->free_w, n_w, w_dims, type_of(k, W),
                                              dnnl_format_tag_any));
    DNNL_TRY(dnnl_memory_desc_create_with_tag(&m->hint_w, n_w, w_dims, type_of(k, X),
                                              dnnl_format_tag_any));
    if (k->type[BIAS])
        DNNL_TRY(dnnl_memory_desc_create_with_tag(&m->operand[BIAS], 1, bias_dims, type_of(k, BIAS),
                                                  dnnl_a));
    DNNL_TRY(dnnl_convolution_forward_primitive_desc_create(
        k->kind == LT_CONV ? &m->primitive : &m->hint, d->engine, dnnl_forward_training,
        dnnl_convolution_direct, m->operand[X], weights ? m->hint_w : m->free_w, m->operand[BIAS],
        m->operand[Y], stride, skip, pad, pad, d->attr));
    if (k->kind == LT_CONV_DATA)
        return dnnl_convolution_backward_data_primitive_desc_create(
            &m->primitive, d->engine, dnnl_convolution_direct, m->operand[X], m->free_w,
            m->operand[Y], stride, skip, pad, pad, m->hint, d->attr);
    if (weights)
        return dnnl_convolution_backward_weights_primitive_desc_create(
            &m->primitive, d->engine, dnnl_convolution_direct, m->operand[X], m->free_w, NULL,
            m->operand[Y], stride, skip, pad, pad, m->hint, d->attr);
    return dnnl_success;
}

/* oneDNN's reference code is slower than our portable code. */
static bool is_optimised(const_dnnl_primitive_desc_t primitive)
{
    const char *name = "";
    return dnnl_primitive_desc_query(primitive, dnnl_query_impl_info_str, 0, &name) ==
               dnnl_success &&
           strncmp(name, "ref", 3) != 0;
}

/* Creates the memory object of a part of the workspace, unless the descriptor is empty. */
static dnnl_status_t add_part(struct lt_dnnl *d, plan *p, int part, const_dnnl_memory_desc_t desc)
{
    p->bytes[part] = dnnl_memory_desc_get_size(desc);
    if (p->bytes[part] == 0)
        return dnnl_success;
    return dnnl_memory_create(&p->part[part], desc, d->engine, DNNL_MEMORY_NONE);
}

/* Adds a reorder between the caller's layout of the weights and the primitive's layout, if they
 * differ. */
static dnnl_status_t add_packer(struct lt_dnnl *d, plan *p, drafts *m)
{
    bool unpack = role[p->key.kind].result == W;
    dnnl_memory_desc_t ours = m->operand[W];
    const_dnnl_memory_desc_t theirs = dnnl_primitive_desc_query_md(
        m->primitive, unpack ? dnnl_query_diff_weights_md : dnnl_query_weights_md, 0);
    if (dnnl_memory_desc_equal(ours, theirs))
        return dnnl_success;
    DNNL_TRY(dnnl_reorder_primitive_desc_create(&m->packer, unpack ? theirs : ours, d->engine,
                                                unpack ? ours : theirs, d->engine, d->attr));
    DNNL_TRY(dnnl_primitive_create(&p->packer, m->packer));
    DNNL_TRY(add_part(d, p, PACKED, theirs));
    DNNL_TRY(add_part(d, p, PACKER_OWN,
                      dnnl_primitive_desc_query_md(m->packer, dnnl_query_scratchpad_md, 0)));
    p->packer_arg[0] = (dnnl_exec_arg_t){unpack ? DNNL_ARG_TO : DNNL_ARG_FROM, p->operand[W]};
    p->packer_arg[1] = (dnnl_exec_arg_t){unpack ? DNNL_ARG_FROM : DNNL_ARG_TO, p->part[PACKED]};
    p->packer_arg[2] = (dnnl_exec_arg_t){DNNL_ARG_SCRATCHPAD, p->part[PACKER_OWN]};
    p->n_packer_args = p->part[PACKER_OWN] ? 3 : 2;
    return dnnl_success;
}

/* Fills p for its key. p->primitive stays NULL if oneDNN has no optimised code. */
static dnnl_status_t complete(struct lt_dnnl *d, plan *p, drafts *m)
{
    const key *k = &p->key;
    dnnl_status_t status = k->kind == LT_PRODUCT ? draft_product(d, k, m) : draft_conv(d, k, m);
    if (status == dnnl_unimplemented || status == dnnl_invalid_arguments)
        return dnnl_success;
    DNNL_TRY(status);
    if (!is_optimised(m->primitive))
        return dnnl_success;
    for (int i = 0; i < OPERANDS; i++)
        if (m->operand[i])
            DNNL_TRY(
                dnnl_memory_create(&p->operand[i], m->operand[i], d->engine, DNNL_MEMORY_NONE));
    if (m->free_w)
        DNNL_TRY(add_packer(d, p, m));
    DNNL_TRY(add_part(d, p, OWN,
                      dnnl_primitive_desc_query_md(m->primitive, dnnl_query_scratchpad_md, 0)));
    p->bytes[ADDED] = dnnl_memory_desc_get_size(m->operand[role[k->kind].result]);
    for (int i = 0; i < OPERANDS; i++)
        if (p->operand[i])
            p->arg[p->n_args++] = (dnnl_exec_arg_t){
                role[k->kind].arg[i], i == W && p->packer ? p->part[PACKED] : p->operand[i]};
    if (p->part[OWN])
        p->arg[p->n_args++] = (dnnl_exec_arg_t){DNNL_ARG_SCRATCHPAD, p->part[OWN]};
    return dnnl_primitive_create(&p->primitive, m->primitive);
}

/* ==== Plans =================================================================================== */

static void plan_free(struct lt_dnnl *d, plan *p)
{
    for (int i = 0; i < OPERANDS; i++)
        dnnl_memory_destroy(p->operand[i]);
    for (int i = 0; i < PARTS; i++)
        dnnl_memory_destroy(p->part[i]);
    dnnl_primitive_destroy(p->primitive);
    dnnl_primitive_destroy(p->packer);
    lt__free(d->ctx, p, sizeof *p);
}

static void plans_free(struct lt_dnnl *d)
{
    for (lt_plan *p; (p = lt__plan_pop(&d->plans));)
        plan_free(d, (plan *)p);
}

/* Returns the plan for k, which is made if needed, or NULL on failure. Borrowed until the next
 * call. */
static plan *plan_for(struct lt_dnnl *d, const key *k)
{
    plan *p = (plan *)lt__plan_find(&d->plans, k);
    if (p)
        return p;
    if (lt__plan_cache_is_full(&d->plans))
        plans_free(d);
    if (check_memory() != LT_OK || !(p = lt__alloc_zero(d->ctx, sizeof *p)))
        return NULL;
    drafts m = {.free_w = NULL};
    p->key = *k;
    dnnl_status_t status = complete(d, p, &m);
    drafts_free(&m);
    if (status != dnnl_success) {
        plan_free(d, p);
        failed(status);
        return NULL;
    }
    lt__plan_add(&d->plans, &p->cached, &p->key);
    return p;
}

/* Returns this context's state, which is made on first use, or NULL on failure. Borrowed. */
static struct lt_dnnl *state_of(lt_ctx *ctx)
{
    struct lt_dnnl *d = ctx->slots.ops->dnnl;
    if (d || check_memory() != LT_OK || !(d = lt__alloc_zero(ctx, sizeof *d)))
        return d;
    d->ctx = ctx;
    d->plans.key_bytes = sizeof(key);
    dnnl_status_t status = dnnl_engine_create(&d->engine, dnnl_cpu, 0);
    if (status == dnnl_success)
        status = dnnl_stream_create(&d->stream, d->engine, dnnl_stream_default_flags);
    if (status == dnnl_success)
        status = dnnl_primitive_attr_create(&d->attr);
    if (status == dnnl_success)
        status = dnnl_primitive_attr_set_scratchpad_mode(d->attr, dnnl_scratchpad_mode_user);
    if (status == dnnl_success)
        return ctx->slots.ops->dnnl = d;
    lt__dnnl_free(d);
    failed(status);
    return NULL;
}

void lt__dnnl_free(struct lt_dnnl *d)
{
    if (!d)
        return;
    plans_free(d);
    dnnl_primitive_attr_destroy(d->attr);
    dnnl_stream_destroy(d->stream);
    dnnl_engine_destroy(d->engine);
    lt__free(d->ctx, d->workspace, d->workspace_bytes);
    lt__free(d->ctx, d, sizeof *d);
}

/* ==== Running ================================================================================= */

/* Assigns the parts that p uses to the workspace, which grows if needed. *added is the address of
 * the ADDED part. */
static lt_status lay_out(struct lt_dnnl *d, plan *p, bool add, void **added)
{
    size_t offset[PARTS], total = 0;
    for (int i = 0; i < PARTS; i++) {
        offset[i] = total;
        if (i != ADDED || add)
            total += (p->bytes[i] + 63) & ~(size_t)63;
    }
    if (total > d->workspace_bytes) {
        lt__free(d->ctx, d->workspace, d->workspace_bytes);
        d->workspace_bytes = 0;
        if (!(d->workspace = lt__alloc(d->ctx, total)))
            return LT_ENOMEM;
        d->workspace_bytes = total;
    }
    for (int i = 0; i < PARTS; i++)
        if (p->part[i])
            dnnl_memory_set_data_handle(p->part[i], (char *)d->workspace + offset[i]);
    *added = (char *)d->workspace + offset[ADDED];
    return LT_OK;
}

static lt_status run_primitive(struct lt_dnnl *d, plan *p, const lt_operand *operand, bool add)
{
    int result = role[p->key.kind].result;
    const lt_operand *to = &operand[result];
    void *added;
    LT_TRY(lay_out(d, p, add, &added));
    for (int i = 0; i < OPERANDS; i++)
        if (p->operand[i])
            dnnl_memory_set_data_handle(p->operand[i],
                                        add && i == result ? added : operand[i].data);
    dnnl_status_t status = dnnl_success;
    if (p->packer && result != W)
        status = dnnl_primitive_execute(p->packer, d->stream, p->n_packer_args, p->packer_arg);
    if (status == dnnl_success)
        status = dnnl_primitive_execute(p->primitive, d->stream, p->n_args, p->arg);
    if (status == dnnl_success && p->packer && result == W)
        status = dnnl_primitive_execute(p->packer, d->stream, p->n_packer_args, p->packer_arg);
    if (status == dnnl_success)
        status = dnnl_stream_wait(d->stream);
    if (status != dnnl_success)
        return failed(status);
    lt_device *cpu = d->ctx->devices[0];
    size_t count = p->bytes[ADDED] / lt_dtype_bytes(to->dtype);
    return add ? cpu->add(cpu, to->data, added, to->dtype, count) : LT_OK;
}

/* oneDNN is not used for empty tensors and sizes beyond int; the portable kernels handle both. */
static bool in_reach(const int64_t *sizes, size_t bytes)
{
    for (size_t i = 0; i < bytes / sizeof *sizes; i++)
        if (sizes[i] < 1 || sizes[i] > INT32_MAX)
            return false;
    return true;
}

/* Known bugs of oneDNN 3.2 in bf16. Gradients of w are wrong where images are narrower than the
 * stride. On CPUs with AMX, forward results are wrong for even kernel widths with stride 2 over 48,
 * 80, 112... channels. They are sometimes wrong, when one of oneDNN's threads is delayed, for
 * kernels of several rows with a larger stride. */
static bool is_wrong(const key *k)
{
    const lt_conv *v = &k->conv;
    const lt_window *w = &v->window;
    if (k->type[X] != dnnl_bf16)
        return false;
    if (k->kind == LT_CONV_WEIGHTS)
        return w->in[1] < w->stride[1];
    return k->kind == LT_CONV &&
           ((w->stride[1] == 2 && w->kernel[1] % 2 == 0 && v->in / v->groups % 32 == 16) ||
            (w->kernel[0] > 1 && w->kernel[0] < w->stride[0]));
}

/* The number of threads that a parallel region gets here. It is 1 inside another region, where
 * oneDNN starts no team. Otherwise it is at most lt_thread_limit(), which may have changed since
 * the context was created. */
static int threads_for(const lt_call *c)
{
    int limit = omp_in_parallel() ? 1 : lt_thread_limit();
    return c->threads < limit ? c->threads : limit;
}

/* Fills *k. Returns false for tasks that do not use oneDNN. */
static bool key_of(const lt_call *c, const lt_conv_task *task, const lt_operand *operand, key *k)
{
    memset(k, 0, sizeof *k);
    k->kind = task->kind;
    k->threads = threads_for(c);
    for (int i = 0; i < OPERANDS; i++)
        if (operand[i].data) {
            lt_dtype dtype = operand[i].dtype;
            if (dtype != LT_F32 && dtype != LT_BF16)
                return false;
            k->type[i] = dtype == LT_F32 ? dnnl_f32 : dnnl_bf16;
        }
    if (task->kind == LT_PRODUCT) {
        const lt_product *p = task->product;
        int64_t sizes[] = {p->batch, p->m, p->n, p->k};
        k->product = *p;
        return in_reach(sizes, sizeof sizes) && !(p->batch > 1 && task->bias.data);
    }
    const lt_conv *v = task->conv;
    const lt_window *w = &v->window;
    int64_t sizes[] = {v->n,      v->in,     v->out,       w->in[0],    w->in[1],
                       w->out[0], w->out[1], w->stride[0], w->stride[1]};
    k->conv = *v;
    return in_reach(sizes, sizeof sizes) && !is_wrong(k);
}

/* Finds or makes the plan and, if and_run is set, runs it. oneDNN splits a task by
 * omp_get_max_threads() and never checks how many threads it gets: with fewer, parts of the result
 * are missing, or it waits forever. So this sets the thread's OpenMP settings to the number of
 * threads that it will get, without dynamic adjustment, and restores the host program's settings
 * afterwards. */
static lt_status plan_and_run(const lt_call *c, const lt_conv_task *task, bool and_run)
{
    const lt_operand operand[OPERANDS] = {task->x, task->w, task->bias, task->y};
    struct lt_dnnl *d;
    key k;
    if (!key_of(c, task, operand, &k))
        return LT_EUNSUPPORTED;
    if (!(d = state_of(c->ctx)))
        return lt_errcode();
    int threads = omp_get_max_threads(), dynamic = omp_get_dynamic();
    if (threads != k.threads)
        omp_set_num_threads((int)k.threads);
    if (dynamic)
        omp_set_dynamic(0);
    plan *p = plan_for(d, &k);
    lt_status status = !p ? lt_errcode() : p->primitive ? LT_OK : LT_EUNSUPPORTED;
    if (status == LT_OK && and_run)
        status = run_primitive(d, p, operand, task->add);
    if (threads != k.threads)
        omp_set_num_threads(threads);
    if (dynamic)
        omp_set_dynamic(dynamic);
    return status;
}

lt_status lt__dnnl_ready(const lt_call *c, const lt_conv_task *task)
{
    return plan_and_run(c, task, false);
}
lt_status lt__dnnl_run(const lt_call *c, const lt_conv_task *task)
{
    return plan_and_run(c, task, true);
}
