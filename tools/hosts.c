/* hosts.c - see hosts.h. A host can be reached if mpirun can start `uname -n` there, because mpirun
 * starts that like a rank, by ssh or through a batch system. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/clock.h"
#include "tools/hosts.h"

/* The name in "name", "name:slots", "[IPv6 address]:slots" or "IPv6 address", of n bytes. New; NULL
 * with LT_ENOMEM. */
static char *host_in(const char *at, size_t n)
{
    const char *colon = memchr(at, ':', n), *end = memchr(at, ']', n);
    if (*at == '[' && end)
        return strndup(at + 1, (size_t)(end - at) - 1);
    return strndup(at, colon && colon == memrchr(at, ':', n) ? (size_t)(colon - at) : n);
}

/* Adds the host that the next n bytes name, unless the list has it. */
static lt_status add(host_list *h, const char *at, size_t n)
{
    char *name = host_in(at, n);
    job_host *list = realloc(h->list, ((size_t)h->n + 1) * sizeof *list);
    h->list = list ? list : h->list;
    if (!name || !list) {
        free(name);
        return lt_fail(LT_ENOMEM, "out of memory for the hosts");
    }
    for (int i = 0; i < h->n; i++)
        if (strcmp(list[i].name, name) == 0) {
            free(name);
            return LT_OK;
        }
    list[h->n++] = (job_host){.name = name};
    return LT_OK;
}

/* Each line of a host file begins with a host; a comment begins with #. */
static lt_status read_file(host_list *h, const char *path)
{
    char line[4096];
    lt_status status = LT_OK;
    FILE *file = fopen(path, "r");
    if (!file)
        return lt_fail(LT_EENV, "launch: --hostfile %s: %s", path, strerror(errno));
    while (status == LT_OK && fgets(line, sizeof line, file)) {
        const char *name = line + strspn(line, " \t");
        size_t n = strcspn(name, " \t\r\n#");
        if (n > 0)
            status = add(h, name, n);
    }
    fclose(file);
    return status;
}

lt_status hosts_read(host_list *h, const settings *s)
{
    for (const char *at = s->hosts; at && *at; at += *at == ',') {
        size_t n = strcspn(at, ",");
        LT_TRY(add(h, at, n));
        at += n;
    }
    return s->hosts || !s->host_file ? LT_OK : read_file(h, s->host_file);
}

void hosts_free(host_list *h)
{
    for (int i = 0; i < h->n; i++)
        free(h->list[i].name);
    free(h->list);
    *h = (host_list){0};
}

typedef struct probe {
    pid_t pid; /* of mpirun; 0 if it has ended */
    int from;  /* its stdout */
} probe;

/* In the child. */
static void ask(const char *name, int output)
{
    static char root[] = "--allow-run-as-root";
    char *command[] = {"mpirun", "-n", "1", "-H", (char *)name, "uname", "-n", NULL, NULL};
    if (geteuid() == 0) {
        memmove(command + 2, command + 1, 7 * sizeof *command);
        command[1] = root;
    }
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    setpgid(0, 0);
    int nowhere = open("/dev/null", O_RDWR);
    dup2(nowhere, STDIN_FILENO);
    dup2(output, STDOUT_FILENO);
    dup2(nowhere, STDERR_FILENO);
    execvp(command[0], command);
    _exit(1);
}

static lt_status start(probe *p, const char *name)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return lt_fail(LT_ENOMEM, "mpirun cannot be started: %s", strerror(errno));
    p->from = ends[0];
    p->pid = fork();
    if (p->pid == 0)
        ask(name, ends[1]);
    close(ends[1]);
    if (p->pid > 0)
        return LT_OK;
    p->pid = 0;
    return lt_fail(LT_ENOMEM, "mpirun cannot be started: %s", strerror(errno));
}

/* Takes the answer of an mpirun that has ended. */
static void take_answer(probe *p, job_host *of, int ended)
{
    ssize_t n = WIFEXITED(ended) && WEXITSTATUS(ended) == 0
                    ? read(p->from, of->node, sizeof of->node - 1)
                    : 0;
    of->node[n > 0 ? n : 0] = '\0';
    of->node[strcspn(of->node, "\n")] = '\0';
    p->pid = 0;
}

/* Waits until all have ended. Kills those that take too long. */
static void await(host_list *h, probe *list)
{
    enum { PAUSE_MS = 20 };
    double until = clock_seconds() + HOST_SECONDS;
    for (int i = 0, ended; i < h->n;) {
        probe *p = &list[i];
        bool is_late = clock_seconds() > until;
        if (p->pid > 0 && is_late)
            kill(-p->pid, SIGKILL);
        if (p->pid > 0 && waitpid(p->pid, &ended, is_late ? 0 : WNOHANG) == p->pid)
            take_answer(p, &h->list[i], ended);
        if (p->pid == 0)
            i++;
        else
            poll(NULL, 0, PAUSE_MS);
    }
}

lt_status hosts_probe(host_list *h)
{
    lt_status status = LT_OK;
    probe *list = calloc((size_t)h->n + 1, sizeof *list);
    if (!list)
        return lt_fail(LT_ENOMEM, "out of memory for the hosts");
    int made = 0;
    for (; made < h->n && status == LT_OK; made++)
        status = start(&list[made], h->list[made].name);
    await(h, list);
    for (int i = 0; i < made; i++)
        if (list[i].from > 0)
            close(list[i].from);
    free(list);
    return status;
}
