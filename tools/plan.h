/* plan.h - finds the pipeline in which the ranks train: --parallel pipe=P, and luatrain plan. */
#ifndef LT_TOOLS_PLAN_H
#define LT_TOOLS_PLAN_H

#include "autograd/stages.h"
#include "tools/options.h"

/* Reads the flags of the plan command into s and removes them: s->argv[0] becomes the script. Sets
 * *is_help, and prints the help, for --help. LT_EUSAGE. */
LT_MUST lt_status read_plan(settings *s, bool *is_help);

typedef struct planner {
    lt_lua_pipeline pipeline; /* for lt_lua_join_pipeline() */
    bool is_shown;            /* the plan command has printed its plans */
    /* The rest is private to plan.c */
    const settings *s;
    const lt_config *config; /* for the context that will train */
    lt_group *group;
    lt_pipe_job job;
    lt_pipe_net net;
    lt_pipe_plans plans; /* on rank 0 */
    lt_pipe_plan plan;
    lt_pipe_plan_stage
        stage[LT_MAX_STAGES];  /* stages of plan; at first only the first units of the cuts */
    char *cuts[LT_MAX_STAGES]; /* cuts[i]: what the user calls stage i; owned */
    int n_cuts;
    bool given; /* the options are a whole plan */
    /* What the last profile has found */
    int exit;          /* code of os.exit(), which ended the script; -1 if it did not */
    char *text;        /* its message, or a warning; owned */
    double slot_bytes; /* bytes of the optimizers' slots; -1 if unknown */
    double optimizer;  /* seconds of an optimizer step */
} planner;

/* Profiles the script and finds the plan, which all ranks of group get. For the plan command,
 * prints all plans instead, unless the script leaves before a backward pass. A collective. config:
 * of the context that will train; L: its state. All arguments are borrowed until plan_free(). Fails
 * with the errors of the script or of a collective, or with LT_EUSAGE. */
LT_MUST lt_status plan_pipeline(planner *p, const settings *s, const lt_config *config,
                                lt_group *group, lua_State *L);
void plan_free(planner *p);

#endif
