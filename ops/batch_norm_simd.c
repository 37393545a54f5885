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
 * Wide rows. A row of few channels does not fill vectors. All loops run over rows of `width` lanes:
 * as many rows, laid end to end, as make 128 lanes and whole vectors. Sums have a lane each and are
 * folded at the end of a block; coefficients are repeated for each row. Rows are taken one after the
 * other: several side by side would share a lane's coefficients, but prefetchers lose track of them.
 *
 * Results are made from the last block to the first: what the sums read last is still in the cache.
 */
#include "ops/batch_norm.h"
#include "ops/simd.h"

enum { LANES = 128, BLOCK = 8192, BLOCK_ROWS = 32, MAX_GROUPS = 64 };

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
    if (p.width < LANES) {
        p.width *= LT_LANES / least(p.width & -p.width, LT_LANES);
        p.width = ceil_to(LANES, p.width);
    }
    p.room = ceil_to(p.width, LT_LANES) + LT_LANES; /* or all would meet in the same cache sets */
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
    for (int64_t k = p->width; k < p->room; k++)
        row[k] = 0;
}

/* ==== Steps =================================================================================== */

/* A pass over some wide rows. Arrays that the pass does not need are NULL. */
typedef struct {
    int64_t n, width, room;
    const float *coefs;
    float *lanes;
    const void *x, *dy, *y, *residual;
    void *out, *d_residual;
    bool add, add_residual, act;
    lt_bounds bounds;
} pass;

/* Room for fewer elements than a vector has. */
typedef union {
    float full[LT_LANES];
    uint16_t half[LT_LANES];
} few;

/* n elements from i on, and zeros up to 16. */
LT_INLINE lt_vec load(const void *from, int64_t i, int n, bool half)
{
    size_t bytes = half ? sizeof(uint16_t) : sizeof(float);
    const void *at = (const char *)from + (size_t)i * bytes;
    few part = {{0}};
    if (n < LT_LANES)
        at = memcpy(&part, at, (size_t)n * bytes);
    return half ? lt__load_bf16(at) : lt__load_f32(at);
}

/* to[i..] = v, or += v, for n elements. */
LT_INLINE void store(void *to, int64_t i, int n, bool half, bool add, lt_vec v)
{
    size_t bytes = half ? sizeof(uint16_t) : sizeof(float);
    void *at = (char *)to + (size_t)i * bytes;
    few part;
    if (add)
        v += load(to, i, n, half);
    void *full = n < LT_LANES ? &part : at;
    half ? lt__store_bf16(full, v) : lt__store_f32(full, v);
    if (n < LT_LANES)
        memcpy(at, &part, (size_t)n * bytes);
}

LT_INLINE lt_vec clamp(lt_bounds act, lt_vec v)
{
    LT_EACH_LANE(l) v[l] = v[l] < act.low ? act.low : v[l];
    LT_EACH_LANE(l) v[l] = v[l] > act.high ? act.high : v[l];
    return v;
}

/* dy where act let y pass, else 0. */
LT_INLINE lt_vec mask(lt_bounds act, lt_vec y, lt_vec dy)
{
    LT_EACH_LANE(l) dy[l] = y[l] <= act.low ? 0 : dy[l];
    LT_EACH_LANE(l) dy[l] = y[l] >= act.high ? 0 : dy[l];
    return dy;
}

LT_INLINE lt_vec coefficient(const pass *p, int which, int64_t k)
{
    return lt__load_f32(p->coefs + which * p->room + k);
}

/* What x - mean becomes before a residual and act. */
LT_INLINE lt_vec normalised(const pass *p, int64_t k, lt_vec d)
{
    return d * coefficient(p, AT_FACTOR, k) + coefficient(p, AT_SHIFT, k);
}

LT_INLINE void add_to(float *sum, lt_vec v) { lt__store_f32(sum, lt__load_f32(sum) + v); }

/* A step takes n elements from i on, which are lanes k.. of a wide row. half: they are bf16. */
typedef void (*step)(const pass *p, int64_t i, int64_t k, int n, bool half);

LT_INLINE void sum_step(const pass *p, int64_t i, int64_t k, int n, bool half)
{
    add_to(p->lanes + AT_CENTER * p->room + k, load(p->x, i, n, half));
}

LT_INLINE void moment_step(const pass *p, int64_t i, int64_t k, int n, bool half)
{
    float *sums = p->lanes + k;
    lt_vec d = load(p->x, i, n, half) - lt__load_f32(sums + AT_CENTER * p->room);
    for (int l = n; l < LT_LANES; l++)
        d[l] = 0;
    add_to(sums + AT_SUM * p->room, d);
    add_to(sums + AT_PRODUCT * p->room, d * d);
}

/* y = act((x - mean) factor + shift + residual) */
LT_INLINE void forward_step(const pass *p, int64_t i, int64_t k, int n, bool half)
{
    lt_vec v = normalised(p, k, load(p->x, i, n, half) - coefficient(p, AT_MEAN, k));
    if (p->residual)
        v += load(p->residual, i, n, half);
    store(p->out, i, n, half, false, p->act ? clamp(p->bounds, v) : v);
}

/* dy where act let y pass, else 0; d is x - mean. */
LT_INLINE lt_vec passed(const pass *p, int64_t i, int64_t k, int n, bool half, lt_vec d)
{
    lt_vec dy = load(p->dy, i, n, half);
    if (!p->act)
        return dy;
    return mask(p->bounds, p->y ? load(p->y, i, n, half) : normalised(p, k, d), dy);
}

/* The sums of g, the dy that passed, and of g (x - mean); g is the gradient of the residual. */
LT_INLINE void product_step(const pass *p, int64_t i, int64_t k, int n, bool half)
{
    float *sums = p->lanes + k;
    lt_vec d = load(p->x, i, n, half) - coefficient(p, AT_MEAN, k);
    lt_vec g = passed(p, i, k, n, half, d);
    add_to(sums + AT_SUM * p->room, g);
    add_to(sums + AT_PRODUCT * p->room, g * d);
    if (p->d_residual)
        store(p->d_residual, i, n, half, p->add_residual, g);
}

/* dx (+)= factor g + slope (x - mean) + offset */
LT_INLINE void backward_step(const pass *p, int64_t i, int64_t k, int n, bool half)
{
    lt_vec d = load(p->x, i, n, half) - coefficient(p, AT_MEAN, k);
    lt_vec g = passed(p, i, k, n, half, d);
    store(p->out, i, n, half, p->add,
          coefficient(p, AT_FACTOR, k) * g +
              (coefficient(p, AT_SLOPE, k) * d + coefficient(p, AT_OFFSET, k)));
}

LT_INLINE void walk(const pass *from, step fn, bool half)
{
    const pass p = *from;
    for (int64_t i = 0; i < p.n; i += p.width) {
        int64_t m = least(p.width, p.n - i), k = 0;
        for (; k + LT_LANES <= m; k += LT_LANES)
            fn(&p, i + k, k, LT_LANES, half);
        if (k < m)
            fn(&p, i + k, k, (int)(m - k), half);
    }
}

/* Each step for both dtypes. */
#define PASS(name)                                                                                 \
    LT_SIMD static void name##_f32(const pass *p) { walk(p, name##_step, false); }                 \
    LT_SIMD static void name##_bf16(const pass *p) { walk(p, name##_step, true); }                 \
    static void name##_pass(const pass *p, bool half) { (half ? name##_bf16 : name##_f32)(p); }

PASS(sum)
PASS(moment)
PASS(forward)
PASS(product)
PASS(backward)

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
                  .x = part(c->in[X], first), .act = lt__word(c, ACT) != 0,
                  .bounds = lt__bounds(c)};
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
        sum_pass(&q, p->half);
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
        moment_pass(&q, p->half);
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

/* Group g's sums (2, channels) of g and of g (x - mean). Writes the gradient of the residual. */
static void group_products(lt_call *c, const plan *p, int thread, int64_t g)
{
    double *sums = group_sums(c, p, g);
    float *rows = lanes(c, p, thread);
    memset(sums, 0, (size_t)(2 * p->channels) * sizeof *sums);
    for (int64_t i = g * p->group; i < end_of_group(p, g); i += p->block) {
        pass q = pass_over(c, p, thread, i, p->block);
        q.dy = part(c->d_out[Y], i);
        q.y = part(c->out[Y], i);
        q.d_residual = part(lt__optional(c, c->d_in, RESIDUAL), i);
        q.add_residual = lt__adds(c, RESIDUAL);
        clear(p, rows + AT_SUM * p->room, 2);
        product_pass(&q, p->half);
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
    forward_pass(&q, p->half);
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
    int64_t first = g * p->group;
    lt_tensor *d_residual = lt__optional(c, c->d_in, RESIDUAL);
    pass q = pass_over(c, p, thread, first, p->group);
    q.dy = part(c->d_out[Y], first);
    q.y = part(c->out[Y], first);
    if (d_residual && !lt__adds(c, RESIDUAL)) { /* it is what passed of dy */
        q.dy = part(d_residual, first);
        q.act = false;
    }
    q.out = part(c->d_in[X], first);
    q.add = lt__adds(c, X);
    backward_pass(&q, p->half);
}

/* grad[k] (+)= value, for a parameter. */
static void put(const lt_call *c, int i, int64_t k, double value)
{
    lt_tensor *grad = c->d_in[i];
    if (!grad)
        return;
    if (grad->dtype == LT_F32) {
        LT_PUT(lt__adds(c, i), ((float *)grad->data)[k], (float)value);
        return;
    }
    uint16_t *half = (uint16_t *)grad->data + k;
    *half = lt__f32_to_bf16((lt__adds(c, i) ? lt__bf16_to_f32(*half) : 0) + (float)value);
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
        put(c, SCALE, k, r * products[k]);
        put(c, SHIFT, k, sums[k]);
        for (int i = MEAN; i <= VAR; i++)
            if (!lt__adds(c, i))
                put(c, i, k, 0);
    }
    repeat(&p, slope);
    repeat(&p, offset);
    if (c->d_in[X])
        each_group(c, &p, group_backward, true);
    return LT_OK;
}
