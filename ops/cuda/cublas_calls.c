/* cublas_calls.c - turns calls of linear and matmul into products for cuBLASLt.
 *
 * A gradient that is the sum of several products is accumulated in f32 and rounded once. Scratch
 * then begins with that sum, followed by the workspace of the products.
 */
#include <string.h>

#include "ops/cuda/cublas.h"
#include "ops/matmul.h"

enum { X, Y, W = 1, B };
enum { A = LT_CUBLAS_A, OF_B, OUT, SIDE, OPERANDS };

/* ==== Products ================================================================================ */

/* A dense product, as lt__product_of() in product.h. */
static lt_cublas_product product_of(int64_t batch, int64_t m, int64_t n, int64_t k, bool trans_a,
                                    bool trans_b)
{
    return (lt_cublas_product){.batch = batch,
                               .m = m,
                               .n = n,
                               .k = k,
                               .trans_a = trans_a,
                               .trans_b = trans_b,
                               .a_step = m * k,
                               .b_step = k * n,
                               .out_step = m * n};
}

/* The alignment in bytes, at most 16, of an address and of all addresses `step` bytes apart from
 * it. */
static int64_t alignment(const void *at, int64_t step)
{
    uintptr_t bits = (uintptr_t)at | (uintptr_t)step | 16;
    return (int64_t)(bits & (~bits + 1));
}

/* One product of a call, with its operands. */
typedef struct part {
    lt_cublas_product p;
    void *operand[OPERANDS];
} part;

/* Sets operand i to data + offset. `each` is the distance between the matrices of a batch. Both are
 * in elements. */
static void put(part *t, int i, void *data, int64_t dtype, int64_t offset, int64_t each)
{
    const int64_t bytes = (int64_t)lt__cuda_dtype_bytes((lt_dtype)dtype);
    t->operand[i] = (char *)data + offset * bytes;
    t->p.align[i] = alignment(t->operand[i], each * bytes);
    if (i == OUT)
        t->p.out_dtype = dtype;
    else
        t->p.dtype = dtype;
}

static void put_all(part *t, int i, const lt_tensor *x) { put(t, i, x->data, x->dtype, 0, 0); }

/* Whether x can be a side vector of a product with this result. Plans carry the alignment of the
 * operands but not of the side vector, which cuBLASLt assumes to be aligned to 16 bytes. A view may
 * not be. */
static bool fits_beside(const lt_tensor *x, const lt_tensor *out)
{
    return x->dtype == out->dtype && alignment(x->data, 0) == 16;
}

/* ==== linear ================================================================================== */

/* Describes y. Fails with LT_EUNSUPPORTED if dtypes differ or the bias cannot be a side vector. */
static lt_status linear_part(const lt_call *c, part *t)
{
    const lt_tensor *bias = lt__optional(c, c->in, B);
    lt_linear_sizes s = lt__linear_sizes(c->in[W], c->out[0]);
    *t = (part){.p = product_of(1, s.m, s.n, s.k, false, true)};
    put_all(t, A, c->in[X]);
    put_all(t, OF_B, c->in[W]);
    put_all(t, OUT, c->out[0]);
    if (bias) {
        t->p.side = LT_CUBLAS_BIAS;
        t->operand[SIDE] = bias->data;
    }
    return c->in[X]->dtype == c->in[W]->dtype && (!bias || fits_beside(bias, c->out[0]))
               ? LT_OK
               : LT_EUNSUPPORTED;
}

/* Describes dx = dy w, or dw = dy^T x. The product for dw also computes db, the sums of dy^T's
 * rows, if db and dw are to be written (not added to) and have the dtype of dy. With f32 gradients
 * of f16 tensors, db is summed separately: few programs use this epilogue with such results. */
static lt_status linear_grad_part(lt_cublas *d, const lt_call *c, int i, part *t, size_t *bytes)
{
    const lt_tensor *w = c->in[W] ? c->in[W] : c->d_in[W], *dy = c->d_out[0];
    const lt_tensor *with = c->in[i == X ? W : X];
    lt_tensor *db = i == W ? lt__optional(c, c->d_in, B) : NULL;
    lt_linear_sizes s = lt__linear_sizes(w, dy);
    *t = (part){.p = i == X ? product_of(1, s.m, s.k, s.n, false, false)
                            : product_of(1, s.n, s.k, s.m, true, false)};
    put_all(t, A, dy);
    put_all(t, OF_B, with);
    put_all(t, OUT, c->d_in[i]);
    t->p.add = c->add >> i & 1;
    if (dy->dtype != with->dtype)
        return LT_EUNSUPPORTED;
    if (db && dy->dtype == db->dtype && fits_beside(db, c->d_in[W]) &&
        !(c->add & (1 << B | 1 << W))) {
        t->p.side = LT_CUBLAS_ROW_SUMS;
        t->operand[SIDE] = db->data;
        lt_status status = lt__cublas_plan(d, c->ctx, &t->p, bytes);
        if (status != LT_EUNSUPPORTED)
            return status;
        t->p.side = LT_CUBLAS_NO_EPILOGUE;
    }
    return lt__cublas_plan(d, c->ctx, &t->p, bytes);
}

size_t lt__cublas_linear_scratch(lt_cublas *d, const lt_call *c, bool backward)
{
    size_t max = 0, bytes = 0;
    part t;
    if (!backward) {
        lt_status status = linear_part(c, &t);
        if (status == LT_OK)
            status = lt__cublas_plan(d, c->ctx, &t.p, &bytes);
        return lt__cuda_scratch(0, status, bytes);
    }
    for (int i = X; i <= W; i++)
        if (c->d_in[i]) {
            lt_status status = linear_grad_part(d, c, i, &t, &bytes);
            max = lt__cuda_scratch(max, status, bytes);
        }
    return max;
}

lt_status lt__cublas_linear_fwd(lt_cublas *d, lt_call *c)
{
    part t;
    LT_TRY(linear_part(c, &t));
    return lt__cublas_run(d, c->ctx, &t.p, t.operand, c->scratch, c->scratch_bytes);
}

lt_status lt__cublas_linear_grad(lt_cublas *d, lt_call *c, int i, bool *summed)
{
    size_t bytes;
    part t;
    LT_TRY(linear_grad_part(d, c, i, &t, &bytes));
    LT_TRY(lt__cublas_run(d, c->ctx, &t.p, t.operand, c->scratch, c->scratch_bytes));
    *summed = t.p.side == LT_CUBLAS_ROW_SUMS;
    return LT_OK;
}

/* ==== matmul ================================================================================== */

/* The products of all pairs: the forward pass, or the gradient of x or of y. */
typedef struct products {
    lt_pairs s;
    lt_cublas_product p; /* the product of one pair */
    const lt_tensor *t[OUT + 1];
    /* X, Y or OUT: the op's tensor that each is, or is the gradient of */
    int of[OUT + 1];
    bool at_once;  /* run as one batch, otherwise one by one */
    bool collects; /* several products add to the same matrix */
    size_t sums;   /* bytes of scratch for the f32 sums */
} products;

/* The products can run as one batch if each tensor has one matrix per pair, or, for inputs, a
 * single matrix. */
static void plan_pairs(products *v)
{
    v->at_once = true;
    for (int i = A; i <= OUT; i++) {
        int64_t matrices = v->of[i] == OUT ? v->s.total : v->s.of[v->of[i]];
        if (matrices != v->s.total && (i == OUT || matrices != 1))
            v->at_once = false;
    }
    v->collects = !v->at_once && v->of[OUT] != OUT;
    if (v->collects && v->t[OUT]->dtype != LT_F32)
        v->sums = lt__cuda_padded((size_t)v->t[OUT]->count * sizeof(float));
}

/* Describes y, or the gradient of input i. */
static products products_of(const lt_call *c, bool backward, int i)
{
    const lt_tensor *x = c->in[X] ? c->in[X] : c->d_in[X], *y = c->in[Y] ? c->in[Y] : c->d_in[Y];
    const lt_pairs s = lt__pair_up(x, y);
    products v = {.s = s, .of = {X, Y, OUT}, .p = product_of(1, s.m, s.n, s.k, false, false)};
    v.t[A] = x;
    v.t[OF_B] = y;
    v.t[OUT] = backward ? c->d_in[i] : c->out[0];
    if (backward && i == X) { /* dx = dy y^T */
        v.p = product_of(1, s.m, s.k, s.n, false, true);
        v.of[A] = OUT;
        v.of[OUT] = X;
        v.t[A] = c->d_out[0];
    } else if (backward) { /* dy = x^T dy */
        v.p = product_of(1, s.k, s.n, s.m, true, false);
        v.of[OF_B] = OUT;
        v.of[OUT] = Y;
        v.t[OF_B] = c->d_out[0];
    }
    plan_pairs(&v);
    return v;
}

/* Describes the product of pair i, or of all pairs. sums is the f32 accumulator, or NULL. add: add
 * to the existing result. */
static part part_of(const products *v, int64_t i, void *sums, bool add)
{
    const lt_pairs *s = &v->s;
    part t = {.p = v->p};
    int64_t *const step[] = {&t.p.a_step, &t.p.b_step, &t.p.out_step};
    t.p.batch = v->at_once ? s->total : 1;
    for (int k = A; k <= OUT; k++) {
        const int of = v->of[k];
        const int64_t each = s->total > 1 ? *step[k] : 0;
        const int64_t offset = of == OUT ? i * s->m * s->n : lt__pair_offset(s, of, i);
        if (of != OUT && s->of[of] != s->total)
            *step[k] = 0;
        put(&t, k, k == OUT && sums ? sums : v->t[k]->data,
            k == OUT && sums ? LT_F32 : v->t[k]->dtype, offset, each);
    }
    t.p.add = v->collects || add;
    return t;
}

/* Sets *bytes to the scratch needed, or fails with LT_EUNSUPPORTED. All products of a call have the
 * same shape, so planning one is enough. */
static lt_status needs(lt_cublas *d, const lt_call *c, const products *v, bool add, size_t *bytes)
{
    char any[16] __attribute__((aligned(16)));
    part t = part_of(v, 0, v->sums > 0 ? any : NULL, add);
    *bytes = 0;
    if (v->t[A]->dtype != v->t[OF_B]->dtype)
        return LT_EUNSUPPORTED;
    if (v->s.total > 0)
        LT_TRY(lt__cublas_plan(d, c->ctx, &t.p, bytes));
    *bytes += v->sums;
    return LT_OK;
}

/* Plans and runs the products. If cuBLASLt refuses one after others have been added to the result,
 * our own kernel would add them twice, so that is an error. */
static lt_status run_products(lt_cublas *d, lt_call *c, const products *v, bool add)
{
    lt_device *device = lt__cublas_env(d)->device;
    const lt_tensor *to = v->t[OUT];
    const lt_dtype dtype = (lt_dtype)to->dtype;
    const size_t count = (size_t)to->count;
    char *sums = v->sums > 0 ? c->scratch : NULL, *workspace = (char *)c->scratch + v->sums;
    size_t bytes;
    LT_TRY(needs(d, c, v, add, &bytes));
    if (bytes > c->scratch_bytes)
        return LT_EUNSUPPORTED;
    if (sums && add)
        LT_TRY(device->convert(device, sums, LT_F32, to->data, dtype, count));
    else if (v->collects && !add)
        LT_TRY(device->fill(device, sums ? sums : to->data, LT_F32, count, 0));
    for (int64_t i = 0; i < (v->at_once ? 1 : v->s.total); i++) {
        part t = part_of(v, i, sums, add);
        lt_status status =
            lt__cublas_run(d, c->ctx, &t.p, t.operand, workspace, c->scratch_bytes - v->sums);
        if (status == LT_EUNSUPPORTED && add && !sums && i > 0)
            return lt__cublas_env(d)->host->fail(
                LT_EENV, "cuBLASLt refuses product %lld of %lld after others were added",
                (long long)i + 1, (long long)v->s.total);
        LT_TRY(status);
    }
    return sums ? device->convert(device, to->data, dtype, sums, LT_F32, count) : LT_OK;
}

size_t lt__cublas_matmul_scratch(lt_cublas *d, const lt_call *c, bool backward)
{
    size_t max = 0, bytes;
    for (int i = X; i <= (backward ? Y : X); i++) {
        if (backward && !c->d_in[i])
            continue;
        products v = products_of(c, backward, i);
        lt_status status = needs(d, c, &v, backward && (c->add >> i & 1), &bytes);
        max = lt__cuda_scratch(max, status, bytes);
    }
    return max;
}

lt_status lt__cublas_matmul_fwd(lt_cublas *d, lt_call *c)
{
    products v = products_of(c, false, 0);
    return run_products(d, c, &v, false);
}

lt_status lt__cublas_matmul_grad(lt_cublas *d, lt_call *c, int i)
{
    products v = products_of(c, true, i);
    return run_products(d, c, &v, c->add >> i & 1);
}
