/* jobs.h - runs a function on each rank of a job: on threads, or on processes of nodes that a fake
 * network connects. Include it in one file of a test. */
#ifndef LT_TESTS_DIST_JOBS_H
#define LT_TESTS_DIST_JOBS_H

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/tensor.h"
#include "dist/group.h"
#include "tests/dist/fake_net.h"
#include "tests/dist/threads.h"

enum { MOST = 8 };

typedef struct result { /* of a rank; processes share it with the test process */
    lt_status status, later;
    char text[512];
    double seconds;
    double closed; /* time when its group was closed */
    uint64_t bits; /* digest or value of its results */
    bool spoke;
} result;

typedef struct rank {
    const struct job *job;
    lt_group *group;
    int rank, size;
    result *result;
} rank;

typedef struct job {
    const char *nodes; /* "0011": the node of each rank; "tttt": the ranks are threads */
    lt_status (*body)(rank *r);
    double timeout;           /* 0 for the default */
    void (*before)(int rank); /* called before the group of a process is opened; or NULL */
    bool silent;              /* the net does not report lost ranks, like MPI over TCP */
    const char *colors;       /* for split.h: "0101": the part of each rank */
    lt_status (*part)(rank *r, lt_group *part); /* for split.h */
} job;

/* Calls the body of the job, unless the group could not be opened, and closes the group. */
static inline void *run_rank(void *ud)
{
    rank *r = ud;
    result *to = r->result;
    if (to->status == LT_OK)
        to->status = r->job->body(r);
    snprintf(to->text, sizeof to->text, "%s", to->status == LT_OK ? "" : lt_errmsg());
    lt_group_close(r->group);
    to->closed = lt__seconds();
    return NULL;
}

/* In a new process: runs the rank and exits. */
static inline void run_process(rank *r, fake_hub *hub)
{
    int node[MOST];
    test_exit = NULL; /* after a failed check, the rank continues */
    for (int i = 0; i < r->size; i++)
        node[i] = r->job->nodes[i] - '0';
    if (r->job->before)
        r->job->before(r->rank);
    lt_net net = fake_net_new(hub, r->rank, r->size, node);
    const lt_group_config config = {.timeout = r->job->timeout};
    r->result->status = lt__mpi_open_over(&net, &config, &r->group);
    run_rank(r);
    if (test_failed)
        r->result->status = LT_EINVAL;
    _exit(0);
}

/* Waits for the processes. When only stopped ones are left, kills them. */
static inline void wait_for_processes(const job *j, fake_hub *hub, int size, const pid_t pid[MOST])
{
    pid_t stopped[MOST], changed;
    int open = size, n_stopped = 0, how;
    while (open > 0 && (changed = waitpid(-1, &how, WUNTRACED)) > 0) {
        if (WIFSTOPPED(how))
            stopped[n_stopped++] = changed;
        else
            open--;
        for (int r = 0; r < size; r++)
            if (pid[r] == changed && !WIFSTOPPED(how) && !j->silent)
                atomic_store(&hub->ended[r], true);
        if (open == n_stopped && n_stopped > 0)
            kill(stopped[--n_stopped], SIGKILL);
    }
}

static inline void run_processes(const job *j, rank ranks[MOST], result results[MOST])
{
    int size = (int)strlen(j->nodes);
    size_t bytes = MOST * sizeof *results;
    pid_t pid[MOST];
    fake_hub *hub = fake_hub_new();
    result *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    fflush(stdout);
    for (int i = 0; i < size; i++) {
        ranks[i].result = &shared[i];
        shared[i].status = LT_EINVAL; /* until it has run */
        if ((pid[i] = fork()) == 0)
            run_process(&ranks[i], hub);
    }
    wait_for_processes(j, hub, size, pid);
    memcpy(results, shared, bytes);
    munmap(shared, bytes);
    fake_hub_free(hub);
}

/* Runs all ranks of a job. */
static inline void on_ranks(const job *j, result results[MOST])
{
    lt_group *groups[MOST] = {NULL};
    rank ranks[MOST];
    int size = (int)strlen(j->nodes);
    bool are_threads = j->nodes[0] == 't';
    if (are_threads)
        CHECK_OK(lt_local_open(size, &(lt_group_config){.timeout = j->timeout}, groups));
    for (int i = 0; i < size; i++) {
        results[i] = (result){.status = LT_OK};
        ranks[i] = (rank){j, groups[i], i, size, &results[i]};
    }
    if (are_threads)
        run_threads(size, run_rank, ranks, sizeof *ranks);
    else
        run_processes(j, ranks, results);
}

/* The same; checks that no rank fails. */
static inline void check_job(const job *j, result results[MOST])
{
    on_ranks(j, results);
    for (int i = 0; i < (int)strlen(j->nodes); i++)
        if (results[i].status != LT_OK || results[i].text[0])
            FAIL("nodes %s, rank %d: %s", j->nodes, i, results[i].text);
}

#endif
