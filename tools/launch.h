/* launch.h - luatrain launch: starts the ranks as processes, on one machine or several. */
#ifndef LT_TOOLS_LAUNCH_H
#define LT_TOOLS_LAUNCH_H

#include "tools/options.h"

/* Runs the program in s->processes processes and waits for them. words are its arguments and end
 * with NULL. Sets *code to the job's exit code. LT_EUSAGE, LT_EENV or LT_ENOMEM if the job cannot
 * be started; LT_EPEER if mpirun hung and was killed. If a signal to this process ended the job,
 * this process ends with the same signal. */
LT_MUST lt_status launch(const settings *s, const char *program, char *const *words, int *code);

#endif
