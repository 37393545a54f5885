/* batch_norm.cu - the CUDA side of batch_norm.c.
 *
 * Memory traffic. In training, forward reads x for the moments, then x and the residual for y; in
 * evaluation, only x and the residual for y. Backward reads x and dy for the sums, and y if the
 * activation's gradient depends on it; then x and dy again, and y, for dx. The gradient of a
 * residual is written in the first pass, and the second pass reads it instead of dy and y.
 *
 * Moments. The center of a block is the mean of the first rows of its part, which are still cached
 * when they are read again. The sums of d = x - center and of d d are in f32 within a thread, over
 * at most 256 rows, because many GPUs have few f64 units, and in double beyond that: the shifted
 * algorithm of batch_norm_simd.c. Parts are joined by the formula for two samples, in a tree that
 * depends only on the shape.
 *
 * Wide rows. Rows are laid end to end until they make packs of 16 bytes, and enough packs for the
 * threads of a block. Only the last wide row may be short. Coefficients are repeated for each row
 * in a wide row. Each lane has its own sums, which are joined with the sums of other parts.
 */
#include "ops/batch_norm.h"
#include "ops/cuda/rows.h"

/* Blocks of sums: two waves on the 132 multiprocessors of an H100 or H200. In f16 and bf16, four
 * blocks of forward fit one, and three of backward, which need more registers. */
enum { BLOCKS_FWD = 2 * 132 * 4, BLOCKS_BWD = 2 * 132 * 3 };
enum { MIN_PACKS = 8 }; /* smallest number of packs per wide row */
enum { LEAD = 4 };      /* rows per thread, whose mean is the center of a part */

typedef struct plan {
    int64_t n, channels;    /* n: elements of x */
    int64_t width, whole;   /* lanes of a wide row; number of full wide rows */
    int64_t packs;          /* packs per wide row */
    lt_column_plan columns; /* plan over columns of packs */
} plan;

static plan plan_for(const lt_tensor *x, bool backward)
{
    int V = x->dtype == LT_F32 ? 4 : 8;
    plan p = {};
    p.n = x->count;
    p.channels = x->dims[x->ndim - 1];
    p.width = p.channels > 0 ? p.channels : 1;
    while (p.width % V != 0 || p.width < MIN_PACKS * V)
        p.width *= 2;
    p.packs = p.width / V;
    p.whole = p.n / p.width;
    p.columns =
        lt__columns_over(lt__ceil_div(p.n, p.width), p.packs, backward ? BLOCKS_BWD : BLOCKS_FWD);
    return p;
}

/* Layout of the scratch: wide rows of coefficients, then the moments or sums of each part. */
static float *coefficients(const lt_call *c) { return (float *)c->scratch; }

static size_t coefficient_bytes(const plan *p)
{
    return lt__aligned((size_t)(COEFFICIENTS * p->width) * sizeof(float));
}

static lt_two *part_sums(const lt_call *c, const plan *p)
{
    return (lt_two *)((char *)c->scratch + coefficient_bytes(p));
}

static size_t scratch(const lt_call *c, bool backward)
{
    plan p = plan_for(c->in[X], backward);
    return coefficient_bytes(&p) + (size_t)(p.columns.parts * p.width) * sizeof(lt_two);
}

/* ==== Sums ==================================================================================== */

typedef struct channels {
    plan p;
    float *coefs, *mean, *var; /* wide rows; one value for each channel */
    lt_numbers scale, shift;   /* shift may be NULL */
    double eps;
} channels;

static channels channels_of(const lt_call *c, const plan *p)
{
    channels k = {};
    k.p = *p;
    k.coefs = coefficients(c);
    k.mean = (float *)c->out[BATCH_MEAN]->data;
    k.var = (float *)c->out[BATCH_VAR]->data;
    k.scale = lt__numbers_of(c->in[SCALE]);
    k.shift = lt__numbers_of(c->in[SHIFT]);
    k.eps = lt__number(c, EPS);
    return k;
}

__device__ static float factor_of(const channels &c, int64_t k)
{
    return (float)lt__norm_factor(lt__number_at(c.scale, k), c.var[k], c.eps);
}

template <class E> struct sum_pass {
    channels c;
    const E *x, *dy, *y;
    E *d_residual; /* receives g, the dy that the activation passes, or NULL */
    lt_bounds act;
    bool add, wide; /* add to d_residual; arrays are aligned for packs */
};

/* Loads the coefficients of V lanes. */
template <int V> __device__ void take(const float *row, int64_t lane, float (&to)[V])
{
    lt_pack<float, V> from = *(const lt_pack<float, V> *)(row + lane);
    for (int k = 0; k < V; k++)
        to[k] = from.at[k];
}

/* Sums value `value` of one column over the lanes of a block. The thread's column is its index
 * modulo `columns`. */
template <int V>
__device__ double sum_of_lanes(const float (*all)[LT_THREADS], int columns, int lanes, int value)
{
    double sum = 0;
    const float *from = all[value] + threadIdx.x % columns;
    for (int i = 0; i < lanes; i++)
        sum += (double)from[i * columns];
    return sum;
}

/* Sets centers[k columns + column] to the mean of the first rows of the part. The short row is used
 * only if the part has no other. */
template <class E, int V>
__device__ void find_centers(const sum_pass<E> &q, const lt_column &at, float (*all)[LT_THREADS],
                             float *centers)
{
    const lt_column_plan &c = q.c.p.columns;
    int64_t end = at.last > q.c.p.whole ? q.c.p.whole : at.last;
    if (end <= at.first)
        end = at.first + 1;
    if (end > at.first + LEAD * c.lanes)
        end = at.first + LEAD * c.lanes;
    float sum[V] = {};
    for (int64_t r = at.first + at.lane; at.valid && r < end; r += c.lanes) {
        lt_pack<E, V> x = lt__load<V>(q.x, r * q.c.p.width + at.index * V, q.c.p.n, q.wide);
        for (int k = 0; k < V; k++)
            sum[k] += lt__value(x.at[k]);
    }
    for (int k = 0; k < V; k++)
        all[k][threadIdx.x] = sum[k];
    __syncthreads();
    int k = (int)threadIdx.x / c.columns;
    if (k < V)
        centers[threadIdx.x] =
            (float)(sum_of_lanes<V>(all, c.columns, c.lanes, k) / (double)(end - at.first));
    __syncthreads();
}

template <int V> struct sums_of {
    float center[V], factor[V], shift[V];
    float sum[V], product[V];
};

/* Sets the mean and, for ACT_OF_X, the factor and the shift of the thread's lanes. Each thread of
 * the block computes them for one lane. */
template <int MODE, class E, int V>
__device__ void find_coefficients(const sum_pass<E> &q, const lt_column &at,
                                  float (*all)[LT_THREADS], sums_of<V> &s)
{
    int64_t lane = (at.index - at.among) * V + threadIdx.x;
    if (lane < q.c.p.width) {
        int64_t k = lane % q.c.p.channels;
        all[0][threadIdx.x] = q.c.mean[k];
        all[1][threadIdx.x] = MODE == ACT_OF_X ? factor_of(q.c, k) : 0;
        all[2][threadIdx.x] = MODE == ACT_OF_X ? lt__number_at(q.c.shift, k) : 0;
    }
    __syncthreads();
    for (int k = 0; k < V; k++) {
        s.center[k] = all[0][at.among * V + k];
        s.factor[k] = all[1][at.among * V + k];
        s.shift[k] = all[2][at.among * V + k];
    }
    __syncthreads();
}

/* Loads a pack. All elements of a WHOLE row exist, so there is no bounds check. */
template <bool WHOLE, int V, class E>
__device__ lt_pack<E, V> load(const sum_pass<E> &q, const E *array, int64_t i)
{
    return lt__load<V>(array, i, WHOLE ? INT64_MAX : q.c.p.n, q.wide);
}

/* Adds the V elements at i, or as many as x has there. */
template <int MODE, bool WHOLE, class E, int V>
__device__ void add_pack(const sum_pass<E> &q, int64_t i, sums_of<V> &s)
{
    enum { WRITES = MODE == PLAIN || MODE == ACT_OF_Y }; /* with ACT_OF_X there is no residual */
    lt_pack<E, V> x = load<WHOLE, V>(q, q.x, i), dy = {}, y = {}, out = {};
    if (MODE != MOMENTS)
        dy = load<WHOLE, V>(q, q.dy, i);
    if (MODE == ACT_OF_Y)
        y = load<WHOLE, V>(q, q.y, i);
    if (WRITES && q.d_residual && q.add)
        out = load<WHOLE, V>(q, (const E *)q.d_residual, i);
    for (int k = 0; k < V; k++) {
        if (!WHOLE && i + k >= q.c.p.n)
            break;
        float d = lt__value(x.at[k]) - s.center[k];
        float g = MODE == MOMENTS ? d : lt__value(dy.at[k]);
        if (MODE == ACT_OF_Y)
            g = lt__act_grad(q.act, lt__value(y.at[k]), g);
        if (MODE == ACT_OF_X)
            g = lt__act_grad(q.act, d * s.factor[k] + s.shift[k], g);
        s.sum[k] += g;
        s.product[k] += g * d;
        if (WRITES)
            out.at[k] = lt_element<E>::of(q.add ? lt__value(out.at[k]) + g : g);
    }
    if (WRITES && q.d_residual)
        lt__store(q.d_residual, i, WHOLE ? INT64_MAX : q.c.p.n, q.wide, out);
}

/* The number of rows of a part that contain this lane. */
__device__ static int64_t rows_in(const plan &p, int64_t part, int64_t lane)
{
    int64_t first = part * p.columns.part, last = first + p.columns.part;
    last = last < p.columns.rows ? last : p.columns.rows;
    bool is_short = last > p.whole && p.whole * p.width + lane >= p.n;
    return last - first - is_short;
}

/* MOMENTS: computes the mean of each lane over a part, and the squared deviations from it.
 * Otherwise the sums of g, which is the dy that the activation passes, and of g (x - mean). */
template <class E, int MODE>
LT_KERNEL sum_kernel(const __grid_constant__ sum_pass<E> q, lt_two *parts)
{
    enum { V = 16 / sizeof(E) };
    __shared__ float all[2 * V][LT_THREADS], centers[LT_THREADS];
    const plan &p = q.c.p;
    lt_column at = lt__column_of(p.columns);
    int columns = p.columns.columns, lanes = p.columns.lanes;
    int64_t lane = at.valid ? at.index * V : 0, end = at.last < p.whole ? at.last : p.whole;
    sums_of<V> s = {};
    if (MODE == MOMENTS) {
        find_centers<E, V>(q, at, all, centers);
        for (int k = 0; k < V; k++)
            s.center[k] = centers[k * columns + at.among];
    } else {
        find_coefficients<MODE>(q, at, all, s);
    }
    if (at.valid) {
#pragma unroll(MODE == MOMENTS ? 2 : 1)
        for (int64_t r = at.first + at.lane; r < end; r += lanes)
            add_pack<MODE, true>(q, r * p.width + lane, s);
        if (at.last > p.whole && (p.whole - at.first) % lanes == at.lane)
            add_pack<MODE, false>(q, p.whole * p.width + lane, s);
    }
    for (int k = 0; k < V; k++) {
        all[k][threadIdx.x] = s.sum[k];
        all[V + k][threadIdx.x] = s.product[k];
    }
    __syncthreads();
    int k = (int)threadIdx.x / columns;
    if (k >= V || !at.valid)
        return;
    lt_two sums = {sum_of_lanes<V>(all, columns, lanes, k),
                   sum_of_lanes<V>(all, columns, lanes, V + k)};
    if (MODE == MOMENTS) {
        int64_t rows = rows_in(p, at.part, lane + k);
        double miss = rows > 0 ? sums.a / (double)rows : 0;
        sums.b -= miss * sums.a;
        sums.a = (double)centers[threadIdx.x] + miss;
    }
    parts[at.part * p.width + lane + k] = sums;
}

template <class E, int MODE>
static lt_status launch_sums(const lt_cuda *cuda, const sum_pass<E> &q, lt_two *parts)
{
    return lt__launch(cuda, lt__column_blocks(&q.c.p.columns), sum_kernel<E, MODE>, q, parts);
}

/* ==== From sums to coefficients =============================================================== */

/* Sets a coefficient of channel k in each row of the wide row. */
__device__ static void set(const channels &c, int which, int64_t k, float value)
{
    for (int64_t lane = k; lane < c.p.width; lane += c.p.channels)
        c.coefs[which * c.p.width + lane] = value;
}

__device__ static void set_coefficients(const channels &c, int64_t k)
{
    set(c, AT_MEAN, k, c.mean[k]);
    set(c, AT_FACTOR, k, factor_of(c, k));
    set(c, AT_SHIFT, k, c.shift.at ? lt__number_at(c.shift, k) : 0);
}

/* Copies a given mean and variance to the channels, and sets the coefficients. */
static LT_KERNEL coefficient_kernel(const __grid_constant__ channels c,
                                    const __grid_constant__ lt_numbers mean,
                                    const __grid_constant__ lt_numbers var)
{
    int64_t k = (int64_t)blockIdx.x * LT_THREADS + threadIdx.x;
    if (k >= c.p.channels)
        return;
    c.mean[k] = lt__number_at(mean, k);
    c.var[k] = lt__number_at(var, k);
    set_coefficients(c, k);
}

typedef struct sample {
    lt_moments m;
    double rows;
} sample;

struct joined_samples {
    typedef sample Acc;
    static __device__ sample start() { return sample{{0, 0}, 0}; }
    static __device__ sample join(sample a, sample b)
    {
        double rows = a.rows + b.rows, share = rows > 0 ? b.rows / rows : 0;
        return sample{lt__merged(a.m, b.m, share, a.rows * share), rows};
    }
};

/* Joins the moments of all parts. */
static LT_KERNEL moments_kernel(const __grid_constant__ channels c, const lt_two *parts)
{
    const plan &p = c.p;
    int64_t k = lt__joined_column(), repeats = p.width / p.channels;
    int64_t end = k < p.channels ? p.columns.parts * repeats : 0;
    sample all = joined_samples::start();
    for (int64_t r = threadIdx.x / LT_JOINED_COLUMNS; r < end; r += LT_JOINING_LANES) {
        lt_two m = parts[r * p.channels + k];
        double rows = (double)rows_in(p, r / repeats, r % repeats * p.channels + k);
        all = joined_samples::join(all, sample{{m.a, m.b}, rows});
    }
    all = lt__join_lanes<joined_samples>(all, LT_JOINED_COLUMNS, LT_JOINING_LANES);
    if (k >= p.channels || threadIdx.x >= LT_JOINED_COLUMNS)
        return;
    double v = all.rows > 0 ? all.m.squares / all.rows : 0;
    c.mean[k] = (float)all.m.mean;
    c.var[k] = v < 0 ? 0 : (float)v; /* rounding may give a value below zero; a NaN stays a NaN */
    set_coefficients(c, k);
}

typedef struct gradients { /* gradients of the inputs from SCALE to VAR; add: add to old values */
    lt_numbers of[VAR + 1];
    bool add[VAR + 1];
} gradients;

/* Joins the sums of all parts, and sets the coefficients. The running statistics are constants, so
 * their gradients are 0. share: 1 / rows, or 0 in evaluation. */
static LT_KERNEL products_kernel(const __grid_constant__ channels c, const lt_two *parts,
                                 const __grid_constant__ gradients d, double share)
{
    const plan &p = c.p;
    int64_t k = lt__joined_column();
    lt_two sums = lt__join_parts(parts, p.columns.parts * (p.width / p.channels), p.channels, k);
    if (k >= p.channels || threadIdx.x >= LT_JOINED_COLUMNS)
        return;
    float factor = factor_of(c, k), var = c.var[k];
    set_coefficients(c, k);
    set(c, AT_SLOPE, k, lt__norm_slope(factor, var, c.eps, sums.b, share));
    set(c, AT_OFFSET, k, lt__norm_offset(factor, sums.a, share));
    const float values[] = {0, (float)(1 / sqrt(var + c.eps) * sums.b), (float)sums.a, 0, 0};
#pragma unroll
    for (int i = SCALE; i <= VAR; i++)
        if (d.of[i].at)
            lt__put_number(d.of[i], k, d.add[i], values[i]);
}

/* ==== Results ================================================================================= */

template <class E> struct result_pass {
    plan p;
    const E *x, *residual, *dy, *y;
    E *out;
    const float *coefs;
    lt_bounds act;
    bool add, wide, small; /* add to out; arrays aligned for packs; pack indices fit 31 bits */
};

/* Finds the thread's pack: its first element, and that element's lane. */
template <int V, class E>
__device__ bool find_pack(const result_pass<E> &q, int64_t *i, int64_t *lane)
{
    int64_t pack = (int64_t)blockIdx.x * LT_THREADS + threadIdx.x;
    *i = pack * V;
    *lane = (q.small ? (uint32_t)pack % (uint32_t)q.p.packs : pack % q.p.packs) * V;
    return *i < q.p.n;
}

template <class E> LT_KERNEL forward_kernel(const __grid_constant__ result_pass<E> q)
{
    enum { V = 16 / sizeof(E) };
    int64_t i, lane;
    if (!find_pack<V>(q, &i, &lane))
        return;
    float mean[V], factor[V], shift[V];
    lt_pack<E, V> x = lt__load<V>(q.x, i, q.p.n, q.wide), more = {};
    if (q.residual)
        more = lt__load<V>(q.residual, i, q.p.n, q.wide);
    take<V>(q.coefs + AT_MEAN * q.p.width, lane, mean);
    take<V>(q.coefs + AT_FACTOR * q.p.width, lane, factor);
    take<V>(q.coefs + AT_SHIFT * q.p.width, lane, shift);
    for (int k = 0; k < V; k++) {
        float v = LT_NORMALISED(lt__value(x.at[k]), mean[k], factor[k], shift[k]);
        if (q.residual)
            v += lt__value(more.at[k]);
        x.at[k] = lt_element<E>::of(lt__act(q.act, v));
    }
    lt__store(q.out, i, q.p.n, q.wide, x);
}

template <class E, int MODE> LT_KERNEL backward_kernel(const __grid_constant__ result_pass<E> q)
{
    enum { V = 16 / sizeof(E) };
    int64_t i, lane;
    if (!find_pack<V>(q, &i, &lane))
        return;
    float d[V], g[V], factor[V], more[V];
    lt_pack<E, V> x = lt__load<V>(q.x, i, q.p.n, q.wide), y = {};
    lt_pack<E, V> dy = lt__load<V>(q.dy, i, q.p.n, q.wide);
    if (MODE == ACT_OF_Y)
        y = lt__load<V>(q.y, i, q.p.n, q.wide);
    take<V>(q.coefs + AT_MEAN * q.p.width, lane, d);
    take<V>(q.coefs + AT_FACTOR * q.p.width, lane, factor);
    if (MODE == ACT_OF_X)
        take<V>(q.coefs + AT_SHIFT * q.p.width, lane, more);
    for (int k = 0; k < V; k++) {
        d[k] = lt__value(x.at[k]) - d[k];
        g[k] = lt__value(dy.at[k]);
        if (MODE == ACT_OF_Y)
            g[k] = lt__act_grad(q.act, lt__value(y.at[k]), g[k]);
        if (MODE == ACT_OF_X)
            g[k] = lt__act_grad(q.act, d[k] * factor[k] + more[k], g[k]);
    }
    if (q.add)
        x = lt__load<V>((const E *)q.out, i, q.p.n, q.wide);
    float slope[V];
    take<V>(q.coefs + AT_SLOPE * q.p.width, lane, slope);
    take<V>(q.coefs + AT_OFFSET * q.p.width, lane, more);
    for (int k = 0; k < V; k++) {
        float v = LT_NORMALISED_BACK(g[k], d[k], factor[k], slope[k], more[k]);
        x.at[k] = lt_element<E>::of(q.add ? lt__value(x.at[k]) + v : v);
    }
    lt__store(q.out, i, q.p.n, q.wide, x);
}

template <class E> static result_pass<E> results_over(const lt_call *c, const plan *p)
{
    result_pass<E> q = {};
    q.p = *p;
    q.x = (const E *)c->in[X]->data;
    q.coefs = coefficients(c);
    q.act = lt__bounds(c);
    q.small = p->n < (int64_t)1 << 31;
    return q;
}

template <class E>
static lt_status launch_results(const lt_cuda *cuda, const result_pass<E> &q,
                                void (*kernel)(const result_pass<E>))
{
    enum { V = 16 / sizeof(E) };
    return lt__launch(cuda, lt__ceil_div(lt__ceil_div(q.p.n, V), LT_THREADS), kernel, q);
}

/* ==== Forward ================================================================================= */

template <class E> static lt_status sum_moments(const lt_call *c, const plan *p)
{
    const lt_cuda *cuda = lt__cuda(c->ctx);
    sum_pass<E> q = {};
    q.c = channels_of(c, p);
    q.x = (const E *)c->in[X]->data;
    q.wide = lt__are_wide(q.x);
    LT_TRY((launch_sums<E, MOMENTS>(cuda, q, part_sums(c, p))));
    return lt__launch(cuda, lt__ceil_div(p->channels, LT_JOINED_COLUMNS), moments_kernel, q.c,
                      (const lt_two *)part_sums(c, p));
}

template <class E> static lt_status forward(const lt_call *c)
{
    plan p = plan_for(c->in[X], false);
    const lt_cuda *cuda = lt__cuda(c->ctx);
    LT_TRY(lt__flag(c, TRAIN)
               ? sum_moments<E>(c, &p)
               : lt__launch(cuda, lt__ceil_div(p.channels, LT_THREADS), coefficient_kernel,
                            channels_of(c, &p), lt__numbers_of(c->in[MEAN]),
                            lt__numbers_of(c->in[VAR])));
    result_pass<E> q = results_over<E>(c, &p);
    q.residual = (const E *)lt__data(lt__optional(c, c->in, RESIDUAL));
    q.out = (E *)c->out[Y]->data;
    q.wide = lt__are_wide(q.x, q.residual, q.out);
    return launch_results(cuda, q, forward_kernel<E>);
}

/* Requires x and the residual to have one dtype. Also checks the number of rows, which the shape
 * rule does not check with sync=true. */
static lt_status check(const lt_cuda *cuda, const lt_call *c)
{
    const lt_tensor *x = c->in[X], *residual = lt__optional(c, c->in, RESIDUAL);
    LT_TRY(lt__require_kernels(cuda, c->in, c->n_in));
    if (residual && residual->dtype != x->dtype)
        return cuda->host->fail(LT_EUNSUPPORTED, "%s requires a residual of x's dtype; cast it",
                                cuda->name);
    if (lt__flag(c, TRAIN) && lt__rows_of(x) == 1)
        return cuda->host->fail(LT_EINVAL, "train=true requires more than one value per channel, "
                                           "but x has one; use a larger batch or train=false");
    return LT_OK;
}

static lt_status batch_norm_fwd(lt_call *c)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    LT_TRY(check(cuda, c));
    if (c->in[SCALE]->count == 0)
        return LT_OK;
    LT_CUDA_FLOATS(cuda, c->in[X]->dtype, E, return forward<E>(c);)
}

/* ==== Backward ================================================================================ */

static lt_status join_products(const lt_call *c, const plan *p)
{
    gradients d = {};
    for (int i = SCALE; i <= VAR; i++) {
        d.of[i] = lt__numbers_of(c->d_in[i]);
        d.add[i] = lt__adds(c, i);
    }
    int64_t rows = lt__rows_of(c->in[X]);
    double share = lt__flag(c, TRAIN) && rows > 0 ? 1 / (double)rows : 0;
    return lt__launch(lt__cuda(c->ctx), lt__ceil_div(p->channels, LT_JOINED_COLUMNS),
                      products_kernel, channels_of(c, p), (const lt_two *)part_sums(c, p), d,
                      share);
}

/* Computes the sums of a call. mode: how to determine which dy the activation passes. */
template <class E> static lt_status sum_products(const lt_call *c, const plan *p, int mode)
{
    const lt_cuda *cuda = lt__cuda(c->ctx);
    lt_two *parts = part_sums(c, p);
    sum_pass<E> q = {};
    q.c = channels_of(c, p);
    q.x = (const E *)c->in[X]->data;
    q.dy = (const E *)c->d_out[Y]->data;
    q.y = (const E *)lt__data(c->out[Y]);
    q.d_residual = (E *)lt__data(lt__optional(c, c->d_in, RESIDUAL));
    q.act = lt__bounds(c);
    q.add = lt__adds(c, RESIDUAL);
    q.wide = lt__are_wide(q.x, q.dy, q.y, q.d_residual);
    LT_TRY((mode == PLAIN      ? launch_sums<E, PLAIN>(cuda, q, parts)
            : mode == ACT_OF_Y ? launch_sums<E, ACT_OF_Y>(cuda, q, parts)
                               : launch_sums<E, ACT_OF_X>(cuda, q, parts)));
    return join_products(c, p);
}

template <class E> static lt_status backward(const lt_call *c)
{
    const lt_tensor *d_residual = lt__optional(c, c->d_in, RESIDUAL);
    plan p = plan_for(c->in[X], true);
    int mode = lt__word(c, ACT) == 0 ? PLAIN : c->out[Y] ? ACT_OF_Y : ACT_OF_X;
    /* g was written there, and can be read instead of dy */
    bool passed = d_residual && !lt__adds(c, RESIDUAL);
    LT_TRY(sum_products<E>(c, &p, mode));
    if (!c->d_in[X])
        return LT_OK;
    result_pass<E> q = results_over<E>(c, &p);
    q.dy = (const E *)(passed ? d_residual : c->d_out[Y])->data;
    q.y = passed ? NULL : (const E *)lt__data(c->out[Y]);
    q.out = (E *)c->d_in[X]->data;
    q.add = lt__adds(c, X);
    q.wide = lt__are_wide(q.x, q.dy, q.y, q.out);
    return launch_results(lt__cuda(c->ctx), q,
                          mode == PLAIN || passed ? backward_kernel<E, PLAIN>
                          : mode == ACT_OF_Y      ? backward_kernel<E, ACT_OF_Y>
                                                  : backward_kernel<E, ACT_OF_X>);
}

static lt_status batch_norm_bwd(lt_call *c)
{
    if (c->in[SCALE]->count == 0)
        return LT_OK;
    LT_CUDA_FLOATS(lt__cuda(c->ctx), c->in[X]->dtype, E, return backward<E>(c);)
}

void lt__cuda_batch_norm(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_batch_norm], scratch, batch_norm_fwd, batch_norm_bwd);
}
