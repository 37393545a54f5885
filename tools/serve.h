/* serve.h - luatrain launch --serve: starts an asynchronous job on this host without MPI, as a
 * server and workers that join it. A lost worker does not end the job. */
#ifndef LT_TOOLS_SERVE_H
#define LT_TOOLS_SERVE_H

#include "tools/options.h"

/* Runs the program as a server, and s->processes - 1 times as a worker of it. words are the
 * program's arguments and end with NULL. Starts a worker that is lost again, at most s->restarts
 * times in all. Waits for the server, and then for the workers. Sets *code to the server's exit
 * code. LT_EUSAGE for options that do not work with it; LT_EENV or LT_ENOMEM if the server cannot
 * be started; LT_EPEER if it was killed. If a signal to this process ended the server before it
 * could save, or a second one ended all processes, this process ends with the same signal. */
LT_MUST lt_status serve_job(const settings *s, const char *program, char *const *words, int *code);

/* On a worker, once it has joined: tells luatrain launch its number. */
void serve_note_worker(int rank);

#endif
