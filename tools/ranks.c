/* ranks.c - runs one thread per rank; see ranks.h. The main thread waits for them, checks whether
 * other processes failed, and handles signals.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/clock.h"
#include "tools/ranks.h"

/* Seconds that the other ranks have to end after a failure. The short one applies if a process of
 * an MPI job was lost, because mpirun is about to kill them all. */
static const double GRACE = 4, SHORT_GRACE = 0.4;
enum { LOOK_NS = 100 * 1000 * 1000 }; /* polling interval */

typedef struct job {
    const ranks *ranks;
    pthread_mutex_t lock; /* guards the fields below */
    pthread_cond_t ended;
    int running;      /* ranks that have not ended */
    bool first_ended; /* rank 0 has ended */
    /* the status of rank 0, or of this rank with MPI; the status of the first rank that failed */
    lt_status first, failed;
    char first_text[1024], failed_text[1024]; /* their messages */
} job;

typedef struct member {
    job *job;
    lt_group *group;
    pthread_t thread;
} member;

bool is_failure(lt_status status)
{
    return status != LT_OK && status != LT_EDONE && status != LT_ESTOPPED;
}

bool is_of_all(lt_status status) { return status == LT_EUSAGE || (int)status >= LT_EXIT; }

/* Stores the status and the message of the group's first failure in j, if there is one. */
static void describe_failure(job *j, lt_group *group)
{
    char text[sizeof j->failed_text - 16];
    int rank;
    if (!lt_group_failure(group, &rank, &j->failed, text, sizeof text))
        return;
    bool names_rank = j->failed == LT_EPEER || j->failed == LT_EDESYNC;
    if (rank == 0 || names_rank || is_of_all(j->failed))
        snprintf(j->failed_text, sizeof j->failed_text, "%s", text);
    else
        snprintf(j->failed_text, sizeof j->failed_text, "rank %d: %s", rank, text);
}

/* Whether a rank ended with this status because rank 0 failed, which is reported anyway. */
static bool has_first_failed(lt_group *group, lt_status status)
{
    char text[1];
    int rank;
    lt_status failed;
    return status == LT_EPEER && lt_group_failure(group, &rank, &failed, text, sizeof text) &&
           rank == 0;
}

static void *run_member(void *ud)
{
    member *m = ud;
    job *j = m->job;
    lt_status status = j->ranks->run(j->ranks->ud, m->group);
    bool is_first = lt_group_rank(m->group) == 0;
    if (is_failure(status) && (is_first || !j->ranks->first_decides || is_of_all(status)))
        lt_group_fail(m->group);
    else if (is_failure(status) && !has_first_failed(m->group, status))
        fprintf(stderr, "luatrain: warning: rank %d: %s\n", lt_group_rank(m->group), lt_errmsg());
    pthread_mutex_lock(&j->lock);
    j->first_ended |= is_first;
    if (j->failed == LT_OK)
        describe_failure(j, m->group);
    if (j->ranks->own_group || lt_group_rank(m->group) == 0) {
        j->first = status;
        bool speaks = status != LT_OK && (is_first || lt_group_is_elastic(m->group));
        snprintf(j->first_text, sizeof j->first_text, "%s", speaks ? lt_errmsg() : "");
    }
    j->running--;
    pthread_cond_signal(&j->ended);
    pthread_mutex_unlock(&j->lock);
    if (!j->ranks->own_group)
        lt_group_close(m->group);
    return NULL;
}

/* Blocks the signals that request a stop. Threads created now inherit this mask, so only the main
 * thread, which unblocks the signals again, gets them. SIGPIPE stays unblocked: it goes to the
 * thread that writes. */
static void block_signals(sigset_t *before)
{
    sigset_t asking;
    sigemptyset(&asking);
    sigaddset(&asking, SIGINT);
    sigaddset(&asking, SIGTERM);
    sigaddset(&asking, SIGHUP);
    sigaddset(&asking, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &asking, before);
}

/* Ends the process after a failure. A rank in this process or other processes of the MPI job may
 * still be running. */
static void leave(const job *j)
{
    lt_group *own_group = j->ranks->own_group;
    const char *text = j->failed == LT_OK ? j->first_text : j->failed_text;
    if (*text && (!own_group || lt_group_is_reporter(own_group, GRACE)))
        fprintf(stderr, "luatrain: %s\n", text);
    if (j->running == 0)
        lt_group_close(own_group);
    fflush(NULL);
    _exit(lt_exit_code(j->failed == LT_OK ? j->first : j->failed));
}

/* Prints the message of rank 0 if the job ended without a failure. This must be done before any
 * process ends, because mpirun kills all others when one ends with a code other than 0. */
static void say(job *j)
{
    if (j->first_text[0] != '\0')
        fprintf(stderr, "luatrain: %s\n", j->first_text);
    fflush(NULL);
    j->first_text[0] = '\0';
}

/* Waits until all ranks have ended. Ends the process if they do not end in time after a failure. */
static void wait_for_all(job *j)
{
    double deadline = 0;
    pthread_mutex_lock(&j->lock);
    while (j->running > 0) {
        if (j->ranks->own_group && j->failed == LT_OK)
            describe_failure(j, j->ranks->own_group);
        if (j->failed != LT_OK && deadline == 0)
            deadline = clock_seconds() +
                       (j->ranks->own_group && j->failed == LT_EPEER ? SHORT_GRACE : GRACE);
        if (j->ranks->first_decides && j->first_ended && deadline == 0)
            deadline = clock_seconds() + GRACE;
        if (deadline != 0 && clock_seconds() > deadline)
            leave(j);
        clock_wait(&j->ended, &j->lock, LOOK_NS);
    }
    pthread_mutex_unlock(&j->lock);
}

/* Starts a thread for each member. Returns the number of threads that were started. */
static int start(member *members, int n)
{
    sigset_t before;
    int made = 0;
    block_signals(&before);
    while (made < n && pthread_create(&members[made].thread, NULL, run_member, &members[made]) == 0)
        made++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return made;
}

static lt_status run_members(job *j, member *members, lt_group **groups)
{
    int n = j->ranks->n;
    for (int i = 0; i < n; i++)
        members[i] = (member){.job = j, .group = groups[i]};
    j->running = n;
    int made = start(members, n);
    if (made < n)
        lt_fail(LT_ENOMEM, "the system cannot start a thread for rank %d", made);
    for (int i = made; i < n; i++) {
        lt_group_fail(groups[i]);
        if (!j->ranks->own_group)
            lt_group_close(groups[i]);
        pthread_mutex_lock(&j->lock);
        j->running--;
        pthread_mutex_unlock(&j->lock);
    }
    wait_for_all(j);
    for (int i = 0; i < made; i++)
        pthread_join(members[i].thread, NULL);
    if (j->ranks->own_group && j->failed == LT_OK)
        say(j);
    if (j->ranks->own_group && j->failed == LT_OK && lt_group_leave(j->ranks->own_group) != LT_OK)
        describe_failure(j, j->ranks->own_group);
    if (j->ranks->own_group && j->failed != LT_OK)
        leave(j);
    lt_group_close(j->ranks->own_group);
    if (made == 0)
        return LT_ENOMEM;
    if (j->failed != LT_OK)
        return lt_fail(j->failed, "%s", j->failed_text);
    return j->first == LT_OK ? LT_OK : lt_fail(j->first, "%s", j->first_text);
}

lt_status run_ranks(const ranks *r)
{
    job j = {.ranks = r, .lock = PTHREAD_MUTEX_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};
    lt_group **groups = calloc((size_t)r->n, sizeof *groups);
    member *members = calloc((size_t)r->n, sizeof *members);
    lt_status status = LT_OK;
    if (!groups || !members)
        status = lt_fail(LT_ENOMEM, "out of memory for %d ranks", r->n);
    else if (r->own_group)
        groups[0] = r->own_group;
    else
        status = lt_local_open(r->n, &r->group, groups);
    if (status == LT_OK)
        status = run_members(&j, members, groups);
    free(members);
    free(groups);
    return status;
}
