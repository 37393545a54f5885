/* test_group.c - collectives of ranks in threads: sums against a sum in f64, the same bits on all
 * ranks, ranks that disagree, fail, exit or are missing, background tasks. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "dist/dist.h"
#include "tests/dist/sums.h"
#include "tests/lt_test.h"

enum { MOST = 8 };

/* ==== Ranks =================================================================================== */

typedef struct rank {
    lt_group *group;
    int rank, size;
    void *ud;
    pthread_t thread;
    void (*body)(struct rank *r);
} rank;

static void *run_rank(void *ud)
{
    rank *r = ud;
    r->body(r);
    lt_group_close(r->group);
    return NULL;
}

/* Runs body on n ranks, each with its element of ud[]. */
static void on_ranks(int n, const lt_group_config *config, void (*body)(rank *r), void *ud,
                     size_t ud_bytes)
{
    lt_group *group[MOST];
    rank ranks[MOST];
    CHECK_OK(lt_local_open(n, config, group));
    for (int i = 0; i < n; i++) {
        ranks[i] = (rank){.group = group[i],
                          .rank = i,
                          .size = n,
                          .body = body,
                          .ud = (char *)ud + (size_t)i * ud_bytes};
        pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]);
    }
    for (int i = 0; i < n; i++)
        pthread_join(ranks[i].thread, NULL);
}

static void pause_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* ==== Sums ==================================================================================== */

typedef struct operand { /* of one rank */
    lt_sum sum;
    double *before;
    bool done;
} operand;

static void add_up(rank *r)
{
    operand *o = r->ud;
    o->done = lt_group_allreduce(r->group, &o->sum) == LT_OK;
}

/* A rank's element after scaling and rounding to the wire. */
static double travelled(const lt_sum *s, double x)
{
    uint16_t half;
    float scaled = (float)x * (float)s->scale;
    if (s->wire == s->dtype)
        return s->dtype == LT_F64 ? x * s->scale : scaled;
    lt_convert(&half, s->wire, &scaled, LT_F32, 1);
    lt_convert(&scaled, LT_F32, &half, s->wire, 1);
    return scaled;
}

static void check_sum(int n, int64_t count, lt_dtype dtype, lt_dtype wire)
{
    operand o[MOST] = {0};
    size_t bytes = (size_t)count * lt_dtype_bytes(dtype);
    for (int r = 0; r < n; r++) {
        void *data = malloc(bytes + 1);
        o[r].before = malloc((size_t)count * sizeof(double) + 1);
        elements_of(r, count, dtype, data, o[r].before);
        ((char *)data)[bytes] = 42;
        o[r].sum = (lt_sum){.what = "numbers",
                            .data = data,
                            .count = count,
                            .dtype = dtype,
                            .wire = wire,
                            .scale = dtype == LT_I64 ? 1 : 1.0 / (r + 2)};
    }
    on_ranks(n, NULL, add_up, o, sizeof *o);

    double *found = malloc((size_t)count * sizeof *found + 1);
    lt_convert(found, LT_F64, o[0].sum.data, dtype, (size_t)count);
    for (int64_t i = 0; i < count; i++) {
        double want = 0, size = 0;
        for (int r = 0; r < n; r++) {
            want += travelled(&o[r].sum, o[r].before[i]);
            size += fabs(travelled(&o[r].sum, o[r].before[i]));
        }
        double adding = n * (dtype == LT_F64 ? 0x1p-52 : 0x1p-24);
        double rounding = roundoff(dtype) + (wire != dtype ? roundoff(wire) : 0);
        double most = dtype == LT_I64 ? 0 : size * adding + fabs(want) * rounding;
        if (dtype == LT_F16 || wire == LT_F16) /* subnormal numbers occur */
            most += 0x1p-25;
        if (!(fabs(found[i] - want) <= most))
            FAIL("%d ranks, %lld %s as %s: element %lld is %g, not %g", n, (long long)count,
                 lt_dtype_name(dtype), lt_dtype_name(wire), (long long)i, found[i], want);
    }
    for (int r = 0; r < n; r++) {
        CHECK(o[r].done);
        CHECK_EQ(((char *)o[r].sum.data)[bytes], 42);
        if (memcmp(o[r].sum.data, o[0].sum.data, bytes) != 0)
            FAIL("%d ranks, %lld %s as %s: the bits of ranks 0 and %d differ", n, (long long)count,
                 lt_dtype_name(dtype), lt_dtype_name(wire), r);
    }
    for (int r = 0; r < n; r++) {
        free(o[r].sum.data);
        free(o[r].before);
    }
    free(found);
}

TEST(sums_equal_those_in_f64_and_each_other)
{
    for (int n = 1; n <= MOST; n++)
        for (size_t t = 0; t < N_SUM_TYPES; t++) {
            const int64_t counts[] = {0, 1, n - 1, n, n + 1, 511, 513, 1009, 16 * n, 100003};
            for (size_t k = 0; k < sizeof counts / sizeof *counts; k++)
                check_sum(n, counts[k], sum_types[t].dtype, sum_types[t].wire);
        }
}

static void overflow(rank *r)
{
    operand *o = r->ud;
    float *x = o->sum.data;
    o->done = lt_group_allreduce(r->group, &o->sum) == LT_OK && isinf(x[0]) && x[1] == 2;
}

TEST(values_beyond_f16_become_inf_on_all_ranks)
{
    operand o[3] = {0};
    float x[3][2] = {{1, 1}, {1e6f, 1}, {1, 0}};
    for (int r = 0; r < 3; r++)
        o[r].sum = (lt_sum){"x", x[r], 2, LT_F32, LT_F16, 1};
    on_ranks(3, NULL, overflow, o, sizeof *o);
    for (int r = 0; r < 3; r++)
        CHECK(o[r].done);
}

/* ((0 + 1) + (2 + 3)) in f32, which differs from 0 + 1 + 2 + 3. */
TEST(sums_are_balanced_trees)
{
    operand o[4] = {0};
    float x[4] = {1, 0x1p-24f, 0x1p-24f, 0x1p-24f};
    for (int r = 0; r < 4; r++)
        o[r].sum = (lt_sum){"x", &x[r], 1, LT_F32, LT_F32, 1};
    on_ranks(4, NULL, add_up, o, sizeof *o);
    CHECK(x[0] == 1 + 0x1p-23f);
}

/* ==== Other collectives ======================================================================= */

static void pass_around(rank *r)
{
    int *ok = r->ud, word = r->rank == 2 ? 77 : 0, letter[5] = {r->rank};
    *ok = 0;
    if (lt_group_broadcast(r->group, "a word", &word, sizeof word, 2) != LT_OK || word != 77)
        return;
    if (lt_group_barrier(r->group, "here") != LT_OK)
        return;
    for (int round = 0; round < 100; round++) { /* around a ring; even ranks send first */
        int next = (r->rank + 1) % r->size, last = (r->rank + r->size - 1) % r->size, got[5];
        for (int turn = 0; turn < 2; turn++)
            if ((turn == r->rank % 2 ? lt_group_send(r->group, next, letter, sizeof letter)
                                     : lt_group_receive(r->group, last, got, sizeof got)) != LT_OK)
                return;
        memcpy(letter, got, sizeof got);
    }
    *ok = letter[0] == (r->rank + 100 * r->size - 100) % r->size;
}

TEST(broadcasts_and_messages_arrive)
{
    int ok[4];
    on_ranks(4, NULL, pass_around, ok, sizeof *ok);
    for (int r = 0; r < 4; r++)
        CHECK(ok[r]);
}

typedef struct result {
    lt_status status, later;
    char text[512];
    double x[100];
} result;

static void note(result *to, lt_status status)
{
    to->status = status;
    snprintf(to->text, sizeof to->text, "%s", status == LT_OK ? "" : lt_errmsg());
}

static lt_status sum_of(rank *r, const char *what, int64_t count)
{
    result *own = r->ud;
    lt_sum sum = {what, own->x, count, LT_F64, LT_F64, 1};
    return lt_group_allreduce(r->group, &sum);
}

static void disagree(rank *r)
{
    note(r->ud, sum_of(r, "bucket 3", r->rank == 2 ? 10 : 9));
    ((result *)r->ud)->later = sum_of(r, "bucket 4", 9);
}

TEST(all_ranks_name_a_disagreement)
{
    result results[3] = {0};
    on_ranks(3, NULL, disagree, results, sizeof *results);
    for (int r = 0; r < 3; r++) {
        CHECK_EQ(results[r].status, LT_EDESYNC);
        CHECK_EQ(results[r].later, LT_EDESYNC);
        CHECK_STR(results[r].text, "the ranks disagree: rank 0 is in the allreduce of bucket 3 (9 "
                                   "f64), rank 2 in the allreduce of bucket 3 (10 f64)");
    }
}

static void compare(rank *r)
{
    note(r->ud, lt_group_compare(r->group, "the parameters",
                                 r->rank == 1 ? "w1 3x3 f32\nw2 3x4 f32"
                                              : "w1 3x3 f32\nw2 3x5 f32\nw3 1 f32"));
}

static void compare_equal(rank *r)
{
    note(r->ud, lt_group_compare(r->group, "the parameters", "w1 3x3 f32\n"));
}

TEST(the_first_difference_is_named)
{
    result results[3] = {0};
    on_ranks(3, NULL, compare, results, sizeof *results);
    for (int r = 0; r < 3; r++) {
        CHECK_EQ(results[r].status, LT_EDESYNC);
        CHECK_STR(results[r].text, "the ranks disagree: the parameters: rank 0 has 'w2 3x5 f32', "
                                   "rank 1 has 'w2 3x4 f32'");
    }
    on_ranks(3, NULL, compare_equal, results, sizeof *results);
    for (int r = 0; r < 3; r++)
        CHECK_EQ(results[r].status, LT_OK);
}

static void compare_numbers(rank *r)
{
    result *own = r->ud;
    double numbers[3] = {-20, 0.5, 1 + 1e-9 * r->rank};
    note(r->ud, lt_group_compare_numbers(r->group, "pixels", numbers, 3, 1e-6));
    numbers[1] += r->rank == 2 ? 1e-4 : 1e-5;
    lt_status later = lt_group_compare_numbers(r->group, "pixels", numbers, 3, 1e-6);
    snprintf(own->text, sizeof own->text, "%s", lt_errmsg());
    own->later = later;
}

static void compare_not_finite(rank *r)
{
    result *own = r->ud;
    double numbers[4] = {NAN, INFINITY, -INFINITY, 1 + 1e-9 * r->rank};
    note(r->ud, lt_group_compare_numbers(r->group, "pixels", numbers, 4, 1e-6));
    numbers[3] = r->rank == 1 ? NAN : 2;
    lt_status later = lt_group_compare_numbers(r->group, "pixels", numbers, 4, 1e-6);
    snprintf(own->text, sizeof own->text, "%s", lt_errmsg());
    own->later = later;
}

TEST(non_finite_numbers_are_compared)
{
    result results[2] = {0};
    on_ranks(2, NULL, compare_not_finite, results, sizeof *results);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(results[r].status, LT_OK);
        CHECK_EQ(results[r].later, LT_EDESYNC);
        CHECK_STR(results[r].text, "the ranks disagree: pixels: number 4 is 2 on rank 0 and nan on "
                                   "rank 1");
    }
}

TEST(numbers_may_differ_within_the_tolerance)
{
    result results[3] = {0};
    on_ranks(3, NULL, compare_numbers, results, sizeof *results);
    for (int r = 0; r < 3; r++) {
        CHECK_EQ(results[r].status, LT_OK);
        CHECK_EQ(results[r].later, LT_EDESYNC);
        CHECK_STR(results[r].text, "the ranks disagree: pixels: number 2 is 0.50001 on rank 0 and "
                                   "0.5001 on rank 2");
    }
}

static void one_fails(rank *r)
{
    if (r->rank == 1) {
        pause_ms(20);
        lt_fail(LT_ENUMERIC, "train.lua:9: the loss is nan");
        lt_group_fail(r->group);
        return;
    }
    note(r->ud, sum_of(r, "bucket 3", 9));
    int who;
    char text[64];
    lt_status code;
    ((result *)r->ud)->later = lt_group_failure(r->group, &who, &code, text, sizeof text) &&
                                       who == 1 && strstr(text, "nan")
                                   ? code
                                   : LT_OK;
}

TEST(a_failure_reaches_the_other_ranks)
{
    result results[3] = {0};
    on_ranks(3, NULL, one_fails, results, sizeof *results);
    for (int r = 0; r < 3; r += 2) {
        CHECK_EQ(results[r].status, LT_EPEER);
        CHECK_EQ(results[r].later, LT_ENUMERIC);
        CHECK_STR(results[r].text, "rank 1 failed: train.lua:9: the loss is nan");
    }
}

static void one_leaves(rank *r)
{
    if (r->rank < 2)
        note(r->ud, sum_of(r, "bucket 3", 9));
}

TEST(the_exit_of_a_rank_reaches_the_others)
{
    result results[3] = {0};
    on_ranks(3, NULL, one_leaves, results, sizeof *results);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(results[r].status, LT_EPEER);
        CHECK(strstr(results[r].text, "rank 2 exited while rank "));
        CHECK(strstr(results[r].text, " was waiting for it in bucket 3"));
    }
}

static void one_is_late(rank *r)
{
    lt_group_set_location(r->group, "train.lua:31", 7);
    if (lt_group_barrier(r->group, "all are there") != LT_OK)
        return;
    if (r->rank == 1)
        pause_ms(1500);
    note(r->ud, sum_of(r, "bucket 3", 9));
}

TEST(a_missing_rank_is_named_with_its_location)
{
    result results[2] = {0};
    on_ranks(2, &(lt_group_config){.timeout = 0.3}, one_is_late, results, sizeof *results);
    CHECK_EQ(results[0].status, LT_EPEER);
    CHECK_STR(results[0].text, "rank 1 did not reach bucket 3 within 0.3 s; it was last seen at "
                               "train.lua:31, step 7");
    CHECK_EQ(results[1].status, LT_EPEER);
}

typedef struct impatient { /* one of two ranks with a tiny timeout */
    float *x;
    atomic_int *begun, *ended;
    bool was_written;
} impatient;

enum { HASTY = 1 << 16 };

/* A rank that fails writes to each half of its data, and checks that no other rank still does. */
static void sum_impatiently(rank *r)
{
    impatient *h = r->ud;
    lt_sum sum = {"x", h->x, HASTY, LT_F32, LT_F32, 1};
    atomic_fetch_add(h->begun, 1);
    for (int i = 0; i < 1000000 && atomic_load(h->begun) < r->size; i++)
        ;
    bool failed = lt_group_allreduce(r->group, &sum) != LT_OK;
    if (failed)
        h->x[HASTY / 2 - 1] = h->x[HASTY - 1] = 42;
    atomic_fetch_add(h->ended, 1);
    while (atomic_load(h->ended) < r->size)
        pause_ms(1);
    h->was_written = failed && (h->x[HASTY / 2 - 1] != 42 || h->x[HASTY - 1] != 42);
}

/* Each rank arrives when the other is about to time out, so that in some rounds they miss each
 * other by less than a microsecond. */
TEST(data_of_a_failed_rank_is_not_written)
{
    static float x[2][HASTY];
    for (int round = 0; round < 500; round++) {
        atomic_int begun = 0, ended = 0;
        impatient h[2] = {{x[0], &begun, &ended, false}, {x[1], &begun, &ended, false}};
        on_ranks(2, &(lt_group_config){.timeout = 1e-9}, sum_impatiently, h, sizeof *h);
        if (h[0].was_written || h[1].was_written)
            FAIL("round %d: the data of a failed rank was written", round);
    }
}

/* ==== Background tasks ======================================================================== */

typedef struct background {
    rank *rank;
    double x[1000];
    int ran;
    result result;
} background;

static lt_status sum_in_background(void *ud)
{
    background *b = ud;
    lt_sum sum = {"numbers", b->x, 1000, LT_F64, LT_F64, 1};
    b->ran++;
    return lt_group_allreduce(b->rank->group, &sum);
}

static void sum_after_tasks(rank *r)
{
    background *b = r->ud;
    b->rank = r;
    b->x[0] = 1;
    for (int i = 0; i < 5; i++)
        if (lt_group_start(r->group, sum_in_background, b) != LT_OK)
            return;
    lt_sum last = {"the last", &b->result.x[0], 1, LT_F64, LT_F64, 1};
    b->result.x[0] = r->rank;
    if (lt_group_allreduce(r->group, &last) == LT_OK) /* runs after the five tasks */
        note(&b->result, lt_group_wait(r->group));
}

TEST(started_tasks_run_in_order_before_later_collectives)
{
    static background b[4];
    on_ranks(4, NULL, sum_after_tasks, b, sizeof *b);
    for (int r = 0; r < 4; r++) {
        CHECK_EQ(b[r].ran, 5);
        CHECK_EQ(b[r].result.status, LT_OK);
        CHECK(b[r].x[0] == 1024 && b[r].result.x[0] == 6);
    }
}

static void fail_after_tasks(rank *r)
{
    background *b = r->ud;
    b->rank = r;
    if (r->rank == 0 && lt_group_start(r->group, sum_in_background, b) == LT_OK)
        note(&b->result, lt_group_wait(r->group));
}

TEST(wait_returns_a_failure_in_the_background)
{
    static background b[2];
    on_ranks(2, NULL, fail_after_tasks, b, sizeof *b);
    CHECK_EQ(b[0].result.status, LT_EPEER);
    CHECK_STR(b[0].result.text, "rank 1 exited while rank 0 was waiting for it in numbers");
}

/* ==== For benchmarks ========================================================================== */

static void time_it(rank *r)
{
    result *to = r->ud;
    double *x = to->x;
    note(to, lt_group_time_allreduce(r->group, 1000, LT_F16, false, x, 3));
    if (to->status == LT_OK && lt_group_time_allreduce(r->group, 10, LT_F32, true, x, 3) == LT_EENV)
        snprintf(to->text, sizeof to->text, "%s", lt_errmsg());
}

TEST(allreduces_are_timed)
{
    static result results[3];
    on_ranks(3, NULL, time_it, results, sizeof *results);
    for (int r = 0; r < 3; r++) {
        CHECK_EQ(results[r].status, LT_OK);
        for (int i = 0; i < 3; i++)
            CHECK(results[r].x[i] > 0 && results[r].x[i] < 20);
        CHECK_STR(results[r].text, "ranks in one process do not use MPI");
    }
}

/* ==== Side sums =============================================================================== */

typedef struct side {
    rank *rank;
    float *x;
    atomic_int done; /* side sums completed */
    result result;
} side;

enum { SIDE_SUMS = 40, LARGE = 100000 };

/* Its k-th sum waits for the rank's k-th side sum, like a bucket that waits for backward. */
static lt_status sum_in_turns(void *ud)
{
    side *a = ud;
    lt_sum sum = {"a bucket", a->x, LARGE, LT_F32, LT_F32, 1};
    for (int k = 0; k < SIDE_SUMS; k++) {
        while (atomic_load(&a->done) < k)
            pause_ms(1);
        LT_TRY(lt_group_allreduce(a->rank->group, &sum));
    }
    return LT_OK;
}

static void sum_on_side(rank *r)
{
    side *a = r->ud;
    lt_status status = LT_OK;
    double x[3];
    a->rank = r;
    a->x = malloc(LARGE * sizeof *a->x);
    for (int i = 0; i < LARGE; i++)
        a->x[i] = 1;
    if (lt_group_start(r->group, sum_in_turns, a) != LT_OK)
        return;
    for (int k = 0; k < SIDE_SUMS && status == LT_OK; k++) {
        for (int i = 0; i < 3; i++)
            x[i] = r->rank + i + k;
        status = lt_group_allreduce_side(r->group, &(lt_sum){"a norm", x, 3, LT_F64, LT_F64, 1});
        for (int i = 0; i < 3 && status == LT_OK; i++)
            if (x[i] != r->size * (r->size - 1) / 2 + r->size * (i + k))
                status = lt_fail(LT_EINVAL, "sum %d: element %d is %g", k, i, x[i]);
        atomic_fetch_add(&a->done, 1);
    }
    atomic_store(&a->done, SIDE_SUMS);
    note(&a->result, status);
    status = lt_group_wait(r->group);
    if (a->result.status == LT_OK)
        note(&a->result, status);
    free(a->x);
}

TEST(side_sums_do_not_wait_for_started_tasks)
{
    for (int n = 1; n <= 4; n++) {
        static side a[4];
        memset(a, 0, sizeof a);
        on_ranks(n, &(lt_group_config){.timeout = 20}, sum_on_side, a, sizeof *a);
        for (int r = 0; r < n; r++)
            CHECK_STR(a[r].result.text, "");
    }
}

/* Rank 0 waits in a side sum while rank 1 fails. */
static void fail_during_side_sum(rank *r)
{
    double x = 1;
    if (r->rank == 0) {
        note(r->ud,
             lt_group_allreduce_side(r->group, &(lt_sum){"a norm", &x, 1, LT_F64, LT_F64, 1}));
        return;
    }
    pause_ms(20);
    lt_fail(LT_ENUMERIC, "train.lua:9: the loss is nan");
    lt_group_fail(r->group);
}

TEST(a_failure_ends_the_wait_for_a_side_sum)
{
    result results[2] = {0};
    on_ranks(2, NULL, fail_during_side_sum, results, sizeof *results);
    CHECK_EQ(results[0].status, LT_EPEER);
    CHECK_STR(results[0].text, "rank 1 failed: train.lua:9: the loss is nan");
}

/* ==== Bad arguments =========================================================================== */

TEST(bad_arguments_are_rejected)
{
    lt_group *group[2];
    float x[4] = {0};
    int64_t whole[4] = {0};
    CHECK_EQ(lt_local_open(0, NULL, group), LT_EUSAGE);
    CHECK_EQ(lt_local_open(257, NULL, group), LT_EUSAGE);
    CHECK_STR(lt_errmsg(), "a process must have 1 to 256 ranks, not 257");
    CHECK_OK(lt_local_open(2, NULL, group));
    CHECK_EQ(lt_group_allreduce(group[0], &(lt_sum){"x", x, 4, LT_U8, LT_U8, 1}), LT_EINVAL);
    CHECK_EQ(lt_group_allreduce(group[0], &(lt_sum){"x", x, 2, LT_F64, LT_F16, 1}), LT_EINVAL);
    CHECK_STR(lt_errmsg(), "allreduce: f64 cannot travel as f16");
    CHECK_EQ(lt_group_allreduce(group[0], &(lt_sum){"x", whole, 4, LT_I64, LT_I64, 2}), LT_EINVAL);
    CHECK_EQ(lt_group_broadcast(group[0], "x", x, 4, 2), LT_EINVAL);
    CHECK_EQ(lt_group_send(group[0], 0, x, 4), LT_EINVAL);
    CHECK_STR(lt_errmsg(), "send: rank 0 is this rank");
    lt_group_close(group[0]);
    lt_group_close(group[1]);
    lt_group_close(NULL);
}
