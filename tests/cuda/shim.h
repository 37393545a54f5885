/* shim.h - how tests control the CPU emulation of the CUDA runtime. Tests find these functions in
 * the plugin by dlsym(). */
#ifndef TESTS_CUDA_SHIM_H
#define TESTS_CUDA_SHIM_H

#include <stdint.h>

#define SHIM_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Counters: kernels that have run; waits of the calling thread for work that had not run, and those
 * of them that emptied a stream with kernels; kernels, copies and fills queued; calls of libraries
 * that compute. */
enum {
    SHIM_LAUNCHES,
    SHIM_WAITS,
    SHIM_DRAINS,
    SHIM_KERNELS,
    SHIM_COPIES,
    SHIM_FILLS,
    SHIM_CALLS,
    SHIM_COUNTS
};
SHIM_API int64_t shim_count(int what);
/* on: kernels, copies, fills and calls of libraries do nothing and return at once, so that only the
 * host's work remains. Copies to the host give zeros. */
SHIM_API void shim_set_null(int on);
/* The order in which the blocks of a grid and the threads of a block run. 0: ascending; 1:
 * descending; 2 and above: a permutation seeded with the number. */
SHIM_API void shim_set_order(int order);
/* Sets when streams run their work. "lazy": only when the host waits. "eager": immediately.
 * "random:SEED": whenever work is enqueued, a random stream runs part of its work, and the order
 * above is permuted. "null": never; see shim_set_null(). The variable SHIM sets the schedule at the
 * start. */
SHIM_API void shim_set_schedule(const char *schedule);
/* From now on, allocating or freeing memory and the first launch of each kernel on a device wait
 * for all sums of NCCL, while they block all other calls. *unfinished is the number of sums that
 * some ranks have posted and others have not. A call that waits for such a sum would never return,
 * so it records a fault. NULL, the default: these calls do not wait. */
SHIM_API void shim_watch_sums(const int *unfinished);
/* The emulated machine: driver version (0: no driver), number of devices (4 at the start), major
 * compute capability. */
SHIM_API void shim_set_machine(int driver, int devices, int capability);
/* The version of NCCL on device i is that of the library plus i * apart. 0 at the start. */
SHIM_API void shim_set_nccl_versions(int apart);
/* Records an error of a kernel. As on a GPU, nothing runs after that, and every call fails with the
 * first recorded error until shim_reset(). */
SHIM_API __attribute__((format(printf, 1, 2))) void shim_fault(const char *fmt, ...);
/* Runs all queued work, then clears the recorded error and restores the machine. */
SHIM_API void shim_reset(void);

/* Runs a probe of probes.cpp and copies what it wrote to out. Returns "" or the error string. */
SHIM_API const char *shim_probe(const char *name, int *out);

#ifdef __cplusplus
}
#endif
#endif
