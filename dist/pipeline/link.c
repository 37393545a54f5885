/* link.c - measures the link between two ranks. */
#include <stdlib.h>
#include <string.h>

#include "core/tensor.h"
#include "dist/group.h"

enum { ROUNDS = 5 };

/* Waits for a message. New. */
static lt_message *wait_for(lt_group *g, lt_mail *mail)
{
    double began = lt__seconds();
    while (lt__seconds() - began < lt__group_timeout(g)) {
        char text[512];
        int rank;
        lt_status code;
        lt_message *m = lt__mail_take(mail, LT_CHECK_SECONDS);
        if (m && m->kind != LT_MAIL_LOST)
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

/* Copies the bytes (bytes) of data into a message, like a pipeline that sends a value. */
static lt_status send(lt_mail *mail, int to, const void *data, size_t bytes)
{
    lt_message *m = lt__message_new(LT_MSG_TIMED, bytes);
    if (!m)
        return lt_errcode();
    memcpy(m->data, data, bytes);
    lt__mail_send(mail, to, m);
    return LT_OK;
}

static lt_status receive(lt_group *g, lt_mail *mail, void *data, size_t bytes)
{
    lt_message *m = wait_for(g, mail);
    if (!m)
        return lt_errcode();
    memcpy(data, m->data, LT_MIN(bytes, m->bytes));
    lt__message_free(m);
    return LT_OK;
}

/* The first rank sends a message, which the last one returns. */
static lt_status exchange(lt_group *g, lt_mail *mail, void *data, size_t bytes)
{
    int rank = lt_group_rank(g), last = lt_group_size(g) - 1;
    if (rank == 0)
        LT_TRY(send(mail, last, data, bytes));
    LT_TRY(receive(g, mail, data, bytes));
    return rank == last ? send(mail, 0, data, bytes) : LT_OK;
}

/* The shortest seconds of a few round trips of a message, halved. */
static lt_status time_exchanges(lt_group *g, lt_mail *mail, void *data, size_t bytes,
                                double *seconds)
{
    int rank = lt_group_rank(g), last = lt_group_size(g) - 1;
    lt__mail_begin_run(mail);
    for (int i = 0; i < ROUNDS; i++) {
        LT_TRY(lt_group_barrier(g, "a timed message"));
        double began = lt__seconds();
        if (rank == 0 || rank == last)
            LT_TRY(exchange(g, mail, data, bytes));
        double half = (lt__seconds() - began) / 2;
        *seconds = i == 0 || half < *seconds ? half : *seconds;
    }
    return LT_OK;
}

lt_status lt_group_time_message(lt_group *g, size_t bytes, double *seconds)
{
    *seconds = 0;
    if (lt_group_size(g) == 1)
        return LT_OK;
    lt_mail *mail = lt__group_mail(g);
    if (!mail)
        return lt_errcode();
    char *data;
    LT_TRY(LT_CALLOC(data, bytes, "to time a message"));
    lt_status status = time_exchanges(g, mail, data, bytes, seconds);
    free(data);
    LT_TRY(status);
    return lt_group_broadcast(g, "the time of a message", seconds, sizeof *seconds, 0);
}
