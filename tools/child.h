/* child.h - the processes that luatrain launch starts. Define _GNU_SOURCE before including it. */
#ifndef LT_TOOLS_CHILD_H
#define LT_TOOLS_CHILD_H

#include <signal.h>
#include <sys/types.h>

#include "core/core.h"

/* Sets *set to SIGCHLD and the signals that request a stop, except those that are ignored, as under
 * nohup. */
void child_signals(sigset_t *set);
/* Starts a command, which ends with NULL, in a process group of its own, where the terminal's
 * Ctrl-C does not reach it. mask: its signal mask. output: its stdout and stderr. It gets SIGTERM
 * when this process ends. LT_EENV if it cannot be executed; then errno is ENOENT if there is no
 * such program. LT_ENOMEM. */
LT_MUST lt_status child_start(const char *const *command, const sigset_t *mask, const int output[2],
                              pid_t *pid);
/* Writes "SIGKILL", or "signal 35" for a signal without a name, and returns text. */
const char *child_signal_name(int number, char text[32]);
/* Ends this process with a signal. */
void child_end_by(int number);

#endif
