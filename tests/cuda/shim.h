/* shim.h - what tests ask of the CPU that plays a CUDA device; by dlsym() in the plugin. */
#ifndef TESTS_CUDA_SHIM_H
#define TESTS_CUDA_SHIM_H

#include <stdint.h>

#define SHIM_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* So many kernels and copies have run, and so often has somebody waited for a stream or event; of
 * these, for all that was in the stream. */
enum { SHIM_LAUNCHES, SHIM_COPIES, SHIM_WAITS, SHIM_DRAINS, SHIM_COUNTS };
SHIM_API int64_t shim_count(int what);
/* Threads of a block run from 0 on, from the last one on, or, from 2 on, mixed by that number. */
SHIM_API void shim_order(int order);
/* What the machine has: the version of its driver, 0 for none; devices; their capability. */
SHIM_API void shim_machine(int driver, int devices, int capability);
/* Notes what a kernel has done wrong. As on a GPU nothing runs any more then, and all calls fail
 * with the first that was noted, until the device is renewed. */
SHIM_API __attribute__((format(printf, 1, 2))) void shim_fault(const char *fmt, ...);
SHIM_API void shim_renew(void);

#ifdef __cplusplus
}
#endif
#endif
