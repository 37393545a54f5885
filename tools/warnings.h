/* warnings.h - warnings about CPUs and GPUs that are too few or that ranks share. They are printed
 * to stderr.
 */
#ifndef LT_TOOLS_WARNINGS_H
#define LT_TOOLS_WARNINGS_H

#include "tools/options.h"

/* Warns if the user requested more threads than OpenMP's limit; the run uses as many as the limit
 * allows. Call this before choose_threads(), which sets a number if the user gave none. */
void warn_of_limit(const settings *s);
/* Warns if mpirun has bound the ranks, or the process with mpirun -np 1, to too few CPUs. */
void warn_if_bound(const char *what, int n, int cpus);
/* Warns of too few CPUs for the threads of this rank, or for all ranks. */
void warn_of_cpus(const settings *s, const lt_group *group, int cpus);
/* Warns if --device names the GPU of all n ranks, which are threads of this process. */
void warn_of_shared_gpu(const settings *s, int n);
/* The same for ranks that are processes; CUDA_VISIBLE_DEVICES may give them different GPUs of the
 * same number. Rank 0 warns. A collective; returns its errors, or LT_ENOMEM. */
LT_MUST lt_status warn_of_shared_gpus(const settings *s, const lt_ctx *ctx, lt_group *group);

#endif
