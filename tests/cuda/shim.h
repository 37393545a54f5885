/* shim.h - how tests control the CPU emulation of the CUDA runtime. Tests find these functions in
 * the plugin by dlsym(). */
#ifndef TESTS_CUDA_SHIM_H
#define TESTS_CUDA_SHIM_H

#include <stdint.h>

#define SHIM_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Counters: kernels that have run; waits of the host for a stream or event, and those waits that
 * emptied a stream with pending work; kernels, copies and fills queued; calls of libraries that
 * compute. */
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
 * host's work remains. Copies to the host give zeros. The environment variable SHIM=null sets this
 * when the plugin is loaded. */
SHIM_API void shim_set_null(int on);
/* The order in which the threads of a block run. 0: ascending; 1: descending; 2 and above: a
 * permutation seeded with the number. */
SHIM_API void shim_set_order(int order);
/* The emulated machine: driver version (0: no driver), number of devices, major compute
 * capability. */
SHIM_API void shim_set_machine(int driver, int devices, int capability);
/* Records an error of a kernel. As on a GPU, nothing runs after that, and every call fails with the
 * first recorded error until shim_reset(). */
SHIM_API __attribute__((format(printf, 1, 2))) void shim_fault(const char *fmt, ...);
/* Runs all queued work, then clears the recorded error. */
SHIM_API void shim_reset(void);

#ifdef __cplusplus
}
#endif
#endif
