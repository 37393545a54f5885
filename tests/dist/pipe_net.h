/* pipe_net.h - a small net that trains in a pipeline of threads, and in one context that adds up
 * the gradients of the same micro-batches. Include it in one file of a test. */
#ifndef LT_TESTS_DIST_PIPE_NET_H
#define LT_TESTS_DIST_PIPE_NET_H

#include <stdlib.h>
#include <string.h>

#include "autograd/stages.h"
#include "dist/group.h"
#include "ops/ops.h"
#include "tests/dist/threads.h"

enum { LAYERS = 4, ROWS = 3, WIDTH = 6, CLASSES = 4, MOST_RANKS = 8, REPLICAS = 2 };
enum { STEPS = 2, MOST_MADE = 1024 };

/* DEEP: the result of the second layer is also added to that of the last one. WIDE: all later
 * layers use the result of the first one. FAN: they use nothing else, the last layer first. */
typedef enum net_form { DEEP, WIDE, FAN } net_form;

typedef struct plan { /* of a training run */
    int stages, micro, lag;
    lt_schedule_kind kind;
    uint64_t delays; /* seed of random delays; 0: none */
    net_form form;
    bool shares;    /* micro-batches have different shares */
    lt_dtype dtype; /* of data and parameters; LT_F32 is 0 */
    double timeout; /* seconds; 0: the default */
} plan;

typedef struct net {
    lt_ctx *ctx;
    lt_dtype dtype;
    lt_params *params;
    lt_tensor *w[LAYERS];
    lt_tensor *made[MOST_MADE];
    int n_made;
} net;

typedef struct member { /* a rank */
    const plan *plan;
    lt_group *group;
    int rank;
    net net;
    lt_pipeline *pipeline;
    lt_status (*body)(struct member *m);
    lt_status status;
    char text[512];
    char grads[LAYERS][65]; /* digests; "" if another stage has the layer */
    void *ud;               /* for body */
} member;

/* ==== The net ================================================================================= */

static inline lt_status make_net(net *n, lt_dtype dtype)
{
    lt_ctx *ctx = lt_open(&(lt_config){.seed = 9, .device = "cpu", .threads = 1});
    *n = (net){.ctx = ctx, .dtype = dtype};
    if (!n->ctx || !(n->params = lt_params_new(n->ctx)))
        return lt_errcode();
    for (int i = 0; i < LAYERS; i++) {
        char name[] = {'w', (char)('0' + i), 0};
        n->w[i] = lt_param_new(n->ctx, dtype, 2, (int64_t[]){WIDTH, WIDTH},
                               (lt_init){LT_INIT_UNIFORM, -0.6, 0.6});
        if (!n->w[i])
            return lt_errcode();
        LT_TRY(lt_params_add(n->params, name, n->w[i]));
    }
    return LT_OK;
}

static inline void release_made(net *n)
{
    while (n->n_made > 0)
        lt_release(n->made[--n->n_made]);
}

static inline void destroy_net(net *n)
{
    for (int i = 0; i < LAYERS; i++)
        lt_release(n->w[i]);
    release_made(n);
    lt_params_free(n->params);
    if (n->ctx)
        lt_ctx_free(n->ctx);
}

/* Notes x, which release_made() releases. NULL is allowed. */
static inline lt_tensor *noted(net *n, lt_tensor *x)
{
    CHECK(n->n_made < MOST_MADE);
    return n->made[n->n_made++] = x;
}

static inline void wait_randomly(uint64_t seed, uint64_t at)
{
    uint32_t r[4];
    lt_random(seed, LT_RNG_USER, at, 0, r);
    if (seed && r[0] % 3 == 0)
        nanosleep(&(struct timespec){0, r[1] % 2000000}, NULL);
}

static inline lt_tensor *layer(net *n, lt_tensor *x, int i)
{
    x = x ? noted(n, lt_run(n->ctx, "linear", NULL, x, n->w[i], NULL)) : NULL;
    return x ? noted(n, lt_run(n->ctx, "relu", NULL, x, NULL)) : NULL;
}

static inline lt_tensor *add(net *n, lt_tensor *x, lt_tensor *y)
{
    return x && y ? noted(n, lt_run(n->ctx, "add", NULL, x, y, NULL)) : NULL;
}

/* The rows of a micro-batch, and their labels. */
static inline lt_status make_rows(net *n, uint64_t number, lt_tensor **x, lt_tensor **y)
{
    *x = noted(n, lt_tensor_new(n->ctx, n->dtype, 2, (int64_t[]){ROWS, WIDTH}));
    *y = noted(n, lt_tensor_new(n->ctx, LT_I64, 1, (int64_t[]){ROWS}));
    if (!*x || !*y)
        return lt_errcode();
    for (int64_t i = 0; i < ROWS; i++)
        ((int64_t *)lt_data(*y))[i] = (i + (int64_t)number) % CLASSES;
    return lt_fill_normal(*x, LT_RNG_USER, number, 0, 0, 1);
}

/* The sum of the results of the layers after the first one, all for the same input x. */
static inline lt_tensor *fan_out(net *n, lt_tensor *x)
{
    lt_tensor *sum = x ? layer(n, x, LAYERS - 1) : NULL;
    for (int i = LAYERS - 2; i > 0; i--)
        sum = add(n, sum, x ? layer(n, x, i) : NULL);
    return sum;
}

/* The loss of a micro-batch. delays: a seed, or 0. NULL if a call fails. */
static inline lt_tensor *forward(net *n, net_form form, uint64_t number, uint64_t delays)
{
    lt_tensor *x, *y, *kept = NULL;
    int layers = form == FAN ? 1 : LAYERS;
    if (make_rows(n, number, &x, &y) != LT_OK)
        return NULL;
    for (int i = 0; i < layers; i++) {
        wait_randomly(delays, number * LAYERS + (uint64_t)i);
        x = layer(n, x, i);
        kept = i == (form == DEEP) ? x : kept;
        x = i == LAYERS - 1 || (form == WIDE && i >= 2) ? add(n, x, kept) : x;
    }
    x = form == FAN ? fan_out(n, x) : x;
    return x ? noted(n, lt_run(n->ctx, "cross_entropy", NULL, x, y, NULL)) : NULL;
}

static inline double share_of(const plan *p, int micro)
{
    int all = p->micro * (p->micro + 1) / 2;
    return p->shares ? (double)(micro + 1) / all : 1;
}

/* The data of replica r's micro-batch i of a step. */
static inline uint64_t number_of(const plan *p, int r, int step, int i)
{
    return (uint64_t)((step * REPLICAS + r) * p->micro + i);
}

/* Plan k of a series with all numbers of stages and schedules, without delays. */
static inline plan mixed_plan(int k, lt_dtype dtype)
{
    return (plan){.stages = 1 + k % 4,
                  .micro = 1 + k % 5,
                  .lag = k % 3,
                  .kind = k % LT_SCHEDULE_KINDS,
                  .form = k % 2 == 1 ? WIDE : DEEP,
                  .shares = k % 12 > 5,
                  .dtype = dtype};
}

static inline void digest(lt_tensor *grad, char hex[65])
{
    lt_sha256 s;
    lt_sha256_begin(&s);
    CHECK(grad != NULL);
    lt_sha256_add(&s, lt_data(grad),
                  (size_t)lt_count(grad) * lt_dtype_bytes(lt_tensor_dtype(grad)));
    lt_sha256_end(&s, hex);
}

/* ==== One context ============================================================================= */

/* Forward and backward pass of micro-batch i, whose data has a number. */
static inline lt_status learn(net *n, const plan *p, int i, uint64_t number)
{
    double share = share_of(p, i);
    lt_tensor *loss = forward(n, p->form, number, 0);
    lt_tensor *factor = noted(n, lt_tensor_full(n->ctx, n->dtype, 0, NULL, share));
    if (loss && share != 1)
        loss = factor ? noted(n, lt_run(n->ctx, "mul", NULL, loss, factor, NULL)) : NULL;
    return loss ? lt_backward(loss, NULL) : lt_errcode();
}

/* Adds up the gradients of the micro-batches of all steps. The parameters are placed. */
static inline void add_up_in(net *n, const plan *p, char grads[LAYERS][65])
{
    for (int k = 0; k < STEPS * p->micro; k++) {
        CHECK_OK(lt_scope_push(n->ctx));
        CHECK_OK(learn(n, p, k % p->micro, (uint64_t)k));
        lt_scope_pop(n->ctx);
    }
    for (int i = 0; i < LAYERS; i++)
        digest(lt_grad(n->w[i]), grads[i]);
}

static inline void add_up(const plan *p, char grads[LAYERS][65])
{
    net n;
    CHECK_OK(make_net(&n, p->dtype));
    CHECK_OK(lt_params_place(n.params));
    add_up_in(&n, p, grads);
    destroy_net(&n);
}

/* ==== A pipeline ============================================================================== */

static inline int stage_of(void *ud, const char *name, const lt_tensor *x)
{
    const plan *p = ud;
    (void)x;
    return (name[1] - '0') * p->stages / LAYERS;
}

static inline lt_status micro_batch(member *m, int i, uint64_t number)
{
    const plan *p = m->plan;
    net *n = &m->net;
    LT_TRY(lt_pipeline_set_micro_batch(m->pipeline, i, p->micro, share_of(p, i)));
    LT_TRY(lt_scope_push(n->ctx));
    lt_tensor *loss = forward(n, p->form, number, p->delays * (uint64_t)(m->rank + 1));
    lt_status status = loss ? lt_backward(loss, NULL) : lt_errcode();
    lt_pipeline_pop_scope(m->pipeline);
    return status;
}

/* Adds up the gradients of all steps, from this micro-batch on, as add_up() does. */
static inline lt_status train_from(member *m, int first)
{
    const plan *p = m->plan;
    for (int k = first; k < STEPS * p->micro; k++) {
        LT_TRY(micro_batch(m, k % p->micro, (uint64_t)k));
        if (k % p->micro == p->micro - 1) {
            CHECK_EQ(lt_pipeline_forwards(m->pipeline), p->micro);
            LT_TRY(lt_pipeline_drain(m->pipeline));
        }
    }
    for (int i = 0; i < LAYERS; i++)
        if (!lt_is_meta(m->net.w[i]))
            digest(lt_grad(m->net.w[i]), m->grads[i]);
    return LT_OK;
}

static inline lt_status train(member *m) { return train_from(m, 0); }

static inline lt_status open_pipeline(member *m)
{
    const plan *p = m->plan;
    lt_pipeline_config config = {
        .stages = p->stages, .kind = p->kind, .lag = p->lag, .stage_of = stage_of, .ud = (void *)p};
    if (!(m->pipeline = lt_pipeline_new(m->net.ctx, m->group, &config)))
        return lt_errcode();
    return lt_params_place(m->net.params);
}

/* Calls body in a pipeline. The group stays open. */
static inline void run_member(member *m)
{
    m->status = open_pipeline(m);
    if (m->status == LT_OK)
        m->status = m->body(m);
    if (m->status != LT_OK) {
        snprintf(m->text, sizeof m->text, "%s", lt_errmsg());
        lt_group_fail(m->group);
    }
    lt_pipeline_free(m->pipeline);
    m->pipeline = NULL;
}

static inline void *run_thread(void *ud)
{
    member *m = ud;
    CHECK_OK(make_net(&m->net, m->plan->dtype));
    run_member(m);
    destroy_net(&m->net);
    lt_group_close(m->group);
    return NULL;
}

/* Runs a thread for each rank. ud may be NULL. */
static inline void run(const plan *p, int ranks, lt_status (*body)(member *m), void *ud,
                       member members[MOST_RANKS])
{
    lt_group *groups[MOST_RANKS];
    CHECK_OK(lt_local_open(ranks, &(lt_group_config){.timeout = p->timeout}, groups));
    for (int i = 0; i < ranks; i++)
        members[i] = (member){.plan = p, .group = groups[i], .rank = i, .body = body, .ud = ud};
    run_threads(ranks, run_thread, members, sizeof *members);
}

/* The same; checks that no rank fails. */
static inline void check_run(const plan *p, int ranks, lt_status (*body)(member *m), void *ud,
                             member members[MOST_RANKS])
{
    run(p, ranks, body, ud, members);
    for (int i = 0; i < ranks; i++)
        CHECK_STR(members[i].text, "");
}

/* Checks the gradients of all stages against digests. */
static inline void check_grads(const member *members, int stages, char grads[LAYERS][65])
{
    int n = 0;
    for (int i = 0; i < stages * LAYERS; i++) {
        const char *got = members[i / LAYERS].grads[i % LAYERS];
        if (got[0])
            CHECK_STR(got, grads[i % LAYERS]);
        n += got[0] != '\0';
    }
    CHECK_EQ(n, LAYERS);
}

/* Runs body on each stage. It must have the gradients of one context. */
static inline void check_against_one(const plan *p, lt_status (*body)(member *m))
{
    char grads[LAYERS][65];
    member members[MOST_RANKS];
    add_up(p, grads);
    check_run(p, p->stages, body, NULL, members);
    check_grads(members, p->stages, grads);
}

#endif
