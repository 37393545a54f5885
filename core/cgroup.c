/* cgroup.c - reads the CPU quota of a container or service, in microseconds of CPU time per period.
 * In cgroup v2, the file cpu.max has the quota and the period: "50000 100000", or "max 100000"
 * without a quota. In v1, cpu.cfs_quota_us has the quota, or -1, and cpu.cfs_period_us the period.
 * The quotas of the enclosing cgroups apply, too.
 */
#include <stdio.h>
#include <string.h>

#include "core/device.h"

enum { MOST = 4096 }; /* bytes of a path */

/* Reads numbers from a file in a folder. Returns how many. */
static int read_numbers(const char *folder, const char *name, double *first, double *second)
{
    char path[2 * MOST + 32];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "r");
    int n = f ? fscanf(f, "%lf %lf", first, second) : 0;
    if (f)
        fclose(f);
    return n > 0 ? n : 0;
}

/* The quota of one cgroup in CPUs, rounded up; 0 if it has none. */
static int cpus_of(const char *folder)
{
    double quota, period, none;
    bool has = read_numbers(folder, "cpu.max", &quota, &period) == 2 ||
               (read_numbers(folder, "cpu.cfs_quota_us", &quota, &none) == 1 &&
                read_numbers(folder, "cpu.cfs_period_us", &period, &none) == 1);
    if (!has || quota <= 0 || period <= 0 || quota / period > 1e6)
        return 0;
    int whole = (int)(quota / period);
    return whole + (whole < quota / period);
}

/* The smallest quota of the cgroup `path` below folder and of the cgroups that enclose it. In a
 * container, path may be the one on the host; then only some of its folders exist. */
static int least_of(const char *folder, char *path)
{
    char full[2 * MOST];
    int min = 0;
    for (;;) {
        snprintf(full, sizeof full, "%s%s", folder, path);
        int cpus = cpus_of(full);
        min = cpus > 0 && (min == 0 || cpus < min) ? cpus : min;
        char *slash = strrchr(path, '/');
        if (!slash)
            return min;
        *slash = 0;
    }
}

/* Whether a list such as "cpu,cpuacct" has the word cpu. */
static bool has_cpu(const char *list)
{
    for (const char *at = list; (at = strstr(at, "cpu")); at += 3)
        if ((at == list || at[-1] == ',') && (at[3] == ',' || at[3] == 0))
            return true;
    return false;
}

int lt__cgroup_cpus(const char *root, const char *self)
{
    char line[MOST], folder[MOST];
    FILE *f = fopen(self, "r");
    int min = 0;
    while (f && fgets(line, sizeof line, f)) { /* "4:cpu,cpuacct:/path"; v2: "0::/path" */
        char *list = strchr(line, ':'), *path = list ? strchr(list + 1, ':') : NULL;
        if (!path)
            continue;
        *path++ = 0;
        list++;
        path[strcspn(path, "\n")] = 0;
        if (*list && !has_cpu(list))
            continue;
        snprintf(folder, sizeof folder, "%.1000s%s", root, *list ? "/cpu" : "");
        int cpus = least_of(folder, path);
        min = cpus > 0 && (min == 0 || cpus < min) ? cpus : min;
    }
    if (f)
        fclose(f);
    return min;
}
