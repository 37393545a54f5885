/* matmul.c - products of matrices, and the linear layer. */
#include "ops/loops.h"
#include "ops/product.h"

enum { X, Y, W = 1, B };

/* ==== matmul ================================================================================== */

/* How the leading axes of x and y pair up matrices: `times` products of p each. There is one unless
 * a leading axis is stretched on one side only; then each pair is a product of its own. */
typedef struct {
    lt_product p;
    int64_t times;
    int n_lead;
    int64_t lead[LT_MAX_DIMS];                      /* leading dims of out */
    int64_t x_step[LT_MAX_DIMS], y_step[LT_MAX_DIMS]; /* in elements; 0 where stretched */
} pairs;

/* Step of each axis of lead through t's matrices; returns how many matrices t has. */
static int64_t lead_steps(const pairs *s, const lt_tensor *t, int64_t *step)
{
    int64_t matrices = 1, size = t->dims[t->ndim - 2] * t->dims[t->ndim - 1];
    for (int i = s->n_lead - 1; i >= 0; i--) {
        int axis = i - s->n_lead + t->ndim - 2;
        int64_t dim = axis < 0 ? 1 : t->dims[axis];
        step[i] = dim == 1 ? 0 : matrices * size;
        matrices *= dim;
    }
    return matrices;
}

static lt_status pair_up(const lt_call *c, pairs *s)
{
    const lt_tensor *x = c->in[X], *y = c->in[Y];
    for (int i = 0; i < 2; i++)
        if (c->in[i]->ndim < 2)
            return lt_fail(LT_EINVAL,
                           "%s wants 2 or more axes (..., rows, columns), it has %d (%s); reshape "
                           "a vector to one row or one column", lt__in_name(c, i), c->in[i]->ndim,
                           LT_TEXT(c->in[i]));
    int64_t m = x->dims[x->ndim - 2], k = x->dims[x->ndim - 1], n = y->dims[y->ndim - 1];
    if (y->dims[y->ndim - 2] != k)
        return lt_fail(LT_EINVAL, "y wants %lld rows, one for each column of x, it has %lld (x %s, "
                       "y %s)", (lt_ll)k, (lt_ll)y->dims[y->ndim - 2], LT_TEXT(x), LT_TEXT(y));
    s->n_lead = (x->ndim > y->ndim ? x->ndim : y->ndim) - 2;
    int64_t total = 1;
    for (int i = 0; i < s->n_lead; i++) {
        int ax = i - s->n_lead + x->ndim - 2, ay = i - s->n_lead + y->ndim - 2;
        int64_t dx = ax < 0 ? 1 : x->dims[ax], dy = ay < 0 ? 1 : y->dims[ay];
        if (dx != dy && dx != 1 && dy != 1)
            return lt_fail(LT_EINVAL, "the leading axes of x and y do not broadcast: %lld and %lld "
                           "(x %s, y %s)", (lt_ll)dx, (lt_ll)dy, LT_TEXT(x), LT_TEXT(y));
        s->lead[i] = dx == 1 ? dy : dx;
        if (__builtin_mul_overflow(total, s->lead[i], &total))
            return lt_fail(LT_EINVAL, "x %s times y %s is too large", LT_TEXT(x), LT_TEXT(y));
    }
    int64_t of_x = lead_steps(s, x, s->x_step), of_y = lead_steps(s, y, s->y_step);
    s->times = total > 0;
    if (of_y == 1 && of_x == total)      /* x's matrices are the rows of one */
        s->p = lt__product_of(1, total * m, n, k, false, false);
    else if (of_x == total && of_y == total)
        s->p = lt__product_of(total, m, n, k, false, false);
    else {
        s->p = lt__product_of(1, m, n, k, false, false);
        s->times = m * n == 0 ? 0 : total;
    }
    return LT_OK;
}

/* Elements before the matrix that pair i takes from the side with these steps. */
static int64_t pair_offset(const pairs *s, const int64_t *step, int64_t i)
{
    int64_t offset = 0;
    for (int axis = s->n_lead - 1; axis >= 0; axis--) {
        offset += i % s->lead[axis] * step[axis];
        i /= s->lead[axis];
    }
    return offset;
}

static lt_status matmul_shape(lt_call *c)
{
    pairs s;
    LT_TRY(lt__same_float(c, 2));
    LT_TRY(pair_up(c, &s));
    int64_t dims[LT_MAX_DIMS];
    memcpy(dims, s.lead, sizeof dims);
    dims[s.n_lead] = c->in[X]->dims[c->in[X]->ndim - 2];
    dims[s.n_lead + 1] = c->in[Y]->dims[c->in[Y]->ndim - 1];
    lt__spec(c, 0, (lt_dtype)c->in[X]->dtype, s.n_lead + 2, dims);
    return LT_OK;
}

static lt_status matmul(lt_call *c, bool fast)
{
    pairs s;
    lt_dtype dtype = (lt_dtype)c->in[X]->dtype;
    LT_TRY(pair_up(c, &s));
    for (int64_t i = 0; i < s.times; i++)
        LT_TRY(lt__product(c, fast, dtype, &s.p,
                           lt__at(c->in[X]->data, dtype, pair_offset(&s, s.x_step, i)),
                           lt__at(c->in[Y]->data, dtype, pair_offset(&s, s.y_step, i)), NULL,
                           lt__at(c->out[0]->data, dtype, i * s.p.m * s.p.n), false));
    return LT_OK;
}

/* d_in[side] (+)= a b over all pairs: dx = dy y^T, dy = x^T dy. With several pairs a matrix may
 * collect from more than one of them: all add, after zeros. */
static lt_status matmul_gradient(lt_call *c, bool fast, const pairs *s, int side)
{
    lt_tensor *grad = c->d_in[side], *other = c->in[1 - side];
    lt_dtype dtype = (lt_dtype)grad->dtype;
    int64_t m = s->p.m, n = s->p.n, k = s->p.k;
    lt_product p = side == X ? lt__product_of(s->p.batch, m, k, n, false, true)
                             : lt__product_of(s->p.batch, k, n, m, true, false);
    bool add = lt__adds(c, side);
    if (s->times != 1 && !add) {
        memset(grad->data, 0, (size_t)grad->count * lt_dtype_bytes(dtype));
        add = true;
    }
    for (int64_t i = 0; i < s->times; i++) {
        int64_t at[2] = {pair_offset(s, s->x_step, i), pair_offset(s, s->y_step, i)};
        const void *dy = lt__at(c->d_out[0]->data, dtype, i * m * n);
        const void *factor = lt__at(other->data, dtype, at[1 - side]);
        LT_TRY(lt__product(c, fast, dtype, &p, side == X ? dy : factor, side == X ? factor : dy,
                           NULL, lt__at(grad->data, dtype, at[side]), add));
    }
    return LT_OK;
}

static lt_status matmul_back(lt_call *c, bool fast)
{
    pairs s;
    LT_TRY(pair_up(c, &s));
    for (int side = X; side <= Y; side++)
        if (c->d_in[side])
            LT_TRY(matmul_gradient(c, fast, &s, side));
    return LT_OK;
}

static lt_status matmul_fwd(lt_call *c) { return matmul(c, false); }
static lt_status matmul_bwd(lt_call *c) { return matmul_back(c, false); }
static lt_status matmul_fast_fwd(lt_call *c) { return matmul(c, true); }
static lt_status matmul_fast_bwd(lt_call *c) { return matmul_back(c, true); }

const lt_op lt__op_matmul = {
    .sig = "matmul(x, y)",
    .doc = "Matrix product of the last two axes, x (..., m, k) and y (..., k, n) to (..., m, n); "
           "leading axes broadcast.",
    .cast = LT_CAST_HALF,
    .save = LT_SAVE_IN(X) | LT_SAVE_IN(Y),
    .shape = matmul_shape,
    .fwd = matmul_fwd, .bwd = matmul_bwd,
    .fast_fwd = matmul_fast_fwd, .fast_bwd = matmul_fast_bwd,
};

/* ==== linear ================================================================================== */

static lt_status linear_shape(lt_call *c)
{
    const lt_tensor *x = c->in[X], *w = c->in[W];
    LT_TRY(lt__same_float(c, 3));
    LT_TRY(lt__want_ndim(c, W, 2, "(out, in)"));
    if (x->ndim < 1)
        return lt_fail(LT_EINVAL, "x wants 1 or more axes (..., in), it has none");
    if (x->dims[x->ndim - 1] != w->dims[1])
        return lt_fail(LT_EINVAL, "w wants %lld input features, x has %lld (x %s, w %s)",
                       (lt_ll)w->dims[1], (lt_ll)x->dims[x->ndim - 1], LT_TEXT(x), LT_TEXT(w));
    if (c->n_in > B && c->in[B])
        LT_TRY(lt__want_dims(c, B, 1, w->dims, "one value per output feature"));
    int64_t dims[LT_MAX_DIMS];
    memcpy(dims, x->dims, sizeof dims);
    dims[x->ndim - 1] = w->dims[0];
    lt__spec(c, 0, (lt_dtype)x->dtype, x->ndim, dims);
    return LT_OK;
}

/* y (m, n) = x (m, k) w^T + b. A pointwise conv2d is this too, with w (n, 1, 1, k). */
typedef struct { int64_t m, n, k; } sizes;

static sizes linear_sizes(const lt_tensor *w, const lt_tensor *y)
{
    sizes s = {.m = 1, .n = w->dims[0], .k = w->dims[w->ndim - 1]};
    for (int i = 0; i < y->ndim - 1; i++)
        s.m *= y->dims[i];
    return s;
}

static lt_status linear(lt_call *c, bool fast)
{
    sizes s = linear_sizes(c->in[W], c->out[0]);
    lt_product p = lt__product_of(1, s.m, s.n, s.k, false, true);
    const void *bias = c->n_in > B && c->in[B] ? c->in[B]->data : NULL;
    return lt__product(c, fast, (lt_dtype)c->out[0]->dtype, &p, c->in[X]->data, c->in[W]->data,
                       bias, c->out[0]->data, false);
}

/* dx = dy w;  dw = dy^T x;  db = the sum of dy's rows */
static lt_status linear_back(lt_call *c, bool fast)
{
    const lt_tensor *dy = c->d_out[0];
    sizes s = linear_sizes(c->in[W], dy);
    lt_dtype dtype = (lt_dtype)dy->dtype;
    lt_product px = lt__product_of(1, s.m, s.k, s.n, false, false);
    lt_product pw = lt__product_of(1, s.n, s.k, s.m, true, false);
    if (c->d_in[X])
        LT_TRY(lt__product(c, fast, dtype, &px, dy->data, c->in[W]->data, NULL, c->d_in[X]->data,
                           lt__adds(c, X)));
    if (c->d_in[W])
        LT_TRY(lt__product(c, fast, dtype, &pw, dy->data, c->in[X]->data, NULL, c->d_in[W]->data,
                           lt__adds(c, W)));
    if (c->n_in > B && c->d_in[B])
        lt__sum_rows(c, dtype, 1, s.m, s.n, 1, dy->data, c->d_in[B]->data, lt__adds(c, B));
    return LT_OK;
}

static lt_status linear_fwd(lt_call *c) { return linear(c, false); }
static lt_status linear_bwd(lt_call *c) { return linear_back(c, false); }
static lt_status linear_fast_fwd(lt_call *c) { return linear(c, true); }
static lt_status linear_fast_bwd(lt_call *c) { return linear_back(c, true); }

const lt_op lt__op_linear = {
    .sig = "linear(x, w, b?)",
    .doc = "y = x w^T + b for x (..., in), w (out, in), b (out).",
    .cast = LT_CAST_HALF,
    .save = LT_SAVE_IN(X) | LT_SAVE_IN(W),
    .shape = linear_shape,
    .fwd = linear_fwd, .bwd = linear_bwd,
    .fast_fwd = linear_fast_fwd, .fast_bwd = linear_fast_bwd,
};
