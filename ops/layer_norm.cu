/* layer_norm.cu - the CUDA side of layer_norm.c.
 *
 * Each row is processed by a few threads (cuda/rows.h). Forward reads a row twice, and so does
 * backward for dx; the second read comes from the caches. The moments are sums of x - center and of
 * its square in double, with the first element as center, so that no digits of a float are lost.
 * The gradients of scale and shift take another pass over x and dy and are summed over rows in
 * double.
 */
#include "ops/cuda/rows.h"
#include "ops/layer_norm.h"

static lt_row_plan rows_of(const lt_tensor *x)
{
    return lt__rows_over(lt__rows_of(x), x->dims[x->ndim - 1], 1);
}

/* ==== Forward ================================================================================= */

/* stats (rows, 2): the mean and 1 / sqrt(var + eps). */
template <class E>
LT_KERNEL forward_kernel(const __grid_constant__ lt_row_plan p, E *y, const E *x, const E *scale,
                         const E *shift, double eps, float *stats)
{
    lt_row r = lt__row_of(p);
    lt_two sums = lt_two_sums::start();
    double center = r.valid && p.n > 0 ? (double)lt__value(x[r.first]) : 0;
    for (int64_t i = r.lane; r.valid && i < p.n; i += p.lanes) {
        double d = (double)lt__value(x[r.first + i]) - center;
        sums.a += d;
        sums.b += d * d;
    }
    sums = lt__join_row<lt_two_sums>(p, sums);
    if (!r.valid)
        return;
    double n = (double)p.n, mean_offset = sums.a / n, var = (sums.b - mean_offset * sums.a) / n;
    float mean = (float)(center + mean_offset), rstd = (float)(1 / sqrt((var < 0 ? 0 : var) + eps));
    if (r.lane == 0) {
        stats[2 * r.index] = mean;
        stats[2 * r.index + 1] = rstd;
    }
    for (int64_t i = r.lane; i < p.n; i += p.lanes)
        y[r.first + i] = lt_element<E>::of(LT_LAYER_NORM(lt__value(x[r.first + i]), mean, rstd,
                                                         lt__value(scale[i]), lt__value(shift[i])));
}

template <class E> static lt_status forward(lt_call *c)
{
    lt_row_plan p = rows_of(c->in[X]);
    return lt__launch(lt__cuda(c->ctx), lt__row_blocks(&p), forward_kernel<E>, p,
                      (E *)c->out[0]->data, (const E *)c->in[X]->data,
                      (const E *)c->in[SCALE]->data, (const E *)c->in[SHIFT]->data,
                      lt__number(c, 0), (float *)c->out[1]->data);
}

LT_CUDA_CALL(layer_norm_fwd, FLOATS, c->in[X], forward<E>(c))

/* ==== Backward ================================================================================ */

template <class E>
LT_KERNEL dx_kernel(const __grid_constant__ lt_row_plan p, E *dx, const E *dy, const E *x,
                    const E *scale, const float *stats, bool add)
{
    lt_row r = lt__row_of(p);
    float mean = r.valid ? stats[2 * r.index] : 0, rstd = r.valid ? stats[2 * r.index + 1] : 0;
    lt_two sums = lt_two_sums::start();
    for (int64_t i = r.lane; r.valid && i < p.n; i += p.lanes) {
        float g = lt__value(dy[r.first + i]) * lt__value(scale[i]);
        sums.a += (double)g;
        sums.b += (double)(g * LT_LAYER_H(lt__value(x[r.first + i]), mean, rstd));
    }
    sums = lt__join_row<lt_two_sums>(p, sums);
    float mean_g = (float)(sums.a / (double)p.n), mean_gh = (float)(sums.b / (double)p.n);
    for (int64_t i = r.lane; r.valid && i < p.n; i += p.lanes) {
        float g = lt__value(dy[r.first + i]) * lt__value(scale[i]);
        float h = LT_LAYER_H(lt__value(x[r.first + i]), mean, rstd);
        float d = LT_LAYER_NORM_BACK(g, h, rstd, mean_g, mean_gh);
        dx[r.first + i] = lt_element<E>::of(add ? lt__value(dx[r.first + i]) + d : d);
    }
}

/* parts (parts, n): the sums of dy h and of dy over a part of the rows. */
template <class E>
LT_KERNEL sum_kernel(const __grid_constant__ lt_column_plan p, const E *dy, const E *x,
                     const float *stats, lt_two *parts)
{
    lt_column at = lt__column_of(p);
    lt_two sums = lt_two_sums::start();
#pragma unroll 2
    for (int64_t r = at.first + at.lane; at.valid && r < at.last; r += p.lanes) {
        float g = lt__value(dy[r * p.width + at.index]);
        float v = lt__value(x[r * p.width + at.index]);
        float h = LT_LAYER_H(v, stats[2 * r], stats[2 * r + 1]);
        sums.a += (double)(g * h);
        sums.b += (double)g;
    }
    sums = lt__join_lanes<lt_two_sums>(sums, p.columns, p.lanes);
    if (at.valid && at.lane == 0)
        parts[at.part * p.width + at.index] = sums;
}

static lt_column_plan columns_of(const lt_tensor *x)
{
    lt_row_plan p = rows_of(x);
    return lt__columns_over(p.outer, p.n, LT_ENOUGH_BLOCKS);
}

static size_t scratch(const lt_call *c, bool backward)
{
    lt_column_plan p = columns_of(c->in[X]);
    return backward ? (size_t)(p.parts * p.width) * sizeof(lt_two) : 0;
}

template <class E> static lt_status sum_rows(const lt_call *c)
{
    lt_column_plan p = columns_of(c->in[X]);
    lt_two *parts = (lt_two *)c->scratch;
    LT_TRY(lt__launch(lt__cuda(c->ctx), lt__column_blocks(&p), sum_kernel<E>, p,
                      (const E *)c->d_out[0]->data, (const E *)c->in[X]->data,
                      (const float *)c->out[1]->data, parts));
    return lt__put_columns<E>(c, parts, p.parts, p.width, SCALE, SHIFT);
}

template <class E> static lt_status backward(lt_call *c)
{
    lt_row_plan p = rows_of(c->in[X]);
    if (c->d_in[SCALE] || c->d_in[SHIFT])
        LT_TRY(sum_rows<E>(c));
    if (!c->d_in[X])
        return LT_OK;
    return lt__launch(lt__cuda(c->ctx), lt__row_blocks(&p), dx_kernel<E>, p, (E *)c->d_in[X]->data,
                      (const E *)c->d_out[0]->data, (const E *)c->in[X]->data,
                      (const E *)c->in[SCALE]->data, (const float *)c->out[1]->data,
                      lt__adds(c, X));
}

LT_CUDA_CALL(layer_norm_bwd, FLOATS, c->in[X], backward<E>(c))

void lt__cuda_layer_norm(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_layer_norm], scratch, layer_norm_fwd, layer_norm_bwd);
}
