/* enter.h - how code of the host gets at device memory, as a kernel would. */
#ifndef TESTS_CUDA_SHIM_ENTER_H
#define TESTS_CUDA_SHIM_ENTER_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* All that is queued in that stream has run, and memory is open from here ... NULL: no stream. */
void shim_enter_behind(void *stream);
void shim_leave(void);      /* ... to here; what lies around allocations will be looked after */
bool shim_has_failed(void); /* nothing runs any more */

#ifdef __cplusplus
}
#endif
#endif
