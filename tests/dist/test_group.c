/* test_group.c - collectives of ranks that are threads, or processes on one node or on several with
 * a fake net: sums against a sum in f64, the same bits on all ranks, ranks that disagree, fail,
 * exit or are missing, background tasks. */
#include <stdatomic.h>

#include "tests/dist/collectives.h"
#include "tests/dist/jobs.h"

static const char *const layouts[] = {
    "t",      "tt",      "ttt",      "tttt", "ttttt", /* threads */
    "tttttt", "ttttttt", "tttttttt", "0",    "00",    "000",  "0000",
    "01",     "0011",    "0101",     "012",  "0123",  "0001", "0122"};
enum { N_LAYOUTS = sizeof layouts / sizeof *layouts };

/* ==== Sums ==================================================================================== */

static lt_status add_up(rank *r)
{
    adder a = adder_of(r->group, add_in_group, !lt__group_has_processes(r->group));
    lt_status status = check_sums(&a);
    r->result->bits = a.bits;
    return status;
}

TEST(sums_equal_those_in_f64_and_each_other)
{
    result results[MOST];
    for (int i = 0; i < N_LAYOUTS; i += test_stride(3)) {
        check_job(&(job){.nodes = layouts[i], .body = add_up}, results);
        for (size_t r = 0; r < strlen(layouts[i]); r++)
            if (results[r].bits != results[0].bits)
                FAIL("nodes %s: the bits of ranks 0 and %zu differ", layouts[i], r);
    }
}

static lt_status overflow(rank *r)
{
    float x[2] = {r->rank == 1 ? 1e6f : 1, r->rank < 2};
    LT_TRY(lt_group_allreduce(r->group, &(lt_sum){"x", x, 2, LT_F32, LT_F16, 1}));
    CHECK(isinf(x[0]) && x[1] == 2);
    return LT_OK;
}

TEST(values_beyond_f16_become_inf_on_all_ranks)
{
    result results[MOST];
    check_job(&(job){.nodes = "ttt", .body = overflow}, results);
}

/* Gives the same bits for any number of nodes that have the same number of ranks. */
static lt_status sum_as_a_tree(rank *r)
{
    float *x = malloc(LARGE * sizeof *x);
    int wrong = 0;
    for (int i = 0; i < LARGE; i++)
        x[i] = (float)value_of(r->rank, i);
    x[0] = r->rank == 0 ? 1 : 0x1p-24f; /* 1 if they are added one after the other */
    lt_status status = lt__group_add_as_tree(r->group);
    if (status == LT_OK)
        status = lt_group_allreduce(r->group, &(lt_sum){"x", x, LARGE, LT_F32, LT_F32, 1});
    wrong += x[0] != 1 + 0x1p-23f;
    for (int i = 1; i < LARGE; i++)
        wrong += x[i] != ((float)value_of(0, i) + (float)value_of(1, i)) +
                             ((float)value_of(2, i) + (float)value_of(3, i));
    free(x);
    return status != LT_OK || wrong == 0 ? status : lt_fail(LT_EINVAL, "%d wrong elements", wrong);
}

TEST(sums_can_use_a_balanced_tree)
{
    static const char refused[] = "vranks requires the same number of consecutive ranks on each "
                                  "machine, as with -H one:2,other:2";
    static const char *const even[] = {"tttt", "0000", "0011", "0123"};
    static const char *const uneven[] = {"0101", "0001"};
    result results[MOST];
    for (int i = 0; i < 4; i++)
        check_job(&(job){.nodes = even[i], .body = sum_as_a_tree}, results);
    for (int i = 0; i < 2; i++) {
        on_ranks(&(job){.nodes = uneven[i], .body = sum_as_a_tree}, results);
        for (int r = 0; r < 4; r++)
            CHECK_STR(results[r].text, refused);
    }
}

/* ==== Side sums =============================================================================== */

static lt_status sum_on_side(rank *r) { return sum_beside(&r->group, 1); }

TEST(side_sums_run_beside_started_tasks)
{
    result results[MOST];
    for (int i = 0; i < N_LAYOUTS; i += test_stride(3))
        if (strlen(layouts[i]) <= 4)
            check_job(&(job){.nodes = layouts[i], .body = sum_on_side, .timeout = 20}, results);
}

static lt_status fail_with_nan(rank *r)
{
    pause_ms(20);
    lt_fail(LT_ENUMERIC, "train.lua:9: the loss is nan");
    lt_group_fail(r->group);
    return LT_OK;
}

static lt_status fail_during_side_sum(rank *r)
{
    double x = 1;
    lt_sum sum = {"a norm", &x, 1, LT_F64, LT_F64, 1};
    return r->rank == 0 ? lt_group_allreduce_side(r->group, &sum) : fail_with_nan(r);
}

TEST(a_failure_ends_the_wait_for_a_side_sum)
{
    result results[MOST];
    on_ranks(&(job){.nodes = "tt", .body = fail_during_side_sum}, results);
    CHECK_EQ(results[0].status, LT_EPEER);
    CHECK_STR(results[0].text, "rank 1 failed: train.lua:9: the loss is nan");
}

/* ==== Other collectives ======================================================================= */

static lt_status use_words(rank *r) { return pass_around(r->group); }

TEST(broadcasts_and_messages_arrive)
{
    result results[MOST];
    for (int i = 0; i < N_LAYOUTS; i += test_stride(3))
        if (strlen(layouts[i]) <= 4)
            check_job(&(job){.nodes = layouts[i], .body = use_words}, results);
}

static lt_status disagree(rank *r)
{
    lt_status status = sum_of(r->group, "bucket 3", r->rank == r->size - 1 ? 10 : 9);
    char text[512];
    snprintf(text, sizeof text, "%s", lt_errmsg());
    r->result->later = sum_of(r->group, "bucket 4", 9);
    return lt_fail(status, "%s", text);
}

TEST(all_ranks_name_a_disagreement)
{
    static const char *const nodes[] = {"ttt", "000", "012", "011"};
    static const char *const texts[] = {
        "the ranks disagree: rank 0 is in the allreduce of bucket 3 (9 f64), rank 2 in the "
        "allreduce of bucket 3 (10 f64)",
        "the ranks disagree: rank 1 is in the allreduce of bucket 3 (9 f64), rank 2 in the "
        "allreduce of bucket 3 (10 f64)"};
    result results[MOST];
    for (int i = 0; i < 4; i++) {
        on_ranks(&(job){.nodes = nodes[i], .body = disagree}, results);
        for (int r = 0; r < 3; r++) {
            CHECK_EQ(results[r].status, LT_EDESYNC);
            CHECK_EQ(results[r].later, LT_EDESYNC);
            if (i != 2)
                CHECK_STR(results[r].text, texts[i == 3]);
            else /* neighbours compare: rank 2 differs from both of its neighbours */
                CHECK(strstr(results[r].text, "rank 2 in the allreduce of bucket 3 (10 f64)"));
        }
    }
}

static lt_status compare_texts(rank *r)
{
    static const char first[] = "w1 3x3 f32\nw2 3x5 f32\nw3 1 f32";
    LT_TRY(lt_group_compare(r->group, "the parameters", "w1 3x3 f32\n"));
    return lt_group_compare(r->group, "the parameters",
                            r->rank == 1 ? "w1 3x3 f32\nw2 3x4 f32" : first);
}

/* Numbers may differ within the tolerance. */
static lt_status compare_numbers(rank *r)
{
    double numbers[3] = {-20, 0.5, 1 + 1e-9 * r->rank};
    LT_TRY(lt_group_compare_numbers(r->group, "pixels", numbers, 3, 1e-6));
    numbers[1] += r->rank == 2 ? 1e-4 : 1e-5;
    return lt_group_compare_numbers(r->group, "pixels", numbers, 3, 1e-6);
}

static lt_status compare_not_finite(rank *r)
{
    double numbers[4] = {NAN, INFINITY, -INFINITY, 1 + 1e-9 * r->rank};
    LT_TRY(lt_group_compare_numbers(r->group, "pixels", numbers, 4, 1e-6));
    numbers[3] = r->rank == 1 ? NAN : 2;
    return lt_group_compare_numbers(r->group, "pixels", numbers, 4, 1e-6);
}

TEST(the_first_difference_is_named)
{
    static const struct {
        lt_status (*body)(rank *r);
        const char *text;
    } cases[] = {
        {compare_texts, "the parameters: rank 0 has 'w2 3x5 f32', rank 1 has 'w2 3x4 f32'"},
        {compare_numbers, "pixels: number 2 is 0.50001 on rank 0 and 0.5001 on rank 2"},
        {compare_not_finite, "pixels: number 4 is 2 on rank 0 and nan on rank 1"}};
    result results[MOST];
    for (int i = 0; i < 3; i++) {
        char text[128];
        snprintf(text, sizeof text, "the ranks disagree: %s", cases[i].text);
        on_ranks(&(job){.nodes = "ttt", .body = cases[i].body}, results);
        for (int r = 0; r < 3; r++) {
            CHECK_EQ(results[r].status, LT_EDESYNC);
            CHECK_STR(results[r].text, text);
        }
    }
}

/* ==== Failures ================================================================================ */

static lt_status one_fails(rank *r)
{
    int who;
    char text[64];
    lt_status code, status = lt_group_barrier(r->group, "all are there");
    if (r->rank == 1)
        return fail_with_nan(r);
    if (status == LT_OK)
        status = sum_of(r->group, "bucket 3", 9);
    if (lt_group_failure(r->group, &who, &code, text, sizeof text) && who == 1 &&
        strstr(text, "nan"))
        r->result->later = code;
    return status;
}

TEST(a_failure_reaches_the_other_ranks)
{
    static const char *const nodes[] = {"tttt", "0000", "0123", "0011", "0122"};
    result results[MOST];
    for (int i = 0; i < 5; i++) {
        on_ranks(&(job){.nodes = nodes[i], .body = one_fails}, results);
        for (int r = 0; r < 4; r++) {
            if (r == 1)
                continue;
            CHECK_STR(results[r].text, "rank 1 failed: train.lua:9: the loss is nan");
            CHECK_EQ(results[r].status, LT_EPEER);
            CHECK_EQ(results[r].later, LT_ENUMERIC);
        }
    }
}

static lt_status last_one_leaves(rank *r)
{
    return r->rank < r->size - 1 ? sum_of(r->group, "bucket 3", 9) : lt_group_leave(r->group);
}

TEST(the_exit_of_a_rank_reaches_the_others)
{
    static const char *const nodes[] = {"ttt", "000", "012", "011", "001"};
    result results[MOST];
    for (int i = 0; i < 5; i++) {
        on_ranks(&(job){.nodes = nodes[i], .body = last_one_leaves}, results);
        for (int r = 0; r < 2; r++) {
            CHECK_EQ(results[r].status, LT_EPEER);
            CHECK(strstr(results[r].text, "rank 2 exited while rank "));
            CHECK(strstr(results[r].text, " was waiting for it in bucket 3"));
        }
        bool waits = i > 0 && nodes[i][1] == nodes[i][2]; /* until the others leave */
        CHECK_EQ(results[2].status, waits ? LT_EPEER : LT_OK);
    }
}

/* The last rank waits until the others time out. It learns of that only from its own node. */
static lt_status last_rank_is_late(rank *r)
{
    lt_group_set_location(r->group, "train.lua:31", 7);
    LT_TRY(lt_group_barrier(r->group, "all are there"));
    for (int i = 0; i < 300 && r->rank == r->size - 1 && failure_of(r->group) == LT_OK; i++)
        pause_ms(10);
    double begin = lt__seconds();
    lt_status status = sum_of(r->group, "bucket 3", 9);
    r->result->seconds = lt__seconds() - begin;
    return status;
}

TEST(a_missing_rank_is_named)
{
    static const char *const nodes[] = {"tt", "00", "01", "011"};
    result results[MOST];
    for (int i = 0; i < 4; i++) {
        char text[128];
        int size = (int)strlen(nodes[i]);
        snprintf(text, sizeof text,
                 "rank %d did not reach bucket 3 within 0.5 s; it was last seen at train.lua:31, "
                 "step 7",
                 size - 1);
        on_ranks(&(job){.nodes = nodes[i], .body = last_rank_is_late, .timeout = 0.5}, results);
        if (size == 2)
            CHECK_STR(results[0].text, text);
        for (int r = 0; r < size && i != 2; r++) {
            CHECK_EQ(results[r].status, LT_EPEER);
            CHECK(strstr(results[r].text, text));
        }
        CHECK(results[0].seconds < 2.5); /* a second longer than within a node */
    }
}

enum { HASTY = 1 << 16 };
static float hasty[2][HASTY]; /* data of the ranks below */
static atomic_int begun, ended;

/* A rank that fails writes to each half of its data, and checks that no other rank still does. */
static lt_status sum_impatiently(rank *r)
{
    float *x = hasty[r->rank];
    atomic_fetch_add(&begun, 1);
    for (int i = 0; i < 1000000 && atomic_load(&begun) < r->size; i++)
        ;
    lt_sum sum = {"x", x, HASTY, LT_F32, LT_F32, 1};
    bool failed = lt_group_allreduce(r->group, &sum) != LT_OK;
    if (failed)
        x[HASTY / 2 - 1] = x[HASTY - 1] = 42;
    atomic_fetch_add(&ended, 1);
    while (atomic_load(&ended) < r->size)
        pause_ms(1);
    r->result->spoke = failed && (x[HASTY / 2 - 1] != 42 || x[HASTY - 1] != 42);
    return LT_OK;
}

/* Each rank arrives when the other is about to time out, so that in some rounds they miss each
 * other by less than a microsecond. */
TEST(data_of_a_failed_rank_is_not_written)
{
    for (int round = 0; round < 500; round++) {
        result results[MOST];
        begun = ended = 0;
        on_ranks(&(job){.nodes = "tt", .body = sum_impatiently, .timeout = 1e-9}, results);
        if (results[0].spoke || results[1].spoke)
            FAIL("round %d: the data of a failed rank was written", round);
    }
}

/* ==== Background tasks ======================================================================== */

enum { NUMBERS = 1000 };

typedef struct background {
    lt_group *group;
    double x[NUMBERS];
    int ran;
} background;

static lt_status sum_in_background(void *ud)
{
    background *b = ud;
    b->ran++;
    return lt_group_allreduce(b->group, &(lt_sum){"numbers", b->x, NUMBERS, LT_F64, LT_F64, 1});
}

static lt_status sum_after_tasks(rank *r)
{
    background b = {.group = r->group, .x = {1}};
    double last = r->rank;
    for (int i = 0; i < 5; i++)
        LT_TRY(lt_group_start(r->group, sum_in_background, &b));
    /* runs after the five tasks */
    LT_TRY(lt_group_allreduce(r->group, &(lt_sum){"the last", &last, 1, LT_F64, LT_F64, 1}));
    CHECK_EQ(b.ran, 5);
    CHECK(b.x[0] == 1024 && last == 6);
    return lt_group_wait(r->group);
}

TEST(started_tasks_run_in_order_before_later_collectives)
{
    result results[MOST];
    check_job(&(job){.nodes = "tttt", .body = sum_after_tasks}, results);
}

static lt_status fail_after_tasks(rank *r)
{
    background b = {.group = r->group};
    if (r->rank > 0)
        return LT_OK;
    LT_TRY(lt_group_start(r->group, sum_in_background, &b));
    return lt_group_wait(r->group);
}

TEST(wait_returns_a_failure_in_the_background)
{
    result results[MOST];
    on_ranks(&(job){.nodes = "tt", .body = fail_after_tasks}, results);
    CHECK_EQ(results[0].status, LT_EPEER);
    CHECK_STR(results[0].text, "rank 1 exited while rank 0 was waiting for it in numbers");
}

/* ==== For benchmarks, and bad arguments ======================================================= */

static lt_status time_it(rank *r)
{
    double x[3];
    LT_TRY(lt_group_time_allreduce(r->group, 1000, LT_F16, false, x, 3));
    for (int i = 0; i < 3; i++)
        CHECK(x[i] > 0 && x[i] < 20);
    CHECK_FAILS(lt_group_time_allreduce(r->group, 10, LT_F32, true, x, 3), LT_EENV,
                "ranks in one process do not use MPI");
    return LT_OK;
}

TEST(allreduces_are_timed)
{
    result results[MOST];
    on_ranks(&(job){.nodes = "ttt", .body = time_it}, results);
    for (int r = 0; r < 3; r++)
        CHECK_EQ(results[r].status, LT_OK);
}

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
