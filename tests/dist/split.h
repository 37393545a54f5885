/* split.h - runs a job of threads or processes that is split into parts. Include it in one file of
 * a test. */
#ifndef LT_TESTS_DIST_SPLIT_H
#define LT_TESTS_DIST_SPLIT_H

#include <pthread.h>

#include "tests/dist/processes.h"

static const char *colors; /* "0101": the part of each rank. Set before the ranks start */

typedef struct thread {
    rank rank;
    const job *job;
    pthread_t thread;
} thread;

static inline void *run_thread(void *ud)
{
    thread *t = ud;
    result *to = t->rank.result;
    to->status = t->job->body(&t->rank);
    snprintf(to->text, sizeof to->text, "%s", to->status == LT_OK ? "" : lt_errmsg());
    lt_group_close(t->rank.group);
    return NULL;
}

/* Runs the ranks as threads if the nodes are "tttt", or else as processes. */
static inline void run(const job *j, result results[MOST])
{
    lt_group *group[MOST];
    thread threads[MOST];
    int size = (int)strlen(j->nodes);
    if (j->nodes[0] != 't') {
        on_ranks(j, results);
        return;
    }
    CHECK_OK(lt_local_open(size, &(lt_group_config){.timeout = j->timeout}, group));
    for (int i = 0; i < size; i++) {
        results[i] = (result){.status = LT_OK};
        threads[i] = (thread){{group[i], i, size, &results[i]}, j, 0};
        pthread_create(&threads[i].thread, NULL, run_thread, &threads[i]);
    }
    for (int i = 0; i < size; i++)
        pthread_join(threads[i].thread, NULL);
}

static inline lt_status split(const rank *r, lt_group **part)
{
    return lt__group_split(r->group, colors[r->rank] - '0', part);
}

/* Splits the job, runs fn in the part and closes it. */
static inline lt_status in_part(rank *r, lt_status (*fn)(rank *r, lt_group *part))
{
    lt_group *part;
    LT_TRY(split(r, &part));
    lt_status status = fn(r, part);
    lt_group_close(part);
    return status;
}

typedef struct layout {
    const char *nodes, *colors; /* of the job */
    const char *alone[3];       /* the nodes of each part */
} layout;

#endif
