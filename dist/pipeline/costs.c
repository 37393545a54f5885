/* costs.c - what the stages of a plan compute, keep and send, and the division whose slowest stage
 * is fastest; see costs.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/bucket_plan.h"
#include "dist/pipeline/costs.h"

/* ==== Times of passes ========================================================================= */

/* If the best line has a negative number, the best line without one has a zero instead. */
lt_pipe_line lt_pipe_fit(const double *sizes, const double *seconds, int n)
{
    double x = 0, y = 0, xx = 0, xy = 0;
    for (int i = 0; i < n; i++) {
        x += sizes[i];
        y += seconds[i];
        xx += sizes[i] * sizes[i];
        xy += sizes[i] * seconds[i];
    }
    double spread = n * xx - x * x;
    lt_pipe_line proportional = {0, xy / xx};
    if (!(spread > 1e-12 * n * xx)) /* there is one size */
        return proportional;
    double slope = (n * xy - x * y) / spread;
    if (slope < 0)
        return (lt_pipe_line){y / n, 0};
    double at_zero = (y - slope * x) / n;
    return at_zero < 0 ? proportional : (lt_pipe_line){at_zero, slope};
}

static double at(const lt_pipe_line *line, double images)
{
    return line->at_zero + line->per_image * images;
}

lt_status lt__costs_open(lt_costs *c, const lt_pipe_net *net, const lt_pipe_job *job)
{
    size_t n = (size_t)net->n_units;
    *c = (lt_costs){.net = net, .job = job};
    LT_TRY(LT_CALLOC(c->lines, 3 * n, "to plan for %zu units", n));
    LT_TRY(LT_CALLOC(c->before, n + 1, "to plan for %zu units", n));
    LT_TRY(LT_CALLOC(c->begin, n + 1, "to plan for %zu units", n));
    LT_TRY(LT_CALLOC(c->cut_bytes, n, "to plan for %zu units", n));
    if (n < 1)
        return lt_fail(LT_EINVAL, "planning: a net has at least 1 unit, not %zu", n);
    if (net->n_sizes < 1)
        return lt_fail(LT_EINVAL, "planning: a net is measured at 1 size or more, not %d",
                       net->n_sizes);
    for (size_t i = 0; i < n; i++) {
        const lt_pipe_unit *u = &net->units[i];
        if (i == 0 || u->may_begin_stage)
            c->begin[c->n_blocks++] = (int)i;
        const double *seconds[] = {u->forward, u->inputs, u->weights};
        for (int k = 0; k < 3; k++)
            c->lines[3 * i + (size_t)k] = lt_pipe_fit(net->sizes, seconds[k], net->n_sizes);
    }
    c->begin[c->n_blocks] = net->n_units;
    return LT_OK;
}

void lt__costs_close(lt_costs *c)
{
    free(c->lines);
    free(c->before);
    free(c->begin);
    free(c->cut_bytes);
}

/* Sums up the values that are made before a block and used in it or later. This is too much for a
 * value that skips a whole stage: it is sent once, but counted at two cuts. The simulation counts
 * it once. */
static void set_cuts(lt_costs *c)
{
    const lt_pipe_net *net = c->net;
    for (int i = 0; i < c->n_blocks; i++) {
        c->cut_bytes[i] = 0;
        for (const lt_pipe_value *v = net->values; v < net->values + net->n_values; v++)
            if (v->unit < c->begin[i] && v->uses[v->n - 1] >= c->begin[i])
                c->cut_bytes[i] += v->bytes * c->images;
    }
}

void lt__costs_set(lt_costs *c, int replicas, int micro)
{
    c->replicas = replicas;
    c->micro = micro;
    c->images = (double)c->job->batch / replicas / micro;
    for (int i = 0; i < c->net->n_units; i++) {
        const lt_pipe_unit *u = &c->net->units[i];
        const lt_pipe_line *line = &c->lines[3 * (ptrdiff_t)i];
        const lt_unit_costs *s = &c->before[i];
        c->before[i + 1] = (lt_unit_costs){.forward = s->forward + at(line, c->images),
                                           .inputs = s->inputs + at(line + 1, c->images),
                                           .weights = s->weights + at(line + 2, c->images),
                                           .saved = s->saved + u->saved_bytes * c->images,
                                           .update = s->update + u->update,
                                           .grads = s->grads + u->grad_bytes,
                                           .state = s->state + u->state_bytes};
    }
    set_cuts(c);
}

lt_unit_costs lt__costs_sum(const lt_costs *c, int first, int end)
{
    const lt_unit_costs *a = &c->before[first], *b = &c->before[end];
    return (lt_unit_costs){.forward = b->forward - a->forward,
                           .inputs = b->inputs - a->inputs,
                           .weights = b->weights - a->weights,
                           .saved = b->saved - a->saved,
                           .update = b->update - a->update,
                           .grads = b->grads - a->grads,
                           .state = b->state - a->state};
}

/* ==== The gradient exchange =================================================================== */

/* The seconds of an allreduce over the replicas. The ring sends 2 (G - 1) messages of 1 / G of the
 * bytes, one after the other, and before that a description of the sum. */
static double sum_seconds(const lt_costs *c, double bytes)
{
    const lt_pipe_link *link = &c->job->exchange;
    int hops = 2 * (c->replicas - 1);
    double on_wire = c->job->wire_bytes == 2 ? bytes / 2 : bytes;
    return (hops + 1) * link->latency + on_wire * hops / c->replicas / link->bytes_per_s;
}

static double capacity_of(bool is_first, double left)
{
    size_t bytes = left < 1e18 ? (size_t)left : (size_t)1e18;
    return (double)lt__bucket_capacity(is_first, bytes, LT_FIRST_BUCKET, LT_BUCKET);
}

typedef struct exchange {
    double sent;         /* time at which the buckets so far have been summed */
    double bytes, ready; /* bytes of the open bucket; time of its last gradient */
} exchange;

static void send_bucket(const lt_costs *c, exchange *x)
{
    if (x->bytes > 0)
        x->sent = fmax(x->sent, x->ready) + sum_seconds(c, x->bytes);
    x->bytes = 0;
}

typedef struct last_pass { /* the pass with which the exchange begins */
    double seconds;        /* since it began, at the current unit */
    int inputs, weights;   /* numbers of passes for inputs and weights that a unit still needs */
} last_pass;

/* The seconds of the gradient exchange of units first to end - 1. It sends the step record and then
 * the buckets, from the last unit on. A bucket is sent when it is complete and the previous one has
 * been sent. Adds the seconds of the pass to pass->seconds. */
static double run_exchange(const lt_costs *c, int first, int end, last_pass *pass)
{
    exchange x = {.sent = sum_seconds(c, 0)};
    double capacity = 0;
    bool is_first = true;
    if (c->replicas == 1)
        return 0;
    for (int i = end - 1; i >= first; i--) {
        const lt_pipe_line *line = &c->lines[3 * (ptrdiff_t)i];
        double grads = c->net->units[i].grad_bytes;
        pass->seconds += pass->inputs * at(line + 1, c->images) +
                         pass->weights * at(line + 2, c->images);
        if (grads == 0)
            continue;
        if (x.bytes > 0 && x.bytes + grads > capacity) {
            send_bucket(c, &x);
            is_first = false;
        }
        if (x.bytes == 0)
            capacity = capacity_of(is_first, lt__costs_sum(c, first, i + 1).grads);
        x.bytes += grads;
        x.ready = pass->seconds;
    }
    send_bucket(c, &x);
    return x.sent;
}

double lt__costs_exchange(const lt_costs *c, int first, int end)
{
    return run_exchange(c, first, end, &(last_pass){0, 0, 0});
}

/* The function lt_pipe.reduce of a costed pipe. After a split backward pass, the passes for weights
 * are computed together, unit by unit. */
static double exposed(const void *ud, int stage, int together)
{
    const lt_costed_pipe *p = ud;
    int first = p->first[stage], end = p->first[stage + 1];
    if (p->costs->job->delay) /* only the record is summed in this step */
        return p->costs->replicas > 1 ? sum_seconds(p->costs, 0) : 0;
    last_pass pass = {0, 1, 1};
    if (p->pipe.kind == LT_ZERO_BUBBLE)
        pass = (last_pass){lt__costs_sum(p->costs, first, end).inputs, 0, together};
    return fmax(run_exchange(p->costs, first, end, &pass) - pass.seconds, 0);
}

double lt__costs_exchanged(const lt_costs *c, int first, int end)
{
    double on_wire = lt__costs_sum(c, first, end).grads * (c->job->wire_bytes == 2 ? 0.5 : 1);
    return on_wire * 2 * (c->replicas - 1) / c->replicas;
}

/* ==== Pipelines =============================================================================== */

double lt__costs_work(const lt_costs *c, int first, int end)
{
    double work = 0, back = 0;
    for (const lt_pipe_unit *u = c->net->units + first; u < c->net->units + end; u++) {
        work = fmax(work, c->micro > 1 ? u->work_bytes : 0);
        back = fmax(back, u->back_bytes * c->images);
    }
    return work + back;
}

/* Whether a value is made before unit first, and used in units first to end - 1. */
static bool is_received(const lt_pipe_value *v, int first, int end)
{
    for (int k = 0; v->unit < first && k < v->n && v->uses[k] < end; k++)
        if (v->uses[k] >= first)
            return true;
    return false;
}

/* The bytes that a stage keeps between steps. */
static double kept(const lt_costs *c, double state, double grads)
{
    return state + (c->job->delay && c->replicas > 1 ? grads : 0);
}

double lt__costs_memory(const lt_costs *c, const lt_schedule *schedule, int first, int end)
{
    lt_unit_costs s = lt__costs_sum(c, first, end);
    double received = 0;
    for (const lt_pipe_value *v = c->net->values; v < c->net->values + c->net->n_values; v++)
        received += is_received(v, first, end) ? v->bytes * c->images : 0;
    return kept(c, s.state, s.grads) + lt__costs_work(c, first, end) +
           (s.saved + received) * lt__schedule_in_memory(schedule, c->micro);
}

/* The stage of a unit, not before stage i. */
static int stage_of(const int *first, int i, int unit)
{
    while (unit >= first[i + 1])
        i++;
    return i;
}

/* A value goes from its stage straight to each later stage that uses it. Each of these stages
 * returns the gradient to the stage before it in this list. */
static void add_value(const lt_costs *c, const lt_pipe_value *v, const int *first,
                      lt_costed_pipe *p)
{
    int from = stage_of(first, 0, v->unit), to = from;
    for (int k = 0; k < v->n; k++) {
        int stage = stage_of(first, to, v->uses[k]);
        if (stage == to)
            continue;
        p->bytes[from * p->pipe.stages + stage] += v->bytes * c->images;
        if (v->requires_grad)
            p->grads[to * p->pipe.stages + stage] += v->bytes * c->images;
        to = stage;
    }
}

void lt__costs_pipe(const lt_costs *c, const lt_schedule *schedule, const int *first,
                    lt_costed_pipe *p)
{
    size_t n = (size_t)schedule->stages;
    p->pipe = (lt_pipe){.kind = schedule->kind,
                        .stages = schedule->stages,
                        .micro = c->micro,
                        .lag = schedule->lag,
                        .stage = p->stage,
                        .bytes = p->bytes,
                        .link = c->job->link,
                        .grads = p->grads,
                        .reduce = exposed,
                        .ud = p};
    p->costs = c;
    memcpy(p->first, first, (n + 1) * sizeof *first);
    memset(p->bytes, 0, n * n * sizeof *p->bytes);
    memset(p->grads, 0, n * n * sizeof *p->grads);
    for (int i = 0; i < schedule->stages; i++) {
        lt_unit_costs s = lt__costs_sum(c, first[i], first[i + 1]);
        lt_schedule own = {schedule->kind, schedule->stages, i, schedule->lag};
        p->stage[i] = (lt_pipe_stage){s.forward, s.inputs, s.weights,
                                      exposed(p, i, lt__schedule_in_memory(&own, c->micro)),
                                      s.update};
    }
    for (int i = 0; i < c->net->n_values; i++)
        add_value(c, &c->net->values[i], first, p);
}

/* With a delay, the sums of a step end before the same point of the next step. */
lt_status lt__costs_simulate(const lt_costed_pipe *p, lt_pipe_result *r)
{
    LT_TRY(lt__pipe_simulate(&p->pipe, NULL, NULL, r));
    double seconds = r->seconds;
    for (int i = 0; i < p->pipe.stages && p->costs->job->delay; i++) {
        double sum = lt__costs_exchange(p->costs, p->first[i], p->first[i + 1]);
        r->reduce[i] = fmax(sum - seconds, 0);
        r->seconds = fmax(r->seconds, sum);
    }
    return LT_OK;
}

/* ==== Divisions =============================================================================== */

/* Dynamic programming: best[k][i] is the time of the slowest stage or link if the first i blocks
 * are stages 0 to k. It is the smallest, over h, of the largest of best[k - 1][h], the seconds of
 * blocks h to i - 1, and the seconds of the cut before block h. */
typedef struct table {
    const lt_costs *costs;
    lt_schedule schedule;
    double memory; /* bytes of each stage; 0: no limit */
    double *best;  /* (stages, n_blocks + 1) */
    int *from;     /* (stages, n_blocks + 1) the h of best */
} table;

/* The time of stage k if it has blocks first to end - 1, and of the link before it. INFINITY if
 * they do not fit into memory. */
static double cost(const table *t, int k, int first, int end)
{
    const lt_costs *c = t->costs;
    const lt_unit_costs *a = &c->before[c->begin[first]], *b = &c->before[c->begin[end]];
    double received = k > 0 ? c->cut_bytes[first] : 0;
    if (t->memory > 0) {
        lt_schedule s = {t->schedule.kind, t->schedule.stages, k, t->schedule.lag};
        double saved = (b->saved - a->saved + received) * lt__schedule_in_memory(&s, c->micro);
        if (saved + kept(c, b->state - a->state, b->grads - a->grads) > t->memory)
            return INFINITY;
    }
    double seconds = b->forward - a->forward + b->inputs - a->inputs + b->weights - a->weights;
    return fmax(seconds, received / c->job->link.bytes_per_s);
}

static void fill_row(table *t, int k)
{
    int n = t->costs->n_blocks;
    double *row = t->best + (ptrdiff_t)k * (n + 1);
    int *from = t->from + (ptrdiff_t)k * (n + 1);
    for (int i = 0; i <= n; i++) {
        row[i] = INFINITY;
        for (int h = k; h < i && (k > 0 || h == 0); h++) {
            double slowest = fmax(k > 0 ? row[h - n - 1] : 0, cost(t, k, h, i));
            if (slowest < row[i]) {
                row[i] = slowest;
                from[i] = h;
            }
        }
    }
}

lt_status lt__partition(const lt_costs *c, const lt_schedule *schedule, double memory, int *first,
                        bool *fits)
{
    int stages = schedule->stages, end = c->n_blocks;
    size_t cells = (size_t)stages * ((size_t)end + 1);
    table t = {c, *schedule, memory, malloc(cells * sizeof *t.best), calloc(cells, sizeof *t.from)};
    lt_status status = LT_OK;
    if (t.best && t.from) {
        for (int k = 0; k < stages; k++)
            fill_row(&t, k);
        *fits = isfinite(t.best[cells - 1]);
        first[stages] = end;
        for (int k = stages - 1; k >= 0 && *fits; k--)
            first[k] = end = t.from[(ptrdiff_t)k * (c->n_blocks + 1) + end];
    } else {
        status = lt_fail(LT_ENOMEM, "out of memory to divide a net of %d blocks", end);
    }
    free(t.best);
    free(t.from);
    return status;
}
