/* test_pipeline_run.c - a pipeline of threads: its gradients have the bits of one context that adds
 * up the same micro-batches, under each schedule and whatever the delays of the stages. */
#include "tests/dist/pipe_net.h"

static void check(const plan *p)
{
    char grads[LAYERS][65];
    member members[MOST_RANKS];
    int n = 0;
    add_up(p, grads);
    run(p, p->stages, train, NULL, members);
    check_ranks(members, p->stages);
    for (int i = 0; i < p->stages; i++)
        n += check_grads(&members[i], grads);
    CHECK_EQ(n, LAYERS);
}

TEST(each_schedule_has_the_bits_of_one_context)
{
    for (int stages = 1; stages <= LAYERS; stages++)
        for (int micro = 1; micro <= 5; micro += 2)
            for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++)
                for (int lag = 0; lag <= 2; lag += 2)
                    check(&(plan){.stages = stages,
                                  .micro = micro,
                                  .lag = lag,
                                  .kind = (lt_schedule_kind)kind});
}

/* With four stages, the last three use the value. */
TEST(a_value_that_several_stages_use)
{
    for (int stages = 2; stages <= LAYERS; stages++)
        for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++)
            for (int lag = 0; lag <= 3; lag++)
                check(&(plan){.stages = stages,
                              .micro = 5,
                              .lag = lag,
                              .kind = (lt_schedule_kind)kind,
                              .form = WIDE});
}

/* All gradients of the value return to its stage, which must add them up as one process does: that
 * of the last use first. */
TEST(a_value_that_the_last_stage_uses_first)
{
    for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++)
        check(&(plan){.stages = LAYERS, .micro = 5, .kind = (lt_schedule_kind)kind, .form = FAN});
}

TEST(micro_batches_with_shares)
{
    for (int stages = 1; stages <= LAYERS; stages++)
        for (int kind = 0; kind < LT_SCHEDULE_KINDS; kind++)
            check(&(plan){.stages = stages,
                          .micro = 4,
                          .lag = 1,
                          .kind = (lt_schedule_kind)kind,
                          .shares = true});
}

/* In the long tests, there are 500 seeds. */
TEST(delays_change_nothing)
{
    uint64_t seeds = getenv("LUATRAIN_TEST_SLOW") ? 500 : 20;
    for (uint64_t seed = 1; seed <= seeds; seed++)
        check(&(plan){.stages = 2 + (int)(seed % 3),
                      .micro = 6,
                      .lag = (int)(seed % 4),
                      .kind = seed % 5 == 0 ? LT_1F1B : LT_ZERO_BUBBLE,
                      .delays = seed,
                      .form = seed / 3 % 2 == 1 ? WIDE : DEEP});
}

/* Rank 1 leaves when it has got a gradient, so all ranks have begun. */
static lt_status leave(member *m)
{
    for (int i = 0; i < 2; i++)
        LT_TRY(micro_batch(m, i, 0));
    return m->rank == 1 ? lt_fail(LT_EUSAGE, "it leaves") : train(m);
}

TEST(a_stage_that_fails_is_named)
{
    member members[MOST_RANKS];
    run(&(plan){.stages = 3, .micro = 4, .kind = LT_1F1B}, 3, leave, NULL, members);
    CHECK_EQ(members[1].status, LT_EUSAGE);
    for (int i = 0; i < 3; i += 2) {
        CHECK_EQ(members[i].status, LT_EPEER);
        if (!strstr(members[i].text, "stage 1 of the pipeline"))
            FAIL("rank %d: %s", i, members[i].text);
    }
}
