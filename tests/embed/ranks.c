/* ranks.c - a program built against the installed library alone: two ranks, threads of this
 * process, train LeNet in fp16.
 *
 * In one step the gradient of one parameter overflows on rank 1. Both ranks must skip that step and
 * no other, and their weights must stay bit-identical.
 */
#include <luatrain/luatrain.h>
#include <pthread.h>
#include <stdio.h>

#include "lenet.h"

enum { RANKS = 2, STEPS = 8, BATCH = 8, SIDE = 12, OVERFLOW_STEP = 4 };
static const char fault[] = "inf:rank=1:step=4:param=conv2.w"; /* the step is OVERFLOW_STEP */

typedef struct rank {
    int number;
    lt_group *group;
    pthread_t thread;
    /* what the rank trains with */
    lt_ctx *ctx;
    lt_reducer *reducer;
    lt_loss_scale *scale;
    lt_tensor *images, *labels;
    lt_batches *batches;
    lenet net;
    /* the result */
    bool skipped[STEPS + 1];    /* by step, from 1 */
    uint32_t digest[STEPS + 1]; /* of all weights, after each step; [0]: before the first */
    double loss[STEPS + 1];     /* of this rank's half of the batch */
    lt_status status;
} rank;

static uint32_t digest_of(const lenet *net)
{
    uint32_t hash = 2166136261; /* FNV-1a */
    for (int i = 0; i < LENET_PARAMS; i++) {
        const unsigned char *bytes = lt_data(net->w[i]);
        size_t n = (size_t)lt_count(net->w[i]) * lt_dtype_bytes(lt_tensor_dtype(net->w[i]));
        for (size_t k = 0; k < n; k++)
            hash = (hash ^ bytes[k]) * 16777619;
    }
    return hash;
}

/* Each rank gets its half of every batch of the same images. */
static lt_status open_data(rank *r)
{
    LT_TRY(lenet_synthetic(r->ctx, STEPS * BATCH, SIDE, &r->images, &r->labels));
    lt_source *source = lt_source_tensors(r->ctx, r->images, r->labels);
    lt_batch_options options = {.batch = BATCH, .rank = r->number, .ranks = RANKS};
    r->batches = source ? lt_batches_new(r->ctx, source, &options) : NULL;
    lt_source_release(source);
    return r->batches ? LT_OK : lt_errcode();
}

static lt_status open_rank(rank *r)
{
    lt_scaler scaler = lt_scaler_init(LT_SCALE_DYNAMIC, 10, 0);
    r->ctx = lt_open(&(lt_config){.seed = 1, .threads = 1, .fault = fault});
    if (!r->ctx)
        return lt_errcode();
    LT_TRY(open_data(r));
    LT_TRY(lenet_open(&r->net, r->ctx, SIDE));
    lt_grad_fault(r->net.w[2], r->number); /* conv2.w */
    if (!(r->reducer = lt_reducer_new(r->ctx, r->group, NULL)) ||
        !(r->scale = lt_loss_scale_new(r->ctx, &scaler)))
        return lt_errcode();
    LT_TRY(lt_reducer_add(r->reducer, r->net.w, LENET_PARAMS));
    lt_set_autocast(r->ctx, LT_F16);
    return lt_reducer_use_loss_scale(r->reducer, r->scale, NULL);
}

static lt_status step_rank(rank *r, int step)
{
    lt_tensor *x, *y;
    LT_TRY(lt_batches_next(r->batches, &x, &y));
    lt_status status = lenet_step(&r->net, x, y, &r->loss[step]);
    lt_release(x);
    lt_release(y);
    LT_TRY(status);
    r->skipped[step] = !lt_loss_scale_step(r->scale).finite;
    r->digest[step] = digest_of(&r->net);
    return LT_OK;
}

static void close_rank(rank *r)
{
    lt_reducer_free(r->reducer);
    if (r->ctx && lt_use_loss_scale(r->ctx, NULL) == LT_OK)
        lt_loss_scale_free(r->scale);
    lenet_close(&r->net);
    lt_batches_free(r->batches);
    lt_release(r->images);
    lt_release(r->labels);
    lt_ctx_free(r->ctx);
    lt_group_close(r->group);
}

static void *train(void *ud)
{
    rank *r = ud;
    r->status = open_rank(r);
    r->digest[0] = r->status == LT_OK ? digest_of(&r->net) : 0;
    for (int step = 1; step <= STEPS && r->status == LT_OK; step++)
        r->status = step_rank(r, step);
    if (r->status != LT_OK) {
        fprintf(stderr, "ranks: rank %d: %s\n", r->number, lt_errmsg());
        lt_group_fail(r->group); /* so that the other rank does not wait for this one */
    }
    close_rank(r);
    return NULL;
}

/* Whether the ranks have done what the comment above says. */
static bool check(const rank *a, const rank *b)
{
    bool good = true;
    for (int step = 1; step <= STEPS; step++) {
        bool want = step == OVERFLOW_STEP, changed = a->digest[step] != a->digest[step - 1];
        printf("step %d: loss %.4f and %.4f, weights %08x and %08x%s\n", step, a->loss[step],
               b->loss[step], a->digest[step], b->digest[step],
               a->skipped[step] ? ", skipped" : "");
        good &= a->skipped[step] == want && b->skipped[step] == want;
        good &= a->digest[step] == b->digest[step] && changed != want;
        good &= a->loss[step] != b->loss[step]; /* the halves of the batch differ */
    }
    return good;
}

int main(void)
{
    static rank ranks[RANKS];
    lt_group *group[RANKS];
    if (lt_local_open(RANKS, NULL, group) != LT_OK) {
        fprintf(stderr, "ranks: %s\n", lt_errmsg());
        return 1;
    }
    for (int i = 0; i < RANKS; i++) {
        ranks[i] = (rank){.number = i, .group = group[i]};
        if (pthread_create(&ranks[i].thread, NULL, train, &ranks[i]) != 0)
            return 1;
    }
    for (int i = 0; i < RANKS; i++)
        pthread_join(ranks[i].thread, NULL);
    if (ranks[0].status != LT_OK || ranks[1].status != LT_OK)
        return 1;
    if (check(&ranks[0], &ranks[1]))
        return 0;
    fprintf(stderr, "ranks: both ranks must skip step %d, and have the same weights\n",
            OVERFLOW_STEP);
    return 1;
}
