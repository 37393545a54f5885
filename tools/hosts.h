/* hosts.h - the hosts of a job that luatrain launch has started. */
#ifndef LT_TOOLS_HOSTS_H
#define LT_TOOLS_HOSTS_H

#include "tools/options.h"
#include "tools/outcome.h"

typedef struct job_host {
    char *name;            /* as in -H or in the host file, without slots */
    char node[HOST_BYTES]; /* what the host calls itself; "" if it cannot be reached */
} job_host;

typedef struct host_list { /* zero: none */
    job_host *list;
    int n;
} host_list;

/* Reads the hosts of -H, or else of --hostfile; none if neither is given. *h is zero. Free it after
 * an error, too. LT_EENV, LT_ENOMEM. */
LT_MUST lt_status hosts_read(host_list *h, const settings *s);
void hosts_free(host_list *h);
/* Finds the hosts on which mpirun can start a process, in at most HOST_SECONDS. */
enum { HOST_SECONDS = 15 };
LT_MUST lt_status hosts_probe(host_list *h);

#endif
