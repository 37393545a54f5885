/* thread.h - starts threads that never run a signal handler. Define _GNU_SOURCE before including
 * it. */
#ifndef LT_TOOLS_THREAD_H
#define LT_TOOLS_THREAD_H

#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "core/core.h"

/* Starts a thread that calls run(ud) with all signals blocked. LT_ENOMEM. */
static inline lt_status thread_start(pthread_t *thread, void *(*run)(void *ud), void *ud)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int error = pthread_create(thread, NULL, run, ud);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error == 0 ? LT_OK : lt_fail(LT_ENOMEM, "cannot start a thread: %s", strerror(error));
}

#endif
