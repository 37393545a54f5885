/* group_norm.c - group normalisation (Wu and He, 2018).
 *
 * This file treats x as (samples, rows, channels). A group is `width` adjacent channels of one
 * sample, over all of its rows. Its mean and 1 / sqrt(var + eps) are saved in an extra output
 * (samples, groups, 2) for backward.
 *
 * The rows of a sample are split into parts that fit in the L2 cache. The loops over a part run
 * along the channels, with a sum in double for each channel, so they vectorise for any width. Each
 * part yields two numbers per group, which are then combined over the parts of a sample, in order.
 * A task processes some parts one after another, with scratch memory of its own. Parts and tasks
 * depend only on the dims, so the bits do not depend on the number of threads.
 */
#include "ops/layer_norm.h"
#include "ops/moments.h"

enum { GROUPS, EPS }; /* options */

enum { PART = 65536 }; /* elements of x in a part, unless a row has more */
enum { MAX_TASKS = 64 };

typedef struct {
    int64_t samples, rows, channels;
    int64_t groups, width;     /* groups in a sample; channels in a group */
    int64_t part_rows, parts;  /* rows in a part; parts in a sample */
    int64_t all_parts;         /* parts in all samples */
    int64_t task_parts, tasks; /* parts in a task; number of tasks */
} plan;

static plan plan_for(const lt_call *c)
{
    const lt_tensor *x = c->in[X];
    plan p = {.samples = x->dims[0], .rows = 1, .channels = x->dims[x->ndim - 1]};
    for (int i = 1; i < x->ndim - 1; i++)
        p.rows *= x->dims[i];
    p.groups = c->opt[GROUPS].i[0];
    p.width = p.channels / p.groups;
    p.part_rows = PART / p.channels > 0 ? PART / p.channels : 1;
    p.parts = (p.rows + p.part_rows - 1) / p.part_rows;
    p.all_parts = x->count > 0 ? p.samples * p.parts : 0;
    p.task_parts = p.all_parts / MAX_TASKS + 1;
    p.tasks = (p.all_parts + p.task_parts - 1) / p.task_parts;
    return p;
}

static lt_status shape(lt_call *c)
{
    const lt_tensor *x = c->in[X];
    int64_t groups;
    LT_TRY(lt__same_float(c, 3));
    if (x->ndim < 2)
        return lt_fail(LT_EINVAL, "x must have at least 2 axes (n, ..., channels), but has %d (%s)",
                       x->ndim, LT_TEXT(x));
    int64_t channels = x->dims[x->ndim - 1];
    LT_TRY(lt__int(c, GROUPS, 1, &groups));
    if (channels == 0)
        return lt_fail(LT_EINVAL, "x must have at least one channel, but has none (%s)",
                       LT_TEXT(x));
    if (channels % groups != 0)
        return lt_fail(LT_EINVAL, "groups %lld must divide the %lld channels of x (%s)",
                       (lt_ll)groups, (lt_ll)channels, LT_TEXT(x));
    LT_TRY(lt__require_dims(c, SCALE, 1, &channels, "one value per channel"));
    LT_TRY(lt__require_dims(c, SHIFT, 1, &channels, "one value per channel"));
    LT_TRY(lt__number_in(c, EPS, 0, INFINITY));
    int64_t stats[3] = {x->dims[0], groups, 2};
    lt__spec_like(c, 0, x);
    lt__spec(c, 1, x->dtype == LT_F64 ? LT_F64 : LT_F32, 3, stats);
    return LT_OK;
}

/* ==== Scratch memory ========================================================================== */

/* Two numbers of a group in a part. Forward: the mean and the sum of squared deviations from it.
 * Backward: the sums of g and of g h (see part_sums()). join_sums() replaces the sums in a
 * sample's first part by the means over the whole group. */
typedef struct {
    double a, b;
} pair;

/* The buffers of a task. A buffer is an array with one number per channel. Sums are doubles. The
 * others have the type of x, except that part_moments() needs the mean in double. */
enum { SUM, PRODUCT, MEAN, RSTD, FORWARD_BUFFERS };
enum { MEAN_G = FORWARD_BUFFERS, MEAN_GH, DSCALE, DSHIFT, BACKWARD_BUFFERS };

/* Scratch contains the pairs (samples, parts, groups), then the buffers (tasks, buffers,
 * channels). */
static pair *pairs_of(const lt_call *c, const plan *p, int64_t part)
{
    return (pair *)c->scratch + part * p->groups;
}

static double *buffers_of(const lt_call *c, const plan *p, int64_t task, int buffers)
{
    return (double *)pairs_of(c, p, p->all_parts) + task * buffers * p->channels;
}

static size_t scratch(const lt_call *c, bool backward)
{
    plan p = plan_for(c);
    int64_t buffers = p.tasks * p.channels * (backward ? BACKWARD_BUFFERS : FORWARD_BUFFERS);
    return (size_t)(p.all_parts * p.groups) * sizeof(pair) + (size_t)buffers * sizeof(double);
}

/* ==== Parts =================================================================================== */

typedef struct {
    lt_call *c;
    const plan *p;
    int64_t sample, first, rows; /* index of its sample; offset in x; number of rows */
    pair *pairs;                 /* a pair for each of its groups */
    double *buffers;             /* buffers of its task */
} part;

static void *buffer(const part *a, int which) { return a->buffers + which * a->p->channels; }

/* The number of rows in part i of a sample. */
static int64_t rows_of(const plan *p, int64_t i)
{
    int64_t left = p->rows - i * p->part_rows;
    return left < p->part_rows ? left : p->part_rows;
}

/* Runs fn for every part. buffers: the number of buffers per task. */
static void each_part(lt_call *c, const plan *p, int buffers, void (*fn)(const part *a))
{
    LT_PARALLEL_FOR(c, c->in[X]->count)
    for (int64_t t = 0; t < p->tasks; t++)
        for (int64_t i = t * p->task_parts; i < p->all_parts && i < (t + 1) * p->task_parts; i++) {
            part a = {.c = c, .p = p, .sample = i / p->parts, .rows = rows_of(p, i % p->parts)};
            a.first = (a.sample * p->rows + i % p->parts * p->part_rows) * p->channels;
            a.pairs = pairs_of(c, p, i);
            a.buffers = buffers_of(c, p, t, buffers);
            fn(&a);
        }
}

/* Adds up the numbers of group g in a buffer. */
static double sum_of_group(const double *buffer, int64_t g, int64_t width)
{
    double sum = 0;
    for (int64_t k = g * width; k < (g + 1) * width; k++)
        sum += buffer[k];
    return sum;
}

/* Fills the buffers MEAN and RSTD from the saved statistics. */
static void read_stats(const part *a)
{
    const lt_tensor *stats = a->c->out[1];
    int64_t groups = a->p->groups, width = a->p->width;
    LT_FLOATS(stats->dtype, T,
        const T *of = (const T *)stats->data + a->sample * groups * 2;
        T *mean = buffer(a, MEAN);
        T *rstd = buffer(a, RSTD);
        for (int64_t g = 0; g < groups; g++)
            for (int64_t k = g * width; k < (g + 1) * width; k++) {
                mean[k] = of[2 * g];
                rstd[k] = of[2 * g + 1];
            }
    );
}

/* ==== Forward ================================================================================= */

/* pairs = the mean of each group of the part, and the sum of squared deviations from it */
LT_SIMD static void part_moments(const part *a)
{
    int64_t channels = a->p->channels, width = a->p->width;
    double *restrict sum = buffer(a, SUM);
    double *restrict mean = buffer(a, MEAN);
    LT_FLOATS(a->c->in[X]->dtype, T,
        const T *restrict x = lt__address(a->c->in[X], a->first);
        for (int64_t k = 0; k < channels; k++)
            sum[k] = 0;
        for (int64_t i = 0; i < a->rows; i++)
            for (int64_t k = 0; k < channels; k++)
                sum[k] += x[i * channels + k];
        for (int64_t g = 0; g < a->p->groups; g++) {
            a->pairs[g].a = sum_of_group(sum, g, width) / (double)(a->rows * width);
            for (int64_t k = g * width; k < (g + 1) * width; k++)
                mean[k] = a->pairs[g].a;
        }
        for (int64_t k = 0; k < channels; k++)
            sum[k] = 0;
        for (int64_t i = 0; i < a->rows; i++)
            for (int64_t k = 0; k < channels; k++) {
                double d = x[i * channels + k] - mean[k];
                sum[k] += d * d;
            }
        for (int64_t g = 0; g < a->p->groups; g++)
            a->pairs[g].b = sum_of_group(sum, g, width);
    );
}

/* Joins the pairs of the parts of a sample, and saves the mean and 1 / sqrt(var + eps) of group
 * g. */
static void join_moments(lt_call *c, const plan *p, int64_t sample, int64_t g)
{
    lt_moments m = {0, 0};
    double n = 0;
    for (int64_t i = 0; i < p->parts; i++) {
        pair more = pairs_of(c, p, sample * p->parts + i)[g];
        double count = (double)(rows_of(p, i) * p->width);
        double share = count / (n + count);
        m = lt__merged(m, (lt_moments){more.a, more.b}, share, n * share);
        n += count;
    }
    LT_FLOATS(c->in[X]->dtype, T,
        T *stats = (T *)c->out[1]->data + (sample * p->groups + g) * 2;
        stats[0] = (T)m.mean;
        stats[1] = (T)(1 / sqrt((n > 0 ? m.squares / n : 0) + lt__number(c, EPS)));
    );
}

/* y = (x - mean) / sqrt(var + eps) * scale + shift */
LT_SIMD static void part_forward(const part *a)
{
    int64_t channels = a->p->channels;
    read_stats(a);
    LT_FLOATS(a->c->in[X]->dtype, T,
        T *restrict y = lt__address(a->c->out[0], a->first);
        const T *restrict x = lt__address(a->c->in[X], a->first);
        const T *restrict scale = a->c->in[SCALE]->data;
        const T *restrict shift = a->c->in[SHIFT]->data;
        const T *restrict mean = buffer(a, MEAN);
        const T *restrict rstd = buffer(a, RSTD);
        for (int64_t i = 0; i < a->rows; i++)
            for (int64_t k = 0; k < channels; k++)
                y[i * channels + k] = LT_LAYER_NORM(x[i * channels + k], mean[k], rstd[k],
                                                    scale[k], shift[k]);
    );
}

static lt_status forward(lt_call *c)
{
    plan p = plan_for(c);
    each_part(c, &p, FORWARD_BUFFERS, part_moments);
    LT_PARALLEL_FOR(c, p.all_parts * p.groups)
    for (int64_t s = 0; s < p.samples; s++)
        for (int64_t g = 0; g < p.groups; g++)
            join_moments(c, &p, s, g);
    each_part(c, &p, FORWARD_BUFFERS, part_forward);
    return LT_OK;
}

/* ==== Backward ================================================================================ */

/* With r = 1 / sqrt(var + eps), h = (x - mean) * r and g = dy * scale: pairs = the sums of g and of
 * g h over each group of the part. Adds the sums of dy h to the buffer DSCALE, and the sums
 * of dy to DSHIFT. */
LT_SIMD static void part_sums(const part *a)
{
    int64_t channels = a->p->channels, width = a->p->width;
    double *restrict sum = buffer(a, SUM);
    double *restrict product = buffer(a, PRODUCT);
    double *restrict dscale = buffer(a, DSCALE);
    double *restrict dshift = buffer(a, DSHIFT);
    read_stats(a);
    LT_FLOATS(a->c->in[X]->dtype, T,
        const T *restrict dy = lt__address(a->c->d_out[0], a->first);
        const T *restrict x = lt__address(a->c->in[X], a->first);
        const T *restrict scale = a->c->in[SCALE]->data;
        const T *restrict mean = buffer(a, MEAN);
        const T *restrict rstd = buffer(a, RSTD);
        for (int64_t k = 0; k < channels; k++)
            sum[k] = product[k] = 0;
        for (int64_t i = 0; i < a->rows; i++)
            for (int64_t k = 0; k < channels; k++) {
                T d = dy[i * channels + k];
                sum[k] += d;
                product[k] += d * LT_LAYER_H(x[i * channels + k], mean[k], rstd[k]);
            }
        for (int64_t k = 0; k < channels; k++) {
            dshift[k] += sum[k];
            dscale[k] += product[k];
            sum[k] *= scale[k];
            product[k] *= scale[k];
        }
        for (int64_t g = 0; g < a->p->groups; g++)
            a->pairs[g] = (pair){sum_of_group(sum, g, width), sum_of_group(product, g, width)};
    );
}

/* Replaces a group's pair in the first part of a sample by the means of g and of g h over the whole
 * group (see part_sums()). */
static void join_sums(lt_call *c, const plan *p, int64_t sample, int64_t g)
{
    pair *all = pairs_of(c, p, sample * p->parts) + g;
    double n = (double)(p->rows * p->width);
    for (int64_t i = 1; i < p->parts; i++) {
        all->a += all[i * p->groups].a;
        all->b += all[i * p->groups].b;
    }
    all->a /= n;
    all->b /= n;
}

/* dx (+)= r (g - mean(g) - h mean(g h)) */
LT_SIMD static void part_backward(const part *a)
{
    int64_t channels = a->p->channels, width = a->p->width;
    const pair *means = pairs_of(a->c, a->p, a->sample * a->p->parts);
    bool add = lt__adds(a->c, X);
    read_stats(a);
    LT_FLOATS(a->c->in[X]->dtype, T,
        T *restrict dx = lt__address(a->c->d_in[X], a->first);
        const T *restrict dy = lt__address(a->c->d_out[0], a->first);
        const T *restrict x = lt__address(a->c->in[X], a->first);
        const T *restrict scale = a->c->in[SCALE]->data;
        const T *restrict mean = buffer(a, MEAN);
        const T *restrict rstd = buffer(a, RSTD);
        T *restrict mean_g = buffer(a, MEAN_G);
        T *restrict mean_gh = buffer(a, MEAN_GH);
        for (int64_t g = 0; g < a->p->groups; g++)
            for (int64_t k = g * width; k < (g + 1) * width; k++) {
                mean_g[k] = (T)means[g].a;
                mean_gh[k] = (T)means[g].b;
            }
        for (int64_t i = 0; i < a->rows * channels; i += channels)
            for (int64_t k = 0; k < channels; k++)
                LT_PUT(add, dx[i + k],
                       LT_LAYER_NORM_BACK(dy[i + k] * scale[k],
                                          LT_LAYER_H(x[i + k], mean[k], rstd[k]), rstd[k],
                                          mean_g[k], mean_gh[k]));
    );
}

/* The gradient of an input (+)= the sum of buffer `which` over all tasks. */
static void put_sums(lt_call *c, const plan *p, int input, int which)
{
    LT_FLOATS(c->in[X]->dtype, T,
        T *d = c->d_in[input]->data;
        for (int64_t k = 0; k < p->channels; k++) {
            double sum = 0;
            for (int64_t t = 0; t < p->tasks; t++)
                sum += buffers_of(c, p, t, BACKWARD_BUFFERS)[which * p->channels + k];
            LT_PUT(lt__adds(c, input), d[k], (T)sum);
        }
    );
}

static lt_status backward(lt_call *c)
{
    plan p = plan_for(c);
    for (int64_t t = 0; t < p.tasks; t++)
        for (int64_t k = 0; k < 2 * p.channels; k++)
            buffers_of(c, &p, t, BACKWARD_BUFFERS)[DSCALE * p.channels + k] = 0;
    each_part(c, &p, BACKWARD_BUFFERS, part_sums);
    if (c->d_in[SCALE])
        put_sums(c, &p, SCALE, DSCALE);
    if (c->d_in[SHIFT])
        put_sums(c, &p, SHIFT, DSHIFT);
    if (!c->d_in[X])
        return LT_OK;
    LT_PARALLEL_FOR(c, p.all_parts * p.groups)
    for (int64_t s = 0; s < p.samples; s++)
        for (int64_t g = 0; g < p.groups && p.parts > 0; g++)
            join_sums(c, &p, s, g);
    each_part(c, &p, BACKWARD_BUFFERS, part_backward);
    return LT_OK;
}

const lt_op lt__op_group_norm = {
    .sig = "group_norm(x, scale, shift; groups, eps=1e-5)",
    .doc = "y = (x - mean) / sqrt(var + eps) * scale + shift for x (n, ..., channels), scale "
           "(channels) and shift (channels), with mean and biased var over each sample's groups of "
           "adjacent channels.",
    .cast = LT_CAST_F32,
    .n_aux = 1,
    .save = LT_SAVE_IN(X) | LT_SAVE_IN(SCALE) | LT_SAVE_OUT(1),
    .shape = shape,
    .scratch = scratch,
    .fwd = forward,
    .bwd = backward,
};
