/* test_split_failure.c - a rank of a job fails, is killed, exits, is late or disagrees. Then the
 * waits of all parts end, and messages name ranks of the job. */
#include "tests/dist/collectives.h"
#include "tests/dist/split.h"

/* Ranks are in the job's collective, in one of a part, or in none. The last rank of the job ends in
 * job->part. Each part has waits that only the failure of the job can end. */
static lt_status wait_for_the_last(rank *r)
{
    lt_group *part;
    lt_group_set_location(r->group, "train.lua:31", 7);
    LT_TRY(split(r, &part));
    LT_TRY(lt_group_barrier(part, "the part is there"));
    double begin = lt__seconds();
    lt_status status = lt_group_barrier(r->group, "all are there"), code;
    int who = -1;
    if (status != LT_OK)
        ; /* the last rank was fast */
    else if (r->rank == r->size - 1)
        status = r->job->part(r, part);
    else if (r->rank == 0)
        status = lt_group_barrier(r->group, "a barrier");
    else if (lt_group_rank(part) == 0 && lt_group_size(part) > 1)
        status = lt_group_receive(part, 1, &who, sizeof who); /* is not sent */
    else
        status = sum_of(part, "bucket 3", 9);
    r->result->seconds = lt__seconds() - begin;
    char text[512];
    r->result->later = lt_group_failure(part, &who, &code, text, sizeof text) ? code : LT_OK;
    r->result->bits = (uint64_t)who;
    if (!lt__group_has_processes(part)) /* else it stays open */
        lt_group_close(part);
    return status;
}

static lt_status fail_in_part(rank *r, lt_group *part)
{
    (void)r;
    pause_ms(20);
    lt_fail(LT_ENUMERIC, "train.lua:9: the loss is nan");
    lt_group_fail(part);
    return LT_OK;
}

static lt_status last_fails_once(rank *r)
{
    lt_group *part;
    LT_TRY(split(r, &part));
    lt_status status = r->rank == r->size - 1 ? fail_in_part(r, part) : sum_of(part, "a", 1);
    r->result->spoke = lt_group_is_reporter(part, 20);
    lt_group_close(part);
    return status;
}

/* In these, each rank but the last waits for a rank that does not come. */
static const layout waits[] = {{"tttttt", "012012", {0}}, {"000111", "012012", {0}},
                               {"001122", "010102", {0}}, {"012345", "010101", {0}},
                               {"000000", "001122", {0}}, {"011112", "001110", {0}},
                               {"001111", "001122", {0}}};
enum { N_WAITS = sizeof waits / sizeof *waits };

TEST(a_failure_ends_the_waits_of_all_groups)
{
    result results[MOST];
    for (int i = 0; i < N_WAITS; i++) {
        job j = job_of_parts(waits[i].nodes, waits[i].colors, fail_in_part, 30);
        j.body = wait_for_the_last;
        on_ranks(&j, results);
        for (int r = 0; r < 5; r++) {
            CHECK_STR(results[r].text, "rank 5 failed: train.lua:9: the loss is nan");
            CHECK_EQ(results[r].status, LT_EPEER);
            CHECK_EQ(results[r].later, LT_ENUMERIC);
            CHECK_EQ(results[r].bits, 5);
            CHECK(results[r].seconds < 5);
        }
    }
}

TEST(a_failure_is_reported_once)
{
    static const char *const nodes[] = {"tttttt", "000000"};
    result results[MOST];
    for (int i = 0; i < 2; i++) {
        int speakers = 0;
        on_ranks(
            &(job){.nodes = nodes[i], .colors = "012012", .body = last_fails_once, .timeout = 30},
            results);
        for (int r = 0; r < 6; r++)
            speakers += results[r].spoke;
        CHECK_EQ(speakers, 1);
        CHECK_STR(results[2].text, "rank 5 failed: train.lua:9: the loss is nan");
    }
}

static lt_status die(rank *r, lt_group *part)
{
    (void)r, (void)part;
    kill(getpid(), SIGKILL);
    return LT_OK;
}

TEST(a_killed_rank_ends_the_waits_of_all_groups)
{
    result results[MOST];
    for (int i = 2; i < 2 * N_WAITS; i++) { /* not threads */
        job j = job_of_parts(waits[i / 2].nodes, waits[i / 2].colors, die, 30);
        j.body = wait_for_the_last;
        j.silent = i % 2 != 0;
        on_ranks(&j, results);
        bool located = j.nodes[4] == j.nodes[5]; /* ranks of its node know where it was */
        for (int r = 0; r < 5; r++) {
            CHECK_EQ(results[r].status, LT_EPEER);
            if (results[r].bits != 5 || !strstr(results[r].text, "rank 5 was lost"))
                FAIL("nodes %s, parts %s: rank %d: %s", j.nodes, j.colors, r, results[r].text);
            if (located && !strstr(results[r].text, "last seen at train.lua:31, step 7"))
                FAIL("nodes %s, parts %s: rank %d: %s", j.nodes, j.colors, r, results[r].text);
            CHECK(results[r].seconds < 5);
        }
    }
}

/* The others call a collective of the part that the last rank does not reach in time. */
static lt_status be_late(rank *r, lt_group *part)
{
    lt_group_set_location(r->group, "train.lua:31", 7);
    LT_TRY(lt_group_barrier(part, "the part is there"));
    if (r->rank == r->size - 1)
        pause_ms(3200);
    return sum_of(part, "bucket 3", 9);
}

TEST(a_missing_rank_of_a_part_is_named)
{
    static const char *const nodes[] = {"tttt", "0000", "0011", "0122"};
    result results[MOST];
    for (int i = 0; i < 4; i++) {
        job j = job_of_parts(nodes[i], "0101", be_late, 0.5);
        on_ranks(&j, results);
        CHECK_STR(results[1].text, "rank 3 did not reach bucket 3 within 0.5 s; it was last seen "
                                   "at train.lua:31, step 7");
        CHECK_EQ(results[3].status, LT_EPEER);
    }
}

/* The last rank hangs until the others have failed. */
static lt_status hang(const rank *r, lt_group *part)
{
    while (failure_of(r->group) == LT_OK)
        pause_ms(10);
    return sum_of(part, "bucket 3", 9);
}

/* Rank 1 waits for the last rank, but began later than the ranks that wait for rank 1. */
static lt_status wait_in_turn(rank *r, lt_group *part)
{
    char text[512];
    int who = -1;
    lt_status code;
    lt_group_set_location(r->group, "train.lua:31", r->rank);
    LT_TRY(lt_group_barrier(r->group, "the parts are there"));
    if (r->rank == 1)
        pause_ms(300);
    lt_status status = r->rank == 3   ? hang(r, part)
                       : r->rank == 1 ? sum_of(part, "bucket 3", 9)
                                      : lt_group_barrier(r->group, "the next epoch");
    lt_group_failure(r->group, &who, &code, text, sizeof text);
    r->result->bits = (uint64_t)who;
    return status;
}

TEST(the_rank_that_all_wait_for_is_named)
{
    static const char *const nodes[] = {"tttt", "0011"};
    result results[MOST];
    for (int i = 0; i < 2; i++) {
        job j = job_of_parts(nodes[i], "0101", wait_in_turn, 1.2);
        on_ranks(&j, results);
        for (int r = 0; r < 4; r++) {
            CHECK_EQ(results[r].status, LT_EPEER);
            CHECK_EQ(results[r].bits, 3);
        }
        if (i == 0)
            CHECK(strstr(results[0].text,
                         "rank 1 did not reach the next epoch within 1.2 s, because it waits for "
                         "rank 3; it was last seen at train.lua:31, step 3"));
    }
}

static lt_status leave_early(rank *r, lt_group *part)
{
    return r->rank < 3 ? sum_of(part, "bucket 3", 9) : LT_OK;
}

TEST(the_exit_of_a_rank_reaches_the_others)
{
    static const char *const nodes[] = {"tttt", "0000", "0123", "0001"};
    result results[MOST];
    for (int i = 0; i < 4; i++) {
        job j = job_of_parts(nodes[i], "0101", leave_early, 30);
        on_ranks(&j, results);
        CHECK_EQ(results[1].status, LT_EPEER);
        CHECK(strstr(results[1].text, "rank 3 exited while rank 1 was waiting for it in bucket 3"));
    }
}

static lt_status call_different(rank *r, lt_group *part)
{
    return sum_of(part, "bucket 3", r->rank == r->size - 1 ? 10 : 9);
}

static lt_status compare_texts(rank *r, lt_group *part)
{
    return lt_group_compare(part, "the parameters", r->rank == r->size - 1 ? "w1" : "w2");
}

static lt_status compare_numbers(rank *r, lt_group *part)
{
    double number = r->rank == r->size - 1;
    return lt_group_compare_numbers(part, "pixels", &number, 1, 0);
}

static lt_status receive_different(rank *r, lt_group *part)
{
    char x[8] = {0};
    if (lt_group_size(part) == 1)
        return LT_OK;
    return r->rank == r->size - 1 ? lt_group_send(part, 0, x, 4) : lt_group_receive(part, 1, x, 8);
}

static lt_status broadcast_different(rank *r, lt_group *part)
{
    int n = lt_group_size(part);
    return lt_group_broadcast(part, "words", &n, sizeof n, r->rank == r->size - 1 ? n - 1 : 0);
}

TEST(messages_name_ranks_of_the_job)
{
    static const char *const nodes[] = {"ttt", "000", "012"};
    static const struct {
        lt_status (*part)(rank *r, lt_group *part);
        const char *text;
    } ways[] = {
        {call_different,
         "the ranks disagree: rank 1 is in the allreduce of bucket 3 (9 f64), rank 2 in the "
         "allreduce of bucket 3 (10 f64)"},
        {compare_texts, "the ranks disagree: the parameters: rank 1 has 'w2', rank 2 has 'w1'"},
        {compare_numbers, "the ranks disagree: pixels: number 1 is 0 on rank 1 and 1 on rank 2"},
        {receive_different, "the ranks disagree: rank 2 sends 4 bytes, but rank 1 expects 8"},
        {broadcast_different,
         "the ranks disagree: rank 1 is in a broadcast of words (4 bytes from rank 1), rank 2 in a "
         "broadcast of words (4 bytes from rank 2)"}};
    result results[MOST];
    for (int i = 0; i < 15; i++) {
        job j = job_of_parts(nodes[i / 5], "011", ways[i % 5].part, 30);
        on_ranks(&j, results);
        CHECK_EQ(results[1].status, LT_EDESYNC);
        CHECK_STR(results[1].text, ways[i % 5].text);
    }
}
