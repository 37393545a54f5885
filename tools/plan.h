/* plan.h - luatrain plan: predicts pipelines for the net of a script. */
#ifndef LT_TOOLS_PLAN_H
#define LT_TOOLS_PLAN_H

#include "tools/options.h"

/* Reads the flags of the plan command into s and removes them: s->argv[0] becomes the script. Sets
 * *is_help, and prints the help, for --help. LT_EUSAGE. */
LT_MUST lt_status read_plan(settings *s, bool *is_help);

#endif
