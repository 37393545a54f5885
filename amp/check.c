/* check.c - runs a pass in half precision and in f32, and compares each tensor.
 *
 * The first pass keeps all results of ops: outputs, and gradients of inputs. The second pass
 * compares each new result with the next kept result that has the same op, place in the user's code
 * and dims, and then releases the kept one. Casts occur in only one of
 * the passes and are skipped: their rounding shows in the results computed from them.
 */
#include <math.h>
#include <string.h>

#include "amp/amp.h"
#include "core/tensor.h"

enum { WHERE_BYTES = 200 };

typedef struct made {        /* a tensor of the first pass */
    const lt_schema *schema; /* schema of its op */
    char where[WHERE_BYTES];
    bool backward, leaf, compared;
    int index;        /* index of the output, or of the input whose gradient it is */
    lt_tensor *x;     /* the tensor on the CPU; released once compared */
    lt_precision row; /* the result; valid once compared */
} made;

struct lt_precision_check {
    lt_ctx *ctx;
    made *list;
    int n, capacity, next; /* next: index of the next entry to compare */
    /* backward starts with the gradient times 2^k */
    int k;
    bool second;     /* the second pass */
    lt_dtype half;   /* half dtype in the first pass; LT_F32 if no op used one */
    lt_cast_fn cast; /* cast function to restore at the end of a pass */
    void *cast_ud;
    lt_status status; /* the first failure */
};

/* ==== Comparing =============================================================================== */

/* The smallest normal number of a half. */
static float smallest_normal(lt_dtype half) { return half == LT_F16 ? 0x1p-14f : 0x1p-126f; }

static lt_precision compare_all(const float *half, const float *wide, int64_t n, float smallest)
{
    lt_precision row = {0};
    double off = 0, all = 0;
    for (int64_t i = 0; i < n; i++) {
        double x = half[i], y = wide[i];
        if (y == 0 || !isfinite(y))
            continue;
        row.count++;
        if (!isfinite(x)) {
            row.overflows++;
            continue;
        }
        row.underflows += x == 0 && fabs(y) < smallest;
        off += (x - y) * (x - y);
        all += y * y;
    }
    row.norm = sqrt(all);
    row.error = all > 0 ? sqrt(off / all) : 0;
    return row;
}

static lt_status compare(const lt_precision_check *c, made *m, lt_tensor *x)
{
    lt_dtype half = lt__is_half((lt_dtype)m->x->dtype) ? (lt_dtype)m->x->dtype : c->half;
    lt_tensor *here = lt__on_host(x), *a = lt__tensor_copy(m->x, LT_F32);
    lt_tensor *b = here ? lt__tensor_copy(here, LT_F32) : NULL;
    lt_status status = a && b ? LT_OK : lt_errcode();
    if (status == LT_OK) {
        m->row = compare_all(a->data, b->data, a->count, smallest_normal(half));
        m->compared = true;
    }
    lt_release(a);
    lt_release(b);
    lt_release(here);
    lt_release(m->x);
    m->x = NULL;
    return status;
}

/* ==== The two passes ========================================================================== */

static lt_status keep(lt_precision_check *c, const made *m, lt_tensor *x)
{
    LT_TRY(lt__grow(c->ctx, &c->list, c->n, &c->capacity, sizeof *c->list));
    c->list[c->n] = *m;
    c->list[c->n].x = x->storage->device->is_host ? lt__tensor_view(x, x->ndim, x->dims, 0, true)
                                                  : lt__on_host(x);
    return c->list[c->n].x ? (c->n++, LT_OK) : lt_errcode();
}

static bool is_same(const made *a, const made *b, const lt_tensor *x)
{
    return a->schema == b->schema && a->backward == b->backward && a->index == b->index &&
           lt__same_dims(a->x, x) && strcmp(a->where, b->where) == 0;
}

/* Compares x with its counterpart in the first pass, if any. The entries that it skips have no
 * counterpart. */
static lt_status find_and_compare(lt_precision_check *c, const made *m, lt_tensor *x)
{
    for (int i = c->next; i < c->n; i++)
        if (is_same(&c->list[i], m, x)) {
            c->next = i + 1;
            return compare(c, &c->list[i], x);
        }
    return LT_OK;
}

static bool is_of_interest(const lt_tensor *x)
{
    return x && x->data && x->count > 0 && (x->dtype == LT_F32 || lt__is_half((lt_dtype)x->dtype));
}

static void note_half(lt_precision_check *c, lt_tensor *const *x, int n)
{
    for (int i = 0; i < n && c->half == LT_F32; i++)
        if (x[i] && lt__is_half((lt_dtype)x[i]->dtype))
            c->half = (lt_dtype)x[i]->dtype;
}

static void op_hook(void *ud, const lt_call *call, bool backward, const char *where)
{
    lt_precision_check *c = ud;
    if (call->op->in_place || (!backward && !lt_grad_enabled(call->ctx)) ||
        strcmp(call->schema->name, "cast") == 0)
        return;
    int n = backward ? call->n_in : lt_op_outputs(call->op);
    lt_tensor **x = backward ? call->d_in : call->out;
    made m = {.schema = call->schema, .backward = backward};
    strncpy(m.where, where, WHERE_BYTES - 1);
    if (!c->second) {
        note_half(c, call->in, call->n_in);
        note_half(c, x, n);
    }
    for (int i = 0; i < n && c->status == LT_OK; i++) {
        if (!is_of_interest(x[i]))
            continue;
        m.index = i;
        m.leaf = backward && call->leaves >> i & 1;
        c->status = c->second ? find_and_compare(c, &m, x[i]) : keep(c, &m, x[i]);
    }
}

static lt_status begin(void *ud, lt_ctx *ctx, lt_tensor *loss, lt_tensor *grad)
{
    (void)ctx, (void)loss;
    return grad ? lt_rescale(grad, ldexp(1, ((const lt_precision_check *)ud)->k), NULL) : LT_OK;
}

/* ==== The check =============================================================================== */

lt_precision_check *lt_precision_check_new(lt_ctx *ctx)
{
    LT_NEED_CTX(ctx, NULL);
    lt_precision_check *c = lt__alloc_zero(ctx, sizeof *c);
    if (c)
        c->ctx = lt__ctx_retain(ctx);
    return c;
}

static void clear(lt_precision_check *c)
{
    while (c->n > 0)
        lt_release(c->list[--c->n].x);
    c->next = 0;
    c->half = LT_F32;
}

void lt_precision_check_free(lt_precision_check *c)
{
    if (!c)
        return;
    lt_ctx *ctx = c->ctx;
    clear(c);
    lt__free(ctx, c->list, (size_t)c->capacity * sizeof *c->list);
    lt__free(ctx, c, sizeof *c);
    lt__ctx_release(ctx);
}

lt_status lt_precision_check_begin(lt_precision_check *c, int k, bool second)
{
    const lt_step_part scale = {.ud = c, .begin = begin};
    LT_TRY(lt_dry_run_begin(c->ctx, &scale, op_hook, c));
    if (!second)
        clear(c);
    c->k = k;
    c->second = second;
    c->status = LT_OK;
    c->cast = lt_get_cast(c->ctx, &c->cast_ud);
    if (second)
        lt_set_autocast(c->ctx, LT_F32);
    return LT_OK;
}

/* Drops the entries without a counterpart in the second pass. */
static void drop_the_rest(lt_precision_check *c)
{
    int n = 0;
    for (int i = 0; i < c->n; i++)
        if (c->list[i].compared)
            c->list[n++] = c->list[i];
        else
            lt_release(c->list[i].x);
    c->n = n;
}

lt_status lt_precision_check_end(lt_precision_check *c)
{
    lt_set_cast(c->ctx, c->cast, c->cast_ud);
    lt_dry_run_end(c->ctx);
    if (c->second)
        drop_the_rest(c);
    return c->status == LT_ENOMEM
               ? lt_fail(LT_ENOMEM,
                         "out of memory for a precision check, which keeps all results of a pass")
               : c->status;
}

lt_dtype lt_precision_check_half(const lt_precision_check *c) { return c->half; }

bool lt_precision_check_row(const lt_precision_check *c, int i, lt_precision *row)
{
    if (i < 0 || i >= c->n || !c->second)
        return false;
    const made *m = &c->list[i];
    const lt_schema *s = m->schema;
    *row = m->row;
    row->where = m->where;
    row->op = s->name;
    row->of = m->backward ? s->in[m->index < s->n_in ? m->index : s->n_in - 1].name : NULL;
    row->leaf = m->leaf;
    return true;
}
