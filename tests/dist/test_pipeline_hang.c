/* test_pipeline_hang.c - a rank of a pipeline with replicas hangs, and other ranks wait for those
 * that wait for it. The message names the rank that hangs. */
#include "core/tensor.h"
#include "tests/dist/pipe_net.h"

/* Hangs until the others have failed. */
static lt_status hang(const member *m)
{
    while (failure_of(m->group) == LT_OK)
        pause_ms(10);
    return LT_EPEER;
}

static lt_status take_batch(member *m)
{
    for (int i = 0; i < m->plan->micro; i++)
        LT_TRY(micro_batch(m, i, (uint64_t)i));
    LT_TRY(lt_pipeline_drain(m->pipeline));
    return lt_group_barrier(lt_pipeline_group(m->pipeline), "the next step");
}

/* Two stages with two replicas. Rank 3 hangs. The only rank that waits for it began later than the
 * rank that waits for that one. ud: whether it waits for a message of the pipeline. */
static lt_status wait_for_hung(member *m)
{
    bool in_pipeline = *(bool *)m->ud;
    int byte = 0;
    lt_group_set_location(m->group, "train.lua:31", m->rank);
    LT_TRY(lt_group_barrier(m->group, "the start"));
    if (m->rank == 3 || m->rank == (in_pipeline ? 2 : 1))
        return hang(m);
    if (m->rank == in_pipeline)
        pause_ms(300);
    if (m->rank == 0)
        return in_pipeline ? lt_group_receive(m->group, 1, &byte, 1)
                           : lt_group_receive(m->group, 3, &byte, 1);
    return take_batch(m);
}

static void check_hung(bool in_pipeline, int waits, const char *text)
{
    member members[MOST_RANKS];
    run(&(plan){.stages = 2, .micro = 2, .timeout = 1.2}, 4, wait_for_hung, &in_pipeline, members);
    CHECK_STR(members[waits].text, text);
}

/* A wait in a collective leads to a wait for a message, and the reverse. */
TEST(the_rank_that_all_wait_for_is_named)
{
    check_hung(true, 0,
               "rank 1 did not reach a send to rank 0 within 1.2 s, because it waits for rank 3; "
               "it was last seen at train.lua:31, step 3");
    check_hung(
        false, 2,
        "linear: stage 1 of the pipeline waits for rank 3, stage 1, and has received no message "
        "for 1.2 s; it was last seen at train.lua:31, step 3");
}
