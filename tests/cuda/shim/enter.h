/* enter.h - how code of the host gets at device memory, as a kernel would. */
#ifndef TESTS_CUDA_SHIM_ENTER_H
#define TESTS_CUDA_SHIM_ENTER_H

#ifdef __cplusplus
extern "C" {
#endif

/* All that is queued in this stream has run, NULL: in none, and memory is open from here ... */
void shim_enter_behind(void *stream);
void shim_leave(void); /* ... to here; what lies around allocations will be looked after */

#ifdef __cplusplus
}
#endif
#endif
