/* options.h - the options of luatrain, and what they say. A value comes from the flag, else from
 * the variable LUATRAIN_NAME, else it is the library's. A flag is checked here and becomes the
 * variable: there the embedded Lua finds it.
 */
#ifndef LT_TOOLS_OPTIONS_H
#define LT_TOOLS_OPTIONS_H

#include <stdio.h>

#include "lua/luatrain.h"

typedef struct settings {
    lt_config config;
    lt_log_level level;       /* the least that is shown */
    lt_dtype amp;             /* for loops that are no run; a run looks up the variable */
    int ranks;                /* 0: nobody has said */
    const char *trace;        /* a path; or NULL */
    bool under_mpi;          /* this process is one rank of several */
    lt_group_config group;
    lt_reducer_config reducer;
    bool launches;            /* ranks as processes, */
    int processes;            /* so many, */
    const char *hosts;        /* there; NULL: here */
    const char *text;         /* "help" or "version": wanted instead of a run; or NULL */
    int argc;                 /* what to run: the subcommand or script, and what follows it */
    char **argv;
} settings;

/* Reads variables and flags into s, and warns of variables that look like a slip. The words of
 * launch go out of argv: what is left is the command of one rank. */
LT_MUST lt_status read_options(settings *s, char **argv);
void print_help(FILE *to);
LT_MUST lt_status print_version(const settings *s);

#endif
