/* restart.c - see restart.h. */
#define _GNU_SOURCE
#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/hosts.h"
#include "tools/restart.h"

enum { MOST_FAILURES = 3 };    /* of one step, in a row */
enum { TEXT_BYTES = 2048 };    /* of a part of a message */
enum { TAIL_BYTES = 1 << 16 }; /* of metrics.jsonl, with at least one step */

/* ==== The run ================================================================================= */

/* The number of the last step in the log of a run; 0 if there is none. */
static int64_t last_step(const char *folder)
{
    static const char event[] = "{\"event\":\"step\",", key[] = ",\"step\":";
    char path[PATH_MAX + 32], *tail = malloc(TAIL_BYTES + 1);
    int64_t step = 0;
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    FILE *file = *folder && tail ? fopen(path, "r") : NULL;
    if (file) {
        if (fseek(file, -TAIL_BYTES, SEEK_END) != 0)
            rewind(file);
        tail[fread(tail, 1, TAIL_BYTES, file)] = '\0';
        for (const char *at = tail; (at = strstr(at, event)); at++) {
            const char *number = strstr(at, key);
            if (number)
                sscanf(number + sizeof key - 1, "%" SCNd64, &step);
        }
        fclose(file);
    }
    free(tail);
    return step;
}

/* The step in the name of a checkpoint; 0 if it is another name. */
static int64_t step_in(const char *name)
{
    int64_t step = 0;
    int end = 0;
    sscanf(name, "step-%" SCNd64 ".safetensors%n", &step, &end);
    return end > 0 && name[end] == '\0' ? step : 0;
}

/* The step of the newest checkpoint in a folder, 0 if there is none; -1 if the folder is not
 * visible from this host. */
static int64_t newest_checkpoint(const char *folder)
{
    int64_t newest = 0;
    DIR *dir = opendir(folder);
    if (!dir)
        return -1;
    for (struct dirent *entry; (entry = readdir(dir));) {
        int64_t step = step_in(entry->d_name);
        newest = step > newest ? step : newest;
    }
    closedir(dir);
    return newest;
}

/* The step of a checkpoint, or of the newest one in a folder; 0 if it is unknown. */
static int64_t step_of(const char *from)
{
    const char *slash = strrchr(from, '/');
    int64_t newest = newest_checkpoint(from);
    return newest > 0 ? newest : step_in(slash ? slash + 1 : from);
}

/* Where a job resumes that was lost before its script began a run. */
static void describe_first_start(char *text, size_t bytes)
{
    const char *folder = getenv("LUATRAIN_OUT"), *resume = getenv("LUATRAIN_RESUME");
    bool is_never = resume && strcmp(resume, "never") == 0;
    bool is_path = resume && !is_never && strcmp(resume, "auto") != 0;
    int64_t step = folder && !is_never && !is_path ? newest_checkpoint(folder) : 0;
    if (step > 0)
        snprintf(text, bytes, "from the checkpoint of step %" PRId64 " in %s", step, folder);
    else if (is_path)
        snprintf(text, bytes, "from %s", resume);
    else if (resume && !is_never && !folder)
        snprintf(text, bytes, "with --resume auto");
    else
        snprintf(text, bytes, "from the beginning, as there is no checkpoint");
}

/* Where the job resumes: "from the checkpoint of step 40 in runs/x". Resumes as overrides.lua. */
static void describe_start(const restarts *r, char *text, size_t bytes)
{
    const char *folder = r->outcome.run, *from = r->outcome.from;
    int64_t step = *folder ? newest_checkpoint(folder) : 0;
    if (!*folder)
        describe_first_start(text, bytes);
    else if (step < 0)
        snprintf(text, bytes, "from the newest checkpoint in %s", folder);
    else if (step > (*from ? step_of(from) : 0))
        snprintf(text, bytes, "from the checkpoint of step %" PRId64 " in %s", step, folder);
    else if (*from)
        snprintf(text, bytes, "from %s", from);
    else if (r->outcome.runs > 1)
        snprintf(text, bytes, "from the beginning of the run in %s, which has no checkpoint",
                 folder);
    else
        snprintf(text, bytes, "from the beginning, as there is no checkpoint");
}

/* ==== Lost hosts ============================================================================== */

/* Whether a job with these settings can run on n ranks, if it could on `before`. */
static bool fits(const settings *s, int n, int before)
{
    const char *mode = getenv("LUATRAIN_PARALLEL"), *share = getenv("LUATRAIN_SHARE");
    int stages = 0, vranks = s->reducer.vranks > 0 ? s->reducer.vranks : before;
    if (s->config.deterministic && vranks % n != 0)
        return false;
    if (s->has_share && strcmp(share, "auto") != 0) /* it has one number per rank */
        return n == before;
    if (s->parallel != IN_PIPELINE || sscanf(mode, "pipe=%d", &stages) != 1 || stages < 1)
        return true;
    if (strstr(mode, ",delay=1") && n == stages) /* a delay requires replicas */
        return false;
    return n % stages == 0 && (!strstr(mode, ",data=") || n == before);
}

/* Writes the hosts that can be reached as an argument of -H, "alpha:2,beta:2", and the names of the
 * others, "gamma, delta". Each host gets as many ranks as it had, but all together at most `most`.
 * Returns the number of ranks. */
static int divide(const restarts *r, const host_list *h, int most, char *kept, char *lost)
{
    int n = 0, n_lost = 0;
    *kept = *lost = '\0';
    for (int i = 0; i < h->n; i++) {
        const job_host *one = &h->list[i];
        int here = 0;
        for (int rank = 0; rank < r->job.processes; rank++)
            here += *one->node && strcmp(one->node, r->outcome.hosts[rank]) == 0;
        for (int k = 0; k < i; k++) /* another name of this host */
            here = strcmp(h->list[k].node, one->node) == 0 ? 0 : here;
        here = here < most - n ? here : most - n;
        if (!*one->node)
            lost += sprintf(lost, "%s%s", n_lost++ > 0 ? ", " : "", one->name);
        else if (here > 0)
            kept += sprintf(kept, strchr(one->name, ':') ? "%s[%s]:%d" : "%s%s:%d",
                            n > 0 ? "," : "", one->name, here);
        n += here;
    }
    return n;
}

/* Changes r->job to run without the hosts in lost. n: ranks that are left; the job uses the first
 * of them. With vranks, the numbers of ranks, before and after, are powers of two, and so is the
 * number on each host: the hosts that are left still have equal numbers, as vranks requires. */
static lt_status shrink(restarts *r, const host_list *h, char *kept, char *lost, int n)
{
    int before = r->job.processes, left = n;
    char vranks[16];
    while (n > 0 && !fits(&r->job, n, before))
        n--;
    if (n == 0)
        return lt_fail(LT_EPEER,
                       "%s cannot be reached, and the %d of %d ranks that are left "
                       "cannot run the job with its options",
                       lost, left, before);
    snprintf(vranks, sizeof vranks, "%d", before);
    if (r->job.config.deterministic && r->job.reducer.vranks == 0 &&
        setenv("LUATRAIN_VRANKS", vranks, 1) == 0) /* so that the results stay the same */
        r->job.reducer.vranks = before;
    divide(r, h, n, kept, lost);
    free(r->hosts);
    r->job.hosts = r->hosts = kept;
    r->job.host_file = NULL;
    r->job.processes = n;
    return LT_OK;
}

/* Finds the hosts that cannot be reached, and continues without them. Writes a text for the
 * message: their names, or "". */
static lt_status leave_lost_hosts(restarts *r, char *text, size_t bytes)
{
    host_list h = {0};
    *text = '\0';
    lt_status status = hosts_read(&h, &r->job);
    if (status == LT_OK && h.n > 0)
        status = hosts_probe(&h);
    size_t room = 1;
    for (int i = 0; i < h.n; i++)
        room += strlen(h.list[i].name) + 16;
    char *kept = malloc(room), *lost = malloc(room);
    if (status == LT_OK && (!kept || !lost))
        status = lt_fail(LT_ENOMEM, "out of memory for the hosts");
    if (status == LT_OK && h.n > 0) {
        int n = divide(r, &h, r->job.processes, kept, lost);
        if (*lost) {
            snprintf(text, bytes, "%s cannot be reached: ", lost);
            status = shrink(r, &h, kept, lost, n);
            kept = status == LT_OK ? NULL : kept;
        }
    }
    free(kept);
    free(lost);
    hosts_free(&h);
    return status;
}

/* ==== The decision ============================================================================ */

lt_status restart_begin(restarts *r)
{
    char number[16];
    LT_TRY(outcome_begin(&r->outcome, r->job.processes));
    if (r->job.restarts == 0)
        return LT_OK;
    /* Before a run has applied --resume, its folder may have checkpoints of another job. */
    snprintf(number, sizeof number, "%d", r->outcome.runs);
    /* Otherwise mpirun waits a second before it kills what is left of a job. */
    bool is_set = setenv("LUATRAIN_RESTARTED", number, 1) == 0 &&
                  setenv("OMPI_MCA_odls_base_sigkill_timeout", "0", 0) == 0 &&
                  setenv("PRTE_MCA_odls_base_sigkill_timeout", "0", 0) == 0; /* Open MPI 5 */
    if (r->outcome.out[0])
        is_set &= setenv("LUATRAIN_OUT", r->outcome.out, 1) == 0;
    return is_set ? LT_OK : lt_fail(LT_ENOMEM, "out of memory for the environment");
}

void restart_free(restarts *r)
{
    outcome_free(&r->outcome);
    free(r->hosts);
}

/* Whether a job that ended in this way may succeed if it starts again: a rank, mpirun or a host was
 * lost, or memory ran out. Other errors would occur again. */
static bool may_succeed(const restarts *r, lt_status status, int code)
{
    bool lost_host = r->outcome.lost_daemon || (r->outcome.no_daemon && r->done > 0);
    return status == LT_EPEER || lost_host ||
           (status == LT_OK && (code == lt_exit_code(LT_EPEER) || code == lt_exit_code(LT_ENOMEM)));
}

/* Counts the failures of a step, and puts it before a cause that does not name it. */
static void count(restarts *r, char *cause)
{
    const char *folder = r->outcome.run;
    char text[TEXT_BYTES];
    bool is_visible = !*folder || newest_checkpoint(folder) >= 0;
    int64_t step = is_visible ? last_step(folder) + 1 : -1;
    r->times = step == r->step ? r->times + 1 : 1;
    r->step = step;
    if (step < 0 || strstr(cause, ", step "))
        return;
    snprintf(text, sizeof text, "%s", cause);
    snprintf(cause, TEXT_BYTES, "in step %" PRId64 ", %.*s", step, TEXT_BYTES - 64, text);
}

/* Why the job is not started again, or "". */
static void find_reason(const restarts *r, char *reason)
{
    *reason = '\0';
    if (r->step >= 0 && r->times >= MOST_FAILURES)
        snprintf(reason, TEXT_BYTES, "step %" PRId64 " has failed %d times in a row", r->step,
                 r->times);
    else if (r->done >= r->job.restarts)
        snprintf(reason, TEXT_BYTES, "--restarts %d allows no more restarts", r->job.restarts);
    else if (r->outcome.is_mixed)
        snprintf(reason, TEXT_BYTES, "the script sets out for some of its runs, but not for all");
}

static const char *plural(int n) { return n == 1 ? "" : "s"; }

bool restart_next(restarts *r, lt_status *status, int code)
{
    char cause[TEXT_BYTES], reason[TEXT_BYTES], lost[TEXT_BYTES], start[PATH_MAX + 64];
    if (r->job.restarts == 0 || !may_succeed(r, *status, code))
        return false;
    outcome_cause(&r->outcome, code, *status == LT_OK ? "" : lt_errmsg(), cause, TEXT_BYTES);
    count(r, cause);
    find_reason(r, reason);
    int before = r->job.processes;
    if (!*reason && leave_lost_hosts(r, lost, sizeof lost) != LT_OK)
        snprintf(reason, sizeof reason, "%s", lt_errmsg());
    if (*reason) {
        bool lacks_memory = *status == LT_OK && code == lt_exit_code(LT_ENOMEM);
        *status =
            lt_fail(lacks_memory ? LT_ENOMEM : LT_EPEER, "%s; not restarted: %s", cause, reason);
        return false;
    }
    int n = r->job.processes, left = r->job.restarts - ++r->done;
    char of[32] = "";
    if (n < before)
        snprintf(of, sizeof of, "%d of ", n);
    describe_start(r, start, sizeof start);
    fprintf(stderr, "luatrain: %s; %srestarting %s%d rank%s %s; %d restart%s left\n", cause, lost,
            of, before, plural(before), start, left, plural(left));
    return true;
}
