/* test_pipeline_run.c - a pipeline of threads: its gradients have the bits of one context that adds
 * up the same micro-batches, under each schedule and whatever the delays of the stages. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "autograd/stages.h"
#include "dist/group.h"
#include "ops/ops.h"
#include "tests/lt_test.h"

enum { LAYERS = 4, ROWS = 3, WIDTH = 6, CLASSES = 4, MOST_STAGES = 4, STEPS = 2, MOST = 256 };

typedef struct job {
    int stages, micro, lag;
    lt_schedule_kind kind;
    uint64_t delays; /* seed of random delays; 0: none */
    int leaves;      /* the stage that fails in the second micro-batch, or -1 */
    char grads[LAYERS][65];
    lt_status status[MOST_STAGES];
    char text[MOST_STAGES][256];
} job;

typedef struct net {
    lt_ctx *ctx;
    lt_params *params;
    lt_tensor *w[LAYERS], *made[MOST];
    int n_made;
} net;

typedef struct rank {
    job *job;
    lt_group *group;
} rank;

static int stage_of(void *ud, const char *name, const lt_tensor *x)
{
    const job *j = ud;
    (void)x;
    return (name[1] - '0') * j->stages / LAYERS;
}

static void make(net *n)
{
    *n = (net){.ctx = lt_open(&(lt_config){.seed = 9, .device = "cpu", .threads = 1})};
    n->params = lt_params_new(n->ctx);
    for (int i = 0; i < LAYERS; i++) {
        char name[] = {'w', (char)('0' + i), 0};
        n->w[i] = lt_param_new(n->ctx, LT_F32, 2, (int64_t[]){WIDTH, WIDTH},
                               (lt_init){LT_INIT_UNIFORM, -0.6, 0.6});
        CHECK_OK(lt_params_add(n->params, name, n->w[i]));
    }
}

static void destroy(net *n)
{
    for (int i = 0; i < LAYERS; i++)
        lt_release(n->w[i]);
    for (int i = 0; i < n->n_made; i++)
        lt_release(n->made[i]);
    lt_params_free(n->params);
    lt_ctx_free(n->ctx);
}

/* Notes x, which destroy() releases. NULL is allowed. */
static lt_tensor *noted(net *n, lt_tensor *x)
{
    CHECK(n->n_made < MOST);
    return n->made[n->n_made++] = x;
}

static void wait_randomly(uint64_t seed, uint64_t at)
{
    uint32_t r[4];
    lt_random(seed, LT_RNG_USER, at, 0, r);
    if (seed && r[0] % 3 == 0)
        nanosleep(&(struct timespec){0, r[1] % 2000000}, NULL);
}

/* The loss of a micro-batch. The second result is also added to the last one. */
static lt_tensor *forward(net *n, uint64_t number, uint64_t delays)
{
    lt_ctx *c = n->ctx;
    lt_tensor *x = noted(n, lt_tensor_new(c, LT_F32, 2, (int64_t[]){ROWS, WIDTH})), *kept = NULL;
    lt_tensor *y = noted(n, lt_tensor_new(c, LT_I64, 1, (int64_t[]){ROWS}));
    if (!x || !y || lt_fill_normal(x, LT_RNG_USER, number, 0, 0, 1) != LT_OK)
        return NULL;
    for (int64_t i = 0; i < ROWS; i++)
        ((int64_t *)lt_data(y))[i] = (i + (int64_t)number) % CLASSES;
    for (int i = 0; i < LAYERS; i++) {
        wait_randomly(delays, number * LAYERS + (uint64_t)i);
        x = x ? noted(n, lt_run(c, "linear", NULL, x, n->w[i], NULL)) : NULL;
        x = x ? noted(n, lt_run(c, "relu", NULL, x, NULL)) : NULL;
        kept = i == 1 ? x : kept;
    }
    x = x ? noted(n, lt_run(c, "add", NULL, x, kept, NULL)) : NULL;
    return x ? noted(n, lt_run(c, "cross_entropy", NULL, x, y, NULL)) : NULL;
}

static void digest(lt_tensor *grad, char hex[65])
{
    lt_sha256 s;
    lt_sha256_begin(&s);
    CHECK(grad != NULL);
    lt_sha256_add(&s, lt_data(grad), (size_t)lt_count(grad) * sizeof(float));
    lt_sha256_end(&s, hex);
}

/* ==== One context ============================================================================= */

static void add_up(const job *j, char grads[LAYERS][65])
{
    net n;
    make(&n);
    CHECK_OK(lt_params_place(n.params));
    for (int k = 0; k < STEPS * j->micro; k++) {
        CHECK_OK(lt_scope_push(n.ctx));
        lt_tensor *loss = forward(&n, (uint64_t)k, 0);
        CHECK(loss != NULL);
        CHECK_OK(lt_backward(loss, NULL));
        lt_scope_pop(n.ctx);
    }
    for (int i = 0; i < LAYERS; i++)
        digest(lt_grad(n.w[i]), grads[i]);
    destroy(&n);
}

/* ==== A pipeline ============================================================================== */

static lt_status micro_batch(const rank *r, net *n, lt_pipeline *p, int k)
{
    int stage = lt_group_rank(r->group);
    LT_TRY(lt_scope_push(n->ctx));
    lt_tensor *loss = forward(n, (uint64_t)k, r->job->delays * (uint64_t)(stage + 1));
    lt_status status = loss ? lt_backward(loss, NULL) : lt_errcode();
    lt_pipeline_pop_scope(p);
    return status;
}

static lt_status train(const rank *r, net *n, lt_pipeline *p)
{
    const job *j = r->job;
    for (int k = 0; k < STEPS * j->micro; k++) {
        if (lt_group_rank(r->group) == j->leaves && k == 1)
            return lt_fail(LT_EUSAGE, "it leaves");
        LT_TRY(micro_batch(r, n, p, k));
        if (k % j->micro == j->micro - 1) {
            CHECK_EQ(lt_pipeline_forwards(p), j->micro);
            LT_TRY(lt_pipeline_drain(p));
        }
    }
    return LT_OK;
}

static void *run_rank(void *ud)
{
    rank *r = ud;
    job *j = r->job;
    net n;
    make(&n);
    int stage = lt_group_rank(r->group);
    lt_pipeline *p = lt_pipeline_new(
        n.ctx, r->group,
        &(lt_pipeline_config){
            .stages = j->stages, .kind = j->kind, .lag = j->lag, .stage_of = stage_of, .ud = j});
    CHECK(p != NULL);
    CHECK_OK(lt_params_place(n.params));
    j->status[stage] = train(r, &n, p);
    if (j->status[stage] != LT_OK) {
        snprintf(j->text[stage], sizeof j->text[stage], "%s", lt_errmsg());
        lt_group_fail(r->group);
    }
    for (int i = 0; i < LAYERS && j->status[stage] == LT_OK; i++)
        if (!lt_is_remote(n.w[i]))
            digest(lt_grad(n.w[i]), j->grads[i]);
    lt_pipeline_free(p);
    destroy(&n);
    lt_group_close(r->group);
    return NULL;
}

static void run_job(job *j)
{
    lt_group *groups[MOST_STAGES];
    pthread_t threads[MOST_STAGES];
    rank ranks[MOST_STAGES];
    CHECK_OK(lt_local_open(j->stages, NULL, groups));
    for (int i = 0; i < j->stages; i++) {
        ranks[i] = (rank){j, groups[i]};
        pthread_create(&threads[i], NULL, run_rank, &ranks[i]);
    }
    for (int i = 0; i < j->stages; i++)
        pthread_join(threads[i], NULL);
}

static void check_job(job *j)
{
    char grads[LAYERS][65];
    add_up(j, grads);
    run_job(j);
    for (int i = 0; i < j->stages; i++)
        CHECK_STR(j->text[i], "");
    for (int i = 0; i < LAYERS; i++)
        CHECK_STR(j->grads[i], grads[i]);
}

TEST(each_schedule_has_the_bits_of_one_context)
{
    for (int stages = 1; stages <= MOST_STAGES; stages++)
        for (int micro = 1; micro <= 5; micro += 2)
            for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++)
                for (int lag = 0; lag <= 2; lag += 2)
                    check_job(&(job){.stages = stages,
                                     .micro = micro,
                                     .lag = lag,
                                     .kind = (lt_schedule_kind)kind,
                                     .leaves = -1});
}

TEST(delays_change_nothing)
{
    for (uint64_t seed = 1; seed <= 20; seed++)
        check_job(&(job){.stages = 2 + (int)(seed % 3),
                         .micro = 6,
                         .lag = (int)(seed % 4),
                         .kind = LT_ZERO_BUBBLE,
                         .delays = seed,
                         .leaves = -1});
}

TEST(a_stage_that_fails_is_named)
{
    job j = {.stages = 3, .micro = 4, .kind = LT_1F1B, .leaves = 1};
    run_job(&j);
    CHECK_EQ(j.status[1], LT_EUSAGE);
    for (int i = 0; i < 3; i += 2) {
        CHECK_EQ(j.status[i], LT_EPEER);
        CHECK(strstr(j.text[i], "stage 1 of the pipeline") != NULL);
    }
}
