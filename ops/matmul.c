/* matmul.c - matrix products, and the linear layer. */
#include "ops/cpu/loops.h"
#include "ops/cpu/product.h"
#include "ops/matmul.h"

enum { X, Y, W = 1, B };

static const lt_operand nothing = {.data = NULL};

/* ==== matmul ================================================================================== */

static lt_status matmul_shape(lt_call *c)
{
    const lt_tensor *x = c->in[X], *y = c->in[Y];
    LT_TRY(lt__same_float(c, 2));
    for (int i = 0; i < 2; i++)
        if (c->in[i]->ndim < 2)
            return lt_fail(LT_EINVAL,
                           "%s must have 2 or more axes (..., rows, columns), but has %d (%s); "
                           "reshape a vector to one row or one column",
                           lt__in_name(c, i), c->in[i]->ndim, LT_TEXT(c->in[i]));
    int64_t m = x->dims[x->ndim - 2], k = x->dims[x->ndim - 1], n = y->dims[y->ndim - 1];
    if (y->dims[y->ndim - 2] != k)
        return lt_fail(LT_EINVAL,
                       "y must have %lld rows, one for each column of x, but has %lld (x %s, y %s)",
                       (lt_ll)k, (lt_ll)y->dims[y->ndim - 2], LT_TEXT(x), LT_TEXT(y));
    int n_lead = (x->ndim > y->ndim ? x->ndim : y->ndim) - 2;
    int64_t dims[LT_MAX_DIMS], total = 1, each;
    if (__builtin_mul_overflow(m, n, &each)) /* possible if x and y are empty */
        return lt_fail(LT_EINVAL, "x %s times y %s is too large", LT_TEXT(x), LT_TEXT(y));
    for (int i = 0; i < n_lead; i++) {
        int ax = i - n_lead + x->ndim - 2, ay = i - n_lead + y->ndim - 2;
        int64_t dx = ax < 0 ? 1 : x->dims[ax], dy = ay < 0 ? 1 : y->dims[ay];
        if (dx != dy && dx != 1 && dy != 1)
            return lt_fail(LT_EINVAL,
                           "the leading axes of x and y do not broadcast: %lld and %lld "
                           "(x %s, y %s)",
                           (lt_ll)dx, (lt_ll)dy, LT_TEXT(x), LT_TEXT(y));
        dims[i] = dx == 1 ? dy : dx;
        if (__builtin_mul_overflow(total, dims[i], &total))
            return lt_fail(LT_EINVAL, "x %s times y %s is too large", LT_TEXT(x), LT_TEXT(y));
    }
    dims[n_lead] = m;
    dims[n_lead + 1] = n;
    lt__spec(c, 0, (lt_dtype)x->dtype, n_lead + 2, dims);
    return LT_OK;
}

/* All pairs of a call: `times` products, each as described by p. One batched product suffices
 * unless a leading axis is stretched on one side only. In that case every pair of matrices is a
 * product of its own. */
typedef struct {
    lt_pairs s;
    lt_product p;
    int64_t times;
} products;

static products products_of(const lt_call *c)
{
    lt_pairs s = lt__pair_up(c->in[X], c->in[Y]);
    bool at_once = s.of[X] == s.total && s.of[Y] == s.total;
    int64_t batch = at_once ? s.total : 1, times = at_once ? s.total > 0 : s.total;
    return (products){.s = s,
                      .p = lt__product_of(batch, s.m, s.n, s.k, false, false),
                      .times = s.m * s.n == 0 && !at_once ? 0 : times};
}

static lt_status matmul(lt_call *c, bool fast)
{
    products v = products_of(c);
    for (int64_t i = 0; i < v.times; i++)
        LT_TRY(lt__product(c, fast, &v.p, lt__operand(c->in[X], lt__pair_offset(&v.s, X, i)),
                           lt__operand(c->in[Y], lt__pair_offset(&v.s, Y, i)), nothing,
                           lt__operand(c->out[0], i * v.p.m * v.p.n), false));
    return LT_OK;
}

/* The gradient of a side is a product too. With dz the gradient of the output, dx = dz y^T and
 * dy = x^T dz. */
static lt_product gradient_product(const lt_product *p, int side)
{
    return side == X ? lt__product_of(p->batch, p->m, p->k, p->n, false, true)
                     : lt__product_of(p->batch, p->k, p->n, p->m, true, false);
}

/* d_in[side] (+)= the gradient, summed over all pairs. With several pairs, more than one may
 * contribute to a matrix. In that case the gradient is cleared first and all pairs add to it. */
static lt_status matmul_gradient(lt_call *c, bool fast, const products *v, int side)
{
    lt_tensor *grad = c->d_in[side];
    lt_product p = gradient_product(&v->p, side);
    bool add = lt__adds(c, side);
    if (v->times != 1 && !add) {
        memset(grad->data, 0, (size_t)grad->count * lt_dtype_bytes((lt_dtype)grad->dtype));
        add = true;
    }
    for (int64_t i = 0; i < v->times; i++) {
        int64_t at[2] = {lt__pair_offset(&v->s, X, i), lt__pair_offset(&v->s, Y, i)};
        lt_operand dy = lt__operand(c->d_out[0], i * v->p.m * v->p.n);
        lt_operand factor = lt__operand(c->in[1 - side], at[1 - side]);
        LT_TRY(lt__product(c, fast, &p, side == X ? dy : factor, side == X ? factor : dy, nothing,
                           lt__operand(grad, at[side]), add));
    }
    return LT_OK;
}

/* LT_EUNSUPPORTED if the fast kernels cannot compute d_in[side]. Called for both sides before
 * anything is written. Several pairs are refused in bf16, because the sum would be rounded once for
 * each pair. */
static lt_status matmul_ready(const lt_call *c, const products *v, int side)
{
    lt_product p = gradient_product(&v->p, side);
    lt_operand dy = lt__operand(c->d_out[0], 0), factor = lt__operand(c->in[1 - side], 0);
    if (v->times != 1 && c->d_in[side]->dtype == LT_BF16)
        return LT_EUNSUPPORTED;
    return lt__product_ready(c, &p, side == X ? dy : factor, side == X ? factor : dy, nothing,
                             lt__operand(c->d_in[side], 0));
}

static lt_status matmul_back(lt_call *c, bool fast)
{
    products v = products_of(c);
    for (int side = X; side <= Y && fast; side++)
        if (c->d_in[side])
            LT_TRY(matmul_ready(c, &v, side));
    for (int side = X; side <= Y; side++)
        if (c->d_in[side])
            LT_TRY(matmul_gradient(c, fast, &v, side));
    return LT_OK;
}

static lt_status matmul_fwd(lt_call *c) { return matmul(c, false); }
static lt_status matmul_bwd(lt_call *c) { return matmul_back(c, false); }
static lt_status matmul_fast_fwd(lt_call *c) { return matmul(c, true); }
static lt_status matmul_fast_bwd(lt_call *c) { return matmul_back(c, true); }

const lt_op lt__op_matmul = {
    .sig = "matmul(x, y)",
    .doc = "Matrix product of x (..., m, k) and y (..., k, n), of shape (..., m, n); the leading "
           "axes broadcast.",
    .cast = LT_CAST_HALF,
    .save = LT_SAVE_IN(X) | LT_SAVE_IN(Y),
    .shape = matmul_shape,
    .fwd = matmul_fwd,
    .bwd = matmul_bwd,
    .fast_bf16 = true,
    .fast_fwd = matmul_fast_fwd,
    .fast_bwd = matmul_fast_bwd,
};

/* ==== linear ================================================================================== */

static lt_status linear_shape(lt_call *c)
{
    const lt_tensor *x = c->in[X], *w = c->in[W];
    LT_TRY(lt__same_float(c, 3));
    LT_TRY(lt__require_ndim(c, W, 2, "(out, in)"));
    if (x->ndim < 1)
        return lt_fail(LT_EINVAL, "x must have 1 or more axes (..., in), but has none");
    if (x->dims[x->ndim - 1] != w->dims[1])
        return lt_fail(LT_EINVAL, "w has %lld input features, but x has %lld (x %s, w %s)",
                       (lt_ll)w->dims[1], (lt_ll)x->dims[x->ndim - 1], LT_TEXT(x), LT_TEXT(w));
    if (lt__optional(c, c->in, B))
        LT_TRY(lt__require_dims(c, B, 1, w->dims, "one value per output feature"));
    int64_t dims[LT_MAX_DIMS];
    memcpy(dims, x->dims, sizeof dims);
    dims[x->ndim - 1] = w->dims[0];
    lt__spec(c, 0, (lt_dtype)x->dtype, x->ndim, dims);
    return LT_OK;
}

static lt_operand bias_of(const lt_call *c, lt_tensor *const *of)
{
    return lt__operand(lt__optional(c, of, B), 0);
}

static lt_status linear(lt_call *c, bool fast)
{
    lt_linear_sizes s = lt__linear_sizes(c->in[W], c->out[0]);
    lt_product p = lt__product_of(1, s.m, s.n, s.k, false, true);
    return lt__product(c, fast, &p, lt__operand(c->in[X], 0), lt__operand(c->in[W], 0),
                       bias_of(c, c->in), lt__operand(c->out[0], 0), false);
}

/* The product that computes the gradient of input i. */
static lt_product linear_product(const lt_linear_sizes *s, int i)
{
    return i == X ? lt__product_of(1, s->m, s->k, s->n, false, false)
                  : lt__product_of(1, s->n, s->k, s->m, true, false);
}

lt_status lt__linear_ready(const lt_call *c, int i)
{
    lt_linear_sizes s = lt__linear_sizes(c->in[W], c->d_out[0]);
    lt_product p = linear_product(&s, i);
    return lt__product_ready(c, &p, lt__operand(c->d_out[0], 0), lt__operand(c->in[X + W - i], 0),
                             nothing, lt__operand(c->d_in[i], 0));
}

/* dx = dy w;  dw = dy^T x;  db = the sum of the rows of dy */
static lt_status linear_back(lt_call *c, bool fast)
{
    lt_linear_sizes s = lt__linear_sizes(c->in[W], c->d_out[0]);
    lt_product px = linear_product(&s, X), pw = linear_product(&s, W);
    lt_operand dy = lt__operand(c->d_out[0], 0), dx = lt__operand(c->d_in[X], 0);
    lt_operand x = lt__operand(c->in[X], 0), w = lt__operand(c->in[W], 0);
    lt_operand dw = lt__operand(c->d_in[W], 0), db = bias_of(c, c->d_in);
    for (int i = X; i <= W && fast; i++)
        if (c->d_in[i])
            LT_TRY(lt__linear_ready(c, i));
    if (dx.data)
        LT_TRY(lt__product(c, fast, &px, dy, w, nothing, dx, lt__adds(c, X)));
    if (dw.data)
        LT_TRY(lt__product(c, fast, &pw, dy, x, nothing, dw, lt__adds(c, W)));
    if (db.data)
        lt__sum_rows(c, s.m, s.n, dy, db, lt__adds(c, B));
    return LT_OK;
}

/* A bf16 call is repeated in f32 if the fast kernels cannot compute one of its gradients. So two
 * calls give the same bits only if the fast kernels can compute both gradients, or neither. */
static bool linear_can_split(const lt_call *c)
{
    if (c->d_out[0]->dtype != LT_BF16 || c->ctx->config.reference)
        return true;
    bool w = !c->d_in[W] || lt__linear_ready(c, W) == LT_OK;
    return !c->d_in[X] || (lt__linear_ready(c, X) == LT_OK) == w;
}

static lt_status linear_fwd(lt_call *c) { return linear(c, false); }
static lt_status linear_bwd(lt_call *c) { return linear_back(c, false); }
static lt_status linear_fast_fwd(lt_call *c) { return linear(c, true); }
static lt_status linear_fast_bwd(lt_call *c) { return linear_back(c, true); }

const lt_op lt__op_linear = {
    .sig = "linear(x, w, b?)",
    .doc = "y = x w^T + b for x (..., in), w (out, in) and b (out); y has shape (..., out).",
    .cast = LT_CAST_HALF,
    .save = LT_SAVE_IN(X) | LT_SAVE_IN(W),
    .weights = 1 << W | 1 << B,
    .can_split = linear_can_split,
    .shape = linear_shape,
    .fwd = linear_fwd,
    .bwd = linear_bwd,
    .fast_bf16 = true,
    .fast_fwd = linear_fast_fwd,
    .fast_bwd = linear_fast_bwd,
};
