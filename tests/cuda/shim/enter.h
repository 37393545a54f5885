/* enter.h - gives host code access to device memory, as if it were a kernel. */
#ifndef TESTS_CUDA_SHIM_ENTER_H
#define TESTS_CUDA_SHIM_ENTER_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Runs everything that is queued in stream (or nothing if NULL), then opens device memory until
 * shim_leave(). Records a fault if the stream is of another device than the thread's. */
void shim_enter_after(void *stream);
void shim_check_memory(const void *p); /* records a fault if p is memory of another device */
/* Counts a call of a library that computes. Returns whether it must do nothing. */
bool shim_skips_call(void);
void shim_leave(void);      /* the next wait checks the guard bytes around all allocations */
bool shim_has_failed(void); /* a fault is recorded: nothing runs */

#ifdef __cplusplus
}
#endif
#endif
