/* launch.h - luatrain launch: ranks as processes, on one machine or on several. */
#ifndef LT_TOOLS_LAUNCH_H
#define LT_TOOLS_LAUNCH_H

#include "tools/options.h"

/* Runs the command of a rank, the words after the program, in as many processes as s wants, and
 * waits for them. *code is then the exit code of the job. LT_EUSAGE or LT_EENV when it cannot be
 * started. Ends this process as a signal would when one has ended the job. */
LT_MUST lt_status launch(const settings *s, const char *program, char *const *words, int *code);

#endif
