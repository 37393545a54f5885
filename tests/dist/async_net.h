/* async_net.h - a small net with batch norm, for tests of asynchronous training. Include it in one
 * file of a test. */
#ifndef LT_TESTS_DIST_ASYNC_NET_H
#define LT_TESTS_DIST_ASYNC_NET_H

#include "ops/ops.h"
#include "tests/dist/threads.h"

enum { ROWS = 12, IN = 5, HIDDEN = 7, CLASSES = 3, MAX_STATE = 16 };

typedef struct net { /* linear, batch_norm, linear */
    lt_ctx *ctx;
    lt_params *params;
    lt_tensor *w1, *scale, *shift, *mean, *var, *w2, *b2;
    lt_tensor *buffers[2]; /* mean and var */
    lt_optim *optim;
    lt_opt opt[2][LT_MAX_OPT];
} net;

static inline lt_tensor *add(net *n, lt_tensor *x, const char *name)
{
    CHECK(x != NULL);
    CHECK_OK(lt_params_add(n->params, name, x));
    return x;
}

static inline lt_tensor *param(net *n, const char *name, int ndim, int64_t a, int64_t b,
                               double value)
{
    lt_init init = {value == 0 ? LT_INIT_UNIFORM : LT_INIT_CONSTANT, value == 0 ? -0.5 : value,
                    0.5};
    return add(n, lt_param_new(n->ctx, LT_F32, ndim, (int64_t[]){a, b}, init), name);
}

static inline lt_tensor *buffer(net *n, const char *name, double value)
{
    lt_init init = {LT_INIT_CONSTANT, value, 0};
    return add(n, lt_buffer_new(n->ctx, LT_F32, 1, (int64_t[]){HIDDEN}, init), name);
}

/* Group 0: weights, with weight decay; group 1: the others. options: further ones of group 0. */
static inline net make(const char *op, const char *options)
{
    net n = {.ctx = lt_open(&(lt_config){.seed = 3, .device = "cpu"})};
    n.params = lt_params_new(n.ctx);
    n.w1 = param(&n, "w1", 2, HIDDEN, IN, 0);
    n.scale = param(&n, "scale", 1, HIDDEN, 0, 1);
    n.shift = param(&n, "shift", 1, HIDDEN, 0, 0.1);
    n.mean = buffer(&n, "mean", 0);
    n.var = buffer(&n, "var", 1);
    n.buffers[0] = n.mean;
    n.buffers[1] = n.var;
    n.w2 = param(&n, "w2", 2, CLASSES, HIDDEN, 0);
    n.b2 = param(&n, "b2", 1, CLASSES, 0, 0.2);
    CHECK_OK(lt_params_place(n.params));
    lt_tensor *all[] = {n.w1, n.scale, n.shift, n.w2, n.b2};
    n.optim = lt_optim_new(n.ctx, op, all, 5);
    CHECK(n.optim != NULL);
    lt_tensor *others[] = {n.scale, n.shift, n.b2};
    for (int i = 0; i < 3; i++)
        CHECK_OK(lt_optim_set_group(n.optim, others[i], 1));
    const lt_schema *schema = &lt_optim_def(n.optim)->schema;
    CHECK_OK(lt_opts_parse(schema, options, n.opt[0]));
    CHECK_OK(lt_opts_parse(schema, options, n.opt[1]));
    int decay = lt_schema_find(schema, "weight_decay");
    n.opt[0][decay].f = 0.01;
    n.opt[0][decay].n = 1;
    return n;
}

static inline void destroy(net *n)
{
    lt_tensor *all[] = {n->w1, n->scale, n->shift, n->mean, n->var, n->w2, n->b2};
    lt_optim_free(n->optim);
    for (int i = 0; i < 7; i++)
        lt_release(all[i]);
    lt_params_free(n->params);
    lt_ctx_free(n->ctx);
}

/* The loss of a batch; NULL after a failure. rest (6): what to release after backward. */
static inline lt_tensor *loss_of(net *n, int64_t ticket, lt_tensor *rest[6])
{
    lt_ctx *c = n->ctx;
    lt_tensor *x = rest[0] = lt_tensor_new(c, LT_F32, 2, (int64_t[]){ROWS, IN});
    lt_tensor *y = rest[1] = lt_tensor_new(c, LT_I64, 1, (int64_t[]){ROWS});
    if (!x || !y || lt_fill_normal(x, LT_RNG_USER, 7, (uint64_t)ticket * ROWS * IN, 0, 1) != LT_OK)
        return NULL;
    for (int64_t i = 0; i < ROWS; i++)
        ((int64_t *)lt_data(y))[i] = (i * 7 + ticket) % CLASSES;
    if ((rest[2] = lt_run(c, "linear", NULL, x, n->w1, NULL)))
        rest[3] = lt_run(c, "batch_norm", "train=true", rest[2], n->scale, n->shift, n->mean,
                         n->var, NULL);
    if (rest[3] && (rest[4] = lt_run(c, "relu", NULL, rest[3], NULL)))
        rest[5] = lt_run(c, "linear", NULL, rest[4], n->w2, n->b2, NULL);
    return rest[5] ? lt_run(c, "cross_entropy", NULL, rest[5], y, NULL) : NULL;
}

static inline lt_status step(net *n, double clip)
{
    return lt_optim_step_clipped(n->optim, (const lt_opt *[]){n->opt[0], n->opt[1]}, 2, clip, NULL,
                                 NULL);
}

/* One batch: its data depends on the ticket. Forward, backward and an optimizer step, in which the
 * parameters `without` (n_without) have no gradient. */
static inline lt_status compute_without(net *n, int64_t ticket, double clip,
                                        lt_tensor *const *without, int n_without)
{
    lt_tensor *rest[6] = {0}, *loss = loss_of(n, ticket, rest);
    lt_status status = loss ? lt_backward(loss, NULL) : lt_errcode();
    for (int i = 0; i < n_without; i++)
        lt_zero_grad(without[i]);
    if (status == LT_OK)
        status = step(n, clip);
    lt_release(loss);
    for (int i = 0; i < 6; i++)
        lt_release(rest[i]);
    return status;
}

static inline lt_status try_compute(net *n, int64_t ticket, double clip)
{
    return compute_without(n, ticket, clip, NULL, 0);
}

static inline void compute(net *n, int64_t ticket, double clip)
{
    CHECK_OK(try_compute(n, ticket, clip));
}

/* Batches 0 to tickets - 1 of an ordinary run. */
static inline void compute_all(net *n, int64_t tickets, double clip)
{
    for (int64_t i = 0; i < tickets; i++) {
        lt_set_step(n->ctx, i);
        compute(n, i, clip);
    }
}

/* ==== Asynchronous training =================================================================== */

static const char *const all_rules[] = {"asgd", "sa",   "dc-c", "dc-a", "dc-m",
                                        "gap",  "dana", "ormo", "ddc"};
enum { RULES = 9 };

/* A simulation of `workers` workers. */
static inline lt_async_config config_of(const char *rule, int workers)
{
    return (lt_async_config){.rule = rule,
                             .staleness = LT_ASYNC_UNBOUNDED,
                             .drop = LT_ASYNC_UNBOUNDED,
                             .workers = workers};
}

/* Live training of a rank with this net. */
static inline lt_async_config live_config(const char *rule, lt_group *group, net *n)
{
    lt_async_config config = config_of(rule, 0);
    config.group = group;
    config.buffers = n->buffers;
    config.n_buffers = 2;
    config.server = lt_group_rank(group) == 0 ? lt_open(&(lt_config){.device = "cpu"}) : NULL;
    return config;
}

static inline lt_async *open_async(net *n, const lt_async_config *config)
{
    lt_async *async = lt_async_new(n->ctx, n->optim, config);
    if (!async)
        FAIL("%s", lt_errmsg());
    return async;
}

/* Computes batches until another event. */
static inline lt_status next_event(net *n, lt_async *async, double clip, lt_async_event *e)
{
    for (;;) {
        LT_TRY(lt_async_next(async, e));
        if (e->kind != LT_ASYNC_EVENT_COMPUTE)
            return LT_OK;
        CHECK_EQ(lt_step(n->ctx), e->ticket);
        LT_TRY(try_compute(n, e->ticket, clip));
    }
}

/* Saves the state of asynchronous training, and restores it in another one. */
static inline lt_status pass_state(lt_async *from, lt_async *to)
{
    char name[MAX_STATE][LT_ASYNC_NAME];
    const char *names[MAX_STATE];
    lt_tensor *x[MAX_STATE];
    int n = 0, fresh = 0;
    while ((x[n] = lt_async_state(from, n, name[n])) && n < MAX_STATE - 1) {
        names[n] = name[n];
        n++;
    }
    lt_status status = name[n][0] ? lt_errcode() : lt_async_restore(to, names, x, n, &fresh);
    for (int i = 0; i < n; i++)
        lt_release(x[i]);
    if (status == LT_OK)
        CHECK_EQ(fresh, 0);
    return status;
}

static inline void check_same(net *a, net *b)
{
    char x[65], y[65];
    CHECK_OK(lt_params_sha256(a->params, x));
    CHECK_OK(lt_params_sha256(b->params, y));
    CHECK_STR(x, y);
}

#endif
