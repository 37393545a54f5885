/* test_sync_norm.c - compares batch norm over several ranks, each with its own context and number
 * of rows, with batch norm over all rows in one context: y, dx, dresidual, and the sums of dscale
 * and dshift. Some ranks use fast kernels, others the reference.
 */
#include <pthread.h>

#include "dist/dist.h"
#include "tests/ops/cases.h"

enum { MOST = 4 };
enum { X, SCALE, SHIFT, MEAN, VAR, RESIDUAL, INPUTS };
enum { Y, DX, DRESIDUAL, DSCALE, DSHIFT, FOUND };

static const char *const found_name[FOUND] = {"y", "dx", "dresidual", "dscale", "dshift"};

typedef struct trial {
    int64_t rows[MOST], channels; /* rows of each rank; channels */
    int ranks;
    lt_dtype dtype;
    double offset; /* of x */
    bool residual;
    const char *options;
} trial;

typedef struct rank { /* or all rows in one context without a group */
    const trial *trial;
    lt_group *group;
    lt_ctx *ctx;
    int64_t first, rows;
    bool reference;
    int sums; /* collectives */
    double *found[FOUND];
    int64_t count[FOUND];
    char text[256];
    pthread_t thread;
} rank;

static lt_status all_sum(void *ud, double *numbers, int64_t n, bool backward)
{
    rank *r = ud;
    lt_sum sum = {backward ? "gradients" : "statistics", numbers, n, LT_F64, LT_F64, 1};
    r->sums++;
    return lt_group_allreduce_side(r->group, &sum);
}

/* Rows of random numbers that depend only on their position in the batch. New. */
static lt_tensor *rows_of(const rank *r, uint64_t seed, double offset)
{
    const trial *t = r->trial;
    block b = block_new(LT_F64, 2, (int64_t[]){r->rows, t->channels});
    for (int64_t i = 0; i < b.count; i++)
        b.at[i] = normal(seed, (uint64_t)(r->first * t->channels + i)) + offset;
    lt_tensor *x = block_tensor(r->ctx, &b, t->dtype);
    block_free(&b);
    return x;
}

static lt_tensor *channels_of(const rank *r, uint64_t seed, double offset)
{
    block b = block_new(LT_F64, 1, &r->trial->channels);
    for (int64_t i = 0; i < b.count; i++)
        b.at[i] = normal(seed, (uint64_t)i) + offset;
    lt_tensor *x = block_tensor(r->ctx, &b, r->trial->dtype == LT_F64 ? LT_F64 : LT_F32);
    block_free(&b);
    return x;
}

static void find(rank *r, int which, lt_tensor *x)
{
    block b = block_of(x);
    r->found[which] = b.at;
    r->count[which] = b.count;
}

static lt_status pass(rank *r, lt_tensor *in[INPUTS])
{
    lt_tensor *dy = rows_of(r, 9, 0.25);
    for (int i = 0; i < INPUTS; i++)
        if (i != MEAN && i != VAR)
            LT_TRY(lt_set_requires_grad(in[i], true));
    lt_tensor *y = lt_runv(r->ctx, "batch_norm", r->trial->options, in,
                           r->trial->residual ? INPUTS : RESIDUAL);
    lt_status status = y ? lt_backward(y, dy) : lt_errcode();
    if (status == LT_OK) {
        static const int input[FOUND] = {
            [DX] = X, [DRESIDUAL] = RESIDUAL, [DSCALE] = SCALE, [DSHIFT] = SHIFT};
        find(r, Y, y);
        for (int i = DX; i < FOUND; i++)
            if (i != DRESIDUAL || r->trial->residual)
                find(r, i, lt_grad(in[input[i]]));
    }
    lt_release(y);
    lt_release(dy);
    return status;
}

static void *run(void *ud)
{
    rank *r = ud;
    r->ctx = lt_open(&(lt_config){.threads = 1, .poison = true, .reference = r->reference});
    if (r->group)
        lt_set_allreduce(r->ctx, all_sum, r);
    lt_tensor *in[INPUTS] = {
        rows_of(r, 1, r->trial->offset),     channels_of(r, 2, 0), channels_of(r, 3, 0),
        channels_of(r, 4, r->trial->offset), channels_of(r, 5, 9), rows_of(r, 6, 0)};
    if (pass(r, in) != LT_OK) {
        snprintf(r->text, sizeof r->text, "%s", lt_errmsg());
        if (r->group)
            lt_group_fail(r->group);
    }
    for (int i = 0; i < INPUTS; i++)
        lt_release(in[i]);
    lt_ctx_free(r->ctx);
    lt_group_close(r->group);
    return NULL;
}

/* Runs the trial on its ranks, many[], and on all their rows in one context, *one. */
static void run_all(const trial *t, rank many[MOST], rank *one)
{
    lt_group *group[MOST];
    *one = (rank){.trial = t};
    CHECK_OK(lt_local_open(t->ranks, &(lt_group_config){.timeout = 20}, group));
    for (int i = 0; i < t->ranks; i++) {
        many[i] = (rank){.trial = t,
                         .group = group[i],
                         .first = one->rows,
                         .rows = t->rows[i],
                         .reference = i % 3 == 1};
        one->rows += t->rows[i];
        pthread_create(&many[i].thread, NULL, run, &many[i]);
    }
    for (int i = 0; i < t->ranks; i++)
        pthread_join(many[i].thread, NULL);
    run(one);
}

static void free_all(const trial *t, rank many[MOST], rank *one)
{
    for (int k = 0; k < FOUND; k++) {
        for (int i = 0; i < t->ranks; i++)
            free(many[i].found[k]);
        free(one->found[k]);
    }
}

/* Element `at` of a result of the ranks: concatenated by rows, or summed over the ranks. */
static double joined(const trial *t, const rank many[MOST], int which, int64_t at)
{
    double sum = 0;
    for (int i = 0; i < t->ranks; i++) {
        const rank *r = &many[i];
        if (which == DSCALE || which == DSHIFT)
            sum += r->found[which][at];
        else if (at >= r->first * t->channels && at < (r->first + r->rows) * t->channels)
            return r->found[which][at - r->first * t->channels];
    }
    return sum;
}

/* Compares the ranks with the single context. A large offset of x costs precision. */
static void check(const trial *t)
{
    rank many[MOST], one;
    double tolerance = t->dtype == LT_F64 ? 1e-12 : t->dtype == LT_F32 ? 1e-5 : 0x1p-7;
    tolerance += 0x1p-46 * t->offset;
    run_all(t, many, &one);
    CHECK_STR(one.text, "");
    for (int i = 0; i < t->ranks; i++) {
        CHECK_STR(many[i].text, "");
        CHECK_EQ(many[i].sums, 2);
    }
    for (int k = 0; k < FOUND; k++) {
        double squares = 0;
        for (int64_t i = 0; i < one.count[k]; i++)
            squares += one.found[k][i] * one.found[k][i];
        double typical = sqrt(squares / (double)(one.count[k] + 1));
        for (int64_t i = 0; i < one.count[k]; i++) {
            double got = joined(t, many, k, i), want = one.found[k][i];
            if (!(fabs(got - want) <= tolerance * (fabs(want) + typical)))
                FAIL("%d ranks, %s, %s: %s[%lld] is %.17g, not %.17g", t->ranks,
                     lt_dtype_name(t->dtype), t->options, found_name[k], (long long)i, got, want);
        }
    }
    free_all(t, many, &one);
}

static const int64_t rows[][MOST] = {{8, 8}, {20, 3, 11}, {7, 0, 30, 1}, {0, 1, 1, 2}};
static const int ranks_of[] = {2, 3, 4, 4};
static const char *const options[] = {"train=true sync=true", "train=true sync=true act=relu"};

TEST(all_ranks_are_normalized_as_one_batch)
{
    static const lt_dtype dtypes[] = {LT_F64, LT_F32, LT_BF16};
    static const int64_t channels[] = {1, 7, 64, 130};
    for (int i = 0; i < 4 * 3 * 4 * 4; i++) {
        trial t = {.ranks = ranks_of[i % 4],
                   .dtype = dtypes[i / 4 % 3],
                   .channels = channels[i / 12 % 4],
                   .options = options[i / 48 % 2],
                   .residual = i / 96};
        memcpy(t.rows, rows[i % 4], sizeof t.rows);
        check(&t);
    }
}

TEST(a_large_mean_loses_little_precision)
{
    trial t = {.ranks = 3,
               .dtype = LT_F64,
               .channels = 5,
               .offset = 1e4,
               .rows = {20, 3, 11},
               .options = options[0]};
    check(&t);
}

TEST(one_row_on_all_ranks_is_an_error)
{
    trial t = {.ranks = 2, .dtype = LT_F32, .channels = 3, .rows = {1, 0}, .options = options[0]};
    rank many[MOST], one;
    run_all(&t, many, &one);
    CHECK_STR(one.text, "batch_norm: train=true requires more than one value per channel, but x "
                        "has one (1x3 f32); use a larger batch or train=false");
    CHECK(strstr(many[0].text, "requires more than one value per channel"));
    CHECK(strstr(many[1].text, "requires more than one value per channel"));
    free_all(&t, many, &one);
}

TEST(evaluation_does_not_communicate)
{
    trial t = {.ranks = 2,
               .dtype = LT_F32,
               .channels = 3,
               .rows = {4, 1},
               .options = "train=false sync=true"};
    rank many[MOST], one;
    run_all(&t, many, &one);
    for (int i = 0; i < t.ranks; i++) {
        CHECK_STR(many[i].text, "");
        CHECK_EQ(many[i].sums, 0);
    }
    free_all(&t, many, &one);
}

/* Without a group, sync=true gives the same bits as plain batch norm. */
TEST(one_process_has_the_same_bits_without_sync)
{
    static const char *const plain[] = {"train=true", "train=true act=relu"};
    for (int i = 0; i < 4; i++) {
        trial t = {.dtype = LT_F32, .channels = 6, .residual = i / 2, .options = options[i % 2]};
        trial other = t;
        other.options = plain[i % 2];
        rank a = {.trial = &t, .rows = 50}, b = {.trial = &other, .rows = 50};
        run(&a);
        run(&b);
        for (int k = 0; k < FOUND; k++)
            CHECK(!a.found[k] ||
                  memcmp(a.found[k], b.found[k], (size_t)a.count[k] * sizeof(double)) == 0);
        CHECK(a.found[Y] && a.found[DX]);
        for (int k = 0; k < FOUND; k++) {
            free(a.found[k]);
            free(b.found[k]);
        }
    }
}
