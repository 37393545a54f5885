/* batch_norm_simd.c - the fast kernels of batch norm: f32 and bf16, with parameters, statistics and
 * sums in f32. Each direction reads memory twice: for its sums, and for its result.
 *
 * How the moments are made. x is cut into groups, and a group into blocks that fit in a near cache.
 * The mean of a group's first eighth is its center; then come the sums of d = x - center and of
 * d d, in f32 within a block and in double from block to block (the shifted algorithm of Chan,
 * Golub and LeVeque, Algorithms for Computing the Sample Variance, 1983). A mean far from zero
 * costs no digits: that eighth alone makes the squared deviations of the group at least an eighth
 * of rows (center - mean)^2, so rounding errors grow by 9 at the very worst. Groups are merged in
 * order by their formula for two samples. All this depends on the dims alone, so the bits do not
 * depend on the number of threads.
 *
 * Wide rows. A row of few channels is a short loop. All loops therefore run over rows of `width`
 * lanes: as many rows, laid end to end, as make 128 lanes. Sums have a lane each and are folded at
 * the end of a block; coefficients are repeated for each row. Several wide rows side by side would
 * share a lane's coefficients, but prefetchers lose track of them: one after the other is faster.
 *
 * Results are made from the last group to the first: what the sums read last is still in a cache.
 */
#include "ops/batch_norm.h"

enum { LANES = 128, LINE = 16, BLOCK = 8192, BLOCK_ROWS = 32, MAX_GROUPS = 64 };

typedef struct {
    int64_t rows, channels, n;    /* n: elements of x */
    int64_t width, room;          /* lanes of a wide row; what one takes in scratch */
    int64_t block, group, groups; /* elements in a block, in a group */
    int64_t lead;                 /* elements of a group whose mean is its center */
    bool half;
} plan;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ceil_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

static plan plan_for(const lt_tensor *x)
{
    plan p = {.rows = lt__rows_of(x), .channels = x->dims[x->ndim - 1], .n = x->count,
              .half = lt__is_half((lt_dtype)x->dtype)};
    p.width = p.channels > 0 ? p.channels : 1;
    if (p.width < LANES)
        p.width = ceil_to(LANES, p.width);
    p.room = ceil_to(p.width, LINE) + LINE; /* or all would meet in the same sets of a cache */
    int64_t rows = BLOCK / p.width;
    p.block = p.width * (rows > BLOCK_ROWS ? rows : BLOCK_ROWS);
    int64_t blocks = p.n > 0 ? (p.n + p.block - 1) / p.block : 1;
    p.group = (blocks + MAX_GROUPS - 1) / MAX_GROUPS * p.block;
    p.groups = p.n > 0 ? (p.n + p.group - 1) / p.group : 1;
    p.lead = ceil_to((p.group + 7) / 8, p.width);
    return p;
}

/* ==== Scratch ================================================================================= */

/* Wide rows of coefficients, then of sums for each thread; then the sums (2, channels) of each
 * group, in double. */
enum { AT_MEAN, AT_FACTOR, AT_SHIFT, AT_SLOPE, AT_OFFSET, COEFFICIENTS };
enum { AT_CENTER, AT_SUM, AT_PRODUCT, SUMS };

size_t lt__batch_norm_scratch(const lt_call *c, bool backward)
{
    (void)backward;
    plan p = plan_for(c->in[X]);
    return (size_t)((COEFFICIENTS + c->threads * SUMS) * p.room) * sizeof(float) +
           (size_t)(p.groups * 2 * p.channels) * sizeof(double);
}

static float *coefficients(const lt_call *c, const plan *p, int which)
{
    return (float *)c->scratch + which * p->room;
}

static float *lanes(const lt_call *c, const plan *p, int thread)
{
    return coefficients(c, p, COEFFICIENTS + thread * SUMS);
}

static double *group_sums(const lt_call *c, const plan *p, int64_t g)
{
    return (double *)lanes(c, p, c->threads) + g * 2 * p->channels;
}

/* A row of coefficients whose first channels are set: the others repeat them. */
static void repeat(const plan *p, float *row)
{
    for (int64_t k = p->channels; k < p->width; k++)
        row[k] = row[k - p->channels];
}

/* ==== Passes ================================================================================== */

/* Where a gradient comes through act: everywhere, or where y lies between the bounds, which is read
 * or made from x again. */
enum { OPEN, BY_Y, BY_X };

/* A pass over some wide rows. Arrays that it does not need are NULL. */
typedef struct {
    int64_t n, width, room;
    const float *coefs;
    float *lanes;
    const void *x, *dy, *y, *residual;
    void *out;
    bool half, add;               /* arrays hold bf16; add to what is in out */
    int gate;
    lt_bounds act;
} pass;

LT_INLINE float get(const void *from, int64_t i, bool half)
{
    return half ? lt__bf16_to_f32(((const uint16_t *)from)[i]) : ((const float *)from)[i];
}

/* To the nearest, ties to even; a NaN stays one. A form of lt__f32_to_bf16() that vectorises. */
LT_INLINE uint16_t round_bf16(float f)
{
    union { float f; uint32_t u; } v = {f};
    return (uint16_t)((f != f ? 0x7fc00000 : v.u + 0x7fff + (v.u >> 16 & 1)) >> 16);
}

/* to[i] = v, or += v. */
LT_INLINE void put(void *to, int64_t i, bool half, bool add, float v)
{
    if (add)
        v += get(to, i, half);
    if (half)
        ((uint16_t *)to)[i] = round_bf16(v);
    else
        ((float *)to)[i] = v;
}

LT_INLINE float clamp(lt_bounds act, float v)
{
    v = v < act.low ? act.low : v;
    return v > act.high ? act.high : v;
}

/* dy where act lets y pass, else 0. */
LT_INLINE float passed(lt_bounds act, float y, float dy)
{
    dy = y <= act.low ? 0 : dy;
    return y >= act.high ? 0 : dy;
}

LT_INLINE void sum_rows(const pass *p, bool half)
{
    float *restrict sum = p->lanes + AT_CENTER * p->room;
    for (int64_t i = 0; i < p->n; i += p->width) {
        int64_t m = least(p->width, p->n - i);
        LT_APART
        for (int64_t k = 0; k < m; k++)
            sum[k] += get(p->x, i + k, half);
    }
}

LT_INLINE void moment_rows(const pass *p, bool half)
{
    const float *restrict center = p->lanes + AT_CENTER * p->room;
    float *restrict sum = p->lanes + AT_SUM * p->room;
    float *restrict product = p->lanes + AT_PRODUCT * p->room;
    for (int64_t i = 0; i < p->n; i += p->width) {
        int64_t m = least(p->width, p->n - i);
        LT_APART
        for (int64_t k = 0; k < m; k++) {
            float d = get(p->x, i + k, half) - center[k];
            sum[k] += d;
            product[k] += d * d;
        }
    }
}

/* y = act((x - mean) factor + shift + residual) */
LT_INLINE void forward_rows(const pass *p, bool half, bool residual)
{
    const float *restrict mean = p->coefs + AT_MEAN * p->room;
    const float *restrict factor = p->coefs + AT_FACTOR * p->room;
    const float *restrict shift = p->coefs + AT_SHIFT * p->room;
    lt_bounds act = p->act;
    for (int64_t i = 0; i < p->n; i += p->width) {
        int64_t m = least(p->width, p->n - i);
        LT_APART
        for (int64_t k = 0; k < m; k++) {
            float v = (get(p->x, i + k, half) - mean[k]) * factor[k] + shift[k];
            if (residual)
                v += get(p->residual, i + k, half);
            put(p->out, i + k, half, false, clamp(act, v));
        }
    }
}

/* The gradient of the residual: g, the dy that passed. */
LT_INLINE void residual_rows(const pass *p, bool half, bool add)
{
    lt_bounds act = p->act;
    LT_APART
    for (int64_t i = 0; i < p->n; i++)
        put(p->out, i, half, add, passed(act, get(p->y, i, half), get(p->dy, i, half)));
}

/* The sums of g and of g (x - mean). */
LT_INLINE void product_rows(const pass *p, bool half, int gate)
{
    const float *restrict mean = p->coefs + AT_MEAN * p->room;
    const float *restrict factor = p->coefs + AT_FACTOR * p->room;
    const float *restrict shift = p->coefs + AT_SHIFT * p->room;
    float *restrict sum = p->lanes + AT_SUM * p->room;
    float *restrict product = p->lanes + AT_PRODUCT * p->room;
    lt_bounds act = p->act;
    for (int64_t i = 0; i < p->n; i += p->width) {
        int64_t m = least(p->width, p->n - i);
        LT_APART
        for (int64_t k = 0; k < m; k++) {
            float d = get(p->x, i + k, half) - mean[k], g = get(p->dy, i + k, half);
            if (gate == BY_Y)
                g = passed(act, get(p->y, i + k, half), g);
            if (gate == BY_X)
                g = passed(act, d * factor[k] + shift[k], g);
            sum[k] += g;
            product[k] += g * d;
        }
    }
}

/* dx (+)= factor g + slope (x - mean) + offset */
LT_INLINE void backward_rows(const pass *p, bool half, int gate, bool add)
{
    const float *restrict mean = p->coefs + AT_MEAN * p->room;
    const float *restrict factor = p->coefs + AT_FACTOR * p->room;
    const float *restrict shift = p->coefs + AT_SHIFT * p->room;
    const float *restrict slope = p->coefs + AT_SLOPE * p->room;
    const float *restrict offset = p->coefs + AT_OFFSET * p->room;
    lt_bounds act = p->act;
    for (int64_t i = 0; i < p->n; i += p->width) {
        int64_t m = least(p->width, p->n - i);
        LT_APART
        for (int64_t k = 0; k < m; k++) {
            float d = get(p->x, i + k, half) - mean[k], g = get(p->dy, i + k, half);
            if (gate == BY_Y)
                g = passed(act, get(p->y, i + k, half), g);
            if (gate == BY_X)
                g = passed(act, d * factor[k] + shift[k], g);
            put(p->out, i + k, half, add, factor[k] * g + (slope[k] * d + offset[k]));
        }
    }
}

/* Runs body with name as a constant that has the flag's value, so that loops in it are made without
 * the other case. */
#define FIXED(name, flag, ...)                                                                     \
    do {                                                                                           \
        if (flag) { const bool name = true; __VA_ARGS__ }                                          \
        else { const bool name = false; __VA_ARGS__ }                                              \
    } while (0)

/* The same for a gate. */
#define FIXED_GATE(name, value, ...)                                                               \
    do {                                                                                           \
        switch (value) {                                                                           \
        case OPEN: { const int name = OPEN; __VA_ARGS__ } break;                                   \
        case BY_Y: { const int name = BY_Y; __VA_ARGS__ } break;                                   \
        case BY_X: { const int name = BY_X; __VA_ARGS__ } break;                                   \
        }                                                                                          \
    } while (0)

LT_SIMD static void sum_pass(const pass *p) { FIXED(half, p->half, sum_rows(p, half);); }

LT_SIMD static void moment_pass(const pass *p) { FIXED(half, p->half, moment_rows(p, half);); }

LT_SIMD static void forward_pass(const pass *p)
{
    FIXED(half, p->half, FIXED(residual, p->residual, forward_rows(p, half, residual);););
}

LT_SIMD static void residual_pass(const pass *p)
{
    FIXED(half, p->half, FIXED(add, p->add, residual_rows(p, half, add);););
}

LT_SIMD static void product_pass(const pass *p)
{
    FIXED(half, p->half, FIXED_GATE(gate, p->gate, product_rows(p, half, gate);););
}

LT_SIMD static void backward_pass(const pass *p)
{
    FIXED(half, p->half, FIXED_GATE(gate, p->gate,
        FIXED(add, p->add, backward_rows(p, half, gate, add););););
}

/* ==== Sums ==================================================================================== */

/* Elements [first, first + n) of an array like x. */
static void *part(const lt_tensor *x, int64_t first)
{
    return x ? (char *)x->data + (size_t)first * lt_dtype_bytes((lt_dtype)x->dtype) : NULL;
}

/* A pass over n elements from first on, or those that are left. */
static pass pass_over(const lt_call *c, const plan *p, int thread, int64_t first, int64_t n)
{
    return (pass){.n = least(n, p->n - first), .width = p->width, .room = p->room,
                  .coefs = coefficients(c, p, 0), .lanes = lanes(c, p, thread),
                  .x = part(c->in[X], first), .half = p->half, .act = lt__bounds(c)};
}

/* What backward reads in such a pass. What passes of dy is the residual's gradient: once that has
 * been written, it is read instead. */
static pass gradient_over(const lt_call *c, const plan *p, int thread, int64_t first, int64_t n)
{
    pass q = pass_over(c, p, thread, first, n);
    const lt_tensor *d_residual = lt__optional(c, c->d_in, RESIDUAL);
    bool found = d_residual && !lt__adds(c, RESIDUAL);
    q.dy = part(found ? d_residual : c->d_out[Y], first);
    q.y = part(c->out[Y], first);
    q.gate = found || lt__word(c, ACT) == 0 ? OPEN : q.y ? BY_Y : BY_X;
    return q;
}

/* Adds a row of lanes, which it spoils, to the sums of the channels. */
LT_SIMD static void fold(const plan *p, float *restrict row, double *restrict sums)
{
    for (int64_t i = p->channels; i < p->width; i += p->channels)
        for (int64_t k = 0; k < p->channels; k++)
            row[k] += row[i + k];
    for (int64_t k = 0; k < p->channels; k++)
        sums[k] += row[k];
}

static void clear(const plan *p, float *rows, int n)
{
    memset(rows, 0, (size_t)(n * p->room) * sizeof *rows);
}

typedef void (*group_fn)(lt_call *c, const plan *p, int thread, int64_t g);

/* Runs fn for all groups: each thread has a run of them, and may take it from its end. */
static void each_group(lt_call *c, const plan *p, group_fn fn, bool from_end)
{
    LT_PARALLEL_FOR(c, p->n)
    for (int t = 0; t < c->threads; t++) {
        int64_t first = p->groups * t / c->threads, end = p->groups * (t + 1) / c->threads;
        for (int64_t g = first; g < end; g++)
            fn(c, p, t, from_end ? first + end - 1 - g : g);
    }
}

static int64_t end_of_group(const plan *p, int64_t g) { return least((g + 1) * p->group, p->n); }

/* The means of the channels in the first part of group g, repeated as lanes. */
static void find_center(lt_call *c, const plan *p, int thread, int64_t g)
{
    double *sums = group_sums(c, p, g);
    float *row = lanes(c, p, thread) + AT_CENTER * p->room;
    int64_t first = g * p->group, end = least(first + p->lead, p->n);
    memset(sums, 0, (size_t)p->channels * sizeof *sums);
    for (int64_t i = first; i < end; i += p->block) {
        pass q = pass_over(c, p, thread, i, least(p->block, end - i));
        clear(p, row, 1);
        sum_pass(&q);
        fold(p, row, sums);
    }
    for (int64_t k = 0; k < p->channels; k++)
        row[k] = (float)(sums[k] / (double)((end - first) / p->channels));
    repeat(p, row);
}

/* Group g's moments (2, channels): means, and sums of squared deviations from them. */
static void group_moments(lt_call *c, const plan *p, int thread, int64_t g)
{
    double *sums = group_sums(c, p, g), *squares = sums + p->channels;
    float *rows = lanes(c, p, thread), *center = rows + AT_CENTER * p->room;
    int64_t first = g * p->group, end = end_of_group(p, g);
    find_center(c, p, thread, g);
    memset(sums, 0, (size_t)(2 * p->channels) * sizeof *sums);
    for (int64_t i = first; i < end; i += p->block) {
        pass q = pass_over(c, p, thread, i, p->block);
        clear(p, rows + AT_SUM * p->room, 2);
        moment_pass(&q);
        fold(p, rows + AT_SUM * p->room, sums);
        fold(p, rows + AT_PRODUCT * p->room, squares);
    }
    double count = (double)((end - first) / p->channels);
    for (int64_t k = 0; k < p->channels; k++) {
        double miss = sums[k] / count; /* from the center to the mean */
        squares[k] -= miss * sums[k];
        sums[k] = center[k] + miss;
    }
}

/* The moments of `more` are merged into `all`. */
LT_SIMD static void merge(int64_t channels, double *restrict all, int64_t rows,
                          const double *restrict more, int64_t more_rows)
{
    double share = (double)more_rows / (double)(rows + more_rows), weight = (double)rows * share;
    for (int64_t k = 0; k < channels; k++) {
        double d = more[k] - all[k];
        all[k] += d * share;
        all[channels + k] += more[channels + k] + d * d * weight;
    }
}

/* Mean and biased variance of all rows. */
static void batch_moments(lt_call *c, const plan *p, float *mean, float *var)
{
    double *all = group_sums(c, p, 0), *squares = all + p->channels;
    each_group(c, p, group_moments, false);
    for (int64_t g = 1; g < p->groups; g++)
        merge(p->channels, all, g * p->group / p->channels, group_sums(c, p, g),
              (end_of_group(p, g) - g * p->group) / p->channels);
    for (int64_t k = 0; k < p->channels; k++) {
        double variance = squares[k] / (double)p->rows;
        mean[k] = (float)all[k];
        var[k] = variance < 0 ? 0 : (float)variance; /* it may round below zero; a NaN stays one */
    }
}

/* The residual's gradient in a block: dy, if there is no act and autograd does not hand it on. */
static void write_residual(const lt_call *c, const plan *p, int64_t first, int64_t n)
{
    lt_tensor *d_residual = lt__optional(c, c->d_in, RESIDUAL);
    if (!d_residual)
        return;
    pass q = pass_over(c, p, 0, first, n);
    q.dy = part(c->d_out[Y], first);
    q.y = c->out[Y] ? part(c->out[Y], first) : q.dy;
    q.out = part(d_residual, first);
    q.add = lt__adds(c, RESIDUAL);
    residual_pass(&q);
}

/* Group g's sums (2, channels) of g and of g (x - mean). Writes the gradient of the residual. */
static void group_products(lt_call *c, const plan *p, int thread, int64_t g)
{
    double *sums = group_sums(c, p, g);
    float *rows = lanes(c, p, thread);
    memset(sums, 0, (size_t)(2 * p->channels) * sizeof *sums);
    for (int64_t i = g * p->group; i < end_of_group(p, g); i += p->block) {
        write_residual(c, p, i, p->block);
        pass q = gradient_over(c, p, thread, i, p->block);
        clear(p, rows + AT_SUM * p->room, 2);
        product_pass(&q);
        fold(p, rows + AT_SUM * p->room, sums);
        fold(p, rows + AT_PRODUCT * p->room, sums + p->channels);
    }
}

static double *batch_products(lt_call *c, const plan *p)
{
    double *all = group_sums(c, p, 0);
    each_group(c, p, group_products, false);
    for (int64_t g = 1; g < p->groups; g++) {
        const double *more = group_sums(c, p, g);
        for (int64_t k = 0; k < 2 * p->channels; k++)
            all[k] += more[k];
    }
    return all;
}

/* ==== The kernels ============================================================================= */

/* x is f32 or bf16, the others are like it where they are there, and parameters are one of both. */
static bool ours(const lt_call *c, lt_tensor *const *like_x, int n)
{
    lt_dtype dtype = (lt_dtype)c->in[X]->dtype;
    bool same = (dtype == LT_F32 || dtype == LT_BF16) && c->in[X]->count > 0;
    for (int i = 0; i < n; i++)
        same &= !like_x[i] || like_x[i]->dtype == dtype;
    return same;
}

static void widen(const plan *p, const lt_tensor *from, float *row)
{
    lt_convert(row, LT_F32, from->data, (lt_dtype)from->dtype, (size_t)p->channels);
}

/* The coefficients of (x - mean) factor + shift. shift may be NULL. */
static void set_coefficients(const lt_call *c, const plan *p, const lt_tensor *shift)
{
    float *mean = coefficients(c, p, AT_MEAN), *factor = coefficients(c, p, AT_FACTOR);
    const float *var = c->out[BATCH_VAR]->data;
    widen(p, c->out[BATCH_MEAN], mean);
    widen(p, c->in[SCALE], factor);
    for (int64_t k = 0; k < p->channels; k++)
        factor[k] = (float)(factor[k] / sqrt(var[k] + lt__number(c, EPS)));
    repeat(p, mean);
    repeat(p, factor);
    if (!shift)
        return;
    widen(p, shift, coefficients(c, p, AT_SHIFT));
    repeat(p, coefficients(c, p, AT_SHIFT));
}

static void group_forward(lt_call *c, const plan *p, int thread, int64_t g)
{
    int64_t first = g * p->group;
    pass q = pass_over(c, p, thread, first, p->group);
    q.residual = part(lt__optional(c, c->in, RESIDUAL), first);
    q.out = part(c->out[Y], first);
    forward_pass(&q);
}

lt_status lt__batch_norm_fwd(lt_call *c)
{
    lt_tensor *like_x[] = {c->out[Y], lt__optional(c, c->in, RESIDUAL)};
    if (!ours(c, like_x, 2))
        return LT_EUNSUPPORTED;
    plan p = plan_for(c->in[X]);
    float *mean = c->out[BATCH_MEAN]->data, *var = c->out[BATCH_VAR]->data;
    if (lt__flag(c, TRAIN)) {
        batch_moments(c, &p, mean, var);
    } else {
        widen(&p, c->in[MEAN], mean);
        widen(&p, c->in[VAR], var);
    }
    set_coefficients(c, &p, c->in[SHIFT]);
    each_group(c, &p, group_forward, true);
    return LT_OK;
}

static void group_backward(lt_call *c, const plan *p, int thread, int64_t g)
{
    pass q = gradient_over(c, p, thread, g * p->group, p->group);
    q.out = part(c->d_in[X], g * p->group);
    q.add = lt__adds(c, X);
    backward_pass(&q);
}

/* Element k of the gradient of parameter i (+)= value. */
static void give(const lt_call *c, int i, int64_t k, double value)
{
    const lt_tensor *grad = c->d_in[i];
    if (grad)
        put(grad->data, k, lt__is_half((lt_dtype)grad->dtype), lt__adds(c, i), (float)value);
}

/* The formulas are those of batch_norm.c. */
lt_status lt__batch_norm_bwd(lt_call *c)
{
    lt_tensor *like_x[] = {c->d_out[Y], c->out[Y], c->d_in[X], lt__optional(c, c->d_in, RESIDUAL)};
    if (!ours(c, like_x, 4))
        return LT_EUNSUPPORTED;
    plan p = plan_for(c->in[X]);
    set_coefficients(c, &p, c->in[SHIFT]);
    double *sums = batch_products(c, &p), *products = sums + p.channels;
    double share = lt__flag(c, TRAIN) ? 1 / (double)p.rows : 0;
    const float *var = c->out[BATCH_VAR]->data, *factor = coefficients(c, &p, AT_FACTOR);
    float *slope = coefficients(c, &p, AT_SLOPE), *offset = coefficients(c, &p, AT_OFFSET);
    for (int64_t k = 0; k < p.channels; k++) {
        double r = 1 / sqrt(var[k] + lt__number(c, EPS));
        slope[k] = (float)(-factor[k] * r * r * products[k] * share);
        offset[k] = (float)(-factor[k] * sums[k] * share);
        give(c, SCALE, k, r * products[k]);
        give(c, SHIFT, k, sums[k]);
        give(c, MEAN, k, 0);
        give(c, VAR, k, 0);
    }
    repeat(&p, slope);
    repeat(&p, offset);
    if (c->d_in[X])
        each_group(c, &p, group_backward, true);
    return LT_OK;
}
