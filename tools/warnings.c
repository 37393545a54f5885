/* warnings.c - see warnings.h. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/hash.h"
#include "core/tensor.h"
#include "tools/warnings.h"

void warn_of_limit(const settings *s)
{
    int limit = lt_thread_limit();
    if (s->config.threads > limit)
        fprintf(stderr,
                "luatrain: warning: OpenMP provides %d of the %d requested threads; "
                "OMP_THREAD_LIMIT or OMP_MAX_ACTIVE_LEVELS sets that limit\n",
                limit, s->config.threads);
}

static int machine_cpus(void) { return (int)sysconf(_SC_NPROCESSORS_ONLN); }

/* Whether mpirun has bound this process to some of the CPUs, and no quota allows fewer. By default
 * mpirun binds each rank to one core. */
static bool is_bound(void)
{
    cpu_set_t set;
    return getenv("OMPI_MCA_orte_bound_at_launch") && sched_getaffinity(0, sizeof set, &set) == 0 &&
           CPU_COUNT(&set) < machine_cpus() && CPU_COUNT(&set) == lt_cpu_count();
}

void warn_if_bound(const char *what, int n, int cpus)
{
    if (is_bound() && n * cpus < machine_cpus())
        fprintf(stderr,
                "luatrain: warning: mpirun binds %s to %d of %d CPUs; use mpirun --bind-to none to "
                "avoid this\n",
                what, cpus, machine_cpus());
}

void warn_of_cpus(const settings *s, const lt_group *group, int cpus)
{
    if (s->config.threads > cpus)
        fprintf(stderr, "luatrain: warning: rank %d has %d CPU%s for its %d threads%s\n",
                lt_group_rank(group), cpus, cpus == 1 ? "" : "s", s->config.threads,
                is_bound() ? "; mpirun --bind-to none gives it all CPUs" : "");
    else if (lt_group_rank(group) == 0)
        warn_if_bound("each rank", lt_group_size(group), cpus);
}

/* ==== GPUs ==================================================================================== */

/* Whether --device names a GPU by its number. */
static bool names_gpu(const settings *s) { return strncmp(s->config.device, "cuda:", 5) == 0; }

static void warn_of_sharing(int sharing, int n)
{
    fprintf(
        stderr,
        "luatrain: warning: %d of %d ranks share a GPU, because --device names one; --device cuda "
        "gives each rank of a host its own\n",
        sharing, n);
}

void warn_of_shared_gpu(const settings *s, int n)
{
    if (n > 1 && names_gpu(s))
        warn_of_sharing(n, n);
}

/* A digest of the GPU's name, which is unique across hosts. 0 if --device does not name it. */
static int64_t digest_of_gpu(const settings *s, const lt_ctx *ctx)
{
    char name[LT_COMM_NAME_BYTES] = "", library[LT_COMM_NAME_BYTES];
    lt_device *device = ctx->device;
    if (names_gpu(s) && device->comm_calls)
        (void)device->comm_calls->identify(device, name, library);
    return name[0] ? (int64_t)lt__fnv64(LT_FNV64_START, name, strlen(name)) : 0;
}

lt_status warn_of_shared_gpus(const settings *s, const lt_ctx *ctx, lt_group *group)
{
    int n = lt_group_size(group), sharing = 0;
    int64_t *all = calloc((size_t)n, sizeof *all);
    lt_sum sum = {"the GPUs that --device names", all, n, LT_I64, LT_I64, 1};
    if (!all)
        return lt_fail(LT_ENOMEM, "out of memory for %d ranks", n);
    all[lt_group_rank(group)] = digest_of_gpu(s, ctx);
    lt_status status = lt_group_allreduce(group, &sum);
    for (int i = 0; i < n; i++) {
        bool is_shared = false;
        for (int k = 0; k < n && all[i] != 0; k++)
            is_shared |= k != i && all[k] == all[i];
        sharing += is_shared;
    }
    if (status == LT_OK && sharing > 0 && lt_group_rank(group) == 0)
        warn_of_sharing(sharing, n);
    free(all);
    return status;
}
