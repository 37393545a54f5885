/* test_reducer.c - several ranks in threads train like one: uneven shares, micro-batches,
 * parameters that few or no ranks use, hooks in any order, batch norm's running statistics, half
 * precision on the wire, a server, failures. */
#include "tests/dist/trainer.h"

TEST(ranks_train_like_one)
{
    for (int n = 2; n <= MOST_TRAINERS; n++) {
        plan p = usual;
        p.ranks = n;
        check_against_one(&p, 1e-13);
        p.dtype = LT_F32;
        check_against_one(&p, 2e-6);
        p.config = (lt_reducer_config){0}; /* one bucket */
        check_against_one(&p, 2e-6);
    }
}

TEST(fewer_rows_than_ranks)
{
    plan p = usual;
    p.ranks = 5;
    set_rows(&p, 13, 3, 1, 5, 2);
    check_against_one(&p, 1e-13);
}

/* The rank computes a row that does not count, with infinite gradients: infinity times 0 would be
 * nan. */
TEST(non_finite_gradients_of_a_rank_without_rows_are_ignored)
{
    plan p = usual;
    p.ranks = 5;
    p.poisons = true;
    set_rows(&p, 13, 3, 1, 5, 2);
    check_against_one(&p, 1e-13);
    p.dtype = LT_F32;
    p.config.wire = LT_F16;
    check_against_one(&p, 4e-4);
}

TEST(micro_batches_of_a_batch)
{
    for (int micro_batches = 2; micro_batches <= 4; micro_batches++) {
        plan p = usual;
        p.ranks = 2;
        p.micro_batches = micro_batches;
        check_against_one(&p, 1e-13);
    }
}

TEST(buckets_may_change_between_steps)
{
    plan p = usual;
    p.changes = true;
    check_against_one(&p, 1e-13);
}

/* A rank that does not synchronize trains like a single rank with the same rows. */
TEST(ranks_may_take_steps_without_sync)
{
    static trained one[MOST_TRAINERS], two[MOST_TRAINERS];
    plan p = usual, alone = usual;
    p.ranks = 2;
    alone.ranks = 1;
    set_rows(&p, 12, 12, 12, 12, 12);
    set_rows(&alone, 6, 6, 6, 6, 6);
    p.config.no_sync = true;
    check_train_all(&p, two);
    train_all(&alone, one);
    CHECK(memcmp(two[0].w, one[0].w, sizeof one[0].w) == 0);
    CHECK(memcmp(two[0].w, two[1].w, sizeof one[0].w) != 0);
}

/* A record that was sent too early is sent again. */
TEST(more_backwards_than_in_earlier_steps)
{
    plan p = usual;
    p.ranks = 2;
    p.grows = true;
    set_rows(&p, 12, 12, 12, 12, 12);
    check_against_one(&p, 1e-13);
    p.tells = true; /* then the ranks may differ in backwards */
    set_rows(&p, 13, 12, 13, 13, 11);
    check_against_one(&p, 1e-13);
}

TEST(parameters_that_one_rank_or_none_uses)
{
    static trained results[MOST_TRAINERS];
    plan p = usual;
    p.rare = true;
    p.config.first_bucket = p.config.bucket = 64; /* each parameter has its own bucket */
    check_against_one(&p, 1e-13);
    train_all(&p, results);
    plan never = p;
    never.rare = false;
    static trained without[MOST_TRAINERS];
    train_all(&never, without);
    CHECK(memcmp(results[0].w[NEVER], without[0].w[NEVER], sizeof without[0].w[NEVER]) == 0);
    CHECK(memcmp(results[0].w[RARE], without[0].w[RARE], sizeof without[0].w[RARE]) != 0);
    CHECK(results[0].buckets[4] > without[0].buckets[4]);
}

TEST(ranks_with_different_wires_or_sums_disagree)
{
    static const lt_dtype wires[] = {LT_F32, LT_F16, LT_BF16};
    static const char *const names[] = {"fp32", "fp16", "bf16"};
    static trained results[MOST_TRAINERS];
    char text[256];
    for (int i = 0; i < 9; i++) {
        plan p = usual;
        lt_reducer_config other = {.wire = wires[i % 3]};
        p.ranks = 2;
        p.dtype = LT_F32;
        p.config = (lt_reducer_config){.wire = wires[i / 3]};
        p.other = &other;
        train_all(&p, results);
        snprintf(
            text, sizeof text,
            "the ranks disagree: the gradient exchange: rank 0 has '--wire %s', rank 1 has '--wire "
            "%s'",
            names[i / 3], names[i % 3]);
        CHECK_EQ(results[1].status, i / 3 == i % 3 ? LT_OK : LT_EDESYNC);
        CHECK_STR(results[1].text, i / 3 == i % 3 ? "" : text);
    }
    plan p = usual;
    lt_reducer_config other = {.sum_backend = LT_SUM_BACKEND_HOST};
    p.ranks = 3;
    p.other = &other;
    train_all(&p, results);
    CHECK_EQ(results[1].status, LT_EDESYNC);
    CHECK_STR(
        results[1].text,
        "the ranks disagree: the gradient exchange: rank 0 has '--sums auto', rank 1 has '--sums "
        "host'");
}

TEST(slow_hooks)
{
    for (int n = 2; n <= MOST_TRAINERS; n++) {
        plan p = usual;
        p.ranks = n;
        p.late = p.rare = true;
        check_against_one(&p, 1e-13);
    }
}

/* The time at which buckets are sent does not change a bit. */
TEST(blocking_gives_the_same_bits)
{
    static trained early[MOST_TRAINERS], blocking[MOST_TRAINERS];
    plan p = usual;
    check_train_all(&p, early);
    p.config.blocking = true;
    train_all(&p, blocking);
    CHECK(memcmp(early[0].w, blocking[0].w, sizeof early[0].w) == 0);
}

/* Split backwards that overlap need a blocking exchange. */
TEST(split_backwards_give_the_same_bits)
{
    static trained whole[MOST_TRAINERS], split[MOST_TRAINERS];
    for (int splits = 1; splits <= 2; splits++)
        for (int blocking = splits - 1; blocking < 2; blocking++) {
            plan p = usual;
            p.ranks = 2;
            p.norm = true;
            set_rows(&p, 13, 12, 12, 13, 12);
            p.micro_batches = 2;
            p.config.blocking = blocking;
            train_all(&p, whole);
            p.splits = splits;
            check_train_all(&p, split);
            CHECK(memcmp(whole[0].w, split[0].w, sizeof whole[0].w) == 0);
            CHECK(memcmp(whole[0].mean, split[0].mean, sizeof whole[0].mean) == 0);
        }
    plan p = usual;
    p.ranks = 2;
    p.micro_batches = 2;
    p.splits = 2;
    train_all(&p, split);
    int fails = split[0].status == LT_EINVAL ? 0 : 1; /* the other rank may see its end first */
    CHECK_EQ(split[fails].status, LT_EINVAL);
    CHECK(strstr(split[fails].text, "completed the earlier split backward"));
}

/* The running statistics of batch norm are equal on all ranks, and close to those of one rank. */
static void check_statistics(const plan *p, int channels, double tolerance)
{
    static trained one[MOST_TRAINERS], many[MOST_TRAINERS];
    plan alone = *p;
    alone.ranks = 1;
    check_train_all(p, many);
    train_all(&alone, one);
    for (int i = 0; i < p->ranks; i++)
        for (int c = 0; c < channels; c++) {
            CHECK_NEAR(many[i].mean[c], one[0].mean[c], tolerance);
            CHECK_NEAR(many[i].var[c], one[0].var[c], tolerance);
            CHECK(many[i].mean[c] == many[0].mean[c] && many[i].var[c] == many[0].var[c]);
        }
}

TEST(running_statistics_are_those_of_the_global_batch)
{
    for (int micro_batches = 1; micro_batches <= 2; micro_batches++) {
        plan p = usual;
        p.norm = true;
        p.micro_batches = micro_batches;
        set_rows(&p, 13, 12, 12, 13, 12);
        check_statistics(&p, WIDTH, 1e-14);
    }
}

/* With different shares, and with ranks that have none. */
TEST(sync_batch_norm_equals_one_rank)
{
    for (int n = 2; n <= MOST_TRAINERS; n++) {
        plan p = usual;
        p.ranks = n;
        p.sync = true;
        check_against_one(&p, 1e-12);
        p.dtype = LT_F32;
        check_against_one(&p, 1e-5);
        p.dtype = LT_F64;
        p.late = true; /* batches so small that division by their deviation amplifies errors */
        set_rows(&p, 13, 3, 2, 5, 2);
        check_against_one(&p, 1e-11);
        check_statistics(&p, HIDDEN, 1e-11);
    }
}

TEST(halves_on_the_wire)
{
    plan p = usual;
    p.dtype = LT_F32;
    p.config.wire = LT_BF16;
    check_against_one(&p, 3e-3);
    p.config.wire = LT_F16;
    check_against_one(&p, 4e-4);
}

/* Trains with an allreduce and with a server, and checks that the bits are the same. */
static void check_server(plan p)
{
    static trained with[MOST_TRAINERS], without[MOST_TRAINERS];
    check_train_all(&p, without);
    p.config.server = true;
    check_train_all(&p, with);
    for (int i = 0; i < p.ranks; i++)
        CHECK(memcmp(with[i].w, without[i].w, sizeof with[i].w) == 0);
}

TEST(a_server_gives_the_same_bits)
{
    for (int n = 2; n <= MOST_TRAINERS; n++) {
        plan p = usual;
        p.ranks = n;
        set_rows(&p, 13, 3, 1, 5, 2);
        check_server(p);
        p.dtype = LT_F32;
        p.late = p.rare = true;
        check_server(p);
        p.config.wire = LT_F16;
        check_server(p);
        p.config.wire = LT_BF16;
        check_server(p);
        p.changes = true;
        check_server(p);
    }
}

TEST(a_server_is_refused)
{
    static trained results[MOST_TRAINERS];
    plan p = usual;
    lt_reducer_config other = {.server = true};
    p.ranks = 2;
    p.other = &other;
    p.config = (lt_reducer_config){0};
    train_all(&p, results);
    CHECK_EQ(results[1].status, LT_EDESYNC);
    CHECK_STR(results[1].text, "the ranks disagree: the gradient exchange: rank 0 has '', rank 1 "
                               "has '--parallel sync-server'");
    p.other = NULL;
    p.config = (lt_reducer_config){.server = true, .sum_backend = LT_SUM_BACKEND_NCCL};
    train_all(&p, results);
    CHECK_EQ(results[0].status, LT_EUSAGE);
    CHECK_STR(results[0].text, "a synchronous parameter server sums on the CPU, not by NCCL; "
                               "choose another sum_backend");
    p.config = (lt_reducer_config){0};
    p.fault = "latency:rank=1:us=5";
    train_all(&p, results);
    CHECK_EQ(results[0].status, LT_EUSAGE);
    CHECK_STR(results[0].text, "the fault latency delays the messages of asynchronous training and "
                               "of pipelines, but the ranks train synchronously");
}

/* ==== Failures ================================================================================ */

/* No other rank stays in a side sum, either. */
TEST(a_failed_backward_ends_all_ranks)
{
    static trained results[MOST_TRAINERS];
    for (int sync = 0; sync < 2; sync++) {
        plan p = usual;
        p.breaks = true;
        p.sync = sync;
        train_all(&p, results);
        CHECK_EQ(results[1].status, LT_ENUMERIC);
        for (int i = 0; i < 3; i += 2) {
            CHECK_EQ(results[i].status, LT_EPEER);
            CHECK(sync || strstr(results[i].text, "rank 1 failed: "));
            CHECK(strstr(results[i].text, "the hook says no"));
        }
    }
}

/* All ranks end in the first step in which they can detect it. */
TEST(ranks_that_train_differently)
{
    static const struct {
        odd odd;
        const char *text;
        int steps;
    } cases[] = {
        {ODD_LR,
         "the last optimizer step: rank 0 has 'optimizer 1: lr = 0.1', rank 1 has 'optimizer 1: lr "
         "= 0.2'",
         3},
        {ODD_CLIP,
         "the last optimizer step: rank 0 has 'optimizer 1: clip = 10000', rank 1 has 'optimizer "
         "1: clip = 1000'",
         3},
        {ODD_FROZEN,
         "step 3: rank 0 has 'parameter 2 (40 f64): trained', rank 1 has 'parameter 2 "
         "(40 f64): frozen'",
         2},
        {ODD_ROWS, "step 3: rank 0 has 'a batch of 6 rows', rank 1 has 'a batch of 7 rows'", 2},
        {ODD_DATA,
         "step 3: rank 0 has 'training data with digest 00000000', rank 1 has 'training "
         "data with digest 00000007'",
         2},
        {ODD_WRITE,
         "the weights at step 3, which some ranks have changed: rank 0 has 'parameter 3 (4x40 "
         "f64): ",
         2}};
    static trained results[MOST_TRAINERS];
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int blocking = 0; blocking < 2; blocking++) {
            plan p = usual;
            p.odd = cases[c].odd;
            p.config.blocking = blocking;
            train_all(&p, results);
            for (int i = 0; i < 3; i++) {
                CHECK_EQ(results[i].status, LT_EDESYNC);
                if (!strstr(results[i].text, "the ranks disagree: ") ||
                    !strstr(results[i].text, cases[c].text))
                    FAIL("rank %d: %s", i, results[i].text);
                CHECK(results[i].loss[cases[c].steps - 1] > 0);
                CHECK(results[i].loss[cases[c].steps] == 0);
            }
        }
}

TEST(a_rank_may_rewrite_weights_unchanged)
{
    plan p = usual;
    p.odd = PUT_BACK;
    check_against_one(&p, 1e-13);
}

TEST(vranks_reject_sync_batch_norm)
{
    static trained results[MOST_TRAINERS];
    plan p = usual;
    p.ranks = 2;
    p.sync = true;
    p.config.vranks = 4;
    train_all(&p, results);
    CHECK(results[0].status == LT_EUSAGE || results[1].status == LT_EUSAGE);
    for (int i = 0; i < 2; i++) /* one may have received the other's error first */
        CHECK(strstr(
            results[i].text,
            "batch_norm: sync requires the whole batch at once, but with vranks a rank computes 2 "
            "shards of it one after the other"));
}

TEST(a_stop_request_reaches_all_ranks_in_the_same_step)
{
    static trained results[MOST_TRAINERS];
    plan p = usual;
    p.stops = true;
    check_train_all(&p, results);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(results[i].stop[1], 0);
        CHECK_EQ(results[i].stop[2], 15);
    }
}

TEST(a_fault_hits_its_rank_at_its_step)
{
    static trained results[MOST_TRAINERS];
    plan p = usual;
    p.fault = "leave:rank=1:step=3";
    train_all(&p, results);
    CHECK_EQ(results[1].status, LT_EDONE);
    CHECK_STR(results[1].text, "rank 1 leaves in step 3 (fault leave)");
    CHECK(results[1].loss[1] > 0 && results[1].loss[2] == 0);
    for (int i = 0; i < 3; i += 2)
        CHECK_EQ(results[i].status, LT_EPEER);
    CHECK(strstr(results[0].text, "rank 1 exited") || strstr(results[2].text, "rank 1 exited"));
    p.fault = "delay:rank=2:ms=1";
    check_against_one(&p, 1e-13);
    p.fault = "hang:rank=3:step=3";
    train_all(&p, results);
    CHECK_EQ(results[0].status, LT_EUSAGE);
    CHECK_STR(results[0].text, "the fault's rank 3 is out of range 0 to 2");
}
