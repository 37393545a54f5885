/* batch_norm_simd.c - the fast kernels of batch norm in f32 and bf16. Parameters, statistics and
 * sums are in f32. Each direction reads memory twice: for the sums and for the result.
 *
 * Moments. x is divided into groups, and groups into blocks that fit a near cache. The center of a
 * group is the mean of its first eighth. Then d = x - center and d d are summed, in f32 within a
 * block and in double across blocks (the shifted algorithm of Chan, Golub and LeVeque, Algorithms
 * for Computing the Sample Variance, 1983). A mean far from zero costs no digits: that eighth alone
 * makes the squared deviations of the group at least an eighth of rows (center - mean)^2, so
 * rounding errors grow by a factor of 9 at worst. Groups are merged in order by their formula for
 * two samples. All this depends only on the dims, so that the bits do not depend on the number of
 * threads.
 *
 * Wide rows. A row of few channels would be a short loop. So rows are laid end to end until they
 * make at least LANES lanes, and all loops run over such wide rows of `width` lanes. Each lane has
 * its own sums, which are reduced at the end of a block. Coefficients are repeated for each row.
 * Where halves are processed in pairs, a row has two sides: first the lanes of the even channels,
 * then the odd ones.
 *
 * Results are computed from the last group to the first, as the data that the sums read last is
 * still in a cache.
 */
#include "ops/batch_norm.h"

enum { LINE = 16, BLOCK = 8192, BLOCK_ROWS = 32, MAX_GROUPS = 64 };

typedef struct {
    int64_t rows, channels, n;    /* n: elements of x */
    int64_t width, pitch;         /* lanes of a wide row; floats that one takes in scratch */
    int64_t block, group, groups; /* elements per block and per group; number of groups */
    int64_t lead;                 /* elements of a group whose mean is its center */
    int form, sides;
} plan;

static inline int64_t ceil_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

static plan plan_for(const lt_tensor *x)
{
    plan p = {.rows = lt__rows_of(x), .channels = x->dims[x->ndim - 1], .n = x->count};
    p.form = !lt__is_half((lt_dtype)x->dtype) ? FLOATS : p.channels % 2 == 0 ? PAIRS : HALVES;
    p.sides = p.form == PAIRS ? 2 : 1;
    p.width = p.channels > 0 ? p.channels : 1;
    if (p.width < LANES)
        p.width = ceil_to(LANES, p.width);
    p.pitch = ceil_to(p.width, LINE) + LINE; /* padded, so that rows do not share cache sets */
    int64_t rows = BLOCK / p.width;
    p.block = p.width * (rows > BLOCK_ROWS ? rows : BLOCK_ROWS);
    int64_t blocks = p.n > 0 ? (p.n + p.block - 1) / p.block : 1;
    p.group = (blocks + MAX_GROUPS - 1) / MAX_GROUPS * p.block;
    p.groups = p.n > 0 ? (p.n + p.group - 1) / p.group : 1;
    p.lead = ceil_to((p.group + 7) / 8, p.width);
    return p;
}

/* ==== Scratch ================================================================================= */

/* Layout: wide rows of coefficients, wide rows of sums for each thread, then the sums (2, channels)
 * of each group in double. */
size_t lt__batch_norm_scratch(const lt_call *c, bool backward)
{
    (void)backward;
    plan p = plan_for(c->in[X]);
    return (size_t)((COEFFICIENTS + c->threads * SUMS) * p.pitch) * sizeof(float) +
           (size_t)(p.groups * 2 * p.channels) * sizeof(double);
}

static float *coefficients(const lt_call *c, const plan *p, int which)
{
    return (float *)c->scratch + which * p->pitch;
}

static float *lanes(const lt_call *c, const plan *p, int thread)
{
    return coefficients(c, p, COEFFICIENTS + thread * SUMS);
}

static double *group_sums(const lt_call *c, const plan *p, int64_t g)
{
    return (double *)lanes(c, p, c->threads) + g * 2 * p->channels;
}

/* The index of a channel in the sums; below, its lane in a wide row. */
static inline int64_t place_of(const plan *p, int64_t channel)
{
    return channel % p->sides * (p->channels / p->sides) + channel / p->sides;
}

static inline int64_t lane_of(const plan *p, int64_t channel)
{
    return channel % p->sides * (p->width / p->sides) + channel / p->sides;
}

/* Fills a row of coefficients in which each channel is set once by repeating them. NaNs are
 * replaced by the canonical NaN. */
static void repeat(const plan *p, float *row)
{
    int64_t channels = p->channels / p->sides, units = p->width / p->sides;
    for (float *side = row; side < row + p->width; side += units)
        for (int64_t k = 0; k < units; k++)
            side[k] = k >= channels ? side[k - channels] : side[k] != side[k] ? NAN : side[k];
}

/* ==== Sums ==================================================================================== */

/* Describes a pass over n elements starting at `first`, or fewer at the end of x. */
static lt_pass pass_over(const lt_call *c, const plan *p, int thread, int64_t first, int64_t n)
{
    return (lt_pass){.n = lt__min(n, p->n - first) / p->sides,
                     .units = p->width / p->sides,
                     .pitch = p->pitch,
                     .coefs = coefficients(c, p, 0),
                     .center = coefficients(c, p, AT_MEAN),
                     .lanes = lanes(c, p, thread),
                     .x = lt__address(c->in[X], first),
                     .form = p->form,
                     .act = lt__bounds(c)};
}

/* Describes a backward pass. Once g, the gradient of the residual, has been written, it is read
 * instead of dy and y. */
static lt_pass gradient_over(const lt_call *c, const plan *p, int thread, int64_t first, int64_t n)
{
    lt_pass q = pass_over(c, p, thread, first, n);
    const lt_tensor *d_residual = lt__optional(c, c->d_in, RESIDUAL);
    bool found = d_residual && !lt__adds(c, RESIDUAL);
    q.dy = lt__address(found ? d_residual : c->d_out[Y], first);
    q.y = lt__address(c->out[Y], first);
    q.mode = found || lt__word(c, ACT) == 0 ? PLAIN : q.y ? ACT_OF_Y : ACT_OF_X;
    return q;
}

/* Adds a row of lanes to the sums of the channels. Overwrites the row. */
LT_SIMD static void reduce_lanes(const plan *p, float *restrict row, double *restrict sums)
{
    int64_t channels = p->channels / p->sides, units = p->width / p->sides;
    for (int side = 0; side < p->sides; side++, row += units, sums += channels) {
        for (int64_t i = channels; i < units; i += channels)
            for (int64_t k = 0; k < channels; k++)
                row[k] += row[i + k];
        for (int64_t k = 0; k < channels; k++)
            sums[k] += row[k];
    }
}

typedef void (*group_fn)(lt_call *c, const plan *p, int thread, int64_t g);

static float parameter(const lt_tensor *x, int64_t k)
{
    return lt__is_half((lt_dtype)x->dtype) ? lt__bf16_to_f32(((const uint16_t *)x->data)[k])
                                           : ((const float *)x->data)[k];
}

/* Runs fn for all groups. Each thread has a range of groups, which from_end reverses. */
static void each_group(lt_call *c, const plan *p, group_fn fn, bool from_end)
{
    LT_PARALLEL_FOR(c, p->n)
    for (int t = 0; t < c->threads; t++) {
        int64_t first = p->groups * t / c->threads, end = p->groups * (t + 1) / c->threads;
        for (int64_t g = first; g < end; g++)
            fn(c, p, t, from_end ? first + end - 1 - g : g);
    }
}

static int64_t end_of_group(const plan *p, int64_t g) { return lt__min((g + 1) * p->group, p->n); }

/* Adds the sums of g and of g (x - center) over a block to sums (2, channels). */
static void add_sums(const plan *p, const lt_pass *q, double *sums)
{
    memset(q->lanes + AT_SUM * p->pitch, 0, (size_t)(2 * p->pitch) * sizeof(float));
    lt__sum_pass(q);
    reduce_lanes(p, q->lanes + AT_SUM * p->pitch, sums);
    reduce_lanes(p, q->lanes + AT_PRODUCT * p->pitch, sums + p->channels);
}

/* Computes the sums of x - center and of its square over elements [first, end). */
static void sum_moments(lt_call *c, const plan *p, int thread, int64_t first, int64_t end,
                        double *sums)
{
    memset(sums, 0, (size_t)(2 * p->channels) * sizeof *sums);
    for (int64_t i = first; i < end; i += p->block) {
        lt_pass q = pass_over(c, p, thread, i, lt__min(p->block, end - i));
        q.mode = MOMENTS;
        q.center = q.lanes + AT_CENTER * p->pitch;
        add_sums(p, &q, sums);
    }
}

/* Computes the moments (2, channels) of group g: means, and sums of squared deviations. */
static void group_moments(lt_call *c, const plan *p, int thread, int64_t g)
{
    double *sums = group_sums(c, p, g), *squares = sums + p->channels;
    float *center = lanes(c, p, thread) + AT_CENTER * p->pitch;
    int64_t first = g * p->group, end = end_of_group(p, g), lead = lt__min(first + p->lead, end);
    memset(center, 0, (size_t)p->width * sizeof *center);
    sum_moments(c, p, thread, first, lead, sums);
    for (int64_t k = 0; k < p->channels; k++)
        center[lane_of(p, k)] =
            (float)(sums[place_of(p, k)] / (double)((lead - first) / p->channels));
    repeat(p, center);
    sum_moments(c, p, thread, first, end, sums);
    double count = (double)((end - first) / p->channels);
    for (int64_t k = 0; k < p->channels; k++) {
        int64_t at = place_of(p, k);
        double miss = sums[at] / count; /* distance from the center to the mean */
        squares[at] -= miss * sums[at];
        sums[at] = center[lane_of(p, k)] + miss;
    }
}

/* Merges the moments of `more` into `all`. */
LT_SIMD static void merge(int64_t channels, double *restrict all, int64_t rows,
                          const double *restrict more, int64_t more_rows)
{
    double share = (double)more_rows / (double)(rows + more_rows), weight = (double)rows * share;
    for (int64_t k = 0; k < channels; k++) {
        lt_moments m = lt__merged((lt_moments){all[k], all[channels + k]},
                                  (lt_moments){more[k], more[channels + k]}, share, weight);
        all[k] = m.mean;
        all[channels + k] = m.squares;
    }
}

/* Computes the moments of the batch, in the sums of the first group. */
static void batch_moments(lt_call *c, const plan *p)
{
    each_group(c, p, group_moments, false);
    for (int64_t g = 1; g < p->groups; g++)
        merge(p->channels, group_sums(c, p, 0), g * p->group / p->channels, group_sums(c, p, g),
              (end_of_group(p, g) - g * p->group) / p->channels);
}

/* Computes the mean and the biased variance over all rows. */
static void batch_statistics(lt_call *c, const plan *p, float *mean, float *var)
{
    const double *means = group_sums(c, p, 0), *squares = means + p->channels;
    if (!c->summed)
        batch_moments(c, p);
    if (lt__is_first_run(c))
        c->sums[0] = (double)p->rows;
    for (int64_t k = 0; k < p->channels; k++) {
        lt_moments m = {means[place_of(p, k)], squares[place_of(p, k)]};
        double center = parameter(c->in[MEAN], k);
        if (lt__is_first_run(c))
            lt__write_moments(c, k, center, m);
        if (c->summed)
            m = lt__read_moments(c, k, center);
        double variance = m.squares / lt__all_rows(c);
        mean[k] = (float)m.mean;
        /* rounding may give a value below zero; a NaN stays a NaN */
        var[k] = variance < 0 ? 0 : (float)variance;
    }
}

/* Writes the residual's gradient in a block. Without an activation it is dy, which autograd may
 * pass on itself instead of requesting it here. */
static void write_residual(const lt_call *c, const plan *p, int64_t first, int64_t n)
{
    lt_tensor *d_residual = lt__optional(c, c->d_in, RESIDUAL);
    if (!d_residual)
        return;
    lt_pass q = pass_over(c, p, 0, first, n);
    q.dy = lt__address(c->d_out[Y], first);
    q.y = c->out[Y] ? lt__address(c->out[Y], first) : q.dy;
    q.out = lt__address(d_residual, first);
    q.add = lt__adds(c, RESIDUAL);
    lt__residual_pass(&q);
}

/* Computes the sums (2, channels) of g and of g (x - mean) over group g. Writes the gradient of the
 * residual. */
static void group_products(lt_call *c, const plan *p, int thread, int64_t g)
{
    double *sums = group_sums(c, p, g);
    memset(sums, 0, (size_t)(2 * p->channels) * sizeof *sums);
    for (int64_t i = g * p->group; i < end_of_group(p, g); i += p->block) {
        write_residual(c, p, i, p->block);
        lt_pass q = gradient_over(c, p, thread, i, p->block);
        add_sums(p, &q, sums);
    }
}

/* Computes those sums over the batch, in the sums of the first group. */
static void batch_products(lt_call *c, const plan *p)
{
    double *all = group_sums(c, p, 0);
    each_group(c, p, group_products, false);
    for (int64_t g = 1; g < p->groups; g++) {
        const double *more = group_sums(c, p, g);
        for (int64_t k = 0; k < 2 * p->channels; k++)
            all[k] += more[k];
    }
}

/* ==== The kernels ============================================================================= */

/* Whether x is f32 or bf16 and not empty, and all present tensors of like_x have its dtype. */
static bool ours(const lt_call *c, lt_tensor *const *like_x, int n)
{
    lt_dtype dtype = (lt_dtype)c->in[X]->dtype;
    bool same = (dtype == LT_F32 || dtype == LT_BF16) && c->in[X]->count > 0;
    for (int i = 0; i < n; i++)
        same &= !like_x[i] || like_x[i]->dtype == dtype;
    return same;
}

/* Sets the coefficients of (x - mean) factor + shift. shift may be NULL. */
static void set_coefficients(const lt_call *c, const plan *p, const lt_tensor *shift)
{
    float *means = coefficients(c, p, AT_MEAN), *factors = coefficients(c, p, AT_FACTOR);
    float *shifts = coefficients(c, p, AT_SHIFT);
    const float *mean = c->out[BATCH_MEAN]->data, *var = c->out[BATCH_VAR]->data;
    for (int64_t k = 0; k < p->channels; k++) {
        int64_t lane = lane_of(p, k);
        means[lane] = mean[k];
        factors[lane] =
            (float)lt__norm_factor(parameter(c->in[SCALE], k), var[k], lt__number(c, EPS));
        shifts[lane] = shift ? parameter(shift, k) : 0;
    }
    repeat(p, means);
    repeat(p, factors);
    repeat(p, shifts);
}

static void group_forward(lt_call *c, const plan *p, int thread, int64_t g)
{
    int64_t first = g * p->group;
    lt_pass q = pass_over(c, p, thread, first, p->group);
    q.residual = lt__address(lt__optional(c, c->in, RESIDUAL), first);
    q.out = lt__address(c->out[Y], first);
    q.nontemporal = p->form == FLOATS && lt__bypasses_cache((size_t)p->n * sizeof(float));
    lt__forward_pass(&q);
    if (q.nontemporal)
        lt__nontemporal_fence();
}

lt_status lt__batch_norm_fwd(lt_call *c)
{
    lt_tensor *like_x[] = {c->out[Y], lt__optional(c, c->in, RESIDUAL)};
    if (!ours(c, like_x, 2))
        return LT_EUNSUPPORTED;
    plan p = plan_for(c->in[X]);
    float *mean = c->out[BATCH_MEAN]->data, *var = c->out[BATCH_VAR]->data;
    if (lt__flag(c, TRAIN)) {
        batch_statistics(c, &p, mean, var);
        if (lt__is_first_run(c))
            return LT_OK;
        LT_TRY(lt__check_rows(c));
    } else {
        for (int64_t k = 0; k < p.channels; k++) {
            mean[k] = parameter(c->in[MEAN], k);
            var[k] = parameter(c->in[VAR], k);
        }
    }
    set_coefficients(c, &p, c->in[SHIFT]);
    each_group(c, &p, group_forward, true);
    return LT_OK;
}

static void group_backward(lt_call *c, const plan *p, int thread, int64_t g)
{
    lt_pass q = gradient_over(c, p, thread, g * p->group, p->group);
    q.out = lt__address(c->d_in[X], g * p->group);
    q.add = lt__adds(c, X);
    lt__backward_pass(&q);
}

/* Element k of the gradient of parameter i (+)= value. */
static void give(const lt_call *c, int i, int64_t k, double value)
{
    const lt_tensor *grad = c->d_in[i];
    if (!grad)
        return;
    float v = (float)value + (lt__adds(c, i) ? parameter(grad, k) : 0);
    if (lt__is_half((lt_dtype)grad->dtype))
        ((uint16_t *)grad->data)[k] = lt__f32_to_bf16(v);
    else
        ((float *)grad->data)[k] = v;
}

/* The gradients of the parameters are sums over this rank's rows only. */
static void give_parameters(lt_call *c, const plan *p)
{
    const double *sums = group_sums(c, p, 0), *products = sums + p->channels;
    const float *var = c->out[BATCH_VAR]->data;
    for (int64_t k = 0; k < p->channels; k++) {
        double sum = sums[place_of(p, k)];
        double r = 1 / sqrt(var[k] + lt__number(c, EPS)), product = r * products[place_of(p, k)];
        give(c, SCALE, k, product);
        give(c, SHIFT, k, sum);
        give(c, MEAN, k, 0);
        give(c, VAR, k, 0);
        if (lt__is_first_run(c)) {
            lt__sums_of(c, k)[0] = sum;
            lt__sums_of(c, k)[1] = product;
        }
    }
}

/* The gradient of x depends on the rows of all ranks. */
static void set_slopes(const lt_call *c, const plan *p)
{
    const double *sums = group_sums(c, p, 0), *products = sums + p->channels;
    const float *var = c->out[BATCH_VAR]->data, *factor = coefficients(c, p, AT_FACTOR);
    float *slope = coefficients(c, p, AT_SLOPE), *offset = coefficients(c, p, AT_OFFSET);
    double share = lt__flag(c, TRAIN) ? 1 / lt__all_rows(c) : 0;
    for (int64_t k = 0; k < p->channels; k++) {
        double sum = sums[place_of(p, k)], product = products[place_of(p, k)];
        double r = 1 / sqrt(var[k] + lt__number(c, EPS));
        int64_t lane = lane_of(p, k);
        if (c->summed) {
            sum = lt__sums_of(c, k)[0];
            product = lt__sums_of(c, k)[1] / r;
        }
        slope[lane] = lt__norm_slope(factor[lane], var[k], lt__number(c, EPS), product, share);
        offset[lane] = lt__norm_offset(factor[lane], sum, share);
    }
    repeat(p, slope);
    repeat(p, offset);
}

/* See batch_norm.c for the formulas. */
lt_status lt__batch_norm_bwd(lt_call *c)
{
    lt_tensor *like_x[] = {c->d_out[Y], c->out[Y], c->d_in[X], lt__optional(c, c->d_in, RESIDUAL)};
    if (!ours(c, like_x, 4))
        return LT_EUNSUPPORTED;
    plan p = plan_for(c->in[X]);
    set_coefficients(c, &p, c->in[SHIFT]);
    if (!c->summed) {
        batch_products(c, &p);
        give_parameters(c, &p);
    }
    if (lt__is_first_run(c)) {
        c->sums[0] = (double)p.rows;
        return LT_OK;
    }
    set_slopes(c, &p);
    if (c->d_in[X])
        each_group(c, &p, group_backward, true);
    return LT_OK;
}
