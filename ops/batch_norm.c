/* batch_norm.c - batch normalisation (Ioffe and Szegedy, 2015), fused with the residual sum and the
 * activation that often follow it; and the two ops that update its running statistics.
 *
 * This file treats x as (rows, channels): all axes but the last are rows. In training the op
 * returns the mean and the biased variance of its rows as extra outputs. It never writes the
 * running buffers. lt_bn_stats_commit() updates these once a step: it merges the statistics of the
 * shards with batch_norm_merge, then calls batch_norm_update. In evaluation the extra outputs are
 * copies of the buffers, so that backward always reads the extra outputs, and the buffers may
 * change before backward runs.
 *
 * Backward needs y to know where act stops the gradient. Without a residual it computes y again
 * from x, which it reads anyway, so y is saved only if the call has both an activation and a
 * residual.
 *
 * The kernels here are the reference kernels for those in cpu/batch_norm_simd.c. They work channel
 * by channel and in double, and also serve f64.
 */
#include "ops/batch_norm.h"

/* ==== Arguments =============================================================================== */

/* LT_EINVAL unless the inputs 0..n-1 that are present are all f64, or all floats other than f64: a
 * half-precision x may have f32 parameters. */
static lt_status check_floats(const lt_call *c, int n)
{
    LT_TRY(lt__same_float(c, 1));
    lt_dtype first = (lt_dtype)c->in[0]->dtype;
    for (int i = 1; i < n; i++) {
        if (!lt__optional(c, c->in, i))
            continue;
        lt_dtype dtype = (lt_dtype)c->in[i]->dtype;
        if (!lt__is_float(dtype) || (dtype == LT_F64) != (first == LT_F64))
            return lt__dtypes_differ(c, 0, i);
    }
    return LT_OK;
}

static lt_status shape(lt_call *c)
{
    const lt_tensor *x = c->in[X];
    bool residual = lt__optional(c, c->in, RESIDUAL), act = lt__word(c, ACT) != 0;
    LT_TRY(check_floats(c, RESIDUAL + 1));
    if (x->ndim < 2)
        return lt_fail(LT_EINVAL, "x must have at least 2 axes (..., channels), but has %d (%s)",
                       x->ndim, LT_TEXT(x));
    int64_t channels = x->dims[x->ndim - 1];
    for (int i = SCALE; i <= VAR; i++)
        LT_TRY(lt__require_dims(c, i, 1, &channels, "one value per channel"));
    if (residual)
        LT_TRY(lt__require_dims(c, RESIDUAL, x->ndim, x->dims, "the shape of x"));
    LT_TRY(lt__number_in(c, MOMENTUM, 0, 1));
    LT_TRY(lt__number_in(c, EPS, 0, INFINITY));
    if (!lt__flag(c, SYNC))
        LT_TRY(lt__check_rows(c));
    lt__spec_like(c, Y, x);
    lt__spec(c, BATCH_MEAN, x->dtype == LT_F64 ? LT_F64 : LT_F32, 1, &channels);
    c->spec[BATCH_VAR] = c->spec[BATCH_MEAN];
    if (!act || !residual)
        c->save &= ~LT_SAVE_OUT(Y);
    if (!act || residual)
        c->save &= ~LT_SAVE_IN(SHIFT);
    if (act)
        c->same_grad = 0;
    return LT_OK;
}

/* ==== The reference kernels =================================================================== */

/* Runs fn for every channel k. */
static void each_channel(lt_call *c, void (*fn)(lt_call *c, int64_t k))
{
    const lt_tensor *x = c->in[X];
    int64_t channels = x->dims[x->ndim - 1];
    LT_PARALLEL_FOR(c, x->count)
    for (int64_t k = 0; k < channels; k++)
        fn(c, k);
}

/* Computes the mean and variance of channel k, by which its rows are normalised. */
static void channel_statistics(lt_call *c, int64_t k)
{
    int64_t n = c->in[X]->count, channels = c->in[SCALE]->count, rows = lt__rows_of(c->in[X]);
    lt_moments m = {0, 0};
    LT_FLOATS(c->in[X]->dtype, T,
        const T *x = c->in[X]->data, running = ((const T *)c->in[MEAN]->data)[k];
        T *mean = c->out[BATCH_MEAN]->data, *var = c->out[BATCH_VAR]->data;
        if (!lt__flag(c, TRAIN)) {
            mean[k] = running;
            var[k] = ((const T *)c->in[VAR]->data)[k];
            return;
        }
        if (c->summed) {
            m = lt__read_moments(c, k, running);
        } else {
            for (int64_t i = k; i < n; i += channels)
                m.mean += x[i];
            m.mean = rows > 0 ? m.mean / (double)rows : 0;
            for (int64_t i = k; i < n; i += channels)
                m.squares += (x[i] - m.mean) * (x[i] - m.mean);
        }
        if (lt__is_first_run(c))
            lt__write_moments(c, k, running, m);
        double all = lt__all_rows(c), variance = all > 0 ? m.squares / all : 0;
        mean[k] = (T)m.mean;
        var[k] = (T)(variance < 0 ? 0 : variance);
    );
}

static void channel_forward(lt_call *c, int64_t k)
{
    int64_t n = c->in[X]->count, channels = c->in[SCALE]->count;
    lt_bounds act = lt__bounds(c);
    LT_FLOATS(c->in[X]->dtype, T,
        const T *x = c->in[X]->data, *scale = c->in[SCALE]->data, *shift = c->in[SHIFT]->data;
        const T *residual = lt__data(lt__optional(c, c->in, RESIDUAL));
        const T *mean = c->out[BATCH_MEAN]->data, *var = c->out[BATCH_VAR]->data;
        T *y = c->out[Y]->data;
        double factor = scale[k] / sqrt(var[k] + lt__number(c, EPS));
        for (int64_t i = k; i < n; i += channels) {
            double v = ((double)x[i] - mean[k]) * factor + shift[k] + (residual ? residual[i] : 0);
            y[i] = (T)(v < act.low ? act.low : v > act.high ? act.high : v);
        }
    );
}

static lt_status forward(lt_call *c)
{
    if (lt__is_first_run(c))
        c->sums[0] = (double)lt__rows_of(c->in[X]);
    each_channel(c, channel_statistics);
    if (lt__is_first_run(c))
        return LT_OK;
    LT_TRY(lt__check_rows(c));
    each_channel(c, channel_forward);
    return LT_OK;
}

/* With h = (x - mean) r, r = 1 / sqrt(var + eps), and g = dy where the slope of act is 1, else 0:
 *     dresidual = g,  dshift = sum g,  dscale = sum g h
 *     train:  dx = scale r (g - sum g / rows - h sum(g h) / rows)
 *     eval:   dx = scale r g
 * The running buffers are constants, so their gradients are zero. dx may be in the memory of dy.
 * With sync, the sums and the number of rows in dx are over all ranks. dscale and dshift are over
 * the rows of this rank, because the reducer sums gradients of parameters later. */
static void channel_backward(lt_call *c, int64_t k)
{
    int64_t n = c->in[X]->count, channels = c->in[SCALE]->count;
    lt_bounds act = lt__bounds(c);
    bool masked = lt__word(c, ACT) != 0;
    LT_FLOATS(c->in[X]->dtype, T,
        const T *x = c->in[X]->data, *dy = c->d_out[Y]->data, *y = lt__data(c->out[Y]);
        const T *scale = c->in[SCALE]->data, *shift = lt__data(c->in[SHIFT]);
        T *dx = lt__data(c->d_in[X]), *dscale = lt__data(c->d_in[SCALE]);
        T *dshift = lt__data(c->d_in[SHIFT]), *dmean = lt__data(c->d_in[MEAN]);
        T *dvar = lt__data(c->d_in[VAR]), *dresidual = lt__data(lt__optional(c, c->d_in, RESIDUAL));
        double mean = ((const T *)c->out[BATCH_MEAN]->data)[k];
        double r = 1 / sqrt(((const T *)c->out[BATCH_VAR]->data)[k] + lt__number(c, EPS));
        double rows = lt__all_rows(c), share = lt__flag(c, TRAIN) && rows > 0 ? 1 / rows : 0;
        double sum = c->summed ? lt__sums_of(c, k)[0] : 0;
        double products = c->summed ? lt__sums_of(c, k)[1] : 0;
        for (int pass = c->summed; pass < (lt__is_first_run(c) ? 1 : 2); pass++)
            for (int64_t i = k; i < n; i += channels) {
                double h = (x[i] - mean) * r, g = dy[i];
                double v = !masked ? 0 : y ? y[i] : h * scale[k] + shift[k];
                if (LT_STOPS_LOW(act, v) || LT_STOPS_HIGH(act, v))
                    g = 0;
                if (pass == 0) {
                    sum += g;
                    products += g * h;
                    continue;
                }
                if (dresidual)
                    LT_PUT(lt__adds(c, RESIDUAL), dresidual[i], (T)g);
                if (dx)
                    LT_PUT(lt__adds(c, X), dx[i],
                           (T)(scale[k] * r * (g - (sum + h * products) * share)));
            }
        if (c->summed)
            return;
        if (lt__is_first_run(c)) {
            lt__sums_of(c, k)[0] = sum;
            lt__sums_of(c, k)[1] = products;
        }
        if (dscale)
            LT_PUT(lt__adds(c, SCALE), dscale[k], (T)products);
        if (dshift)
            LT_PUT(lt__adds(c, SHIFT), dshift[k], (T)sum);
        if (dmean && !lt__adds(c, MEAN))
            dmean[k] = 0;
        if (dvar && !lt__adds(c, VAR))
            dvar[k] = 0;
    );
}

static lt_status backward(lt_call *c)
{
    if (lt__is_first_run(c))
        c->sums[0] = (double)lt__rows_of(c->in[X]);
    each_channel(c, channel_backward);
    return LT_OK;
}

/* The number of sums to exchange with other ranks. In backward only dx depends on other ranks. */
static int64_t sums(const lt_call *c, bool backward)
{
    const lt_tensor *x = c->in[X];
    bool wants = lt__flag(c, SYNC) && lt__flag(c, TRAIN) && (!backward || c->d_in[X]);
    return wants ? 1 + 2 * x->dims[x->ndim - 1] : 0;
}

/* ==== batch_norm ============================================================================== */

static lt_status after(lt_call *c)
{
    int64_t rows = lt__rows_of(c->in[X]);
    if (!lt__flag(c, TRAIN) || rows == 0)
        return LT_OK;
    return lt_bn_stats_add(c->ctx, c->in[MEAN], c->in[VAR], c->out[BATCH_MEAN], c->out[BATCH_VAR],
                           rows, lt__number(c, MOMENTUM));
}

const lt_op lt__op_batch_norm = {
    .sig = "batch_norm(x, scale, shift, mean, var, residual?; train=false, momentum=0.1, eps=1e-5, "
           "act=none|relu|relu6, sync=false)",
    .doc = "y = act((x - mean) / sqrt(var + eps) * scale + shift + residual) for x (..., "
           "channels) and scale, shift, mean and var (channels); train=true takes mean and biased "
           "var from x (with sync=true, from x of all ranks) and updates the buffers mean and var "
           "by momentum at the end of the step.",
    .cast = LT_CAST_ANY,
    .n_aux = 2,
    .fast_bf16 = true,
    .save = LT_SAVE_IN(X) | LT_SAVE_IN(SCALE) | LT_SAVE_IN(SHIFT) | LT_SAVE_OUT(Y) |
            LT_SAVE_OUT(BATCH_MEAN) | LT_SAVE_OUT(BATCH_VAR),
    .same_grad = 1u << RESIDUAL,
    .grad_in_place = 1u << X,
    .shape = shape,
    .scratch = lt__batch_norm_scratch,
    .sums = sums,
    .fwd = forward,
    .bwd = backward,
    .fast_fwd = lt__batch_norm_fwd,
    .fast_bwd = lt__batch_norm_bwd,
    .after = after,
};

/* ==== Running statistics ====================================================================== */

/* LT_EINVAL unless the inputs are four tensors (channels), and the first n options are counts
 * >= 0. */
static lt_status check_statistics(const lt_call *c, int n)
{
    LT_TRY(check_floats(c, 4));
    LT_TRY(lt__require_ndim(c, 0, 1, "(channels)"));
    for (int i = 1; i < 4; i++)
        LT_TRY(lt__require_dims(c, i, 1, c->in[0]->dims, "one value per channel"));
    for (int k = 0; k < n; k++)
        LT_TRY(lt__number_in(c, k, 0, INFINITY));
    return LT_OK;
}

static lt_status merge_shape(lt_call *c) { return check_statistics(c, 2); }

static lt_status merge_forward(lt_call *c)
{
    double count = lt__number(c, 0), count2 = lt__number(c, 1);
    if (count2 == 0)
        return LT_OK;
    double part = count2 / (count + count2);
    LT_FLOATS(c->in[0]->dtype, T,
        T *mean = c->in[0]->data;
        T *var = c->in[1]->data;
        const T *mean2 = c->in[2]->data;
        const T *var2 = c->in[3]->data;
        for (int64_t k = 0; k < c->in[0]->count; k++) {
            var[k] = (T)lt__merged_var(mean[k], var[k], mean2[k], var2[k], part);
            mean[k] = (T)lt__merged_mean(mean[k], mean2[k], part);
        }
    );
    return LT_OK;
}

const lt_op lt__op_batch_norm_merge = {
    .sig = "batch_norm_merge(mean, var, mean2, var2; count#, count2#)",
    .doc = "Merges mean2 and var2 of count2 values into mean and var of count values, in place, "
           "where each var is biased and all have the shape (channels) (Chan, Golub and LeVeque, "
           "1983).",
    .in_place = 1 << 0 | 1 << 1,
    .shape = merge_shape,
    .fwd = merge_forward,
};

static lt_status update_shape(lt_call *c)
{
    LT_TRY(lt__number_in(c, 1, 0, 1));
    return check_statistics(c, 1);
}

static lt_status update_forward(lt_call *c)
{
    double count = lt__number(c, 0), momentum = lt__number(c, 1);
    if (count == 0)
        return LT_OK;
    double unbias = lt__unbias(count);
    LT_FLOATS(c->in[0]->dtype, T,
        T *running_mean = c->in[0]->data;
        T *running_var = c->in[1]->data;
        const T *mean = c->in[2]->data;
        const T *var = c->in[3]->data;
        for (int64_t k = 0; k < c->in[0]->count; k++) {
            running_mean[k] = (T)lt__running_update(running_mean[k], mean[k], momentum);
            running_var[k] = (T)lt__running_update(running_var[k], unbias * var[k], momentum);
        }
    );
    return LT_OK;
}

const lt_op lt__op_batch_norm_update = {
    .sig = "batch_norm_update(running_mean, running_var, mean, var; count#, momentum#)",
    .doc = "running = (1 - momentum) * running + momentum * new, in place, for mean and var "
           "(channels), where the biased var of count values is made unbiased by count / (count - "
           "1), except that a count of 1 leaves it biased and a count of 0 changes nothing.",
    .in_place = 1 << 0 | 1 << 1,
    .shape = update_shape,
    .fwd = update_forward,
};
