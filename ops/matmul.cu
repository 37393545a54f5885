/* matmul.cu - the CUDA side of matmul.c and product.c: matmul, linear, and sums of rows. Products
 * use cuBLASLt, or our own kernels if cuBLASLt is missing or does not support them. */
#include "ops/cuda/reduction.h"
#include "ops/cuda/tile.h"

enum { X, Y, W = 1, B };

/* Runs the body with E as the type of the factors and O as the type of the result, which is E or
 * float. */
#define FACTORS_AND_RESULT(cuda, dtype, to, E, O, ...)                                             \
    LT_CUDA_FLOATS(cuda, dtype, E, if ((to) == LT_F32) { typedef float O; __VA_ARGS__ }            \
                                   else { typedef E O; __VA_ARGS__ })

template <class O>
static lt_results<O> results_of(void *out, int dtype, int64_t batch, int64_t row, bool add)
{
    return lt_results<O>{(O *)out, batch, row, dtype, add, NULL, NULL};
}

/* ==== Sums of rows ============================================================================ */

/* most partial sums that lt__plan_reduction() makes of the columns of a matrix */
enum { MAX_SUMS = 1 << 15 };

size_t lt__cuda_sum_rows_bytes(void) { return MAX_SUMS * sizeof(double); }

lt_status lt__cuda_sum_rows(const lt_cuda *cuda, void *to, int to_dtype, const void *from,
                            int from_dtype, int64_t rows, int64_t cols, bool add)
{
    int64_t dims[] = {rows, cols};
    lt_reduction_end end = {to, to_dtype, false, add, 1};
    lt_reduction_plan plan;
    lt__plan_reduction(&plan, 2, dims, 1 << 0,
                       (size_t)(lt__cuda_at(NULL, from_dtype, 1) - (char *)0));
    if (lt__reduction_scratch(&plan, sizeof(double)) > lt__cuda_sum_rows_bytes())
        return cuda->host->fail(LT_EINVAL, "%s: %lld rows of %lld columns are too many to sum",
                                cuda->name, (lt_ll)rows, (lt_ll)cols);
    LT_CUDA_FLOATS(cuda, from_dtype, E,
                   return lt__reduce<lt_sum_reduction<E>>(cuda, &plan, from, end, cuda->sums);)
}

/* ==== linear ================================================================================== */

/* y (m, n) = x (m, k) w^T + b. w may also be the weights of a pointwise conv2d. */
typedef struct sizes {
    int64_t m, n, k;
} sizes;

static sizes sizes_of(const lt_tensor *w, const lt_tensor *y)
{
    sizes s = {1, w->dims[0], w->dims[w->ndim - 1]};
    for (int i = 0; i < y->ndim - 1; i++)
        s.m *= y->dims[i];
    return s;
}

static lt_tensor *bias_of(const lt_call *c, lt_tensor **of) { return c->n_in > B ? of[B] : NULL; }

static lt_status own_linear_fwd(lt_call *c)
{
    lt_tensor *x = c->in[X], *w = c->in[W], *b = bias_of(c, c->in), *y = c->out[0];
    lt_cuda *cuda = lt__cuda(c->ctx);
    sizes s = sizes_of(w, y);
    lt_tiles t = lt__tiles_of(1, s.m, s.n, s.k, false);
    LT_CUDA_FLOATS(cuda, x->dtype, E,
                   lt_results<E> r = results_of<E>(y->data, y->dtype, 0, s.n, false);
                   r.bias = (const E *)(b ? b->data : NULL);
                   return lt__tile_product(cuda, &t, lt__matrices_of<E>(x->data, s.k, 1, 1, 0),
                                           lt__matrices_of<E>(w->data, s.k, 1, 1, 0), r, NULL);)
}

/* The tiles of dx = dy w, or of dw = dy^T x. */
static lt_tiles linear_tiles(const lt_call *c, int i)
{
    sizes s = sizes_of(c->in[W] ? c->in[W] : c->d_in[W], c->d_out[0]);
    return i == X ? lt__tiles_of(1, s.m, s.k, s.n, true) : lt__tiles_of(1, s.n, s.k, s.m, true);
}

static lt_status linear_grad(lt_call *c, int i)
{
    const lt_tensor *dy = c->d_out[0], *with = c->in[i == X ? W : X];
    lt_tensor *d = c->d_in[i];
    lt_cuda *cuda = lt__cuda(c->ctx);
    lt_tiles t = linear_tiles(c, i);
    FACTORS_AND_RESULT(cuda, dy->dtype, d->dtype, E, O,
                       lt_matrices<E> a = i == X ? lt__matrices_of<E>(dy->data, t.k, 1, 1, 0)
                                                 : lt__matrices_of<E>(dy->data, 1, t.m, 1, 0);
                       return lt__tile_product(
                           cuda, &t, a, lt__matrices_of<E>(with->data, 1, t.n, 1, 0),
                           results_of<O>(d->data, d->dtype, 0, t.n, c->add >> i & 1), c->scratch);)
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static size_t linear_scratch(const lt_call *c, bool backward)
{
    size_t bytes = lt__nvidia_linear_scratch(lt__cuda(c->ctx)->nvidia, c, backward);
    for (int i = X; i <= W && backward; i++)
        if (c->d_in[i]) {
            lt_tiles t = linear_tiles(c, i);
            bytes = larger(bytes, lt__tile_scratch(&t));
        }
    return bytes;
}

static lt_status linear_fwd(lt_call *c)
{
    lt_status status = lt__nvidia_linear_fwd(lt__cuda(c->ctx)->nvidia, c);
    return status == LT_EUNSUPPORTED ? own_linear_fwd(c) : status;
}

static lt_status linear_bwd(lt_call *c)
{
    lt_tensor *dy = c->d_out[0], *db = bias_of(c, c->d_in);
    bool summed = false;
    for (int i = X; i <= W; i++)
        if (c->d_in[i]) {
            lt_status status = lt__nvidia_linear_grad(lt__cuda(c->ctx)->nvidia, c, i, &summed);
            LT_TRY(status == LT_EUNSUPPORTED ? linear_grad(c, i) : status);
        }
    if (!db || summed)
        return LT_OK;
    return lt__cuda_sum_rows(lt__cuda(c->ctx), db->data, db->dtype, dy->data, dy->dtype,
                             db->count > 0 ? dy->count / db->count : 0, db->count, c->add >> B & 1);
}

/* ==== matmul ================================================================================== */

/* How the leading axes of x and y pair up their matrices, innermost first. */
typedef struct pairs {
    int64_t m, n, k; /* sizes of one product */
    int n_lead;
    int64_t lead[LT_MAX_DIMS], step[3][LT_MAX_DIMS]; /* steps of x, y and out; 0 where broadcast */
} pairs;

enum { OUT = 2 };

static void lead_steps(pairs *s, int side, const lt_tensor *t, int64_t size)
{
    for (int i = 0; i < s->n_lead; i++) {
        int64_t dim = t && i < t->ndim - 2 ? t->dims[t->ndim - 3 - i] : t ? 1 : s->lead[i];
        s->step[side][i] = dim == 1 ? 0 : size;
        size *= dim;
        if (dim != 1)
            s->lead[i] = dim;
    }
}

static int64_t matrices_of(const lt_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim - 2; i++)
        n *= t->dims[i];
    return n;
}

static pairs pair_up(const lt_tensor *x, const lt_tensor *y)
{
    pairs s = {};
    s.m = x->dims[x->ndim - 2];
    s.n = y->dims[y->ndim - 1];
    s.k = x->dims[x->ndim - 1];
    s.n_lead = (x->ndim > y->ndim ? x->ndim : y->ndim) - 2;
    for (int i = 0; i < s.n_lead; i++)
        s.lead[i] = 1;
    /* treat x's matrices as the rows of one matrix */
    if (matrices_of(y) == 1 && y->ndim <= x->ndim) {
        s.m *= matrices_of(x);
        s.n_lead = 0;
    }
    lead_steps(&s, X, x, s.m * s.k);
    lead_steps(&s, Y, y, s.k * s.n);
    lead_steps(&s, OUT, NULL, s.m * s.n);
    return s;
}

/* The products of all pairs. `of` names the tensor (X, Y or OUT) that each factor and the result
 * is, or is the gradient of. */
typedef struct products {
    int of[3];               /* a, b, and the result */
    int64_t row[2], term[2]; /* steps of the factors */
    lt_axes batch[2], more[2];
    lt_tiles tiles;
    int64_t row_out;
} products;

/* Sorts the leading axes. Axes that the result has belong to the batch; over axes that it
 * broadcasts, products are summed. */
static void share_axes(products *v, const pairs *s, int64_t *batch, int64_t *more)
{
    *batch = *more = 1;
    for (int i = 0; i < s->n_lead; i++) {
        bool has = s->step[v->of[2]][i] != 0;
        if (s->lead[i] == 1)
            continue;
        *(has ? batch : more) *= s->lead[i];
        for (int f = 0; f < 2; f++) {
            lt_axes *axes = has ? &v->batch[f] : &v->more[f];
            axes->dims[axes->n] = (int)s->lead[i];
            axes->step[axes->n++] = s->step[v->of[f]][i];
        }
    }
}

/* z = x y; the gradient of x is dz y^T, the gradient of y is x^T dz. wanted: X, Y or OUT (z). */
static products products_of(const pairs *s, int wanted)
{
    products v = {};
    int64_t m = s->m, n = s->n, k = s->k, batch, more;
    v.of[0] = wanted == X ? (int)OUT : X;
    v.of[1] = wanted == Y ? (int)OUT : Y;
    v.of[2] = wanted;
    share_axes(&v, s, &batch, &more);
    v.row[0] = wanted == X ? n : wanted == Y ? 1 : k;
    v.term[0] = wanted == Y ? k : 1;
    v.row[1] = wanted == X ? n : 1;
    v.term[1] = wanted == X ? 1 : n;
    if (wanted == X)
        v.tiles = lt__tiles_of(batch, m, k, n * more, true);
    else if (wanted == Y)
        v.tiles = lt__tiles_of(batch, k, n, m * more, true);
    else
        v.tiles = lt__tiles_of(batch, m, n, k, false);
    v.row_out = v.tiles.n;
    return v;
}

template <class E>
static lt_matrices<E> factor_of(const products *v, int f, const lt_tensor *t, int64_t terms)
{
    lt_matrices<E> a = lt__matrices_of<E>(t->data, v->row[f], v->term[f], 1, 0);
    a.batch = v->batch[f];
    a.more = v->more[f];
    a.terms = (int)terms;
    return a;
}

/* to (+)= the wanted product of the tensors in t: x, y, and the gradient of out. */
static lt_status run_pairs(lt_call *c, const pairs *s, int wanted, lt_tensor *const t[3],
                           lt_tensor *to, bool add)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    const products v = products_of(s, wanted);
    const lt_tensor *a = t[v.of[0]], *b = t[v.of[1]];
    int64_t terms = wanted == X ? s->n : wanted == Y ? s->m : s->k;
    FACTORS_AND_RESULT(
        cuda, a->dtype, to->dtype, E, O,
        return lt__tile_product(
            cuda, &v.tiles, factor_of<E>(&v, 0, a, terms), factor_of<E>(&v, 1, b, terms),
            results_of<O>(to->data, to->dtype, (int64_t)v.tiles.m * v.tiles.n, v.row_out, add),
            c->scratch);)
}

static lt_status own_matmul_fwd(lt_call *c)
{
    pairs s = pair_up(c->in[X], c->in[Y]);
    lt_tensor *t[] = {c->in[X], c->in[Y], NULL};
    return run_pairs(c, &s, OUT, t, c->out[0], false);
}

static pairs pairs_back(const lt_call *c)
{
    return pair_up(c->in[X] ? c->in[X] : c->d_in[X], c->in[Y] ? c->in[Y] : c->d_in[Y]);
}

static size_t matmul_scratch(const lt_call *c, bool backward)
{
    size_t bytes = lt__nvidia_matmul_scratch(lt__cuda(c->ctx)->nvidia, c, backward);
    pairs s = backward ? pairs_back(c) : pair_up(c->in[X], c->in[Y]);
    for (int i = X; i <= Y && backward; i++)
        if (c->d_in[i]) {
            products v = products_of(&s, i);
            bytes = larger(bytes, lt__tile_scratch(&v.tiles));
        }
    return bytes;
}

static lt_status matmul_fwd(lt_call *c)
{
    lt_status status = lt__nvidia_matmul_fwd(lt__cuda(c->ctx)->nvidia, c);
    return status == LT_EUNSUPPORTED ? own_matmul_fwd(c) : status;
}

static lt_status matmul_bwd(lt_call *c)
{
    pairs s = pairs_back(c);
    lt_tensor *t[] = {c->in[X], c->in[Y], c->d_out[0]};
    for (int i = X; i <= Y; i++)
        if (c->d_in[i]) {
            lt_status status = lt__nvidia_matmul_grad(lt__cuda(c->ctx)->nvidia, c, i);
            LT_TRY(status == LT_EUNSUPPORTED ? run_pairs(c, &s, i, t, c->d_in[i], c->add >> i & 1)
                                             : status);
        }
    return LT_OK;
}

static bool f32_grad(const lt_call *c, int i)
{
    (void)c, (void)i;
    return true;
}

void lt__cuda_matmul(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_linear], linear_scratch, linear_fwd, linear_bwd);
    lt__set_kernels(&op[LT_OP_matmul], matmul_scratch, matmul_fwd, matmul_bwd);
    op[LT_OP_linear].f32_grad = op[LT_OP_matmul].f32_grad = f32_grad;
}
