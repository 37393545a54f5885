/* link.c - measures the link between two ranks. */
#include "core/tensor.h"
#include "dist/group.h"

enum { ROUNDS = 5 };
static const double LOOK_SECONDS = 0.2; /* until the next look whether the job has failed */

/* Waits for a message of this run. New. */
static lt_message *wait_for(lt_group *g, lt_mail *mail, int64_t run)
{
    double began = lt__seconds();
    while (lt__seconds() - began < lt__group_timeout(g)) {
        char text[512];
        int rank;
        lt_status code;
        lt_message *m = lt__mail_take(mail, LOOK_SECONDS);
        if (m && m->kind != LT_MAIL_LOST && m->number[0] == run)
            return m;
        lt__message_free(m);
        if (lt_group_failure(g, &rank, &code, text, sizeof text)) {
            lt_fail(LT_EPEER, "rank %d has failed: %s", rank, text);
            return NULL;
        }
    }
    lt_fail(LT_EPEER, "rank %d got no message for %g s", lt_group_rank(g), lt__group_timeout(g));
    return NULL;
}

/* The first rank sends a message, which the last one returns. */
static lt_status exchange(lt_group *g, lt_mail *mail, int64_t run, size_t bytes)
{
    int rank = lt_group_rank(g), last = lt_group_size(g) - 1;
    lt_message *m = rank == 0 ? lt__message_new(0, bytes) : wait_for(g, mail, run);
    if (!m)
        return lt_errcode();
    m->number[0] = run;
    lt__mail_send(mail, rank == 0 ? last : 0, m);
    if (rank > 0)
        return LT_OK;
    m = wait_for(g, mail, run);
    lt__message_free(m);
    return m ? LT_OK : lt_errcode();
}

lt_status lt_group_time_message(lt_group *g, size_t bytes, double *seconds)
{
    int rank = lt_group_rank(g), last = lt_group_size(g) - 1;
    lt_mail *mail = last > 0 ? lt__group_mail(g) : NULL;
    *seconds = 0;
    if (last == 0)
        return LT_OK;
    if (!mail)
        return lt_errcode();
    int64_t run = lt__mail_next_run(mail);
    for (int i = 0; i < ROUNDS; i++) {
        LT_TRY(lt_group_barrier(g, "a timed message"));
        double began = lt__seconds();
        if (rank == 0 || rank == last)
            LT_TRY(exchange(g, mail, run, bytes));
        double half = (lt__seconds() - began) / 2;
        *seconds = i == 0 || half < *seconds ? half : *seconds;
    }
    return lt_group_broadcast(g, "the time of a message", seconds, sizeof *seconds, 0);
}
