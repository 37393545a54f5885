/* layer_norm.c - layer normalisation over the last axis (Ba, Kiros and Hinton, 2016).
 *
 * This file treats x as (rows, n). Each row is normalised separately. Its mean and
 * 1 / sqrt(var + eps) are saved in an extra output (rows, 2) for backward. Sums along a row are in
 * double and in a fixed number of lanes, so that they vectorise without changing their order. The
 * gradients of scale and shift are sums over rows. Each group of rows has partial sums, which are
 * added in order. The groups depend only on the dims, so the bits do not depend on the threads.
 */
#include "ops/layer_norm.h"

enum { LANES = 16 };
enum { GROUP = 65536 }; /* elements of x in a group, unless there are MAX_GROUPS */
enum { MAX_GROUPS = 64 };

typedef struct {
    int64_t rows, n;
    int64_t group, groups; /* rows in a group; number of groups */
} plan;

static plan plan_for(const lt_tensor *x)
{
    plan p = {.rows = lt__rows_of(x), .n = x->dims[x->ndim - 1]};
    p.groups = x->count / GROUP + 1 < MAX_GROUPS ? x->count / GROUP + 1 : MAX_GROUPS;
    p.group = (p.rows + p.groups - 1) / p.groups;
    return p;
}

static lt_status shape(lt_call *c)
{
    const lt_tensor *x = c->in[X];
    LT_TRY(lt__same_float(c, 3));
    if (x->ndim < 1)
        return lt_fail(LT_EINVAL, "x must have at least 1 axis, but has none");
    int64_t n = x->dims[x->ndim - 1];
    LT_TRY(lt__require_dims(c, SCALE, 1, &n, "one value per element of x's last axis"));
    LT_TRY(lt__require_dims(c, SHIFT, 1, &n, "one value per element of x's last axis"));
    LT_TRY(lt__number_in(c, 0, 0, INFINITY));
    int64_t stats[2] = {plan_for(x).rows, 2};
    lt__spec_like(c, 0, x);
    lt__spec(c, 1, x->dtype == LT_F64 ? LT_F64 : LT_F32, 2, stats);
    return LT_OK;
}

/* stats = mean and 1 / sqrt(var + eps); y = (x - mean) / sqrt(var + eps) scale + shift */
LT_SIMD static void row_forward(lt_dtype dtype, void *out, const void *in, const void *scales,
                                const void *shifts, int64_t n, double eps, void *stats)
{
    LT_FLOATS(dtype, T,
        T *restrict y = out;
        const T *restrict x = in;
        const T *restrict scale = scales;
        const T *restrict shift = shifts;
        double lane[LANES] = {0};
        double square[LANES] = {0};
        int64_t whole = n / LANES * LANES;
        for (int64_t i = 0; i < whole; i += LANES)
            for (int l = 0; l < LANES; l++)
                lane[l] += x[i + l];
        double mean = 0;
        for (int64_t i = whole; i < n; i++)
            mean += x[i];
        for (int l = 0; l < LANES; l++)
            mean += lane[l];
        mean /= (double)n;
        for (int64_t i = 0; i < whole; i += LANES)
            for (int l = 0; l < LANES; l++)
                square[l] += (x[i + l] - mean) * (x[i + l] - mean);
        double var = 0;
        for (int64_t i = whole; i < n; i++)
            var += (x[i] - mean) * (x[i] - mean);
        for (int l = 0; l < LANES; l++)
            var += square[l];
        T m = (T)mean;
        T r = (T)(1 / sqrt(var / (double)n + eps));
        for (int64_t i = 0; i < n; i++)
            y[i] = LT_LAYER_NORM(x[i], m, r, scale[i], shift[i]);
        ((T *)stats)[0] = m;
        ((T *)stats)[1] = r;
    );
}

static lt_status forward(lt_call *c)
{
    plan p = plan_for(c->in[X]);
    LT_PARALLEL_FOR(c, p.rows * p.n)
    for (int64_t i = 0; i < p.rows; i++)
        row_forward((lt_dtype)c->in[X]->dtype, lt__address(c->out[0], i * p.n),
                    lt__address(c->in[X], i * p.n), c->in[SCALE]->data, c->in[SHIFT]->data, p.n,
                    lt__number(c, 0), lt__address(c->out[1], i * 2));
    return LT_OK;
}

/* With h = (x - mean) r and g = dy scale, dx (+)= r (g - mean(g) - h mean(g h)), where the means
 * are over the row. Adds dy h to dscale and dy to dshift. d_in may be NULL. */
LT_SIMD static void row_backward(lt_dtype dtype, void *d_in, const void *d_out, const void *in,
                                 const void *scales, const void *stats, int64_t n, bool add,
                                 double *restrict dscale, double *restrict dshift)
{
    LT_FLOATS(dtype, T,
        T *restrict dx = d_in;
        const T *restrict dy = d_out;
        const T *restrict x = in;
        const T *restrict scale = scales;
        T mean = ((const T *)stats)[0];
        T r = ((const T *)stats)[1];
        for (int64_t i = 0; i < n; i++) {
            dscale[i] += dy[i] * LT_LAYER_H(x[i], mean, r);
            dshift[i] += dy[i];
        }
        if (!dx)
            return;
        double lane[LANES] = {0};
        double product[LANES] = {0};
        int64_t whole = n / LANES * LANES;
        for (int64_t i = 0; i < whole; i += LANES)
            for (int l = 0; l < LANES; l++) {
                lane[l] += dy[i + l] * scale[i + l];
                product[l] += dy[i + l] * scale[i + l] * LT_LAYER_H(x[i + l], mean, r);
            }
        double g = 0;
        double gh = 0;
        for (int64_t i = whole; i < n; i++) {
            g += dy[i] * scale[i];
            gh += dy[i] * scale[i] * LT_LAYER_H(x[i], mean, r);
        }
        for (int l = 0; l < LANES; l++) {
            g += lane[l];
            gh += product[l];
        }
        T mean_g = (T)(g / (double)n);
        T mean_gh = (T)(gh / (double)n);
        for (int64_t i = 0; i < n; i++)
            LT_PUT(add, dx[i], LT_LAYER_NORM_BACK(dy[i] * scale[i], LT_LAYER_H(x[i], mean, r), r,
                                                  mean_g, mean_gh));
    );
}

static size_t scratch(const lt_call *c, bool backward)
{
    plan p = plan_for(c->in[X]);
    return backward ? (size_t)(p.groups * 2 * p.n) * sizeof(double) : 0;
}

static lt_status backward(lt_call *c)
{
    plan p = plan_for(c->in[X]);
    lt_dtype dtype = (lt_dtype)c->in[X]->dtype;
    double *sums = c->scratch; /* (groups, 2, n): dscale and dshift of each group */
    for (int64_t i = 0; i < p.groups * 2 * p.n; i++)
        sums[i] = 0;
    LT_PARALLEL_FOR(c, p.rows * p.n)
    for (int64_t g = 0; g < p.groups; g++) {
        double *dscale = sums + g * 2 * p.n, *dshift = dscale + p.n;
        for (int64_t i = g * p.group; i < p.rows && i < (g + 1) * p.group; i++)
            row_backward(dtype, lt__address(c->d_in[X], i * p.n), lt__address(c->d_out[0], i * p.n),
                         lt__address(c->in[X], i * p.n), c->in[SCALE]->data,
                         lt__address(c->out[1], i * 2), p.n, lt__adds(c, X), dscale, dshift);
    }
    for (int64_t g = 1; g < p.groups; g++)
        for (int64_t i = 0; i < 2 * p.n; i++)
            sums[i] += sums[g * 2 * p.n + i];
    for (int k = SCALE; k <= SHIFT; k++) {
        if (!c->d_in[k])
            continue;
        LT_FLOATS(dtype, T,
            T *d = c->d_in[k]->data;
            for (int64_t i = 0; i < p.n; i++)
                LT_PUT(lt__adds(c, k), d[i], (T)sums[(k - SCALE) * p.n + i]);
        );
    }
    return LT_OK;
}

const lt_op lt__op_layer_norm = {
    .sig = "layer_norm(x, scale, shift; eps=1e-5)",
    .doc = "y = (x - mean) / sqrt(var + eps) * scale + shift for x (..., n), scale (n) and shift "
           "(n), with mean and biased var over the last axis.",
    .cast = LT_CAST_F32,
    .n_aux = 1,
    .save = LT_SAVE_IN(X) | LT_SAVE_IN(SCALE) | LT_SAVE_OUT(1),
    .shape = shape,
    .scratch = scratch,
    .fwd = forward,
    .bwd = backward,
};
