/* child.c - see child.h. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "tools/child.h"

void child_signals(sigset_t *set)
{
    static const int asking[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGPIPE};
    struct sigaction now;
    signal(SIGCHLD, SIG_DFL);
    sigemptyset(set);
    sigaddset(set, SIGCHLD);
    for (size_t i = 0; i < sizeof asking / sizeof *asking; i++)
        if (sigaction(asking[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN)
            sigaddset(set, asking[i]);
}

/* In the child: executes the command. If that fails, writes the error number to pipe. */
static void become(const char *const *command, const sigset_t *mask, const int output[2],
                   pid_t parent, int pipe)
{
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) /* it has ended before this process could ask for the signal */
        _exit(1);
    setpgid(0, 0);
    dup2(output[0], STDOUT_FILENO);
    dup2(output[1], STDERR_FILENO);
    sigprocmask(SIG_SETMASK, mask, NULL);
    execvp(command[0], (char *const *)command);
    int why = errno;
    ssize_t written = write(pipe, &why, sizeof why);
    _exit(written == sizeof why ? 0 : 1);
}

lt_status child_start(const char *const *command, const sigset_t *mask, const int output[2],
                      pid_t *pid)
{
    int ends[2], why = 0;
    pid_t parent = getpid();
    if (pipe2(ends, O_CLOEXEC) != 0)
        return lt_fail(LT_ENOMEM, "%s cannot be started: %s", command[0], strerror(errno));
    *pid = fork();
    if (*pid == 0)
        become(command, mask, output, parent, ends[1]);
    const char *no_fork = *pid < 0 ? strerror(errno) : NULL;
    close(ends[1]);
    if (no_fork) {
        close(ends[0]);
        return lt_fail(LT_ENOMEM, "%s cannot be started: %s", command[0], no_fork);
    }
    bool failed = read(ends[0], &why, sizeof why) == sizeof why;
    close(ends[0]);
    if (!failed)
        return LT_OK;
    lt_fail(LT_EENV, "%s cannot be started: %s", command[0], strerror(why));
    errno = why;
    return LT_EENV;
}

const char *child_signal_name(int number, char text[32])
{
    const char *name = sigabbrev_np(number); /* real-time signals have no name */
    if (name)
        snprintf(text, 32, "SIG%s", name);
    else
        snprintf(text, 32, "signal %d", number);
    return text;
}

void child_end_by(int number)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    signal(number, SIG_DFL);
    raise(number);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
}
