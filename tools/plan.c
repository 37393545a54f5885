/* plan.c - see plan.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/plan.h"

static const char plan_help[] =
    "usage: luatrain [options] plan [-n RANKS] [--link GBIT] script.lua [script options]\n"
    "\n"
    "Profiles the net of a script, and predicts the time of a step for each way to divide it into\n"
    "pipeline stages, the fastest first. With --out DIR, writes the plans to DIR/plans.json.\n"
    "\n"
    "  -n RANKS     number of ranks to plan for (default: one per CPU, or the ranks of mpirun)\n"
    "  --link GBIT  rate of the link between ranks, with a latency of 50 us; without it, the link\n"
    "               is measured\n"
    "  --help       print this help\n";

enum { MOST_RANKS = 1024 };

/* Stores the value of a flag in the environment variable that luatrain/commands/plan.lua reads. */
static lt_status store(const char *variable, const char *flag, const char *value)
{
    if (!value)
        return lt_fail(LT_EUSAGE, "plan: %s requires a value", flag);
    return setenv(variable, value, 1) == 0 ? LT_OK
                                           : lt_fail(LT_ENOMEM, "out of memory for a variable");
}

lt_status read_plan(settings *s, bool *is_help)
{
    int i = 1;
    for (; i < s->argc && s->argv[i][0] == '-'; i += 2) {
        if (strcmp(s->argv[i], "-n") == 0)
            LT_TRY(store("LUATRAIN_PLAN_RANKS", "-n", s->argv[i + 1]));
        else if (strcmp(s->argv[i], "--link") == 0)
            LT_TRY(store("LUATRAIN_PLAN_LINK", "--link", s->argv[i + 1]));
        else if (strcmp(s->argv[i], "--help") == 0)
            *is_help = fputs(plan_help, stdout) >= 0;
        if (*is_help)
            return LT_OK;
        if (strcmp(s->argv[i], "-n") != 0 && strcmp(s->argv[i], "--link") != 0)
            return lt_fail(LT_EUSAGE, "plan: unknown option '%s'; see luatrain plan --help",
                           s->argv[i]);
    }
    if (i >= s->argc)
        return lt_fail(LT_EUSAGE, "plan: the script is missing: luatrain plan -n 2 train.lua");
    const char *text = getenv("LUATRAIN_PLAN_RANKS");
    int n = 0;
    if (text)
        LT_TRY(parse_int("plan: -n", text, MOST_RANKS, &n));
    int cpus = lt_cpu_count();
    if (s->ranks == 0 && !lt_mpi_is_launched())
        s->ranks = n > 0 && n < cpus ? n : cpus;
    s->argv += i;
    s->argc -= i;
    s->n_options += i;
    s->plans = true;
    s->parallel = IN_PIPELINE;
    return store("LUATRAIN_PLANS", "plan", "1");
}
