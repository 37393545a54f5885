/* group_norm.cu - the CUDA side of group_norm.c.
 *
 * x is (samples, rows, channels). A block processes adjacent channels of a part of a sample's rows,
 * so that its loads are coalesced whatever the width of a group is. A sum over a group takes two
 * kernels: the first adds up each channel of a part, the second joins the channels and the parts.
 * The moments are sums of x - center and of its square in double, with the first element of the
 * group as center, so that cancellation costs no f32 precision.
 */
#include "ops/cuda/rows.h"
#include "ops/layer_norm.h"

enum { GROUPS, EPS }; /* options */

typedef struct {
    lt_column_plan sample; /* how the rows of a sample are split into parts */
    lt_row_plan group;     /* how the sums of a group are joined: a row for each group */
    int64_t samples, rows, channels;
    int64_t groups, width; /* groups in a sample; channels in a group */
} plan;

static plan plan_for(const lt_call *c)
{
    const lt_tensor *x = c->in[X];
    plan p = {};
    p.samples = x->dims[0];
    p.rows = 1;
    for (int i = 1; i < x->ndim - 1; i++)
        p.rows *= x->dims[i];
    p.channels = x->dims[x->ndim - 1];
    p.groups = c->opt[GROUPS].i[0];
    p.width = p.channels / p.groups;
    p.sample = lt__columns_over(p.rows, p.channels, LT_ENOUGH_BLOCKS);
    p.group = lt__rows_over(p.samples * p.groups, p.sample.parts * p.width, 1);
    return p;
}

static int64_t all_parts(const plan *p) { return p->samples * p->sample.parts; }

/* Blocks of the kernels whose threads have a strip. */
static int64_t strip_blocks(const plan *p) { return p->samples * lt__column_blocks(&p->sample); }

/* A thread's elements of x: some rows of one channel in a part. */
typedef struct {
    bool valid;                /* false if this thread has no elements */
    int64_t first, last, step; /* offsets in x */
    int64_t channel, group;    /* the group is counted over all samples */
    int64_t sum;               /* where the part's sum of this channel goes */
    int lane;
} strip;

__device__ static strip strip_of(const plan &p)
{
    lt_column at = lt__column_of(p.sample); /* at.part counts the parts of all samples */
    int64_t sample = lt__quotient(at.part, p.sample.parts);
    int64_t row = (at.part - sample * p.sample.parts) * p.sample.part;
    int64_t end = row + p.sample.part < p.rows ? row + p.sample.part : p.rows;
    strip s;
    s.valid = at.valid;
    s.first = (sample * p.rows + row + at.lane) * p.channels + at.index;
    s.last = (sample * p.rows + end) * p.channels;
    s.step = p.sample.lanes * p.channels;
    s.channel = at.index;
    s.group = sample * p.groups + lt__quotient(at.index, p.width);
    s.sum = at.part * p.channels + at.index;
    s.lane = at.lane;
    return s;
}

/* Stores the sums of a strip's channel over the rows of the part. All threads must call it. */
__device__ static void put_part(const plan &p, const strip &s, lt_two sum, lt_two *parts)
{
    sum = lt__join_lanes<lt_two_sums>(sum, p.sample.columns, p.sample.lanes);
    if (s.valid && s.lane == 0)
        parts[s.sum] = sum;
}

/* Joins the sums of a group, each multiplied by its channel's scale unless scale is NULL. All
 * threads must call it. */
template <class E>
__device__ static lt_two join_group(const plan &p, const lt_row &r, const lt_two *parts,
                                    const E *scale)
{
    int64_t sample = lt__quotient(r.index, p.groups);
    int64_t channel = (r.index - sample * p.groups) * p.width;
    lt_two sum = lt_two_sums::start();
    for (int64_t i = r.lane; r.valid && i < p.group.n; i += p.group.lanes) {
        int64_t part = lt__quotient(i, p.width), k = channel + i - part * p.width;
        lt_two more = parts[(sample * p.sample.parts + part) * p.channels + k];
        double by = scale ? (double)lt__value(scale[k]) : 1;
        sum = lt_two_sums::join(sum, lt_two{more.a * by, more.b * by});
    }
    return lt__join_row<lt_two_sums>(p.group, sum);
}

/* ==== Forward ================================================================================= */

template <class E> __device__ static double center_of(const plan &p, const E *x, int64_t group)
{
    int64_t sample = lt__quotient(group, p.groups);
    int64_t channel = (group - sample * p.groups) * p.width;
    return p.rows > 0 ? (double)lt__value(x[sample * p.rows * p.channels + channel]) : 0;
}

/* parts (samples, parts, channels): the sums of x - center and of its square. */
template <class E>
LT_KERNEL moments_kernel(const __grid_constant__ plan p, const E *x, lt_two *parts)
{
    strip s = strip_of(p);
    double center = s.valid ? center_of(p, x, s.group) : 0;
    lt_two sum = lt_two_sums::start();
#pragma unroll 2
    for (int64_t i = s.first; s.valid && i < s.last; i += s.step) {
        double d = (double)lt__value(x[i]) - center;
        sum.a += d;
        sum.b += d * d;
    }
    put_part(p, s, sum, parts);
}

/* stats (samples, groups, 2): the mean and 1 / sqrt(var + eps). */
template <class E>
LT_KERNEL stats_kernel(const __grid_constant__ plan p, const E *x, const lt_two *parts, double eps,
                       float *stats)
{
    lt_row r = lt__row_of(p.group);
    lt_two sum = join_group<E>(p, r, parts, NULL);
    if (!r.valid || r.lane > 0)
        return;
    double n = (double)(p.rows * p.width), share = n > 0 ? 1 / n : 0;
    double mean_offset = sum.a * share, var = (sum.b - mean_offset * sum.a) * share;
    stats[2 * r.index] = (float)(center_of(p, x, r.index) + mean_offset);
    stats[2 * r.index + 1] = (float)(1 / sqrt((var < 0 ? 0 : var) + eps));
}

template <class E>
LT_KERNEL forward_kernel(const __grid_constant__ plan p, E *y, const E *x, const E *scales,
                         const E *shifts, const float *stats)
{
    strip s = strip_of(p);
    if (!s.valid)
        return;
    float mean = stats[2 * s.group], rstd = stats[2 * s.group + 1];
    float scale = lt__value(scales[s.channel]), shift = lt__value(shifts[s.channel]);
#pragma unroll 2
    for (int64_t i = s.first; i < s.last; i += s.step)
        y[i] = lt_element<E>::of(LT_LAYER_NORM(lt__value(x[i]), mean, rstd, scale, shift));
}

template <class E> static lt_status forward(lt_call *c)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    plan p = plan_for(c);
    const E *x = (const E *)c->in[X]->data;
    float *stats = (float *)c->out[1]->data;
    lt_two *parts = (lt_two *)c->scratch;
    LT_TRY(lt__launch(cuda, strip_blocks(&p), moments_kernel<E>, p, x, parts));
    LT_TRY(lt__launch(cuda, lt__row_blocks(&p.group), stats_kernel<E>, p, x, (const lt_two *)parts,
                      lt__number(c, EPS), stats));
    return lt__launch(cuda, strip_blocks(&p), forward_kernel<E>, p, (E *)c->out[0]->data, x,
                      (const E *)c->in[SCALE]->data, (const E *)c->in[SHIFT]->data,
                      (const float *)stats);
}

LT_CUDA_CALL(group_norm_fwd, FLOATS, c->in[X], forward<E>(c))

/* ==== Backward ================================================================================ */

/* parts (samples, parts, channels): the sums of dy h and of dy. */
template <class E>
LT_KERNEL sums_kernel(const __grid_constant__ plan p, const E *dy, const E *x, const float *stats,
                      lt_two *parts)
{
    strip s = strip_of(p);
    float mean = s.valid ? stats[2 * s.group] : 0, rstd = s.valid ? stats[2 * s.group + 1] : 0;
    lt_two sum = lt_two_sums::start();
#pragma unroll 2
    for (int64_t i = s.first; s.valid && i < s.last; i += s.step) {
        float d = lt__value(dy[i]);
        sum.a += (double)(d * LT_LAYER_H(lt__value(x[i]), mean, rstd));
        sum.b += (double)d;
    }
    put_part(p, s, sum, parts);
}

/* means (samples, groups): the means of g h and of g over the group. */
template <class E>
LT_KERNEL means_kernel(const __grid_constant__ plan p, const E *scale, const lt_two *parts,
                       lt_two *means)
{
    lt_row r = lt__row_of(p.group);
    lt_two sum = join_group(p, r, parts, scale);
    double n = (double)(p.rows * p.width);
    if (r.valid && r.lane == 0)
        means[r.index] = lt_two{sum.a / n, sum.b / n};
}

template <class E>
LT_KERNEL dx_kernel(const __grid_constant__ plan p, E *dx, const E *dy, const E *x, const E *scales,
                    const float *stats, const lt_two *means, bool add)
{
    strip s = strip_of(p);
    if (!s.valid)
        return;
    float mean = stats[2 * s.group], rstd = stats[2 * s.group + 1];
    float mean_gh = (float)means[s.group].a, mean_g = (float)means[s.group].b;
    float scale = lt__value(scales[s.channel]);
#pragma unroll 2
    for (int64_t i = s.first; i < s.last; i += s.step) {
        float h = LT_LAYER_H(lt__value(x[i]), mean, rstd), g = lt__value(dy[i]) * scale;
        float d = LT_LAYER_NORM_BACK(g, h, rstd, mean_g, mean_gh);
        dx[i] = lt_element<E>::of(add ? lt__value(dx[i]) + d : d);
    }
}

/* Scratch contains the parts, then the means. */
static size_t scratch(const lt_call *c, bool backward)
{
    plan p = plan_for(c);
    int64_t means = backward ? p.samples * p.groups : 0;
    return (size_t)(all_parts(&p) * p.channels + means) * sizeof(lt_two);
}

template <class E> static lt_status backward(lt_call *c)
{
    lt_cuda *cuda = lt__cuda(c->ctx);
    plan p = plan_for(c);
    const E *dy = (const E *)c->d_out[0]->data, *x = (const E *)c->in[X]->data;
    const E *scale = (const E *)c->in[SCALE]->data;
    const float *stats = (const float *)c->out[1]->data;
    lt_two *parts = (lt_two *)c->scratch, *means = parts + all_parts(&p) * p.channels;
    LT_TRY(lt__launch(cuda, strip_blocks(&p), sums_kernel<E>, p, dy, x, stats, parts));
    LT_TRY(lt__put_columns<E>(c, parts, all_parts(&p), p.channels, SCALE, SHIFT));
    if (!c->d_in[X])
        return LT_OK;
    LT_TRY(lt__launch(cuda, lt__row_blocks(&p.group), means_kernel<E>, p, scale,
                      (const lt_two *)parts, means));
    return lt__launch(cuda, strip_blocks(&p), dx_kernel<E>, p, (E *)c->d_in[X]->data, dy, x, scale,
                      stats, (const lt_two *)means, lt__adds(c, X));
}

LT_CUDA_CALL(group_norm_bwd, FLOATS, c->in[X], backward<E>(c))

void lt__cuda_group_norm(lt_kernels *op)
{
    lt__set_kernels(&op[LT_OP_group_norm], scratch, group_norm_fwd, group_norm_bwd);
}
