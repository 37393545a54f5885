/* enter.h - for the stand-ins: gives host code access to device memory, as if it were a kernel, and
 * says what the variables of the environment select. */
#ifndef TESTS_CUDA_SHIM_ENTER_H
#define TESTS_CUDA_SHIM_ENTER_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Runs everything that is queued in stream (or nothing if NULL), then opens device memory until
 * shim_leave(). Records a fault if the stream is of another device than the thread's. */
void shim_enter_after(void *stream);
int shim_device(void);                 /* the device of the host thread */
void shim_check_memory(const void *p); /* records a fault if p is memory of another device */
/* Counts a call of a library that computes. Returns whether it must do nothing. */
bool shim_skips_call(void);
void shim_leave(void);      /* the next wait checks the guard bytes around all allocations */
bool shim_has_failed(void); /* a fault is recorded: nothing runs */
/* Whether one of the words in $SHIM_HIDES is the name: driver, pinned (host memory), cuDNN,
 * cuBLASLt, NCCL, or an op. */
bool shim_hides(const char *name);
/* The same for a library, which reference kernels do not use. If so, writes the reason to text. */
bool shim_hides_library(const char *name, char *text, size_t bytes);
bool shim_has_reference_ops(void); /* see reference.cpp */

#ifdef __cplusplus
}
#endif
#endif
