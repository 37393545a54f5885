/* trainer.h - trains a small net on several ranks in threads, and compares with the same net on
 * one. */
#ifndef LT_TESTS_TRAINER_H
#define LT_TESTS_TRAINER_H

#include <stdlib.h>

#include "core/tensor.h"
#include "ops/ops.h"
#include "tests/dist/threads.h"

enum { MOST_TRAINERS = 5, WIDTH = 3, HIDDEN = 40, CLASSES = 4, STEPS = 5, MAX_ROWS = 13 };
enum { W1, B1, W2, B2, RARE, NEVER, PARAMS };

typedef enum odd {
    EVEN,
    ODD_LR,
    ODD_CLIP,
    ODD_FROZEN,
    ODD_WRITE,
    PUT_BACK,
    ODD_ROWS,
    ODD_DATA
} odd;

typedef struct plan { /* a training run */
    odd odd;          /* how rank 1 differs, beginning with step 3 */
    int ranks;
    lt_dtype dtype;
    int rows[STEPS];   /* rows of the global batch */
    int micro_batches; /* micro-batches of a share */
    int splits;        /* backwards are split and then completed: 1 at once, 2 before the step */
    bool grows, tells; /* one more micro-batch in each step; the reducer is given the number */
    bool rare;         /* the rank with row 0 uses RARE */
    bool late;         /* ranks pause sometimes */
    bool norm;         /* batch norm is the first layer */
    bool sync;         /* sync batch norm follows the first layer */
    bool breaks;       /* backward fails on rank 1 in step 3 */
    bool stops;        /* rank 1 requests a stop in step 3 */
    bool changes;      /* bucket sizes and times of sending differ from step to step */
    bool poisons;      /* a rank without rows has infinite gradients */
    const struct lt_bucket_filter *filter; /* its ud is set to the trainer */
    const char *fault;
    lt_reducer_config config;
    const lt_reducer_config *other; /* of rank 1 if not NULL */
} plan;

typedef struct trained {
    double first[PARAMS][CLASSES * HIDDEN], w[PARAMS][CLASSES * HIDDEN]; /* initial, final */
    double mean[HIDDEN], var[HIDDEN], loss[STEPS];
    int buckets[STEPS], stop[STEPS];
    lt_status status;
    char text[256];
} trained;

typedef struct trainer { /* of one rank */
    const plan *plan;
    int rank;
    lt_group *group;
    lt_ctx *ctx;
    lt_reducer *reducer;
    lt_params *params;
    lt_tensor *w[PARAMS], *mean, *var, *scale, *shift;
    lt_optim *optim;
    trained *result;
    lt_deferred_wgrad *pending[8];
    int n_pending;
    bool poisons;         /* in this step */
    int measured[PARAMS]; /* number of calls of a filter's measure */
} trainer;

static const int64_t dims_of[PARAMS][2] = {
    [W1] = {HIDDEN, WIDTH}, [B1] = {HIDDEN},           [W2] = {CLASSES, HIDDEN},
    [B2] = {CLASSES},       [RARE] = {CLASSES, WIDTH}, [NEVER] = {7}};

static void pause_us(long us) { nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL); }

/* ==== The net ================================================================================= */

static lt_status pause_in_hook(void *ud, lt_tensor *x, lt_tensor *grad)
{
    uint32_t word[4];
    trainer *r = ud;
    (void)x, (void)grad;
    lt_random((uint64_t)r->rank, LT_RNG_USER, (uint64_t)lt_step(r->ctx), (uintptr_t)x, word);
    if (word[0] % 2)
        pause_us(word[1] % 2000);
    return LT_OK;
}

static lt_status fail_in_hook(void *ud, lt_tensor *x, lt_tensor *grad)
{
    trainer *r = ud;
    (void)x, (void)grad;
    return r->rank == 1 && lt_step(r->ctx) == 2 ? lt_fail(LT_ENUMERIC, "the hook says no") : LT_OK;
}

static lt_status poison_in_hook(void *ud, lt_tensor *x, lt_tensor *grad)
{
    trainer *r = ud;
    (void)x;
    return r->poisons ? lt_fill(grad, INFINITY) : LT_OK;
}

static lt_status make_params(trainer *r)
{
    static const char *const names[PARAMS] = {"w1", "b1", "w2", "b2", "rare", "never"};
    int64_t width = r->plan->sync ? HIDDEN : WIDTH;
    r->params = lt_params_new(r->ctx);
    for (int i = 0; i < PARAMS; i++) {
        /* different values on each rank: rank 0's must win */
        lt_init init = {LT_INIT_UNIFORM, -0.5 - r->rank, 0.5};
        r->w[i] = lt_param_new(r->ctx, r->plan->dtype, dims_of[i][1] ? 2 : 1, dims_of[i], init);
        LT_TRY(lt_params_add(r->params, names[i], r->w[i]));
        if (r->plan->late)
            LT_TRY(lt_on_grad(r->w[i], pause_in_hook, r, NULL));
        if (r->plan->poisons)
            LT_TRY(lt_on_grad(r->w[i], poison_in_hook, r, NULL));
    }
    if (r->plan->breaks)
        LT_TRY(lt_on_grad(r->w[B1], fail_in_hook, r, NULL));
    r->mean = lt_buffer_new(r->ctx, r->plan->dtype, 1, &width, (lt_init){LT_INIT_CONSTANT, 0, 0});
    r->var = lt_buffer_new(r->ctx, r->plan->dtype, 1, &width, (lt_init){LT_INIT_CONSTANT, 1, 0});
    LT_TRY(lt_params_add(r->params, "mean", r->mean));
    LT_TRY(lt_params_add(r->params, "var", r->var));
    r->scale = lt_tensor_full(r->ctx, r->plan->dtype, 1, &width, 1);
    r->shift = lt_tensor_full(r->ctx, r->plan->dtype, 1, &width, 0);
    LT_TRY(lt_params_place(r->params));
    r->optim = lt_optim_new(r->ctx, "momentum_step", r->w, PARAMS);
    return r->optim ? LT_OK : lt_errcode();
}

static float number(int step, int64_t row, int column)
{
    uint32_t word[4];
    lt_random(7, LT_RNG_USER, (uint64_t)step, (uint64_t)(row * WIDTH + column), word);
    return (float)word[0] * 0x1p-31f - 1;
}

/* Rows [first, first + n) of a step's batch. If `only` is set, all but row 0 are zero. New. */
static lt_tensor *rows_of(trainer *r, int step, int64_t first, int64_t n, bool only)
{
    float values[MAX_ROWS * WIDTH];
    int64_t dims[2] = {n, WIDTH};
    for (int64_t i = 0; i < n * WIDTH; i++)
        values[i] =
            only && first + i / WIDTH > 0 ? 0 : number(step, first + i / WIDTH, (int)(i % WIDTH));
    lt_tensor *x = lt_tensor_new(r->ctx, r->plan->dtype, 2, dims);
    lt_convert(lt_data(x), r->plan->dtype, values, LT_F32, (size_t)(n * WIDTH));
    return x;
}

static lt_tensor *labels_of(trainer *r, int64_t first, int64_t n)
{
    int64_t y[MAX_ROWS];
    for (int64_t i = 0; i < n; i++)
        y[i] = (first + i) * 5 % CLASSES;
    return lt_tensor_from(r->ctx, LT_I64, 1, &n, y);
}

/* y = op(y, ...). Releases the old y. */
#define APPLY(y, op, options, ...)                                                                 \
    do {                                                                                           \
        lt_tensor *before_ = (y);                                                                  \
        (y) = lt_run(r->ctx, op, options, before_, ##__VA_ARGS__, NULL);                           \
        lt_release(before_);                                                                       \
        if (!(y))                                                                                  \
            return lt_errcode();                                                                   \
    } while (0)

/* The loss of the rows, multiplied by a factor. New. */
static lt_status find_loss(trainer *r, int step, int64_t first, int64_t n, lt_tensor *labels,
                           lt_tensor *factor, lt_tensor **loss)
{
    lt_tensor *y = rows_of(r, step, first, n, false);
    if (r->plan->norm)
        APPLY(y, "batch_norm", "train=true", r->scale, r->shift, r->mean, r->var);
    APPLY(y, "linear", NULL, r->w[W1], r->w[B1]);
    if (r->plan->sync)
        APPLY(y, "batch_norm", "train=true sync=true", r->scale, r->shift, r->mean, r->var);
    APPLY(y, "tanh", NULL);
    APPLY(y, "linear", NULL, r->w[W2], r->w[B2]);
    if (r->plan->rare && first == 0) {
        lt_tensor *z = rows_of(r, step, first, n, true);
        APPLY(z, "linear", NULL, r->w[RARE]);
        APPLY(y, "add", NULL, z);
        lt_release(z);
    }
    APPLY(y, "cross_entropy", NULL, labels);
    APPLY(y, "mul", NULL, factor);
    *loss = y;
    return LT_OK;
}

static lt_status complete_pending(trainer *r)
{
    lt_status status = LT_OK;
    for (int i = 0; i < r->n_pending && status == LT_OK; i++)
        status = lt_backward_weights(r->pending[i]);
    r->n_pending = 0;
    return status;
}

static lt_status split_back(trainer *r, lt_tensor *loss)
{
    lt_tensor *grad = NULL;
    lt_status status = lt_backward_from(r->ctx, &loss, &grad, 1, &r->pending[r->n_pending]);
    r->n_pending += status == LT_OK;
    if (status != LT_OK) {
        while (r->n_pending > 0)
            lt_deferred_wgrad_free(r->pending[--r->n_pending]);
        return status;
    }
    return r->plan->splits == 1 ? complete_pending(r) : LT_OK;
}

/* Runs forward and backward of the rows. weight: their fraction of this rank's rows. */
static lt_status learn(trainer *r, int step, int64_t first, int64_t n, double weight)
{
    lt_tensor *labels = labels_of(r, first, n), *loss = NULL;
    lt_tensor *factor = lt_tensor_full(r->ctx, r->plan->dtype, 0, NULL, weight);
    lt_status status = find_loss(r, step, first, n, labels, factor, &loss);
    if (status == LT_OK)
        status = r->plan->splits ? split_back(r, loss) : lt_backward(loss, NULL);
    lt_release(loss);
    lt_release(labels);
    lt_release(factor);
    return status;
}

static bool is_odd(const trainer *r, odd what)
{
    return r->plan->odd == what && r->rank == 1 && lt_step(r->ctx) >= 2;
}

/* Applies the rank's differences before a step. */
static lt_status be_odd(trainer *r)
{
    if (is_odd(r, ODD_FROZEN))
        LT_TRY(lt_set_requires_grad(r->w[B1], false));
    if (is_odd(r, ODD_DATA))
        lt_reducer_set_data(r->reducer, 7);
    if (!is_odd(r, ODD_WRITE) && !is_odd(r, PUT_BACK))
        return LT_OK;
    lt_tensor *before = lt__tensor_copy(r->w[W2], r->plan->dtype);
    LT_TRY(lt_fill(r->w[W2], 0.5));
    lt_status status = is_odd(r, PUT_BACK) ? lt_copy(r->w[W2], before) : LT_OK;
    lt_release(before);
    return status;
}

static lt_status update(trainer *r)
{
    lt_opt opts[LT_MAX_OPT];
    const lt_schema *schema = &lt_optim_def(r->optim)->schema;
    const char *text = is_odd(r, ODD_LR) ? "lr=0.2 momentum=0.9 weight_decay=0.01"
                                         : "lr=0.1 momentum=0.9 weight_decay=0.01";
    LT_TRY(lt_opts_parse(schema, text, opts));
    if (r->plan->odd == ODD_CLIP)
        return lt_optim_step_clipped(r->optim, (const lt_opt *const[]){opts}, 1,
                                     is_odd(r, ODD_CLIP) ? 1e3 : 1e4, NULL, NULL);
    return lt_optim_step(r->optim, (const lt_opt *const[]){opts}, 1, NULL);
}

/* ==== Training ================================================================================ */

static lt_status take_step(trainer *r, int step)
{
    const plan *p = r->plan;
    int64_t rows = p->rows[step], n = p->ranks;
    int64_t first = (rows * r->rank + n - 1) / n, end = (rows * (r->rank + 1) + n - 1) / n;
    int64_t own = end - first;
    LT_TRY(be_odd(r));
    if (r->reducer)
        lt_reducer_set_share(r->reducer, own, rows + is_odd(r, ODD_ROWS));
    r->poisons = p->poisons && own == 0;
    if (own == 0) { /* computes one row that does not count */
        first = 1;
        own = 1;
    }
    int64_t micro_batches = p->micro_batches + (p->grows ? step : 0),
            size = (own + micro_batches - 1) / micro_batches;
    if (r->reducer && p->tells)
        lt_reducer_expect_backwards(r->reducer, (int)((own + size - 1) / size));
    for (int64_t at = 0; at < own; at += size) {
        int64_t piece = own - at < size ? own - at : size;
        LT_TRY(learn(r, step, first + at, piece, (double)piece / (double)own));
    }
    LT_TRY(complete_pending(r));
    return update(r);
}

/* Checks that each bucket is sent after it is complete and after the previous one. */
static lt_status check_times(trainer *r, int sent)
{
    lt_bucket b;
    double free = 0;
    int n = 0;
    for (int i = 0; lt_reducer_bucket(r->reducer, i, &b); i++) {
        if (b.bytes == 0)
            continue;
        if (b.ready < 0 || b.began < b.ready || b.began < free || b.ended < b.began)
            return lt_fail(LT_EINVAL, "bucket %d has times %g %g %g", i, b.ready, b.began, b.ended);
        free = b.ended;
        n++;
    }
    bool none = r->plan->config.no_sync;
    return n == (none ? 0 : sent)
               ? LT_OK
               : lt_fail(LT_EINVAL, "%d buckets have times, %d were sent", n, sent);
}

static void copy_params(const trainer *r, double to[PARAMS][CLASSES * HIDDEN])
{
    for (int i = 0; i < PARAMS; i++)
        lt_convert(to[i], LT_F64, lt_data(r->w[i]), r->plan->dtype, (size_t)lt_count(r->w[i]));
}

static lt_status train(trainer *r)
{
    trained *to = r->result;
    LT_TRY(make_params(r));
    if (r->group) {
        bool differs = r->plan->other && r->rank == 1;
        const lt_reducer_config *config = differs ? r->plan->other : &r->plan->config;
        if (!(r->reducer = lt_reducer_new(r->ctx, r->group, config)))
            return lt_errcode();
        LT_TRY(lt_reducer_add(r->reducer, r->w, PARAMS));
        LT_TRY(lt_reducer_add(r->reducer, r->w, 2)); /* already added */
        lt_set_allreduce(r->ctx, lt_reducer_allreduce, r->reducer);
        if (r->plan->filter) {
            lt_bucket_filter filter = *r->plan->filter;
            filter.ud = r;
            LT_TRY(lt_reducer_set_filter(r->reducer, &filter));
        }
    }
    copy_params(r, to->first);
    lt_stop_listen(r->ctx, true);
    for (int step = 0; step < STEPS; step++) {
        if (r->reducer && r->plan->changes)
            LT_TRY(lt_reducer_configure(
                r->reducer,
                &(lt_reducer_config){.blocking = step % 2, .bucket = 1 + 300 * (size_t)step}));
        if (r->plan->stops && r->rank == 1 && step == 2)
            lt_stop(r->ctx, 15);
        LT_TRY(take_step(r, step));
        if (r->reducer) {
            to->stop[step] = lt_reducer_last(r->reducer).stop_reason;
            to->loss[step] = lt_reducer_last(r->reducer).loss;
            to->buckets[step] = lt_reducer_last(r->reducer).buckets;
            LT_TRY(check_times(r, to->buckets[step]));
        }
    }
    copy_params(r, to->w);
    size_t width = (size_t)lt_count(r->mean);
    lt_convert(to->mean, LT_F64, lt_data(r->mean), r->plan->dtype, width);
    lt_convert(to->var, LT_F64, lt_data(r->var), r->plan->dtype, width);
    return LT_OK;
}

static void *run_trainer(void *ud)
{
    trainer *r = ud;
    r->ctx = lt_open(&(lt_config){.threads = 1, .seed = 3, .fault = r->plan->fault});
    r->result->status = train(r);
    if (r->result->status != LT_OK) {
        snprintf(r->result->text, sizeof r->result->text, "%s", lt_errmsg());
        /* a reducer reports a failed backward; a rank that leaves is not reported */
        bool says = r->plan->breaks || r->result->status == LT_EDONE;
        if (r->group && !says)
            lt_group_fail(r->group);
    }
    lt_reducer_free(r->reducer);
    lt_group_close(r->group);
    lt_optim_free(r->optim);
    for (int i = 0; i < PARAMS; i++)
        lt_release(r->w[i]);
    lt_tensor *others[] = {r->mean, r->var, r->scale, r->shift};
    for (int i = 0; i < 4; i++)
        lt_release(others[i]);
    lt_params_free(r->params);
    lt_ctx_free(r->ctx);
    return NULL;
}

/* Trains on all ranks. A single rank trains without a reducer. */
static void train_all(const plan *p, trained results[MOST_TRAINERS])
{
    lt_group *group[MOST_TRAINERS] = {NULL};
    trainer ranks[MOST_TRAINERS];
    if (p->ranks > 1)
        CHECK_OK(lt_local_open(p->ranks, &(lt_group_config){.timeout = 20}, group));
    for (int i = 0; i < p->ranks; i++) {
        results[i] = (trained){.status = LT_OK};
        ranks[i] = (trainer){.plan = p, .rank = i, .group = group[i], .result = &results[i]};
    }
    run_threads(p->ranks, run_trainer, ranks, sizeof *ranks);
}

/* The same; checks that no rank fails. */
static inline void check_train_all(const plan *p, trained results[MOST_TRAINERS])
{
    train_all(p, results);
    for (int i = 0; i < p->ranks; i++)
        if (results[i].status != LT_OK)
            FAIL("rank %d: %s", i, results[i].text);
}

static inline void set_rows(plan *p, int a, int b, int c, int d, int e)
{
    memcpy(p->rows, (int[STEPS]){a, b, c, d, e}, sizeof p->rows);
}

/* Checks that all ranks end with the same bits, close to the result of one rank. */
static inline void check_against_one(const plan *p, double tolerance)
{
    static trained one[MOST_TRAINERS], many[MOST_TRAINERS];
    plan alone = *p;
    alone.ranks = 1;
    train_all(&alone, one);
    check_train_all(p, many);
    for (int i = 0; i < p->ranks; i++) {
        CHECK(memcmp(many[i].w, many[0].w, sizeof many[0].w) == 0);
        CHECK(memcmp(many[i].loss, many[0].loss, sizeof many[0].loss) == 0);
    }
    for (int k = 0; k < PARAMS; k++)
        for (int i = 0; i < CLASSES * HIDDEN; i++)
            if (!(fabs(many[0].w[k][i] - one[0].w[k][i]) <= tolerance))
                FAIL("%d ranks, parameter %d, element %d is %.17g, on one rank %.17g", p->ranks, k,
                     i, many[0].w[k][i], one[0].w[k][i]);
}

static const plan usual = {.ranks = 3,
                           .dtype = LT_F64,
                           .rows = {13, 9, 6, 12, 11},
                           .micro_batches = 1,
                           .config = {.first_bucket = 400, .bucket = 700}};

#endif
