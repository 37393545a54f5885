/* threads.h - a limit on the threads that a test can start. Include it first. */
#ifndef TESTS_DATA_THREADS_H
#define TESTS_DATA_THREADS_H

#define _GNU_SOURCE /* RTLD_NEXT */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

/* The number of threads that can still be started; -1: no limit. Used by the pthread_create below,
 * which replaces libc's. */
static int threads_left = -1;

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*body)(void *), void *ud)
{
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
    if (threads_left == 0)
        return EAGAIN;
    threads_left -= threads_left > 0;
    return real(thread, attr, body, ud);
}

#endif
