/* matmul.cu - the CUDA side of matmul.c and product.c: matmul, linear, and sums of rows. Products
 * use cuBLASLt, or our own kernels if cuBLASLt is missing or does not support them. */
#include "ops/cuda/reduction.h"
#include "ops/cuda/tile.h"
#include "ops/matmul.h"

enum { X, Y, W = 1, B };

/* Runs the body with E as the type of the factors and O as the type of the result, which is E or
 * float. */
#define FACTORS_AND_RESULT(cuda, dtype, to, E, O, ...)                                             \
    LT_CUDA_FLOATS(cuda, dtype, E, if ((to) == LT_F32) { typedef float O; __VA_ARGS__ }            \
                                   else { typedef E O; __VA_ARGS__ })

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
    lt__plan_reduction(&plan, 2, dims, 1 << 0, lt__cuda_dtype_bytes(from_dtype));
    if (lt__reduction_scratch(&plan, sizeof(double)) > lt__cuda_sum_rows_bytes())
        return cuda->host->fail(LT_EINVAL, "%s: %lld rows of %lld columns are too many to sum",
                                cuda->name, (lt_ll)rows, (lt_ll)cols);
    LT_CUDA_FLOATS(cuda, from_dtype, E,
                   return lt__reduce<lt_sum_reduction<E>>(cuda, &plan, from, end, cuda->sums);)
}

/* ==== linear ================================================================================== */

static lt_status own_linear_fwd(lt_call *c)
{
    lt_tensor *x = c->in[X], *w = c->in[W], *b = lt__optional(c, c->in, B), *y = c->out[0];
    lt_cuda *cuda = lt__cuda(c->ctx);
    lt_linear_sizes s = lt__linear_sizes(w, y);
    lt_tiles t = lt__tiles_of(1, s.m, s.n, s.k, false);
    LT_CUDA_FLOATS(cuda, x->dtype, E,
                   lt_results<E> r = lt__results_of<E>(y->data, y->dtype, 0, s.n, false);
                   r.bias = (const E *)lt__data(b);
                   return lt__tile_product(cuda, &t, lt__matrices_of<E>(x->data, s.k, 1, 1, 0),
                                           lt__matrices_of<E>(w->data, s.k, 1, 1, 0), r, NULL);)
}

/* The tiles of dx = dy w, or of dw = dy^T x. */
static lt_tiles linear_tiles(const lt_call *c, int i)
{
    lt_linear_sizes s = lt__linear_sizes(c->in[W] ? c->in[W] : c->d_in[W], c->d_out[0]);
    return i == X ? lt__tiles_of(1, s.m, s.k, s.n, true) : lt__tiles_of(1, s.n, s.k, s.m, true);
}

static lt_status linear_grad(lt_call *c, int i)
{
    const lt_tensor *dy = c->d_out[0], *with = c->in[i == X ? W : X];
    lt_tensor *d = c->d_in[i];
    lt_cuda *cuda = lt__cuda(c->ctx);
    lt_tiles t = linear_tiles(c, i);
    FACTORS_AND_RESULT(
        cuda, dy->dtype, d->dtype, E, O,
        lt_matrices<E> a = i == X ? lt__matrices_of<E>(dy->data, t.k, 1, 1, 0)
                                  : lt__matrices_of<E>(dy->data, 1, t.m, 1, 0);
        return lt__tile_product(cuda, &t, a, lt__matrices_of<E>(with->data, 1, t.n, 1, 0),
                                lt__results_of<O>(d->data, d->dtype, 0, t.n, c->add >> i & 1),
                                c->scratch);)
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
    lt_tensor *dy = c->d_out[0], *db = lt__optional(c, c->d_in, B);
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

enum { OUT = 2 };

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
static void share_axes(products *v, const lt_pairs *s, int64_t *batch, int64_t *more)
{
    int64_t of_out = s->m * s->n;
    *batch = *more = 1;
    for (int i = s->n_lead - 1; i >= 0; of_out *= s->lead[i--]) {
        bool has = v->of[2] == OUT || s->step[v->of[2]][i] != 0;
        if (s->lead[i] == 1)
            continue;
        *(has ? batch : more) *= s->lead[i];
        for (int f = 0; f < 2; f++) {
            lt_axes *axes = has ? &v->batch[f] : &v->more[f];
            axes->dims[axes->n] = (int)s->lead[i];
            axes->step[axes->n++] = v->of[f] == OUT ? of_out : s->step[v->of[f]][i];
        }
    }
}

/* z = x y; the gradient of x is dz y^T, the gradient of y is x^T dz. wanted: X, Y or OUT (z). */
static products products_of(const lt_pairs *s, int wanted)
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
static lt_status run_pairs(lt_call *c, const lt_pairs *s, int wanted, lt_tensor *const t[3],
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
            lt__results_of<O>(to->data, to->dtype, (int64_t)v.tiles.m * v.tiles.n, v.row_out, add),
            c->scratch);)
}

static lt_status own_matmul_fwd(lt_call *c)
{
    lt_pairs s = lt__pair_up(c->in[X], c->in[Y]);
    lt_tensor *t[] = {c->in[X], c->in[Y], NULL};
    return run_pairs(c, &s, OUT, t, c->out[0], false);
}

static lt_pairs pairs_back(const lt_call *c)
{
    return lt__pair_up(c->in[X] ? c->in[X] : c->d_in[X], c->in[Y] ? c->in[Y] : c->d_in[Y]);
}

static size_t matmul_scratch(const lt_call *c, bool backward)
{
    size_t bytes = lt__nvidia_matmul_scratch(lt__cuda(c->ctx)->nvidia, c, backward);
    lt_pairs s = backward ? pairs_back(c) : lt__pair_up(c->in[X], c->in[Y]);
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
    lt_pairs s = pairs_back(c);
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
