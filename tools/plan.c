/* plan.c - see plan.h. */
#include <stdio.h>
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

/* Reads a flag other than --help, and its value. */
static lt_status read_flag(settings *s, const char *flag, const char *value)
{
    bool is_ranks = strcmp(flag, "-n") == 0;
    if (!is_ranks && strcmp(flag, "--link") != 0)
        return lt_fail(LT_EUSAGE, "plan: unknown option '%s'; see luatrain plan --help", flag);
    if (!value)
        return lt_fail(LT_EUSAGE, "plan: %s requires a value", flag);
    if (is_ranks)
        return parse_int("plan: -n", value, MOST_RANKS, &s->plan_ranks);
    s->plan_link = value;
    return LT_OK;
}

lt_status read_plan(settings *s, bool *is_help)
{
    int i = 1;
    for (; i < s->argc && s->argv[i][0] == '-'; i += 2) {
        *is_help = strcmp(s->argv[i], "--help") == 0;
        if (*is_help) {
            fputs(plan_help, stdout);
            return LT_OK;
        }
        LT_TRY(read_flag(s, s->argv[i], s->argv[i + 1]));
    }
    if (i >= s->argc)
        return lt_fail(LT_EUSAGE, "plan: the script is missing: luatrain plan -n 2 train.lua");
    int cpus = lt_cpu_count();
    if (s->ranks == 0 && !lt_mpi_is_launched())
        s->ranks = s->plan_ranks > 0 && s->plan_ranks < cpus ? s->plan_ranks : cpus;
    s->argv += i;
    s->argc -= i;
    s->n_options += i;
    s->plans = true;
    s->parallel = IN_PIPELINE;
    return LT_OK;
}
