/* shim.h - what runtime.cpp (memory, streams), devices.cpp (the machine), block.cpp (blocks of
 * threads), schedule.cpp and reference.cpp (ops) declare for each other. */
#ifndef TESTS_CUDA_SHIM_SHIM_H
#define TESTS_CUDA_SHIM_SHIM_H

#include "cuda_runtime.h"
#include "tests/cuda/shim.h"

/* When the work in streams runs: see shim_set_schedule(). In schedule.cpp. */
enum shim_schedule { SHIM_LAZY, SHIM_EAGER, SHIM_RANDOM };
extern shim_schedule shim_when;
size_t shim_draw(size_t n); /* a random number from 0 to n - 1 */
/* Runs `thread` once for each thread of the grid. Device memory must be open. In block.cpp. */
void shim_run_grid(dim3 grid, dim3 block, const std::function<void()> &thread);
/* Adds work to the stream that counts as a kernel. In runtime.cpp. */
cudaError_t shim_enqueue(cudaStream_t stream, std::function<void()> run);
/* Whether a block of the host thread's device contains these bytes. In runtime.cpp. */
bool shim_owns(const void *p, size_t bytes);
/* The counters of the host thread: only SHIM_WAITS and SHIM_DRAINS. In devices.cpp. */
int64_t *shim_own_counts(void);
const char *shim_fault_text(void); /* text of the recorded fault, or "" */

#endif
