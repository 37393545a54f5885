/* test_async_state.c - the state of asynchronous training is saved in the middle of an epoch, while
 * workers compute, and restored: training continues with the same bits. */
#include "core/tensor.h"
#include "dist/async/server.h"
#include "tests/device/emu.h"
#include "tests/dist/async_net.h"

enum { WORKERS = 4, HALF = 15, TICKETS = 40 };

static const char *const ops[][2] = {{"momentum_step", "lr=0.02 momentum=0.5"},
                                     {"sgd_step", "lr=0.02"}};

static const double times[WORKERS] = {1, 1.3, 2.1, 3.7};

static lt_async_config usual_config(const char *rule)
{
    lt_async_config config = config_of(rule, WORKERS);
    config.prefetch = 2;
    config.times = times;
    config.n_times = WORKERS;
    return config;
}

/* Copies values, buffers and optimizer slots, as a checkpoint of the net does. */
static void copy_net(net *to, net *from)
{
    lt_image a, b;
    CHECK_OK(lt__image_open(&a, to->ctx, to->optim, to->buffers, 2));
    CHECK_OK(lt__image_open(&b, from->ctx, from->optim, from->buffers, 2));
    CHECK_OK(lt__image_copy(&a, &b));
    lt__image_close(&a);
    lt__image_close(&b);
}

/* ==== The server ============================================================================== */

typedef struct side { /* a server, and workers that compute in its net */
    net net;
    lt_image image;
    lt_server server;
    lt_gradient gradient[WORKERS];
    int64_t pushes[WORKERS];
    int computing; /* the worker whose gradient is stored */
} side;

static lt_status store(void *ud, lt_optim *optim, const lt_opt *const *options,
                       lt_step_status step_status, double factor)
{
    side *s = ud;
    CHECK(optim == s->net.optim);
    return lt__gradient_store(&s->gradient[s->computing], options, step_status, factor);
}

static void open_side(side *s, const char *rule, const char *const op[2])
{
    const lt_async_config config = usual_config(rule);
    *s = (side){.net = make(op[0], op[1])};
    CHECK_OK(lt__image_open(&s->image, s->net.ctx, s->net.optim, NULL, 0));
    CHECK_OK(lt__server_open(&s->server, &s->image, &config));
    for (int i = 0; i < WORKERS; i++)
        CHECK_OK(lt__gradient_open(&s->gradient[i], &s->image, false));
    CHECK_OK(lt_set_part(s->net.ctx, LT_PART_EXCHANGE, &(lt_step_part){.ud = s, .apply = store}));
}

static void close_side(side *s)
{
    for (int i = 0; i < WORKERS; i++)
        lt__gradient_close(&s->gradient[i]);
    lt__server_close(&s->server);
    lt__image_close(&s->image);
    destroy(&s->net);
}

static void pull(side *s, int worker)
{
    lt_grant g;
    bool any;
    CHECK_OK(lt__order_pull(s->server.order, worker));
    CHECK_OK(lt__server_grant(&s->server, &g, &any));
    CHECK(any && g.worker == worker && g.n == 2);
    s->computing = worker;
    lt_set_step(s->net.ctx, g.ticket[0]);
    compute(&s->net, g.ticket[0], 0);
}

/* Some workers push more often than others. */
static void train_side(side *s, int pushes)
{
    static const int order[] = {0, 1, 0, 2, 1, 0, 3, 2, 0, 1, 3, 0, 0, 1, 2};
    for (int k = 0; k < pushes; k++) {
        lt_push p;
        int w = order[k % 15];
        CHECK_OK(lt__server_push(&s->server, w, s->pushes[w]++, &s->gradient[w], &p));
        CHECK_EQ(p.kind, LT_PUSH_APPLIED);
        pull(s, w);
    }
}

static void start_workers(side *s)
{
    for (int w = 0; w < WORKERS; w++) {
        s->pushes[w] = 0;
        pull(s, w);
    }
}

/* Copies the state of one side's server to the server of the other side. */
static void restore_side(side *to, side *from)
{
    char name[MAX_STATE][LT_ASYNC_NAME];
    const char *names[MAX_STATE];
    lt_tensor *x[MAX_STATE];
    int n = 0, fresh;
    from->server.time = 7;
    while ((x[n] = lt__server_state(&from->server, n, name[n]))) {
        names[n] = name[n];
        n++;
    }
    CHECK_OK(lt__server_restore(&to->server, names, x, n, false, &fresh));
    CHECK(to->server.time == 7 && fresh == 0);
    for (int i = 0; i < n; i++)
        lt_release(x[i]);
}

/* Checks that two servers have the same state. */
static void check_states(side *a, side *b)
{
    char name[LT_ASYNC_NAME], other[LT_ASYNC_NAME];
    int n = 0;
    for (lt_tensor *x; (x = lt__server_state(&a->server, n, name)); n++) {
        lt_tensor *y = lt__server_state(&b->server, n, other);
        CHECK_STR(name, other);
        if (x->count != y->count ||
            memcmp(lt_data(x), lt_data(y), (size_t)x->count * lt_dtype_bytes((lt_dtype)x->dtype)) !=
                0)
            FAIL("%s differs", name);
        lt_release(x);
        lt_release(y);
    }
    CHECK(n >= 2);
}

/* In one server, the workers start anew. The other one is a new server with the saved state. */
TEST(a_restored_server_continues_with_the_same_bits)
{
    for (int i = 0; i < 2 * RULES; i++) {
        side a, b;
        open_side(&a, all_rules[i / 2], ops[i % 2]);
        open_side(&b, all_rules[i / 2], ops[i % 2]);
        CHECK_OK(lt__order_set_limit(a.server.order, 1000));
        CHECK_OK(lt__order_set_limit(b.server.order, 1000));
        start_workers(&a);
        train_side(&a, 17);
        copy_net(&b.net, &a.net);
        restore_side(&b, &a);
        lt_order_config same = lt__order_config(a.server.order);
        CHECK_OK(lt__order_restart(a.server.order, &same));
        check_states(&a, &b);
        start_workers(&a);
        start_workers(&b);
        train_side(&a, 22);
        train_side(&b, 22);
        check_same(&a.net, &b.net);
        check_states(&a, &b);
        close_side(&a);
        close_side(&b);
    }
}

/* ==== Simulations ============================================================================= */

typedef struct simulation {
    net net;
    lt_async *async;
    int done[TICKETS]; /* how often each ticket was applied */
} simulation;

static void open_simulation(simulation *s, const char *rule, const char *const op[2], double sigma)
{
    lt_async_config config = usual_config(rule);
    config.sigma = sigma;
    *s = (simulation){.net = make(op[0], op[1])};
    s->async = open_async(&s->net, &config);
}

static void close_simulation(simulation *s)
{
    lt_async_free(s->async);
    destroy(&s->net);
}

/* Trains until this many tickets are applied in this simulation, or all are. */
static void simulate(simulation *s, int applied)
{
    lt_async_event e = {0};
    for (int n = 0; n < applied && e.kind != LT_ASYNC_EVENT_DONE;) {
        CHECK_OK(next_event(&s->net, s->async, 0, &e));
        if (e.kind == LT_ASYNC_EVENT_PUSH) {
            n++;
            s->done[e.ticket]++;
        }
    }
}

static void resume(simulation *to, simulation *from)
{
    copy_net(&to->net, &from->net);
    CHECK_OK(pass_state(from->async, to->async));
    CHECK_EQ(lt_async_steps(to->async), 0); /* it counts from its own start */
    CHECK_EQ(lt_async_done_below(to->async), lt_async_done_below(from->async));
}

/* One rank trains; its server keeps the values of the middle, and the checkpoint has them. */
TEST(values_that_were_kept_are_saved)
{
    lt_group *groups[2];
    net n[2];
    lt_async *async[2];
    char middle[65] = "", again[65];
    for (int i = 0; i < 2; i++) {
        CHECK_OK(lt_local_open(1, NULL, &groups[i]));
        n[i] = make(ops[0][0], ops[0][1]);
        lt_async_config config = live_config("ddc", groups[i], &n[i]);
        config.steps = 7;
        async[i] = open_async(&n[i], &config);
    }
    CHECK_OK(lt_async_snapshot_at(async[0], HALF));
    CHECK_OK(lt_async_set_limit(async[0], TICKETS));
    for (lt_async_event e = {0}; e.kind != LT_ASYNC_EVENT_DONE;) {
        CHECK_OK(lt_async_next(async[0], &e));
        if (e.kind == LT_ASYNC_EVENT_COMPUTE && e.ticket == HALF)
            CHECK_OK(lt_params_sha256(n[0].params, middle));
        if (e.kind == LT_ASYNC_EVENT_COMPUTE)
            compute(&n[0], e.ticket, 0);
    }
    CHECK_EQ(lt_async_steps(async[0]), 7 + TICKETS);
    CHECK_OK(pass_state(async[0], async[1]));
    CHECK_EQ(lt_async_steps(async[1]), 7);
    CHECK_OK(lt_async_snapshot_at(async[1], HALF)); /* it was kept already */
    CHECK_OK(lt_async_set_limit(async[1], TICKETS));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(lt_params_sha256(n[1].params, again));
        CHECK(strcmp(middle, again) != 0);
        CHECK_OK(lt_async_load_snapshot(async[1], HALF));
        CHECK_OK(lt_params_sha256(n[1].params, again));
        CHECK_STR(middle, again);
        CHECK_OK(lt_async_read(async[1])); /* they are still kept */
    }
    CHECK_OK(pass_state(async[1], async[0]));
    CHECK_OK(lt_async_load_snapshot(async[0], HALF));
    lt_async_free_snapshot(async[1], HALF);
    CHECK_FAILS(lt_async_load_snapshot(async[1], HALF), LT_EINVAL, "were not kept");
    for (int i = 0; i < 2; i++) {
        lt_async_free(async[i]);
        destroy(&n[i]);
        lt_group_close(groups[i]);
    }
}

/* While workers compute. Their tickets are issued again, and each one is applied once. */
TEST(a_simulation_that_is_resumed_twice_has_the_same_bits)
{
    for (int i = 0; i < RULES; i++) {
        simulation whole, again[2];
        open_simulation(&whole, all_rules[i], ops[0], 0.3);
        CHECK_OK(lt_async_set_limit(whole.async, TICKETS));
        simulate(&whole, HALF);
        for (int k = 0; k < 2; k++) {
            open_simulation(&again[k], all_rules[i], ops[0], 0.3);
            resume(&again[k], &whole);
            CHECK_OK(lt_async_set_limit(again[k].async, TICKETS));
            simulate(&again[k], TICKETS);
            CHECK_EQ(lt_async_steps(again[k].async), TICKETS - HALF);
            for (int t = 0; t < TICKETS; t++)
                CHECK_EQ(whole.done[t] + again[k].done[t], 1);
        }
        check_same(&again[0].net, &again[1].net);
        for (int k = 0; k < 2; k++)
            close_simulation(&again[k]);
        close_simulation(&whole);
    }
}

/* When all tickets are done, no worker computes: the original can continue, too. */
TEST(a_simulation_that_is_resumed_between_tickets_equals_one_in_one_piece)
{
    for (int i = 0; i < 2 * RULES; i++) {
        simulation whole, resumed;
        open_simulation(&whole, all_rules[i / 2], ops[i % 2], 0);
        open_simulation(&resumed, all_rules[i / 2], ops[i % 2], 0);
        CHECK_OK(lt_async_set_limit(whole.async, HALF));
        simulate(&whole, TICKETS);
        resume(&resumed, &whole);
        CHECK_OK(lt_async_set_limit(whole.async, TICKETS));
        CHECK_OK(lt_async_set_limit(resumed.async, TICKETS));
        simulate(&whole, TICKETS);
        simulate(&resumed, TICKETS);
        check_same(&whole.net, &resumed.net);
        close_simulation(&whole);
        close_simulation(&resumed);
    }
}

/* A run on a GPU reads its checkpoints into the memory of the GPU. */
TEST(a_state_on_a_gpu_is_restored)
{
    simulation from, to;
    char name[MAX_STATE][LT_ASYNC_NAME];
    const char *names[MAX_STATE];
    lt_tensor *x[MAX_STATE], *here;
    lt_ctx *gpu = open_emu();
    int n = 0, fresh;
    open_simulation(&from, "ddc", ops[0], 0);
    open_simulation(&to, "ddc", ops[0], 0);
    CHECK_OK(lt_async_set_limit(from.async, TICKETS));
    simulate(&from, HALF);
    for (; (here = lt_async_state(from.async, n, name[n])); n++) {
        names[n] = name[n];
        x[n] = lt_tensor_from(gpu, (lt_dtype)here->dtype, here->ndim, here->dims, lt_data(here));
        CHECK(x[n] != NULL);
        if (strcmp(name[n], "order") == 0)
            CHECK_EQ(lt_async_issued(x[n]), lt_async_issued(here));
        lt_release(here);
    }
    CHECK_OK(lt_async_restore(to.async, names, x, n, &fresh));
    CHECK_EQ(fresh, 0);
    CHECK_EQ(lt_async_done_below(to.async), lt_async_done_below(from.async));
    for (int i = 0; i < n; i++)
        lt_release(x[i]);
    close_simulation(&from);
    close_simulation(&to);
    lt_ctx_free(gpu);
}

/* ==== Damaged states ========================================================================== */

/* Restores a state in which a tensor is missing or replaced. wrong: NULL, or its replacement. */
static lt_status restore_without(const char *missing, lt_tensor *wrong, int *fresh)
{
    simulation s, other;
    char name[MAX_STATE][LT_ASYNC_NAME];
    const char *names[MAX_STATE];
    lt_tensor *all[MAX_STATE], *x[MAX_STATE];
    int n = 0, kept = 0;
    open_simulation(&s, "ddc", ops[0], 0);
    open_simulation(&other, "ddc", ops[0], 0);
    CHECK_OK(lt_async_set_limit(s.async, TICKETS));
    simulate(&s, HALF);
    for (; (all[n] = lt_async_state(s.async, n, name[n])); n++) {
        bool is_it = strcmp(name[n], missing) == 0;
        if (strcmp(name[n], "order") == 0)
            CHECK(lt_async_issued(all[n]) >= HALF && lt_async_issued(all[n]) <= TICKETS);
        names[kept] = name[n];
        x[kept] = is_it ? wrong : all[n];
        kept += x[kept] != NULL;
    }
    lt_status status = lt_async_restore(other.async, names, x, kept, fresh);
    for (int i = 0; i < n; i++)
        lt_release(all[i]);
    close_simulation(&s);
    close_simulation(&other);
    return status;
}

TEST(damaged_states_are_refused)
{
    static const char *const needed[] = {"order", "numbers"};
    lt_ctx *ctx = lt_open(&(lt_config){.device = "cpu"});
    lt_tensor *floats = lt_tensor_new(ctx, LT_F32, 1, (int64_t[]){3});
    lt_tensor *integers = lt_tensor_new(ctx, LT_I64, 1, (int64_t[]){3});
    int fresh;
    CHECK_OK(lt_fill(floats, 0));
    CHECK_OK(lt_fill(integers, 0));
    CHECK_EQ(lt_async_issued(floats), -1);
    CHECK_EQ(lt_async_issued(integers), -1);
    for (int i = 0; i < 2; i++) {
        char text[100];
        snprintf(text, sizeof text, "the asynchronous state in this checkpoint has no valid '%s'",
                 needed[i]);
        CHECK_FAILS(restore_without(needed[i], NULL, &fresh), LT_EFILE, text);
        CHECK_FAILS(restore_without(needed[i], floats, &fresh), LT_EFILE, text);
        CHECK_FAILS(restore_without(needed[i], integers, &fresh), LT_EFILE, text);
    }
    CHECK_FAILS(restore_without("squares/0", floats, &fresh), LT_EFILE, "no valid 'squares/0'");
    CHECK_FAILS(restore_without("velocity.3/0", integers, &fresh), LT_EFILE,
                "no valid 'velocity.3/0'");
    CHECK_OK(restore_without("velocity.3/0", NULL, &fresh)); /* as of fewer workers */
    CHECK_EQ(fresh, 1);
    lt_release(floats);
    lt_release(integers);
    lt_ctx_free(ctx);
}
