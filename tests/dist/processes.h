/* processes.h - runs a function in one process per rank, on nodes that a fake network connects.
 * Include it in one file of a test. */
#ifndef LT_TESTS_PROCESSES_H
#define LT_TESTS_PROCESSES_H

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/tensor.h"
#include "dist/group.h"
#include "tests/dist/fake_net.h"
#include "tests/lt_test.h"

enum { MOST = 6 };

typedef struct result { /* of a rank; shared with the test process */
    lt_status status, later;
    char text[512];
    double seconds;
    double closed; /* time when its group was closed */
    uint64_t bits; /* digest or value of its results */
    bool spoke;
} result;

typedef struct rank {
    lt_group *group;
    int rank, size;
    result *result;
} rank;

typedef struct job {
    const char *nodes; /* "0011": the node of each rank */
    double timeout;    /* 0 for the default */
    lt_status (*body)(rank *r);
    void (*before)(int rank); /* called before the group is opened; or NULL */
    bool silent;              /* the net does not report lost ranks, like MPI over TCP */
} job;

static inline void pause_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static inline void run_rank(const job *j, fake_hub *hub, int which, result *to)
{
    int node[MOST], size = (int)strlen(j->nodes);
    rank r = {.rank = which, .size = size, .result = to};
    for (int i = 0; i < size; i++)
        node[i] = j->nodes[i] - '0';
    if (j->before)
        j->before(which);
    lt_net net = fake_net_new(hub, which, size, node);
    to->status = lt__mpi_open_over(&net, &(lt_group_config){.timeout = j->timeout}, &r.group);
    if (to->status == LT_OK)
        to->status = j->body(&r);
    snprintf(to->text, sizeof to->text, "%s", to->status == LT_OK ? "" : lt_errmsg());
    if (r.group)
        lt_group_close(r.group);
    to->closed = lt__seconds();
    _exit(0);
}

/* Runs a process for each rank. When only stopped processes are left, kills them. */
static inline void on_ranks(const job *j, result results[MOST])
{
    int size = (int)strlen(j->nodes), open = size, n_stopped = 0, how;
    size_t bytes = MOST * sizeof *results;
    pid_t pid[MOST], stopped[MOST], changed;
    fake_hub *hub = fake_hub_new();
    result *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    fflush(stdout);
    for (int r = 0; r < size; r++)
        if ((pid[r] = fork()) == 0)
            run_rank(j, hub, r, &shared[r]);
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
    memcpy(results, shared, bytes);
    munmap(shared, bytes);
    fake_hub_free(hub);
}

#endif
