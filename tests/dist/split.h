/* split.h - runs a job of threads or processes that is split into parts. Include it in one file of
 * a test. */
#ifndef LT_TESTS_DIST_SPLIT_H
#define LT_TESTS_DIST_SPLIT_H

#include "tests/dist/jobs.h"

static inline lt_status split(const rank *r, lt_group **part)
{
    return lt__group_split(r->group, r->job->colors[r->rank] - '0', part);
}

/* The body of a job: splits it, calls job->part and closes the part. */
static inline lt_status in_part(rank *r)
{
    lt_group *part;
    LT_TRY(split(r, &part));
    lt_status status = r->job->part(r, part);
    lt_group_close(part);
    return status;
}

/* A job that calls fn in each part. */
static inline job job_of_parts(const char *nodes, const char *colors,
                               lt_status (*fn)(rank *r, lt_group *part), double timeout)
{
    return (job){.nodes = nodes, .colors = colors, .body = in_part, .part = fn, .timeout = timeout};
}

typedef struct layout {
    const char *nodes, *colors; /* of the job */
    const char *alone[3];       /* the nodes of each part */
} layout;

#endif
