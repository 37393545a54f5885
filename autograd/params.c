/* params.c - parameters in flat arenas.
 *
 * A parameter starts as a shape and an initialiser. When a tree is placed, all of its parameters
 * get memory at once: one arena of values per dtype, in which each parameter starts at a 64-byte
 * boundary and padding is zero. Buffers have arenas of their own. The arena of gradients has the
 * same layout and is created with the first gradient, the arena of half copies by the first
 * lt_half(). Optimizers, the reducer and the scaler work on long flat ranges instead of lists of
 * tensors. Memory never moves afterwards.
 */
#include <string.h>

#include "autograd/tape.h"
#include "core/hash.h"

struct lt_params {
    lt_ctx *ctx;
    struct name {
        char *text;
        lt_tensor *x;
        int span;
    } * names;
    lt_span *spans;
    lt_segment **segments;
    int n_names, n_spans, n_segments;
    int max_names, max_spans, max_segments; /* room in the arrays */
};

lt_status lt_grad_find(lt_tensor *param, lt_grad_place *place)
{
    if (!lt_is_param(param))
        return lt_fail(LT_EINVAL, "a tensor that is not a parameter has no place in an arena");
    LT_TRY(lt__check_alive(param));
    LT_TRY(lt__leaf_need_grad(param->leaf));
    const lt_segment *s = param->leaf->segment;
    *place = (lt_grad_place){s->grads->data, s->dtype, param->leaf->offset, s->count};
    return LT_OK;
}

/* ==== Single parameters ======================================================================= */

static lt_tensor *pending_new(lt_ctx *ctx, lt_role role, lt_dtype dtype, int ndim,
                              const int64_t *dims, lt_init init)
{
    if (lt__dtype_check(dtype) != LT_OK)
        return NULL;
    if (!lt__is_float(dtype)) {
        lt_fail(LT_EINVAL, "a parameter must be a float tensor, but is %s", lt_dtype_name(dtype));
        return NULL;
    }
    lt_tensor *x = lt__tensor_pending(ctx, dtype, ndim, dims);
    if (!x)
        return NULL;
    lt_leaf *leaf = lt__leaf_of(x);
    if (!leaf) {
        lt_release(x);
        return NULL;
    }
    leaf->role = role;
    leaf->requires_grad = role == LT_PARAM;
    leaf->init = init;
    return x;
}

lt_tensor *lt_param_new(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims, lt_init init)
{
    LT_NEED_CTX(ctx, NULL);
    return pending_new(ctx, LT_PARAM, dtype, ndim, dims, init);
}

lt_tensor *lt_buffer_new(lt_ctx *ctx, lt_dtype dtype, int ndim, const int64_t *dims, lt_init init)
{
    LT_NEED_CTX(ctx, NULL);
    return pending_new(ctx, LT_BUFFER, dtype, ndim, dims, init);
}

lt_status lt_param_set_dtype(lt_tensor *x, lt_dtype dtype)
{
    if (!x->pending && (lt_dtype)x->dtype != dtype)
        return lt_fail(
            LT_EINVAL,
            "a parameter's dtype cannot change once it has memory (it is %s); set it before the "
            "first use",
            lt_dtype_name((lt_dtype)x->dtype));
    if (!lt__is_float(dtype))
        return lt_fail(LT_EINVAL, "a parameter must be a float tensor, but is %s",
                       lt_dtype_name(dtype));
    x->dtype = (uint8_t)dtype;
    return LT_OK;
}

bool lt_is_param(const lt_tensor *x) { return x && x->leaf && x->leaf->role == LT_PARAM; }
bool lt_is_buffer(const lt_tensor *x) { return x && x->leaf && x->leaf->role == LT_BUFFER; }

/* ==== Half copies ============================================================================= */

/* Brings s->half up to date. It gets the version of the values, so that the same writes invalidate
 * a graph that saved a parameter and a graph that saved its half copy. The updates of optimizers
 * invalidate both too: they are counted in the leaf, which both tensors share. */
static lt_status refresh_half(lt_segment *s, lt_dtype dtype)
{
    uint32_t written = atomic_load_explicit(&s->values->version, memory_order_relaxed);
    uint32_t stamp = written + s->updates;
    if (s->half && s->half_dtype == dtype && s->half_stamp == stamp)
        return LT_OK;
    if (!s->half || s->half_dtype != dtype) {
        lt_storage *half =
            lt__storage_new(s->ctx, s->values->device, (size_t)s->count * lt_dtype_bytes(dtype));
        if (!half)
            return LT_ENOMEM;
        lt__storage_release(s->half);
        s->half = half;
        s->half_dtype = dtype;
    }
    lt_device *device = s->values->device;
    LT_TRY(
        device->convert(device, s->half->data, dtype, s->values->data, s->dtype, (size_t)s->count));
    s->half_stamp = stamp;
    atomic_store_explicit(&s->half->version, written, memory_order_relaxed);
    return LT_OK;
}

static lt_tensor *set_half(lt_leaf *leaf, lt_tensor *half)
{
    half->leaf = leaf;
    atomic_fetch_add_explicit(&leaf->refs, 1, memory_order_relaxed);
    lt_release(leaf->half);
    leaf->half = half;
    return half;
}

/* The half copy of a parameter of another stage. */
static lt_tensor *remote_half(lt_tensor *x, lt_dtype dtype)
{
    lt_leaf *leaf = x->leaf;
    if (leaf->half && (lt_dtype)leaf->half->dtype == dtype)
        return leaf->half;
    lt_tensor *half = lt__tensor_remote(x, dtype, x->ndim, x->dims, true);
    return half ? set_half(leaf, half) : NULL;
}

lt_tensor *lt_half(lt_tensor *x, lt_dtype dtype)
{
    char text[96];
    lt_leaf *leaf = x->leaf;
    if (!lt_is_param(x) || x->dtype != LT_F32 || !lt__is_half(dtype)) {
        lt_fail(LT_EINVAL,
                "a half copy must be f16 or bf16 of an f32 parameter, but is %s of %s %s",
                lt_dtype_name(dtype), lt_is_param(x) ? "a parameter" : "a tensor",
                lt_describe(x, text, sizeof text));
        return NULL;
    }
    if (x->meta)
        return remote_half(x, dtype);
    if (lt__check_alive(x) != LT_OK || refresh_half(leaf->segment, dtype) != LT_OK)
        return NULL;
    if (leaf->half && leaf->half->storage == leaf->segment->half)
        return leaf->half;
    lt_tensor *half = lt__tensor_inherit(
        lt__tensor_over(leaf->segment->half, dtype, x->ndim, x->dims, leaf->offset, true), x);
    return half ? set_half(leaf, half) : NULL;
}

/* ==== Trees =================================================================================== */

lt_params *lt_params_new(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, NULL);
    lt_params *p = lt__autograd(ctx) ? lt__alloc_zero(ctx, sizeof *p) : NULL;
    if (p)
        p->ctx = lt__ctx_retain(ctx);
    return p;
}

void lt_params_free(lt_params *p)
{
    if (!p)
        return;
    lt_ctx *ctx = p->ctx;
    for (int i = 0; i < p->n_names; i++) {
        lt_release(p->names[i].x);
        lt__free(ctx, p->names[i].text, strlen(p->names[i].text) + 1);
    }
    for (int i = 0; i < p->n_segments; i++)
        lt__segment_release(p->segments[i]);
    lt__free(ctx, p->names, (size_t)p->max_names * sizeof *p->names);
    lt__free(ctx, p->spans, (size_t)p->max_spans * sizeof *p->spans);
    lt__free(ctx, p->segments, (size_t)p->max_segments * sizeof *p->segments);
    lt__free(ctx, p, sizeof *p);
    lt__ctx_release(ctx);
}

/* Makes room for an entry in each array. There are never more segments than spans. */
static lt_status reserve(lt_params *p)
{
    LT_TRY(lt__grow(p->ctx, &p->names, p->n_names, &p->max_names, sizeof *p->names));
    LT_TRY(lt__grow(p->ctx, &p->spans, p->n_spans, &p->max_spans, sizeof *p->spans));
    return lt__grow(p->ctx, &p->segments, p->n_spans, &p->max_segments, sizeof *p->segments);
}

static int segment_index(lt_params *p, lt_segment *s)
{
    for (int i = 0; i < p->n_segments; i++)
        if (p->segments[i] == s)
            return i;
    p->segments[p->n_segments] = lt__segment_retain(s);
    return p->n_segments++;
}

/* Fills in where a span is stored, once its tensor has memory. */
static void locate(lt_params *p, lt_span *span)
{
    lt_leaf *leaf = span->value->leaf;
    span->segment = leaf->segment ? segment_index(p, leaf->segment) : -1;
    span->offset = leaf->offset;
}

lt_status lt_params_add(lt_params *p, const char *name, lt_tensor *x)
{
    if (!lt_is_param(x) && !lt_is_buffer(x))
        return lt_fail(LT_EINVAL, "%s is neither a parameter nor a buffer", name);
    if (x->ctx != p->ctx)
        return lt_fail(LT_EINVAL, "%s belongs to another context", name);
    int span = p->n_spans;
    for (int i = 0; i < p->n_names; i++) {
        if (strcmp(p->names[i].text, name) == 0)
            return lt_fail(LT_EINVAL, "the name %s is given twice", name);
        if (p->names[i].x == x)
            span = p->names[i].span;
    }
    LT_TRY(reserve(p));
    char *text = lt__alloc(p->ctx, strlen(name) + 1);
    if (!text)
        return LT_ENOMEM;
    strcpy(text, name);
    p->names[p->n_names++] = (struct name){text, lt_retain(x), span};
    if (span < p->n_spans) {
        p->spans[span].aliases++;
        return LT_OK;
    }
    p->spans[p->n_spans] =
        (lt_span){.name = text, .value = x, .count = x->count, .buffer = lt_is_buffer(x)};
    locate(p, &p->spans[p->n_spans++]);
    return LT_OK;
}

/* ==== Placing ================================================================================= */

static bool belongs(const lt_span *s, int dtype, bool buffer)
{
    return s->value->pending && s->buffer == buffer && (int)s->value->dtype == dtype;
}

static int64_t padded(int64_t count, lt_dtype dtype)
{
    int64_t step = 64 / (int64_t)lt_dtype_bytes(dtype);
    return (count + step - 1) / step * step;
}

/* The random stream of a parameter's initial values, from its name and the number of its tree. */
static uint64_t init_stream(const char *name, uint64_t tree)
{
    return lt__fnv64(LT_FNV64_START + tree * 0x9e3779b97f4a7c15u, name, strlen(name));
}

static lt_status initialise(lt_tensor *x, const char *name, uint64_t tree)
{
    const lt_init *init = &x->leaf->init;
    uint64_t stream = init_stream(name, tree);
    switch (init->kind) {
    case LT_INIT_UNIFORM: return lt_fill_uniform(x, LT_RNG_INIT, stream, 0, init->a, init->b);
    case LT_INIT_NORMAL: return lt_fill_normal(x, LT_RNG_INIT, stream, 0, init->a, init->b);
    default: return lt_fill(x, init->a);
    }
}

/* *count = elements of the arena for the pending tensors of a dtype, including padding; *any:
 * whether there are any such tensors. LT_EINVAL if the count overflows. */
static lt_status measure_arena(const lt_params *p, lt_dtype dtype, bool buffer, int64_t *count,
                               bool *any)
{
    *count = 0;
    *any = false;
    for (int i = 0; i < p->n_spans; i++) {
        if (!belongs(&p->spans[i], (int)dtype, buffer))
            continue;
        *any = true;
        *count += padded(p->spans[i].count, dtype);
        if (*count > INT64_MAX / 16) /* the same limit as for one tensor */
            return lt_fail(LT_EINVAL, "the %s of dtype %s have too many elements",
                           buffer ? "buffers" : "parameters", lt_dtype_name(dtype));
    }
    return LT_OK;
}

lt_status lt_params_place(lt_params *p)
{
    enum { KINDS = 2 * LT_DTYPE_COUNT };
    lt_segment *fresh[KINDS] = {NULL};
    lt_status status = LT_OK;
    struct lt_autograd *ag = p->ctx->slots.autograd;
    bool any = false;
    for (int i = 0; i < p->n_spans && ag->has_stages; i++) {
        lt_tensor *x = p->spans[i].value;
        if (!x->pending)
            continue;
        LT_TRY(lt__stages_assign(ag, p->spans[i].name, x));
        any |= x->meta;
    }
    for (int kind = 0; kind < KINDS && status == LT_OK;
         kind++) { /* all memory first, so that a failure changes nothing */
        lt_dtype dtype = (lt_dtype)(kind / 2);
        int64_t count;
        bool needed;
        status = measure_arena(p, dtype, kind % 2, &count, &needed);
        any |= needed;
        if (status == LT_OK && needed && !(fresh[kind] = lt__segment_new(p->ctx, dtype, count)))
            status = lt_errcode();
    }
    uint64_t tree = any && status == LT_OK ? p->ctx->trees++ : 0;
    for (int kind = 0; kind < KINDS && status == LT_OK; kind++) {
        int64_t offset = 0;
        for (int i = 0; i < p->n_spans && status == LT_OK; i++) {
            lt_span *span = &p->spans[i];
            if (!fresh[kind] || !belongs(span, kind / 2, kind % 2))
                continue;
            lt_leaf *leaf = span->value->leaf;
            leaf->segment = lt__segment_retain(fresh[kind]);
            leaf->offset = offset;
            lt__tensor_place(span->value, fresh[kind]->values, offset);
            status = initialise(span->value, span->name, tree);
            offset += padded(span->count, (lt_dtype)(kind / 2));
        }
    }
    for (int kind = 0; kind < KINDS; kind++)
        lt__segment_release(fresh[kind]);
    for (int i = 0; i < p->n_spans && status == LT_OK; i++)
        locate(p, &p->spans[i]);
    return status;
}

/* ==== Reading a tree ========================================================================== */

int lt_params_count(const lt_params *p) { return p->n_spans; }

const lt_span *lt_params_span(const lt_params *p, int i)
{
    if (i < 0 || i >= p->n_spans)
        return NULL;
    p->spans[i].frozen = !p->spans[i].buffer && !p->spans[i].value->leaf->requires_grad;
    return &p->spans[i];
}

const lt_span *lt_params_find(const lt_params *p, const char *name)
{
    for (int i = 0; i < p->n_names; i++)
        if (strcmp(p->names[i].text, name) == 0)
            return lt_params_span(p, p->names[i].span);
    return NULL;
}

bool lt_params_name(const lt_params *p, int i, const char **name, lt_tensor **x)
{
    if (i < 0 || i >= p->n_names)
        return false;
    *name = p->names[i].text;
    *x = p->names[i].x;
    return true;
}

lt_status lt_params_freeze(lt_params *p, int i, bool frozen)
{
    if (i < 0 || i >= p->n_spans || p->spans[i].buffer)
        return lt_fail(LT_EINVAL, "span %d is not a parameter that can be frozen", i);
    p->spans[i].value->leaf->requires_grad = !frozen;
    return LT_OK;
}

lt_status lt_params_sha256(lt_params *p, char hex[65])
{
    lt_sha256 s;
    lt_sha256_begin(&s);
    for (int buffers = 0; buffers < 2; buffers++)
        for (int i = 0; i < p->n_spans; i++)
            if (p->spans[i].buffer == buffers)
                LT_TRY(lt__sha256_add_tensor(&s, p->spans[i].value));
    lt_sha256_end(&s, hex);
    return LT_OK;
}
