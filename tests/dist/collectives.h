/* collectives.h - collectives whose results are checked on each rank, of groups and of rings. */
#ifndef TESTS_DIST_COLLECTIVES_H
#define TESTS_DIST_COLLECTIVES_H

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/group.h"
#include "tests/dist/threads.h"

/* Dtypes that can be summed, and the dtype on the wire. */
static const struct {
    lt_dtype dtype, wire;
} sum_types[] = {{LT_F32, LT_F32}, {LT_F32, LT_F16},   {LT_F32, LT_BF16}, {LT_F64, LT_F64},
                 {LT_F16, LT_F16}, {LT_BF16, LT_BF16}, {LT_I64, LT_I64}};
enum { N_SUM_TYPES = sizeof sum_types / sizeof *sum_types, LARGE = 300007, WORDS = 700001 };

/* Values from -1 to 1. */
static inline double value_of(int who, int64_t i)
{
    uint64_t x = ((uint64_t)who << 32) + (uint64_t)i;
    x = x * 6364136223846793005u + 1442695040888963407u;
    x = (x ^ x >> 29) * 6364136223846793005u;
    return (double)(x >> 32) * 0x1p-31 - 1;
}

/* Writes the elements of a rank to data, and the same values, rounded to the dtype, to x. */
static inline void elements_of(int who, int64_t count, lt_dtype dtype, void *data, double *x)
{
    for (int64_t i = 0; i < count; i++)
        x[i] = dtype == LT_I64 ? floor(1000 * value_of(who, i)) : value_of(who, i);
    lt_convert(data, dtype, x, LT_F64, (size_t)count);
    lt_convert(x, LT_F64, data, dtype, (size_t)count);
}

static inline double roundoff(lt_dtype dtype)
{
    return dtype == LT_F16    ? 0x1p-11
           : dtype == LT_BF16 ? 0x1p-8
           : dtype == LT_F64  ? 0x1p-53
                              : 0x1p-24;
}

static inline void digest_bytes(uint64_t *bits, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++)
        *bits = (*bits ^ at[i]) * 1099511628211u;
}

typedef struct adder { /* one of the ranks that add up their elements */
    lt_status (*add)(void *ud, const lt_sum *sum);
    void *ud;
    int rank, size;
    bool exact;    /* partial sums are not rounded */
    uint64_t bits; /* a digest of all sums */
} adder;

/* A rank's element after scaling and rounding to the wire. */
static inline double travelled(const lt_sum *s, double x)
{
    uint16_t half;
    float scaled = (float)x * (float)s->scale;
    if (s->dtype == LT_F64 || s->dtype == LT_I64)
        return x * s->scale;
    if (s->wire == s->dtype)
        return scaled;
    lt_convert(&half, s->wire, &scaled, LT_F32, 1);
    lt_convert(&scaled, LT_F32, &half, s->wire, 1);
    return scaled;
}

/* Compares the sum of the elements of all ranks with their sum in f64. */
static inline lt_status check_sum(adder *a, int64_t count, lt_dtype dtype, lt_dtype wire)
{
    size_t n = (size_t)count, bytes = n * lt_dtype_bytes(dtype);
    char *data = malloc(bytes + 1);
    double *x = malloc((n + 1) * sizeof *x);
    double *want = calloc(2 * (n + 1), sizeof *want), *size = want + n;
    lt_sum sum = {"numbers", data, count, dtype, wire, 1};
    for (int k = 1; k <= a->size; k++) { /* this rank is the last one */
        int who = (a->rank + k) % a->size;
        elements_of(who, count, dtype, data, x);
        sum.scale = dtype == LT_I64 ? 1 : 1.0 / (who + 2);
        for (int64_t i = 0; i < count; i++) {
            want[i] += travelled(&sum, x[i]);
            size[i] += fabs(travelled(&sum, x[i]));
        }
    }
    data[bytes] = 42;
    lt_status status = a->add(a->ud, &sum);
    lt_convert(x, LT_F64, data, dtype, n);
    double adding = a->size * (dtype == LT_F64 ? 0x1p-52 : 0x1p-24);
    double rounding = roundoff(dtype) + (wire != dtype ? roundoff(wire) : 0);
    double least = dtype == LT_F16 || wire == LT_F16 ? 0x1p-25 : 0; /* subnormal numbers occur */
    int rounds = a->size + 1; /* at most, unless the sum is exact */
    for (int64_t i = 0; i < count && status == LT_OK; i++) {
        double most = size[i] * adding + (a->exact ? fabs(want[i]) * rounding + least
                                                   : rounds * (size[i] * rounding + least));
        if (!(fabs(x[i] - want[i]) <= (dtype == LT_I64 ? 0 : most)))
            status = lt_fail(LT_EINVAL, "rank %d of %d, %lld %s as %s: element %lld is %g, not %g",
                             a->rank, a->size, (long long)count, lt_dtype_name(dtype),
                             lt_dtype_name(wire), (long long)i, x[i], want[i]);
    }
    if (status == LT_OK && data[bytes] != 42)
        status = lt_fail(LT_EINVAL, "something was written after the data");
    digest_bytes(&a->bits, data, bytes);
    free(data);
    free(x);
    free(want);
    return status;
}

/* Checks sums of all dtypes. Some do not fit in staging memory. */
static inline lt_status check_sums(adder *a)
{
    const int64_t n = a->size,
                  counts[] = {0, 1, n - 1, n, n + 1, 511, 513, 1009, 16 * n, 8192, 30011};
    for (int type = 0; type < (int)N_SUM_TYPES; type++)
        for (size_t k = 0; k < sizeof counts / sizeof *counts; k++)
            LT_TRY(check_sum(a, counts[k], sum_types[type].dtype, sum_types[type].wire));
    LT_TRY(check_sum(a, 150007, LT_F32, LT_F32));
    LT_TRY(check_sum(a, LARGE, LT_F32, LT_BF16));
    return check_sum(a, 65536, LT_F64, LT_F64);
}

static inline lt_status add_in_group(void *ud, const lt_sum *sum)
{
    return lt_group_allreduce(ud, sum);
}

static inline lt_status add_on_side(void *ud, const lt_sum *sum)
{
    return lt_group_allreduce_side(ud, sum);
}

static inline adder adder_of(lt_group *g, lt_status (*add)(void *ud, const lt_sum *sum), bool exact)
{
    return (adder){add, g, lt_group_rank(g), lt_group_size(g), exact, 0};
}

/* A sum whose result does not matter. */
static inline lt_status sum_of(lt_group *g, const char *what, int64_t count)
{
    double x[100] = {0};
    return lt_group_allreduce(g, &(lt_sum){what, x, count, LT_F64, LT_F64, 1});
}

/* Passes words from each rank to the next one, from the first to the last. */
static inline lt_status pass_words(lt_group *g, int *data, size_t bytes)
{
    int own = lt_group_rank(g), n = lt_group_size(g);
    if (own > 0)
        LT_TRY(lt_group_receive(g, own - 1, data, bytes));
    return own < n - 1 ? lt_group_send(g, own + 1, data, bytes) : LT_OK;
}

/* Passes a letter around a ring. Ranks with even numbers send first. */
static inline lt_status pass_letters(lt_group *g, int *wrong)
{
    enum { ROUNDS = 100 };
    int own = lt_group_rank(g), n = lt_group_size(g), letter[5] = {own}, got[5];
    for (int turn = 0; turn < 2 * ROUNDS && n % 2 == 0; turn++) {
        if (turn % 2 == own % 2)
            LT_TRY(lt_group_send(g, (own + 1) % n, letter, sizeof letter));
        else
            LT_TRY(lt_group_receive(g, (own + n - 1) % n, got, sizeof got));
        if (turn % 2 == 1)
            memcpy(letter, got, sizeof got);
    }
    *wrong += n % 2 == 0 && letter[0] != (own + ROUNDS * (n - 1)) % n;
    return LT_OK;
}

/* Broadcasts words from each rank, and sends messages. */
static inline lt_status pass_around(lt_group *g)
{
    int own = lt_group_rank(g), wrong = 0, *data = calloc(WORDS, sizeof *data);
    size_t bytes = WORDS * sizeof *data;
    lt_status status = LT_OK;
    for (int root = 0; root < lt_group_size(g) && status == LT_OK; root++) {
        data[0] = data[WORDS - 1] = own == root ? 77 + root : 0;
        status = lt_group_broadcast(g, "words", data, bytes, root);
        wrong += data[0] != 77 + root || data[WORDS - 1] != 77 + root;
    }
    if (status == LT_OK)
        status = lt_group_barrier(g, "here");
    data[0] = data[WORDS - 1] = own == 0 ? 5 : 0;
    if (status == LT_OK)
        status = pass_words(g, data, bytes);
    wrong += data[0] != 5 || data[WORDS - 1] != 5;
    free(data);
    if (status == LT_OK)
        status = pass_letters(g, &wrong);
    return status != LT_OK || wrong == 0 ? status : lt_fail(LT_EINVAL, "%d wrong elements", wrong);
}

/* ==== At the same time ======================================================================== */

enum { MOST_GROUPS = 3, TURNS = 25 };

typedef struct turns { /* sums of one group in its background */
    lt_group *group;
    atomic_int *turn; /* its k-th sum waits for turn k, like a bucket that waits for backward */
} turns;

/* A sum in a group, checked: each rank contributes its rank in the job + i + k. */
static inline lt_status sum_turn(lt_group *g, lt_status (*add)(void *ud, const lt_sum *sum), int k,
                                 int64_t count)
{
    int n = lt_group_size(g), own = lt__group_rank_in_job(g, lt_group_rank(g)), ranks = 0;
    double *x = malloc((size_t)count * sizeof *x);
    for (int i = 0; i < n; i++)
        ranks += lt__group_rank_in_job(g, i);
    for (int64_t i = 0; i < count; i++)
        x[i] = own + (double)i + k;
    lt_status status = add(g, &(lt_sum){"numbers", x, count, LT_F64, LT_F64, 1});
    for (int64_t i = 0; i < count && status == LT_OK; i++)
        if (x[i] != ranks + n * ((double)i + k))
            status = lt_fail(LT_EINVAL, "sum %d: element %lld is %g", k, (long long)i, x[i]);
    free(x);
    return status;
}

static inline lt_status sum_by_turns(void *ud)
{
    turns *t = ud;
    for (int k = 0; k < TURNS; k++) {
        while (atomic_load(t->turn) < k)
            pause_ms(1);
        LT_TRY(sum_turn(t->group, add_in_group, k, k % 3 ? 1000 : 40000));
    }
    return LT_OK;
}

/* The background threads of some groups and the rank's own thread are in collectives at the same
 * time. All background threads wait for side sums of this one. */
static inline lt_status sum_beside(lt_group *const *groups, int n)
{
    atomic_int turn = 0;
    turns t[MOST_GROUPS];
    lt_status status = LT_OK;
    for (int i = 0; i < n && status == LT_OK; i++) {
        t[i] = (turns){groups[i], &turn};
        status = lt_group_start(groups[i], sum_by_turns, &t[i]);
    }
    for (int k = 0; k < TURNS && status == LT_OK; k++) {
        for (int i = 0; i < n && status == LT_OK; i++)
            status = sum_turn(groups[i], add_on_side, k, 100);
        atomic_fetch_add(&turn, 1);
    }
    atomic_store(&turn, TURNS);
    for (int i = 0; i < n; i++) {
        lt_status done = lt_group_wait(groups[i]);
        status = status == LT_OK ? done : status;
    }
    return status;
}

#endif
