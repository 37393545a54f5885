/* test_wrong_calls_dist.c - like test_wrong_calls.c, for groups, reducers, asynchronous training,
 * pipelines and plans. One rank suffices, so that no call waits for another one.
 */
#include "amp/amp.h"
#include "dist/dist.h"
#include "ops/ops.h"
#include "tests/autograd/train.h"
#include "tests/embed/wrong_calls.h"

#include <limits.h>
#include <stdlib.h>

typedef trained net;

static net open_net(const char *update)
{
    return trained_new(lt_open(&(lt_config){.threads = 1, .device = "cpu"}), 3, update);
}

static void close_net(net *n)
{
    trained_free(n);
    lt_ctx_free(n->ctx);
}

/* Forward, backward, and this many optimizer steps. */
static lt_status train(net *n, int steps)
{
    lt_tensor *y = lt_run(n->ctx, "mul", NULL, n->w, n->w, NULL);
    lt_tensor *loss = lt_run(n->ctx, "sum", NULL, y, NULL);
    lt_status status = lt_backward(loss, NULL);
    for (int i = 0; i < steps && status == LT_OK; i++)
        status = step_with(n->optim, "lr=0.1", NULL);
    RELEASE(y, loss);
    return status;
}

/* ==== Groups and reducers ===================================================================== */

TEST(groups)
{
    lt_group *g = NULL;
    float data[4] = {0};
    double numbers[] = {1}, seconds[1];
    REFUSES(LT_EUSAGE, lt_local_open(0, NULL, &g), "0");
    REFUSES(LT_EUSAGE, lt_local_open(-1, NULL, &g), "-1");
    REFUSES(LT_EUSAGE, lt_local_open(INT_MAX, NULL, &g), "256");
    CHECK_OK(lt_local_open(1, NULL, &g));
#define SUM(text, ...)                                                                             \
    REFUSES(LT_EINVAL, lt_group_allreduce(g, &(lt_sum){.what = "x", .data = data, __VA_ARGS__}),   \
            text)
    SUM("-1", .count = -1, .scale = 1);
    SUM("unknown", .count = 1, .dtype = (lt_dtype)99, .scale = 1);
    SUM("u8", .count = 1, .dtype = LT_U8, .scale = 1);
    SUM("i64", .count = 1, .wire = LT_I64, .scale = 1);
    SUM("scale", .count = 1, .dtype = LT_I64, .wire = LT_I64, .scale = 2);
    REFUSES(LT_EINVAL, lt_group_broadcast(g, "x", data, 4, 1), "1");
    REFUSES(LT_EINVAL, lt_group_broadcast(g, "x", data, 4, -1), "-1");
    REFUSES(LT_EINVAL, lt_group_send(g, 0, data, 4), "0");
    REFUSES(LT_EINVAL, lt_group_send(g, -1, data, 4), "-1");
    REFUSES(LT_EINVAL, lt_group_receive(g, INT_MAX, data, 4), "2147483647");
    REFUSES(LT_EINVAL, lt_group_time_allreduce(g, -1, LT_F32, false, seconds, 1), "-1");
    REFUSES(LT_EINVAL, lt_group_time_allreduce(g, 1, LT_U8, false, seconds, 1), "u8");
    REFUSES(LT_EENV, lt_group_time_allreduce(g, 1, LT_F32, true, seconds, 1), "MPI");
    CHECK_OK(lt_group_compare_numbers(g, "x", numbers, 1, 0));
    QUIET((lt_group_set_threads(g, -1), lt_group_cpus(g) >= 1));
    CHECK_OK(lt_group_leave(g));
    lt_group_close(g);
    lt_group_close(NULL);
}

TEST(reducers)
{
    net n = open_net("sgd_step");
    lt_group *g;
    CHECK_OK(lt_local_open(1, NULL, &g));
#define REDUCER(text, ...)                                                                         \
    NONE(LT_EUSAGE, lt_reducer_new(n.ctx, g, &(lt_reducer_config){__VA_ARGS__}), text)
    REDUCER("vranks", .vranks = -1);
    REDUCER("vranks", .vranks = 3);
    REDUCER("vranks", .vranks = 512);
    REDUCER("f16", .vranks = 2, .wire = LT_F16);
    lt_reducer *r = lt_reducer_new(n.ctx, g, NULL);
    CHECK(r != NULL);
    NONE(LT_EINVAL, lt_reducer_new(n.ctx, g, NULL),
         "lt_reducer_new: this context already has a reducer or asynchronous training; free it");
    lt_tensor *x = lt_tensor_full(n.ctx, LT_F32, 1, (int64_t[]){3}, 1);
    lt_bucket bucket;
    REFUSES(LT_EINVAL, lt_reducer_add(r, &x, 1), "parameter");
    CHECK_OK(lt_reducer_add(r, &n.w, 1));
    CHECK_OK(lt_reducer_add(r, &n.w, 1));
    REFUSES(LT_EINVAL, lt_reducer_set_filter(r, &(lt_bucket_filter){.tail = -1}), "-1");
    REFUSES(LT_EINVAL, lt_reducer_set_filter(r, &(lt_bucket_filter){.tail = INT_MAX}), "256");
    QUIET(!lt_reducer_bucket(r, -1, &bucket) && !lt_reducer_bucket(r, INT_MAX, &bucket));
    QUIET(lt_reducer_last(r).buckets == 0);
    CHECK_OK(train(&n, 1));
    lt_reducer_free(r);
    lt_reducer_free(NULL);
    lt_release(x);
    lt_group_close(g);
    close_net(&n);
}

/* ==== Asynchronous training =================================================================== */

static const lt_async_config usual = {
    .rule = "ddc", .staleness = LT_ASYNC_UNBOUNDED, .drop = LT_ASYNC_UNBOUNDED, .workers = 3};

TEST(configs_of_asynchronous_training)
{
    static const double bad[] = {1, 0}, none[] = {NAN};
    static const lt_async_step right[] = {{0, 0, 0}}, worker[] = {{-1, 0, 0}},
                               ticket[] = {{0, -1, 0}}, read[] = {{0, 0, 1}},
                               twice[] = {{0, 0, 0}, {0, 0, 1}};
    net n = open_net("momentum_step");
    lt_async_config c;
#define ASYNC(status, text, ...)                                                                   \
    (c = usual, __VA_ARGS__, NONE(status, lt_async_new(n.ctx, n.optim, &c), text))
    ASYNC(LT_EUSAGE, "rule", c.rule = NULL);
    ASYNC(LT_EUSAGE, "rule", c.rule = "");
    ASYNC(LT_EUSAGE, "rule", c.rule = "dcc");
    ASYNC(LT_EUSAGE, "lam", c.lam = -1);
    ASYNC(LT_EUSAGE, "lam", c.lam = NAN);
    ASYNC(LT_EUSAGE, "staleness", c.staleness = -2);
    ASYNC(LT_EUSAGE, "staleness", c.staleness = INT64_MIN);
    ASYNC(LT_EUSAGE, "drop", c.drop = 0);
    ASYNC(LT_EUSAGE, "drop", c.drop = INT64_MIN);
    ASYNC(LT_EUSAGE, "tickets", c.prefetch = -1);
    ASYNC(LT_EUSAGE, "tickets", c.prefetch = 5);
    ASYNC(LT_EUSAGE, "window", c.max_lead = -2);
    ASYNC(LT_EINVAL, "steps", c.steps = -1);
    ASYNC(LT_EINVAL, "steps", c.steps = INT64_MAX);
    ASYNC(LT_EUSAGE, "workers", c.workers = 0);
    ASYNC(LT_EUSAGE, "workers", c.workers = INT_MAX);
    ASYNC(LT_EUSAGE, "sigma", c.sigma = NAN);
    ASYNC(LT_EUSAGE, "sigma", c.sigma = -1);
    ASYNC(LT_EUSAGE, "sigma", c.sigma = 11);
    ASYNC(LT_EINVAL, "times", c.n_times = 3);
    ASYNC(LT_EINVAL, "times", c.times = bad, c.n_times = -1);
    ASYNC(LT_EUSAGE, "time", c.times = bad, c.n_times = 2);
    ASYNC(LT_EUSAGE, "time", c.times = none, c.n_times = 1);
    ASYNC(LT_EINVAL, "trace", c.trace = right, c.n_trace = -1);
    ASYNC(LT_EUSAGE, "trace", c.trace = worker, c.n_trace = 1);
    ASYNC(LT_EUSAGE, "trace", c.trace = ticket, c.n_trace = 1);
    ASYNC(LT_EUSAGE, "trace", c.trace = read, c.n_trace = 1);
    ASYNC(LT_EUSAGE, "trace", c.trace = twice, c.n_trace = 2);
    lt_tensor *buffers[] = {n.w, NULL};
    lt_group *g = NULL;
    CHECK_OK(lt_local_open(1, NULL, &g));
    ASYNC(LT_EINVAL, "buffer 1 is NULL", c.buffers = buffers, c.n_buffers = 2);
    ASYNC(LT_EINVAL, "no group", c.server = lt_open(&(lt_config){.threads = 1, .device = "cpu"}));
    ASYNC(LT_EINVAL, "server is NULL on rank 0", c.group = g);
    lt_group_close(g);
    CHECK_OK(train(&n, 1)); /* ordinary training is still possible */
    close_net(&n);
}

TEST(the_order_of_asynchronous_calls)
{
    net n = open_net("momentum_step");
    lt_async_event e;
    lt_async_stats stats;
    char name[LT_ASYNC_NAME];
    lt_async *a = lt_async_new(n.ctx, n.optim, &usual);
    CHECK(a != NULL);
    NONE(LT_EINVAL, lt_async_new(n.ctx, n.optim, &usual), "asynchronous");
    REFUSES(LT_EINVAL, lt_async_set_limit(a, -1), "-1");
    CHECK_OK(lt_async_set_limit(a, 4));
    REFUSES(LT_EINVAL, lt_async_set_limit(a, 3), "3");
    REFUSES(LT_EINVAL, lt_async_read_stats(a, -1, &stats), "-1");
    CHECK_OK(lt_async_read_stats(a, 1000, &stats));
    QUIET(lt_async_state(a, INT_MAX, name) == NULL);
    QUIET(!lt_async_poll(a, &e));
    CHECK_OK(lt_async_next(a, &e));
    CHECK_EQ(e.kind, LT_ASYNC_EVENT_COMPUTE);
    CHECK_OK(train(&n, 1));
    REFUSES(LT_EINVAL, step_with(n.optim, "lr=0.1", NULL), "backward");
    CHECK_OK(lt_async_next(a, &e));
    while (e.kind != LT_ASYNC_EVENT_COMPUTE)
        CHECK_OK(lt_async_next(a, &e));
    REFUSES(LT_EINVAL, lt_async_next(a, &e), "step");
    REFUSES(LT_EINVAL, lt_async_next(a, &e), "failed before");
    CHECK_OK(lt_async_finish(a));
    CHECK_OK(lt_async_finish(a));
    lt_async_free(a);
    lt_async_free(NULL);
    CHECK_OK(train(&n, 1));
    a = lt_async_new(n.ctx, n.optim, &usual);
    CHECK_OK(lt_async_set_limit(a, 4));
    lt_ctx_free(n.ctx);
    n.ctx = NULL;
    lt_async_free(a);
    close_net(&n);
}

/* Numbers of a saved state, some of them replaced. Whatever is accepted must train to its end, and
 * apply no ticket twice. */
static void restore_damaged(unsigned seed)
{
    enum { MOST = 16, TICKETS = 40 };
    static const int64_t odd[] = {-1, 0, 1, 7, 4096, INT64_MAX, INT64_MIN, INT64_MAX / 2};
    net n = open_net("momentum_step");
    char name[MOST][LT_ASYNC_NAME];
    const char *names[MOST];
    lt_tensor *x[MOST];
    lt_async_event e;
    bool seen[TICKETS] = {false};
    int count = 0, fresh, left = 4 * TICKETS;
    lt_async *a = lt_async_new(n.ctx, n.optim, &usual);
    lt_status status = lt_async_set_limit(a, 12);
    for (int k = rand_r(&seed) % 12; k > 0 && status == LT_OK; k--)
        if ((status = lt_async_next(a, &e)) == LT_OK && e.kind == LT_ASYNC_EVENT_COMPUTE)
            status = train(&n, 1);
    CHECK_OK(status);
    for (; count < MOST && (x[count] = lt_async_state(a, count, name[count])); count++) {
        names[count] = name[count];
        if (lt_tensor_dtype(x[count]) == LT_I64)
            ((int64_t *)lt_data(x[count]))[rand_r(&seed) % lt_count(x[count])] =
                odd[rand_r(&seed) % (sizeof odd / sizeof *odd)];
    }
    lt_async_free(a);
    a = lt_async_new(n.ctx, n.optim, &usual);
    status = lt_async_restore(a, names, x, count, &fresh);
    if (status != LT_OK) {
        CHECK_EQ(status, LT_EFILE);
    } else {
        CHECK_OK(lt_async_set_limit(a, TICKETS));
        while (left-- > 0 && (status = lt_async_next(a, &e)) == LT_OK &&
               e.kind != LT_ASYNC_EVENT_DONE) {
            if (e.kind == LT_ASYNC_EVENT_COMPUTE)
                CHECK_OK(train(&n, 1));
            if (e.kind == LT_ASYNC_EVENT_PUSH && !e.dropped && e.ticket < TICKETS) {
                CHECK(!seen[e.ticket]);
                seen[e.ticket] = true;
            }
        }
        CHECK(left >= 0);
    }
    lt_async_free(a);
    for (int i = 0; i < count; i++)
        lt_release(x[i]);
    close_net(&n);
}

TEST(damaged_states_of_asynchronous_training)
{
    for (unsigned seed = 1; seed <= 100; seed++)
        restore_damaged(seed);
}

/* ==== Pipelines and profiles ================================================================== */

static int stage_of(void *ud, const char *name, const lt_tensor *x)
{
    (void)name, (void)x;
    return *(int *)ud;
}

static lt_status place(lt_ctx *ctx)
{
    lt_params *params = lt_params_new(ctx);
    lt_tensor *w = lt_param_new(ctx, LT_F32, 1, (int64_t[]){3}, (lt_init){LT_INIT_CONSTANT, 1, 0});
    lt_status status = lt_params_add(params, "w", w);
    if (status == LT_OK)
        status = lt_params_place(params);
    lt_params_free(params);
    lt_release(w);
    return status;
}

TEST(pipelines)
{
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 1, .device = "cpu"});
    lt_group *g;
    CHECK_OK(lt_local_open(1, NULL, &g));
    int stage = 0;
#define PIPELINE(status, text, ...)                                                                \
    NONE(status,                                                                                   \
         lt_pipeline_new(ctx, g,                                                                   \
                         &(lt_pipeline_config){.stage_of = stage_of, .ud = &stage, __VA_ARGS__}),  \
         text)
    PIPELINE(LT_EUSAGE, "stages", .stages = 0);
    PIPELINE(LT_EUSAGE, "stages", .stages = -1);
    PIPELINE(LT_EUSAGE, "stages", .stages = INT_MAX);
    PIPELINE(LT_EINVAL, "schedule", .stages = 1, .kind = (lt_schedule_kind)99);
    PIPELINE(LT_EINVAL, "lag", .stages = 1, .lag = -1);
    lt_pipeline_config config = {.stages = 1, .stage_of = stage_of, .ud = &stage};
    lt_pipeline *p = lt_pipeline_new(ctx, g, &config);
    CHECK(p != NULL);
    NONE(LT_EINVAL, lt_pipeline_new(ctx, g, &config),
         "already has a pipeline or a profile; free it first");
    REFUSES(LT_EINVAL, lt_pipeline_set_micro_batch(p, -1, 2, 0.5),
            "lt_pipeline_set_micro_batch: n must be at least 1, i from 0 to n - 1 and share from 0 "
            "to 1, but n is 2, i is -1 and share is 0.5");
    REFUSES(LT_EINVAL, lt_pipeline_set_micro_batch(p, 2, 2, 0.5), "2");
    REFUSES(LT_EINVAL, lt_pipeline_set_micro_batch(p, 0, 0, 1), "0");
    REFUSES(LT_EINVAL, lt_pipeline_set_micro_batch(p, 0, INT_MIN, 1), "-2147483648");
    REFUSES(LT_EINVAL, lt_pipeline_set_micro_batch(p, 0, 2, -0.5), "-0.5");
    REFUSES(LT_EINVAL, lt_pipeline_set_micro_batch(p, 0, 2, 1.5), "1.5");
    REFUSES(LT_EINVAL, lt_pipeline_set_micro_batch(p, 0, 2, NAN), "nan");
    CHECK_OK(lt_pipeline_set_micro_batch(p, 0, 2, 0.5));
    for (int wrong = -1; wrong < 2; wrong += 2) {
        stage = wrong;
        REFUSES(LT_EINVAL, place(ctx), "stage");
    }
    stage = 0;
    CHECK_OK(place(ctx));
    lt_pipeline_free(p);
    lt_pipeline_free(NULL);
    lt_group_close(g);
    lt_ctx_free(ctx);
}

TEST(profiles)
{
    lt_ctx *ctx = lt_open(&(lt_config){.threads = 1, .device = "cpu"});
    lt_pipe_net none = {0};
    NONE(LT_EINVAL, lt_profile_new(ctx, -5), "timed passes must be at least 0, but is -5");
    lt_profile *p = lt_profile_new(ctx, 0);
    CHECK(p != NULL);
    NONE(LT_EINVAL, lt_profile_new(ctx, 2), "already has a pipeline or a profile; free it first");
    QUIET(!lt_profile_is_complete(p));
    CHECK(lt_profile_net(p)->n_units == 0);
    REFUSES(LT_EINVAL, lt_profile_rename(p, 0, "layer"), "no unit 0");
    CHECK_OK(lt_profile_take_net(p, 1, &none));
    CHECK(none.n_units == 0 && none.n_params == 0 && none.n_values == 0);
    none.n_units = 1;
    REFUSES(LT_EINVAL, lt_profile_add_times(p, 1, &none), "0 units");
    none.n_units = 0;
    lt_pipe_net_free(&none);
    lt_pipe_net_free(&none);
    lt_profile_free(p);
    lt_profile_free(NULL);
    lt_ctx_free(ctx);
}

/* ==== Plans =================================================================================== */

static double measured(unsigned *seed) { return rand_r(seed) / (double)RAND_MAX; }

/* A number, rarely an odd one. */
static double number(unsigned *seed)
{
    static const double odd[] = {NAN, INFINITY, -1, 0, 1e100, 1e-100, 1e308};
    int k = rand_r(seed) % 600;
    return k < 7 ? odd[k] : measured(seed);
}

/* An integer from low to high, rarely one less or one more. */
static int integer(unsigned *seed, int low, int high)
{
    int k = rand_r(seed) % 100;
    return k == 0 ? low - 1 : k == 1 ? high + 1 : low + rand_r(seed) % (high - low + 1);
}

static int choice(unsigned *seed, int low, int high)
{
    return rand_r(seed) % 2 ? LT_PIPE_ANY : integer(seed, low, high);
}

/* A net and a job of random numbers, in about half of the cases with one out of range. A plan that
 * is found has the same time when it is predicted. Returns the number of plans. */
static int plan_any(unsigned seed)
{
    enum { MOST = 6 };
    lt_pipe_unit units[MOST] = {{0}};
    lt_pipe_value values[MOST];
    int uses[MOST][3];
    for (int i = 0; i < MOST; i++) {
        lt_pipe_unit *u = &units[i];
        u->may_begin_stage = rand_r(&seed) % 4 > 0;
        for (int s = 0; s < LT_PIPE_SIZES; s++)
            u->forward[s] = measured(&seed), u->inputs[s] = u->weights[s] = measured(&seed);
        u->update = measured(&seed);
        u->grad_bytes = measured(&seed), u->state_bytes = measured(&seed);
        uses[i][0] = i + 1;
        uses[i][1] = i + 2 + rand_r(&seed) % 2;
        uses[i][2] = i + 4;
        values[i] = (lt_pipe_value){.unit = i,
                                    .uses = uses[i],
                                    .n = 1 + rand_r(&seed) % 2,
                                    .bytes = measured(&seed),
                                    .requires_grad = rand_r(&seed) % 2};
    }
    lt_pipe_net parts = {.n_sizes = 1 + rand_r(&seed) % LT_PIPE_SIZES,
                         .sizes = {1, 2 + measured(&seed), 4},
                         .units = units,
                         .n_units = 1 + rand_r(&seed) % MOST,
                         .values = values};
    parts.n_values = parts.n_units > 3 ? parts.n_units - 3 : 0;
    lt_pipe_job job = {.ranks = integer(&seed, 1, 6),
                       .batch = integer(&seed, 1, 40),
                       .link = {number(&seed), number(&seed)},
                       .exchange = {number(&seed), number(&seed)},
                       .memory = rand_r(&seed) % 4 ? 0 : 200 * number(&seed),
                       .wire_bytes = 2 * integer(&seed, 0, 2),
                       .stages = choice(&seed, 1, 3),
                       .replicas = choice(&seed, 1, 2),
                       .micro = choice(&seed, 1, 4),
                       .lag = choice(&seed, 0, 3),
                       .kind = choice(&seed, 0, LT_SCHEDULE_KINDS - 1)};
    lt_pipe_plans plans = {0};
    lt_status status = lt_pipe_plans_find(&parts, &job, &plans);
    if (status != LT_OK) {
        CHECK_EQ(status, LT_EINVAL);
        return 0;
    }
    int n = plans.n;
    for (int i = 0; i < n; i++) {
        double seconds = plans.plan[i].seconds;
        CHECK(seconds >= 0);
        CHECK_OK(lt_pipe_plan_predict(&parts, &job, &plans.plan[i]));
        CHECK_NEAR(plans.plan[i].seconds, seconds, 0);
    }
    lt_pipe_plans_free(&plans);
    return n;
}

TEST(plans_of_any_numbers)
{
    int found = 0;
    for (unsigned seed = 1; seed <= 500; seed++)
        found += plan_any(seed) > 0;
    CHECK(found > 100 && found < 400);
    lt_pipe_plans_free(&(lt_pipe_plans){0});
}

TEST(plans_out_of_range)
{
    lt_pipe_unit unit = {.forward = {1}};
    lt_pipe_net parts = {.n_sizes = 1, .sizes = {1}, .units = &unit, .n_units = 1};
    lt_pipe_job job = {.ranks = 1,
                       .batch = 8,
                       .link = {0, 1},
                       .exchange = {0, 1},
                       .stages = LT_PIPE_ANY,
                       .replicas = LT_PIPE_ANY,
                       .micro = LT_PIPE_ANY,
                       .lag = LT_PIPE_ANY,
                       .kind = LT_PIPE_ANY},
                wrong;
    lt_pipe_plan_stage stage = {.first = 0};
    lt_pipe_plan plan = {.stages = 1, .replicas = 1, .micro = 1, .kind = LT_1F1B, .stage = &stage};
    lt_pipe_plans plans;
    CHECK_OK(lt_pipe_plan_predict(&parts, &job, &plan));
#define JOB(text, ...)                                                                             \
    (wrong = job, __VA_ARGS__, REFUSES(LT_EINVAL, lt_pipe_plans_find(&parts, &wrong, &plans), text))
    JOB("rank", wrong.ranks = 0);
    JOB("ranks", wrong.ranks = INT_MAX);
    JOB("batch", wrong.batch = -1);
    JOB("link", wrong.link.bytes_per_s = 0);
    JOB("memory", wrong.memory = -1);
    JOB("bytes", wrong.wire_bytes = 3);
    JOB("micro", wrong.micro = INT_MAX);
    JOB("stages", wrong.stages = INT_MAX);
    JOB("kind", wrong.kind = 99);
    plan.stages = 0;
    REFUSES(LT_EINVAL, lt_pipe_plan_predict(&parts, &job, &plan), "stages");
    plan.stages = 1, stage.first = 5;
    REFUSES(LT_EINVAL, lt_pipe_plan_predict(&parts, &job, &plan), "5");
    stage.first = 0, plan.lag = -1;
    REFUSES(LT_EINVAL, lt_pipe_plan_predict(&parts, &job, &plan), "lag");
}
