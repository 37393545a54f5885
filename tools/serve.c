/* serve.c - luatrain launch --serve; see serve.h.
 *
 * Notes (relay.h) tell this process what it needs to know: the server sends the address and the key
 * of the job when training begins, and the number of a worker that is silent for too long, see
 * luatrain/train/async_report.lua; each worker sends its number when it has joined. A worker gets
 * the server's options from the environment, where options.c stores them, and otherwise runs like
 * one that was started by hand.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/child.h"
#include "tools/clock.h"
#include "tools/relay.h"
#include "tools/serve.h"

enum { POLL_NS = 100 * 1000 * 1000 }; /* polling interval */
/* Seconds between the end of a process and what follows from it: workers also end because the
 * server does, and a note may still be in the pipe. */
static const double PAUSE = 1;

typedef struct worker {
    pid_t pid;      /* 0 before its first start. Under the lock */
    int rank;       /* its number in the job; 0 until it has joined. Under the lock */
    bool is_silent; /* the server has heard nothing from it for too long. Under the lock */
    bool runs;      /* the process has not ended */
    bool is_ended;  /* it has ended, but nothing has followed from that yet */
    int how;        /* how it ended, as waitpid() reports */
    double since;   /* and when */
} worker;

typedef struct job {
    const settings *s;
    const char *program;
    int n;           /* workers, without the server */
    worker *workers; /* (n) */
    pid_t server;
    bool is_over;         /* the server has ended */
    int how;              /* as waitpid() reports */
    double since;         /* and when */
    int restarts;         /* how many are left */
    int signal;           /* the latest signal that asked for a stop; 0 if none came */
    bool kills;           /* it was the second one: all processes end at once */
    bool has_begun;       /* the workers were started */
    sigset_t before;      /* the signal mask of the processes */
    int output[2];        /* their stdout and stderr */
    pthread_mutex_t lock; /* guards the fields below, and those of workers */
    char address[320];    /* at which workers join; "" before the server trains */
    char key[PATH_MAX];
} job;

/* ==== Notes =================================================================================== */

void serve_note_worker(int rank)
{
    if (getenv("LUATRAIN_LAUNCH"))
        dprintf(STDERR_FILENO, "%cworker %d %d\n", RELAY_NOTE, rank, (int)getpid());
}

/* A server that listens on all interfaces shows the name of this host, which may not resolve. */
static void set_address(job *j, const char *shown, const char *key)
{
    bool has_host = strrchr(j->s->serve, ':') != NULL;
    const char *port = strrchr(shown, ':');
    snprintf(j->address, sizeof j->address, "%s%s", has_host ? "" : "127.0.0.1",
             has_host || !port ? shown : port);
    snprintf(j->key, sizeof j->key, "%s", key);
}

/* Reads a line of stderr, in the thread of its relay. */
static void take_line(void *ud, const char *line)
{
    job *j = ud;
    char address[300];
    int rank, pid, end = 0;
    if (*line != RELAY_NOTE)
        return;
    pthread_mutex_lock(&j->lock);
    if (sscanf(line + 1, "worker %d %d", &rank, &pid) == 2) {
        for (int i = 0; i < j->n; i++)
            if (j->workers[i].pid == pid)
                j->workers[i].rank = rank;
    } else if (sscanf(line + 1, "silent %d", &rank) == 1) {
        for (int i = 0; i < j->n; i++)
            j->workers[i].is_silent |= j->workers[i].rank == rank;
    } else if (sscanf(line + 1, "join %299s%n", address, &end) == 1 && line[1 + end] == ' ') {
        set_address(j, address, line + 1 + end + 1);
    }
    pthread_mutex_unlock(&j->lock);
}

/* ==== Workers ================================================================================= */

/* Starts a worker: luatrain --join ADDRESS --key FILE script.lua ... */
static lt_status start_worker(job *j, worker *w)
{
    size_t n = (size_t)j->s->argc;
    const char **command = calloc(n + 6, sizeof *command);
    if (!command)
        return lt_fail(LT_ENOMEM, "out of memory for a command");
    const char *own[] = {j->program, "--join", j->address, "--key", j->key};
    memcpy(command, own, sizeof own);
    memcpy(command + 5, j->s->argv, n * sizeof *command);
    pthread_mutex_lock(&j->lock); /* so that its note finds it */
    *w = (worker){0};
    lt_status status = child_start(command, &j->before, j->output, &w->pid);
    w->runs = status == LT_OK;
    pthread_mutex_unlock(&j->lock);
    free(command);
    return status;
}

static void start_workers(job *j)
{
    pthread_mutex_lock(&j->lock);
    bool trains = j->address[0] != '\0';
    pthread_mutex_unlock(&j->lock);
    if (j->has_begun || !trains || j->is_over || j->signal != 0)
        return;
    j->has_begun = true;
    for (int i = 0; i < j->n; i++)
        if (start_worker(j, &j->workers[i]) != LT_OK)
            fprintf(stderr, "luatrain: warning: %s; the job continues without this worker\n",
                    lt_errmsg());
}

/* "worker 2". */
static const char *name_of(job *j, const worker *w, char text[64])
{
    pthread_mutex_lock(&j->lock);
    int rank = w->rank;
    pthread_mutex_unlock(&j->lock);
    snprintf(text, 64, rank > 0 ? "worker %d" : "a worker that had not joined yet", rank);
    return text;
}

static bool is_silent(job *j, const worker *w)
{
    pthread_mutex_lock(&j->lock);
    bool is = w->is_silent;
    pthread_mutex_unlock(&j->lock);
    return is;
}

/* "worker 2 was killed by SIGKILL". */
static void describe(job *j, const worker *w, char *text, size_t bytes)
{
    char who[64], name[32];
    name_of(j, w, who);
    if (is_silent(j, w))
        snprintf(text, bytes, "%s was silent for too long and was killed", who);
    else if (WIFSIGNALED(w->how))
        snprintf(text, bytes, "%s was killed by %s", who,
                 child_signal_name(WTERMSIG(w->how), name));
    else
        snprintf(text, bytes, "%s ended with exit code %d", who, WEXITSTATUS(w->how));
}

static bool ended_with(int how, lt_status status)
{
    return WIFEXITED(how) && WEXITSTATUS(how) == lt_exit_code(status);
}

/* Whether a worker that ended like this may succeed if it starts again: it was killed, cut off or
 * ran out of memory. Other errors would occur again. */
static bool may_succeed(int how)
{
    return WIFSIGNALED(how) || ended_with(how, LT_EPEER) || ended_with(how, LT_ENOMEM);
}

/* A worker has ended, but the server trains. A worker that has done its part, or was asked to
 * leave, is not lost. */
static void take_loss(job *j, worker *w)
{
    char text[160], more[256] = "";
    bool may = may_succeed(w->how);
    w->is_ended = false;
    if (ended_with(w->how, LT_OK) || ended_with(w->how, LT_ESTOPPED))
        return;
    describe(j, w, text, sizeof text);
    if (may && j->restarts > 0 && start_worker(j, w) == LT_OK) {
        j->restarts--;
        fprintf(stderr, "luatrain: %s; started again; %d restart%s left\n", text, j->restarts,
                j->restarts == 1 ? "" : "s");
        return;
    }
    if (may && j->restarts > 0)
        snprintf(more, sizeof more, "; %s", lt_errmsg());
    else if (may && j->s->restarts > 0)
        snprintf(more, sizeof more, "; --restarts %d allows no more restarts", j->s->restarts);
    fprintf(stderr, "luatrain: warning: %s%s; the job continues without it\n", text, more);
}

/* Kills a worker that does not end after the server. One that has joined may still run the rest of
 * its script; another one would wait for the server. */
static void end_worker(job *j, worker *w, double now)
{
    char who[64];
    pthread_mutex_lock(&j->lock);
    double limit = w->rank > 0 ? lt_group_timeout(&j->s->group) : PAUSE;
    pthread_mutex_unlock(&j->lock);
    if (now - j->since <= limit)
        return;
    fprintf(stderr, "luatrain: warning: %s did not end within %g s after the server; killed\n",
            name_of(j, w, who), limit);
    kill(w->pid, SIGKILL);
    waitpid(w->pid, &w->how, 0);
    w->runs = false;
}

/* ==== The job ================================================================================= */

/* The first signal asks the server to save and stop, and the workers end with it. A second one
 * kills all processes, except SIGHUP and SIGPIPE, which one closed terminal or pipe may cause
 * twice. */
static void take_signal(job *j, int got)
{
    bool again = j->signal != 0 || j->is_over;
    if (again && (got == SIGHUP || got == SIGPIPE))
        return;
    j->signal = got;
    j->kills |= again;
    if (!j->is_over)
        kill(j->server, again ? SIGKILL : got);
    for (int i = 0; again && i < j->n; i++)
        if (j->workers[i].runs)
            kill(j->workers[i].pid, SIGKILL);
}

/* Finds out which processes have ended. */
static void look(job *j, double now)
{
    if (!j->is_over && waitpid(j->server, &j->how, WNOHANG) == j->server) {
        j->is_over = true;
        j->since = now;
    }
    for (int i = 0; i < j->n; i++) {
        worker *w = &j->workers[i];
        if (w->runs && waitpid(w->pid, &w->how, WNOHANG) == w->pid) {
            w->runs = false;
            w->is_ended = true;
            w->since = now;
        }
    }
}

/* Waits until all processes have ended. */
static void wait_for_all(job *j, const sigset_t *set)
{
    for (int running = 1; running > 0;) {
        int got = sigtimedwait(set, NULL, &(struct timespec){.tv_nsec = POLL_NS});
        double now = clock_seconds();
        look(j, now);
        if (got > 0 && got != SIGCHLD)
            take_signal(j, got);
        start_workers(j);
        running = !j->is_over;
        for (int i = 0; i < j->n; i++) {
            worker *w = &j->workers[i];
            if (w->is_ended && !j->is_over && j->signal == 0 && now - w->since > PAUSE)
                take_loss(j, w);
            if (w->runs && j->is_over)
                end_worker(j, w, now);
            else if (w->runs && is_silent(j, w)) /* the server has given its batches to others */
                kill(w->pid, SIGKILL);
            running += w->runs;
        }
    }
}

/* Prepares the environment of the processes, which share the CPUs of this host. */
static lt_status share_cpus(const settings *s)
{
    char number[16];
    int cpus = lt_cpu_count();
    snprintf(number, sizeof number, "%d", cpus > s->processes ? cpus / s->processes : 1);
    if (s->config.threads == 0 && setenv("LUATRAIN_THREADS", number, 1) != 0)
        return lt_fail(LT_ENOMEM, "out of memory for the environment");
    return LT_OK;
}

/* Starts the server. Then removes from the environment what is not for workers. */
static lt_status start_server(job *j, char *const *words)
{
    static const char *const others[] = {"SERVE", "OUT", "RESUME", "TRACE"};
    size_t n = 0;
    while (words[n])
        n++;
    const char **command = calloc(n + 2, sizeof *command);
    if (!command)
        return lt_fail(LT_ENOMEM, "out of memory for a command");
    command[0] = j->program;
    memcpy(command + 1, words, n * sizeof *command);
    lt_status status = child_start(command, &j->before, j->output, &j->server);
    free(command);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        char name[32];
        snprintf(name, sizeof name, "LUATRAIN_%s", others[i]);
        unsetenv(name);
    }
    return status;
}

static lt_status run(job *j, char *const *words)
{
    sigset_t set;
    relay output[2];
    child_signals(&set);
    sigprocmask(SIG_BLOCK, &set, &j->before);
    lt_status status = relay_start_both(output, take_line, j, j->output);
    if (status != LT_OK)
        return status;
    status = start_server(j, words);
    if (status == LT_OK)
        wait_for_all(j, &set);
    close(j->output[0]);
    close(j->output[1]);
    /* From now on, signals end this process, so that they can while the output blocks. */
    sigprocmask(SIG_SETMASK, &j->before, NULL);
    for (int i = 0; i < 2; i++)
        relay_finish(&output[i]);
    return status;
}

/* ==== What does not work ====================================================================== */

/* Fails with the line that starts a worker on another host. */
static lt_status refuse_hosts(const settings *s)
{
    char host[256] = "HOST", line[1024] = "";
    const char *colon = strrchr(s->serve, ':'), *port = colon ? colon + 1 : s->serve;
    const char *out = getenv("LUATRAIN_OUT"), *folder = out ? out : "FOLDER";
    bool is_free = strcmp(port, "0") == 0; /* the server chooses it */
    size_t n = 0;
    if (colon)
        snprintf(host, sizeof host, "%.*s", (int)(colon - s->serve), s->serve);
    else if (gethostname(host, sizeof host - 1) != 0)
        snprintf(host, sizeof host, "HOST");
    for (int i = 0; i < s->argc && n < sizeof line - 1; i++)
        n += (size_t)snprintf(line + n, sizeof line - n, " %s", s->argv[i]);
    return lt_fail(LT_EUSAGE,
                   "launch --serve starts processes on this host only; leave out %s, and start "
                   "workers on other hosts by hand: luatrain --join %s:%s --key %s%s%s",
                   s->hosts ? "-H" : "--hostfile", host, is_free ? "PORT" : port,
                   s->key ? s->key : folder, s->key ? "" : "/join.key", line);
}

static lt_status check(const settings *s)
{
    if (s->hosts || s->host_file)
        return refuse_hosts(s);
    if (s->processes > LT_MAX_JOINED)
        return lt_fail(LT_EUSAGE, "-n must be at most %d with --serve, but is %d", LT_MAX_JOINED,
                       s->processes);
    if (strcmp(s->argv[0], "-") == 0)
        return lt_fail(LT_EUSAGE, "launch --serve cannot read the script from stdin, because "
                                  "several processes run it; name a file");
    return LT_OK;
}

/* Ends this process if a signal did not let the server save. */
static lt_status take_end(const job *j, int *code)
{
    char name[32];
    *code = WIFEXITED(j->how) ? WEXITSTATUS(j->how) : 128 + WTERMSIG(j->how);
    if (j->kills || (j->signal != 0 && *code > 128))
        child_end_by(j->signal);
    if (WIFSIGNALED(j->how))
        return lt_fail(LT_EPEER,
                       "the server was killed by %s, and the workers ended with it; --out with the "
                       "folder of the run resumes the job",
                       child_signal_name(WTERMSIG(j->how), name));
    return LT_OK;
}

lt_status serve_job(const settings *s, const char *program, char *const *words, int *code)
{
    job j = {.s = s, .program = program, .n = s->processes - 1, .restarts = s->restarts};
    LT_TRY(check(s));
    LT_TRY(share_cpus(s));
    int nowhere = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (nowhere >= 0) { /* reading the terminal would stop the processes, as they are background */
        dup2(nowhere, STDIN_FILENO);
        close(nowhere);
    }
    j.workers = calloc((size_t)s->processes, sizeof *j.workers);
    if (!j.workers)
        return lt_fail(LT_ENOMEM, "out of memory for %d workers", j.n);
    pthread_mutex_init(&j.lock, NULL);
    lt_status status = run(&j, words);
    pthread_mutex_destroy(&j.lock);
    free(j.workers);
    return status == LT_OK ? take_end(&j, code) : status;
}
