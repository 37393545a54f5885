/* outcome.c - see outcome.h. The ranks send notes (relay.h): their hosts from here, the folder of a
 * run from luatrain/train/run_folder.lua. The other lines are messages of luatrain and of mpirun.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/child.h"
#include "tools/outcome.h"
#include "tools/relay.h"

/* The number of processes that the kernel has killed since it started because memory ran out, of
 * the host or of a cgroup; 0 if it does not say. */
static int64_t oom_kills(void)
{
    char line[128];
    int64_t n = 0;
    FILE *file = fopen("/proc/vmstat", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "oom_kill %" SCNd64, &n) == 1)
            break;
    if (file)
        fclose(file);
    return n;
}

lt_status outcome_begin(outcome *o, int n)
{
    void *hosts = n == o->n ? o->hosts : calloc((size_t)n, sizeof *o->hosts);
    if (!hosts)
        return lt_fail(LT_ENOMEM, "out of memory for %d ranks", n);
    if (hosts != o->hosts)
        free(o->hosts);
    o->hosts = hosts;
    o->n = n;
    o->failure[0] = '\0';
    o->killed = o->signal = o->begun = 0;
    o->has_begun = o->no_daemon = o->lost_daemon = false;
    o->oom_kills = oom_kills();
    return LT_OK;
}

void outcome_free(outcome *o) { free(o->hosts); }

void outcome_note_rank(int rank)
{
    char host[HOST_BYTES] = "";
    gethostname(host, sizeof host - 1);
    if (getenv("LUATRAIN_RESTARTED"))
        dprintf(STDERR_FILENO, "%crank %d %s\n", RELAY_NOTE, rank, host);
}

/* Returns the text after a prefix; NULL if the line does not begin with it. */
static const char *after(const char *line, const char *prefix)
{
    size_t n = strlen(prefix);
    return strncmp(line, prefix, n) == 0 ? line + n : NULL;
}

static void take_note(outcome *o, const char *note)
{
    char host[HOST_BYTES];
    const char *folder;
    int rank;
    if (sscanf(note, "rank %d %64s", &rank, host) == 2 && rank >= 0 && rank < o->n) {
        strcpy(o->hosts[rank], host);
        o->has_begun = true;
    } else if ((folder = after(note, "run "))) {
        if (++o->begun < o->runs) /* an earlier start has come further */
            return;
        o->runs = o->begun;
        snprintf(o->run, sizeof o->run, "%s", folder);
    } else if ((folder = after(note, "out ")) && o->begun == o->runs) {
        o->is_mixed |= o->runs > 1 && !*folder != !o->out[0];
        snprintf(o->out, sizeof o->out, "%s", folder);
    } else if ((folder = after(note, "from ")) && o->begun == o->runs) {
        snprintf(o->from, sizeof o->from, "%s", folder);
    }
}

void outcome_take(void *ud, const char *line)
{
    outcome *o = ud;
    const char *message = after(line, "luatrain: "), *mpirun;
    if (*line == RELAY_NOTE)
        take_note(o, line + 1);
    else if (message && !after(message, "warning: "))
        snprintf(o->failure, sizeof o->failure, "%s", message);
    else if (o->signal == 0 && (mpirun = strstr(line, "noticed that process rank ")))
        sscanf(mpirun, "noticed that process rank %d with PID %*d on node %*s exited on signal %d",
               &o->killed, &o->signal);
    /* mpirun says so of a daemon that is killed after the ranks began, too. */
    bool failed = strstr(line, "unable to reliably start one or more daemons") != NULL;
    o->no_daemon |= failed && !o->has_begun;
    o->lost_daemon |= (failed && o->has_begun) ||
                      strstr(line, "has lost communication with a remote daemon") != NULL;
}

/* " on alpha", or "" if the rank has not said where it runs. */
static const char *place_of(const outcome *o, int rank, char text[HOST_BYTES + 4])
{
    text[0] = '\0';
    if (rank >= 0 && rank < o->n && o->hosts[rank][0])
        snprintf(text, HOST_BYTES + 4, " on %s", o->hosts[rank]);
    return text;
}

/* Whether a rank runs on this host and the kernel has killed a process here since the start. */
static bool lacked_memory(const outcome *o, int rank)
{
    char own[HOST_BYTES] = "";
    gethostname(own, sizeof own - 1);
    return rank < o->n && strcmp(o->hosts[rank], own) == 0 && oom_kills() > o->oom_kills;
}

static void describe_killed(const outcome *o, char *text, size_t bytes)
{
    char place[HOST_BYTES + 4], name[32];
    snprintf(text, bytes, "rank %d%s was killed by %s%s", o->killed, place_of(o, o->killed, place),
             child_signal_name(o->signal, name),
             o->signal == SIGKILL && lacked_memory(o, o->killed)
                 ? ", because the kernel ran out of memory there"
                 : "");
}

void outcome_cause(const outcome *o, int code, const char *error, char *text, size_t bytes)
{
    char place[HOST_BYTES + 4];
    int rank, end = 0;
    if (o->signal != 0)
        describe_killed(o, text, bytes);
    else if (sscanf(o->failure, "rank %d%n", &rank, &end) == 1 && !after(o->failure + end, " on "))
        snprintf(text, bytes, "rank %d%s%s", rank, place_of(o, rank, place), o->failure + end);
    else if (o->lost_daemon)
        snprintf(text, bytes, "mpirun lost the connection to another host");
    else if (o->failure[0] || *error)
        snprintf(text, bytes, "%s", o->failure[0] ? o->failure : error);
    else
        snprintf(text, bytes, "the job failed with exit code %d", code);
}
