/* launch.h - luatrain launch: starts the ranks as processes, on one machine or several. */
#ifndef LT_TOOLS_LAUNCH_H
#define LT_TOOLS_LAUNCH_H

#include "tools/options.h"

/* Runs the program with the arguments words in s->processes processes and waits for them. Sets
 * *code to the job's exit code. LT_EUSAGE, LT_EENV or LT_ENOMEM if the job cannot be started;
 * LT_EPEER if mpirun hung and was killed. If a signal ended the job, this process ends by the same
 * signal. */
LT_MUST lt_status launch(const settings *s, const char *program, char *const *words, int *code);

#endif
