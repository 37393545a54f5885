/* batch_norm.c - batch normalisation (Ioffe and Szegedy, 2015), and the two ops that move its
 * running statistics.
 *
 * x is (rows, channels) to this file: all axes but the last are rows. In training the op gives,
 * beside y, the mean and the biased variance of its rows as extra outputs; it never writes the
 * running buffers. Those move once a step, in lt_stats_commit(), which merges the shards by
 * batch_norm_merge and ends with batch_norm_update. In evaluation the extra outputs are copies of
 * the buffers: backward reads one place, and the buffers may change before it runs.
 *
 * How the sums are made. x is cut into blocks that fit in a near cache. Each is read twice: for
 * its mean, and for the deviations from it with a correction for the rounding of that mean (Chan,
 * Golub and LeVeque, Algorithms for Computing the Sample Variance, 1983). Blocks are then merged in
 * double, by their formula for two samples. So memory is read once, and a mean far from zero costs
 * no digits. Blocks are merged in order within a group, and groups in order; both depend on the
 * dims alone, so the bits do not depend on the number of threads.
 *
 * Wide rows. Few channels would leave vector registers half empty. All loops therefore run over
 * `width` lanes: as many whole rows, laid end to end, as make 64 lanes. Sums have a lane each and
 * are folded at the end of a block; coefficients are repeated for each row.
 */
#include "ops/kernel.h"

enum { X, SCALE, SHIFT, MEAN, VAR };  /* inputs */
enum { TRAIN, MOMENTUM, EPS };        /* options */
enum { Y, BATCH_MEAN, BATCH_VAR };    /* outputs */

enum { LANES = 64, BLOCK = 8192, GROUP = 65536 }; /* elements */
enum { MAX_GROUPS = 64 };

typedef struct {
    int64_t rows, channels, n; /* n: elements of x */
    int64_t width;             /* lanes of a wide row, a multiple of channels */
    int64_t block, group;      /* elements in one; a multiple of width, of block */
    int64_t groups;
} plan;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Element i of x. */
static inline void *at(const lt_tensor *x, int64_t i)
{
    return (char *)x->data + (size_t)i * lt_dtype_bytes((lt_dtype)x->dtype);
}

static plan plan_for(const lt_tensor *x)
{
    plan p = {.rows = 1, .channels = x->dims[x->ndim - 1], .n = x->count};
    for (int i = 0; i < x->ndim - 1; i++)
        p.rows *= x->dims[i];
    if (p.channels == 0) {
        p.block = p.group = 1;
        return p;
    }
    p.width = p.channels;
    if (p.channels < LANES)
        p.width *= (LANES + p.channels - 1) / p.channels;
    p.block = p.width < BLOCK ? BLOCK / p.width * p.width : p.width;
    int64_t blocks = p.n > 0 ? (p.n + p.block - 1) / p.block : 1; /* of an empty shard: zeros */
    p.groups = least(p.n / GROUP + 1, MAX_GROUPS);
    p.group = (blocks + p.groups - 1) / p.groups * p.block;
    p.groups = (blocks * p.block + p.group - 1) / p.group;
    return p;
}

/* Scratch, counted in doubles: four wide rows of coefficients; then for each group its two sums,
 * the two of its current block, and three wide rows of lanes. */
static int64_t group_room(const plan *p) { return (4 * p->channels + 3 * p->width + 7) / 8 * 8; }

static double *group_sums(const lt_call *c, const plan *p, int64_t g)
{
    return (double *)c->scratch + 4 * p->width + g * group_room(p);
}

static size_t scratch(const lt_call *c, bool backward)
{
    (void)backward;
    plan p = plan_for(c->in[X]);
    return (size_t)(4 * p.width + p.groups * group_room(&p)) * sizeof(double);
}

/* ==== Sums over rows ========================================================================== */

/* Moments are (2, channels): means, and sums of squared deviations from them. Those of `more` are
 * merged into `all`. */
LT_SIMD static void merge(int64_t channels, double *restrict all, int64_t rows,
                          const double *restrict more, int64_t more_rows)
{
    double part = (double)more_rows / (double)(rows + more_rows), weight = (double)rows * part;
    for (int64_t k = 0; k < channels; k++) {
        double d = more[k] - all[k];
        all[k] += d * part;
        all[channels + k] += more[channels + k] + d * d * weight;
    }
}

/* The moments of the n elements of a block. */
LT_SIMD static void block_moments(lt_dtype dtype, const void *block, int64_t n, const plan *p,
                                  void *lanes, double *restrict moments)
{
    int64_t channels = p->channels, width = p->width;
    LT_FLOATS(dtype, T,
        const T *restrict x = block;
        T *restrict center = lanes;
        T *restrict sum = center + width;
        T *restrict squares = sum + width;
        T rows = (T)(n / channels);
        memset(lanes, 0, (size_t)(3 * width) * sizeof(T));
        for (int64_t i = 0; i < n; i += width) {
            int64_t m = least(width, n - i);
            for (int64_t k = 0; k < m; k++)
                center[k] += x[i + k];
        }
        for (int64_t k = width - 1; k >= channels; k--)
            center[k - channels] += center[k];
        for (int64_t k = 0; k < channels; k++)
            center[k] /= rows;
        for (int64_t k = channels; k < width; k++)
            center[k] = center[k - channels];
        for (int64_t i = 0; i < n; i += width) {
            int64_t m = least(width, n - i);
            for (int64_t k = 0; k < m; k++) {
                T d = x[i + k] - center[k];
                sum[k] += d;
                squares[k] += d * d;
            }
        }
        for (int64_t k = width - 1; k >= channels; k--) {
            sum[k - channels] += sum[k];
            squares[k - channels] += squares[k];
        }
        for (int64_t k = 0; k < channels; k++) {
            double miss = (double)sum[k] / rows; /* by which rounding moved the center */
            moments[k] = center[k] + miss;
            moments[channels + k] = squares[k] - miss * sum[k];
        }
    );
}

/* Mean and biased variance of all rows. */
static void batch_moments(lt_call *c, const plan *p, void *mean, void *var)
{
    lt_dtype dtype = (lt_dtype)c->in[X]->dtype;
    int64_t channels = p->channels;
    LT_PARALLEL_FOR(c, p->n)
    for (int64_t g = 0; g < p->groups; g++) {
        double *sums = group_sums(c, p, g), *moments = sums + 2 * channels;
        double *lanes = moments + 2 * channels;
        int64_t first = g * p->group, last = least(first + p->group, p->n);
        memset(sums, 0, (size_t)(2 * channels) * sizeof *sums);
        for (int64_t i = first; i < last; i += p->block) {
            int64_t n = least(p->block, last - i);
            block_moments(dtype, at(c->in[X], i), n, p, lanes, moments);
            merge(channels, sums, (i - first) / channels, moments, n / channels);
        }
    }
    double *total = group_sums(c, p, 0);
    for (int64_t g = 1; g < p->groups; g++) {
        int64_t before = g * p->group, n = least(p->group, p->n - before);
        merge(channels, total, before / channels, group_sums(c, p, g), n / channels);
    }
    LT_FLOATS(dtype, T,
        T *m = mean;
        T *v = var;
        for (int64_t k = 0; k < channels; k++) {
            double variance = p->rows > 0 ? total[channels + k] / (double)p->rows : 0;
            m[k] = p->rows > 0 ? (T)total[k] : 0;
            v[k] = variance < 0 ? 0 : (T)variance; /* it may round below zero; a NaN stays one */
        }
    );
}

/* Adds a block's sums of dy and of dy (x - mean) to sums (2, channels). */
LT_SIMD static void block_products(lt_dtype dtype, const void *d_out, const void *block, int64_t n,
                                   const plan *p, const void *wide_mean, void *lanes,
                                   double *restrict sums)
{
    int64_t channels = p->channels, width = p->width;
    LT_FLOATS(dtype, T,
        const T *restrict dy = d_out;
        const T *restrict x = block;
        const T *restrict mean = wide_mean;
        T *restrict s = lanes;
        T *restrict t = s + width;
        memset(lanes, 0, (size_t)(2 * width) * sizeof(T));
        for (int64_t i = 0; i < n; i += width) {
            int64_t m = least(width, n - i);
            for (int64_t k = 0; k < m; k++) {
                s[k] += dy[i + k];
                t[k] += dy[i + k] * (x[i + k] - mean[k]);
            }
        }
        for (int64_t k = width - 1; k >= channels; k--) {
            s[k - channels] += s[k];
            t[k - channels] += t[k];
        }
        for (int64_t k = 0; k < channels; k++) {
            sums[k] += s[k];
            sums[channels + k] += t[k];
        }
    );
}

/* The sums (2, channels) over all rows of dy and of dy (x - mean). */
static double *batch_products(lt_call *c, const plan *p, const void *wide_mean)
{
    lt_dtype dtype = (lt_dtype)c->in[X]->dtype;
    int64_t channels = p->channels;
    LT_PARALLEL_FOR(c, p->n)
    for (int64_t g = 0; g < p->groups; g++) {
        double *sums = group_sums(c, p, g), *lanes = sums + 4 * channels;
        int64_t first = g * p->group, last = least(first + p->group, p->n);
        memset(sums, 0, (size_t)(2 * channels) * sizeof *sums);
        for (int64_t i = first; i < last; i += p->block) {
            int64_t n = least(p->block, last - i);
            block_products(dtype, at(c->d_out[Y], i), at(c->in[X], i), n, p, wide_mean, lanes,
                           sums);
        }
    }
    double *total = group_sums(c, p, 0);
    for (int64_t g = 1; g < p->groups; g++)
        for (int64_t k = 0; k < 2 * channels; k++)
            total[k] += group_sums(c, p, g)[k];
    return total;
}

/* ==== batch_norm ============================================================================== */

/* Inputs 0..n-1 are float, and f64 all or none: a half x may come with f32 parameters. */
static lt_status check_floats(const lt_call *c, int n)
{
    LT_TRY(lt__same_float(c, 1));
    lt_dtype first = (lt_dtype)c->in[0]->dtype;
    for (int i = 1; i < n; i++) {
        lt_dtype dtype = (lt_dtype)c->in[i]->dtype;
        if (!lt__is_float(dtype) || (dtype == LT_F64) != (first == LT_F64))
            return lt_fail(LT_EINVAL, "%s is %s, %s is %s; cast one of them, e.g. %s:cast('%s')",
                           lt__in_name(c, 0), lt_dtype_name(first), lt__in_name(c, i),
                           lt_dtype_name(dtype), lt__in_name(c, i), lt_dtype_name(first));
    }
    return LT_OK;
}

static lt_status shape(lt_call *c)
{
    const lt_tensor *x = c->in[X];
    LT_TRY(check_floats(c, VAR + 1));
    if (x->ndim < 2)
        return lt_fail(LT_EINVAL, "x wants at least 2 axes (..., channels), it has %d (%s)",
                       x->ndim, LT_TEXT(x));
    int64_t channels = x->dims[x->ndim - 1];
    for (int i = SCALE; i <= VAR; i++)
        LT_TRY(lt__want_dims(c, i, 1, &channels, "one value per channel"));
    LT_TRY(lt__number_in(c, MOMENTUM, 0, 1));
    LT_TRY(lt__number_in(c, EPS, 0, INFINITY));
    if (lt__flag(c, TRAIN) && plan_for(x).rows == 1)
        return lt_fail(LT_EINVAL, "train=true wants more than one value per channel, x has one "
                       "(%s); use a larger batch or train=false", LT_TEXT(x));
    lt__spec_like(c, Y, x);
    lt__spec(c, BATCH_MEAN, x->dtype == LT_F64 ? LT_F64 : LT_F32, 1, &channels);
    c->spec[BATCH_VAR] = c->spec[BATCH_MEAN];
    return LT_OK;
}

/* y = (x - mean) factor + shift */
LT_SIMD static void block_forward(lt_dtype dtype, void *out, const void *in, int64_t n,
                                  int64_t width, const void *coefs)
{
    LT_FLOATS(dtype, T,
        T *restrict y = out;
        const T *restrict x = in;
        const T *restrict mean = coefs;
        const T *restrict factor = mean + width;
        const T *restrict shift = factor + width;
        for (int64_t i = 0; i < n; i += width) {
            int64_t m = least(width, n - i);
            for (int64_t k = 0; k < m; k++)
                y[i + k] = (x[i + k] - mean[k]) * factor[k] + shift[k];
        }
    );
}

static lt_status forward(lt_call *c)
{
    plan p = plan_for(c->in[X]);
    lt_dtype dtype = (lt_dtype)c->in[X]->dtype;
    if (lt__flag(c, TRAIN)) {
        batch_moments(c, &p, c->out[BATCH_MEAN]->data, c->out[BATCH_VAR]->data);
    } else {
        size_t bytes = (size_t)p.channels * lt_dtype_bytes(dtype);
        memcpy(c->out[BATCH_MEAN]->data, c->in[MEAN]->data, bytes);
        memcpy(c->out[BATCH_VAR]->data, c->in[VAR]->data, bytes);
    }
    LT_FLOATS(dtype, T,
        const T *mean = c->out[BATCH_MEAN]->data;
        const T *var = c->out[BATCH_VAR]->data;
        const T *scale = c->in[SCALE]->data;
        const T *shift = c->in[SHIFT]->data;
        T *coefs = c->scratch;
        for (int64_t k = 0; k < p.width; k++) {
            int64_t j = k % p.channels;
            coefs[k] = mean[j];
            coefs[p.width + k] = (T)(scale[j] / sqrt(var[j] + lt__number(c, EPS)));
            coefs[2 * p.width + k] = shift[j];
        }
    );
    LT_PARALLEL_FOR(c, p.n)
    for (int64_t i = 0; i < p.n; i += p.block)
        block_forward(dtype, at(c->out[Y], i), at(c->in[X], i), least(p.block, p.n - i), p.width,
                      c->scratch);
    return LT_OK;
}

/* dx (+)= a dy + b (x - mean) + d */
LT_SIMD static void block_backward(lt_dtype dtype, void *d_in, const void *d_out, const void *in,
                                   int64_t n, int64_t width, const void *coefs, bool add)
{
    LT_FLOATS(dtype, T,
        T *restrict dx = d_in;
        const T *restrict dy = d_out;
        const T *restrict x = in;
        const T *restrict mean = coefs;
        const T *restrict a = mean + width;
        const T *restrict b = a + width;
        const T *restrict d = b + width;
        for (int64_t i = 0; i < n; i += width) {
            int64_t m = least(width, n - i);
            for (int64_t k = 0; k < m; k++)
                LT_PUT(add, dx[i + k], a[k] * dy[i + k] + (b[k] * (x[i + k] - mean[k]) + d[k]));
        }
    );
}

/* With h = (x - mean) r, r = 1 / sqrt(var + eps):
 *     dshift = sum dy,  dscale = sum dy h
 *     train:  dx = scale r (dy - sum dy / rows - h sum(dy h) / rows)
 *     eval:   dx = scale r dy
 * The running buffers are constants: their gradient is zero. */
static lt_status backward(lt_call *c)
{
    plan p = plan_for(c->in[X]);
    lt_dtype dtype = (lt_dtype)c->in[X]->dtype;
    double share = lt__flag(c, TRAIN) && p.rows > 0 ? 1 / (double)p.rows : 0;
    LT_FLOATS(dtype, T,
        const T *mean = c->out[BATCH_MEAN]->data;
        T *coefs = c->scratch;
        for (int64_t k = 0; k < p.width; k++)
            coefs[k] = mean[k % p.channels];
    );
    double *sums = batch_products(c, &p, c->scratch), *products = sums + p.channels;
    LT_FLOATS(dtype, T,
        const T *var = c->out[BATCH_VAR]->data;
        const T *scale = c->in[SCALE]->data;
        T *dscale = c->d_in[SCALE] ? c->d_in[SCALE]->data : NULL;
        T *dshift = c->d_in[SHIFT] ? c->d_in[SHIFT]->data : NULL;
        T *coefs = c->scratch;
        for (int64_t k = 0; k < p.width; k++) {
            int64_t j = k % p.channels;
            double r = 1 / sqrt(var[j] + lt__number(c, EPS));
            double a = scale[j] * r;
            coefs[p.width + k] = (T)a;
            coefs[2 * p.width + k] = (T)(-a * r * r * products[j] * share);
            coefs[3 * p.width + k] = (T)(-a * sums[j] * share);
            if (k < p.channels && dscale)
                LT_PUT(lt__adds(c, SCALE), dscale[k], (T)(r * products[k]));
            if (k < p.channels && dshift)
                LT_PUT(lt__adds(c, SHIFT), dshift[k], (T)sums[k]);
        }
    );
    for (int i = MEAN; i <= VAR; i++)
        if (c->d_in[i] && !lt__adds(c, i))
            memset(c->d_in[i]->data, 0, (size_t)p.channels * lt_dtype_bytes(dtype));
    if (!c->d_in[X])
        return LT_OK;
    LT_PARALLEL_FOR(c, p.n)
    for (int64_t i = 0; i < p.n; i += p.block)
        block_backward(dtype, at(c->d_in[X], i), at(c->d_out[Y], i), at(c->in[X], i),
                       least(p.block, p.n - i), p.width, c->scratch, lt__adds(c, X));
    return LT_OK;
}

static lt_status after(lt_call *c)
{
    plan p = plan_for(c->in[X]);
    if (!lt__flag(c, TRAIN) || p.rows == 0)
        return LT_OK;
    return lt_stats_add(c->ctx, c->in[MEAN], c->in[VAR], c->out[BATCH_MEAN], c->out[BATCH_VAR],
                        p.rows, lt__number(c, MOMENTUM));
}

const lt_op lt__op_batch_norm = {
    .sig = "batch_norm(x, scale, shift, mean, var; train=false, momentum=0.1, eps=1e-5)",
    .doc = "y = (x - mean) / sqrt(var + eps) * scale + shift for each channel, the last axis. With "
           "train=true the mean and biased var of x are used, and the buffers mean and var move by "
           "momentum when the step ends.",
    .cast = LT_CAST_ANY,
    .n_aux = 2,
    .save = LT_SAVE_IN(X) | LT_SAVE_IN(SCALE) | LT_SAVE_OUT(BATCH_MEAN) | LT_SAVE_OUT(BATCH_VAR),
    .shape = shape,
    .scratch = scratch,
    .fwd = forward,
    .bwd = backward,
    .after = after,
};

/* ==== Running statistics ====================================================================== */

/* Four tensors (channels); the first n options are counts. */
static lt_status check_statistics(const lt_call *c, int n)
{
    LT_TRY(check_floats(c, 4));
    LT_TRY(lt__want_ndim(c, 0, 1, "(channels)"));
    for (int i = 1; i < 4; i++)
        LT_TRY(lt__want_dims(c, i, 1, c->in[0]->dims, "one value per channel"));
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
            double d = (double)mean2[k] - mean[k];
            mean[k] = (T)(mean[k] + d * part);
            var[k] = (T)(var[k] * (1 - part) + var2[k] * part + d * d * part * (1 - part));
        }
    );
    return LT_OK;
}

const lt_op lt__op_batch_norm_merge = {
    .sig = "batch_norm_merge(mean, var, mean2, var2; count#, count2#)",
    .doc = "mean and biased var of count values become those of these and count2 further values, "
           "whose mean and biased var are mean2 and var2 (Chan, Golub and LeVeque, 1983).",
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
    double unbias = count > 1 ? count / (count - 1) : 1;
    LT_FLOATS(c->in[0]->dtype, T,
        T *running_mean = c->in[0]->data;
        T *running_var = c->in[1]->data;
        const T *mean = c->in[2]->data;
        const T *var = c->in[3]->data;
        for (int64_t k = 0; k < c->in[0]->count; k++) {
            running_mean[k] = (T)((1 - momentum) * running_mean[k] + momentum * mean[k]);
            running_var[k] = (T)((1 - momentum) * running_var[k] + momentum * (unbias * var[k]));
        }
    );
    return LT_OK;
}

const lt_op lt__op_batch_norm_update = {
    .sig = "batch_norm_update(running_mean, running_var, mean, var; count#, momentum#)",
    .doc = "running = (1 - momentum) * running + momentum * new for mean and var, where the biased "
           "var of count values is made unbiased by count / (count - 1); a count of 1 leaves it "
           "biased, a count of 0 moves nothing.",
    .in_place = 1 << 0 | 1 << 1,
    .shape = update_shape,
    .fwd = update_forward,
};
