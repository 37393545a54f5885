/* options.h - the command-line options of luatrain. A value comes from the flag, else from the
 * environment variable LUATRAIN_NAME, else from the library's defaults. Each flag is checked here
 * and then stored in its variable, where the embedded Lua files read it.
 */
#ifndef LT_TOOLS_OPTIONS_H
#define LT_TOOLS_OPTIONS_H

#include <stdio.h>

#include "lua/luatrain.h"

/* luatrain/train/parallel.lua reads the rest of --parallel, and --simulate. */
typedef enum parallel_kind {
    SYNCHRONOUS,
    SYNC_SERVER,
    ASYNCHRONOUS,
    IN_PIPELINE,
    UNKNOWN_MODE
} parallel_kind;

typedef struct settings {
    lt_config config;
    lt_log_level level;     /* lowest level that is shown */
    lt_dtype amp;           /* autocast dtype outside lt.run, which reads LUATRAIN_AMP itself */
    int ranks;              /* ranks in this process; 0 if not given */
    const char *trace;      /* path of the trace, or NULL */
    parallel_kind parallel; /* --parallel */
    bool simulates;         /* --simulate is given */
    bool has_share;         /* --share is given; luatrain/train/share.lua reads its value */
    bool plans;             /* the subcommand is plan */
    int plan_ranks;         /* plan -n: number of ranks; 0 if not given */
    double plan_link;       /* plan --link: Gbit/s; 0 if not given */
    bool under_mpi;         /* this process is one rank of an MPI job */
    lt_group_config group;
    lt_reducer_config reducer;
    bool launches;         /* the subcommand is launch */
    int processes;         /* launch -n: number of processes; 0 if not given */
    const char *hosts;     /* launch -H: hosts; NULL for this machine */
    const char *host_file; /* launch --hostfile: a file that lists the hosts; or NULL */
    int restarts;          /* launch --restarts: how often a job may start again */
    const char *text;      /* "help" or "version" to print that and run nothing; or NULL */
    int argc;              /* subcommand or script, and its arguments */
    char **argv;           /* borrowed from main() */
    int n_options; /* number of words before argv: the program, and options with their values */
} settings;

/* Reads environment variables and flags into s, and warns about misspelled variables. Removes
 * "launch" and its own flags from argv, which then contains the command of one rank. LT_EUSAGE,
 * LT_ENOMEM. */
LT_MUST lt_status read_options(settings *s, char **argv);
/* Parses an integer from 1 to max. who: what it is for, in the message. LT_EUSAGE. */
LT_MUST lt_status parse_int(const char *who, const char *value, int max, int *number);
/* The name of option i, from 0, such as "save-every". NULL if there is no such option. */
const char *option_name(int i);
/* Compares the options that must be equal on all ranks. A collective. Returns the same errors as
 * lt_group_compare(). */
LT_MUST lt_status compare_options(lt_group *group);
/* Prints the usage, the options and the environment variables. */
void print_help(FILE *to);
/* Prints versions, the number of threads and the device of s to stdout. Returns the same errors as
 * lt_open(). */
LT_MUST lt_status print_version(const settings *s);

#endif
