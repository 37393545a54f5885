/* launch.c - luatrain launch; see launch.h. mpirun starts the ranks, and this process waits for it.
 *
 * This process works around several properties of mpirun:
 * - On SIGTERM it kills the ranks after one second, even while they save. It forwards SIGUSR1 to
 *   them, so requests to stop are sent as SIGUSR1. mpirun runs in its own process group, where the
 *   terminal's Ctrl-C does not reach it.
 * - If the reader of its output goes away, it kills the ranks and crashes. So it writes to this
 *   process, which relays the output; see relay.h.
 * - It cuts host names at the first dot, and exits with 255 if it cannot start processes there.
 * - It exits with 137 if a rank was killed. This process exits with the code of LT_EPEER instead.
 * - It may hang after all ranks have ended, when it cannot reach another machine or after a
 *   failure. This process then kills it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <glob.h>
#include <inttypes.h>
#include <netdb.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/child.h"
#include "tools/clock.h"
#include "tools/hosts.h"
#include "tools/launch.h"
#include "tools/relay.h"
#include "tools/restart.h"
#include "tools/serve.h"

enum { EARLY_SECONDS = 3 };   /* time for ranks to start; those on other machines are not visible */
enum { LONELY_SECONDS = 10 }; /* how long mpirun may run after the last rank here has ended */
enum { POLL_NS = 100 * 1000 * 1000 }; /* polling interval */
enum { MOST_PIDS = 1024 };            /* ranks here that are killed if mpirun is killed */
enum { MOST_LOOKS = 100 };            /* polls for their ends */
enum { MOST_SECONDS = 1 }; /* the most that a poll counts; this process may have been stopped */

/* ==== The command ============================================================================= */

/* Whether to pass an environment variable to the ranks with -x. Without -x, mpirun passes it only
 * to processes on this machine. */
static bool is_for_ranks(const char *entry)
{
    return strncmp(entry, "LUATRAIN_", 9) == 0 || strncmp(entry, "OMP_", 4) == 0;
}

static int count(char *const *words)
{
    int n = 0;
    while (words[n])
        n++;
    return n;
}

/* Returns the mpirun command. New; NULL with LT_ENOMEM. mpirun allows one rank per core and binds
 * ranks to cores, regardless of their threads. The command disables both, because luatrain divides
 * the CPUs among the ranks itself. */
static const char **make_command(const settings *s, const char *program, char *const *words,
                                 char number[16])
{
    enum { MAX_OF_OURS = 18 };
    size_t max = MAX_OF_OURS + 2 * (size_t)count(environ) + (size_t)count(words);
    const char **command = calloc(max, sizeof *command), **end = command;
    if (!command) {
        lt_fail(LT_ENOMEM, "out of memory for a command");
        return NULL;
    }
    *end++ = "mpirun";
    if (geteuid() == 0)
        *end++ = "--allow-run-as-root";
    *end++ = "--oversubscribe";
    *end++ = "--bind-to";
    *end++ = "none";
    *end++ = "--stdin"; /* reading the terminal would stop it, as it is in the background */
    *end++ = "none";
    *end++ = "-n";
    *end++ = number;
    snprintf(number, 16, "%d", s->processes);
    if (s->hosts) {
        *end++ = "-H";
        *end++ = s->hosts;
    }
    if (s->host_file) {
        *end++ = "--hostfile";
        *end++ = s->host_file;
    }
    for (char **entry = environ; *entry; entry++)
        if (is_for_ranks(*entry)) {
            *end++ = "-x";
            *end++ = *entry;
        }
    *end++ = program;
    while (*words)
        *end++ = *words++;
    return command;
}

/* Stores the flags of launch in the environment, so that a stopped run can print the command that
 * resumes it. */
static lt_status export_settings(const settings *s)
{
    char *text, more[32] = "";
    if (s->restarts > 0)
        snprintf(more, sizeof more, " --restarts %d", s->restarts);
    int n = asprintf(&text, "-n %d%s%s%s%s%s", s->processes, s->hosts ? " -H " : "",
                     s->hosts ? s->hosts : "", s->host_file ? " --hostfile " : "",
                     s->host_file ? s->host_file : "", more);
    bool is_set = n >= 0 && setenv("LUATRAIN_LAUNCH", text, 1) == 0;
    if (n >= 0)
        free(text);
    if (s->hosts || s->host_file) /* the variables of Open MPI 4 and 5 */
        is_set &= setenv("OMPI_MCA_orte_keep_fqdn_hostnames", "1", 0) == 0 &&
                  setenv("PRTE_MCA_prte_keep_fqdn_hostnames", "1", 0) == 0;
    return is_set ? LT_OK : lt_fail(LT_ENOMEM, "out of memory for the environment");
}

/* ==== The process of mpirun =================================================================== */

static lt_status start(const char **command, const sigset_t *mask, const int output[2], pid_t *pid)
{
    lt_status status = child_start((const char *const *)command, mask, output, pid);
    if (status == LT_EENV && errno == ENOENT)
        return lt_fail(
            LT_EENV,
            "launch requires mpirun, which was not found: install Open MPI (Debian: openmpi-bin), "
            "or use --ranks in one process");
    return status;
}

/* Whether a process runs this program, as opposed to ssh. Compares the executable's inode, because
 * the file may have been replaced in the meantime. */
static bool is_rank(int pid)
{
    char link[32];
    struct stat its, own;
    snprintf(link, sizeof link, "/proc/%d/exe", pid);
    return stat(link, &its) == 0 && stat("/proc/self/exe", &own) == 0 && its.st_dev == own.st_dev &&
           its.st_ino == own.st_ino;
}

/* Whether a process has a handler for SIGUSR1. Until it has one, the signal kills it. */
static bool handles_sigusr1(int pid)
{
    char path[32], line[256];
    uint64_t caught = 0;
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "SigCgt: %" SCNx64, &caught) == 1)
            break;
    if (file)
        fclose(file);
    return caught >> (SIGUSR1 - 1) & 1;
}

typedef struct found_ranks { /* mpirun's ranks on this machine */
    bool any, unprepared;    /* at least one exists; at least one has no handler for SIGUSR1 */
    int n, pids[MOST_PIDS];  /* the first of them */
} found_ranks;

/* Adds the ranks among the process ids in a file to *s. If kills is set, kills those that have no
 * handler for SIGUSR1. */
static void check_process(const char *path, bool kills, found_ranks *s)
{
    FILE *list = fopen(path, "r");
    int pid;
    while (list && fscanf(list, "%d", &pid) == 1)
        if (is_rank(pid)) {
            bool unprepared = !handles_sigusr1(pid);
            s->any = true;
            s->unprepared |= unprepared;
            if (s->n < MOST_PIDS)
                s->pids[s->n++] = pid;
            if (unprepared && kills)
                kill(pid, SIGKILL);
        }
    if (list)
        fclose(list);
}

/* Finds the ranks on this machine. Any thread of mpirun may be the parent of some. */
static found_ranks find_ranks(pid_t mpirun, bool kills)
{
    char pattern[64];
    glob_t lists;
    found_ranks s = {0};
    snprintf(pattern, sizeof pattern, "/proc/%d/task/*/children", (int)mpirun);
    if (glob(pattern, GLOB_NOSORT, NULL, &lists) != 0)
        return s;
    for (size_t i = 0; i < lists.gl_pathc; i++)
        check_process(lists.gl_pathv[i], kills, &s);
    globfree(&lists);
    return s;
}

/* Kills the ranks that still run after mpirun has ended, because it was killed. They would keep the
 * run's folder locked. Waits until they end. */
static void kill_left(const found_ranks *s)
{
    for (int i = 0; i < s->n; i++)
        if (is_rank(s->pids[i]))
            kill(s->pids[i], SIGKILL);
    for (int i = 0, looks = 0; i < s->n && looks < MOST_LOOKS;)
        if (is_rank(s->pids[i]))
            looks += nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL) == 0;
        else
            i++;
}

typedef struct stop_request { /* a request to stop */
    int signal;               /* the latest signal; 0 if none came */
    double since;             /* time of the first signal */
    bool kills, sent;         /* end the job at once; already forwarded to mpirun */
} stop_request;

typedef struct ranks_seen { /* ranks on this machine */
    double began, last;     /* when mpirun started, and when a rank was last seen; 0 for never */
    double timeout;         /* seconds for mpirun to start a rank; 0 if none may be here */
} ranks_seen;

/* Kills mpirun if it has not started a rank in time, or still runs long after the last rank ended.
 * mpirun may hang after it lost a rank, and then a milder signal would make it crash. LT_EPEER if
 * it was killed. */
static lt_status kill_if_it_hangs(pid_t mpirun, const ranks_seen *seen, double now)
{
    if (seen->last == 0 && seen->timeout != 0 && now - seen->began > seen->timeout)
        lt_fail(LT_EPEER, "mpirun did not start a rank within %g s and was killed", seen->timeout);
    else if (seen->last != 0 && now - seen->last > LONELY_SECONDS)
        lt_fail(LT_EPEER, "mpirun did not end within %d s after its ranks and was killed",
                LONELY_SECONDS);
    else
        return LT_OK;
    kill(mpirun, SIGKILL);
    return LT_EPEER;
}

/* Records a signal. The first signal requests a stop. A second one kills the job, except SIGHUP and
 * SIGPIPE, which one closed terminal or pipe may cause twice. */
static void take_signal(stop_request *w, int got, double now)
{
    bool again = w->signal != 0;
    if (again && (got == SIGHUP || got == SIGPIPE))
        return;
    *w = (stop_request){.signal = got, .since = again ? w->since : now, .kills = again};
}

/* Forwards a request to mpirun. ready: all ranks have installed a handler. An earlier request is
 * delayed until then, but at most by EARLY_SECONDS. After that, this kills the job, beginning with
 * the ranks without a handler: mpirun does not end at once if it is killed while it starts ranks,
 * so they would train for a second or two and save without a message from launch. */
static void forward(pid_t mpirun, stop_request *w, bool ready, double now)
{
    if (w->signal == 0 || w->sent)
        return;
    if (!ready && !w->kills && now - w->since <= EARLY_SECONDS)
        return;
    if (!ready)
        find_ranks(mpirun, true);
    w->kills |= !ready;
    kill(mpirun, w->kills ? SIGTERM : SIGUSR1);
    w->sent = true;
}

/* Waits until mpirun ends, and forwards signals. Sets *code to mpirun's exit code. LT_EPEER if
 * mpirun was killed, by this process because it hung or by another one. */
static lt_status wait_for(pid_t mpirun, double timeout, const sigset_t *set, stop_request *w,
                          int *code)
{
    double clock = clock_seconds(), now = clock;
    ranks_seen seen = {.timeout = timeout, .began = now};
    lt_status status = LT_OK;
    found_ranks last = {0};
    char name[32];
    int ended;
    while (waitpid(mpirun, &ended, WNOHANG) != mpirun) {
        int got = sigtimedwait(set, NULL, &(struct timespec){.tv_nsec = POLL_NS});
        found_ranks ranks = find_ranks(mpirun, false);
        double passed = clock_seconds() - clock;
        clock += passed;
        now += passed < MOST_SECONDS ? passed : MOST_SECONDS;
        if (ranks.any) {
            seen.last = now;
            last = ranks;
        }
        if (status == LT_OK)
            status = kill_if_it_hangs(mpirun, &seen, now);
        if (got > 0 && got != SIGCHLD)
            take_signal(w, got, now);
        forward(mpirun, w, ranks.any ? !ranks.unprepared : now - seen.began >= EARLY_SECONDS, now);
    }
    kill_left(&last);
    *code = WIFEXITED(ended) ? WEXITSTATUS(ended) : 128 + WTERMSIG(ended);
    if (status == LT_OK && WIFSIGNALED(ended))
        status = lt_fail(LT_EPEER, "mpirun was killed by %s, and its ranks with it",
                         child_signal_name(WTERMSIG(ended), name));
    return status;
}

/* ==== Hosts =================================================================================== */

/* The first host of -H whose name cannot be resolved; the whole list if all can. New. NULL with
 * LT_ENOMEM. */
static char *find_unknown(const settings *s)
{
    host_list h = {0};
    struct addrinfo *found;
    char *name = NULL;
    bool is_read = hosts_read(&h, s) == LT_OK, is_known = true;
    for (int i = 0; i < h.n && is_known; i++) {
        is_known = getaddrinfo(h.list[i].name, NULL, NULL, &found) == 0;
        if (is_known)
            freeaddrinfo(found);
        else
            name = strdup(h.list[i].name);
    }
    hosts_free(&h);
    return is_read && is_known ? strdup(s->hosts) : name;
}

static lt_status fail_hosts(const settings *s)
{
    char *hosts = s->hosts ? find_unknown(s) : strdup("the hosts");
    if (!hosts)
        return lt_fail(LT_ENOMEM, "out of memory for a message");
    lt_fail(LT_EENV,
            "mpirun cannot start processes on %s%s%s; ssh must reach each host without a password, "
            "and luatrain and Open MPI must be installed there in the same folders",
            hosts, s->host_file ? " of " : "", s->host_file ? s->host_file : "");
    free(hosts);
    return LT_EENV;
}

/* Copies the remaining output of mpirun, which has ended or was never started. Unblocks signals
 * first, so that they can end this process while the output blocks. */
static void finish(relay output[2], const sigset_t *before)
{
    sigprocmask(SIG_SETMASK, before, NULL);
    for (int i = 0; i < 2; i++)
        relay_finish(&output[i]);
}

/* Sets *is_stopped to whether a signal requested a stop. */
static lt_status run_mpirun(const settings *s, const char **command, outcome *o, int *code,
                            bool *is_stopped)
{
    bool is_elsewhere = s->hosts || s->host_file;
    sigset_t set, before;
    pid_t pid = 0;
    stop_request w = {0};
    relay output[2];
    int ends[2];
    child_signals(&set);
    sigprocmask(SIG_BLOCK, &set, &before);
    LT_TRY(relay_start_both(output, outcome_take, o, ends));
    lt_status status = start(command, &before, ends, &pid);
    close(ends[0]);
    close(ends[1]);
    if (status == LT_OK)
        status = wait_for(pid, is_elsewhere ? 0 : lt_group_timeout(&s->group), &set, &w, code);
    finish(output, &before);
    *is_stopped = w.signal != 0;
    if (w.kills || (w.signal != 0 && *code > 128))
        child_end_by(w.signal);
    LT_TRY(status);
    if (*code != 0 && is_elsewhere && o->no_daemon)
        return fail_hosts(s);
    if (*code > 128 && *code <= 128 + SIGRTMAX) /* larger codes come from the script: os.exit(-1) */
        *code = lt_exit_code(LT_EPEER);
    return LT_OK;
}

/* Starts the job, and starts it again as long as --restarts allows. */
static lt_status run_job(restarts *r, const char *program, char *const *words, int *code)
{
    lt_status status;
    bool is_stopped = false;
    do {
        char number[16];
        LT_TRY(restart_begin(r));
        const char **command = make_command(&r->job, program, words, number);
        if (!command)
            return LT_ENOMEM;
        status = run_mpirun(&r->job, command, &r->outcome, code, &is_stopped);
        free(command);
    } while (!is_stopped && restart_next(r, &status, *code));
    return status;
}

/* LT_EUSAGE if the command cannot be launched. */
static lt_status check(const settings *s)
{
    static const char *const others[] = {"bench", "plan", "report", "summary"};
    if (s->processes == 0)
        return lt_fail(
            LT_EUSAGE,
            "launch requires -n N, the number of ranks: luatrain launch -n 4 script.lua");
    if (s->ranks > 0)
        return lt_fail(
            LT_EUSAGE,
            "--ranks starts ranks in one process; to start processes, use launch -n without it");
    if (s->join)
        return lt_fail(LT_EUSAGE, "--join starts one worker of a job that is running; leave out "
                                  "launch -n, or start the whole job with launch -n N --serve");
    if (lt_mpi_is_launched())
        return lt_fail(
            LT_EUSAGE,
            "launch cannot run under mpirun or srun, which have already started processes");
    for (size_t i = 0; s->restarts > 0 && i < sizeof others / sizeof *others; i++)
        if (strcmp(s->argv[0], others[i]) == 0)
            return lt_fail(LT_EUSAGE, "--restarts is for training, not for luatrain %s", others[i]);
    return LT_OK;
}

lt_status launch(const settings *s, const char *program, char *const *words, int *code)
{
    LT_TRY(check(s));
    if (s->serve) {
        LT_TRY(export_settings(s));
        return serve_job(s, program, words, code);
    }
    if (s->host_file && access(s->host_file, R_OK) != 0)
        return lt_fail(LT_EENV, "launch: --hostfile %s: %s", s->host_file, strerror(errno));
    LT_TRY(lt_mpi_check());
    LT_TRY(export_settings(s));
    restarts r = {.job = *s};
    lt_status status = run_job(&r, program, words, code);
    restart_free(&r);
    return status;
}
